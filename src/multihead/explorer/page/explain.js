// Where a number came from: the line that made it, with the real numbers, and the terms it is the sum of.
// A cell is {name, index}; in a pattern an index may hold null, which stands for the whole axis.

import { pairOf } from "./attention.js";
import { offset } from "./tensor.js";

/** @typedef {{name: string, index: number[]}} Cell */
/** @typedef {{name: string, index: (number | null)[]}} Pattern */
/** What there is to explain: the layer, its tensors by name, the labels of queries and keys, what is edited.
 * @typedef {{layer: import("./attention.js").Layer, tensors: Record<string, any>, labels: string[], keyLabels: string[], off: Map<number, string>, mixing: boolean}} Scene */
/** `value`: how much it adds; `cells`: where it came from, the first being the one to follow.
 * @typedef {{label: string, value: number, detail: string, sum?: string, cells: Cell[], head?: number}} Term */
/** @typedef {{cell: Cell, value: number, title: string, formula: string, lines: string[], terms: Term[], rest: {count: number, value: number} | null, bars: "signed" | "share"}} Explanation */

const MOST = 8; // terms shown

/** "weights.2.5.1" @param {Cell} cell */
export function formatCell(cell) {
  return [cell.name, ...cell.index].join(".");
}

/** @param {string} text @returns {Cell | null} */
export function parseCell(text) {
  const match = /^([a-z_]+)((?:\.\d{1,6})+)$/.exec(text);
  return match ? { name: match[1], index: match[2].slice(1).split(".").map(Number) } : null;
}

/** Whether there is such a number. @param {Scene} scene @param {Cell | null} cell */
export function exists(scene, cell) {
  const t = cell && scene.tensors[cell.name];
  return Boolean(t && cell && t.shape.length === cell.index.length && cell.index.every((i, axis) => i < t.shape[axis]));
}

/** @param {Scene} scene @param {Cell} cell @returns {number} */
export function valueOf(scene, cell) {
  const t = scene.tensors[cell.name];
  return t.data[offset(t.shape, cell.index)];
}

/** A number as the page writes it: four figures, no exponent where it can be helped. @param {number} value */
export function numberText(value) {
  if (value === undefined || Number.isNaN(value)) return "NaN";
  if (value === Infinity) return "∞";
  if (value === -Infinity) return "−∞";
  const size = Math.abs(value);
  let text;
  if (size === 0) text = "0";
  else if (size < 0.0005) text = size.toExponential(1).replace("e-", "·10⁻").replace(/\d+$/, (n) => [...n].map((d) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(d)]).join(""));
  else text = size >= 1000 ? size.toFixed(0) : size.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : 3);
  return value < 0 ? `−${text}` : text;
}

/** Which key/value head a query head reads. @param {Scene} scene @param {number} h */
export function sharedHead(scene, h) {
  return Math.floor(h / (scene.layer.sizes.H / scene.layer.sizes.G));
}

/** The cells that a cell, or a pattern of cells, was made of: one step back. @param {Scene} scene @param {Pattern} of @returns {Pattern[]} */
export function sources(scene, of) {
  const [a, b, c] = of.index;
  const { V, H } = scene.layer.sizes;
  const shared = (/** @type {number | null} */ h) => (h === null ? null : sharedHead(scene, h));
  switch (of.name) {
    case "output":
      if (!scene.mixing) return [{ name: "merged", index: [a, b] }];
      return [{ name: "merged", index: [a, null] }, { name: "w_o", index: [null, null, b] }];
    case "merged":
      return [{ name: "transposed", index: b === null ? [a, null, null] : [a, Math.floor(b / V), b % V] }];
    case "transposed":
      return [{ name: "heads", index: [b, a, c] }];
    case "heads":
      return [{ name: "weights", index: [a, b, null] }, { name: "v_heads", index: [shared(a), null, c] }];
    case "weights":
      return [{ name: "masked", index: [a, b, null] }];
    case "masked":
      return [{ name: "scores", index: [a, b, c] }];
    case "scores":
      return [{ name: "q_heads", index: [a, b, null] }, { name: "k_heads", index: [shared(a), c, null] }];
    case "q_heads":
    case "k_heads":
    case "v_heads":
      return turnedTogether(scene, of).map((d) => ({ name: of.name[0], index: [b, a, d] }));
    case "q":
    case "k":
    case "v": {
      const from = of.name !== "q" && scene.tensors.context ? "context" : "x";
      return [{ name: from, index: [a, null] }, { name: `w_${of.name}`, index: [null, b, c] }];
    }
    default:
      return [];
  }
}

/** Which of a head's numbers before QK-norm and RoPE make this one. @returns {(number | null)[]} */
function turnedTogether(/** @type {Scene} */ scene, /** @type {Pattern} */ of) {
  const d = of.index[2];
  if (of.name === "v_heads" || d === null) return [d];
  if (scene.layer.qk_norm) return [null];
  const rope = scene.layer.rope;
  if (!rope || d >= rope.dim) return [d];
  return rope.interleaved ? pairOf(d >> 1, rope) : pairOf(d % (rope.dim / 2), rope);
}

/** Everything a cell was made of, down to the input: by name, the patterns that light up. @param {Scene} scene @param {Pattern} of @returns {Map<string, Pattern[]>} */
export function ancestry(scene, of) {
  const found = new Map([[of.name, [of]]]);
  let edge = [of];
  while (edge.length) {
    const next = [];
    for (const pattern of edge.flatMap((p) => sources(scene, p))) {
      const known = found.get(pattern.name) ?? [];
      if (known.some((k) => k.index.every((i, axis) => i === null || i === pattern.index[axis]))) continue;
      found.set(pattern.name, [...known, pattern]);
      next.push(pattern);
    }
    edge = next;
  }
  return found;
}

/** @param {string} label */
export function quoted(label) {
  return `“${label}”`;
}

/** A cell's name for people: weights[head 3, “pizza” → “love”]. @param {Scene} scene @param {Cell} cell */
export function titleOf(scene, cell) {
  const [a, b, c] = cell.index;
  const query = (/** @type {number} */ n) => quoted(scene.labels[n] ?? String(n));
  const key = (/** @type {number} */ n) => quoted(scene.keyLabels[n] ?? String(n));
  switch (cell.name) {
    case "x":
    case "output":
    case "merged":
      return `${cell.name}[${query(a)}, ${b}]`;
    case "context":
      return `context[${key(a)}, ${b}]`;
    case "q":
    case "transposed":
      return `${cell.name}[${query(a)}, head ${b}, ${c}]`;
    case "k":
    case "v":
      return `${cell.name}[${key(a)}, head ${b}, ${c}]`;
    case "q_heads":
    case "heads":
      return `${cell.name}[head ${a}, ${query(b)}, ${c}]`;
    case "k_heads":
    case "v_heads":
      return `${cell.name}[head ${a}, ${key(b)}, ${c}]`;
    case "scores":
    case "masked":
    case "weights":
      return `${cell.name}[head ${a}, ${query(b)} → ${key(c)}]`;
    case "w_o":
      return `W_o[head ${a}, ${b}, ${c}]`;
    case "w_q":
    case "w_k":
    case "w_v":
      return `W_${cell.name[2]}[${a}, head ${b}, ${c}]`;
    default:
      return `${cell.name}[${cell.index.join(", ")}]`;
  }
}

/** The largest terms, and what the others add up to. @param {Term[]} terms */
function largest(terms, most = MOST) {
  const sorted = [...terms].sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
  const others = sorted.slice(most);
  const rest = others.length ? { count: others.length, value: others.reduce((sum, term) => sum + term.value, 0) } : null;
  return { terms: sorted.slice(0, most), rest };
}

/** "0.31·1.20 + 0.05·(−0.40) + …" @param {Term[]} terms @param {boolean} more */
function sumText(terms, more) {
  const parts = terms.slice(0, 3).map((term, n) => (n === 0 ? "" : " + ") + (term.sum ?? term.detail));
  return parts.join("") + (more || terms.length > 3 ? " + …" : "");
}

const factor = (/** @type {number} */ value) => (value < 0 ? `(${numberText(value)})` : numberText(value));

/** Where a number came from. @param {Scene} scene @param {Cell} cell @returns {Explanation} */
export function explain(scene, cell) {
  const value = valueOf(scene, cell);
  const made = maker(scene, cell, value);
  return { cell, value, title: titleOf(scene, cell), rest: null, terms: [], bars: "signed", ...made };
}

/** @param {Scene} scene @param {Cell} cell @param {number} value @returns {{formula: string, lines: string[], terms?: Term[], rest?: any, bars?: "signed" | "share"}} */
function maker(scene, cell, value) {
  const { tensors: t, layer } = scene;
  const [a, b, c] = cell.index;
  const { V } = layer.sizes;
  const copy = (/** @type {string} */ formula, /** @type {Cell} */ from, /** @type {string} */ why) => ({
    formula,
    lines: [why],
    terms: [{ label: titleOf(scene, from), value, detail: numberText(value), cells: [from] }],
  });
  switch (cell.name) {
    case "q":
    case "k":
    case "v":
      return product(scene, cell, value);
    case "q_heads":
    case "k_heads":
    case "v_heads":
      return turned(scene, cell, value, copy);
    case "scores":
      return dot(scene, cell, value);
    case "masked": {
      const from = { name: "scores", index: cell.index };
      const hidden = value === -Infinity;
      const raw = valueOf(scene, from);
      const made = copy("masked = scores where the mask allows it, −∞ elsewhere", from, hidden ? "the mask hides this key from this query: −∞, so that its weight is 0" : "the mask lets it through unchanged");
      made.terms[0].value = raw;
      made.terms[0].detail = numberText(raw);
      if (!hidden && layer.softcap) made.lines = [`${layer.softcap}·tanh(${numberText(raw)} / ${layer.softcap}) = ${numberText(value)}`];
      return made;
    }
    case "weights":
      return softmax(scene, cell, value);
    case "heads":
      return mixed(scene, cell, value);
    case "transposed":
      return copy("(H, N, V) → (N, H, V)", { name: "heads", index: [b, a, c] }, "the same number in another place: positions move in front of heads again");
    case "merged":
      return copy("merged = Merge(head₁ … head_τ)", { name: "transposed", index: [a, Math.floor(b / V), b % V] }, `the same number: column ${b} is number ${b % V} of head ${Math.floor(b / V)}`);
    case "output":
      if (!scene.mixing) return copy("output = merged, without W_o", { name: "merged", index: [a, b] }, `without W_o this number is head ${Math.floor(b / V)}'s alone`);
      return written(scene, cell, value);
    case "x":
    case "context":
      return { formula: `${cell.name} is what goes into the layer`, lines: ["the input of the layer: no step before this one"] };
    default:
      return { formula: "a parameter of the layer", lines: ["learnt in training: no step makes it"] };
  }
  function turned(/** @type {Scene} */ s, /** @type {Cell} */ of, /** @type {number} */ made, /** @type {typeof copy} */ same) {
    const before = of.name[0];
    const from = { name: before, index: [b, a, c] };
    const moved = "the same number in another place: heads move in front of positions";
    if (!t[before]) return { formula: "(N, H, D) → (H, N, D)", lines: [moved] };
    if (of.name === "v_heads" || (!layer.qk_norm && !(layer.rope && c < layer.rope.dim))) return same("(N, H, D) → (H, N, D)", from, moved);
    const parts = turnedTogether(s, of).flatMap((d) => (d === null ? [...Array(layer.sizes.D).keys()] : [d]));
    const terms = parts.map((d) => {
      const place = { name: before, index: [b, a, /** @type {number} */ (d)] };
      return { label: titleOf(s, place), value: valueOf(s, place), detail: numberText(valueOf(s, place)), cells: [place] };
    });
    if (layer.qk_norm) return { formula: `${of.name} = norm(${before})${layer.rope ? ", turned by RoPE" : ""}`, lines: ["the head's numbers are brought to the same length"], ...largest(terms) };
    return rotated(s, of, made, terms);
  }
}

function rotated(/** @type {Scene} */ scene, /** @type {Cell} */ cell, /** @type {number} */ value, /** @type {Term[]} */ pair) {
  const rope = /** @type {{dim: number, interleaved: boolean}} */ (scene.layer.rope);
  const [, n, d] = cell.index;
  const half = rope.dim / 2;
  const p = rope.interleaved ? d >> 1 : d % half;
  const cos = scene.tensors.rope_cos.data[n * half + p];
  const sin = scene.tensors.rope_sin.data[n * half + p];
  const first = pairOf(p, rope)[0] === d;
  const factors = first ? [cos, -sin] : [sin, cos];
  const terms = pair.map((term, i) => ({ ...term, value: term.value * factors[i], detail: `${factor(term.value)}·${factor(factors[i])}` }));
  return {
    formula: first ? "a′ = a·cos − b·sin (RoPE, position " + n + ")" : "b′ = a·sin + b·cos (RoPE, position " + n + ")",
    lines: [`${sumText(terms, false)} = ${numberText(value)}`, "heads move in front of positions, and the pair turns by its position"],
    terms,
  };
}

function product(/** @type {Scene} */ scene, /** @type {Cell} */ cell, /** @type {number} */ value) {
  const { name, index: [n, h, d] } = cell;
  const { tensors: t } = scene;
  const from = name !== "q" && t.context ? "context" : "x";
  const w = t[`w_${name}`];
  const formula = `${name} = ${from}·W_${name}`;
  if (!w) return { formula, lines: ["this model does not give its weights: the terms cannot be shown"] };
  const [E, H, D] = w.shape;
  /** @type {Term[]} */
  const terms = [];
  for (let e = 0; e < E; e++) {
    const item = t[from].data[n * E + e];
    const weight = w.data[(e * H + h) * D + d];
    terms.push({ label: `${from}[${e}]·W[${e}]`, value: item * weight, detail: `${factor(item)}·${factor(weight)}`, cells: [{ name: from, index: [n, e] }, { name: `w_${name}`, index: [e, h, d] }] });
  }
  const bias = t[`b_${name}`];
  return withBias(terms, bias ? bias.data[h * D + d] : 0, `b_${name}`, value, formula + (bias ? ` + b_${name}` : ""));
}

function withBias(/** @type {Term[]} */ terms, /** @type {number} */ bias, /** @type {string} */ name, /** @type {number} */ value, /** @type {string} */ formula) {
  if (bias) terms.push({ label: `the bias ${name}`, value: bias, detail: factor(bias), cells: [] });
  const shown = largest(terms);
  return { formula, lines: [`${sumText(shown.terms, shown.rest !== null)} = ${numberText(value)}`, `${terms.length} terms`], ...shown };
}

function dot(/** @type {Scene} */ scene, /** @type {Cell} */ cell, /** @type {number} */ value) {
  const [h, i, j] = cell.index;
  const { tensors: t, layer } = scene;
  const g = sharedHead(scene, h);
  const formula = "scores = q·kᵀ·scale";
  if (!t.q_heads || !t.k_heads) return { formula, lines: ["this model does not give q and k: the terms cannot be shown"] };
  const [, Q, D] = t.q_heads.shape;
  const K = t.k_heads.shape[1];
  const terms = [];
  for (let d = 0; d < D; d++) {
    const q = t.q_heads.data[(h * Q + i) * D + d];
    const k = t.k_heads.data[(g * K + j) * D + d];
    terms.push({ label: `q[${d}]·k[${d}]`, value: q * k * layer.scale, detail: `${factor(q)}·${factor(k)}`, cells: [{ name: "q_heads", index: [h, i, d] }, { name: "k_heads", index: [g, j, d] }] });
  }
  const shown = largest(terms);
  return { formula, lines: [`(${sumText(shown.terms, shown.rest !== null)})·${numberText(layer.scale)} = ${numberText(value)}`, `${D} terms; scale = ${numberText(layer.scale)}`], ...shown };
}

function softmax(/** @type {Scene} */ scene, /** @type {Cell} */ cell, /** @type {number} */ value) {
  const [h, q, k] = cell.index;
  const { tensors: t } = scene;
  const [, Q, K] = t.weights.shape;
  const row = (h * Q + q) * K;
  const formula = "weights = softmax(masked)";
  if (!t.masked) return { formula, lines: ["this model gives its weights only"] };
  const sink = t.sinks ? t.sinks.data[h] : -Infinity;
  let top = sink;
  for (let j = 0; j < K; j++) top = Math.max(top, t.masked.data[row + j]);
  if (top === -Infinity) return { formula, lines: ["this query may see nothing: its weights are all 0"] };
  let total = Math.exp(sink - top);
  for (let j = 0; j < K; j++) total += Math.exp(t.masked.data[row + j] - top);
  const own = t.masked.data[row + k];
  /** @type {Term[]} */
  const terms = [];
  for (let j = 0; j < K; j++) {
    const masked = t.masked.data[row + j];
    terms.push({ label: quoted(scene.keyLabels[j] ?? String(j)), value: t.weights.data[row + j], detail: masked === -Infinity ? "hidden" : `e^${factor(masked)}`, cells: [{ name: "masked", index: [h, q, j] }] });
  }
  if (t.sinks) terms.push({ label: "the sink", value: Math.exp(sink - top) / total, detail: `e^${factor(sink)}`, cells: [] });
  const shown = largest(terms);
  if (!shown.terms.includes(terms[k])) { // the number itself is always among its row
    const out = /** @type {Term} */ (shown.terms.pop());
    shown.terms.push(terms[k]);
    if (shown.rest) shown.rest.value += out.value - terms[k].value;
  }
  const lines = [
    own === -Infinity ? "hidden: e^(−∞) = 0, so the weight is 0" : `e^${factor(own)} / Σ e^masked = ${numberText(Math.exp(own - top))} / ${numberText(total)} = ${numberText(value)}`,
    `both shifted by the row's largest score, ${numberText(top)}; the row's weights add up to ${t.sinks ? "1 with the sink" : "1"}`,
  ];
  return { formula, lines, ...shown, bars: /** @type {"share"} */ ("share") };
}

function mixed(/** @type {Scene} */ scene, /** @type {Cell} */ cell, /** @type {number} */ value) {
  const [h, q, d] = cell.index;
  const { tensors: t } = scene;
  const how = scene.off.get(h);
  const formula = "heads = weights·v";
  if (how) return { formula, lines: [how === "mean" ? "this head is set to its mean over all positions" : "this head is switched off: 0"] };
  if (!t.v_heads) return { formula, lines: ["this model does not give v: the terms cannot be shown"] };
  const [, Q, K] = t.weights.shape;
  const V = t.v_heads.shape[2];
  const g = sharedHead(scene, h);
  const terms = [];
  for (let k = 0; k < K; k++) {
    const weight = t.weights.data[(h * Q + q) * K + k];
    const v = t.v_heads.data[(g * K + k) * V + d];
    terms.push({ label: quoted(scene.keyLabels[k] ?? String(k)), value: weight === 0 ? 0 : weight * v, detail: `${numberText(weight)}·${factor(v)}`, cells: [{ name: "weights", index: [h, q, k] }, { name: "v_heads", index: [g, k, d] }] });
  }
  const shown = largest(terms);
  return { formula, lines: [`${sumText(shown.terms, shown.rest !== null)} = ${numberText(value)}`, `${K} value rows, weighted`], ...shown };
}

function written(/** @type {Scene} */ scene, /** @type {Cell} */ cell, /** @type {number} */ value) {
  const [n, e] = cell.index;
  const { tensors: t } = scene;
  const formula = "output = merged·W_o";
  if (!t.w_o || !t.merged) return { formula, lines: ["this model does not give W_o: the terms cannot be shown"] };
  const [H, V, E] = t.w_o.shape;
  /** @type {Term[]} */
  const terms = [];
  for (let h = 0; h < H; h++) {
    let sum = 0;
    let most = 0;
    let at = 0;
    for (let d = 0; d < V; d++) {
      const part = t.merged.data[n * H * V + h * V + d] * t.w_o.data[(h * V + d) * E + e];
      sum += part;
      if (Math.abs(part) > most) [most, at] = [Math.abs(part), d];
    }
    terms.push({ label: `head ${h}`, value: sum, sum: factor(sum), detail: `largest: ${factor(t.merged.data[n * H * V + h * V + at])}·${factor(t.w_o.data[(h * V + at) * E + e])}`, head: h, cells: [{ name: "merged", index: [n, h * V + at] }, { name: "w_o", index: [h, at, e] }] });
  }
  const made = withBias(terms, t.b_o ? t.b_o.data[e] : 0, "b_o", value, formula + (t.b_o ? " + b_o" : ""));
  made.lines[1] = `${H} heads of ${V} terms each, added up: here the heads mix`;
  return made;
}

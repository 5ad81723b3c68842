// Masks: what each query may see. true means may attend. A mask is a short text, so that it fits in the address:
// "none" · "causal" · "causal:w" · "window:left,right" · "prefix:n" · "padding:n" ·
// "documents:2,3" · "documents:2,3+causal" · "drawn:rows" (four cells in each hexadecimal digit, row by row).
// Query q of Q stands at position q + (K − Q) among the K keys, as in `multihead.masks`.

/** @typedef {{kind: string, numbers: number[], causal?: boolean, cells?: Uint8Array}} Mask */

export const KINDS = [
  { kind: "none", name: "None", does: "every item sees every item" },
  { kind: "causal", name: "Causal", does: "an item sees itself and what came before" },
  { kind: "window", name: "Window", does: "an item sees a few neighbours on each side" },
  { kind: "prefix", name: "Prefix", does: "all see the first items, the rest is causal" },
  { kind: "padding", name: "Padding", does: "the last items are filling that nobody sees" },
  { kind: "documents", name: "Documents", does: "several texts in one row, each sees only itself" },
  { kind: "drawn", name: "By hand", does: "cell by cell, as you draw it" },
];

const whole = (/** @type {string} */ text) => (/^\d{1,6}$/.test(text) ? Number(text) : NaN);

/** A mask from its text; throws with words where it is none. @param {string} text @returns {Mask} */
export function parseMask(text) {
  const [first, ...joined] = text.split("+");
  const [kind, rest = ""] = first.split(":");
  const parts = rest === "" ? [] : rest.split(",");
  const wrong = (/** @type {string} */ expected) => new Error(`mask=${JSON.stringify(text.slice(0, 60))}: expected ${expected}`);
  if (joined.length > 1 || (joined.length === 1 && (joined[0] !== "causal" || kind !== "documents"))) {
    throw wrong('only "documents:…" to be joined, with "+causal"');
  }
  const numbers = parts.map(whole);
  if (kind !== "drawn" && numbers.some(Number.isNaN)) throw wrong("integers after the colon");
  switch (kind) {
    case "none":
      if (parts.length) throw wrong('"none" alone');
      return { kind, numbers: [] };
    case "causal":
      if (numbers.length > 1 || numbers[0] === 0) throw wrong('"causal" or "causal:window", a window of at least 1');
      return { kind, numbers };
    case "window":
      if (numbers.length !== 2) throw wrong('"window:left,right"');
      return { kind, numbers };
    case "prefix":
      if (numbers.length !== 1) throw wrong('"prefix:n"');
      return { kind, numbers };
    case "padding":
      if (numbers.length !== 1) throw wrong('"padding:n"');
      return { kind, numbers };
    case "documents":
      if (!numbers.length) throw wrong('"documents:2,3", the length of each document');
      return { kind, numbers, causal: joined.length === 1 };
    case "drawn": {
      if (!/^[0-9a-f]*$/.test(rest)) throw wrong("hexadecimal digits after drawn:");
      const cells = new Uint8Array(rest.length * 4);
      [...rest].forEach((digit, n) => {
        const bits = parseInt(digit, 16);
        for (let b = 0; b < 4; b++) cells[4 * n + b] = (bits >> (3 - b)) & 1;
      });
      return { kind, numbers: [], cells };
    }
    default:
      throw wrong(`one of ${KINDS.map((k) => k.kind).join(", ")}`);
  }
}

/** The text of a mask. @param {Mask} mask @returns {string} */
export function formatMask(mask) {
  if (mask.kind === "drawn") {
    const cells = mask.cells ?? new Uint8Array();
    let text = "drawn:";
    for (let at = 0; at < cells.length; at += 4) {
      let bits = 0;
      for (let b = 0; b < 4; b++) bits = 2 * bits + (cells[at + b] ?? 0);
      text += bits.toString(16);
    }
    return text;
  }
  return mask.kind + (mask.numbers.length ? `:${mask.numbers.join(",")}` : "") + (mask.causal ? "+causal" : "");
}

/** A drawn mask of these cells. @param {Uint8Array} allowed @returns {Mask} */
export function drawn(allowed) {
  return { kind: "drawn", numbers: [], cells: allowed.slice() };
}

/** Which cells are visible: (Q, K) row by row, 1 where the query may attend. Lengths that no longer fit the number of
 * items are fitted to it: a text that is being typed must not break its mask. @param {Mask} mask @param {number} Q @param {number} K */
export function allowed(mask, Q, K) {
  const cells = new Uint8Array(Q * K);
  if (mask.kind === "drawn") {
    const given = mask.cells ?? new Uint8Array();
    const fits = given.length >= Q * K && given.length < Q * K + 4;
    return fits ? given.slice(0, Q * K) : cells.fill(1);
  }
  const [a, b] = mask.numbers;
  const document = mask.kind === "documents" ? documentOf(mask.numbers, K) : null;
  for (let q = 0; q < Q; q++) {
    const i = q + (K - Q);
    for (let k = 0; k < K; k++) {
      let seen = true;
      if (mask.kind === "causal") seen = k <= i && (a === undefined || k > i - a);
      else if (mask.kind === "window") seen = k >= i - a && k <= i + b;
      else if (mask.kind === "prefix") seen = k < a || k <= i;
      else if (mask.kind === "padding") seen = k < a;
      else if (document) seen = document[k] === document[Math.max(i, 0)] && (!mask.causal || k <= i);
      cells[q * K + k] = seen ? 1 : 0;
    }
  }
  return cells;
}

/** The lengths of documents, cut or filled so that they add up to the number of items. @param {number[]} lengths @param {number} count */
export function fitDocuments(lengths, count) {
  const fitted = [];
  let left = count;
  for (const length of lengths) {
    if (left <= 0) break;
    fitted.push(Math.min(length, left));
    left -= length;
  }
  if (left > 0) fitted.push(left);
  return fitted;
}

function documentOf(/** @type {number[]} */ lengths, /** @type {number} */ count) {
  const of = new Int32Array(count);
  let at = 0;
  fitDocuments(lengths, count).forEach((length, n) => {
    of.fill(n, at, at + length);
    at += length;
  });
  return of;
}

/** In words: "causal, the newest 4". @param {Mask} mask */
export function describeMask(mask) {
  const [a, b] = mask.numbers;
  switch (mask.kind) {
    case "none":
      return "no mask: every item sees every item";
    case "causal":
      return a === undefined ? "causal: an item sees itself and what came before" : `causal: an item sees the newest ${a}, itself included`;
    case "window":
      return `window: an item sees ${a} before it and ${b} after it`;
    case "prefix":
      return `prefix: all see the first ${a}, the rest is causal`;
    case "padding":
      return `padding: the first ${a} items are real, nobody sees the rest`;
    case "documents":
      return `documents of ${mask.numbers.join(", ")} items${mask.causal ? ", each causal" : ""}`;
    default:
      return "drawn by hand";
  }
}

/** Whether some query sees a key that comes after it. @param {Uint8Array} cells @param {number} Q @param {number} K */
export function seesFuture(cells, Q, K) {
  for (let q = 0; q < Q; q++) for (let k = q + (K - Q) + 1; k < K; k++) if (cells[q * K + k]) return true;
  return false;
}

/** The later item that each query leans on most, the mean over heads: {key, weight} for each query, or null.
 * @param {Float32Array} weights (H, Q, K) @param {number} H @param {number} Q @param {number} K
 * @returns {({key: number, weight: number, total: number} | null)[]} */
export function leansOn(weights, H, Q, K) {
  const found = [];
  for (let q = 0; q < Q; q++) {
    let best = null;
    let total = 0;
    for (let k = Math.max(q + (K - Q) + 1, 0); k < K; k++) {
      let weight = 0;
      for (let h = 0; h < H; h++) weight += weights[(h * Q + q) * K + k] / H;
      total += weight;
      if (weight > 0 && (!best || weight > best.weight)) best = { key: k, weight, total: 0 };
    }
    if (best) best.total = total;
    found.push(best);
  }
  return found;
}

/** The mask as Python is asked for it; lengths fitted to the number of items. @param {Mask} mask @param {number} count */
export function maskRequest(mask, count) {
  const [a, b] = mask.numbers;
  switch (mask.kind) {
    case "causal":
      return a === undefined ? { kind: "causal" } : { kind: "causal", window: a };
    case "window":
      return { kind: "window", left: a, right: b };
    case "prefix":
      return { kind: "prefix", n: a };
    case "padding":
      return { kind: "padding", length: Math.min(a, count) };
    case "documents": {
      const lengths = fitDocuments(mask.numbers, count);
      return mask.causal ? { kind: "documents", lengths, causal: true } : { kind: "documents", lengths };
    }
    case "drawn": {
      const cells = allowed(mask, count, count);
      const rows = [];
      for (let q = 0; q < count; q++) rows.push(cells.subarray(q * count, (q + 1) * count).join(""));
      return { kind: "drawn", rows };
    }
    default:
      return { kind: "none" };
  }
}

/** A mask as an answer of Python has it. @param {any} given @returns {Mask} */
export function maskOfAnswer(given) {
  if (!given) return { kind: "none", numbers: [] };
  switch (given.kind) {
    case "causal":
      return { kind: "causal", numbers: given.window === undefined ? [] : [given.window] };
    case "window":
      return { kind: "window", numbers: [given.left, given.right] };
    case "prefix":
      return { kind: "prefix", numbers: [given.n] };
    case "padding":
      return { kind: "padding", numbers: [given.length] };
    case "documents":
      return { kind: "documents", numbers: given.lengths, causal: given.causal === true };
    case "drawn":
      return drawn(Uint8Array.from(given.rows.join(""), Number));
    default:
      return { kind: "none", numbers: [] };
  }
}

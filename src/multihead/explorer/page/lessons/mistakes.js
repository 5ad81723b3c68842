// Layers that are broken on purpose, each by one of the doctor's mistakes, under the doctor's name for it.

import { hide, mix, output, project, score, weigh } from "../attention.js";
import { swapAxes, tensor } from "../tensor.js";
import { away } from "./layer.js";

/** @typedef {import("./layer.js").Learner} Learner */
/** @typedef {Record<string, import("../attention.js").Floats>} Tensors */
/** What each step takes, and what it makes of it. @typedef {(layer: Learner, t: Tensors) => Tensors} Step */

/** The seven steps, one by one, as they should be. @type {Step[]} */
const RIGHT = [
  ({ known }) => ({ q: project(known.x, known.w_q), k: project(known.x, known.w_k), v: project(known.x, known.w_v) }),
  (_, t) => ({ q_heads: swapAxes(t.q), k_heads: swapAxes(t.k), v_heads: swapAxes(t.v) }),
  (layer, t) => {
    const scores = score(t.q_heads, t.k_heads, layer.about.scale);
    const masked = hide(scores, layer.allowed);
    return { scores, masked, weights: weigh(masked) };
  },
  (_, t) => ({ heads: mix(t.weights, t.v_heads) }),
  (_, t) => ({ transposed: swapAxes(t.heads) }),
  (_, t) => ({ merged: tensor([t.transposed.shape[0], t.transposed.shape[1] * t.transposed.shape[2]], t.transposed.data) }),
  (layer, t) => ({ output: output(t.merged, layer.known.w_o) }),
];

/** What a step makes that is looked at. */
export const SHOWN = [["q", "k", "v"], ["q_heads", "k_heads", "v_heads"], ["scores", "masked", "weights"], ["heads"], ["transposed"], ["merged"], ["output"]];

/** A tensor's numbers in the order they lie, under another shape: what `view` does. @param {import("../attention.js").Floats} t */
export const viewed = (t) => tensor([t.shape[1], t.shape[0], t.shape[2]], t.data);

/** @param {Learner} layer @param {Tensors} t @param {(scores: import("../attention.js").Floats) => import("../attention.js").Floats} masked @param {(masked: import("../attention.js").Floats) => import("../attention.js").Floats} [soft] @param {number} [scale] */
function scored(layer, t, masked, soft = (m) => weigh(m), scale = layer.about.scale) {
  const scores = score(t.q_heads, t.k_heads, scale);
  const hidden = masked(scores);
  return { scores, masked: hidden, weights: soft(hidden) };
}

/** softmax down the columns. @param {import("../attention.js").Floats} masked */
function overQueries(masked) {
  const [H, Q, K] = masked.shape;
  const turned = tensor([H, K, Q]);
  for (let h = 0; h < H; h++) for (let q = 0; q < Q; q++) for (let k = 0; k < K; k++) turned.data[(h * K + k) * Q + q] = masked.data[(h * Q + q) * K + k];
  const soft = weigh(turned);
  const out = tensor([H, Q, K]);
  for (let h = 0; h < H; h++) for (let q = 0; q < Q; q++) for (let k = 0; k < K; k++) out.data[(h * Q + q) * K + k] = soft.data[(h * K + k) * Q + q];
  return out;
}

/** The doctor's name, the step, what it does there instead, and why that is wrong.
 * @type {{name: string, step: number, made: Step, why: string}[]} */
export const MISTAKES = [
  { name: "mask missing", step: 3, made: (layer, t) => scored(layer, t, (s) => s), why: "Nothing is hidden: the first word already sees the last one. A language model would read the answer instead of guessing it." },
  { name: "W_o missing", step: 7, made: (_, t) => ({ output: t.merged }), why: "What the heads put side by side is handed on as it is. Each group of outputs knows one head only: nothing mixes them." },
  { name: "heads merged without transposing back", step: 5, made: (_, t) => ({ transposed: viewed(t.heads) }), why: "The shape is right, so nothing complains. But the numbers were not moved: the row of the first word holds what head 0 found for several words." },
  { name: "softmax over queries", step: 3, made: (layer, t) => scored(layer, t, (s) => hide(s, layer.allowed), overQueries), why: "Each column adds up to 1 where each row should. A row is then no share of anything." },
  { name: "q used as k", step: 1, made: ({ known }) => ({ q: project(known.x, known.w_q), k: project(known.x, known.w_q), v: project(known.x, known.w_v) }), why: "k is made with W_q. Each word then compares its question with everybody's question: W_k is never used." },
  { name: "scale missing", step: 3, made: (layer, t) => scored(layer, t, (s) => hide(s, layer.allowed), undefined, 1), why: "The scores are not divided by √D, the root of the width of a head. They come out too large, and nearly all weight falls on one word." },
  { name: "k used as v", step: 4, made: (_, t) => ({ heads: mix(t.weights, t.k_heads) }), why: "The weights are right, and what they mix is not: keys instead of values. W_v is never used." },
  { name: "heads split by view without transpose", step: 2, made: (_, t) => ({ q_heads: viewed(t.q), k_heads: viewed(t.k), v_heads: viewed(t.v) }), why: "The numbers are cut into the right shape without being moved. A head then gets parts of all heads of a few words." },
  { name: "causal mask off by one, one ahead", step: 3, made: (layer, t) => scored(layer, t, (s) => hide(s, ahead(layer.words.length))), why: "Each word sees the one after it: the very word it has to guess." },
  { name: "heads merged in reverse order", step: 6, made: (_, t) => ({ merged: reversed(t.transposed) }), why: "The heads lie side by side from the last to the first. W_o has rows for each head, and now meets the wrong ones." },
  { name: "mask applied after softmax without renormalising", step: 3, made: (layer, t) => scored(layer, t, (s) => s, (m) => zeroed(weigh(m), layer.allowed)), why: "Weight is shared out among all words first, and then the hidden shares are thrown away. The rows no longer add up to 1." },
];

function ahead(/** @type {number} */ N) {
  return Uint8Array.from({ length: N * N }, (_, at) => (at % N <= Math.floor(at / N) + 1 ? 1 : 0));
}

/** @param {import("../attention.js").Floats} weights @param {Uint8Array} allowed */
function zeroed(weights, allowed) {
  return tensor(weights.shape, weights.data.map((w, at) => (allowed[at % allowed.length] ? w : 0)));
}

/** @param {import("../attention.js").Floats} transposed (N, H, V) */
function reversed(transposed) {
  const [N, H, V] = transposed.shape;
  const out = tensor([N, H * V]);
  for (let n = 0; n < N; n++) for (let h = 0; h < H; h++) out.data.set(transposed.data.subarray((n * H + h) * V, (n * H + h + 1) * V), (n * H + H - 1 - h) * V);
  return out;
}

/** Every tensor of a layer with a mistake in it; none: a healthy one. @param {Learner} layer @param {{step: number, made: Step} | null} mistake @returns {Tensors} */
export function runBroken(layer, mistake) {
  /** @type {Tensors} */
  let t = { x: layer.known.x };
  RIGHT.forEach((step, n) => {
    t = { ...t, ...(mistake?.step === n + 1 ? mistake.made : step)(layer, t) };
  });
  return t;
}

/** How far what a step made is from what it should have made of what it was given. @param {Learner} layer @param {Tensors} t @param {number} step */
export function faultOf(layer, t, step) {
  const should = RIGHT[step - 1](layer, t);
  return Math.max(...Object.keys(should).map((name) => away(should[name], t[name])));
}

// The learner's layer: random weights of any size, the same for the same sizes, and the seven steps of it.

import { sevenSteps } from "../attention.js";
import { allowed } from "../mask.js";
import { tensor } from "../tensor.js";

/** @typedef {import("../attention.js").Floats} Floats */
/** @typedef {{E: number, H: number, words: string[]}} Sizes */
/** @typedef {{about: any, known: Record<string, Floats>, words: string[], allowed: Uint8Array}} Learner */

export const SENTENCE = "I love pepperoni pizza";
export const WIDTHS = [16, 32, 64, 128, 256, 512, 768, 1024];

/** Numbers in −1…1 that are the same for the same seed. @param {number} seed @param {number} count @param {number} size */
export function randoms(seed, count, size) {
  const found = new Float32Array(count);
  let state = (seed * 2654435761 + 12345) >>> 0 || 1;
  for (let n = 0; n < count; n++) {
    state ^= state << 13; // xorshift
    state >>>= 0;
    state ^= state >>> 17;
    state ^= state << 5;
    state >>>= 0;
    found[n] = (state / 2 ** 31 - 1) * size;
  }
  return found;
}

/** A number for a word, the same wherever it stands. @param {string} word */
export function seedOf(word) {
  let seed = 7;
  for (const letter of word) seed = (Math.imul(seed, 31) + (letter.codePointAt(0) ?? 0)) >>> 0;
  return seed % 100003;
}

/** The words of a text: at least one, at most so many. @param {string} text @param {number} most */
export function wordsOf(text, most = 8) {
  const found = text.trim().split(/\s+/).filter(Boolean).slice(0, most);
  return found.length ? found : ["…"];
}

/** The numbers of heads that share a width evenly. @param {number} E */
export function sharesOf(E) {
  return [1, 2, 3, 4, 6, 8, 12, 16].filter((H) => E % H === 0 && E / H >= 4);
}

/** A word for each row of x. @param {string[]} words @param {number} E */
export function itemsOf(words, E) {
  const data = new Float32Array(words.length * E);
  words.forEach((word, n) => data.set(randoms(seedOf(word), E, 1.7), n * E));
  return tensor([words.length, E], data);
}

/** A layer of this size on these words. @param {Sizes} sizes @param {string} [mask] @returns {Learner} */
export function makeLayer({ E, H, words }, mask = "causal") {
  const D = E / H;
  const size = 1.7 * E ** -0.5;
  const weights = (/** @type {number} */ seed, /** @type {number[]} */ shape) => tensor(shape, randoms(seed, E * E, size));
  const N = words.length;
  return {
    about: { sizes: { E, H, G: H, D, V: D, C: E }, scale: D ** -0.5 },
    known: { x: itemsOf(words, E), w_q: weights(11, [E, H, D]), w_k: weights(23, [E, H, D]), w_v: weights(37, [E, H, D]), w_o: weights(53, [H, D, E]) },
    words,
    allowed: allowed({ kind: mask, numbers: [] }, N, N),
  };
}

/** All seven steps. @param {Learner} layer @param {import("../attention.js").Edits} [edits] @returns {Record<string, Floats>} */
export function run(layer, edits = {}) {
  return sevenSteps(layer.about, layer.known, { allowed: layer.allowed, ...edits });
}

/** The largest difference of two tensors. @param {Floats} a @param {Floats} b */
export function away(a, b) {
  let most = 0;
  for (let n = 0; n < a.data.length; n++) {
    const by = a.data[n] === b.data[n] ? 0 : Math.abs(a.data[n] - b.data[n]);
    most = Math.max(most, Number.isNaN(by) ? Infinity : by);
  }
  return most;
}

/** The largest difference in each slab of the first axis. @param {Floats} a @param {Floats} b */
export function awayInEach(a, b) {
  const size = a.data.length / a.shape[0];
  const slab = (/** @type {Floats} */ t, /** @type {number} */ n) => tensor([size], t.data.subarray(n * size, (n + 1) * size));
  return Array.from({ length: a.shape[0] }, (_, n) => away(slab(a, n), slab(b, n)));
}

/** How many columns of two matrices differ anywhere. @param {Floats} a @param {Floats} b */
export function columnsThatDiffer(a, b) {
  const [N, E] = a.shape;
  const found = Array.from({ length: E }, (_, e) => Array.from({ length: N }, (__, n) => n * E + e).some((at) => Math.abs(a.data[at] - b.data[at]) > 1e-6));
  return found.map((yes, e) => (yes ? e : -1)).filter((e) => e >= 0);
}

/** How many heads differ from every head before them. @param {Floats} heads (H, N, D) */
export function differentHeads(heads) {
  const [H, N, D] = heads.shape;
  const size = N * D;
  let count = 0;
  for (let h = 0; h < H; h++) {
    const own = tensor([size], heads.data.subarray(h * size, (h + 1) * size));
    const twin = Array.from({ length: h }, (_, g) => away(own, tensor([size], heads.data.subarray(g * size, (g + 1) * size)))).some((by) => by < 1e-6);
    if (!twin) count += 1;
  }
  return count;
}

/** The layer with some of one head's matrices given to another. @param {Learner} layer @param {string[]} names of "w_q", "w_k", "w_v" @param {number} from @param {number} to @returns {Learner} */
export function shareMatrices(layer, names, from, to) {
  const known = { ...layer.known };
  for (const name of names) {
    const [E, H, D] = known[name].shape;
    const data = known[name].data.slice();
    for (let e = 0; e < E; e++) data.copyWithin((e * H + to) * D, (e * H + from) * D, (e * H + from + 1) * D);
    known[name] = tensor([E, H, D], data);
  }
  return { ...layer, known };
}

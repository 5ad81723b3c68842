// Steps 1 to 7 of one layer, in float32, with the names of the trace. The specification is `multihead.steps`;
// tests/explorer/js/attention.test.js holds this file to it.
// Q queries · K keys · E width · H heads · G key/value heads · D, V head widths; weights are (in, out), row by row.

import { tensor, swapAxes } from "./tensor.js";

/** @typedef {{shape: number[], data: Float32Array}} Floats */
/** @typedef {{E: number, H: number, G: number, D: number, V: number, C: number}} Sizes */
/** What a layer is, besides its tensors.
 * @typedef {{sizes: Sizes, scale: number, softcap?: number | null, rope?: {dim: number, interleaved: boolean} | null, qk_norm?: boolean}} Layer */
/** What is changed in a call. `off`: a head's number → "zero" or "mean". `output: false` leaves W_o out.
 * @typedef {{allowed?: Uint8Array | null, off?: Map<number, string>, mixing?: boolean}} Edits */

/** x (N, I) times w (I, O), plus a bias (O). Four rows by four columns of x at a time: each number of w is read once for
 * four rows, and each sum is written once for four products.
 * @param {Float32Array} x @param {Float32Array} w @param {Float32Array | null} bias @param {number} N @param {number} I @param {number} O */
export function multiply(x, w, bias, N, I, O) {
  const out = new Float32Array(N * O);
  const sums = [0, 1, 2, 3].map(() => new Float64Array(O));
  for (let n = 0; n < N; n += 4) {
    const rows = Math.min(4, N - n);
    for (const sum of sums) sum.fill(0);
    if (rows === 4) fourRows(x, w, n * I, I, O, sums);
    else for (let r = 0; r < rows; r++) addRows(x.subarray((n + r) * I, (n + r + 1) * I), w, null, I, 0, O, sums[r]);
    for (let r = 0; r < rows; r++) {
      const sum = sums[r];
      const at = (n + r) * O;
      if (bias) for (let o = 0; o < O; o++) out[at + o] = sum[o] + bias[o];
      else out.set(sum, at);
    }
  }
  return out;
}

/** The products of four rows of x, which begin at `first`, added to four sums. @param {Float32Array} x @param {Float32Array} w @param {number} first @param {number} I @param {number} O @param {Float64Array[]} sums */
function fourRows(x, w, first, I, O, [s0, s1, s2, s3]) {
  const [r0, r1, r2, r3] = [first, first + I, first + 2 * I, first + 3 * I];
  const whole = I - (I % 4);
  for (let i = 0; i < whole; i += 4) {
    const [a0, a1, a2, a3] = [x[r0 + i], x[r0 + i + 1], x[r0 + i + 2], x[r0 + i + 3]];
    const [b0, b1, b2, b3] = [x[r1 + i], x[r1 + i + 1], x[r1 + i + 2], x[r1 + i + 3]];
    const [c0, c1, c2, c3] = [x[r2 + i], x[r2 + i + 1], x[r2 + i + 2], x[r2 + i + 3]];
    const [d0, d1, d2, d3] = [x[r3 + i], x[r3 + i + 1], x[r3 + i + 2], x[r3 + i + 3]];
    for (let o = 0, at = i * O; o < O; o++, at++) {
      const w0 = w[at];
      const w1 = w[at + O];
      const w2 = w[at + 2 * O];
      const w3 = w[at + 3 * O];
      s0[o] += a0 * w0 + a1 * w1 + (a2 * w2 + a3 * w3);
      s1[o] += b0 * w0 + b1 * w1 + (b2 * w2 + b3 * w3);
      s2[o] += c0 * w0 + c1 * w1 + (c2 * w2 + c3 * w3);
      s3[o] += d0 * w0 + d1 * w1 + (d2 * w2 + d3 * w3);
    }
  }
  for (let i = whole; i < I; i++) {
    for (let o = 0, at = i * O; o < O; o++, at++) {
      const weight = w[at];
      s0[o] += x[r0 + i] * weight;
      s1[o] += x[r1 + i] * weight;
      s2[o] += x[r2 + i] * weight;
      s3[o] += x[r3 + i] * weight;
    }
  }
}

/** Rows of w, each times its factor, added to one sum, four at a time. `chosen`: which rows, unless the first `count`.
 * @param {Float32Array} factors @param {Float32Array} w @param {Int32Array | null} chosen @param {number} count @param {number} first where w begins @param {number} O @param {Float64Array} sum */
function addRows(factors, w, chosen, count, first, O, sum) {
  let n = 0;
  for (; n + 4 <= count; n += 4) {
    const i = chosen ? chosen[n] : n;
    const j = chosen ? chosen[n + 1] : n + 1;
    const k = chosen ? chosen[n + 2] : n + 2;
    const l = chosen ? chosen[n + 3] : n + 3;
    const a = factors[i];
    const b = factors[j];
    const c = factors[k];
    const d = factors[l];
    const ai = first + i * O;
    const bi = first + j * O;
    const ci = first + k * O;
    const di = first + l * O;
    for (let o = 0; o < O; o++) sum[o] += a * w[ai + o] + b * w[bi + o] + (c * w[ci + o] + d * w[di + o]);
  }
  for (; n < count; n++) {
    const i = chosen ? chosen[n] : n;
    const a = factors[i];
    const ai = first + i * O;
    for (let o = 0; o < O; o++) sum[o] += a * w[ai + o];
  }
}

/** Step 1: every item times every head's matrix. @param {Floats} x (N, E) @param {Floats} w (E, H, D) @param {Floats} [bias] (H, D) */
export function project(x, w, bias) {
  const [E, H, D] = w.shape;
  const N = x.shape[0];
  return tensor([N, H, D], multiply(x.data, w.data, bias?.data ?? null, N, E, H * D));
}

/** Step 2: heads in front, then QK-norm (RMS) and RoPE where the layer has them.
 * @param {Floats} t (N, H, D) @param {Layer} layer @param {Floats} [norm] (D) @param {Floats} [cos] (N, dim/2) @param {Floats} [sin] */
export function split(t, layer, norm, cos, sin) {
  const heads = swapAxes(t);
  if (norm) normalise(heads, norm.data);
  if (layer.rope && cos && sin) rotate(heads, layer.rope, cos.data, sin.data);
  return heads;
}

function normalise(/** @type {Floats} */ heads, /** @type {Float32Array} */ gain) {
  const D = heads.shape[2];
  for (let at = 0; at < heads.data.length; at += D) {
    let squares = 0;
    for (let d = 0; d < D; d++) squares += heads.data[at + d] ** 2;
    const factor = 1 / Math.sqrt(squares / D + 1e-6);
    for (let d = 0; d < D; d++) heads.data[at + d] *= factor * gain[d];
  }
}

function rotate(/** @type {Floats} */ heads, /** @type {{dim: number, interleaved: boolean}} */ rope, /** @type {Float32Array} */ cos, /** @type {Float32Array} */ sin) {
  const [H, N, D] = heads.shape;
  const half = rope.dim / 2;
  for (let h = 0; h < H; h++) {
    for (let n = 0; n < N; n++) {
      const at = (h * N + n) * D;
      for (let p = 0; p < half; p++) {
        const [first, second] = pairOf(p, rope);
        const a = heads.data[at + first];
        const b = heads.data[at + second];
        heads.data[at + first] = a * cos[n * half + p] - b * sin[n * half + p];
        heads.data[at + second] = a * sin[n * half + p] + b * cos[n * half + p];
      }
    }
  }
}

/** The two numbers that RoPE turns together. @param {number} p @param {{dim: number, interleaved: boolean}} rope */
export function pairOf(p, rope) {
  return rope.interleaved ? [2 * p, 2 * p + 1] : [p, p + rope.dim / 2];
}

/** Step 3: q·kᵀ·scale for every head. @param {Floats} q (H, Q, D) @param {Floats} k (G, K, D) @param {number} scale */
export function score(q, k, scale) {
  const [H, Q, D] = q.shape;
  const [G, K] = k.shape;
  const out = tensor([H, Q, K]);
  for (let h = 0; h < H; h++) {
    const g = Math.floor(h / (H / G));
    for (let i = 0; i < Q; i++) {
      const row = (h * Q + i) * D;
      for (let j = 0; j < K; j++) {
        const column = (g * K + j) * D;
        let sum = 0;
        for (let d = 0; d < D; d++) sum += q.data[row + d] * k.data[column + d];
        out.data[(h * Q + i) * K + j] = sum * scale;
      }
    }
  }
  return out;
}

/** Step 3: cap the scores, and set what the mask hides to −∞. `allowed`: (Q, K) or (H, Q, K).
 * @param {Floats} scores @param {Uint8Array | null} allowed @param {number | null} [softcap] */
export function hide(scores, allowed, softcap) {
  const [, Q, K] = scores.shape;
  const out = tensor(scores.shape, scores.data.slice());
  const period = allowed && allowed.length === Q * K ? Q * K : scores.data.length;
  for (let at = 0; at < out.data.length; at++) {
    if (softcap) out.data[at] = Math.tanh(out.data[at] / softcap) * softcap;
    if (allowed && !allowed[at % period]) out.data[at] = -Infinity;
  }
  return out;
}

/** Step 3: softmax over keys; a row that sees nothing is all zero. @param {Floats} masked @param {Float32Array | null} [sinks] (H) */
export function weigh(masked, sinks) {
  const [H, Q, K] = masked.shape;
  const out = tensor(masked.shape);
  const powers = new Float64Array(K);
  for (let h = 0; h < H; h++) {
    for (let q = 0; q < Q; q++) {
      const at = (h * Q + q) * K;
      const row = masked.data.subarray(at, at + K);
      let top = sinks ? sinks[h] : -Infinity;
      for (let k = 0; k < K; k++) if (row[k] > top) top = row[k];
      if (top === -Infinity) continue;
      let total = sinks ? Math.exp(sinks[h] - top) : 0;
      for (let k = 0; k < K; k++) {
        powers[k] = row[k] === -Infinity ? 0 : Math.exp(row[k] - top);
        total += powers[k];
      }
      for (let k = 0; k < K; k++) out.data[at + k] = powers[k] / total;
    }
  }
  return out;
}

/** Step 4: each row a weighted mean of the value rows. @param {Floats} weights (H, Q, K) @param {Floats} v (G, K, V) */
export function mix(weights, v) {
  const [H, Q, K] = weights.shape;
  const [G, , V] = v.shape;
  const out = tensor([H, Q, V]);
  const sum = new Float64Array(V);
  const seen = new Int32Array(K);
  for (let h = 0; h < H; h++) {
    const g = Math.floor(h / (H / G));
    for (let q = 0; q < Q; q++) {
      const row = weights.data.subarray((h * Q + q) * K, (h * Q + q + 1) * K);
      let count = 0;
      for (let k = 0; k < K; k++) if (row[k] !== 0) seen[count++] = k; // what is hidden, even NaN, stays out
      sum.fill(0);
      addRows(row, v.data, seen, count, g * K * V, V, sum);
      out.data.set(sum, (h * Q + q) * V);
    }
  }
  return out;
}

/** What heads that are switched off put out instead: 0, or their mean over the rows. @param {Floats} heads (H, Q, V) @param {Map<number, string>} off */
export function switchOff(heads, off) {
  if (!off.size) return heads;
  const [, Q, V] = heads.shape;
  const out = tensor(heads.shape, heads.data.slice());
  for (const [h, how] of off) {
    const part = out.data.subarray(h * Q * V, (h + 1) * Q * V);
    if (how !== "mean") part.fill(0);
    else {
      for (let d = 0; d < V; d++) {
        let sum = 0;
        for (let q = 0; q < Q; q++) sum += part[q * V + d];
        for (let q = 0; q < Q; q++) part[q * V + d] = sum / Q;
      }
    }
  }
  return out;
}

/** Step 7: times W_o, so that heads mix. @param {Floats} merged (N, H·V) @param {Floats} w (H, V, E) @param {Floats} [bias] (E) */
export function output(merged, w, bias) {
  const [H, V, E] = w.shape;
  const N = merged.shape[0];
  return tensor([N, E], multiply(merged.data, w.data, bias?.data ?? null, N, H * V, E));
}

/** Step 3 from q_heads and k_heads. `scores` is taken as it is where it is known.
 * @param {Layer} layer @param {Record<string, Floats>} known @param {Edits} edits @returns {Record<string, Floats>} */
export function compare(layer, known, edits) {
  const scores = known.scores ?? score(known.q_heads, known.k_heads, layer.scale);
  const masked = hide(scores, edits.allowed ?? null, layer.softcap);
  return { scores, masked, weights: weigh(masked, known.sinks?.data) };
}

/** Steps 4 to 7 from weights and v_heads; without w_o there is no output.
 * @param {Record<string, Floats>} known @param {Edits} edits @returns {Record<string, Floats>} */
export function gather(known, edits) {
  return merge(known, switchOff(mix(known.weights, known.v_heads), edits.off ?? new Map()), edits);
}

/** Steps 3 to 7. @param {Layer} layer @param {Record<string, Floats>} known @param {Edits} edits @returns {Record<string, Floats>} */
export function attend(layer, known, edits) {
  const compared = compare(layer, known, edits);
  return { ...compared, ...gather({ ...known, ...compared }, edits) };
}

/** Steps 5 to 7 from what the heads put out. @param {Record<string, Floats>} known @param {Floats} heads @param {Edits} edits */
export function merge(known, heads, edits) {
  const transposed = swapAxes(heads); // (N, H, V)
  const [N, H, V] = transposed.shape;
  const merged = tensor([N, H * V], transposed.data); // the same numbers in the same order: only the shape changes
  /** @type {Record<string, Floats>} */
  const made = { heads, transposed, merged };
  if (edits.mixing === false) made.output = merged;
  else if (known.w_o) made.output = output(merged, known.w_o, known.b_o);
  return made;
}

/** All seven steps from x and the weights. @param {Layer} layer @param {Record<string, Floats>} known @param {Edits} edits @returns {Record<string, Floats>} */
export function sevenSteps(layer, known, edits) {
  const context = known.context ?? known.x;
  const q = project(known.x, known.w_q, known.b_q);
  const k = project(context, known.w_k, known.b_k);
  const v = project(context, known.w_v, known.b_v);
  const q_heads = split(q, layer, known.norm_q, known.rope_cos, known.rope_sin);
  const k_heads = split(k, layer, known.norm_k, known.rope_cos, known.rope_sin);
  const v_heads = swapAxes(v);
  return { x: known.x, q, k, v, q_heads, k_heads, v_heads, ...attend(layer, { ...known, q_heads, k_heads, v_heads }, edits) };
}

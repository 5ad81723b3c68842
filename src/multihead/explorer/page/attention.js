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

/** x (N, I) times w (I, O), plus a bias (O). Four rows at a time: each row of w is read once for all of them.
 * @param {Float32Array} x @param {Float32Array} w @param {Float32Array | null} bias @param {number} N @param {number} I @param {number} O */
export function multiply(x, w, bias, N, I, O) {
  const out = new Float32Array(N * O);
  const sums = [0, 1, 2, 3].map(() => new Float64Array(O));
  const [s0, s1, s2, s3] = sums;
  for (let n = 0; n < N; n += 4) {
    const rows = Math.min(4, N - n);
    for (const s of sums) s.fill(0);
    for (let i = 0; i < I; i++) {
      const a = x[n * I + i];
      const b = rows > 1 ? x[(n + 1) * I + i] : 0;
      const c = rows > 2 ? x[(n + 2) * I + i] : 0;
      const d = rows > 3 ? x[(n + 3) * I + i] : 0;
      if (rows === 1) for (let o = 0, at = i * O; o < O; o++, at++) s0[o] += a * w[at];
      else {
        for (let o = 0, at = i * O; o < O; o++, at++) {
          const weight = w[at];
          s0[o] += a * weight;
          s1[o] += b * weight;
          s2[o] += c * weight;
          s3[o] += d * weight;
        }
      }
    }
    for (let r = 0; r < rows; r++) {
      const s = sums[r];
      const at = (n + r) * O;
      for (let o = 0; o < O; o++) out[at + o] = bias ? s[o] + bias[o] : s[o];
    }
  }
  return out;
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
  for (let h = 0; h < H; h++) {
    for (let q = 0; q < Q; q++) {
      const at = (h * Q + q) * K;
      let top = sinks ? sinks[h] : -Infinity;
      for (let k = 0; k < K; k++) if (masked.data[at + k] > top) top = masked.data[at + k];
      if (top === -Infinity) continue;
      let total = sinks ? Math.exp(sinks[h] - top) : 0;
      for (let k = 0; k < K; k++) total += Math.exp(masked.data[at + k] - top);
      for (let k = 0; k < K; k++) out.data[at + k] = Math.exp(masked.data[at + k] - top) / total;
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
  for (let h = 0; h < H; h++) {
    const g = Math.floor(h / (H / G));
    for (let q = 0; q < Q; q++) {
      sum.fill(0);
      for (let k = 0; k < K; k++) {
        const weight = weights.data[(h * Q + q) * K + k];
        if (weight === 0) continue; // what is hidden, even NaN, stays out
        const at = (g * K + k) * V;
        for (let d = 0; d < V; d++) sum[d] += weight * v.data[at + d];
      }
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

/** Steps 3 to 7 from q_heads, k_heads and v_heads. `scores` is taken as it is where it is known; without w_o there is
 * no output. @param {Layer} layer @param {Record<string, Floats>} known @param {Edits} edits @returns {Record<string, Floats>} */
export function attend(layer, known, edits) {
  const scores = known.scores ?? score(known.q_heads, known.k_heads, layer.scale);
  const masked = hide(scores, edits.allowed ?? null, layer.softcap);
  const weights = weigh(masked, known.sinks?.data);
  const heads = switchOff(mix(weights, known.v_heads), edits.off ?? new Map());
  return { scores, masked, weights, ...merge(known, heads, edits) };
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

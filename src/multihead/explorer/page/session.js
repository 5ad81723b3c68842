// From the state to the numbers: asks Python for what the state names, and answers edits of one layer at once in
// attention.js while Python works out what they mean for the whole model.

import { compare, gather, merge, multiply } from "./attention.js";
import { allowed, drawn, maskOfAnswer, maskRequest, parseMask, formatMask } from "./mask.js";
import { createSignal, parsePairs } from "./state.js";
import { tensor } from "./tensor.js";

const AT_ONCE = 3e7; // products that are made before the next frame: about 15 ms

/** @typedef {import("./explain.js").Scene & {key: string, model: any, tokens: any[], keyTokens: any[], meta: any, mask: any, allowed: Uint8Array, ownMask: string, later: string, edits: any, exact: boolean, edited: boolean}} FullScene */
/** @typedef {import("./ask.js").Trouble} Trouble */
/** @typedef {{model: string, kind: string, logits: Float32Array, labels: any[], candidates: number[], following: Float32Array | null}} Prediction */

/** @param {ReturnType<typeof import("./state.js").createStore>} store @param {ReturnType<typeof import("./ask.js").createAsk>} python */
export function createSession(store, python) {
  const scene = createSignal(/** @type {FullScene | null} */ (null));
  const wall = createSignal(/** @type {any} */ (null));
  const before = createSignal(/** @type {Prediction | null} */ (null));
  const after = createSignal(/** @type {Prediction | null} */ (null));
  const decoded = createSignal(/** @type {any} */ (null));
  const long = createSignal(/** @type {any} */ (null)); // an input that is too long for a trace, for the map
  const trouble = createSignal(/** @type {Trouble} */ (null));
  const busy = createSignal(0);
  /** @type {any[]} */
  let models = [];
  /** @type {{left: string, right: string} | null} */
  let pair = null;
  /** @type {Map<string, any>} */
  const bases = new Map(); // the model's own answer for (model, layer, input), and the layer's weights
  /** @type {Map<string, AbortController>} */
  const running = new Map();

  const modelOf = (/** @type {any} */ state) => models.find((m) => m.id === state.model) ?? models[0];

  /** What goes in, as Python is asked for it. @param {any} state */
  function inputOf(state) {
    const model = modelOf(state);
    if (model.kind === "given") return { kind: "given" };
    if (model.kind === "picture") {
      if (state.pixels) return { kind: "pixels", pixels: state.pixels };
      return state.sample ? { kind: "sample", name: state.sample } : model.examples[0].input;
    }
    if (state.ids) return { kind: "tokens", ids: state.ids.split(",").map(Number) };
    const example = model.examples[0]?.input;
    if (state.text === null) return example;
    return { kind: "text", text: state.text };
  }

  /** Ask, and give up what was asked under the same name before. @param {string} name @param {string} route @param {any} request */
  async function only(name, route, request) {
    running.get(name)?.abort();
    const controller = new AbortController();
    running.set(name, controller);
    busy.set(busy.get() + 1);
    try {
      return await python.ask(route, request, controller.signal);
    } finally {
      if (running.get(name) === controller) running.delete(name);
      busy.set(busy.get() - 1);
    }
  }

  function complain(/** @type {any} */ error) {
    if (error.kind === "abort" || error.kind === "token") return;
    trouble.set({ kind: error.kind ?? "bug", message: error.message });
  }

  /** The mask and the switches of a request; nothing where they are the model's own. @param {any} state @param {number} count */
  function editsOf(state, count) {
    const model = modelOf(state);
    /** @type {any} */
    const edits = {};
    const mask = maskOf(state);
    if (mask && model.masks) edits.mask = maskRequest(mask, count);
    const off = parsePairs(state.off).filter(([l, h]) => l < model.layers.length && h < model.layers[l].sizes.H);
    if (off.length && model.ablates) {
      edits.off = off;
      if (state.with === "mean") edits.with = "mean";
    }
    return edits;
  }

  /** The chosen mask, or null for the model's own. @param {any} state */
  function maskOf(state) {
    if (!state.mask) return null;
    try {
      return parseMask(state.mask);
    } catch (error) {
      complain(error);
      return null;
    }
  }

  /** The model's own mask. One that the model makes itself is known by what it hides. @param {any} answer @param {number} Q @param {number} K */
  function ownMask(answer, Q, K) {
    const named = maskOfAnswer(answer.meta.mask);
    const hidden = answer.tensors.allowed?.data.subarray(0, Q * K);
    if (named.kind !== "none" || !hidden || !hidden.includes(0)) return named;
    const causal = { kind: "causal", numbers: [] };
    return allowed(causal, Q, K).every((cell, n) => cell === hidden[n]) ? causal : drawn(hidden);
  }

  /** @param {any} base @param {any} answer the tensors to start from @param {any} state @param {boolean} exact whether they already hold the edits */
  function build(base, answer, state, exact) {
    const { meta } = answer;
    const model = modelOf(state);
    const count = meta.tokens.length;
    const keys = meta.key_tokens ?? meta.tokens;
    const off = new Map(parsePairs(state.off).filter(([l, h]) => l === state.layer && h < meta.sizes.H).map(([, h]) => [h, state.with]));
    const mask = maskOf(state);
    const Q = count;
    const K = keys.length;
    const given = answer.tensors.allowed;
    let cells = given ? given.data.subarray(0, Q * K) : new Uint8Array(Q * K).fill(1);
    let tensors = { ...base.weights, ...answer.tensors };
    const edits = { off, mixing: state.mixing, allowed: given?.data ?? null };
    const changes = !exact && (mask !== null || off.size > 0);
    if (mask && !exact) edits.allowed = cells = allowed(mask, Q, K);
    const computes = changes && tensors.q_heads && tensors.k_heads && tensors.v_heads;
    const large = computes && state.mixing && count * (tensors.w_o?.data.length ?? 0) > AT_ONCE;
    // What is on the screen comes first: of a large layer step 7 waits, and steps 4 to 6 too where they are not looked at.
    const later = !large ? "" : state.step > 3 ? "output" : "heads";
    if (computes) {
      const { w_o: _, ...others } = tensors;
      tensors = { ...tensors, ...compare(meta, tensors, edits) };
      if (later !== "heads") tensors = { ...tensors, ...gather({ ...(large ? others : tensors), weights: tensors.weights }, edits) };
    }
    if (!changes && !state.mixing && tensors.heads) tensors = { ...tensors, ...merge(tensors, tensors.heads, edits) };
    const own = ownMask(base.answer, Q, K);
    return {
      key: base.key,
      model,
      meta,
      layer: meta,
      tensors,
      tokens: meta.tokens,
      keyTokens: keys,
      labels: meta.tokens.map((/** @type {any} */ t) => t.text),
      keyLabels: keys.map((/** @type {any} */ t) => t.text),
      off,
      mixing: state.mixing,
      mask: mask ?? own,
      ownMask: formatMask(own),
      allowed: cells,
      later,
      edits,
      exact: exact || !changes,
      edited: mask !== null || parsePairs(state.off).length > 0 || !state.mixing,
    };
  }

  /** Bring everything up to date with the state. */
  async function load() {
    const state = store.get();
    if (!models.length) return;
    const input = inputOf(state);
    const where = { model: modelOf(state).id, layer: state.layer, input };
    const key = JSON.stringify(where);
    try {
      const many = isLong(where, state); // known at once where it can be: edits are answered before the next frame
      if (many === true || (many && (await many))) {
        await lookAtLong(where, key);
        return;
      }
      if (key !== wantedKey()) return;
      long.set(null);
      let base = bases.get(key);
      if (!base) {
        const [answer, weights] = await Promise.all([only("trace", "trace", where), weightsOf(where)]);
        base = { key, answer, weights };
        bases.set(key, base);
        if (bases.size > 24) bases.delete(/** @type {string} */ (bases.keys().next().value));
        if (key !== wantedKey()) return;
      }
      if (trouble.get()?.kind !== "away") trouble.set(null);
      const made = build(base, base.answer, store.get(), false);
      scene.set(made);
      if (made.later) finish(made);
      await Promise.all([exactly(base, where), predictions(where, base), walls(where, base), decoding(where, base)]);
    } catch (error) {
      complain(error);
    }
  }

  /** Whether an input has more items than a trace may have. Short texts need not be asked about. @param {any} where @param {any} state @returns {boolean | Promise<boolean>} */
  function isLong(where, state) {
    const model = modelOf(state);
    const { kind, text, ids } = where.input;
    if (python.mode === "file" || !(model.longest > model.most)) return false;
    if (kind === "given") return (model.given ?? 0) > model.most;
    if (kind === "tokens") return ids.length > model.most;
    if (kind !== "text" || new TextEncoder().encode(text).length < model.most - 8) return false;
    return only("items", "items", { model: where.model, input: where.input, start: 0, stop: 0 }).then(({ meta }) => meta.count > model.most);
  }

  /** @param {any} where @param {string} key */
  async function lookAtLong(where, key) {
    const edits = editsOf(store.get(), 0);
    const name = `${key} ${JSON.stringify(edits)}`;
    if (long.get()?.key !== name) {
      const { meta, tensors } = await only("trace", "thumbnails", { ...where, ...edits });
      if (key !== wantedKey()) return;
      trouble.set(null);
      long.set({ key: name, where, edits, model: modelOf(store.get()), Q: meta.count, K: meta.keys, H: meta.heads, named: meta.named, maps: tensors.maps });
    }
    scene.set(null);
    for (const signal of [before, after, decoded, wall]) signal.set(null);
    [plain.key, walled, decodedKey] = ["", "", ""];
  }

  /** What a large layer's first frame left out; step 7 a few rows at a time, so that the page goes on answering. The numbers
   * before stay until then. @param {any} made */
  async function finish(made) {
    const { w_o, b_o, ...others } = made.tensors;
    await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
    if (scene.get() !== made) return;
    const tensors = { ...made.tensors, ...(made.later === "heads" ? gather(others, made.edits) : {}) };
    const [[N, I], E] = [tensors.merged.shape, w_o.shape[2]];
    const data = new Float32Array(N * E);
    for (let n = 0; n < N; n += 8) {
      await new Promise((resolve) => setTimeout(resolve));
      if (scene.get() !== made) return;
      const rows = Math.min(8, N - n);
      data.set(multiply(tensors.merged.data.subarray(n * I, (n + rows) * I), w_o.data, b_o?.data ?? null, rows, I, E), n * E);
    }
    if (scene.get() === made) scene.set({ ...made, later: "", tensors: { ...tensors, output: tensor([N, E], data) } });
  }

  function wantedKey() {
    const state = store.get();
    return JSON.stringify({ model: modelOf(state).id, layer: state.layer, input: inputOf(state) });
  }

  /** @type {Map<string, Promise<any>>} */
  const weights = new Map();
  function weightsOf(/** @type {any} */ { model, layer }) {
    if (!models.find((m) => m.id === model).weights) return {};
    const key = `${model} ${layer}`;
    if (!weights.has(key)) {
      if (weights.size > 8) weights.delete(/** @type {string} */ (weights.keys().next().value));
      busy.set(busy.get() + 1);
      const asked = python.ask("weights", { model, layer }).then((answer) => answer.tensors);
      asked.catch(() => weights.delete(key)).finally(() => busy.set(busy.get() - 1));
      weights.set(key, asked);
    }
    return weights.get(key);
  }

  /** The trace as the whole model gives it under the edits; a saved page keeps what this layer made of them. @param {any} base @param {any} where */
  async function exactly(base, where) {
    const edits = editsOf(store.get(), base.answer.meta.tokens.length);
    running.get("edited")?.abort();
    if (!Object.keys(edits).length || !python.has("trace", { ...where, ...edits })) return;
    const [mask, off, how] = [store.get().mask, store.get().off, store.get().with];
    const answer = await only("edited", "trace", { ...where, ...edits });
    const now = store.get();
    if (now.mask === mask && now.off === off && now.with === how && wantedKey() === base.key) scene.set(build(base, answer, now, true));
  }

  function readPrediction(/** @type {any} */ answer, /** @type {string} */ model) {
    return {
      model,
      kind: answer.meta.kind,
      logits: answer.tensors.logits.data,
      labels: answer.meta.labels,
      candidates: answer.meta.candidates ?? [...answer.tensors.logits.data.keys()],
      following: answer.tensors.following?.data ?? null,
    };
  }

  /** @type {{key: string, value: Prediction | null}} */
  let plain = { key: "", value: null };
  /** @param {any} where @param {any} base */
  async function predictions({ model, input }, base) {
    if (!modelOf(store.get()).predicts) {
      before.set(null);
      after.set(null);
      return;
    }
    const key = JSON.stringify({ model, input });
    if (plain.key !== key) {
      const answer = await only("predict", "predict", { model, input });
      plain = { key, value: readPrediction(answer, model) };
    }
    before.set(plain.value);
    const edits = editsOf(store.get(), base.answer.meta.tokens.length);
    running.get("predict edited")?.abort();
    const changed = Object.keys(edits).length > 0 && python.has("predict", { model, input, ...edits });
    after.set(changed ? readPrediction(await only("predict edited", "predict", { model, input, ...edits }), model) : null);
  }

  let walled = "";
  /** @param {any} where @param {any} base */
  async function walls({ model, input }, base) {
    let edits = editsOf(store.get(), base.answer.meta.tokens.length);
    if (!python.has("heads", { model, input, ...edits })) edits = {};
    const key = JSON.stringify({ model, input, edits });
    if (key === walled) return;
    const answer = await only("heads", "heads", { model, input, ...edits });
    walled = key;
    wall.set({ ...answer.meta, model, maps: answer.tensors.maps, rollout: answer.tensors.rollout ?? null, key });
  }

  let decodedKey = "";
  /** @param {any} where @param {any} base */
  async function decoding(where, base) {
    const key = JSON.stringify(where);
    if (!modelOf(store.get()).decodes || base.answer.meta.tokens.length < 2) {
      decoded.set(null);
      decodedKey = "";
    } else if (key !== decodedKey) {
      const answer = await only("decode", "decode", where);
      decodedKey = key;
      decoded.set({ ...answer.meta, model: where.model, tensors: answer.tensors });
    }
  }

  return {
    scene,
    wall,
    before,
    after,
    decoded,
    long,
    trouble,
    busy,
    load,
    inputOf,
    editsOf,
    complain,
    python,
    get pair() {
      return pair;
    },
    get models() {
      return models;
    },
    model: () => modelOf(store.get()),
    /** The first question of all. */
    async begin() {
      const { meta } = await python.ask("models", {});
      models = meta.models;
      pair = meta.pair ?? null;
      return meta.first;
    },
    /** The full weights of another layer, for two heads side by side. @param {number} layer */
    async layerWeights(layer) {
      const state = store.get();
      const where = { model: modelOf(state).id, layer, input: inputOf(state) };
      const known = bases.get(JSON.stringify(where));
      const edits = editsOf(state, scene.get()?.tokens.length ?? 0);
      if (known && !Object.keys(edits).length) return known.answer;
      if (!python.has("trace", { ...where, ...edits })) return python.ask("trace", where);
      return python.ask("trace", { ...where, ...edits });
    },
  };
}

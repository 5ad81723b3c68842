// One store. The address is its serialisation: what differs from the defaults, as model=lm&layer=1&step=3 after the #.

/** @typedef {typeof DEFAULTS} State */

export const DEFAULTS = {
  model: "",
  layer: 0,
  text: /** @type {string | null} */ (null),
  sample: "", // a picture of the package
  pixels: "", // a picture of one's own, as Python gave it back
  packed: "", // a picture that is too large for the address, as it travels in it
  ids: "", // "0,12,7": tokens by number, once one was taken
  lesson: "", // which one is open; "": none
  step: 3,
  head: 0,
  at: "", // what is locked: "weights.2.5.1", "query.5" or "key.5"
  mask: "", // "": the model's own
  off: "", // "0.1,1.3": layer.head, switched off
  with: "zero",
  mixing: true, // W_o
  pins: "", // "0.1,1.3": layer.head, side by side
  sort: "place",
  metric: "previous", // what the finder filters by
  least: 0, // and how much of it is asked for, of 100
  temperature: 1,
  top: 10,
  part: "q", // which of q, k and v is on the stage
  colour: "auto", // "values" or "heads"
  way: "to", // "to": what a token attends to; "from": who attends to it
  rollout: false,
  speed: 1,
  view: "steps", // or "map": the weights of a head as a map
  map: "", // "12000.5,300,4.5": the query and the key at its upper left corner, and the pixels of an item
  pool: "max", // what a bin of the map shows
  sink: true, // whether the first key counts for its colours
  contrast: -1, // below 0: as the map finds best
  tensor: "", // which of two side by side
  theme: "auto",
};

const CHOICES = {
  with: ["zero", "mean"],
  part: ["q", "k", "v"],
  colour: ["auto", "values", "heads"],
  way: ["to", "from"],
  theme: ["auto", "light", "dark"],
  view: ["steps", "map"],
  pool: ["max", "mean"],
};

const RANGES = { layer: [0, 999], step: [1, 7], head: [0, 999], least: [0, 100], temperature: [0.05, 5], top: [1, 200], speed: [0.25, 4], contrast: [-1, 4] };
const LONGEST = 20000;

/** The state that a fragment stands for. What is not understood is left at its default. @param {string} fragment @returns {State} */
export function parseState(fragment) {
  /** @type {any} */
  const state = { ...DEFAULTS };
  for (const [key, text] of new URLSearchParams(fragment.replace(/^#/, ""))) {
    if (!Object.hasOwn(DEFAULTS, key) || text.length > LONGEST) continue;
    const usual = /** @type {any} */ (DEFAULTS)[key];
    if (typeof usual === "number") {
      const [low, high] = /** @type {any} */ (RANGES)[key];
      const number = Number(text);
      if (text.trim() === "" || !Number.isFinite(number)) continue;
      state[key] = Math.min(high, Math.max(low, Number.isInteger(usual) && !["speed", "temperature", "contrast"].includes(key) ? Math.round(number) : number));
    } else if (typeof usual === "boolean") {
      if (text === "1" || text === "0") state[key] = text === "1";
    } else if (Object.hasOwn(CHOICES, key)) {
      if (/** @type {any} */ (CHOICES)[key].includes(text)) state[key] = text;
    } else if (key !== "at" || /^[a-z_]+(\.\d{1,6})+$/.test(text)) state[key] = text;
  }
  const asked = new URLSearchParams(fragment.replace(/^#/, ""));
  if (asked.has("sort") && !asked.has("metric") && state.sort !== "place") state.metric = state.sort; // sorted by it, so it is what is shown
  return state;
}

/** The fragment of a state, without the #. @param {State} state */
export function formatState(state) {
  const found = new URLSearchParams();
  for (const [key, usual] of Object.entries(DEFAULTS)) {
    const value = /** @type {any} */ (state)[key];
    if (value === usual || value === null || (key === "pixels" && (state.packed || value.length > LONGEST))) continue;
    found.set(key, typeof value === "boolean" ? (value ? "1" : "0") : String(value));
  }
  return found.toString();
}

/** Pairs of numbers in a text: "0.1,1.3" → [[0, 1], [1, 3]], in order, each once. @param {string} text @returns {[number, number][]} */
export function parsePairs(text) {
  const found = new Map();
  for (const part of text.split(",")) {
    const match = /^(\d{1,3})\.(\d{1,3})$/.exec(part);
    if (match) found.set(part, [Number(match[1]), Number(match[2])]);
  }
  return [...found.values()];
}

/** @param {[number, number][]} pairs */
export function formatPairs(pairs) {
  return pairs.map((pair) => pair.join(".")).join(",");
}

/** The pairs with this one in, if it was out, and out, if it was in; sorted. @param {string} text @param {number} layer @param {number} head */
export function togglePair(text, layer, head) {
  const pairs = parsePairs(text);
  const rest = pairs.filter(([l, h]) => l !== layer || h !== head);
  if (rest.length === pairs.length) rest.push([layer, head]);
  return formatPairs(rest.sort((a, b) => a[0] - b[0] || a[1] - b[1]));
}

/** A store: its state, and those who want to know when it changes.
 * @param {State} first */
export function createStore(first) {
  let state = first;
  /** @type {((state: State, before: State, how: {push: boolean, quiet: boolean}) => void)[]} */
  const listeners = [];
  return {
    get: () => state,
    /** Change some keys. `push`: worth a step of the back button. @param {Partial<State>} patch @param {{push?: boolean, quiet?: boolean}} [how] */
    set(patch, how = {}) {
      const before = state;
      const next = { ...state, ...patch };
      if (Object.keys(patch).every((key) => /** @type {any} */ (before)[key] === /** @type {any} */ (next)[key])) return;
      state = next;
      for (const listener of listeners) listener(state, before, { push: how.push ?? false, quiet: how.quiet ?? false });
    },
    /** @param {(state: State, before: State, how: {push: boolean, quiet: boolean}) => void} listener */
    subscribe(listener) {
      listeners.push(listener);
    },
  };
}

/** A value that many look at and that is not part of the address: the pointer's cell, what moves.
 * @template T @param {T} first */
export function createSignal(first) {
  let value = first;
  /** @type {((value: T) => void)[]} */
  const listeners = [];
  return {
    get: () => value,
    /** @param {T} next */
    set(next) {
      if (next === value) return;
      value = next;
      for (const listener of listeners) listener(value);
    },
    /** @param {(value: T) => void} listener */
    subscribe(listener) {
      listeners.push(listener);
    },
  };
}

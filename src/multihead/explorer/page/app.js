// What every part of the page knows: the store, the session, what is pointed at and what is locked, colours and light.

import { FEW_KEYS, scaleOf } from "./colour.js";
import { eachFrame } from "./dom.js";
import { ancestry, exists, formatCell, parseCell } from "./explain.js";
import { createSignal } from "./state.js";

// The step that makes a tensor, and the steps that show it.
const MADE = { x: 1, context: 1, w_q: 1, w_k: 1, w_v: 1, q: 1, k: 1, v: 1, q_heads: 2, k_heads: 2, v_heads: 2, scores: 3, masked: 3, weights: 3, heads: 4, transposed: 5, merged: 6, output: 7, w_o: 7 };
const SHOWN = [[], ["x", "context", "w_q", "w_k", "w_v", "q", "k", "v"], ["q", "k", "v", "q_heads", "k_heads", "v_heads"], ["q_heads", "k_heads", "scores", "masked", "weights"], ["weights", "v_heads", "heads"], ["heads", "transposed"], ["transposed", "merged"], ["merged", "w_o", "output"]];
// Tensors that are compared share a scale.
const FAMILIES = [["q", "k", "q_heads", "k_heads"], ["v", "v_heads", "heads", "transposed", "merged"], ["scores", "masked"], ["w_q", "w_k", "w_v"], ["x", "context"]];
// Which axis of a tensor runs over queries, and which over keys.
const AXES = {
  query: { x: 0, q: 0, q_heads: 1, scores: 1, masked: 1, weights: 1, heads: 1, transposed: 0, merged: 0, output: 0 },
  key: { k: 0, v: 0, k_heads: 1, v_heads: 1, scores: 2, masked: 2, weights: 2, context: 0 },
};

/** @typedef {{name: string, index: number[]}} Cell */

/** @param {any} store @param {any} session @param {string} mode */
export function createApp(store, session, mode) {
  const hover = createSignal(/** @type {Cell | null} */ (null));
  const dark = matchMedia("(prefers-color-scheme: dark)");
  /** @type {{name: string, index: (number | null)[]}[]} */
  let spots = [];
  /** @type {Map<string, any[]> | null} */
  let lit = null;
  /** @type {any} */
  let palette = null;
  /** @type {WeakMap<any, Map<string, any>>} */
  const scales = new WeakMap();

  const theme = () => {
    const chosen = store.get().theme;
    return chosen === "auto" ? (dark.matches ? "dark" : "light") : chosen;
  };

  function colours() {
    if (palette?.theme !== theme()) {
      const style = getComputedStyle(document.documentElement);
      const read = (/** @type {string} */ name) => style.getPropertyValue(`--${name}`).trim();
      palette = { theme: theme(), paper: read("paper"), ink: read("ink"), soft: read("soft"), rule: read("rule"), lit: read("lit"), hidden: read("hidden"), accent: read("accent") };
    }
    return palette;
  }

  const locked = () => parseCell(store.get().at);
  const pointed = () => hover.get() ?? locked();

  /** The patterns of everything that belongs to one query or key. @param {Cell} token */
  function ofToken(token) {
    const axes = /** @type {any} */ (AXES)[token.name];
    const found = new Map();
    for (const [name, axis] of Object.entries(axes)) {
      const t = session.scene.get()?.tensors[name];
      if (!t) continue;
      const index = t.shape.map(() => null);
      index[/** @type {number} */ (axis)] = token.index[0];
      found.set(name, [{ name, index }]);
    }
    return found;
  }

  function scaleFor(/** @type {string} */ name) {
    const scene = session.scene.get();
    const kept = scales.get(scene) ?? new Map();
    scales.set(scene, kept);
    const family = FAMILIES.find((names) => names.includes(name)) ?? [name];
    let scale = kept.get(family[0]);
    if (!scale) {
      const few = name === "weights" && scene.keyLabels.length <= FEW_KEYS;
      scale = few ? scaleOf(name) : scaleOf(name, ...family.map((n) => scene.tensors[n]?.data).filter(Boolean));
      kept.set(family[0], scale);
    }
    return scale;
  }

  const app = {
    store,
    session,
    mode,
    hover,
    theme,
    colours,
    pointed,
    hoverCell: eachFrame((/** @type {Cell | null} */ cell) => {
      const now = hover.get();
      if (cell && now && formatCell(cell) === formatCell(now)) return;
      hover.set(cell);
    }),
    /** The cell that is pointed at, or else the locked one; null for a token. */
    focus() {
      const cell = pointed();
      return cell && cell.name !== "query" && cell.name !== "key" ? cell : null;
    },
    /** Which token is pointed at or locked, as a query or as a key; null if none. @param {"query" | "key"} role */
    chosenToken(role) {
      const cell = pointed();
      if (!cell) return null;
      if (cell.name === "query" || cell.name === "key") return cell.index[0];
      const axis = /** @type {any} */ (AXES)[role][cell.name];
      return axis === undefined ? null : cell.index[axis];
    },
    /** The same, or the last token. @param {"query" | "key"} role */
    token: (/** @type {"query" | "key"} */ role) => app.chosenToken(role) ?? (role === "query" ? session.scene.get().labels.length - 1 : 0),
    /** What lights up, by the name of the tensor. */
    lit() {
      if (lit) return lit;
      const scene = session.scene.get();
      const cell = pointed();
      if (!scene) lit = new Map();
      else if (cell && (cell.name === "query" || cell.name === "key")) lit = ofToken(cell);
      else if (cell && exists(scene, cell)) lit = ancestry(scene, cell);
      else if (spots.length) lit = new Map(spots.flatMap((spot) => [...ancestry(scene, spot)]));
      else lit = new Map();
      return lit;
    },
    /** What the animation points at; null: nothing. @param {...({name: string, index: (number | null)[]} | null)} at */
    spot(...at) {
      spots = /** @type {any} */ (at.filter(Boolean));
      lit = null;
    },
    /** Forget what was lit. */
    dim() {
      lit = null;
    },
    lightUp: () => {},
    /** Bring the stage into sight with the next picture. */
    toStage: () => {},
    /** @type {(text: string) => void} */
    live: () => {},
    /** @type {(table: any) => void} */
    openTable: () => {},
    /** @type {any} */
    maskButton: null,
    hiddenCells: () => session.scene.get()?.allowed ?? null,
    coloursByHead() {
      const { colour, step } = store.get();
      return colour === "auto" ? [2, 5, 6, 7].includes(step) : colour === "heads";
    },
    /** How a tensor is coloured. `by`: whose its cells are, where it may be coloured by head. @param {string} name @param {import("./paint.js").Whose | null} [by] */
    ink(name, by = null) {
      const heads = session.scene.get().layer.sizes.H;
      const of = by && app.coloursByHead() ? by : undefined;
      return { scale: scaleFor(name), theme: theme(), heads, of };
    },
    /** Lock a cell or a token; the same again frees it. @param {Cell} cell @param {boolean} [follow] go where it is shown */
    lock(cell, follow = false) {
      if (formatCell(cell) === store.get().at && !follow) app.free();
      else if (follow) app.go(cell);
      else {
        const { head } = headOfCell(cell);
        store.set({ at: formatCell(cell), ...(head === null ? {} : { head }) }, { push: true });
      }
    },
    /** Put the locked cell's head on the stage, for an address that names both. */
    align() {
      const cell = locked();
      const scene = session.scene.get();
      if (!cell || !exists(scene, cell)) return;
      const { head } = headOfCell(cell);
      if (head !== null) store.set({ head });
    },
    /** Choose a head; a number that is locked in another head is freed. @param {number} head */
    chooseHead(head) {
      const cell = locked();
      const bound = cell && exists(session.scene.get(), cell) && headOfCell(cell).head !== null && headOfCell(cell).head !== head;
      store.set({ head, ...(bound ? { at: "" } : {}) }, { push: true });
    },
    free() {
      hover.set(null);
      store.set({ at: "" }, { push: true });
    },
    /** Lock a cell and put the step that shows it on the stage. @param {Cell | null} cell */
    go(cell) {
      if (!cell) return;
      const state = store.get();
      const { head, part } = headOfCell(cell);
      const step = SHOWN[state.step].includes(cell.name) ? state.step : /** @type {any} */ (MADE)[cell.name] ?? state.step;
      hover.set(null);
      store.set({ at: formatCell(cell), step, ...(head === null ? {} : { head }), ...(part && step <= 2 ? { part } : {}) }, { push: true });
    },
  };

  /** Which head to put on the stage for a cell, and which of q, k and v. @param {Cell} cell */
  function headOfCell(cell) {
    const { H, G, V } = session.scene.get().layer.sizes;
    const now = store.get().head;
    const [a, b] = cell.index;
    const shared = (/** @type {number} */ g) => (Math.floor(now / (H / G)) === g ? now : g * (H / G));
    const part = /^(w_)?[qkv](_heads)?$/.test(cell.name) ? cell.name.replace("w_", "")[0] : null;
    if (["scores", "masked", "weights", "heads", "q_heads"].includes(cell.name)) return { head: a, part };
    if (["k_heads", "v_heads"].includes(cell.name)) return { head: shared(a), part };
    if (["q", "transposed", "w_q"].includes(cell.name)) return { head: b, part };
    if (["k", "v", "w_k", "w_v"].includes(cell.name)) return { head: shared(b), part };
    if (cell.name === "merged") return { head: Math.floor(b / V), part };
    if (cell.name === "w_o") return { head: a, part };
    return { head: null, part };
  }

  return app;
}

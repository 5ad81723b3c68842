// Step 3: every query meets every key, the mask falls, and softmax turns each row into weights that add up to one.

import { createBars } from "../bars.js";
import { headColour } from "../colour.js";
import { el, segmented } from "../dom.js";
import { createGrid } from "../grid.js";

/** @param {any} app */
export function createScore(app) {
  const way = segmented("Direction", [["to", "What it attends to"], ["from", "Who attends to it"]], (value) => app.store.set({ way: value }));
  const queries = createGrid(app, { id: "q_heads", height: 200 });
  const keys = createGrid(app, { id: "k_heads", height: 200 });
  const scores = createGrid(app, { id: "scores", square: true, height: 250, cell: 28 });
  const masked = createGrid(app, { id: "masked", square: true, height: 250, cell: 28 });
  const weights = createGrid(app, { id: "weights", square: true, height: 430, cell: 40 });
  const bars = createBars(app);
  const meet = el("div", { class: "row" }, queries.node, el("span", { class: "sign", text: "·", "aria-hidden": "true" }), keys.node);
  const before = el("div", { class: "column" }, scores.node, el("span", { class: "sign", text: "↓ mask", "aria-hidden": "true" }), masked.node);
  const node = el("div", { class: "step" }, meet,
    el("div", { class: "row score-row" }, before, el("span", { class: "sign", text: "softmax →", "aria-hidden": "true" }),
      el("div", { class: "row grow" }, weights.node, el("div", { class: "column bars-side" }, way.node, bars.node))));
  const rows = (/** @type {any} */ scene) => Math.min(16, scene.labels.length);
  return {
    node,
    grids: { q_heads: queries, k_heads: keys, scores, masked, weights },
    beats: (/** @type {any} */ scene) => 2 * rows(scene) + 1,
    /** @param {any} scene @param {any} state @param {number | null} t */
    update(scene, state, t) {
      const tensors = scene.tensors;
      const { H, G } = scene.layer.sizes;
      const h = Math.min(state.head, H - 1);
      const g = Math.floor(h / (H / G));
      const edge = headColour(h, H, app.theme());
      const note = `head ${h}${scene.off.has(h) ? ", switched off after step 4" : ""}`;
      const [, Q, K] = tensors.weights.shape;
      const beat = Q / rows(scene);
      const fill = t === null ? null : Math.min(Q, t * beat);
      const drop = t === null ? null : Math.min(1, Math.max(0, t - rows(scene)));
      const soft = t === null ? null : Math.max(0, (t - rows(scene) - 1) * beat);
      way.show(state.way);
      meet.hidden = !tensors.q_heads || !tensors.k_heads;
      if (!meet.hidden) {
        queries.show({ view: { name: "q_heads", t: tensors.q_heads, rows: [1], columns: [2], fixed: { 0: h } }, ink: app.ink("q_heads"), note, edge, rowLabels: scene.labels, rowRole: "query" });
        keys.show({ view: { name: "k_heads", t: tensors.k_heads, rows: [1], columns: [2], fixed: { 0: g } }, ink: app.ink("k_heads"), note: `head ${g}${G < H ? `, shared by ${H / G}` : ""}`, edge: headColour(h, H, app.theme()), rowLabels: scene.keyLabels, rowRole: "key" });
      }
      const flat = (/** @type {string} */ name) => ({ name, t: tensors[name], rows: [1], columns: [2], fixed: { 0: h } });
      before.hidden = !tensors.scores || !tensors.masked;
      if (!before.hidden) {
        scores.show({ view: flat("scores"), ink: app.ink("scores"), note, edge, rowLabels: scene.labels, rowRole: "query", columnRole: "key", reveal: fill });
        const raw = drop !== null && drop < 1;
        masked.show({ view: { ...flat(raw ? "scores" : "masked"), name: "masked" }, name: "masked", ink: app.ink("masked"), note, edge, rowLabels: scene.labels, rowRole: "query", columnRole: "key", reveal: drop === 0 ? 0 : null, drop });
      }
      weights.show({ view: flat("weights"), ink: app.ink("weights"), note, edge, rowLabels: scene.labels, columnLabels: scene.keyLabels, rowRole: "query", columnRole: "key", reveal: soft });
      if (t !== null && fill !== null && fill < Q && drop === 0) app.spot({ name: "scores", index: [h, Math.floor(fill), Math.min(K - 1, Math.floor((fill % 1) * K))] });
      else if (soft !== null && soft > 0 && soft < Q) app.spot({ name: "weights", index: [h, Math.floor(soft), Math.min(K - 1, Math.floor((soft % 1) * K))] });
      const token = app.token(state.way === "to" ? "query" : "key");
      bars.show(scene, h, soft !== null && soft < Q ? Math.floor(soft) : token, soft !== null && soft < Q ? "to" : state.way);
    },
    /** Only what depends on the pointer. @param {any} scene @param {any} state */
    light(scene, state) {
      bars.show(scene, Math.min(state.head, scene.layer.sizes.H - 1), app.token(state.way === "to" ? "query" : "key"), state.way);
    },
  };
}

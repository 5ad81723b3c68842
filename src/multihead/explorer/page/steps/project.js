// Step 1: a row of x sweeps over the columns of W_q, W_k or W_v.

import { el, segmented } from "../dom.js";
import { createGrid } from "../grid.js";
import { headColour } from "../colour.js";

/** @param {any} app */
export function createProject(app) {
  const part = segmented("Which projection", [["q", "q: what it asks"], ["k", "k: what it offers"], ["v", "v: what it says"]], (value) => app.store.set({ part: value }));
  const input = createGrid(app, { id: "x", height: 260 });
  const matrix = createGrid(app, { id: "w", height: 260 });
  const result = createGrid(app, { id: "part", height: 260 });
  const all = createGrid(app, { id: "all", height: 220 });
  const missing = el("p", { class: "hint" });
  const node = el("div", { class: "step" },
    el("div", { class: "tools" }, part.node),
    missing,
    el("div", { class: "row" }, input.node, el("span", { class: "sign", text: "·", "aria-hidden": "true" }), matrix.node, el("span", { class: "sign", text: "=", "aria-hidden": "true" }), result.node),
    el("div", { class: "row" }, all.node));
  return {
    node,
    grids: { x: input, w: matrix, part: result, all },
    beats: (/** @type {any} */ scene) => Math.min(24, scene.labels.length),
    /** @param {any} scene @param {any} state @param {number | null} t beats gone by, null at rest */
    update(scene, state, t) {
      const name = state.part;
      const made = scene.tensors[name];
      const w = scene.tensors[`w_${name}`];
      const from = name !== "q" && scene.tensors.context ? "context" : "x";
      const labels = name === "q" ? scene.labels : scene.keyLabels;
      const role = name === "q" ? "query" : "key";
      part.show(name);
      missing.hidden = Boolean(made && w);
      missing.textContent = made ? "This model does not give its weights: q, k and v are shown as it made them." : `This model does not give ${name}. Step 3 shows its weights.`;
      matrix.node.hidden = !w;
      result.node.hidden = all.node.hidden = !made;
      input.node.hidden = !scene.tensors[from];
      if (scene.tensors[from]) {
        input.show({ view: { name: from, t: scene.tensors[from], rows: [0], columns: [1] }, ink: app.ink(from), rowLabels: labels, rowRole: role });
      }
      if (!made) return;
      const heads = made.shape[1];
      const head = Math.floor(state.head / (scene.layer.sizes.H / heads));
      const edge = headColour(head, heads, app.theme());
      const note = `head ${head}`;
      const N = made.shape[0];
      const reveal = t === null ? null : (t * N) / Math.min(24, N);
      if (w) matrix.show({ view: { name: `w_${name}`, t: w, rows: [0], columns: [2], fixed: { 1: head } }, ink: app.ink(`w_${name}`), name: `W_${name}`, note, edge });
      result.show({ view: { name, t: made, rows: [0], columns: [2], fixed: { 1: head } }, ink: app.ink(name), note, edge, rowLabels: labels, rowRole: role, reveal });
      all.show({ view: { name, t: made, rows: [0], columns: [1, 2] }, ink: app.ink(name), note: `all ${heads} heads side by side`, rowLabels: labels, rowRole: role, bands: { size: made.shape[2], heads }, reveal });
      if (reveal !== null && reveal < N) app.spot({ name, index: [Math.floor(reveal), head, Math.min(made.shape[2] - 1, Math.floor((reveal % 1) * made.shape[2]))] });
    },
  };
}

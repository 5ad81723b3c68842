// Step 7: W_o stirs the heads together. Until here every column had the hue of one head.

import { blend, headColour, parseHex, toOklab } from "../colour.js";
import { el } from "../dom.js";
import { numberText } from "../explain.js";
import { createGrid } from "../grid.js";
import { bitmap } from "../paint.js";

/** How much each head writes to each column of one output row: |Σ merged·W_o| over the head's numbers, (H, E).
 * @param {any} scene @param {number} n */
export function writtenBy(scene, n) {
  const { merged, w_o } = scene.tensors;
  const [H, V, E] = w_o.shape;
  const found = new Float32Array(H * E);
  for (let h = 0; h < H; h++) {
    for (let d = 0; d < V; d++) {
      const value = merged.data[n * H * V + h * V + d];
      const at = (h * V + d) * E;
      for (let e = 0; e < E; e++) found[h * E + e] += value * w_o.data[at + e];
    }
  }
  return found.map(Math.abs);
}

/** @param {any} app */
export function createOutput(app) {
  const merged = createGrid(app, { id: "merged", height: 240, top: 13 }); // room for the lane above the output, in all three
  const matrix = createGrid(app, { id: "w_o", height: 240, top: 13 });
  const result = createGrid(app, { id: "output", height: 240, top: 13 });
  const mixing = createGrid(app, { id: "mixing", square: true, height: 230, cell: 26, say: (h, g, value) => `head ${h} writes ${numberText(value)} of the length of W_o to group ${g}` });
  const box = el("input", { type: "checkbox", id: "mixing-switch", onchange: () => app.store.set({ mixing: box.checked }, { push: true }) });
  const says = el("p", { class: "verdict", id: "mixing-says" });
  const sign = el("span", { class: "sign", text: "·", "aria-hidden": "true" });
  const missing = el("p", { class: "hint", text: "This model does not give what its heads put out, or what W_o makes of it." });
  const row = el("div", { class: "row" }, merged.node, sign, matrix.node, el("span", { class: "sign", text: "=", "aria-hidden": "true" }), result.node);
  const why = el("section", { class: "why", "aria-label": "Why W_o" }, el("h3", { text: "Why W_o?" }),
    el("div", { class: "row" }, mixing.node, el("div", { class: "grow" }, el("label", { class: "switch" }, box, " Multiply by W_o"), says)));
  const node = el("div", { class: "step" }, row, missing, why);
  /** @type {{key: string, t: any, lane: HTMLCanvasElement} | null} */
  let kept = null;

  /** The hue of each output column for item n, mixed of those who wrote it: a picture one pixel high. @param {any} scene @param {number} n */
  function lane(scene, n) {
    const { H, V } = scene.layer.sizes;
    if (scene.mixing && !scene.tensors.w_o) return undefined;
    const key = `${n} ${app.theme()} ${scene.mixing}`;
    if (kept && kept.t === scene.tensors.merged && kept.key === key) return kept.lane;
    const E = scene.tensors.output.shape[1];
    const labs = Array.from({ length: H }, (_, h) => toOklab(parseHex(headColour(h, H, app.theme()))));
    const by = scene.mixing ? writtenBy(scene, n) : null;
    const image = new ImageData(E, 1);
    for (let e = 0; e < E; e++) {
      const shares = labs.map((_, h) => (by ? by[h * E + e] ** 2 : Number(h === Math.floor(e / V))));
      image.data.set([...blend(labs, shares), 255], 4 * e);
    }
    kept = { key, t: scene.tensors.merged, lane: bitmap(image) };
    return kept.lane;
  }

  function update(/** @type {any} */ scene, /** @type {any} */ state, /** @type {number | null} */ t) {
    const tensors = scene.tensors;
    const { H, V } = scene.layer.sizes;
    missing.hidden = Boolean(tensors.merged && tensors.output);
    row.hidden = !missing.hidden;
    why.hidden = !tensors.w_o || row.hidden;
    if (row.hidden) return;
    const N = tensors.merged.shape[0];
    /** @type {import("../paint.js").Whose} */
    const byHead = { along: "columns", size: V, first: 0 };
    const E = tensors.output.shape[1];
    const reveal = t === null ? null : (t * N) / Math.min(24, N);
    const moving = reveal !== null && reveal < N;
    const n = moving ? Math.floor(reveal) : app.chosenToken("query") ?? N - 1;
    merged.show({ view: { name: "merged", t: tensors.merged, rows: [0], columns: [1] }, ink: app.ink("merged", byHead), rowLabels: scene.labels, rowRole: "query", bands: { size: V, heads: H } });
    matrix.node.hidden = sign.hidden = !tensors.w_o || !scene.mixing;
    if (tensors.w_o && scene.mixing) matrix.show({ view: { name: "w_o", t: tensors.w_o, rows: [0, 1], columns: [2] }, ink: app.ink("w_o"), name: "W_o", rowBands: { size: V, heads: H } });
    result.show({ view: { name: "output", t: tensors.output, rows: [0], columns: [1] }, ink: app.ink("output", scene.mixing ? null : byHead), note: `hues: ${scene.labels[n]}`, rowLabels: scene.labels, rowRole: "query", reveal, lane: lane(scene, n) });
    if (moving) app.spot({ name: "output", index: [n, Math.min(E - 1, Math.floor((reveal % 1) * E))] });
    box.checked = scene.mixing;
    if (why.hidden) return;
    const t2 = scene.mixing ? tensors.mixing : { shape: [H, H], data: Float32Array.from({ length: H * H }, (_, i) => (i % (H + 1) === 0 ? H ** -0.5 : 0)) };
    const most = t2.data.reduce((/** @type {number} */ a, /** @type {number} */ b) => Math.max(a, b), 0);
    mixing.show({ view: { name: "mixing", t: t2, rows: [0], columns: [1] }, ink: { scale: { kind: "sequential", low: 0, high: most }, theme: app.theme() }, name: "mixing", note: "heads down, groups of outputs across", rowLabels: Array.from({ length: H }, (_, h) => `head ${h}`), bands: { size: 1, heads: H }, rowBands: { size: 1, heads: H } });
    says.textContent = scene.mixing
      ? `Every head writes to every group of ${Math.round(E / H)} outputs: the hues above the output are mixed. That is what W_o is for.`
      : `Without W_o each group of ${V} outputs depends on one head only: the hues stay apart, and nothing one head found reaches another's columns.`;
  }
  return {
    node,
    grids: { merged, w_o: matrix, output: result, mixing },
    beats: (/** @type {any} */ scene) => Math.min(24, scene.labels.length),
    update,
    light: (/** @type {any} */ scene, /** @type {any} */ state) => update(scene, state, null),
  };
}

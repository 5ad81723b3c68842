// Step 4: value rows, each as strong as its weight, blend into one row.

import { headColour } from "../colour.js";
import { el } from "../dom.js";
import { createGrid } from "../grid.js";

/** @param {any} app */
export function createMix(app) {
  const weights = createGrid(app, { id: "weights", square: true, height: 300, cell: 30 });
  const values = createGrid(app, { id: "v_heads", height: 300 });
  const heads = createGrid(app, { id: "heads", height: 300 });
  const says = el("p", { class: "hint", "aria-live": "off" });
  const missing = el("p", { class: "hint", text: "This model gives its weights, but not the values they weigh." });
  const row = el("div", { class: "row" }, weights.node, el("span", { class: "sign", text: "·", "aria-hidden": "true" }), values.node, el("span", { class: "sign", text: "=", "aria-hidden": "true" }), heads.node);
  const node = el("div", { class: "step" }, row, says, missing);
  const rows = (/** @type {any} */ scene) => Math.min(24, scene.labels.length);

  /** The value rows as strong as the weights of one query. @param {any} scene @param {number} h @param {number} q */
  function strengths(scene, h, q) {
    const { shape: [, Q, K], data } = scene.tensors.weights;
    const found = new Float32Array(K);
    let most = 1e-9;
    for (let k = 0; k < K; k++) most = Math.max(most, data[(h * Q + q) * K + k]);
    for (let k = 0; k < K; k++) found[k] = 0.06 + (0.94 * data[(h * Q + q) * K + k]) / most;
    return found;
  }

  /** @param {any} scene @param {any} state @param {number | null} t */
  function update(scene, state, t) {
    const tensors = scene.tensors;
    missing.hidden = Boolean(tensors.v_heads && tensors.heads);
    row.hidden = !missing.hidden;
    says.hidden = row.hidden;
    if (row.hidden) return;
    const { H, G } = scene.layer.sizes;
    const h = Math.min(state.head, H - 1);
    const edge = headColour(h, H, app.theme());
    const how = scene.off.get(h);
    const note = `head ${h}${how ? (how === "mean" ? ", set to its mean" : ", switched off") : ""}`;
    const Q = tensors.heads.shape[1];
    const reveal = t === null ? null : (t * Q) / rows(scene);
    const moving = reveal !== null && reveal < Q;
    const focus = app.focus();
    const q = moving ? Math.floor(reveal) : focus && ["weights", "heads"].includes(focus.name) ? focus.index[1] : app.chosenToken("query");
    weights.show({ view: { name: "weights", t: tensors.weights, rows: [1], columns: [2], fixed: { 0: h } }, ink: app.ink("weights"), note, edge, rowLabels: scene.labels, rowRole: "query", columnRole: "key" });
    values.show({ view: { name: "v_heads", t: tensors.v_heads, rows: [1], columns: [2], fixed: { 0: Math.floor(h / (H / G)) } }, ink: app.ink("v_heads"), note: `head ${Math.floor(h / (H / G))}`, edge, rowLabels: scene.keyLabels, rowRole: "key", alpha: q === null ? null : strengths(scene, h, q) });
    heads.show({ view: { name: "heads", t: tensors.heads, rows: [1], columns: [2], fixed: { 0: h } }, ink: app.ink("heads"), note, edge, rowLabels: scene.labels, rowRole: "query", reveal });
    says.replaceChildren(...(q === null ? ["Point at a row of weights: the value rows fade to their share in it."] : ["The row of ", el("bdi", { class: "token-name", text: scene.labels[q] }), " is these value rows, each as strong as its weight."]));
    if (moving) app.spot({ name: "weights", index: [h, q, null] }, { name: "heads", index: [h, q, null] });
  }
  return {
    node,
    grids: { weights, v_heads: values, heads },
    beats: rows,
    update,
    light: (/** @type {any} */ scene, /** @type {any} */ state) => update(scene, state, null),
  };
}

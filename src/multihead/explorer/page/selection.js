// What is chosen, in words that Python can use: `widget.selection`.

import { exists, parseCell } from "./explain.js";
import { valueAt } from "./tensor.js";

/** @param {any} app @returns {Record<string, any>} */
export function selectionOf(app) {
  const state = app.store.get();
  const scene = app.session.scene.get();
  const cell = parseCell(state.at);
  /** @type {Record<string, any>} */
  const found = { model: app.session.model().id, layer: state.layer, head: state.head, step: state.step };
  if (!cell) return found;
  found.name = cell.name;
  found.index = cell.index;
  if (["scores", "masked", "weights"].includes(cell.name)) [, found.query, found.key] = cell.index;
  else if (cell.name === "query" || cell.name === "key") found[cell.name] = cell.index[0];
  if (scene && exists(scene, cell) && scene.tensors[cell.name]) {
    const value = valueAt(scene.tensors[cell.name], cell.index);
    found.value = Number.isFinite(value) ? value : null;
  }
  if (scene && found.query !== undefined) found.query_token = scene.labels[found.query];
  if (scene && found.key !== undefined) found.key_token = scene.keyLabels[found.key];
  return found;
}

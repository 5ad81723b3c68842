// The numbers of a picture as a real table, in a dialog.

import { el } from "./dom.js";
import { numberText } from "./explain.js";
import { csvOf, fileName, npzOf } from "./numbers.js";

const MOST = { rows: 256, columns: 64 };

/** `tensor` is the whole of which the table shows a part, `name` and `note` say which.
 * @typedef {import("./numbers.js").Table & {title: string, name: string, note?: string, tensor: import("./numbers.js").Tensor}} Table */

/** @param {(name: string, blob: Blob) => void} download */
export function createTable(download) {
  const title = el("h2", { id: "table-title" });
  const note = el("p", { class: "hint" });
  const body = el("div", { class: "table-scroll", tabindex: "0", role: "region", "aria-labelledby": "table-title" });
  /** @type {Table | null} */
  let shown = null;
  const save = el("button", { type: "button", text: "Save as CSV", title: "The numbers of this table", onclick: () => shown && download(`${fileName(shown.name, shown.tensor.shape, shown.note)}.csv`, new Blob([csvOf(shown)], { type: "text/csv" })) });
  const npz = el("button", { type: "button", text: "Save as npz", title: "The whole tensor, for numpy.load", onclick: () => shown && download(`${fileName(shown.name, shown.tensor.shape)}.npz`, new Blob([npzOf({ [shown.name]: shown.tensor })], { type: "application/zip" })) });
  const close = el("button", { type: "button", text: "Close", onclick: () => dialog.close() });
  const dialog = el("dialog", { class: "table", "aria-labelledby": "table-title" }, el("header", {}, title, save, npz, close), note, body);
  return {
    node: dialog,
    /** @param {Table} t */
    open(t) {
      shown = t;
      const [rows, columns] = [Math.min(t.rows, MOST.rows), Math.min(t.columns, MOST.columns)];
      title.textContent = t.title;
      note.textContent = rows < t.rows || columns < t.columns ? `The first ${rows} of ${t.rows} rows and ${columns} of ${t.columns} columns; the file has all.` : "";
      const head = el("tr", {}, el("td"), ...Array.from({ length: columns }, (_, c) => el("th", { scope: "col", text: t.columnLabels?.[c] ?? String(c) })));
      const lines = Array.from({ length: rows }, (_, r) => el("tr", {}, el("th", { scope: "row", text: t.rowLabels?.[r] ?? String(r) }), ...Array.from({ length: columns }, (__, c) => el("td", { text: numberText(t.value(r, c)) }))));
      body.replaceChildren(el("table", {}, el("caption", { class: "unseen", text: t.title }), el("thead", {}, head), el("tbody", {}, ...lines)));
      dialog.showModal();
    },
  };
}

// The numbers of a picture as a real table, in a dialog.

import { el } from "./dom.js";
import { numberText } from "./explain.js";

const MOST = { rows: 256, columns: 64 };

/** @typedef {{title: string, rows: number, columns: number, rowLabels?: string[], columnLabels?: string[], value: (row: number, column: number) => number}} Table */

/** Numbers as comma-separated values. @param {Table} t */
export function csvOf(t) {
  const cell = (/** @type {string} */ text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const lines = [["", ...Array.from({ length: t.columns }, (_, c) => t.columnLabels?.[c] ?? String(c))].map(cell).join(",")];
  for (let r = 0; r < t.rows; r++) lines.push([cell(t.rowLabels?.[r] ?? String(r)), ...Array.from({ length: t.columns }, (_, c) => String(t.value(r, c)))].join(","));
  return `${lines.join("\n")}\n`;
}

/** @param {(name: string, blob: Blob) => void} download */
export function createTable(download) {
  const title = el("h2", { id: "table-title" });
  const note = el("p", { class: "hint" });
  const body = el("div", { class: "table-scroll", tabindex: "0", role: "region", "aria-labelledby": "table-title" });
  /** @type {Table | null} */
  let shown = null;
  const save = el("button", { type: "button", text: "Save as CSV", onclick: () => shown && download(`${shown.title.split(" ")[0]}.csv`, new Blob([csvOf(shown)], { type: "text/csv" })) });
  const close = el("button", { type: "button", text: "Close", onclick: () => dialog.close() });
  const dialog = el("dialog", { class: "table", "aria-labelledby": "table-title" }, el("header", {}, title, save, close), note, body);
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

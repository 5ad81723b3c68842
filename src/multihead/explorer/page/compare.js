// Two side by side: every tensor of both, the first that differs marked, and what the doctor says about it.

import { scaleOf } from "./colour.js";
import { el } from "./dom.js";
import { numberText } from "./explain.js";
import { createGrid } from "./grid.js";

const KEYED = ["scores", "masked", "weights"]; // whose columns are keys
const percent = (/** @type {number} */ share) => `${(100 * share).toFixed(1)} %`;

/** A text in which what stands between backticks is code. @param {string} text */
const withCode = (text) => text.split("`").map((part, n) => (n % 2 ? el("code", { text: part }) : part));

/** @param {any} app */
export function createCompare(app) {
  const { store, session } = app;
  const title = el("h2", { id: "compare-title", text: "Side by side" });
  const verdict = el("div", { class: "verdict", id: "compare-verdict" });
  const list = el("ol", { class: "compare-list", "aria-label": "Tensors of both" });
  const words = el("p", { class: "hint", id: "compare-words" });
  const says = el("p", { class: "said", id: "compare-says", role: "status" });
  const local = Object.create(app, { lit: { value: () => new Map() }, focus: { value: () => null } });
  const names = (/** @type {string} */ axis, /** @type {string} */ name, /** @type {number} */ size) => {
    const scene = session.scene.get();
    const found = axis === "row" ? (/^[kv](_heads)?$/.test(name) ? scene.keyLabels : scene.labels) : KEYED.includes(name) ? scene.keyLabels : null;
    return found?.length === size ? found : undefined;
  };
  const said = (/** @type {string} */ side) => (/** @type {number} */ r, /** @type {number} */ c, /** @type {number} */ v) => `${side}, ${rowNames?.[r] ?? `row ${r}`}${columnNames ? ` → ${columnNames[c]}` : `, column ${c}`}: ${numberText(v)}`;
  /** @type {string[] | undefined} */
  let rowNames;
  /** @type {string[] | undefined} */
  let columnNames;
  const grids = ["left", "right", "gap"].map((id) => createGrid(local, { id: `compare-${id}`, height: 260, cell: 30, say: said(id === "gap" ? "the difference" : id === "left" ? "first" : "second") }));
  const layers = el("ol", { class: "compare-list compare-layers", "aria-label": "Layers of both" });
  const whole = el("p", { class: "said", id: "compare-whole", role: "status" });
  const guesses = el("table", { class: "compare-predictions" });
  const node = el("section", { class: "compare", "aria-labelledby": "compare-title", hidden: true }, title, verdict, words, whole, layers, guesses, list, says, el("div", { class: "row" }, ...grids.map((grid) => grid.node)));
  /** @type {any} */
  let answer = null;
  let asked = "";
  /** @type {any} */
  let all = null; // of both models as wholes

  async function load() {
    const { layer } = store.get();
    const about = { model: session.model().id, input: session.inputOf(store.get()) };
    const request = { ...about, layer };
    const key = JSON.stringify(request);
    if (key === asked) return;
    asked = key;
    try {
      const found = await session.python.ask("compare", request);
      if (asked === key) answer = found;
      update();
      await oversee(about);
    } catch (error) {
      session.complain(error);
    }
  }

  let overseen = "";
  /** Both models as wholes: once for each input. @param {any} about */
  async function oversee(about) {
    const key = JSON.stringify(about.input);
    if (key === overseen) return;
    overseen = key;
    try {
      const { meta } = await session.python.ask("overview", about);
      if (overseen !== key) return;
      all = meta;
    } catch (error) {
      overseen = "";
      throw error;
    }
    update();
  }

  /** Which layer differs first, each layer to click on, and the two predictions. */
  function showWhole() {
    const many = all !== null && all.layers.length > 1;
    layers.hidden = whole.hidden = !many;
    guesses.hidden = !all?.predictions;
    if (!all) return;
    const first = all.layers[all.first];
    whole.textContent = !first ? `Every layer${all.layers.some((/** @type {any} */ row) => row.only) ? " that both have" : ""} is the same in both.` : `${first.name} differs first, in ${first.first}${first.first === "x" ? ": what goes into it differs already, so look before it" : ""}.`;
    layers.replaceChildren(...all.layers.map(layerItem));
    showGuesses(all.predictions);
  }

  /** A layer of both, or of the deeper one alone: then that is the model to look at. @param {any} row @param {number} n */
  function layerItem(row, n) {
    const mark = row.only ? "–" : row.same ? "=" : "≠";
    const text = row.only ? `only in ${row.only}` : row.same ? "equal" : `from ${row.first} on${row.most === null ? "" : `, output up to ${numberText(row.most)} apart`}`;
    const here = n < session.model().layers.length;
    const there = here || session.models.some((/** @type {any} */ m) => m.id === row.model);
    const go = () => store.set({ ...(here ? {} : { model: row.model }), layer: n, tensor: "", at: "" }, { push: true });
    return el("li", {}, el("button", { type: "button", "data-layer": String(n), disabled: !there, class: n === all.first ? "first" : "", "aria-pressed": String(n === store.get().layer), onclick: go },
      el("span", { text: mark, "aria-hidden": "true" }), el("b", { text: row.name }), el("span", { class: "hint", text })));
  }

  function showGuesses(/** @type {any} */ found) {
    if (!found) return;
    const heading = el("caption", { text: found.says ? `The predictions cannot be set side by side: ${found.says}.` : `What each predicts, at most ${percent(found.most)} apart` });
    const rows = (found.rows ?? []).map((/** @type {any} */ row) => el("tr", {}, el("th", { scope: "row" }, el("bdi", { text: row.text })), el("td", { text: percent(row.left) }), el("td", { text: percent(row.right) })));
    const head = found.rows ? [el("thead", {}, el("tr", {}, el("th", { scope: "col", text: "next" }), ...[answer.meta.left, answer.meta.right].map((text) => el("th", { scope: "col", text }))))] : [];
    guesses.replaceChildren(heading, ...head, el("tbody", {}, ...rows));
  }

  function chosen() {
    const names = answer.meta.rows.map((/** @type {any} */ row) => row.name);
    const { tensor } = store.get();
    return names.includes(tensor) ? tensor : answer.meta.first ?? names[names.length - 1];
  }

  function item(/** @type {any} */ row) {
    const mark = row.same === null ? "–" : row.same ? "=" : "≠";
    const text = row.same === null ? row.says : row.same ? "equal" : row.says || `up to ${numberText(row.most ?? Infinity)} apart`;
    const first = row.name === answer.meta.first;
    const how = row.how === "rebuilt" ? ", rebuilt" : "";
    return el("li", {}, el("button", { type: "button", "data-tensor": row.name, "data-same": String(row.same), class: first ? "first" : "", "aria-pressed": String(row.name === chosen()), onclick: () => store.set({ tensor: row.name }, { push: true }) },
      el("span", { text: mark, "aria-hidden": "true" }), el("code", { text: row.name }), el("span", { class: "hint", text: `${first ? "the first that differs, " : ""}${text}${how}` })));
  }

  function showVerdict(/** @type {any} */ report) {
    verdict.hidden = !report;
    if (!report) return;
    verdict.replaceChildren(el("p", {}, el("b", { text: `${report.verdict}: ` }), report.headline), ...report.causes.flatMap((/** @type {any} */ cause) => [el("p", {}, report.causes.length < 2 ? "" : `${cause.step ? `Step ${cause.step}: ` : ""}${cause.cause}. `, ...withCode(cause.explanation)), ...(cause.fix ? [el("pre", { text: cause.fix })] : [])]),
      ...report.where.map((/** @type {string} */ text) => el("p", { class: "hint", text })), ...(report.sure ? [el("p", { class: "hint", text: `How sure: ${report.sure}` })] : []));
  }

  function showTensors() {
    const name = chosen();
    const both = [answer.tensors[`left.${name}`], answer.tensors[`right.${name}`]];
    const titles = [answer.meta.left, answer.meta.right];
    const known = both.filter(Boolean);
    const head = store.get().head;
    const shapes = known.map((t) => JSON.stringify(t.shape));
    const alike = known.length === 2 && shapes[0] === shapes[1];
    const gap = alike ? { shape: both[0].shape, data: both[0].data.map((/** @type {number} */ v, /** @type {number} */ i) => (v === both[1].data[i] ? 0 : both[1].data[i] - v)) } : null;
    const scale = scaleOf(name, ...known.map((t) => t.data)); // the same for both
    [...both, gap].forEach((t, n) => {
      grids[n].node.hidden = !t;
      if (!t) return;
      const three = t.shape.length === 3;
      const byHead = three && !["q", "k", "v", "transposed"].includes(name); // heads come first from step 2 on
      const h = byHead ? Math.min(head, t.shape[0] - 1) : 0;
      const view = byHead ? { name: `compare-${n}`, t, rows: [1], columns: [2], fixed: { 0: h } } : { name: `compare-${n}`, t, rows: [0], columns: three ? [1, 2] : [1] };
      rowNames = names("row", name, t.shape[byHead ? 1 : 0]);
      columnNames = names("column", name, t.shape[2]);
      grids[n].show({ view, rowLabels: rowNames, columnLabels: columnNames, ink: { scale: n === 2 ? scaleOf("gap", t.data) : scale, theme: app.theme() }, name: n === 2 ? "difference" : name, note: `${n === 2 ? "second less first" : titles[n]}${byHead ? `, head ${h}` : ""}` });
    });
    const row = answer.meta.rows.find((/** @type {any} */ r) => r.name === name);
    says.textContent = row.same === null ? `${name} is ${row.says}.` : row.same ? `${name} is the same in both.` : `${name} differs: ${row.says || `most at [${row.at.join(", ")}], by ${numberText(row.most ?? Infinity)}`}.`;
  }

  function update() {
    const pair = session.pair;
    node.hidden = !pair;
    if (!pair || !session.scene.get()) return;
    load();
    if (!answer) return;
    const { left, right, report } = answer.meta;
    title.textContent = `Side by side: ${left} and ${right}`;
    words.textContent = answer.meta.words.join(" ");
    words.hidden = !words.textContent;
    showVerdict(report);
    showWhole();
    list.replaceChildren(...answer.meta.rows.map(item));
    showTensors();
  }

  return { node, update };
}

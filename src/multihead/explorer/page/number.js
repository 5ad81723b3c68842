// The number under the pointer, or the locked one: its value, the line that made it with the real numbers, and the terms
// that add most. A term leads to where it came from; back and forward walk that path.

import { headColour } from "./colour.js";
import { eachFrame, el } from "./dom.js";
import { explain, exists, formatCell, numberText, parseCell, titleOf } from "./explain.js";

/** @param {any} app */
export function createNumber(app) {
  /** @type {string[]} */
  let path = [];
  let at = -1;
  const lead = el("p", { class: "lead" });
  const title = el("h2", { id: "number-title" });
  const value = el("output", { class: "value", id: "number-value" });
  const formula = el("code", { class: "formula" });
  const lines = el("div", { class: "lines" });
  const terms = el("ol", { class: "bars terms" });
  const rest = el("p", { class: "hint" });
  const back = el("button", { type: "button", text: "← Back", onclick: () => walk(-1) });
  const forward = el("button", { type: "button", text: "Forward →", onclick: () => walk(1) });
  const free = el("button", { type: "button", text: "Free (Esc)", onclick: () => app.free() });
  const node = el("aside", { class: "number", "aria-labelledby": "number-title" }, lead, title, value, formula, lines, terms, rest, el("div", { class: "tools" }, back, forward, free));

  function walk(/** @type {number} */ by) {
    const next = path[at + by];
    if (next === undefined) return;
    at += by;
    app.go(parseCell(next));
  }

  // On a narrow screen the panel stands below the stage: the number itself then stays in sight at the lower edge.
  const brief = el("button", { type: "button", class: "number-brief", hidden: true, onclick: () => node.scrollIntoView({ block: "start" }) });
  let inSight = true;
  const away = () => (brief.hidden = inSight || !app.pointed());
  new IntersectionObserver(([entry]) => {
    inSight = entry.isIntersecting;
    away();
  }).observe(node);

  /** The largest weight of the chosen token, or of the last row: something to look at before anything is pointed at. @param {any} scene */
  function instance(scene) {
    const { shape: [H, Q, K], data } = scene.tensors.weights;
    const h = Math.min(app.store.get().head, H - 1);
    const key = app.store.get().way === "from" ? app.chosenToken("key") : null;
    let q = app.chosenToken("query") ?? Q - 1;
    let k = key ?? 0;
    const weight = (/** @type {number} */ i, /** @type {number} */ j) => data[(h * Q + i) * K + j];
    if (key === null) for (let j = 1; j < K; j++) k = weight(q, j) > weight(q, k) ? j : k;
    else for (let i = 0; i < Q; i++) q = weight(i, k) > weight(q, k) ? i : q;
    return { name: "weights", index: [h, q, k] };
  }

  /** The largest number that the step on the stage makes of that row. @param {any} scene */
  function made(scene) {
    const { step, part, head } = app.store.get();
    const name = ["", part, `${part}_heads`, "weights", "heads", "transposed", "merged", "output"][step];
    const t = scene.tensors[name];
    if (step === 3 || !t || app.pointed()) return instance(scene);
    const { H, V } = scene.layer.sizes;
    const first = step === 2 || step === 4; // whether heads come first
    const heads = t.shape.length === 3 ? t.shape[first ? 0 : 1] : H;
    const h = Math.floor((Math.min(head, H - 1) * heads) / H);
    const n = t.shape[first ? 1 : 0] - 1;
    const [from, to] = step === 6 ? [h * V, (h + 1) * V] : [0, t.shape[t.shape.length - 1]];
    const index = (/** @type {number} */ d) => (t.shape.length === 2 ? [n, d] : first ? [h, n, d] : [n, h, d]);
    const value = (/** @type {number} */ d) => Math.abs(t.data[index(d).reduce((at, i, axis) => at * t.shape[axis] + i, 0)]);
    let most = from;
    for (let d = from; d < to; d++) if (value(d) > value(most)) most = d;
    return { name, index: index(most) };
  }

  let shown = { scene: /** @type {any} */ (null), cell: "", theme: "" };
  let width = 0;
  let tallest = 0;
  /** As tall as it has been at this width: what stands below must not jump while one points here and there. */
  function holdPlace() {
    if (node.clientWidth !== width) [tallest, node.style.minHeight] = [0, ""];
    width = node.clientWidth;
    const high = Math.min(node.offsetHeight, 900);
    if (high > tallest) [tallest, node.style.minHeight] = [high, `${high}px`];
  }

  const holdSoon = eachFrame(holdPlace); // in the next frame: to ask for its height now would lay the page out twice

  function show() {
    const scene = app.session.scene.get();
    if (!scene) return;
    const locked = parseCell(app.store.get().at);
    const pointed = app.focus();
    const cell = exists(scene, pointed) ? pointed : made(scene);
    const said = explain(scene, cell);
    const isLocked = locked !== null && formatCell(cell) === formatCell(locked);
    lead.textContent = isLocked ? "Locked" : exists(scene, pointed) ? "Under the pointer" : app.pointed() ? "The largest weight of this token" : "For instance. Point at any number; click to lock it.";
    back.disabled = at <= 0;
    forward.disabled = at >= path.length - 1;
    free.disabled = !app.store.get().at;
    away();
    const now = { scene, cell: formatCell(cell), theme: app.theme() };
    if (now.scene === shown.scene && now.cell === shown.cell && now.theme === shown.theme) return; // a term under the pointer stays the one that is clicked
    shown = now;
    title.textContent = said.title;
    value.textContent = `= ${numberText(said.value)}`;
    brief.replaceChildren(el("span", { text: said.title }), el("b", { text: `= ${numberText(said.value)}` }), el("span", { class: "hint", text: "why?" }));
    formula.textContent = said.formula;
    lines.replaceChildren(...said.lines.map((text) => el("p", { text })));
    const most = said.terms.reduce((m, term) => Math.max(m, Math.abs(term.value)), 1e-30);
    terms.classList.toggle("signed", said.bars === "signed");
    terms.classList.toggle("shares", said.bars === "share");
    terms.classList.toggle("named", said.bars === "signed" && said.terms.length <= 2); // whole names of cells: a line each
    terms.replaceChildren(...said.terms.map((term) => row(scene, term, said.bars === "share" ? 1 : most, said.bars)));
    const own = said.bars === "share" ? said.terms.findIndex((term) => term.cells[0]?.index[2] === cell.index[2]) : -1;
    terms.children[own]?.classList.add("own");
    rest.textContent = !said.rest ? "" : said.rest.count === 1 ? `One more adds ${numberText(said.rest.value)}.` : `The other ${said.rest.count} add ${numberText(said.rest.value)}.`;
    holdSoon();
    if (exists(scene, pointed)) app.live(`${said.title} = ${numberText(said.value)}`);
  }

  function row(/** @type {any} */ scene, /** @type {any} */ term, /** @type {number} */ most, /** @type {string} */ bars) {
    const fill = el("span", { class: "fill" });
    const size = Number.isFinite(term.value) ? Math.min(1, Math.abs(term.value) / most) : 0;
    const half = bars === "signed" ? 50 : 100;
    fill.style.width = `${size * half}%`;
    if (bars === "signed") fill.style.marginLeft = term.value < 0 ? `${50 - size * 50}%` : "50%";
    fill.classList.add(term.value < 0 ? "minus" : "plus");
    if (term.head !== undefined) fill.style.background = headColour(term.head, scene.layer.sizes.H, app.theme());
    const parts = [el("span", { class: "token-name" }, el("bdi", { text: term.label })), el("span", { class: "track" }, fill), el("span", { class: "figure", text: numberText(term.value) }), el("span", { class: "detail", text: term.detail })];
    const [first] = term.cells;
    if (!first) return el("li", {}, el("div", { class: "term" }, ...parts));
    const names = term.cells.map((/** @type {any} */ c) => titleOf(scene, c)).join(" and ");
    return el("li", {}, el("button", { type: "button", class: "term", "aria-label": `${term.label}: ${numberText(term.value)}. Go to ${titleOf(scene, first)}`, title: `From ${names}`, onclick: () => app.lock(first, true) }, ...parts));
  }

  return {
    node,
    brief,
    show,
    /** Keep the path in step with what is locked. @param {string} locked */
    follow(locked) {
      if (!parseCell(locked) || path[at] === locked) return;
      if (path[at - 1] === locked) at -= 1;
      else if (path[at + 1] === locked) at += 1;
      else {
        path = [...path.slice(0, at + 1), locked].slice(-200);
        at = path.length - 1;
      }
    },
  };
}

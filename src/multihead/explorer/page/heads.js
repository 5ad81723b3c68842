// Every head of every layer as a thumbnail, sorted and filtered by the finder; two pinned side by side; a switch on each.

import { FEW_KEYS, headColour, scaleOf } from "./colour.js";
import { choice, el, fillChoice, segmented } from "./dom.js";
import { numberText } from "./explain.js";
import { createGrid } from "./grid.js";
import { bitmap, fit, layout, pixels } from "./paint.js";
import { formatPairs, parsePairs, togglePair } from "./state.js";

const THUMB = 84;
const PAGE = 192; // heads shown before one asks for more

/** The heads that pass the filter, in the order asked for. @param {any[]} heads @param {{sort: string, metric: string, least: number}} asked */
export function arrangeHeads(heads, asked) {
  const most = heads.reduce((m, head) => Math.max(m, head[asked.metric] ?? 0), 0);
  const bound = (most * asked.least) / 100;
  const kept = heads.map((head, n) => ({ head, n })).filter(({ head }) => asked.least === 0 || (head[asked.metric] ?? -1) >= bound);
  if (asked.sort === "place") return { kept, bound };
  return { kept: kept.sort((a, b) => (b.head[asked.sort] ?? -1) - (a.head[asked.sort] ?? -1) || a.n - b.n), bound };
}

/** @param {any} app */
export function createHeads(app) {
  const { store, session } = app;
  const sort = choice("Sort by", [], "place", (value) => store.set({ sort: value, ...(value === "place" ? {} : { metric: value }) }));
  const metric = choice("Find heads by", [], "induction", (value) => store.set({ metric: value }));
  const least = el("input", { type: "range", min: "0", max: "100", step: "1", "aria-label": "At least this much of the largest", oninput: () => store.set({ least: Number(least.value) }) });
  const bound = el("output", { class: "figure" });
  const how = segmented("A head that is off becomes", [["zero", "zero"], ["mean", "its mean"]], (value) => store.set({ with: value }));
  const all = el("button", { type: "button", text: "All heads on", onclick: () => store.set({ off: "" }, { push: true }) });
  const found = el("p", { class: "hint", role: "status" });
  const about = el("p", { class: "does" });
  const wall = el("ul", { class: "wall" });
  const more = el("button", { type: "button", text: "Show all", onclick: () => {
    shownMost = Infinity;
    update();
  } });
  const pins = el("div", { class: "pins", hidden: true });
  const node = el("section", { class: "heads", "aria-labelledby": "heads-title" }, el("h2", { id: "heads-title", text: "Heads" }),
    about,
    el("div", { class: "tools" }, el("label", {}, el("span", { class: "tool-label", text: "Sort" }), sort), el("label", {}, el("span", { class: "tool-label", text: "Find" }), metric), el("label", { class: "least" }, el("span", { class: "tool-label", text: "at least" }), least, bound), el("span", { class: "tool-label" }, el("span", { text: "Off means" }), how.node), all),
    found, pins, wall, more);
  let shownMost = PAGE;
  let drawnFor = "";

  function card(/** @type {any} */ head, /** @type {number} */ n) {
    const { maps } = session.wall.get();
    const canvas = el("canvas", { "aria-hidden": "true" });
    const name = `layer ${head.layer}, head ${head.head}`;
    const show = el("button", { type: "button", class: "thumb", "aria-label": `Show ${name}`, onclick: () => {
      app.toStage();
      store.set({ layer: head.layer, head: head.head, step: 3, at: "" }, { push: true });
    } }, canvas);
    const pin = el("button", { type: "button", class: "small", text: "Pin", "aria-label": `Pin ${name}`, "data-do": "pin", onclick: () => pinned(head) });
    const off = el("button", { type: "button", class: "small", text: "Off", "aria-label": `Switch off ${name}`, "data-do": "off", onclick: () => store.set({ off: togglePair(store.get().off, head.layer, head.head) }, { push: true }) });
    const figure = el("span", { class: "figure" });
    const item = el("li", { "data-head": `${head.layer}.${head.head}` }, show, el("span", { class: "name" }, el("b", { text: `${head.layer}·${head.head}` }), figure), el("span", { class: "buttons" }, pin, off));
    const { shape: [, R, C] } = maps;
    const view = { name: "maps", t: maps, rows: [1], columns: [2], fixed: { 0: n } };
    const ink = { ...app.ink("weights"), scale: C > FEW_KEYS ? scaleOf("weights", maps.data) : scaleOf("weights") }; // one for all layers
    const image = bitmap(pixels(view, layout(view), ink, 2 * THUMB, 2 * THUMB));
    fit(canvas, THUMB, (THUMB * R) / C).drawImage(image, 0, 0, THUMB, (THUMB * R) / C);
    return item;
  }

  function pinned(/** @type {any} */ head) {
    const now = parsePairs(store.get().pins);
    const others = now.filter(([l, h]) => l !== head.layer || h !== head.head);
    const next = others.length < now.length ? others : [...others.slice(-1), /** @type {[number, number]} */ ([head.layer, head.head])];
    store.set({ pins: formatPairs(next) }, { push: true });
  }

  function value(/** @type {any} */ head, /** @type {string} */ name) {
    return head[name] === null || head[name] === undefined ? "–" : numberText(head[name]);
  }

  /** Whether heads can be switched off: by Python, or, of a layer that stands alone, by the page. */
  function switches() {
    const { ablates, layers } = session.model();
    const tensors = session.scene.get()?.tensors ?? {};
    return ablates || (layers.length === 1 && Boolean(tensors.q_heads && tensors.k_heads && tensors.v_heads));
  }

  function update() {
    const answer = session.wall.get();
    if (!answer || answer.model !== session.model().id) return;
    const state = store.get();
    /** @type {[string, string][]} */
    const metrics = answer.metrics.filter((/** @type {any} */ m) => answer.heads.some((/** @type {any} */ h) => h[m.name] !== null)).map((/** @type {any} */ m) => [m.name, m.title]);
    const known = metrics.some(([name]) => name === state.metric) ? state.metric : metrics[0][0];
    fillChoice(sort, [["place", "by layer"], ...metrics], metrics.some(([name]) => name === state.sort) ? state.sort : "place");
    fillChoice(metric, metrics, known);
    least.value = String(state.least);
    how.show(state.with);
    about.textContent = `Every head of every layer. Click one to put it on the stage, pin two to compare them${!switches() ? "" : `, switch one off to see what the ${session.model().predicts ? "prediction" : "output"} loses`}.`;
    const { kept, bound: from } = arrangeHeads(answer.heads, { sort: sort.value, least: state.least, metric: known });
    bound.textContent = numberText(from);
    const words = answer.metrics.find((/** @type {any} */ m) => m.name === known);
    found.textContent = `${kept.length} of ${answer.heads.length} heads. ${words.title}: ${words.does}`;
    const key = `${answer.key} ${app.theme()} ${kept.map(({ n }) => n).join()} ${shownMost}`;
    if (key !== drawnFor) {
      drawnFor = key;
      wall.replaceChildren(...kept.slice(0, shownMost).map(({ head, n }) => card(head, n)));
    }
    wall.classList.toggle("by-layer", sort.value === "place" && kept.length === answer.heads.length);
    wall.style.setProperty("--heads", String(session.model().layers[0].sizes.H));
    more.hidden = kept.length <= shownMost;
    more.textContent = `Show all ${kept.length}`;
    const off = new Set(state.off.split(","));
    const pin = new Set(state.pins.split(","));
    const shown = sort.value === "place" ? known : sort.value;
    const model = session.model();
    kept.slice(0, shownMost).forEach(({ head }, i) => {
      const item = wall.children[i];
      const name = `${head.layer}.${head.head}`;
      item.style.setProperty("--hue", headColour(head.head, model.layers[head.layer].sizes.H, app.theme()));
      item.classList.toggle("off", off.has(name));
      item.classList.toggle("chosen", head.layer === state.layer && head.head === state.head);
      item.querySelector(".figure").textContent = value(head, shown);
      item.querySelector(".figure").title = metrics.map(([n, title]) => `${title}: ${value(head, n)}`).join("\n");
      item.querySelector("[data-do=pin]").setAttribute("aria-pressed", String(pin.has(name)));
      const button = item.querySelector("[data-do=off]");
      button.setAttribute("aria-pressed", String(off.has(name)));
      button.hidden = !switches();
    });
    all.disabled = !state.off;
    how.node.parentElement.hidden = all.hidden = !switches();
    compare(state);
  }

  // Two heads side by side. What is pointed at in one is outlined in both.
  let cross = /** @type {{row: number, column: number} | null} */ (null);
  /** @type {any[]} */
  let grids = [];
  let comparing = "";
  const local = Object.create(app, {
    lit: { value: () => new Map(cross ? [["pinned", [{ index: [null, cross.row, null] }, { index: [null, null, cross.column] }]]] : []) },
    focus: { value: () => null },
  });

  async function compare(/** @type {any} */ state) {
    const pairs = parsePairs(state.pins).filter(([l, h]) => l < session.model().layers.length && h < session.model().layers[l].sizes.H);
    const key = `${state.pins} ${session.wall.get()?.key} ${app.theme()}`;
    pins.hidden = !pairs.length;
    if (key === comparing) return;
    comparing = key;
    try {
      const answers = await Promise.all(pairs.map(([l]) => session.layerWeights(l)));
      if (comparing !== key) return;
      grids = pairs.map(([l, h], i) => {
        const { weights } = answers[i].tensors;
        const scene = session.scene.get();
        const grid = createGrid(local, { id: `pin-${i}`, square: true, height: 340, cell: 34, say: (row, column, v) => {
          cross = { row, column };
          requestAnimationFrame(() => grids.forEach((g) => g.draw()));
          return `${scene.labels[row]} → ${scene.keyLabels[column]} = ${numberText(v)}`;
        } });
        grid.show({ view: { name: "pinned", t: weights, rows: [1], columns: [2], fixed: { 0: h } }, ink: app.ink("weights"), name: "weights", note: `layer ${l}, head ${h}`, rowLabels: scene.labels, columnLabels: scene.keyLabels, edge: headColour(h, weights.shape[0], app.theme()) });
        return grid;
      });
      pins.replaceChildren(el("h3", { text: "Side by side" }), el("div", { class: "row" }, ...grids.map((g) => g.node)), el("button", { type: "button", text: "Unpin", onclick: () => store.set({ pins: "" }, { push: true }) }));
    } catch (error) {
      session.complain(error);
    }
  }

  return { node, update };
}

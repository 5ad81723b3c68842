// Beside the map: the links of a token, largest first, each a way to go there; words to look for; places to go to.

import { el, segmented } from "./dom.js";
import { count, weightText } from "./tiles.js";

/** @typedef {import("./sources.js").Link} Link */
/** @typedef {import("./sources.js").Source} Source */

const LINKS = [5, 10, 20, 50];

/** @param {any} app @param {{source: () => Source | null, head: () => number, go: (q: number, k: number) => void, locked: () => {q: number, k: number} | null, draw: () => void}} map */
export function createMapSide(app, map) {
  const { store } = app;
  const title = el("h3", { id: "links-title" });
  const way = segmented("Direction", [["to", "What it attends to"], ["from", "Who attends to it"]], (value) => store.set({ way: value }));
  const most = el("select", { "aria-label": "How many links", onchange: () => update() }, ...LINKS.map((n) => el("option", { value: String(n), text: `${n} links` })));
  most.value = "10";
  const list = el("ol", { class: "bars links", "aria-labelledby": "links-title" });
  const status = el("p", { class: "hint", role: "status", id: "links-says" });
  const field = el("input", { type: "text", "aria-label": "Text to look for", placeholder: "Look for a word", maxlength: "200", autocomplete: "off", spellcheck: "false" });
  const found = el("p", { class: "hint", role: "status", id: "find-says" });
  const next = el("button", { type: "button", text: "Next", disabled: true, onclick: () => step(1) });
  const before = el("button", { type: "button", text: "Previous", disabled: true, onclick: () => step(-1) });
  const search = el("form", { role: "search", onsubmit: (/** @type {Event} */ event) => {
    event.preventDefault();
    look();
  } }, field, el("button", { type: "submit", text: "Find" }));
  const query = el("input", { type: "number", min: "0", "aria-label": "Query to go to", placeholder: "query" });
  const key = el("input", { type: "number", min: "0", "aria-label": "Key to go to", placeholder: "key" });
  const jump = el("form", { onsubmit: (/** @type {Event} */ event) => {
    event.preventDefault();
    const source = map.source();
    if (!source || query.value === "") return;
    const within = (/** @type {number} */ n, /** @type {number} */ size) => Math.min(size - 1, Math.max(0, Math.round(n)));
    const q = within(Number(query.value), source.Q);
    map.go(q, within(key.value === "" ? Math.min(q, source.K - 1) : Number(key.value), source.K));
  } }, query, key, el("button", { type: "submit", text: "Go" }));
  const words = el("section", { "aria-labelledby": "find-title" }, el("h3", { id: "find-title", text: "Find in the text" }), search, el("div", { class: "tools" }, before, next), found);
  const node = el("aside", { class: "map-side", "aria-label": "Beside the map" },
    el("section", { "aria-labelledby": "links-title" }, title, el("div", { class: "tools" }, way.node, most), status, list),
    words,
    el("section", { "aria-labelledby": "go-title" }, el("h3", { id: "go-title", text: "Go to" }), jump));
  /** @type {AbortController | null} */
  let asking = null;
  /** @type {AbortController | null} */
  let looking = null;
  let shown = "";
  /** @type {number[]} */
  let places = [];
  let at = -1;
  let total = 0;

  function row(/** @type {Link} */ link, /** @type {number} */ largest, /** @type {boolean} */ to, /** @type {number} */ item) {
    const fill = el("span", { class: "fill" });
    fill.style.width = `${(100 * link.weight) / largest}%`;
    const [q, k] = to ? [item, link.item] : [link.item, item];
    return el("li", {}, el("button", { type: "button", "data-link": `${q}.${k}`, "aria-label": `${link.text}, ${to ? "key" : "query"} ${count(link.item)}: ${weightText(link.weight)}. Go there`, onclick: () => map.go(q, k) },
      el("span", { class: "place" }, el("bdi", { class: "token-name", text: link.text }), el("span", { class: "figure", text: count(link.item) })), el("span", { class: "track" }, fill), el("span", { class: "figure", text: weightText(link.weight) })));
  }

  function update() {
    const source = map.source();
    const to = store.get().way === "to";
    const here = map.locked();
    way.show(to ? "to" : "from");
    words.hidden = !source?.named;
    const item = here ? (to ? here.q : here.k) : null;
    const wanted = source && item !== null ? `${source.key} ${map.head()} ${to} ${item} ${most.value}` : "";
    if (wanted === shown && wanted) return;
    shown = wanted;
    asking?.abort();
    if (!source || item === null) {
      title.textContent = "Links of a token";
      status.textContent = `Click a weight on the map${source?.named ? ", or find a word" : ""}: its largest links are listed here.`;
      list.replaceChildren();
      return;
    }
    name();
    const controller = new AbortController();
    asking = controller;
    list.replaceChildren();
    status.textContent = "Looking for its links…";
    source.links(map.head(), to ? "query" : "key", item, Number(most.value), controller.signal, (links, done) => {
      if (controller.signal.aborted) return;
      list.replaceChildren(...links.map((link) => row(link, links[0].weight, to, item)));
      status.textContent = done < 1 ? `${Math.floor(100 * done)} % of the queries looked at.` : links.length ? "" : "Nothing attends to it that may see it.";
    }).catch((error) => {
      if (!controller.signal.aborted) status.textContent = error.message;
    });
  }

  /** Say whose links they are; its name may come later than its number. */
  function name() {
    const here = map.locked();
    const to = store.get().way === "to";
    if (!here) return;
    const item = to ? here.q : here.k;
    title.textContent = `${to ? "Query" : "Key"} ${count(item)} ${map.source()?.name(to ? "query" : "key", item) ?? ""}`.trim();
  }

  async function look() {
    const source = map.source();
    looking?.abort();
    places = [];
    at = -1;
    next.disabled = before.disabled = true;
    if (!source || !field.value) {
      found.textContent = "";
      return;
    }
    const controller = new AbortController();
    looking = controller;
    found.textContent = "Looking…";
    try {
      const answer = await source.find(field.value, controller.signal);
      if (controller.signal.aborted) return;
      ({ places, count: total } = answer);
      if (!places.length) found.textContent = `“${field.value}” is not in the text.`;
      else step(1);
    } catch (error) {
      if (!controller.signal.aborted) found.textContent = /** @type {Error} */ (error).message;
    }
  }

  /** To the next occurrence, round and round. @param {number} by */
  function step(by) {
    const source = map.source();
    if (!source || !places.length) return;
    at = (at + by + places.length) % places.length;
    next.disabled = before.disabled = places.length < 2;
    found.textContent = `${count(at + 1)} of ${count(total)}${total > places.length ? ` (the first ${count(places.length)} can be walked)` : ""}: token ${count(places[at])}`;
    map.go(places[at], Math.min(places[at], source.K - 1));
  }

  return { node, update, name };
}

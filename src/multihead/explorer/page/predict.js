// What the model says next, or what it sees: before and after the edits, with temperature and top-k; "take this token",
// and the newest token alone against the cache, which gives the same row.

import { headColour } from "./colour.js";
import { el } from "./dom.js";
import { numberText } from "./explain.js";
import { createGrid } from "./grid.js";

/** Probabilities at a temperature, of the k likeliest; 0 for the others. @param {Float32Array} logits @param {number} temperature @param {number} k */
export function probabilities(logits, temperature, k) {
  const order = [...logits.keys()].sort((a, b) => logits[b] - logits[a] || a - b).slice(0, k);
  const found = new Float64Array(logits.length);
  const top = logits[order[0]];
  let total = 0;
  for (const n of order) total += found[n] = Math.exp((logits[n] - top) / temperature);
  for (const n of order) found[n] /= total;
  return found;
}

/** @param {any} app */
export function createPredict(app) {
  const { store, session } = app;
  const title = el("h2", { id: "predict-title" });
  const list = el("ol", { class: "bars predictions" });
  const temperature = el("input", { type: "range", min: "0.1", max: "2.5", step: "0.05", "aria-label": "Temperature", oninput: () => store.set({ temperature: Number(temperature.value) }) });
  const heat = el("output", { class: "figure" });
  const top = el("input", { type: "number", min: "1", max: "200", "aria-label": "Top k", oninput: () => top.value && store.set({ top: Math.min(200, Math.max(1, Math.round(Number(top.value)))) }) });
  const draw = el("button", { type: "button", text: "Draw one", title: "Draw a token by its probability", onclick: () => drawOne() });
  const undo = el("button", { type: "button", text: "Take it back", onclick: () => takeBack() });
  const says = el("p", { class: "hint", role: "status", id: "predict-says" });
  const key = el("p", { class: "key" }, el("span", { class: "swatch before" }), " before ", el("span", { class: "swatch after" }), " after the change");
  const heated = el("label", {}, el("span", { class: "tool-label", text: "Temperature" }), temperature, heat);
  const cutOff = el("label", {}, el("span", { class: "tool-label", text: "Top k" }), top);
  const cache = el("div", { class: "cache" });
  const keys = createGrid(app, { id: "cache-keys", height: 220, say: (k, d, v) => `key of ${session.decoded.get().tokens[k].text}, number ${d} = ${numberText(v)}` });
  const alone = createGrid(app, { id: "cache-weights", height: 22, cell: 40, say: (_, k, v) => `from the cache: the newest → ${session.decoded.get().tokens[k].text} = ${numberText(v)}` });
  const whole = createGrid(app, { id: "whole-weights", height: 22, cell: 40, say: (_, k, v) => `all at once: the newest → ${session.decoded.get().tokens[k].text} = ${numberText(v)}` });
  const same = el("p", { class: "verdict", id: "cache-says" });
  cache.append(el("h3", { text: "One token at a time" }), el("p", { class: "hint", id: "cache-count" }), el("div", { class: "row" }, keys.node, el("div", { class: "column grow" }, alone.node, whole.node, same)));
  const node = el("section", { class: "predict", "aria-labelledby": "predict-title" }, title, el("div", { class: "tools" }, heated, cutOff, draw, undo), key, says, list, cache);

  const tokensNow = () => session.scene.get().tokens.map((/** @type {any} */ t) => t.id);

  function take(/** @type {number} */ id) {
    store.set({ ids: [...tokensNow(), id].join(","), at: "" }, { push: true });
  }

  function takeBack() {
    const ids = tokensNow().slice(0, -1);
    if (ids.length) store.set({ ids: ids.join(","), at: "" }, { push: true });
  }

  function drawOne() {
    const now = session.after.get() ?? session.before.get();
    if (!now) return;
    const p = probabilities(now.logits, store.get().temperature, store.get().top);
    let left = Math.random();
    for (let n = 0; n < p.length; n++) {
      left -= p[n];
      if (p[n] > 0 && left <= 0) return take(n);
    }
  }

  function bar(/** @type {number} */ p, /** @type {string} */ kind) {
    const fill = el("span", { class: `fill ${kind}` });
    fill.style.width = `${100 * p}%`;
    return el("span", { class: "track" }, fill);
  }

  function row(/** @type {string} */ label, /** @type {number} */ id, /** @type {number} */ was, /** @type {number | null} */ is, /** @type {boolean} */ tokens) {
    const figures = is === null ? percent(was) : `${percent(was)} → ${percent(is)}`;
    return el("li", { "data-id": String(id) }, el("bdi", { class: "token-name", text: label }), el("span", { class: "tracks" }, bar(was, "before"), is === null ? null : bar(is, "after")), el("span", { class: "figure", text: figures }), tokens ? el("button", { type: "button", class: "small", text: "Take", "aria-label": `Take the token ${label}`, onclick: () => take(id) }) : null);
  }

  const percent = (/** @type {number} */ p) => (p >= 0.9995 ? "100 %" : `${(100 * p).toFixed(1)} %`);

  function update() {
    const [was, is] = [session.before.get(), session.after.get()];
    const model = session.model();
    node.hidden = !was || !model?.predicts || was.model !== model.id;
    if (!was || node.hidden) return;
    const state = store.get();
    const tokens = was.kind === "tokens";
    title.textContent = tokens ? "What comes next" : "What it sees";
    temperature.value = String(state.temperature);
    heat.textContent = state.temperature.toFixed(2);
    if (document.activeElement !== top) top.value = String(state.top);
    draw.hidden = undo.hidden = !tokens || app.mode === "file";
    cutOff.hidden = !tokens;
    const k = tokens ? state.top : was.logits.length;
    const first = probabilities(was.logits, state.temperature, k);
    const second = is ? probabilities(is.logits, state.temperature, k) : null;
    const name = new Map(tokens ? [...was.candidates.map((/** @type {number} */ id, /** @type {number} */ n) => [id, was.labels[n].text]), ...(is ? is.candidates.map((/** @type {number} */ id, /** @type {number} */ n) => [id, is.labels[n].text]) : [])] : was.labels.map((/** @type {any} */ t, /** @type {number} */ n) => [n, t.text]));
    const rank = (/** @type {number} */ n) => Math.max(first[n], second ? second[n] : 0);
    const shown = [...name.keys()].filter((n) => rank(n) > 0).sort((a, b) => first[b] - first[a] || rank(b) - rank(a)).slice(0, tokens ? Math.min(12, 2 * state.top) : 12);
    list.replaceChildren(...shown.map((n) => row(name.get(n) ?? String(n), n, first[n], second ? second[n] : null, tokens && app.mode !== "file")));
    key.hidden = !second;
    const best = (/** @type {Float64Array} */ p) => shown.reduce((a, b) => (p[b] > p[a] ? b : a), shown[0]);
    if (second) says.textContent = best(first) === best(second) ? `Still “${name.get(best(first))}”: ${percent(first[best(first)])} before, ${percent(second[best(first)])} after.` : `Was “${name.get(best(first))}” (${percent(first[best(first)])}), is “${name.get(best(second))}” (${percent(second[best(second)])}).`;
    else if (app.mode === "file" && session.scene.get()?.edited) says.textContent = "The prediction after a change needs Python: run multihead explore.";
    else says.textContent = tokens ? (app.mode === "file" ? "To take a token and write on, run multihead explore." : "Take a token to write on, one step at a time.") : "Switch a head off to see what it was worth.";
    decode(state);
  }

  function decode(/** @type {any} */ state) {
    const found = session.decoded.get();
    const scene = session.scene.get();
    cache.hidden = !found || !scene || found.model !== scene.model.id || found.tensors.weights.shape[2] < 2;
    if (cache.hidden) return;
    const { tensors: t, tokens, cached, difference } = found;
    const H = t.weights.shape[0];
    const h = Math.min(state.head, H - 1);
    const G = t.k_heads.shape[0];
    const labels = tokens.map((/** @type {any} */ token) => token.text);
    const edge = headColour(h, H, app.theme());
    /** @type {HTMLElement} */ (cache.querySelector("#cache-count")).textContent = `The cache holds the keys and values of ${cached} tokens; the newest token adds one row, and asks all of them. Nothing before it is computed again.`;
    const g = Math.floor(h / (H / G));
    keys.show({ view: { name: "cache", t: t.k_heads, rows: [1], columns: [2], fixed: { 0: g } }, ink: app.ink("k_heads"), name: "k in the cache", note: `head ${g}, the last row is new`, rowLabels: labels.map((/** @type {string} */ l, /** @type {number} */ n) => (n === cached ? `+ ${l}` : l)), edge });
    alone.show({ view: { name: "cache", t: t.weights, rows: [1], columns: [2], fixed: { 0: h } }, ink: app.ink("weights"), name: "weights from the cache", note: `head ${h}`, edge });
    whole.show({ view: { name: "cache", t: t.whole_weights, rows: [1], columns: [2], fixed: { 0: h } }, ink: app.ink("weights"), name: "the same row, all at once", note: `head ${h}`, edge });
    const most = Math.max(difference.weights, difference.heads, difference.output);
    same.textContent = `The same row either way: the largest difference in weights, heads and output is ${numberText(most)}.`;
  }

  return { node, update };
}

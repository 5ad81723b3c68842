// Weights as bars that add up to one: what a token attends to, or who attends to it.

import { el } from "./dom.js";
import { headColour } from "./colour.js";
import { numberText } from "./explain.js";

const MOST = 12;

/** @param {any} app */
export function createBars(app) {
  const title = el("h3");
  const list = el("ol", { class: "bars" });
  const sum = el("p", { class: "hint" });
  const node = el("div", { class: "bars-panel" }, title, list, sum);
  return {
    node,
    /** @param {any} scene @param {number} head @param {number} token @param {"to" | "from"} way */
    show(scene, head, token, way) {
      const { shape: [H, Q, K], data } = scene.tensors.weights;
      const to = way === "to";
      const size = to ? K : Q;
      const at = Math.min(token, (to ? Q : K) - 1);
      const weight = (/** @type {number} */ n) => (to ? data[(head * Q + at) * K + n] : data[(head * Q + n) * K + at]);
      const hidden = (/** @type {number} */ n) => (to ? scene.allowed[at * K + n] : scene.allowed[n * K + at]) === 0;
      const labels = to ? scene.keyLabels : scene.labels;
      const own = (to ? scene.labels : scene.keyLabels)[at];
      title.replaceChildren(to ? "What " : "Who attends to ", el("bdi", { class: "token-name", text: own }), to ? ` attends to, head ${head}` : `, head ${head}`);
      const order = [...Array(size).keys()].sort((a, b) => weight(b) - weight(a) || a - b);
      const total = order.reduce((s, n) => s + weight(n), 0);
      const shown = order.slice(0, MOST);
      const colour = headColour(head, H, app.theme());
      list.replaceChildren(...shown.map((n) => {
        const fill = el("span", { class: "fill" });
        fill.style.width = `${Math.min(100, weight(n) * 100)}%`;
        fill.style.background = colour;
        const cell = { name: "weights", index: to ? [head, at, n] : [head, n, at] };
        const button = el("button", { type: "button", "aria-label": `${labels[n]}: ${numberText(weight(n))}${hidden(n) ? ", hidden by the mask" : ""}. Lock this weight.`, onclick: () => app.lock(cell), onpointerenter: () => app.hover.set(cell), onpointerleave: () => app.hover.set(null) }, el("bdi", { class: "token-name", text: labels[n] }), el("span", { class: "track" }, fill), el("span", { class: "figure", text: hidden(n) ? "hidden" : numberText(weight(n)) }));
        return el("li", {}, button);
      }));
      const more = size > MOST ? `The ${MOST} largest of ${size}. ` : "";
      sum.textContent = to ? `${more}Together they make ${numberText(total)}${scene.tensors.sinks ? "; the sink takes the rest" : ""}.` : `${more}Together ${numberText(total)}: a column need not make 1.`;
    },
  };
}

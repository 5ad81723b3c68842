// The seven steps as seven small pictures, always visible and always true: miniatures of the tensors, not icons.

import { el } from "./dom.js";
import { bitmap, fit, layout, litIn, pixels } from "./paint.js";
import { shapeText } from "./tensor.js";

const WIDE = 112;
const HIGH = 60;
const MOST = 40; // slabs that are still seen apart
/** @type {import("./paint.js").Whose} */
const ONE = { along: "rows", size: Infinity, first: 0 };
const NAMES = ["q", "q_heads", "weights", "heads", "transposed", "merged", "output"];

/** Slabs in a box, as near to square as can be, with as few places left over. @param {number} count */
function arrange(count) {
  const rows = Math.ceil(count / Math.min(count, Math.ceil(Math.sqrt((count * WIDE) / HIGH))));
  return { columns: Math.ceil(count / rows), rows };
}

/** @param {any} app */
export function createStrip(app) {
  const go = (/** @type {number} */ step) => app.store.set({ step: Math.min(7, Math.max(1, step)) }, { push: true });
  const buttons = NAMES.map((name, n) => el("button", { type: "button", "data-step": String(n + 1), onclick: () => go(n + 1) },
    el("span", { class: "step-number", text: String(n + 1), "aria-hidden": "true" }), el("span", { class: "name" }), el("canvas", { "aria-hidden": "true" }), el("code")));
  const list = el("ol", {}, ...buttons.map((button) => el("li", {}, button)));
  const node = el("nav", { class: "strip", "aria-label": "The seven steps" }, list);
  node.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    const by = /** @type {Record<string, number>} */ ({ ArrowRight: 1, ArrowLeft: -1, Home: -6, End: 6 })[event.key];
    if (!by) return;
    event.preventDefault();
    event.stopPropagation();
    go(app.store.get().step + by);
    buttons[app.store.get().step - 1].focus();
  });
  /** @type {WeakMap<any, Map<string, {slab: any, image: HTMLCanvasElement}[]>>} */
  const made = new WeakMap();

  /** The pictures of a tensor's slabs: one for two axes, one for each of the first axis for three. @param {string} name @param {any} t @param {number} step */
  function slabs(name, t, step) {
    const mixed = step === 7 && app.session.scene.get().mixing; // W_o has mixed the heads: no number is of one of them
    const ink = app.ink(name, !mixed && (step >= 5 || step === 2 || step === 4) ? ONE : null);
    const key = `${app.theme()} ${Boolean(ink.of)} ${ink.scale.high}`;
    const known = made.get(t)?.get(key);
    if (known) return known;
    const V = app.session.scene.get().layer.sizes.V;
    const flat = t.shape.length === 2 || step === 1 || t.shape[0] > MOST;
    const count = flat ? 1 : t.shape[0];
    const { columns, rows } = arrange(count);
    const found = [];
    for (let s = 0; s < count; s++) {
      const view = flat ? { name, t, rows: step === 2 || step === 4 ? [0, 1] : [0], columns: t.shape.length === 2 ? [1] : step === 2 || step === 4 ? [2] : [1, 2] } : { name, t, rows: [1], columns: [2], fixed: { 0: s } };
      const of = step >= 6 || (step === 5 && flat) ? { along: "columns", size: V, first: 0 } : step === 5 ? { along: "rows", size: 1, first: 0 } : { along: "rows", size: t.shape[1], first: s };
      const image = bitmap(pixels(view, layout(view), ink.of ? { ...ink, of: /** @type {any} */ (of) } : ink, (2 * WIDE) / columns, (2 * HIGH) / rows));
      found.push({ slab: view, image });
    }
    const cache = made.get(t) ?? new Map();
    cache.set(key, found);
    made.set(t, cache);
    return found;
  }

  function draw() {
    const scene = app.session.scene.get();
    if (!scene) return;
    const lit = app.lit();
    const colours = app.colours();
    NAMES.forEach((name, n) => {
      const t = scene.tensors[name];
      const ctx = fit(buttons[n].querySelector("canvas"), WIDE, HIGH);
      if (!t) {
        ctx.fillStyle = colours.rule;
        ctx.fillRect(0, HIGH / 2, WIDE, 1);
        return;
      }
      const parts = slabs(name, t, n + 1);
      const { columns, rows } = arrange(parts.length);
      const gap = columns > 1 ? (parts.length > 40 ? 1 : 2) : 0;
      const [w, h] = [WIDE / columns, HIGH / rows];
      const sized = (/** @type {number} */ p, /** @type {number} */ axis) => p * t.shape[axis];
      parts.forEach(({ slab, image }, s) => {
        const [x, y] = [(s % columns) * w, Math.floor(s / columns) * h];
        ctx.drawImage(image, x, y, w - gap, h - gap);
        const { R, C } = { R: slab.rows.reduce(sized, 1), C: slab.columns.reduce(sized, 1) };
        for (const pattern of lit.get(name) ?? []) {
          for (const r of litIn(slab, pattern.index)) {
            if (r.bottom - r.top === R && r.right - r.left === C && parts.length === 1) continue;
            ctx.strokeStyle = colours.lit;
            ctx.lineWidth = 1.5;
            ctx.strokeRect(x + (r.left * (w - gap)) / C, y + (r.top * (h - gap)) / R, Math.max(1.5, ((r.right - r.left) * (w - gap)) / C), Math.max(1.5, ((r.bottom - r.top) * (h - gap)) / R));
          }
        }
      });
    });
  }

  return {
    node,
    draw,
    go,
    /** Its words; the stage has it drawn. */
    update() {
      const scene = app.session.scene.get();
      const { step } = app.store.get();
      if (!scene) return;
      buttons.forEach((button, n) => {
        const t = scene.tensors[NAMES[n]];
        const words = scene.meta.steps[n];
        button.querySelector(".name").textContent = words.title;
        button.querySelector("code").textContent = t ? shapeText(t.shape) : "not given";
        button.setAttribute("aria-label", `Step ${n + 1}, ${words.title}, ${t ? `shape ${t.shape.join(" by ")}` : "not given by this model"}`);
        if (n + 1 !== step) button.removeAttribute("aria-current");
      });
      const chosen = buttons[step - 1];
      if (!chosen.hasAttribute("aria-current") && node.scrollWidth > node.clientWidth) { // in the middle, where there is no room for all
        const [around, own] = [node.getBoundingClientRect(), chosen.getBoundingClientRect()];
        node.scrollTo({ left: node.scrollLeft + own.left - around.left - (around.width - own.width) / 2 });
      }
      chosen.setAttribute("aria-current", "step");
    },
  };
}

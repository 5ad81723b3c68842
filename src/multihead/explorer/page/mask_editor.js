// The mask: chosen, or drawn cell by cell. A language model that sees its future is called out, and shown to cheat.

import { el, segmented } from "./dom.js";
import { numberText } from "./explain.js";
import { KINDS, allowed, describeMask, drawn, formatMask, leansOn, seesFuture } from "./mask.js";
import { fit, shorten } from "./paint.js";

const SIZE = 354;

/** @param {any} app */
export function createMaskEditor(app) {
  const { store, session } = app;
  const summary = el("span", { id: "mask-summary" });
  const button = el("button", { type: "button", class: "mask-button", id: "mask-button", "aria-expanded": "false", "aria-controls": "mask-editor", onclick: () => open(panel.hidden) }, el("span", { class: "tool-label", text: "Mask" }), summary);
  const kinds = segmented("Kind of mask", KINDS.map(({ kind, name }) => [kind, name]), (kind) => choose(kind));
  const numbers = el("div", { class: "numbers" });
  const canvas = el("canvas", { tabindex: "0", role: "img", "aria-describedby": "live", "data-grid": "mask" });
  const own = el("button", { type: "button", text: "The model's own", onclick: () => store.set({ mask: "" }, { push: true }) });
  const says = el("p", { class: "hint" });
  const note = el("p", { class: "hint" });
  const under = el("p", { id: "mask-cell", text: "\u00a0" });
  const close = el("button", { type: "button", class: "quiet", text: "Close", onclick: () => open(false) });
  const panel = el("section", { class: "mask-editor", id: "mask-editor", "aria-label": "Mask", hidden: true },
    el("div", { class: "tools" }, kinds.node, own, close), el("div", { class: "row" }, el("div", {}, canvas), el("div", { class: "grow" }, says, under, numbers, note)));
  const cheat = el("section", { class: "cheat", role: "status", "aria-label": "Where is your mask?", hidden: true });
  let cursor = { q: 0, k: 0 };
  /** @type {Uint8Array | null} */
  let drawing = null;
  let paint = 1;

  function open(/** @type {boolean} */ yes) {
    panel.hidden = !yes;
    button.setAttribute("aria-expanded", String(yes));
    if (yes) draw();
  }

  function choose(/** @type {string} */ kind) {
    const scene = session.scene.get();
    const N = scene.labels.length;
    const half = Math.max(1, Math.floor(N / 2));
    /** @type {Record<string, any>} */
    const first = { none: [], causal: [], window: [1, 1], prefix: [half], padding: [Math.max(1, N - 1)], documents: [half, N - half || 1] };
    const mask = kind === "drawn" ? drawn(scene.allowed) : { kind, numbers: first[kind], causal: kind === "documents" && session.model().kind === "text" };
    store.set({ mask: formatMask(mask) }, { push: true });
  }

  const FIELDS = /** @type {Record<string, string[]>} */ ({ causal: ["newest items seen (empty: all)"], window: ["items before", "items after"], prefix: ["items everyone sees"], padding: ["real items"], documents: ["lengths, with commas"] });

  function fields(/** @type {any} */ mask, /** @type {number} */ N) {
    const labels = FIELDS[mask.kind] ?? [];
    const key = mask.kind;
    if (numbers.dataset.kind !== key) {
      numbers.dataset.kind = key;
      const change = () => {
        const inputs = [...numbers.querySelectorAll("input[data-n]")];
        const given = inputs.flatMap((i) => i.value.split(",")).map((v) => v.trim()).filter((v) => v !== "").map(Number);
        if (given.some((v) => !Number.isInteger(v) || v < 0) || (key !== "causal" && given.length < labels.length)) {
          note.textContent = "Integers, please: 0 or more.";
          return;
        }
        const causal = numbers.querySelector("input[type=checkbox]")?.checked ?? false;
        store.set({ mask: formatMask({ kind: key, numbers: key === "causal" ? given.filter((v) => v > 0) : given, causal }) });
      };
      numbers.replaceChildren(...labels.map((label, n) => el("label", {}, el("span", { text: label }), key === "documents" ? el("input", { "data-n": n, type: "text", inputmode: "numeric", oninput: change }) : el("input", { "data-n": n, type: "number", min: key === "causal" ? "1" : "0", oninput: change }))),
        ...(key === "documents" ? [el("label", { class: "switch" }, el("input", { type: "checkbox", onchange: change }), " each causal")] : []));
    }
    const inputs = [...numbers.querySelectorAll("input[data-n]")];
    inputs.forEach((input, n) => {
      if (document.activeElement !== input) input.value = key === "documents" ? mask.numbers.join(", ") : mask.numbers[n] ?? "";
    });
    const box = numbers.querySelector("input[type=checkbox]");
    if (box) box.checked = Boolean(mask.causal);
    note.textContent = mask.kind === "documents" && mask.numbers.reduce((/** @type {number} */ a, /** @type {number} */ b) => a + b, 0) !== N ? `The lengths make ${mask.numbers.reduce((/** @type {number} */ a, /** @type {number} */ b) => a + b, 0)}, there are ${N} items: they are fitted.` : "";
  }

  function sizes() {
    const scene = session.scene.get();
    const [Q, K] = [scene.labels.length, scene.keyLabels.length];
    const room = Math.min(SIZE, (panel.clientWidth || SIZE) - 30);
    const beside = (room - 90) / Math.max(Q, K);
    const named = beside >= 12; // room for a name beside each row and above each column
    const cell = Math.max(2, Math.min(28, named ? beside : room / Math.max(Q, K)));
    return { Q, K, cell, scene, left: named ? 64 : 0, top: named ? 52 : 0, right: named ? 26 : 0 };
  }

  function draw() {
    const scene = session.scene.get();
    if (!scene || panel.hidden) return;
    const { Q, K, cell, left, top, right } = sizes();
    const cells = drawing ?? scene.allowed;
    const colours = app.colours();
    const ctx = fit(canvas, left + K * cell + right, top + Q * cell);
    if (left) drawNames(ctx, scene, cell, left, top, colours.soft);
    ctx.translate(left, top);
    for (let q = 0; q < Q; q++) {
      for (let k = 0; k < K; k++) {
        ctx.fillStyle = cells[q * K + k] ? colours.accent : colours.hidden;
        ctx.fillRect(k * cell, q * cell, cell - (cell > 5 ? 1 : 0), cell - (cell > 5 ? 1 : 0));
      }
    }
    if (document.activeElement === canvas) {
      ctx.strokeStyle = colours.ink;
      ctx.lineWidth = 2;
      ctx.strokeRect(cursor.k * cell + 1, cursor.q * cell + 1, cell - 2, cell - 2);
    }
    canvas.setAttribute("aria-label", `The mask: ${Q} queries down, ${K} keys across, ${describeMask(scene.mask)}. Arrow keys move, Space shows or hides a cell.`);
  }

  function drawNames(/** @type {CanvasRenderingContext2D} */ ctx, /** @type {any} */ scene, /** @type {number} */ cell, /** @type {number} */ left, /** @type {number} */ top, /** @type {string} */ colour) {
    ctx.font = "12px system-ui, sans-serif";
    ctx.fillStyle = colour;
    ctx.textBaseline = "middle";
    ctx.textAlign = "right";
    scene.labels.forEach((/** @type {string} */ label, /** @type {number} */ q) => ctx.fillText(shorten(ctx, label, left - 8), left - 6, top + (q + 0.5) * cell));
    ctx.textAlign = "left";
    scene.keyLabels.forEach((/** @type {string} */ label, /** @type {number} */ k) => {
      ctx.save();
      ctx.translate(left + (k + 0.5) * cell + 2, top - 6);
      ctx.rotate(-Math.PI / 3);
      ctx.fillText(shorten(ctx, label, (top - 10) / 0.87), 0, 0);
      ctx.restore();
    });
  }

  function cellAt(/** @type {PointerEvent} */ event) {
    const { Q, K, cell, left, top } = sizes();
    const bounds = canvas.getBoundingClientRect();
    const q = Math.floor((event.clientY - bounds.top - top) / cell);
    const k = Math.floor((event.clientX - bounds.left - left) / cell);
    return q >= 0 && k >= 0 && q < Q && k < K ? { q, k } : null;
  }

  function say() {
    const { K, scene } = sizes();
    const seen = (drawing ?? scene.allowed)[cursor.q * K + cursor.k];
    under.textContent = `${scene.labels[cursor.q]} ${seen ? "sees" : "does not see"} ${scene.keyLabels[cursor.k]}`;
    app.live(under.textContent ?? "");
  }

  canvas.addEventListener("pointerdown", (/** @type {PointerEvent} */ event) => {
    const here = cellAt(event);
    if (!here) return;
    canvas.setPointerCapture(event.pointerId);
    const { K, scene } = sizes();
    const cells = scene.allowed.slice();
    paint = cells[here.q * K + here.k] ? 0 : 1;
    cells[here.q * K + here.k] = paint;
    drawing = cells;
    cursor = here;
    draw();
  });
  canvas.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => {
    const here = cellAt(event);
    if (!here) return;
    if (drawing) {
      const far = Math.max(Math.abs(here.q - cursor.q), Math.abs(here.k - cursor.k), 1);
      for (let n = 1; n <= far; n++) { // a quick hand leaves out cells: draw the line between
        const at = [here.q - cursor.q, here.k - cursor.k].map((by) => Math.round((by * n) / far));
        drawing[(cursor.q + at[0]) * sizes().K + cursor.k + at[1]] = paint;
      }
      draw();
    }
    cursor = here;
    say();
  });
  const finish = () => {
    if (!drawing) return;
    const cells = drawing;
    drawing = null;
    store.set({ mask: formatMask(drawn(cells)) }, { push: true });
  };
  canvas.addEventListener("pointerup", finish);
  canvas.addEventListener("pointercancel", () => (drawing = null));
  canvas.addEventListener("focus", draw);
  canvas.addEventListener("blur", draw);
  canvas.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    const { Q, K, scene } = sizes();
    const by = /** @type {Record<string, [number, number]>} */ ({ ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] })[event.key];
    if (by) {
      event.preventDefault();
      cursor = { q: Math.min(Q - 1, Math.max(0, cursor.q + by[0])), k: Math.min(K - 1, Math.max(0, cursor.k + by[1])) };
      draw();
      say();
    } else if (event.key === " " || event.key === "Enter") {
      event.preventDefault();
      const cells = scene.allowed.slice();
      cells[cursor.q * K + cursor.k] ^= 1;
      store.set({ mask: formatMask(drawn(cells)) }, { push: true });
      say();
    }
  });

  /** Which later token each row leans on, and what that is worth to the prediction. @param {any} scene */
  function accuse(scene) {
    const { shape: [H, Q, K], data } = scene.tensors.weights;
    const text = session.model().predicts === "tokens" || seesFuture(allowed({ kind: "causal", numbers: [] }, Q, K), Q, K);
    cheat.hidden = !text || scene.ownMask === "none" || !seesFuture(scene.allowed, Q, K);
    if (cheat.hidden) return;
    const leans = leansOn(data, H, Q, K).flatMap((found, q) => (found ? [{ q, found }] : []));
    const items = leans.sort((a, b) => b.found.total - a.found.total).slice(0, 6).map(({ q, found }) => el("li", {}, el("bdi", { class: "token-name", text: scene.labels[q] }), " leans on ", el("bdi", { class: "token-name", text: scene.keyLabels[found.key] }), `, which comes later: ${numberText(found.weight)} of its weight, ${numberText(found.total)} on the future in all`));
    const mean = (/** @type {Float32Array | null} */ p) => (p && p.length ? p.reduce((a, b) => a + b, 0) / p.length : null);
    const [fair, unfair] = [mean(session.before.get()?.following ?? null), mean(session.after.get()?.following ?? null)];
    const worth = fair !== null && unfair !== null ? el("p", { text: `The token that really follows gets ${numberText(fair)} on average with the model's own mask, and ${numberText(unfair)} now. ${unfair > fair ? "It copies what it should foresee." : "It was never trained to look ahead, so what it sees there only misleads it: in training it would have learnt to copy."}` }) : null;
    cheat.replaceChildren(el("h2", { text: "Where is your mask?" }), el("p", { text: "A language model that sees later tokens is not predicting. In this layer, the mean over its heads:" }), el("ul", {}, ...items), ...(worth ? [worth] : []), el("button", { type: "button", text: "Give it its mask back", onclick: () => store.set({ mask: "" }, { push: true }) }));
  }

  return {
    button,
    panel,
    cheat,
    open,
    draw,
    update() {
      const scene = session.scene.get();
      if (!scene) return;
      const { mask } = scene;
      summary.textContent = mask.kind === "none" ? "none" : describeMask(mask).split(":")[0]; // "Mask" stands before it
      const said = describeMask(mask);
      says.textContent = `${said[0].toUpperCase()}${said.slice(1)}. Filled cells may be seen: queries down, keys across. Draw to change it.`;
      kinds.show(mask.kind);
      own.setAttribute("aria-pressed", String(!store.get().mask));
      fields(mask, scene.labels.length);
      if (store.get().mask && !session.model().masks) note.textContent = "This model keeps its own mask in its other layers: only the layer on the stage changes.";
      draw();
      accuse(scene);
    },
    centre(/** @type {number} */ q, /** @type {number} */ k) {
      const { cell, left, top } = sizes();
      const bounds = canvas.getBoundingClientRect();
      return { x: bounds.left + left + (k + 0.5) * cell, y: bounds.top + top + (q + 0.5) * cell };
    },
  };
}

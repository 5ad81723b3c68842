// A picture, its patches, and attention as a veil over them: one head's, or all layers' rolled out.

import { headColour, place, table } from "./colour.js";
import { el } from "./dom.js";
import { fit } from "./paint.js";
import { createLegend } from "./grid.js";

const SMALL = 112;
const SIZE = 252; // CSS pixels: a multiple of 28 and of 14

/** @param {any} app */
export function createPicture(app) {
  const { store, session } = app;
  const canvas = el("canvas", { tabindex: "0", role: "img", "aria-describedby": "live", "data-grid": "picture" });
  const veiled = el("canvas", { role: "img", "data-grid": "overlay" });
  const file = el("input", { type: "file", accept: "image/*", id: "picture-file", onchange: () => file.files?.[0] && take(file.files[0]) });
  const legend = createLegend();
  const rollout = el("input", { type: "checkbox", id: "rollout", onchange: () => store.set({ rollout: rollout.checked }) });
  const says = el("p", { class: "hint", id: "picture-says" });
  const roll = el("label", { class: "switch" }, rollout, " Roll out over all layers");
  const overlays = el("div", { class: "overlays", role: "group", "aria-label": "Every head over the picture" });
  const caption = el("figcaption");
  const tools = el("div", { class: "picture-tools" }, el("label", { class: "file" }, el("span", { text: "Choose a picture" }), file), el("span", { class: "hint", text: "or drop or paste one" }), roll, legend.node);
  const node = el("div", { class: "picture" },
    el("div", { class: "pictures" }, el("figure", {}, el("figcaption", { text: "The picture and its patches" }), canvas), el("figure", {}, caption, veiled), el("div", {}, el("p", { text: "Every head of this layer" }), overlays)),
    tools, says);
  let cursor = 0;

  async function take(/** @type {Blob} */ blob) {
    if (session.model().kind !== "picture") {
      const other = session.models.find((/** @type {any} */ m) => m.kind === "picture");
      if (!other) return;
      store.set({ model: other.id, layer: 0, head: 0, mask: "", off: "", pins: "", at: "" }, { push: true });
    }
    try {
      const { meta } = await session.python.picture(blob, session.model().id);
      store.set({ pixels: meta.pixels, sample: "", at: "" }, { push: true });
    } catch (error) {
      session.complain(error);
    }
  }

  document.addEventListener("paste", (event) => {
    const blob = [...(event.clipboardData?.files ?? [])].find((f) => f.type.startsWith("image/"));
    if (blob) take(blob);
  });
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    const blob = [...(event.dataTransfer?.files ?? [])].find((f) => f.type.startsWith("image/"));
    if (blob) take(blob);
    else if (event.dataTransfer?.files.length) session.complain(new Error("that file is no picture: drop a png, jpeg, webp or gif"));
  });

  const grid = () => session.scene.get()?.meta.grid;
  const role = () => (store.get().way === "to" ? "query" : "key");

  function patchAt(/** @type {MouseEvent} */ event) {
    const g = grid();
    if (!g) return null;
    const bounds = canvas.getBoundingClientRect();
    const row = Math.floor(((event.clientY - bounds.top) / bounds.height) * g.rows);
    const column = Math.floor(((event.clientX - bounds.left) / bounds.width) * g.columns);
    if (row < 0 || column < 0 || row >= g.rows || column >= g.columns) return null;
    cursor = row * g.columns + column;
    return { name: role(), index: [g.first + cursor] };
  }
  canvas.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => app.hoverCell(patchAt(event)));
  canvas.addEventListener("pointerleave", () => app.hoverCell(null));
  canvas.addEventListener("click", (/** @type {MouseEvent} */ event) => {
    const cell = patchAt(event);
    if (cell) app.lock(cell);
  });
  canvas.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    const g = grid();
    if (!g) return;
    const by = /** @type {Record<string, number>} */ ({ ArrowRight: 1, ArrowLeft: -1, ArrowDown: g.columns, ArrowUp: -g.columns })[event.key];
    const cell = { name: role(), index: [g.first + Math.min(g.rows * g.columns - 1, Math.max(0, cursor + (by ?? 0)))] };
    if (by) {
      event.preventDefault();
      cursor = cell.index[0] - g.first;
      app.hover.set(cell);
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      app.lock(cell);
    }
  });
  canvas.addEventListener("blur", () => app.hover.set(null));

  /** The picture itself on a context. @param {CanvasRenderingContext2D} ctx @param {any} pixels */
  function drawPicture(ctx, pixels, dim = 1) {
    const [R, C, channels = 1] = pixels.shape;
    const image = new ImageData(C, R);
    for (let i = 0; i < R * C; i++) {
      for (let c = 0; c < 3; c++) image.data[4 * i + c] = pixels.data[i * channels + (channels >= 3 ? c : 0)];
      image.data[4 * i + 3] = 255;
    }
    const small = document.createElement("canvas");
    small.width = C;
    small.height = R;
    /** @type {CanvasRenderingContext2D} */ (small.getContext("2d")).putImageData(image, 0, 0);
    ctx.globalAlpha = dim;
    ctx.drawImage(small, 0, 0, SIZE, SIZE);
    ctx.globalAlpha = 1;
  }

  /** The colour over a patch: the more it gets, the less of the picture shows through. @param {number} share of the largest */
  function veil(share) {
    const colour = table("sequential", "dark"); // bright where there is much: it must show on black pictures, in both themes
    const i = 3 * place(share, 0, 1);
    return `rgb(${colour[i]} ${colour[i + 1]} ${colour[i + 2]} / ${(0.06 + 0.82 * Math.min(1, share)).toFixed(2)})`;
  }

  /** How much each item gets, and the words for it. @param {any} scene */
  function shares(scene) {
    const state = store.get();
    const to = state.way === "to";
    const token = app.chosenToken(to ? "query" : "key") ?? 0;
    const wall = session.wall.get();
    const name = scene.labels[token];
    if (state.rollout && wall?.rollout && wall.model === scene.model.id) {
      const N = wall.rollout.shape[0];
      return { at: (/** @type {number} */ n) => (to ? wall.rollout.data[token * N + n] : wall.rollout.data[n * N + token]), token, words: to ? `What reaches ${name} through all layers (rollout).` : `Where ${name} ends up, through all layers (rollout).` };
    }
    const { shape: [H, Q, K], data } = scene.tensors.weights;
    const h = Math.min(state.head, H - 1);
    return { at: (/** @type {number} */ n) => (to ? data[(h * Q + token) * K + n] : data[(h * Q + n) * K + token]), token, words: to ? `What ${name} attends to, head ${h} of this layer.` : `Who attends to ${name}, head ${h} of this layer.` };
  }

  function light() {
    const scene = session.scene.get();
    const g = grid();
    const pixels = scene?.tensors.pixels;
    if (node.hidden || !scene || !g || !pixels || scene.model !== session.model()) return;
    const colours = app.colours();
    const { at, token, words } = shares(scene);
    let most = 1e-9;
    for (let n = g.first; n < scene.labels.length; n++) most = Math.max(most, at(n));
    const scale = { kind: /** @type {"sequential"} */ ("sequential"), low: 0, high: Number(most.toPrecision(2)) || 1 };
    const ctx = fit(canvas, SIZE, SIZE);
    drawPicture(ctx, pixels);
    const over = fit(veiled, SIZE, SIZE);
    drawPicture(over, pixels);
    const [w, h] = [SIZE / g.columns, SIZE / g.rows];
    ctx.lineWidth = 1;
    for (let p = 0; p < g.rows * g.columns; p++) {
      const [x, y] = [(p % g.columns) * w, Math.floor(p / g.columns) * h];
      ctx.strokeStyle = "rgb(128 128 128 / 0.55)";
      ctx.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
      over.fillStyle = veil(at(g.first + p) / scale.high);
      over.fillRect(x, y, w, h);
    }
    if (token >= g.first) {
      const p = token - g.first;
      for (const c of [ctx, over]) {
        c.strokeStyle = colours.lit;
        c.lineWidth = 3;
        c.strokeRect((p % g.columns) * w + 1.5, Math.floor(p / g.columns) * h + 1.5, w - 3, h - 3);
      }
    }
    legend.show({ scale, theme: "dark" });
    eachHead(scene, g, pixels, token);
    caption.textContent = store.get().way === "to" ? "Where it looks" : "Who looks at it";
    const firstItem = g.first ? ` ${scene.labels[0]} ${numberOf(at(0))}.` : "";
    says.textContent = words + firstItem;
    canvas.setAttribute("aria-label", `The picture in ${g.rows} by ${g.columns} patches. Arrow keys move over them, Enter locks one.`);
    veiled.setAttribute("aria-label", `${words} The most is ${numberOf(most)}.`);
    rollout.checked = store.get().rollout;
    roll.hidden = !session.wall.get()?.rollout;
  }

  /** A small overlay for each head, on its own scale. @param {any} scene @param {any} g @param {any} pixels @param {number} token */
  function eachHead(scene, g, pixels, token) {
    const { shape: [H, Q, K], data } = scene.tensors.weights;
    const to = store.get().way === "to";
    if (overlays.childElementCount !== H) overlays.replaceChildren(...Array.from({ length: H }, (_, h) => el("button", { type: "button", class: "head", "aria-label": `Head ${h} over the picture`, onclick: () => app.chooseHead(h) }, el("canvas", { "aria-hidden": "true" }), el("span", { text: `head ${h}` }))));
    [...overlays.children].forEach((button, h) => {
      button.setAttribute("aria-pressed", String(h === store.get().head));
      button.style.setProperty("--hue", headColour(h, H, app.theme()));
      const ctx = fit(button.firstElementChild, SMALL, SMALL);
      ctx.save();
      ctx.scale(SMALL / SIZE, SMALL / SIZE);
      drawPicture(ctx, pixels);
      const at = (/** @type {number} */ n) => (to ? data[(h * Q + token) * K + n] : data[(h * Q + n) * K + token]);
      let most = 1e-9;
      for (let n = g.first; n < K; n++) most = Math.max(most, at(n));
      for (let p = 0; p < g.rows * g.columns; p++) {
        ctx.fillStyle = veil(at(g.first + p) / most);
        ctx.fillRect((p % g.columns) * (SIZE / g.columns), Math.floor(p / g.columns) * (SIZE / g.rows), SIZE / g.columns, SIZE / g.rows);
      }
      ctx.restore();
    });
  }
  const numberOf = (/** @type {number} */ value) => value.toFixed(3);

  return {
    node,
    tools,
    light,
    update: light,
    take,
    /** @param {number} n */
    centre(n) {
      const g = grid();
      const bounds = canvas.getBoundingClientRect();
      const p = n - g.first;
      return { x: bounds.left + ((p % g.columns) + 0.5) * (bounds.width / g.columns), y: bounds.top + (Math.floor(p / g.columns) + 0.5) * (bounds.height / g.rows) };
    },
  };
}

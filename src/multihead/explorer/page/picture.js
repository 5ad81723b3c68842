// A picture, its patches, and attention as a veil over them: one head's, or that of the layers up to this one rolled out.

import { headColour, place, table } from "./colour.js";
import { el, segmented } from "./dom.js";
import { fit } from "./paint.js";
import { createLegend } from "./grid.js";
import { pack, tooLarge, unpack } from "./packed.js";

const SMALL = 112;
const USUAL = 252; // CSS pixels: a multiple of 28 and of 14
const MOST = 520;

/** The side of a picture on the screen: its own pixels whole times, where they are enough to see. @param {number} pixels @param {number} room */
export function sideOf(pixels, room) {
  const wanted = pixels < 112 ? USUAL : MOST;
  return Math.min(room, pixels * Math.max(1, Math.floor(Math.min(wanted, Math.max(room, pixels)) / pixels)));
}

/** @param {any} app */
export function createPicture(app) {
  const { store, session } = app;
  const canvas = el("canvas", { tabindex: "0", role: "img", "aria-describedby": "live", "data-grid": "picture" });
  const veiled = el("canvas", { role: "img", "data-grid": "overlay" });
  const file = el("input", { type: "file", accept: "image/*", id: "picture-file", onchange: () => file.files?.[0] && take(file.files[0]) });
  const legend = createLegend();
  const rollout = el("input", { type: "checkbox", id: "rollout", onchange: () => store.set({ rollout: rollout.checked }) });
  const says = el("p", { class: "hint", id: "picture-says" });
  const roll = el("label", { class: "switch" }, rollout, " Roll out from the picture to this layer");
  const overlays = el("div", { class: "overlays", role: "group", "aria-label": "Every head over the picture" });
  const caption = el("figcaption");
  const extras = el("div", { class: "tools extras", role: "group", "aria-label": "Items that are no patches" });
  const way = segmented("Direction over the picture", [["to", "What it attends to"], ["from", "Who attends to it"]], (value) => {
    const [name, index] = store.get().at.split(".");
    const turned = name === "query" || name === "key" ? { at: `${value === "to" ? "query" : "key"}.${index}` } : {};
    store.set({ way: value, ...turned });
  });
  const tools = el("div", { class: "picture-tools" }, el("label", { class: "file" }, el("span", { text: "Choose a picture…" }), file), el("span", { class: "hint", text: "or drop or paste one" }));
  const tableButton = el("button", { type: "button", class: "quiet", text: "Table", "aria-label": "Show what lies over the picture as a table", onclick: () => app.openTable(tableOf()) });
  const views = el("div", { class: "picture-tools" }, extras, way.node, roll, legend.node, tableButton);
  const node = el("div", { class: "picture" }, tools,
    el("div", { class: "pictures" }, el("figure", {}, el("figcaption", { text: "The picture and its patches" }), canvas), el("figure", {}, caption, veiled), el("div", {}, el("p", { text: "Every head of this layer" }), overlays)),
    views, says);
  let cursor = 0;
  let width = 0;

  async function take(/** @type {Blob} */ blob) {
    if (session.model().kind !== "picture") {
      const other = session.models.find((/** @type {any} */ m) => m.kind === "picture");
      if (!other) return;
      store.set({ model: other.id, layer: 0, head: 0, mask: "", off: "", pins: "", at: "" }, { push: true });
    }
    try {
      const { meta, tensors } = await session.python.picture(blob, session.model().id);
      const packed = tooLarge(meta.pixels) ? pack(sheetOf(tensors.pixels)) : "";
      if (packed) exact.set(packed, meta.pixels);
      store.set({ pixels: meta.pixels, packed, sample: "", at: "" }, { push: true });
    } catch (error) {
      session.complain(error);
    }
  }

  /** @type {Map<string, string>} */
  const exact = new Map(); // what was packed here, or unpacked
  let fromLink = "";

  /** The pixels that an address names; a packed picture is read by Python. @param {any} state */
  async function unpacked(state) {
    if (!state.packed || state.pixels || app.mode === "file") return {};
    if (!exact.has(state.packed)) {
      const { meta } = await session.python.picture(unpack(state.packed), state.model);
      exact.set(state.packed, meta.pixels);
      fromLink = state.packed;
    }
    return { pixels: exact.get(state.packed) };
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

  /** @type {WeakMap<any, HTMLCanvasElement>} */
  const sheets = new WeakMap();

  /** The picture on a canvas of its own size. @param {any} pixels */
  function sheetOf(pixels) {
    const known = sheets.get(pixels);
    if (known) return known;
    const [R, C, channels = 1] = pixels.shape;
    const image = new ImageData(C, R);
    for (let i = 0; i < R * C; i++) {
      for (let c = 0; c < 3; c++) image.data[4 * i + c] = pixels.data[i * channels + (channels >= 3 ? c : 0)];
      image.data[4 * i + 3] = 255;
    }
    const sheet = document.createElement("canvas");
    sheet.width = C;
    sheet.height = R;
    /** @type {CanvasRenderingContext2D} */ (sheet.getContext("2d")).putImageData(image, 0, 0);
    sheets.set(pixels, sheet);
    return sheet;
  }

  /** The picture itself on a context. @param {CanvasRenderingContext2D} ctx @param {any} pixels @param {number} side */
  function drawPicture(ctx, pixels, side) {
    ctx.imageSmoothingEnabled = side < pixels.shape[0];
    ctx.drawImage(sheetOf(pixels), 0, 0, side, side);
  }

  /** The colour over a patch: the more it gets, the less of the picture shows through. @param {number} share of the largest */
  function veil(share) {
    const colour = table("sequential", "dark"); // bright where there is much: it must show on black pictures, in both themes
    const i = 3 * place(share, 0, 1);
    return `rgb(${colour[i]} ${colour[i + 1]} ${colour[i + 2]} / ${(0.06 + 0.82 * Math.min(1, share)).toFixed(2)})`;
  }

  /** How much each item gets, what that is, and the words for it. @param {any} scene */
  function shares(scene) {
    const state = store.get();
    const to = state.way === "to";
    const token = app.chosenToken(to ? "query" : "key") ?? 0;
    const wall = session.wall.get();
    const who = scene.labels[token];
    if (state.rollout && wall?.rollout && wall.model === scene.model.id) {
      const [L, N] = wall.rollout.shape;
      const last = L > 1 ? Math.min(state.layer, L - 1) : scene.model.layers.length - 1;
      const base = (L > 1 ? last : 0) * N * N;
      const through = last ? `layers 0 to ${last}, rolled out` : "layer 0, all its heads";
      return { name: "rollout", at: (/** @type {number} */ n) => wall.rollout.data[base + (to ? token * N + n : n * N + token)], token, words: to ? `How much of each patch reaches ${who} through ${through}.` : `How much of ${who} reaches each patch through ${through}.` };
    }
    const { shape: [H, Q, K], data } = scene.tensors.weights;
    const h = Math.min(state.head, H - 1);
    return { name: "weights", at: (/** @type {number} */ n) => (to ? data[(h * Q + token) * K + n] : data[(h * Q + n) * K + token]), token, words: to ? `What ${who} attends to, head ${h} of this layer.` : `Who attends to ${who}, head ${h} of this layer.` };
  }

  /** What lies over the patches as a table, a row of patches in each of its rows. */
  function tableOf() {
    const scene = /** @type {any} */ (session.scene.get());
    const { rows, columns, first } = grid();
    const { name, at, words } = shares(scene);
    const data = Float32Array.from({ length: rows * columns }, (_, p) => at(first + p));
    return { title: words, name, note: words, tensor: { shape: [rows, columns], data }, rows, columns, value: (/** @type {number} */ r, /** @type {number} */ c) => data[r * columns + c] };
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
    const side = sideOf(pixels.shape[0], width || USUAL);
    const ctx = fit(canvas, side, side);
    drawPicture(ctx, pixels, side);
    const over = fit(veiled, side, side);
    drawPicture(over, pixels, side);
    const [w, h] = [side / g.columns, side / g.rows];
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
        c.lineWidth = Math.min(3, w / 6);
        c.strokeRect((p % g.columns) * w + c.lineWidth / 2, Math.floor(p / g.columns) * h + c.lineWidth / 2, w - c.lineWidth, h - c.lineWidth);
      }
    }
    legend.show({ scale, theme: "dark" });
    eachHead(scene, g, pixels, token);
    caption.textContent = `${store.get().way === "to" ? "Where it looks" : "Who looks at it"}${store.get().rollout && session.wall.get()?.rollout ? ", rolled out" : ""}`;
    const firstItem = g.first ? ` The ${scene.labels[0]} token: ${numberOf(at(0))}.` : "";
    const travelled = fromLink && fromLink === store.get().packed ? " The picture came packed in a link: its numbers differ a little from the original's." : "";
    says.textContent = words + firstItem + travelled;
    way.show(store.get().way);
    showExtras(scene, g, token);
    canvas.setAttribute("aria-label", `The picture in ${g.rows} by ${g.columns} patches. Arrow keys move over them, Enter locks one.`);
    veiled.setAttribute("aria-label", `${words} The most is ${numberOf(most)}.`);
    rollout.checked = store.get().rollout;
    roll.hidden = !session.wall.get()?.rollout;
  }

  /** The class token, and whatever else stands before the patches. @param {any} scene @param {any} g @param {number} token */
  function showExtras(scene, g, token) {
    const labels = scene.labels.slice(0, g.first);
    if (extras.dataset.for !== labels.join()) {
      extras.dataset.for = labels.join();
      extras.replaceChildren(...labels.map((/** @type {string} */ label, /** @type {number} */ n) => el("button", { type: "button", text: label, "aria-label": n ? label : "The class token", onclick: () => app.lock({ name: role(), index: [n] }), onpointerenter: () => app.hoverCell({ name: role(), index: [n] }), onpointerleave: () => app.hoverCell(null) })));
    }
    extras.hidden = !labels.length;
    [...extras.children].forEach((button, n) => button.setAttribute("aria-pressed", String(n === token)));
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
      drawPicture(ctx, pixels, SMALL);
      const at = (/** @type {number} */ n) => (to ? data[(h * Q + token) * K + n] : data[(h * Q + n) * K + token]);
      let most = 1e-9;
      for (let n = g.first; n < K; n++) most = Math.max(most, at(n));
      for (let p = 0; p < g.rows * g.columns; p++) {
        ctx.fillStyle = veil(at(g.first + p) / most);
        ctx.fillRect((p % g.columns) * (SMALL / g.columns), Math.floor(p / g.columns) * (SMALL / g.rows), SMALL / g.columns, SMALL / g.rows);
      }
    });
  }
  const numberOf = (/** @type {number} */ value) => value.toFixed(3);

  new ResizeObserver(() => {
    const now = Math.floor(node.clientWidth);
    if (now === width) return;
    width = now;
    light();
  }).observe(node);

  return {
    node,
    tools,
    unpacked,
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

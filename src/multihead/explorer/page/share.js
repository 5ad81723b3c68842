// Take it with you: a link that holds the whole state, the stage as SVG or PNG, the page as one file.

import { el, svg } from "./dom.js";
import { fileName, npzOf } from "./numbers.js";
import { tooLarge } from "./packed.js";
import { formatState } from "./state.js";

/** @param {string} name @param {Blob} blob */
export function download(name, blob) {
  const address = URL.createObjectURL(blob);
  const link = el("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** Everything with words and every canvas on the stage, with where it stands. @param {HTMLElement} stage */
function pieces(stage) {
  const frame = stage.getBoundingClientRect();
  const shown = (/** @type {Element} */ node) => node.getClientRects().length > 0;
  const canvases = [...stage.querySelectorAll("figure canvas")].filter(shown).map((canvas) => {
    const r = canvas.getBoundingClientRect();
    return { canvas: /** @type {HTMLCanvasElement} */ (canvas), x: r.left - frame.left, y: r.top - frame.top, w: r.width, h: r.height };
  });
  const words = [...stage.querySelectorAll("h2, h3, .does, .formula, figcaption > *, .sign, .legend > span, .hint, .verdict")].filter(shown).flatMap((node) => {
    const style = getComputedStyle(node);
    return linesOf(node).map(({ text, rect }) => ({ text, x: rect.left - frame.left, y: rect.top - frame.top + rect.height * 0.78, size: parseFloat(style.fontSize), weight: style.fontWeight, family: style.fontFamily, colour: style.color }));
  });
  return { width: Math.ceil(frame.width), height: Math.ceil(frame.height), canvases, words };
}

/** The text of an element line by line, as the browser broke it. @param {Element} node */
function linesOf(node) {
  /** @type {{text: string, rect: DOMRect}[]} */
  const lines = [];
  const walker = document.createTreeWalker(node, NodeFilter.SHOW_TEXT);
  const range = document.createRange();
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    for (const match of (text.textContent ?? "").matchAll(/\S+\s*/g)) {
      range.setStart(text, match.index);
      range.setEnd(text, match.index + match[0].length);
      const rect = range.getBoundingClientRect();
      const last = lines[lines.length - 1];
      if (last && Math.abs(last.rect.top - rect.top) < 3) last.text += match[0];
      else lines.push({ text: match[0], rect });
    }
  }
  return lines.filter((line) => line.text.trim());
}

/** @param {HTMLElement} stage @param {string} paper */
export function stageAsSvg(stage, paper) {
  const { width, height, canvases, words } = pieces(stage);
  const picture = svg("svg", { xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${width} ${height}`, width, height }, svg("rect", { width, height, fill: paper }));
  for (const { canvas, x, y, w, h } of canvases) picture.append(svg("image", { href: canvas.toDataURL("image/png"), x, y, width: w, height: h }));
  for (const word of words) picture.append(svg("text", { x: word.x, y: word.y, "font-size": word.size, "font-weight": word.weight, "font-family": word.family, fill: word.colour, text: word.text }));
  return new Blob([new XMLSerializer().serializeToString(picture)], { type: "image/svg+xml" });
}

/** @param {HTMLElement} stage @param {string} paper @returns {Promise<Blob>} */
export function stageAsPng(stage, paper) {
  const { width, height, canvases, words } = pieces(stage);
  const sheet = document.createElement("canvas");
  sheet.width = 2 * width;
  sheet.height = 2 * height;
  const ctx = /** @type {CanvasRenderingContext2D} */ (sheet.getContext("2d"));
  ctx.scale(2, 2);
  ctx.imageSmoothingEnabled = false;
  ctx.fillStyle = paper;
  ctx.fillRect(0, 0, width, height);
  for (const { canvas, x, y, w, h } of canvases) ctx.drawImage(canvas, x, y, w, h);
  for (const word of words) {
    ctx.font = `${word.weight} ${word.size}px ${word.family}`;
    ctx.fillStyle = word.colour;
    ctx.fillText(word.text, word.x, word.y);
  }
  return new Promise((resolve, reject) => sheet.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("the browser made no picture"))), "image/png"));
}

/** @param {any} app @param {() => HTMLElement} stage */
export function createShare(app, stage) {
  const { store, session } = app;
  const says = el("p", { class: "hint", role: "status", id: "share-says" });
  const field = el("input", { type: "text", readonly: true, hidden: app.mode === "widget", "aria-label": "Link to this state", onfocus: () => field.select() });
  const act = (/** @type {string} */ text, /** @type {() => Promise<string> | string} */ fn) => el("button", { type: "button", text, onclick: async () => {
    try {
      says.textContent = await fn();
    } catch (error) {
      says.textContent = /** @type {Error} */ (error).message;
    }
  } });
  const paper = () => app.colours().paper;
  const link = act("Copy the link", async () => {
    field.value = location.href;
    const { pixels } = store.get();
    const packed = !store.get().packed && tooLarge(pixels) ? " The picture is too large for a link: save the page as one file to keep it." : store.get().packed ? ` The picture is too large for a link as it is: it travels packed into ${(store.get().packed.length / 1000).toFixed(0)} kB, and its numbers will differ a little. The single file keeps it exactly.` : "";
    const warn = location.search.includes("token=") ? " It holds the token of this server: whoever has it may compute here." : "";
    try {
      await navigator.clipboard.writeText(location.href);
      return `Copied.${packed}${warn}`;
    } catch {
      field.focus();
      return `Select and copy it from the field.${packed}${warn}`;
    }
  });
  const asSvg = act("Stage as SVG", () => {
    download("multihead.svg", stageAsSvg(stage(), paper()));
    return "Saved multihead.svg.";
  });
  const asPng = act("Stage as PNG", async () => {
    download("multihead.png", await stageAsPng(stage(), paper()));
    return "Saved multihead.png.";
  });
  const numbers = act("All numbers as npz", () => {
    const scene = session.scene.get();
    if (!scene) return "There is no layer on the stage.";
    const name = `${fileName(scene.model.id, scene.tensors.weights.shape, `layer ${store.get().layer}`)}.npz`;
    download(name, new Blob([npzOf(scene.tensors)], { type: "application/zip" }));
    return `Saved ${name}: numpy.load reads it.`;
  });
  const save = act("Save as one file", async () => {
    const state = store.get();
    says.textContent = "Packing…";
    const count = session.scene.get()?.tokens.length ?? 0;
    const blob = await session.python.save({ model: session.model().id, layer: state.layer, input: session.inputOf(state), ...session.editsOf(state, count), state: formatState(state) });
    download("multihead.html", blob);
    return `Saved multihead.html, ${(blob.size / 1e6).toFixed(1)} MB: it opens without a network and without Python.`;
  });
  const file = el("span", { class: "hint", text: "This page is the single file: copy it as it is." });
  const panel = el("section", { class: "share-panel", id: "share-panel", "aria-label": "Share", hidden: true }, el("div", { class: "tools" }, app.mode === "widget" ? null : link, asSvg, asPng, numbers, app.mode === "file" ? file : save), field, says);
  const button = el("button", { type: "button", text: "Share", "aria-expanded": "false", "aria-controls": "share-panel", onclick: () => {
    panel.hidden = !panel.hidden;
    button.setAttribute("aria-expanded", String(!panel.hidden));
    field.value = location.href;
  } });
  return {
    button,
    panel,
    close() {
      panel.hidden = true;
      button.setAttribute("aria-expanded", "false");
    },
  };
}

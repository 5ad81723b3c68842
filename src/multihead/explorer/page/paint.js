// From numbers to pixels: a slice of a tensor, its colours, and where its cells lie. Nothing here knows the page.

import { HUES, hueOf, parseHex, table, toOklab, fromOklab } from "./colour.js";

/** A tensor laid out flat: `rows` and `columns` are the axes that run down and across, `fixed` holds the others.
 * @typedef {{name: string, t: {shape: number[], data: any}, rows: number[], columns: number[], fixed?: Record<number, number>}} View */
/** @typedef {{R: number, C: number, down: Int32Array, across: Int32Array, base: number}} Layout */
/** @typedef {"light" | "dark"} Theme */
/** Whose a cell is, where cells are coloured by head: `size` rows or columns belong to one, those of head `first` in front.
 * @typedef {{along: "rows" | "columns", size: number, first: number}} Whose */
/** How numbers become colours: a scale, and for colours by head whose the cells are.
 * @typedef {{scale: import("./colour.js").Scale, theme: Theme, heads?: number, of?: Whose}} Ink */

/** @param {number[]} shape @param {number[]} axes */
function offsets(shape, axes) {
  const strides = shape.map((_, axis) => shape.slice(axis + 1).reduce((p, s) => p * s, 1));
  let found = [0];
  for (const axis of axes) found = found.flatMap((start) => Array.from({ length: shape[axis] }, (_, i) => start + i * strides[axis]));
  return Int32Array.from(found);
}

/** Where each cell of a view lies in the data. @param {View} view @returns {Layout} */
export function layout(view) {
  const { shape } = view.t;
  const down = offsets(shape, view.rows);
  const across = offsets(shape, view.columns);
  let base = 0;
  for (const [axis, index] of Object.entries(view.fixed ?? {})) base += index * shape.slice(Number(axis) + 1).reduce((p, s) => p * s, 1);
  return { R: down.length, C: across.length, down, across, base };
}

/** The index of a cell in its tensor. @param {View} view @param {number} row @param {number} column */
export function indexAt(view, row, column) {
  const index = view.t.shape.map((_, axis) => view.fixed?.[axis] ?? 0);
  for (const [axes, at] of /** @type {[number[], number][]} */ ([[view.rows, row], [view.columns, column]])) {
    let rest = at;
    for (const axis of [...axes].reverse()) {
      index[axis] = rest % view.t.shape[axis];
      rest = Math.floor(rest / view.t.shape[axis]);
    }
  }
  return index;
}

/** Row and column of a cell in a view, or null where it is not in it. @param {View} view @param {number[]} index */
export function placeOf(view, index) {
  for (const [axis, at] of Object.entries(view.fixed ?? {})) if (index[Number(axis)] !== at) return null;
  const along = (/** @type {number[]} */ axes) => axes.reduce((at, axis) => at * view.t.shape[axis] + index[axis], 0);
  return { row: along(view.rows), column: along(view.columns) };
}

/** The runs of rows (or columns) that a pattern lights, as [start, stop). @param {View} view @param {number[]} axes @param {(number | null)[]} index @returns {[number, number][]} */
function runs(view, axes, index) {
  const total = axes.reduce((p, axis) => p * view.t.shape[axis], 1);
  if (axes.every((axis) => index[axis] === null)) return [[0, total]];
  const inner = [...axes].reverse();
  /** @type {[number, number][]} */
  const found = [];
  for (let at = 0; at < total; at++) {
    let rest = at;
    let lit = true;
    for (const axis of inner) {
      const size = view.t.shape[axis];
      if (index[axis] !== null && index[axis] !== rest % size) lit = false;
      rest = Math.floor(rest / size);
    }
    if (!lit) continue;
    const last = found[found.length - 1];
    if (last && last[1] === at) last[1] = at + 1;
    else found.push([at, at + 1]);
  }
  return found;
}

/** The rectangles of cells that a pattern lights in a view. @param {View} view @param {(number | null)[]} index */
export function litIn(view, index) {
  for (const [axis, at] of Object.entries(view.fixed ?? {})) if (index[Number(axis)] !== null && index[Number(axis)] !== at) return [];
  const rows = runs(view, view.rows, index);
  const columns = runs(view, view.columns, index);
  return rows.flatMap(([top, bottom]) => columns.map(([left, right]) => ({ top, bottom, left, right })));
}

/** @type {Map<string, Uint8Array>} */
const tints = new Map();

/** 256 colours from paper to one of the hues. @param {number} hue @param {Theme} theme */
export function tint(hue, theme) {
  const name = `${hue} ${theme}`;
  let found = tints.get(name);
  if (!found) {
    const from = toOklab(theme === "dark" ? [16, 18, 22] : [255, 255, 255]);
    const to = toOklab(parseHex(HUES[theme][hue]));
    found = new Uint8Array(768);
    for (let i = 0; i < 256; i++) {
      const t = 0.08 + 0.92 * (i / 255) ** 0.7;
      fromOklab(from.map((c, n) => c + t * (to[n] - c))).forEach((c, n) => (/** @type {Uint8Array} */ (found)[3 * i + n] = Math.round(c)));
    }
    tints.set(name, found);
  }
  return found;
}

/** The colour of −∞, a hidden cell: neither of the scales has it. @param {Theme} theme */
export function hiddenColour(theme) {
  return theme === "dark" ? [44, 47, 54] : [224, 226, 230];
}

/** A table of colours as whole pixels. @type {WeakMap<Uint8Array, Uint32Array>} */
const packed = new WeakMap();
const opaque = (/** @type {number} */ r, /** @type {number} */ g, /** @type {number} */ b) => new Uint32Array(Uint8Array.of(r, g, b, 255).buffer)[0];

function pack(/** @type {Uint8Array} */ colours) {
  let found = packed.get(colours);
  if (!found) {
    found = Uint32Array.from({ length: colours.length / 3 }, (_, i) => opaque(colours[3 * i], colours[3 * i + 1], colours[3 * i + 2]));
    packed.set(colours, found);
  }
  return found;
}

/** Whose table each row (or column) of pixels takes, for colours by head; null where one table serves all. @param {Ink} ink @param {"rows" | "columns"} along @param {number} count of pixels @param {number} cells that they show */
function tables(ink, along, count, cells) {
  const { heads, of, theme } = ink;
  if (!heads || of?.along !== along) return null;
  return Array.from({ length: count }, (_, p) => pack(tint(hueOf(of.first + Math.floor(Math.floor((p * cells) / count) / of.size), heads), theme)));
}

/** Pixels of a view, at most `width` × `height`: where cells are smaller than a pixel, the largest of them shows.
 * @param {View} view @param {Layout} at @param {Ink} ink @param {number} width @param {number} height */
export function pixels(view, at, ink, width, height) {
  const { R, C, down, across, base } = at;
  const W = Math.max(1, Math.min(C, Math.floor(width)));
  const H = Math.max(1, Math.min(R, Math.floor(height)));
  const image = new ImageData(W, H);
  const out = new Uint32Array(image.data.buffer);
  const { scale, theme, of } = ink;
  const [r, g, b] = hiddenColour(theme);
  const hidden = opaque(r, g, b);
  const data = view.t.data;
  const rows = tables(ink, "rows", H, R);
  const columns = tables(ink, "columns", W, C);
  const plain = pack(table(scale.kind, theme));
  const low = of ? 0 : scale.low;
  const steps = scale.high > low ? 256 / (scale.high - low) : 0;
  const lefts = Int32Array.from({ length: W + 1 }, (_, x) => Math.floor((x * C) / W));
  for (let y = 0; y < H; y++) {
    const top = Math.floor((y * R) / H);
    const bottom = Math.max(top + 1, Math.floor(((y + 1) * R) / H));
    const ofRow = rows ? rows[y] : plain;
    for (let x = 0; x < W; x++) {
      const left = lefts[x];
      let value = data[base + down[top] + across[left]];
      const right = lefts[x + 1];
      if (bottom - top > 1 || right - left > 1) {
        let size = value === -Infinity ? -1 : Math.abs(value);
        for (let i = top; i < bottom; i++) {
          const start = base + down[i];
          for (let c = left; c < right; c++) {
            const v = data[start + across[c]];
            const s = v < 0 ? -v : v;
            if (s > size && s !== Infinity) {
              size = s;
              value = v;
            }
          }
        }
      }
      if (!(value > -Infinity && value < Infinity)) out[y * W + x] = hidden;
      else {
        const i = Math.floor(((of && value < 0 ? -value : value) - low) * steps);
        out[y * W + x] = (columns ? columns[x] : ofRow)[i < 0 ? 0 : i > 255 ? 255 : i];
      }
    }
  }
  return image;
}

/** A canvas that holds the pixels, to be drawn at any size. @param {ImageData} image */
export function bitmap(image) {
  const canvas = document.createElement("canvas");
  canvas.width = image.width;
  canvas.height = image.height;
  /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d")).putImageData(image, 0, 0);
  return canvas;
}

/** Fit a canvas to a size in CSS pixels, sharp on dense screens; the context draws in CSS pixels.
 * @param {HTMLCanvasElement} canvas @param {number} width @param {number} height */
export function fit(canvas, width, height) {
  const dense = Math.min(3, globalThis.devicePixelRatio || 1);
  const w = Math.max(1, Math.round(width * dense));
  const h = Math.max(1, Math.round(height * dense));
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const ctx = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  ctx.setTransform(dense, 0, 0, dense, 0, 0);
  ctx.clearRect(0, 0, width, height);
  ctx.imageSmoothingEnabled = false;
  return ctx;
}

/** @type {Map<string, number>} */
const widths = new Map();

/** How wide a text is. Labels are measured again and again while one points here and there. @param {CanvasRenderingContext2D} ctx @param {string} text */
export function widthOf(ctx, text) {
  const name = `${ctx.font} ${text}`;
  let found = widths.get(name);
  if (found === undefined) {
    if (widths.size > 5000) widths.clear();
    found = ctx.measureText(text).width;
    widths.set(name, found);
  }
  return found;
}

/** The text, cut so that it is no wider than this. @param {CanvasRenderingContext2D} ctx @param {string} text @param {number} width */
export function shorten(ctx, text, width) {
  if (widthOf(ctx, text) <= width) return text;
  const letters = [...text];
  while (letters.length > 1 && widthOf(ctx, `${letters.join("")}…`) > width) letters.pop();
  return `${letters.join("")}…`;
}

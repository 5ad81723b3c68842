// Rows that change places: (N, H, D) ↔ (H, N, D) → (N, H·D). A row is the D numbers of one item in one head; it keeps
// its numbers and its hue while it travels.

import { headColour } from "./colour.js";
import { createLegend } from "./grid.js";
import { el } from "./dom.js";
import { bitmap, fit, layout, pixels, shorten } from "./paint.js";
import { shapeText } from "./tensor.js";

const LABEL = 16; // pixels above a slab for its name
const GAP = 10;
const HEIGHT = 440;

/** @typedef {{x: number, y: number, w: number, h: number}} Rect */
/** One side of the move: the tensor's name, how its rows lie, and the index of a row's d-th number.
 * @typedef {{name: string, t: any, lie: "items" | "heads" | "merged", index: (n: number, h: number, d: number) => number[]}} Side */
/** @typedef {{from: Side, to: Side, N: number, H: number, D: number, labels: string[], ink: import("./paint.js").Ink, heads: number}} Moved */

/** Slabs of rows, in as many columns as make the rows highest. @param {number} slabs @param {number} rows @param {number} width */
export function arrangeSlabs(slabs, rows, width) {
  let best = { columns: 1, rowHeight: 0, slabWidth: width, down: slabs };
  for (let columns = 1; columns <= slabs; columns++) {
    const slabWidth = (width - (columns - 1) * GAP) / columns;
    if (slabWidth < 30 && columns > 1) break;
    const down = Math.ceil(slabs / columns);
    const rowHeight = Math.min(14, (HEIGHT - down * (LABEL + GAP)) / (down * rows));
    if (rowHeight > best.rowHeight + 0.01) best = { columns, rowHeight, slabWidth, down };
  }
  if (best.rowHeight <= 0) best.rowHeight = 1.5;
  return best;
}

/** @param {any} app @param {string} id */
export function createRegroup(app, id) {
  const canvas = el("canvas", { tabindex: "0", role: "img", "aria-describedby": "live", "data-grid": id });
  const host = el("div", { class: "grid-host" }, canvas);
  const before = el("span", { class: "side" });
  const after = el("span", { class: "side" });
  const legend = createLegend();
  const tableButton = el("button", { type: "button", class: "quiet", text: "Table", onclick: () => app.openTable(tableOf()) });
  const node = el("figure", { class: "tensor wide", "data-figure": id }, el("figcaption", {}, before, el("span", { class: "arrow", text: "→" }), after), host, el("div", { class: "under" }, legend.node, tableButton));
  /** @type {Moved | null} */
  let shown = null;
  let width = 0;
  let height = 0;
  let progress = 1; // in heads moved: 0…H
  /** @type {Rect[]} */
  let start = [];
  /** @type {Rect[]} */
  let end = [];
  /** @type {HTMLCanvasElement | null} */
  let strip = null; // every row's pixels, row (h, n) at h·N + n
  let cursor = { row: 0, column: 0 };

  /** Where each row lies, at h·N + n. @param {"items" | "heads" | "merged"} lie @returns {Rect[]} */
  function places(lie) {
    const { N, H } = /** @type {Moved} */ (shown);
    const found = [];
    const merged = Math.max(1, Math.min(22, (HEIGHT - LABEL) / N));
    const slabs = arrangeSlabs(lie === "items" ? N : H, lie === "items" ? H : N, width);
    for (let h = 0; h < H; h++) {
      for (let n = 0; n < N; n++) {
        if (lie === "merged") {
          found.push({ x: gutter() + (h * (width - gutter())) / H, y: LABEL + n * merged, w: (width - gutter()) / H, h: merged });
          continue;
        }
        const [slab, row] = lie === "items" ? [n, h] : [h, n];
        const column = slab % slabs.columns;
        const down = Math.floor(slab / slabs.columns);
        const tall = slabs.rowHeight * (lie === "items" ? H : N) + LABEL + GAP;
        found.push({ x: column * (slabs.slabWidth + GAP), y: down * tall + LABEL + row * slabs.rowHeight, w: slabs.slabWidth, h: slabs.rowHeight });
      }
    }
    return found;
  }

  const gutter = () => Math.min(90, width * 0.18);
  const bottomOf = (/** @type {Rect[]} */ rects) => rects.reduce((most, r) => Math.max(most, r.y + r.h), 0) + 2;
  const ease = (/** @type {number} */ t) => (t < 0.5 ? 4 * t ** 3 : 1 - (-2 * t + 2) ** 3 / 2);

  function repaint() {
    if (!shown || !width) return;
    const { H, N, to, ink } = shown;
    start = places(shown.from.lie);
    end = places(to.lie);
    height = Math.max(bottomOf(start), bottomOf(end));
    const rows = to.lie === "heads" ? { rows: [0, 1], columns: [2] } : { rows: [1, 0], columns: [2] };
    const t = to.lie === "merged" ? { shape: [N, H, shown.D], data: to.t.data } : to.t;
    const view = { name: to.name, t, ...rows };
    strip = bitmap(pixels(view, layout(view), ink, 2 * width, 1e6));
    draw();
  }

  const now = (/** @type {number} */ at) => {
    const h = Math.floor(at / /** @type {Moved} */ (shown).N);
    const t = ease(Math.min(1, Math.max(0, progress - h)));
    const [a, b] = [start[at], end[at]];
    return { x: a.x + t * (b.x - a.x), y: a.y + t * (b.y - a.y), w: a.w + t * (b.w - a.w), h: a.h + t * (b.h - a.h) };
  };

  function draw() {
    if (!shown || !strip || !width) return;
    const { N, H, D } = shown;
    const ctx = fit(canvas, width, height);
    const colours = app.colours();
    const theme = app.theme();
    ctx.font = "12px system-ui, sans-serif";
    slabNames(ctx, colours);
    const lit = app.lit();
    const patterns = [shown.from, shown.to].flatMap((side) => (lit.get(side.name) ?? []).map((/** @type {any} */ p) => ({ p, side })));
    const isLit = (/** @type {number} */ n, /** @type {number} */ h) => patterns.some(({ p, side }) => matches(p.index, side, n, h));
    for (let h = 0; h < H; h++) {
      const colour = headColour(h, shown.heads, theme);
      for (let n = 0; n < N; n++) {
        const at = h * N + n;
        const r = now(at);
        ctx.globalAlpha = patterns.length && !isLit(n, h) ? 0.4 : 1;
        ctx.drawImage(strip, 0, at, strip.width, 1, r.x + 4, r.y, r.w - 5, Math.max(1, r.h - (r.h > 5 ? 1 : 0)));
        ctx.fillStyle = colour;
        ctx.fillRect(r.x, r.y, 4, Math.max(1, r.h - (r.h > 5 ? 1 : 0)));
      }
    }
    ctx.globalAlpha = 1;
    const focus = app.focus();
    if (!focus) return;
    for (const side of [shown.to, shown.from]) {
      if (focus.name !== side.name) continue;
      for (let at = 0; at < N * H; at++) {
        const [h, n] = [Math.floor(at / N), at % N];
        const first = side.index(n, h, 0);
        const last = first.length - 1;
        const d = side.lie === "merged" ? focus.index[1] - h * D : focus.index[last];
        if (!first.every((i, axis) => axis === last || i === focus.index[axis]) || d < 0 || d >= D) continue;
        const r = now(at);
        ctx.strokeStyle = colours.ink;
        ctx.lineWidth = 2;
        ctx.strokeRect(r.x + 4 + (d * (r.w - 5)) / D - 1, r.y - 1, Math.max(2, (r.w - 5) / D) + 2, r.h + 2);
      }
    }
  }

  /** @param {(number | null)[]} index @param {Side} side @param {number} n @param {number} h */
  function matches(index, side, n, h) {
    const first = side.index(n, h, 0);
    if (side.lie === "merged") return index[0] === null || index[0] === n ? index[1] === null || Math.floor(index[1] / /** @type {Moved} */ (shown).D) === h : false;
    return first.every((i, axis) => axis === first.length - 1 || index[axis] === null || index[axis] === i);
  }

  /** @param {CanvasRenderingContext2D} ctx @param {any} colours */
  function slabNames(ctx, colours) {
    const { N, H, labels, from, to } = /** @type {Moved} */ (shown);
    const done = progress / H;
    ctx.textBaseline = "alphabetic";
    for (const [side, rects, alpha] of /** @type {[Side, Rect[], number][]} */ ([[from, start, Math.max(0, 1 - 2 * done)], [to, end, Math.max(0, 2 * done - 1)]])) {
      if (alpha <= 0) continue;
      ctx.globalAlpha = alpha;
      ctx.fillStyle = colours.soft;
      if (side.lie === "merged") {
        ctx.textAlign = "right";
        const every = Math.max(1, Math.ceil(14 / rects[0].h));
        for (let n = 0; n < N; n += every) ctx.fillText(shorten(ctx, labels[n], gutter() - 8), gutter() - 6, rects[n].y + rects[n].h / 2 + 4);
      }
      ctx.textAlign = "left";
      const count = side.lie === "items" ? N : H;
      for (let s = 0; s < count; s++) {
        const r = rects[side.lie === "items" ? s : s * N];
        const name = side.lie === "items" ? labels[s] : `head ${s}`;
        if (r.w >= 24) ctx.fillText(shorten(ctx, name, r.w), r.x, r.y - 4);
      }
    }
    ctx.globalAlpha = 1;
  }

  /** @param {number} x @param {number} y */
  function at(x, y) {
    if (!shown) return null;
    const side = progress >= shown.H / 2 ? shown.to : shown.from;
    for (let row = 0; row < shown.N * shown.H; row++) {
      const r = now(row);
      if (x < r.x || x >= r.x + r.w || y < r.y || y >= r.y + r.h) continue;
      const d = Math.min(shown.D - 1, Math.max(0, Math.floor(((x - r.x - 4) / (r.w - 5)) * shown.D)));
      cursor = { row, column: d };
      return { name: side.name, index: side.index(row % shown.N, Math.floor(row / shown.N), d) };
    }
    return null;
  }

  function here() {
    const { N, from, to, H } = /** @type {Moved} */ (shown);
    const side = progress >= H / 2 ? to : from;
    return { name: side.name, index: side.index(cursor.row % N, Math.floor(cursor.row / N), cursor.column) };
  }

  const point = (/** @type {MouseEvent} */ event) => {
    const bounds = canvas.getBoundingClientRect();
    return at(event.clientX - bounds.left, event.clientY - bounds.top);
  };
  canvas.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => app.hoverCell(point(event)));
  canvas.addEventListener("pointerleave", () => app.hoverCell(null));
  canvas.addEventListener("click", (/** @type {MouseEvent} */ event) => {
    const cell = point(event);
    if (cell) app.lock(cell);
  });
  canvas.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    const step = /** @type {Record<string, [number, number]>} */ ({ ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] })[event.key];
    if (!shown) return;
    if (step) {
      event.preventDefault();
      cursor = { row: Math.min(shown.N * shown.H - 1, Math.max(0, cursor.row + step[0])), column: Math.min(shown.D - 1, Math.max(0, cursor.column + step[1])) };
      app.hover.set(here());
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      app.lock(here());
    }
  });
  canvas.addEventListener("blur", () => app.hover.set(null));
  new ResizeObserver(() => {
    const wide = Math.floor(host.clientWidth);
    if (wide === width) return;
    width = wide;
    repaint();
  }).observe(host);

  function tableOf() {
    const { to, N, H, D, labels } = /** @type {Moved} */ (shown);
    const cells = (/** @type {number} */ r) => (to.lie === "heads" ? [r % N, Math.floor(r / N)] : [Math.floor(r / H), r % H]);
    return {
      title: `${to.name} ${shapeText(to.t.shape)}`,
      rows: N * H,
      columns: D,
      rowLabels: Array.from({ length: N * H }, (_, r) => (to.lie === "heads" ? `head ${cells(r)[1]}, ${labels[cells(r)[0]]}` : `${labels[cells(r)[0]]}, head ${cells(r)[1]}`)),
      value: (/** @type {number} */ r, /** @type {number} */ d) => to.t.data[r * D + d],
    };
  }

  return {
    node,
    canvas,
    draw,
    /** @param {Moved} next @param {number} moved heads that have moved */
    show(next, moved) {
      const same = shown && shown.to.t === next.to.t && shown.ink.theme === next.ink.theme && !shown.ink.of === !next.ink.of;
      shown = next;
      progress = moved;
      before.replaceChildren(el("b", { text: next.from.name }), el("code", { text: shapeText(next.from.t.shape) }));
      after.replaceChildren(el("b", { text: next.to.name }), el("code", { text: shapeText(next.to.t.shape) }));
      legend.show(next.ink);
      tableButton.setAttribute("aria-label", `Show ${next.to.name} as a table`);
      canvas.setAttribute("aria-label", `${next.from.name} becomes ${next.to.name}: ${next.N * next.H} rows of ${next.D} numbers change places. Arrow keys move over them, Enter locks one.`);
      if (same) draw();
      else repaint();
    },
    /** Where a row's number is on the screen. @param {number} n @param {number} h @param {number} d */
    centre(n, h, d) {
      const { N, D } = /** @type {Moved} */ (shown);
      const r = now(h * N + n);
      const bounds = canvas.getBoundingClientRect();
      return { x: bounds.left + r.x + 4 + ((d + 0.5) * (r.w - 5)) / D, y: bounds.top + r.y + r.h / 2 };
    },
  };
}

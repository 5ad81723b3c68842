// A tensor on a canvas: cells, labels, a cursor for the pointer and the arrow keys, and the light that falls on the
// rows and columns a chosen number was made of.

import { headColour, rgbOf } from "./colour.js";
import { el } from "./dom.js";
import { numberText, titleOf } from "./explain.js";
import { bitmap, fit, indexAt, layout, litIn, pixels, placeOf, shorten, widthOf } from "./paint.js";
import { shapeText } from "./tensor.js";

const FONT = "12px system-ui, sans-serif";
const BAND = 7; // pixels of the band that says which head a column belongs to

/** What a grid shows. `lane`: a picture with one pixel for each column. `rowRole`: whether a row's label stands for a query or a key.
 * `shape`: what is written instead of the tensor's, where that is asked for.
 * @typedef {{view: import("./paint.js").View, ink: import("./paint.js").Ink, name?: string, note?: string, shape?: string,
 *   rowLabels?: string[], columnLabels?: string[], rowRole?: "query" | "key", columnRole?: "query" | "key",
 *   bands?: {size: number, heads: number, first?: number}, rowBands?: {size: number, heads: number}, lane?: HTMLCanvasElement,
 *   reveal?: number | null, drop?: number | null, alpha?: Float32Array | null, edge?: string}} Shown */

/** @param {any} app @param {{square?: boolean, height?: number, cell?: number, top?: number, id: string, bare?: boolean, say?: (row: number, column: number, value: number) => string}} options
 * `say`: numbers that no step made speak for themselves, and light nothing up. */
export function createGrid(app, options) {
  const canvas = el("canvas", { tabindex: "0", role: "img", "aria-describedby": "live", "data-grid": options.id });
  const name = el("b");
  const shape = el("code");
  const note = el("span", { class: "note" });
  const legend = createLegend();
  const tableButton = el("button", { type: "button", class: "quiet", text: "Table", onclick: () => app.openTable(tableOf()) });
  const host = el("div", { class: "grid-host" }, canvas);
  const said = el("p", { class: "said", hidden: !options.say, text: "\u00a0" });
  const node = el("figure", { class: "tensor", "data-figure": options.id }, options.bare ? null : el("figcaption", {}, name, shape, note), host, said, options.bare ? null : el("div", { class: "under" }, legend.node, tableButton));
  /** @type {Shown | null} */
  let shown = null;
  /** @type {import("./paint.js").Layout} */
  let at = { R: 0, C: 0, down: new Int32Array(), across: new Int32Array(), base: 0 };
  let box = { left: 0, top: 0, width: 0, height: 0, cw: 1, ch: 1 };
  /** @type {HTMLCanvasElement | null} */
  let cells = null;
  let cursor = { row: 0, column: 0 };
  let keyboard = false;
  let width = 0;
  let key = ""; // what is shown, but for what moves

  /** Where everything lies, for the width there is. */
  function arrange() {
    const s = /** @type {Shown} */ (shown);
    const ctx = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    ctx.font = FONT;
    const widest = (/** @type {string[]} */ labels) => labels.reduce((most, label) => Math.max(most, widthOf(ctx, label)), 0);
    const left = (s.rowLabels ? Math.min(Math.max(72, width * 0.2), 8 + widest(s.rowLabels)) : 0) + (s.rowBands ? BAND + 3 : 0);
    const upright = s.columnLabels ? Math.min(84, 14 + widest(s.columnLabels) * 0.87) : 0;
    const top = Math.max(6, options.top ?? 0, upright + (s.bands ? BAND + 3 : 0) + (s.lane ? BAND + 5 : 0));
    const most = options.cell ?? 30;
    const room = Math.max(40, width - left - (s.columnLabels ? 26 : 1));
    let cw = Math.min(most, room / at.C);
    let ch = Math.min(most, (options.height ?? 320) / at.R);
    if (options.square) cw = ch = Math.max(Math.min(cw, ch), 1.5);
    if (!options.square) ch = Math.min(ch, 22);
    box = { left, top, width: cw * at.C, height: ch * at.R, cw, ch };
  }

  function repaint() {
    if (!shown || !width) return;
    at = layout(shown.view);
    arrange();
    cells = bitmap(pixels(shown.view, at, shown.ink, box.width * 2, box.height * 2));
    draw();
  }

  /** @param {{top: number, bottom: number, left: number, right: number}} r @returns {[number, number, number, number]} */
  const rect = (r) => [box.left + r.left * box.cw, box.top + r.top * box.ch, Math.max(1, (r.right - r.left) * box.cw), Math.max(1, (r.bottom - r.top) * box.ch)];

  function draw() {
    if (!shown || !cells) return;
    const s = shown;
    const total = { width: box.left + box.width + (s.columnLabels ? 26 : 1), height: box.top + box.height + 6 };
    const ctx = fit(canvas, Math.min(total.width, width), total.height);
    const colours = app.colours();
    drawCells(ctx, s, colours);
    drawBands(ctx, s);
    const patterns = app.lit().get(s.view.name) ?? [];
    const lit = patterns.flatMap((/** @type {any} */ p) => litIn(s.view, p.index));
    const all = lit.some((/** @type {any} */ r) => r.top === 0 && r.left === 0 && r.bottom === at.R && r.right === at.C);
    if (lit.length && !all) {
      ctx.save();
      ctx.beginPath();
      ctx.rect(box.left, box.top, box.width, box.height);
      for (const r of lit) ctx.rect(...rect(r));
      ctx.clip("evenodd");
      ctx.globalAlpha = 0.45;
      ctx.fillStyle = colours.paper;
      ctx.fillRect(box.left, box.top, box.width, box.height);
      ctx.restore();
    }
    for (const r of lit) outline(ctx, rect(r), colours.lit);
    drawLabels(ctx, s, colours, lit);
    const focus = app.focus();
    const here = focus && focus.name === s.view.name && placeOf(s.view, focus.index);
    if (here) outline(ctx, rect({ top: here.row, bottom: here.row + 1, left: here.column, right: here.column + 1 }), colours.ink, 2);
    else if (keyboard && document.activeElement === canvas) outline(ctx, rect({ top: cursor.row, bottom: cursor.row + 1, left: cursor.column, right: cursor.column + 1 }), colours.ink, 2);
  }

  /** @param {CanvasRenderingContext2D} ctx @param {Shown} s @param {any} colours */
  function drawCells(ctx, s, colours) {
    const image = /** @type {HTMLCanvasElement} */ (cells);
    ctx.save();
    if (s.reveal !== null && s.reveal !== undefined) {
      const full = Math.floor(s.reveal);
      ctx.beginPath();
      ctx.rect(box.left, box.top, box.width, Math.min(at.R, full) * box.ch);
      if (full < at.R) ctx.rect(box.left, box.top + full * box.ch, box.width * (s.reveal - full), box.ch);
      ctx.clip();
    }
    if (s.alpha) {
      for (let r = 0; r < at.R; r++) {
        ctx.globalAlpha = s.alpha[r];
        ctx.drawImage(image, 0, (r * image.height) / at.R, image.width, image.height / at.R, box.left, box.top + r * box.ch, box.width, box.ch);
      }
    } else ctx.drawImage(image, box.left, box.top, box.width, box.height);
    ctx.restore();
    if (s.drop !== null && s.drop !== undefined && s.drop < 1) {
      ctx.save();
      ctx.beginPath();
      ctx.rect(box.left, box.top, box.width, box.height);
      ctx.clip();
      ctx.fillStyle = colours.hidden;
      const hidden = app.hiddenCells();
      for (let r = 0; r < at.R; r++) {
        for (let c = 0; c < at.C; c++) {
          if (hidden && !hidden[r * at.C + c]) ctx.fillRect(box.left + c * box.cw, box.top + r * box.ch - (1 - s.drop) * (box.height + box.ch), box.cw + 0.5, box.ch + 0.5);
        }
      }
      ctx.restore();
    }
    ctx.strokeStyle = colours.rule;
    ctx.lineWidth = 1;
    if (Math.min(box.cw, box.ch) >= 9) {
      ctx.globalAlpha = 0.5;
      ctx.beginPath();
      for (let r = 1; r < at.R; r++) line(ctx, box.left, box.top + r * box.ch, box.left + box.width, box.top + r * box.ch);
      for (let c = 1; c < at.C; c++) line(ctx, box.left + c * box.cw, box.top, box.left + c * box.cw, box.top + box.height);
      ctx.stroke();
      ctx.globalAlpha = 1;
    }
    if (s.edge) ctx.strokeStyle = s.edge;
    ctx.lineWidth = s.edge ? 2 : 1;
    ctx.strokeRect(box.left + 0.5, box.top + 0.5, Math.max(1, box.width - 1), Math.max(1, box.height - 1));
  }

  /** @param {CanvasRenderingContext2D} ctx @param {Shown} s */
  function drawBands(ctx, s) {
    const theme = app.theme();
    if (s.bands) {
      const groups = Math.ceil(at.C / s.bands.size);
      for (let g = 0; g < groups; g++) {
        ctx.fillStyle = headColour(g + (s.bands.first ?? 0), s.bands.heads, theme);
        const x = box.left + g * s.bands.size * box.cw;
        ctx.fillRect(x + (g ? 1 : 0), box.top - BAND - 2, Math.max(1, s.bands.size * box.cw - (g ? 1 : 0)), BAND);
      }
    }
    if (s.rowBands) {
      for (let g = 0; g < at.R / s.rowBands.size; g++) {
        ctx.fillStyle = headColour(g, s.rowBands.heads, theme);
        ctx.fillRect(box.left - BAND - 2, box.top + g * s.rowBands.size * box.ch + (g ? 1 : 0), BAND, s.rowBands.size * box.ch - (g ? 1 : 0));
      }
    }
    if (s.lane) {
      ctx.drawImage(s.lane, box.left, box.top - BAND - 4, box.width, BAND + 2);
    }
  }

  /** @param {CanvasRenderingContext2D} ctx @param {Shown} s @param {any} colours @param {any[]} lit */
  function drawLabels(ctx, s, colours, lit) {
    ctx.font = FONT;
    ctx.textBaseline = "middle";
    const litRow = (/** @type {number} */ r) => lit.some((l) => l.bottom - l.top < at.R && r >= l.top && r < l.bottom);
    const litColumn = (/** @type {number} */ c) => lit.some((l) => l.right - l.left < at.C && c >= l.left && c < l.right);
    if (s.rowLabels) {
      const every = Math.max(1, Math.ceil(14 / box.ch));
      ctx.textAlign = "right";
      for (let r = 0; r < at.R; r++) {
        const bold = litRow(r);
        if (r % every && !bold) continue;
        if (!bold && every > 1 && lit.some((l) => l.bottom - l.top < at.R && Math.abs(l.top - r) * box.ch < 14)) continue;
        ctx.fillStyle = bold ? colours.ink : colours.soft;
        ctx.fillText(shorten(ctx, s.rowLabels[r] ?? "", box.left - 8 - (s.rowBands ? BAND + 3 : 0)), box.left - 6 - (s.rowBands ? BAND + 3 : 0), box.top + (r + 0.5) * box.ch);
      }
    }
    if (s.columnLabels) {
      const every = Math.max(1, Math.ceil(15 / box.cw));
      ctx.textAlign = "left";
      const above = box.top - (s.bands ? BAND + 3 : 0) - (s.lane ? BAND + 5 : 0) - 5;
      for (let c = 0; c < at.C; c++) {
        const bold = litColumn(c);
        if (c % every && !bold) continue;
        if (!bold && every > 1 && lit.some((l) => l.right - l.left < at.C && Math.abs(l.left - c) * box.cw < 15)) continue;
        ctx.save();
        ctx.translate(box.left + (c + 0.5) * box.cw + 2, above);
        ctx.rotate(-Math.PI / 3);
        ctx.fillStyle = bold ? colours.ink : colours.soft;
        ctx.fillText(shorten(ctx, s.columnLabels[c] ?? "", (above - 3) / 0.87), 0, 0);
        ctx.restore();
      }
    }
  }

  /** What is under the pointer: a cell, or the label of a query or a key. @param {PointerEvent | MouseEvent} event */
  function under(event) {
    if (!shown) return null;
    const bounds = canvas.getBoundingClientRect();
    const x = event.clientX - bounds.left - box.left;
    const y = event.clientY - bounds.top - box.top;
    const row = Math.floor(y / box.ch);
    const column = Math.floor(x / box.cw);
    if (row >= 0 && row < at.R && column >= 0 && column < at.C) {
      cursor = { row, column };
      return { name: shown.view.name, index: indexAt(shown.view, row, column) };
    }
    if (x < 0 && row >= 0 && row < at.R && shown.rowRole) return { name: shown.rowRole, index: [row] };
    if (y < 0 && shown.columnRole) {
      const slanted = Math.floor((x + y / 1.73 - 2) / box.cw); // labels lean to the right
      if (slanted >= 0 && slanted < at.C) return { name: shown.columnRole, index: [slanted] };
    }
    return null;
  }

  function hoverCursor() {
    if (shown) point({ name: shown.view.name, index: indexAt(shown.view, cursor.row, cursor.column) });
  }

  /** Tell the page what is pointed at. @param {{name: string, index: number[]} | null} cell */
  function point(cell) {
    if (!options.say) {
      if (keyboard) app.hover.set(cell);
      else app.hoverCell(cell);
      return;
    }
    const value = shown?.view.t.data[at.base + at.down[cursor.row] + at.across[cursor.column]];
    said.textContent = cell ? options.say(cursor.row, cursor.column, value) : "\u00a0";
    if (cell) app.live(said.textContent);
  }

  canvas.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => {
    keyboard = false;
    point(under(event));
  });
  canvas.addEventListener("pointerleave", () => point(null));
  canvas.addEventListener("click", (/** @type {MouseEvent} */ event) => {
    const cell = under(event);
    if (cell && !options.say) app.lock(cell);
  });
  canvas.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    const step = /** @type {Record<string, [number, number]>} */ ({ ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-10, 0], PageDown: [10, 0], Home: [0, -at.C], End: [0, at.C] })[event.key];
    if (step && !event.altKey && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      keyboard = true;
      cursor = { row: Math.min(at.R - 1, Math.max(0, cursor.row + step[0])), column: Math.min(at.C - 1, Math.max(0, cursor.column + step[1])) };
      hoverCursor();
    } else if ((event.key === "Enter" || event.key === " ") && shown && !options.say) {
      event.preventDefault();
      app.lock({ name: shown.view.name, index: indexAt(shown.view, cursor.row, cursor.column) });
    }
  });
  canvas.addEventListener("focus", () => {
    keyboard = canvas.matches(":focus-visible");
    cursor = { row: Math.min(cursor.row, Math.max(0, at.R - 1)), column: Math.min(cursor.column, Math.max(0, at.C - 1)) };
    if (keyboard && shown) hoverCursor();
  });
  canvas.addEventListener("blur", () => {
    keyboard = false;
    if (!options.say) app.hover.set(null);
  });

  new ResizeObserver(() => {
    const now = Math.floor(host.clientWidth);
    if (now === width) return;
    width = now;
    repaint();
  }).observe(host);

  /** The numbers as a table. */
  function tableOf() {
    const s = /** @type {Shown} */ (shown);
    return {
      title: `${s.name ?? s.view.name} ${shapeText(s.view.t.shape)}${s.note ? `, ${s.note}` : ""}`,
      name: s.name ?? s.view.name,
      note: s.note,
      tensor: s.view.t,
      rows: at.R,
      columns: at.C,
      rowLabels: s.rowLabels,
      columnLabels: s.columnLabels,
      value: (/** @type {number} */ r, /** @type {number} */ c) => s.view.t.data[at.base + at.down[r] + at.across[c]],
    };
  }

  return {
    node,
    canvas,
    /** @param {Shown} next */
    show(next) {
      const kind = (/** @type {Shown} */ s) => JSON.stringify([s.view.fixed, s.view.rows, s.rowLabels?.length, s.rowLabels?.[0], s.ink, !s.bands, !s.lane, s.name, s.note, s.edge]);
      const now = kind(next);
      const same = cells && next.view.t === shown?.view.t && next.rowLabels === shown.rowLabels && now === key;
      key = now;
      shown = next;
      if (same) {
        draw();
        return;
      }
      tableButton.setAttribute("aria-label", `Show ${next.name ?? next.view.name} as a table`);
      name.textContent = next.name ?? next.view.name;
      shape.textContent = next.shape ?? shapeText(next.view.t.shape);
      note.textContent = next.note ?? "";
      legend.show(next.ink, next.ink.scale.beyond);
      const [R, C] = [layoutSize(next.view.rows, next.view), layoutSize(next.view.columns, next.view)];
      canvas.setAttribute("aria-label", `${next.name ?? next.view.name}, ${R} rows and ${C} columns${next.note ? `, ${next.note}` : ""}. Arrow keys move over its numbers${options.say ? "" : ", Enter locks one"}.`);
      repaint();
    },
    draw,
    /** The middle of a cell on the screen, for tests and for links. @param {number[]} index */
    centre(index) {
      const here = shown && placeOf(shown.view, index);
      if (!here) return null;
      const bounds = canvas.getBoundingClientRect();
      return { x: bounds.left + box.left + (here.column + 0.5) * box.cw, y: bounds.top + box.top + (here.row + 0.5) * box.ch };
    },
  };
}

const layoutSize = (/** @type {number[]} */ axes, /** @type {any} */ view) => axes.reduce((p, axis) => p * view.t.shape[axis], 1);

/** @param {CanvasRenderingContext2D} ctx @param {number[]} r @param {string} colour */
function outline(ctx, [x, y, w, h], colour, thick = 1.5) {
  ctx.strokeStyle = colour;
  ctx.lineWidth = thick;
  ctx.strokeRect(x - thick / 2 + 0.5, y - thick / 2 + 0.5, w + thick - 1, h + thick - 1);
}

function line(/** @type {CanvasRenderingContext2D} */ ctx, /** @type {number} */ x1, /** @type {number} */ y1, /** @type {number} */ x2, /** @type {number} */ y2) {
  ctx.moveTo(x1, y1);
  ctx.lineTo(x2, y2);
}

/** The scale with the numbers at its ends. */
export function createLegend() {
  const low = el("span");
  const high = el("span");
  const bar = el("canvas", { "aria-hidden": "true", width: "72", height: "8" });
  const node = el("span", { class: "legend" }, low, bar, high);
  return {
    node,
    /** @param {import("./paint.js").Ink} ink @param {boolean} [beyond] whether there are numbers above its end */
    show(ink, beyond = false) {
      const byHead = Boolean(ink.of);
      low.textContent = byHead ? "0" : numberText(ink.scale.low);
      high.textContent = byHead ? `±${numberText(ink.scale.high)} by head` : `${beyond ? "≥ " : ""}${numberText(ink.scale.high)}`;
      const image = new ImageData(72, 1);
      for (let x = 0; x < 72; x++) image.data.set(byHead ? [128, 128, 128, (255 * (x + 1)) / 72] : [...rgbOf(ink.scale, ink.scale.low + ((ink.scale.high - ink.scale.low) * (x + 0.5)) / 72, ink.theme), 255], 4 * x);
      fit(bar, 72, 8).drawImage(bitmap(image), 0, 0, 72, 8);
    },
  };
}

/** What a cell says, in a sentence. @param {any} scene @param {{name: string, index: number[]}} cell @param {number} value */
export function sentence(scene, cell, value) {
  return `${titleOf(scene, cell)} = ${numberText(value)}`;
}

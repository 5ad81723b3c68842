// The weights of one head as a map: from the whole pattern, pooled, to single weights with their tokens. Tiles come when
// they are looked at and are given up when they are not; until one is there, a coarser one, or a sample, stands in.

import { headColour, place, table } from "./colour.js";
import { debounce, eachFrame, el, segmented } from "./dom.js";
import { parseCell } from "./explain.js";
import { createLegend } from "./grid.js";
import { createGestures } from "./gestures.js";
import { createMapSide } from "./map_side.js";
import { bitmap, fit, layout, pixels, shorten } from "./paint.js";
import { sourceOfPython, sourceOfScene } from "./sources.js";
import { SIDE, above, centred, clamp, contrastFor, count, createStore, itemsIn, keyOf, levelFor, takesLong, tilesIn, topLevel, weightText, wholeScale, withRows } from "./tiles.js";

/** @typedef {import("./sources.js").Source} Source */
/** @typedef {import("./tiles.js").Place} Place */
/** @typedef {import("./tiles.js").Tile} Tile */
/** @typedef {import("./tiles.js").View} View */

const MOST_BYTES = 48 * 2 ** 20; // of tiles; their pictures take as much again
const AT_ONCE = 2; // tiles asked for at once: Python computes one, the next waits beside it
const TEXT = 13; // pixels of an item from which on its name is written
const FONT = "12px system-ui, sans-serif";

/** @param {any} app */
export function createMap(app) {
  const { store, session } = app;
  const canvas = el("canvas", { tabindex: "0", role: "img", "aria-describedby": "live", "data-grid": "map" });
  const host = el("div", { class: "map-host" }, canvas);
  const says = el("p", { class: "does", id: "map-says" });
  const said = el("p", { class: "said", id: "map-said", text: "\u00a0" });
  const progress = el("p", { class: "hint", id: "map-progress", role: "status" });
  const rail = el("div", { class: "rail", role: "group", "aria-label": "Heads of this layer" });
  const legend = createLegend();
  const button = (/** @type {string} */ text, /** @type {string} */ label, /** @type {() => void} */ act) => el("button", { type: "button", text, "aria-label": label, onclick: act });
  const pool = segmented("A bin shows", [["max", "its largest"], ["mean", "its mean"]], (value) => store.set({ pool: value }));
  const sink = el("input", { type: "checkbox", onchange: () => store.set({ sink: !sink.checked }) });
  const contrast = el("input", { type: "range", min: "0", max: "4", step: "0.1", "aria-label": "Contrast", oninput: () => store.set({ contrast: Number(contrast.value) }) });
  const tableButton = button("Table", "Show the part on the screen as a table", () => app.openTable(tableOf()));
  tableButton.className = "quiet";
  const side = createMapSide(app, { source: () => source, head, go, locked, draw: () => draw() });
  const node = el("section", { class: "map", "aria-labelledby": "map-title", hidden: true },
    el("header", {}, el("h2", { id: "map-title", text: "Map" }), says),
    el("div", { class: "tools" }, button("−", "Zoom out", () => gestures.zoomBy(0.5)), button("+", "Zoom in", () => gestures.zoomBy(2)), button("Whole", "The whole map", () => gestures.whole()),
      el("span", { class: "tool-label" }, el("span", { text: "A bin shows", "aria-hidden": "true" }), pool.node),
      el("label", {}, sink, "leave the first key out of the colours"), el("label", {}, el("span", { text: "Contrast" }), contrast)),
    rail,
    el("div", { class: "map-desk" }, el("figure", { class: "tensor", "data-figure": "map" }, host, said, el("div", { class: "under" }, legend.node, tableButton, progress)), side.node));

  /** @type {Source | null} */
  let source = null;
  const tiles = createStore(MOST_BYTES);
  /** @type {WeakMap<object, {key: string, image: HTMLCanvasElement}>} */
  const pictures = new WeakMap();
  /** @type {Map<string, AbortController>} */
  const running = new Map();
  const stats = { asked: 0, cancelled: 0, received: 0 };
  let size = { width: 0, height: 0, left: 0, top: 0 };
  let high = 1;
  let trouble = "";
  let pointing = false; // whether the pointer or the cursor says what is said

  function head() {
    return Math.min(store.get().head, (source?.H ?? 1) - 1);
  }
  const frame = () => ({ Q: source?.Q ?? 1, K: source?.K ?? 1, width: Math.max(1, size.width - size.left), height: Math.max(1, size.height - size.top) });
  const top = () => topLevel(source?.Q ?? 1, source?.K ?? 1);

  /** The view that the address says, or the whole. */
  function view() {
    const [q, k, scale] = store.get().map.split(",").map(Number);
    const f = frame();
    return clamp(scale > 0 && Number.isFinite(q) && Number.isFinite(k) ? { q, k, scale } : { q: 0, k: 0, scale: wholeScale(f) }, f);
  }

  function look(/** @type {View} */ v, push = false) {
    const whole = v.scale <= wholeScale(frame()) * 1.0001;
    store.set({ map: whole ? "" : [v.q.toFixed(2), v.k.toFixed(2), v.scale.toPrecision(6)].join() }, { push });
  }

  /** The cell that is locked, if it is of this head. */
  function locked() {
    const cell = parseCell(store.get().at);
    if (cell?.name === "weights" && source && cell.index[1] < source.Q && cell.index[2] < source.K) return { q: cell.index[1], k: cell.index[2] };
    if (cell?.name === "query" || cell?.name === "key") return { q: cell.index[0], k: cell.index[0] };
    return null;
  }

  /** Go to a weight, near enough to read its tokens, and lock it. @param {number} q @param {number} k */
  function go(q, k) {
    if (!source) return;
    const f = frame();
    const scale = Math.max(view().scale, 22);
    const v = centred(q, k, scale, f);
    store.set({ map: [v.q.toFixed(2), v.k.toFixed(2), v.scale.toPrecision(6)].join(), at: `weights.${head()}.${q}.${k}` }, { push: true });
    gestures.cursor = { q, k };
  }

  const nameOf = (/** @type {Place} */ p) => `${source?.key}|${head()}|${store.get().pool}|${keyOf(p)}`;

  /** What the screen needs: its tiles, and the one of everything that stands in for them. */
  function wanted() {
    const v = view();
    const level = levelFor(v.scale, top());
    const needed = tilesIn(v, frame(), level);
    const all = { level: top(), row: 0, column: 0 };
    return level === top() ? needed : [all, ...needed];
  }

  /** The next thing to ask of a tile, or null: a sample where the whole takes long, then the rows that are missing. @param {Place} p @param {boolean} background */
  function nextOf(p, background) {
    const tile = tiles.peek(nameOf(p));
    const slow = source?.far && takesLong(p, source.Q, source.K);
    if (slow && !tile?.sampled) return { p, first: 0, sample: true };
    if (background && slow) return null; // of what is only a stand-in, a sample is enough
    if (tile && tile.exact >= tile.rows) return null;
    return { p, first: tile?.exact ?? 0, sample: false };
  }

  function fetchTiles() {
    if (!source || node.hidden || !size.width) return;
    const needed = wanted();
    const names = new Set(needed.map(nameOf));
    for (const [name, controller] of running) {
      if (names.has(name)) continue;
      controller.abort();
      running.delete(name);
      stats.cancelled++;
    }
    const level = needed[needed.length - 1].level;
    const missing = needed.map((p) => nextOf(p, p.level > level)).filter((next) => next !== null);
    missing.sort((a, b) => Number(b.sample) - Number(a.sample)); // first of everything a little
    for (const next of missing) {
      if (running.size >= AT_ONCE) break;
      if (!running.has(nameOf(next.p))) fetchOne(next, names);
    }
    const exact = needed.filter((p) => p.level === level).map((p) => tiles.peek(nameOf(p)));
    const share = exact.reduce((sum, tile) => sum + (tile ? tile.exact / tile.rows : 0), 0) / exact.length;
    const sampled = exact.some((tile) => tile?.sampled && tile.exact < tile.rows);
    progress.textContent = trouble || (share >= 1 ? "" : sampled ? `A sample of the queries; exact so far: ${Math.floor(100 * share)} %` : "Tiles are on their way.");
    node.dataset.exact = String(share >= 1);
  }

  /** @param {{p: Place, first: number, sample: boolean}} next @param {Set<string>} stay */
  async function fetchOne({ p, first, sample }, stay) {
    const name = nameOf(p);
    const controller = new AbortController();
    running.set(name, controller);
    stats.asked++;
    try {
      const part = await /** @type {Source} */ (source).tile(head(), p, store.get().pool, first, sample, controller.signal);
      if (controller.signal.aborted) return;
      trouble = "";
      stats.received += part.data?.byteLength ?? 0;
      tiles.put(name, withRows(tiles.peek(name), p, part), stay);
    } catch (error) {
      if (controller.signal.aborted) return;
      trouble = /** @type {Error} */ (error).message;
    } finally {
      if (running.get(name) === controller) running.delete(name);
    }
    draw();
    if (trouble) progress.textContent = trouble;
    else fetchTiles();
  }
  const fetchSoon = debounce(fetchTiles, 40);

  /** The finest number that is known of a weight, and the bin that it stands for. @param {number} q @param {number} k */
  function known(q, k) {
    for (let level = levelFor(view().scale, top()); level <= top(); level++) {
      const step = 2 ** level;
      const p = { level, row: Math.floor(q / (SIDE * step)), column: Math.floor(k / (SIDE * step)) };
      const tile = tiles.peek(nameOf(p));
      const r = Math.floor(q / step) - p.row * SIDE;
      const c = Math.floor(k / step) - p.column * SIDE;
      if (tile && (r < tile.exact || tile.sampled)) return { value: tile.data[r * tile.columns + c], level, exact: r < tile.exact };
    }
    return null;
  }

  function say(/** @type {{q: number, k: number} | null} */ at) {
    const here = at ?? locked();
    if (!here || !source) {
      said.textContent = "\u00a0";
      return;
    }
    const found = known(here.q, here.k);
    const step = 2 ** (found?.level ?? 0);
    if (!found || step === 1) {
      const label = (/** @type {"query" | "key"} */ role, /** @type {number} */ n) => `${source?.name(role, n) ?? "…"} (${count(n)})`;
      said.textContent = `weights[head ${head()}, ${label("query", here.q)} → ${label("key", here.k)}] = ${found ? weightText(found.value) : "…"}`;
    } else {
      const run = (/** @type {number} */ n, /** @type {number} */ most) => `${count(n - (n % step))}–${count(Math.min(most, n - (n % step) + step) - 1)}`;
      said.textContent = `queries ${run(here.q, source.Q)}, keys ${run(here.k, source.K)}: ${store.get().pool === "max" ? "the largest weight" : "the mean weight"} is ${weightText(found.value)}${found.exact ? "" : ", in a sample"}`;
    }
    if (at) app.live(said.textContent);
  }

  /** A tile as a picture. @param {Tile} tile */
  function picture(tile) {
    const key = `${app.theme()} ${high} ${tile.exact} ${tile.sampled}`;
    const before = pictures.get(tile);
    if (before?.key === key) return before.image;
    const image = new ImageData(tile.columns, tile.rows);
    const colours = table("sequential", app.theme());
    for (let i = 0; i < tile.data.length; i++) {
      const c = 3 * place(tile.data[i], 0, high);
      image.data[4 * i] = colours[c];
      image.data[4 * i + 1] = colours[c + 1];
      image.data[4 * i + 2] = colours[c + 2];
      image.data[4 * i + 3] = 255;
    }
    const made = bitmap(image);
    pictures.set(tile, { key, image: made });
    return made;
  }

  /** The part of a tile that another, finer place shows. @param {CanvasRenderingContext2D} ctx @param {Place} p @param {Place} from @param {Tile} tile @param {number} rows that are known @param {View} v */
  function drawPart(ctx, p, from, tile, rows, v) {
    const [fine, coarse] = [SIDE * 2 ** p.level, 2 ** from.level];
    const sx = (p.column * fine) / coarse - from.column * SIDE;
    const sy = (p.row * fine) / coarse - from.row * SIDE;
    const sw = Math.min(fine / coarse, tile.columns - sx);
    const sh = Math.min(fine / coarse, rows - sy);
    if (sw <= 0 || sh <= 0) return;
    ctx.drawImage(picture(tile), sx, sy, sw, sh, size.left + (p.column * fine - v.k) * v.scale, size.top + (p.row * fine - v.q) * v.scale, sw * coarse * v.scale, sh * coarse * v.scale);
  }

  const draw = eachFrame(() => {
    if (!source || !size.width || node.hidden) return;
    side.name();
    if (!pointing) say(null);
    const v = view();
    const f = frame();
    const level = levelFor(v.scale, top());
    const places = tilesIn(v, f, level);
    /** @type {[Place, Place, Tile, number][]} */
    const parts = [];
    for (const p of places) {
      const tile = tiles.get(nameOf(p));
      const ready = tile?.sampled ? tile.rows : tile?.exact ?? 0;
      for (let n = 1; (!tile || ready < tile.rows) && level + n <= top(); n++) {
        const from = above(p, n);
        const coarse = tiles.get(nameOf(from));
        if (!coarse) continue;
        parts.push([p, from, coarse, coarse.sampled ? coarse.rows : coarse.exact]);
        break;
      }
      if (tile && ready) parts.push([p, p, tile, ready]);
    }
    const { sink: withFirst, contrast: less } = store.get();
    const most = parts.reduce((m, [, , tile]) => Math.max(m, withFirst ? tile.most : tile.mostBesides), 0);
    const drop = less >= 0 ? less : source.far ? contrastFor([...new Set(parts.map(([, , tile]) => tile))], most || 1) : 0;
    high = (most || 1) * 10 ** -drop;
    contrast.value = String(drop);
    legend.show({ scale: { kind: "sequential", low: 0, high }, theme: app.theme() }, parts.some(([, , tile]) => tile.most > high * 1.0001));
    const ctx = fit(canvas, size.width, size.height);
    const colours = app.colours();
    ctx.save();
    ctx.beginPath();
    const [x0, y0] = [size.left, size.top];
    const [x1, y1] = [Math.min(size.width, size.left + (f.K - v.k) * v.scale), Math.min(size.height, size.top + (f.Q - v.q) * v.scale)];
    ctx.rect(x0, y0, x1 - x0, y1 - y0);
    ctx.clip();
    ctx.fillStyle = colours.hidden;
    ctx.fillRect(x0, y0, x1 - x0, y1 - y0);
    for (const [p, from, tile, rows] of parts) drawPart(ctx, p, from, tile, rows, v);
    for (const [at, colour] of /** @type {[any, string][]} */ ([[locked(), colours.lit], [gestures.shown(), colours.ink]])) {
      if (!at) continue;
      const cell = Math.max(2 ** level * v.scale, 1);
      const snap = (/** @type {number} */ n) => n - (n % 2 ** level);
      const [x, y] = [size.left + (snap(at.k) - v.k) * v.scale, size.top + (snap(at.q) - v.q) * v.scale];
      ctx.strokeStyle = colour;
      ctx.lineWidth = 1;
      ctx.globalAlpha = 0.5;
      ctx.strokeRect(-9, y + 0.5, size.width + 18, cell);
      ctx.strokeRect(x + 0.5, -9, cell, size.height + 18);
      ctx.globalAlpha = 1;
      ctx.lineWidth = 2;
      ctx.strokeRect(x - 0.5, y - 0.5, cell + 1, cell + 1);
    }
    ctx.restore();
    ctx.strokeStyle = headColour(head(), source.H, app.theme());
    ctx.lineWidth = 2;
    ctx.strokeRect(x0 + 0.5, y0 + 0.5, x1 - x0 - 1, y1 - y0 - 1);
    drawNames(ctx, v, f, colours);
    const per = 2 ** level;
    const span = itemsIn(v, f);
    says.textContent = `${count(f.Q)} queries down, ${count(f.K)} keys across; layer ${store.get().layer}, head ${head()}. ${per === 1 ? "Each cell is one weight." : `Each bin is ${count(per)} × ${count(per)} weights.`}`;
    canvas.setAttribute("aria-label", `Map of weights: queries ${count(span.queries[0])} to ${count(span.queries[1] - 1)}, keys ${count(span.keys[0])} to ${count(span.keys[1] - 1)}. Arrow keys move, plus and minus zoom, 0 shows all, Enter locks a weight.`);
  });

  /** Names of tokens where they can be read, else numbers. @param {CanvasRenderingContext2D} ctx @param {View} v @param {any} f @param {any} colours */
  function drawNames(ctx, v, f, colours) {
    const span = itemsIn(v, f);
    const at = locked();
    ctx.font = FONT;
    ctx.textBaseline = "middle";
    const names = v.scale >= TEXT;
    let step = 1;
    while (!names && step * v.scale < 64) step *= String(step)[0] === "2" ? 2.5 : 2;
    for (const [role, [first, last]] of /** @type {["query" | "key", number[]][]} */ ([["query", span.queries], ["key", span.keys]])) {
      for (let n = Math.ceil(first / step) * step; n < last; n += step) {
        const middle = role === "query" ? size.top + (n + (names ? 0.5 : 0) - v.q) * v.scale : size.left + (n + (names ? 0.5 : 0) - v.k) * v.scale;
        if (middle < (role === "query" ? size.top : size.left) - 1 || middle > (role === "query" ? size.height : size.width) + 1) continue;
        const text = names ? source?.name(role, n) ?? "" : count(n);
        ctx.fillStyle = at && (role === "query" ? at.q : at.k) === n ? colours.ink : colours.soft;
        ctx.save();
        if (role === "query") {
          ctx.textAlign = "right";
          ctx.fillText(shorten(ctx, text, size.left - 8), size.left - 5, Math.min(size.height - 7, Math.max(size.top + 5, middle)));
        } else {
          ctx.translate(middle + (names ? 0 : 3), size.top - 6);
          if (names) ctx.rotate(-Math.PI / 3);
          ctx.textAlign = "left";
          if (names || middle + ctx.measureText(text).width < size.width) ctx.fillText(shorten(ctx, text, names ? size.top / 0.9 - 10 : 80), 0, 0);
        }
        ctx.restore();
      }
    }
  }

  function showRail() {
    if (!source) return;
    const { H } = source;
    if (rail.childElementCount !== H) rail.replaceChildren(...Array.from({ length: H }, (_, h) => el("button", { type: "button", class: "head", "aria-label": `Head ${h}`, onclick: () => store.set({ head: h, at: "" }, { push: true }) }, el("canvas", { "aria-hidden": "true" }), el("span", { text: `head ${h}` }))));
    const t = source.far ? session.long.get().maps : session.scene.get().tensors.weights;
    [...rail.children].forEach((item, h) => {
      item.setAttribute("aria-pressed", String(h === head()));
      item.style.setProperty("--hue", headColour(h, H, app.theme()));
      const v = { name: "weights", t, rows: [1], columns: [2], fixed: { 0: h } };
      const at = layout(v);
      let most = 0;
      for (let i = 0; i < at.R * at.C; i++) most = Math.max(most, t.data[at.base + i]);
      fit(item.firstElementChild, 44, 44).drawImage(bitmap(pixels(v, at, { scale: { kind: "sequential", low: 0, high: most || 1 }, theme: app.theme() }, 88, 88)), 0, 0, 44, 44);
    });
  }

  /** The part on the screen as a table; what has not come yet is no number. */
  function tableOf() {
    const { queries, keys } = itemsIn(view(), frame());
    const step = 2 ** levelFor(view().scale, top());
    const starts = (/** @type {number[]} */ [a, b]) => Array.from({ length: Math.ceil((b - (a - (a % step))) / step) }, (_, n) => a - (a % step) + n * step);
    const [down, across] = [starts(queries), starts(keys)];
    const data = Float32Array.from({ length: down.length * across.length }, (_, i) => known(down[Math.floor(i / across.length)], across[i % across.length])?.value ?? NaN);
    const label = (/** @type {"query" | "key"} */ role) => (/** @type {number} */ n) => (step === 1 ? `${source?.name(role, n) ?? ""} ${n}`.trim() : String(n));
    const note = `head ${head()}, queries ${queries[0]}-${queries[1] - 1}, keys ${keys[0]}-${keys[1] - 1}${step === 1 ? "" : `, ${store.get().pool} of ${step} x ${step}`}`;
    return { title: `weights, ${note}`, name: "weights", note, tensor: { shape: [down.length, across.length], data }, rows: down.length, columns: across.length, rowLabels: down.map(label("query")), columnLabels: across.map(label("key")), value: (/** @type {number} */ r, /** @type {number} */ c) => data[r * across.length + c] };
  }

  const gestures = createGestures(canvas, { frame, view, look, corner: () => size, level: () => levelFor(view().scale, top()), say: (at) => {
    pointing = at !== null;
    say(at);
  }, draw: () => draw(), lock: (at) => store.set({ at: `weights.${head()}.${at.q}.${at.k}` }, { push: true }) });

  new ResizeObserver(() => {
    const width = Math.floor(host.clientWidth);
    if (!width || width === size.width) return;
    const height = Math.round(Math.min(Math.max(300, width * 0.8), Math.max(320, innerHeight * 0.72)));
    size = { width, height, left: width < 520 ? 60 : 92, top: 64 };
    draw();
    fetchSoon();
  }).observe(host);

  return {
    node,
    stats: () => ({ ...stats, bytes: tiles.bytes, kept: tiles.count, running: running.size, wanted: wanted().map(keyOf) }),
    known,
    /** Where a weight is on the screen. @param {number} q @param {number} k */
    centre(q, k) {
      const [v, bounds] = [view(), canvas.getBoundingClientRect()];
      return { x: bounds.left + size.left + (k + 0.5 - v.k) * v.scale, y: bounds.top + size.top + (q + 0.5 - v.q) * v.scale };
    },
    /** Whether the map is what is shown: chosen, or the only thing that can be. */
    shows: () => session.long.get() !== null || (store.get().view === "map" && session.scene.get() !== null),
    update() {
      const long = session.long.get();
      const scene = session.scene.get();
      node.hidden = !this.shows();
      if (node.hidden) {
        for (const controller of running.values()) controller.abort();
        running.clear();
        return;
      }
      const key = long ? long.key : `${scene.key} here ${scene.exact} ${store.get().mask} ${store.get().off}`;
      if (source?.key !== key) {
        tiles.clear();
        trouble = "";
        source = long ? sourceOfPython(session.python, long, () => draw()) : { ...sourceOfScene(scene), key };
      }
      const state = store.get();
      pool.show(state.pool);
      sink.checked = !state.sink;
      showRail();
      side.update();
      node.dataset.exact = "false";
      draw();
      fetchSoon();
    },
  };
}

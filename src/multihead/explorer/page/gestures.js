// Moving over a map: drag, wheel, pinch and keys. It changes the view and the cursor, and draws nothing itself.

import { clamp, pan, wholeScale, zoom } from "./tiles.js";

/** @typedef {import("./tiles.js").Frame} Frame */
/** @typedef {import("./tiles.js").View} View */

/** @type {Record<string, [number, number]>} */
const KEYS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-1, 0], PageDown: [1, 0], Home: [0, -1], End: [0, 1] };

/** @param {HTMLCanvasElement} canvas
 * @param {{frame: () => Frame, view: () => View, look: (v: View, push?: boolean) => void, corner: () => {left: number, top: number},
 *   level: () => number, say: (at: {q: number, k: number} | null) => void, draw: () => void, lock: (at: {q: number, k: number}) => void}} map */
export function createGestures(canvas, map) {
  /** @type {Map<number, {x: number, y: number}>} */
  const pointers = new Map();
  let moved = 0;
  let keyboard = false;
  const made = {
    cursor: { q: 0, k: 0 },
    /** The cursor, where it is moved by keys. */
    shown: () => (keyboard && document.activeElement === canvas ? made.cursor : null),
    /** @param {number} factor */
    zoomBy(factor) {
      const f = map.frame();
      map.look(zoom(map.view(), f, factor, f.width / 2, f.height / 2), true);
    },
    whole: () => map.look(clamp({ q: 0, k: 0, scale: wholeScale(map.frame()) }, map.frame()), true),
  };

  const inside = (/** @type {{clientX: number, clientY: number}} */ event) => {
    const bounds = canvas.getBoundingClientRect();
    const { left, top } = map.corner();
    return { x: event.clientX - bounds.left - left, y: event.clientY - bounds.top - top };
  };

  /** The item under a point of the picture, or null beside it. @param {{x: number, y: number}} p */
  function itemAt(p) {
    const v = map.view();
    const { Q, K } = map.frame();
    const at = { q: Math.floor(v.q + p.y / v.scale), k: Math.floor(v.k + p.x / v.scale) };
    return p.x >= 0 && p.y >= 0 && at.q >= 0 && at.q < Q && at.k >= 0 && at.k < K ? at : null;
  }

  const spread = () => {
    const [a, b] = [...pointers.values()];
    return { x: (a.x + b.x) / 2, y: (a.y + b.y) / 2, far: Math.hypot(a.x - b.x, a.y - b.y) };
  };

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button > 0) return;
    keyboard = false;
    pointers.set(event.pointerId, inside(event));
    canvas.setPointerCapture(event.pointerId);
    if (pointers.size === 1) moved = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    const now = inside(event);
    if (!before) {
      keyboard = false;
      const at = itemAt(now);
      if (at) made.cursor = at;
      map.say(at);
      return;
    }
    if (pointers.size === 1) {
      moved += Math.abs(now.x - before.x) + Math.abs(now.y - before.y);
      pointers.set(event.pointerId, now);
      if (moved > 4) map.look(pan(map.view(), map.frame(), now.x - before.x, now.y - before.y));
      return;
    }
    const was = spread();
    pointers.set(event.pointerId, now);
    const is = spread();
    moved = 9;
    const nearer = zoom(map.view(), map.frame(), is.far / Math.max(1, was.far), was.x, was.y);
    map.look(pan(nearer, map.frame(), is.x - was.x, is.y - was.y));
  });
  for (const end of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(end, (event) => {
      const pointer = /** @type {PointerEvent} */ (event);
      const pressed = pointers.delete(pointer.pointerId);
      const at = itemAt(inside(pointer));
      if (pressed && end === "pointerup" && moved <= 4 && at) map.lock(at);
    });
  }
  canvas.addEventListener("pointerleave", () => {
    if (!pointers.size) map.say(null);
  });
  canvas.addEventListener("dblclick", (event) => {
    const p = inside(event);
    map.look(zoom(map.view(), map.frame(), 2, p.x, p.y), true);
  });
  canvas.addEventListener("wheel", (event) => {
    const p = inside(event);
    const by = event.deltaY * (event.deltaMode === 1 ? 16 : 1) * (event.ctrlKey ? 4 : 1);
    const f = map.frame();
    if (by > 0 && map.view().scale <= wholeScale(f) * 1.0001) return; // all is seen already: the page scrolls
    event.preventDefault();
    map.look(zoom(map.view(), f, 2 ** (-by / 250), p.x, p.y));
  }, { passive: false });

  canvas.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const f = map.frame();
    const v = map.view();
    const way = KEYS[event.key];
    const point = () => ({ x: (made.cursor.k + 0.5 - v.k) * v.scale, y: (made.cursor.q + 0.5 - v.q) * v.scale });
    if (way) {
      const far = event.shiftKey || !event.key.startsWith("Arrow");
      const by = far ? Math.max(1, Math.round(Math.min(f.width, f.height) / v.scale / 8)) : 2 ** map.level();
      const along = (/** @type {number} */ at, /** @type {number} */ sign, /** @type {number} */ items) => Math.min(items - 1, Math.max(0, at + sign * by));
      made.cursor = { q: along(made.cursor.q, way[0], f.Q), k: along(made.cursor.k, way[1], f.K) };
      keyboard = true;
      follow(f, v);
    } else if (event.key === "+" || event.key === "=") map.look(zoom(v, f, 2, point().x, point().y), true);
    else if (event.key === "-") map.look(zoom(v, f, 0.5, point().x, point().y), true);
    else if (event.key === "0") made.whole();
    else if (event.key === "Enter" || event.key === " ") map.lock(made.cursor);
    else return;
    event.preventDefault();
  });

  /** Keep the cursor on the screen. @param {Frame} f @param {View} v */
  function follow(f, v) {
    const { q, k } = made.cursor;
    const along = (/** @type {number} */ at, /** @type {number} */ from, /** @type {number} */ room) => (at < from ? at : at + 1 > from + room ? at + 1 - room : from);
    const next = clamp({ q: along(q, v.q, f.height / v.scale), k: along(k, v.k, f.width / v.scale), scale: v.scale }, f);
    if (next.q !== v.q || next.k !== v.k) map.look(next);
    map.say(made.cursor);
    map.draw();
  }

  canvas.addEventListener("focus", () => {
    keyboard = canvas.matches(":focus-visible");
    const [v, f] = [map.view(), map.frame()];
    const { q, k } = made.cursor;
    const seen = q >= v.q && k >= v.k && q < v.q + f.height / v.scale && k < v.k + f.width / v.scale;
    if (keyboard && !seen) made.cursor = { q: Math.max(0, Math.ceil(v.q)), k: Math.max(0, Math.ceil(v.k)) };
    if (keyboard) map.say(made.cursor);
    map.draw();
  });
  canvas.addEventListener("blur", () => {
    keyboard = false;
    map.draw();
  });
  return made;
}

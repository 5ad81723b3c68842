// The arithmetic of a map: a pyramid of tiles, the window that is looked through, and a store of bounded size.
// At level z a bin holds 2^z queries by 2^z keys, and a tile SIDE × SIDE bins; at level 0 a bin is a single weight.

export const SIDE = 256;
export const BUDGET = 2 ** 28; // scores that Python computes in one answer: larger tiles come some rows at a time
export const CLOSEST = 48; // pixels of an item, at most
const OCTAVES = 64; // of weights, from 1 downwards, by which those of a tile are counted
export const count = (/** @type {number} */ n) => n.toLocaleString("en-US");

/** A weight to three figures: among a hundred thousand keys even large ones are small. @param {number} w */
export function weightText(w) {
  if (!(w > 0)) return w === 0 ? "0" : "–";
  if (w >= 1e-3) return String(Number(w.toPrecision(3)));
  const [digits, power] = w.toExponential(2).split("e-");
  return `${digits}·10⁻${[...power].map((d) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(d)]).join("")}`;
}

/** @typedef {{level: number, row: number, column: number}} Place */
/** What is looked at: the query at the upper edge, the key at the left edge, and the pixels of an item.
 * @typedef {{q: number, k: number, scale: number}} View */
/** @typedef {{Q: number, K: number, width: number, height: number}} Frame items, and the pixels they are looked at through */
/** `data` has what is known of each bin; the first `exact` rows are exact, the others of a sample, if `sampled`; `sizes`: how
 * many of them there are in each octave, the first key's apart.
 * @typedef {{rows: number, columns: number, data: Float32Array, exact: number, sampled: boolean, most: number, mostBesides: number, sizes: Uint32Array}} Tile */

/** The level at which one tile holds everything. @param {number} Q @param {number} K */
export function topLevel(Q, K) {
  return Math.max(0, Math.ceil(Math.log2(Math.max(Q, K, 1) / SIDE)));
}

/** The level whose bins are at least a pixel, as fine as can be. @param {number} scale pixels of an item @param {number} top */
export function levelFor(scale, top) {
  return Math.min(top, Math.max(0, Math.ceil(-Math.log2(scale) - 1e-9)));
}

/** @param {Place} p */
export function keyOf(p) {
  return `${p.level}.${p.row}.${p.column}`;
}

/** The scale at which all of it is seen. @param {Frame} f */
export function wholeScale(f) {
  return Math.min(f.width / f.K, f.height / f.Q, CLOSEST);
}

/** The view, moved so that it shows as much as it can, and no closer or farther than makes sense. @param {View} v @param {Frame} f @returns {View} */
export function clamp(v, f) {
  const scale = Math.min(CLOSEST, Math.max(wholeScale(f), v.scale));
  const along = (/** @type {number} */ at, /** @type {number} */ items, /** @type {number} */ pixels) => {
    const room = pixels / scale;
    return Math.max(0, Math.min(items - room, at));
  };
  return { q: along(v.q, f.Q, f.height), k: along(v.k, f.K, f.width), scale };
}

/** Closer by a factor, so that what is under a pixel stays there. @param {View} v @param {Frame} f @param {number} factor @param {number} x @param {number} y */
export function zoom(v, f, factor, x, y) {
  const scale = Math.min(CLOSEST, Math.max(wholeScale(f), v.scale * factor));
  return clamp({ q: v.q + y / v.scale - y / scale, k: v.k + x / v.scale - x / scale, scale }, f);
}

/** @param {View} v @param {Frame} f @param {number} dx @param {number} dy pixels */
export function pan(v, f, dx, dy) {
  return clamp({ q: v.q - dy / v.scale, k: v.k - dx / v.scale, scale: v.scale }, f);
}

/** A view with this query and key in the middle. @param {number} q @param {number} k @param {number} scale @param {Frame} f */
export function centred(q, k, scale, f) {
  return clamp({ q: q + 0.5 - f.height / scale / 2, k: k + 0.5 - f.width / scale / 2, scale }, f);
}

/** The items of a view that are there: [first, past the last) of queries and of keys. @param {View} v @param {Frame} f */
export function itemsIn(v, f) {
  const along = (/** @type {number} */ at, /** @type {number} */ items, /** @type {number} */ pixels) => [Math.max(0, Math.floor(at)), Math.min(items, Math.ceil(at + pixels / v.scale - 1e-9))];
  return { queries: along(v.q, f.Q, f.height), keys: along(v.k, f.K, f.width) };
}

/** The tiles of a level that a view needs, from the middle outwards. @param {View} v @param {Frame} f @param {number} level @returns {Place[]} */
export function tilesIn(v, f, level) {
  const { queries, keys } = itemsIn(v, f);
  const size = SIDE * 2 ** level;
  const found = [];
  for (let row = Math.floor(queries[0] / size); row * size < queries[1]; row++) {
    for (let column = Math.floor(keys[0] / size); column * size < keys[1]; column++) found.push({ level, row, column });
  }
  const [mq, mk] = [(queries[0] + queries[1]) / 2 / size - 0.5, (keys[0] + keys[1]) / 2 / size - 0.5];
  const far = (/** @type {Place} */ p) => Math.hypot(p.row - mq, p.column - mk);
  return found.sort((a, b) => far(a) - far(b) || a.row - b.row || a.column - b.column);
}

/** The tile of a coarser level that holds this one. @param {Place} p @param {number} levels how many above */
export function above(p, levels) {
  return { level: p.level + levels, row: Math.floor(p.row / 2 ** levels), column: Math.floor(p.column / 2 ** levels) };
}

/** Whether a tile takes more than one answer: then a sample of it is asked for first. @param {Place} p @param {number} Q @param {number} K */
export function takesLong(p, Q, K) {
  const size = SIDE * 2 ** p.level;
  const rows = Math.min(size, Q - p.row * size);
  return rows * (K + Math.min(size, K - p.column * size)) > BUDGET;
}

/** How large a tile is, in bins. @param {Place} p @param {number} Q @param {number} K */
export function binsOf(p, Q, K) {
  const step = 2 ** p.level;
  const along = (/** @type {number} */ n, /** @type {number} */ items) => Math.ceil(Math.min(SIDE * step, items - n * SIDE * step) / step);
  return { rows: along(p.row, Q), columns: along(p.column, K) };
}

/** Put rows into a tile, which is made where it is not there yet.
 * @param {Tile | undefined} tile @param {Place} place @param {{rows: number, columns: number, first: number, to: number, sample: boolean, data: Float32Array | null}} part @returns {Tile} */
export function withRows(tile, place, part) {
  const made = tile ?? { rows: part.rows, columns: part.columns, data: new Float32Array(part.rows * part.columns), exact: 0, sampled: false, most: 0, mostBesides: 0, sizes: new Uint32Array(OCTAVES) };
  const at = part.first * part.columns;
  if (part.data) made.data.set(part.data, at);
  else made.data.fill(0, at, part.to * part.columns);
  if (part.sample) made.sampled = true;
  else made.exact = Math.max(made.exact, part.to);
  made.most = made.mostBesides = 0;
  made.sizes.fill(0);
  const first = place.column === 0; // the bins of the first key, where heads rest
  for (let i = 0; i < made.data.length; i++) {
    const value = made.data[i];
    if (!(value > 0)) continue;
    const besides = !first || i % made.columns > 0;
    if (besides) made.sizes[Math.min(OCTAVES - 1, Math.max(0, Math.floor(-Math.log2(value))))]++;
    if (!(value > made.mostBesides)) continue;
    if (value > made.most) made.most = value;
    if (besides) made.mostBesides = value;
  }
  return made;
}

/** By how many powers of ten the colours may end below the largest weight, so that the others can be told apart: all but
 * one in fifty of them stay below the end, and it is never more than two powers. @param {Tile[]} tiles @param {number} most */
export function contrastFor(tiles, most) {
  const total = tiles.reduce((sum, tile) => sum + tile.sizes.reduce((a, b) => a + b, 0), 0);
  let above = 0;
  for (let octave = 0; octave < OCTAVES && total; octave++) {
    above += tiles.reduce((sum, tile) => sum + tile.sizes[octave], 0);
    if (above > total / 50) return Math.round(10 * Math.min(2, Math.max(0, Math.log10(most / 2 ** -octave)))) / 10;
  }
  return 0;
}

/** The largest or the mean of each bin of a matrix that is at hand. @param {(q: number, k: number) => number} weight @param {Place} p @param {number} Q @param {number} K @param {string} pool */
export function pooled(weight, p, Q, K, pool) {
  const { rows, columns } = binsOf(p, Q, K);
  const step = 2 ** p.level;
  const data = new Float32Array(rows * columns);
  for (let r = 0; r < rows; r++) {
    const [top, bottom] = [(p.row * SIDE + r) * step, Math.min(Q, (p.row * SIDE + r + 1) * step)];
    for (let c = 0; c < columns; c++) {
      const [left, right] = [(p.column * SIDE + c) * step, Math.min(K, (p.column * SIDE + c + 1) * step)];
      let [most, sum] = [0, 0];
      for (let q = top; q < bottom; q++) {
        for (let k = left; k < right; k++) {
          const w = weight(q, k);
          sum += w;
          if (w > most) most = w;
        }
      }
      data[r * columns + c] = pool === "max" ? most : sum / ((bottom - top) * (right - left));
    }
  }
  return { rows, columns, first: 0, to: rows, sample: false, data };
}

/** Tiles by key, the latest used of them; never more bytes than `most`, but for what must stay. @param {number} most */
export function createStore(most) {
  /** @type {Map<string, Tile>} */
  const kept = new Map();
  let bytes = 0;
  const size = (/** @type {Tile} */ tile) => tile.data.byteLength;
  return {
    get bytes() {
      return bytes;
    },
    get count() {
      return kept.size;
    },
    /** @param {string} key */
    peek: (key) => kept.get(key),
    /** @param {string} key */
    get(key) {
      const tile = kept.get(key);
      if (tile) {
        kept.delete(key);
        kept.set(key, tile);
      }
      return tile;
    },
    /** @param {string} key @param {Tile} tile @param {Set<string>} stay keys that are on the screen */
    put(key, tile, stay) {
      const before = kept.get(key);
      bytes += size(tile) - (before ? size(before) : 0);
      kept.delete(key);
      kept.set(key, tile);
      for (const [name, old] of kept) {
        if (bytes <= most) break;
        if (stay.has(name)) continue;
        bytes -= size(old);
        kept.delete(name);
      }
    },
    clear() {
      kept.clear();
      bytes = 0;
    },
  };
}

// The arithmetic of a map: levels, windows, tiles, stand-ins, and a store that never grows beyond its bound.
import assert from "node:assert/strict";
import { test } from "node:test";
import { load } from "./page.mjs";

const { CLOSEST, SIDE, above, binsOf, centred, clamp, contrastFor, createStore, itemsIn, keyOf, levelFor, pan, pooled, takesLong, tilesIn, topLevel, weightText, wholeScale, withRows, zoom } = await load("tiles.js");
const { findIn, largest, sourceOfScene } = await load("sources.js");

const LONG = { Q: 100_000, K: 100_000, width: 1000, height: 700 };

test("one tile holds everything at the top level, and not below it", () => {
  assert.deepEqual([1, 256, 257, 512, 513, 100_000].map((n) => topLevel(n, 5)), [0, 0, 1, 1, 2, 9]);
  assert.equal(topLevel(3, 700), 2);
});

test("a bin is at least a pixel, and less than two, until it is a single weight", () => {
  for (const scale of [0.007, 0.1, 0.25, 0.3, 0.5, 0.99]) {
    const bin = scale * 2 ** levelFor(scale, 9);
    assert.ok(bin >= 0.999 && bin < 2, `${scale}: ${bin}`);
  }
  assert.deepEqual([1, 7, CLOSEST].map((scale) => levelFor(scale, 9)), [0, 0, 0]);
  assert.equal(levelFor(0.0001, 9), 9);
});

test("a view shows all it can, and stays on the map", () => {
  const whole = clamp({ q: 50, k: -9, scale: 0 }, LONG);
  assert.deepEqual(whole, { q: 0, k: 0, scale: wholeScale(LONG) });
  const near = clamp({ q: 99_999, k: 99_999, scale: 10 }, LONG);
  assert.deepEqual([near.q, near.k], [100_000 - 70, 100_000 - 100]);
  assert.equal(clamp({ q: 0, k: 0, scale: 1e9 }, LONG).scale, CLOSEST);
  const small = { Q: 3, K: 4, width: 1000, height: 700 };
  assert.deepEqual(clamp({ q: 2, k: 2, scale: 1 }, small), { q: 0, k: 0, scale: CLOSEST });
});

test("zooming leaves what is under the pointer where it is, and panning moves it by pixels", () => {
  const v = centred(40_000, 30_000, 2, LONG);
  const nearer = zoom(v, LONG, 3, 250, 100);
  assert.ok(Math.abs(v.k + 250 / v.scale - (nearer.k + 250 / nearer.scale)) < 1e-6);
  assert.ok(Math.abs(v.q + 100 / v.scale - (nearer.q + 100 / nearer.scale)) < 1e-6);
  const moved = pan(v, LONG, 30, -50);
  assert.deepEqual([moved.k, moved.q], [v.k - 15, v.q + 25]);
});

test("the tiles of a view cover it, and no tile is outside of it", () => {
  let seed = 7;
  const random = () => (seed = (seed * 16807) % 2147483647) / 2147483647;
  for (let n = 0; n < 300; n++) {
    const f = { Q: 1 + Math.floor(random() * 9000), K: 1 + Math.floor(random() * 9000), width: 100 + random() * 1500, height: 100 + random() * 900 };
    const v = clamp({ q: random() * f.Q, k: random() * f.K, scale: 2 ** (6 * random() - 4) }, f);
    const level = levelFor(v.scale, topLevel(f.Q, f.K));
    const tiles = tilesIn(v, f, level);
    const { queries, keys } = itemsIn(v, f);
    const size = SIDE * 2 ** level;
    const names = new Set(tiles.map(keyOf));
    assert.equal(names.size, tiles.length);
    for (const q of [queries[0], queries[1] - 1]) for (const k of [keys[0], keys[1] - 1]) assert.ok(names.has(`${level}.${Math.floor(q / size)}.${Math.floor(k / size)}`));
    for (const t of tiles) {
      assert.ok(t.row * size < queries[1] && (t.row + 1) * size > queries[0] && t.column * size < keys[1] && (t.column + 1) * size > keys[0]);
      const bins = binsOf(t, f.Q, f.K);
      assert.ok(bins.rows > 0 && bins.rows <= SIDE && bins.columns > 0 && bins.columns <= SIDE);
    }
    assert.ok(tiles.length <= (Math.ceil(f.width / SIDE) + 1) * (Math.ceil(f.height / SIDE) + 1), "never more than the screen needs");
  }
});

test("small weights keep three figures", () => {
  assert.deepEqual([1, 0.62349, 0.0014658, 1.2345e-5, 3e-12, 0, NaN].map(weightText), ["1", "0.623", "0.00147", "1.23·10⁻⁵", "3.00·10⁻¹²", "0", "–"]);
});

test("a tile lies in the one above it", () => {
  assert.deepEqual(above({ level: 2, row: 7, column: 5 }, 2), { level: 4, row: 1, column: 1 });
});

test("only what takes more than one answer is sampled first", () => {
  assert.equal(takesLong({ level: 0, row: 0, column: 0 }, 100_000, 100_000), false);
  assert.equal(takesLong({ level: 9, row: 0, column: 0 }, 100_000, 100_000), true);
  assert.equal(takesLong({ level: 3, row: 0, column: 0 }, 2048, 2048), false);
});

test("rows of a tile come one after another, exact ones over a sample; the first key can be left out of the largest", () => {
  const place = { level: 1, row: 0, column: 0 };
  let tile = withRows(undefined, place, { rows: 3, columns: 2, first: 0, to: 3, sample: true, data: Float32Array.of(0.9, 0.1, 0.8, 0.2, 0.7, 0.3) });
  assert.deepEqual([tile.exact, tile.sampled, tile.most, tile.mostBesides].map(Number), [0, 1, Math.fround(0.9), Math.fround(0.3)]);
  tile = withRows(tile, place, { rows: 3, columns: 2, first: 0, to: 2, sample: false, data: Float32Array.of(0.5, 0.25, 0.5, 0.75) });
  assert.deepEqual([...tile.data].map((v) => Math.round(100 * v)), [50, 25, 50, 75, 70, 30]);
  assert.deepEqual([tile.exact, tile.mostBesides], [2, 0.75]);
  tile = withRows(tile, place, { rows: 3, columns: 2, first: 2, to: 3, sample: false, data: null });
  assert.deepEqual([tile.exact, tile.data[4], tile.data[5]], [3, 0, 0]);
  assert.equal(withRows(undefined, { ...place, column: 1 }, { rows: 1, columns: 1, first: 0, to: 1, sample: false, data: Float32Array.of(0.6) }).mostBesides, Math.fround(0.6));
});

test("bins of a matrix at hand, the last ones not whole", () => {
  const weight = (q, k) => q * 10 + k;
  const part = pooled(weight, { level: 1, row: 0, column: 0 }, 5, 3, "max");
  assert.deepEqual([part.rows, part.columns, ...part.data], [3, 2, 11, 12, 31, 32, 41, 42]);
  assert.deepEqual([...pooled(weight, { level: 1, row: 0, column: 0 }, 5, 3, "mean").data], [5.5, 7, 25.5, 27, 40.5, 42]);
});

test("a store forgets what was not used, keeps what is on the screen, and counts its bytes", () => {
  const store = createStore(3000);
  const tile = () => ({ rows: 16, columns: 16, data: new Float32Array(256), exact: 16, sampled: false, most: 0, mostBesides: 0 });
  for (const name of ["a", "b"]) store.put(name, tile(), new Set());
  store.get("a");
  store.put("c", tile(), new Set(["c"]));
  assert.deepEqual([store.count, store.bytes, store.peek("b")], [2, 2048, undefined]);
  store.put("d", tile(), new Set(["a", "c", "d"]));
  assert.equal(store.bytes, 3072, "what is on the screen stays, though it is more than the bound");
  for (let n = 0; n < 1000; n++) store.put(`tile ${n}`, tile(), new Set([`tile ${n}`]));
  assert.ok(store.bytes <= 3000);
  store.clear();
  assert.deepEqual([store.count, store.bytes], [0, 0]);
});

test("words are found across tokens, and names with a space between them", () => {
  const tokens = ["I", "␣lo", "ve", "␣PIZZA", "␣love"].map((text) => ({ text, bytes: "00" }));
  assert.deepEqual(findIn(tokens, "love").places, [1, 4]);
  assert.deepEqual(findIn(tokens, "e pizza l"), { count: 1, places: [2] });
  assert.deepEqual(findIn(tokens, ""), { count: 0, places: [] });
  const names = ["patch 1", "patch 2"].map((text) => ({ text, bytes: "" }));
  assert.deepEqual(findIn(names, "1 patch").places, [0]);
});

test("links of a scene, both ways, largest first", async () => {
  const weights = { shape: [1, 2, 3], data: Float32Array.of(0.1, 0, 0.9, 0.5, 0.5, 0) };
  const source = sourceOfScene({ key: "k", tensors: { weights }, labels: ["a", "b"], keyLabels: ["x", "y", "z"], tokens: [], meta: {} });
  const asked = async (role, item) => {
    let found = [];
    await source.links(0, role, item, 5, new AbortController().signal, (links) => (found = links));
    return found.map((link) => link.text).join("");
  };
  assert.deepEqual([await asked("query", 0), await asked("query", 1), await asked("key", 0), await asked("key", 2)], ["zx", "xy", "ba", "a"]);
  assert.deepEqual(largest([{ item: 2, weight: 1 }, { item: 1, weight: 1 }, { item: 0, weight: 0 }], 5).map((link) => link.item), [1, 2]);
});

test("the colours end where all but a few weights stay below, and at most a hundredth of the largest", () => {
  const tile = (/** @type {number[]} */ ...data) => withRows(undefined, { level: 0, row: 0, column: 1 }, { rows: 1, columns: data.length, first: 0, to: 1, sample: false, data: Float32Array.from(data) });
  const many = (/** @type {number} */ value) => Array.from({ length: 99 }, () => value);
  assert.equal(contrastFor([tile(1, ...many(0.24))], 1), 0.6); // 0.24 lies below 2⁻²
  assert.equal(contrastFor([tile(1, ...many(1e-5))], 1), 2);
  assert.equal(contrastFor([tile(...many(0.9))], Math.fround(0.9)), 0);
  assert.equal(contrastFor([tile(0, 0)], 1), 0);
  const first = withRows(undefined, { level: 0, row: 0, column: 0 }, { rows: 2, columns: 2, first: 0, to: 2, sample: false, data: Float32Array.of(1, 0.2, 1, 0.2) });
  assert.equal(contrastFor([first], 1), 0.6); // the first key, where heads rest, does not count
});

test("words can be looked for where items have names", () => {
  const scene = (/** @type {string[]} */ labels, meta = {}) => sourceOfScene({ key: "k", tensors: { weights: { shape: [1, 2, 2], data: new Float32Array(4) } }, labels, keyLabels: labels, tokens: [], meta });
  assert.deepEqual([scene(["0", "1"]), scene(["0", "b"]), scene(["class", "0,0"], { grid: {} })].map((source) => source.named), [false, true, false]);
});

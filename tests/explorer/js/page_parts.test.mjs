// What the parts of the page work out before they draw it.
import assert from "node:assert/strict";
import { test } from "node:test";
import { load } from "./page.mjs";

const { seesFuture, leansOn, allowed, parseMask, describeMask } = await load("mask.js");
const { sideOf } = await load("picture.js");
const { attempts, fromAddress, toAddress } = await load("packed.js");
const { DEFAULTS, formatState } = await load("state.js");
const { arrangeHeads } = await load("heads.js");
const { probabilities } = await load("predict.js");
const { textOf } = await load("input.js");
const { arrangeSlabs } = await load("regroup.js");
const { rgbOf } = await load("colour.js");
const { hiddenColour, indexAt, layout, litIn, pixels, placeOf, tint } = await load("paint.js");

test("who sees the future, and which later token a row leans on", () => {
  assert.equal(seesFuture(allowed(parseMask("causal"), 4, 4), 4, 4), false);
  assert.equal(seesFuture(allowed(parseMask("none"), 4, 4), 4, 4), true);
  assert.equal(seesFuture(allowed(parseMask("causal"), 2, 4), 2, 4), false);
  const weights = Float32Array.from([0.1, 0.2, 0.7, 0.5, 0.1, 0.4, 0.3, 0.3, 0.4]);
  const found = leansOn(weights, 1, 3, 3);
  assert.deepEqual(found.map((f) => f && f.key), [2, 2, null]);
  assert.ok(Math.abs(found[0].total - 0.9) < 1e-6);
  assert.match(describeMask(parseMask("causal:4")), /newest 4/);
});

test("the finder sorts, and filters by a share of the largest", () => {
  const heads = [{ layer: 0, head: 0, first: 0.1 }, { layer: 0, head: 1, first: 0.8 }, { layer: 1, head: 0, first: null }, { layer: 1, head: 1, first: 0.5 }];
  assert.deepEqual(arrangeHeads(heads, { sort: "first", metric: "first", least: 0 }).kept.map(({ n }) => n), [1, 3, 0, 2]);
  assert.deepEqual(arrangeHeads(heads, { sort: "place", metric: "first", least: 50 }).kept.map(({ n }) => n), [1, 3]);
});

test("temperature and top-k", () => {
  const logits = Float32Array.from([1, 3, 2, 0]);
  const p = probabilities(logits, 1, 4);
  assert.ok(Math.abs(p.reduce((a, b) => a + b) - 1) < 1e-12);
  assert.ok(Math.abs(p[1] - Math.E ** 3 / (Math.E + Math.E ** 3 + Math.E ** 2 + 1)) < 1e-6);
  assert.deepEqual([...probabilities(logits, 0.5, 2)].map((v) => v > 0), [false, true, true, false]);
  assert.ok(probabilities(logits, 0.05, 4)[1] > 0.99);
});

test("the text of tokens, halves of characters put together again", () => {
  assert.equal(textOf([{ bytes: "" }, { bytes: "49" }, { bytes: "20e298" }, { bytes: "83" }]), "I ☃");
});

test("slabs fit their box", () => {
  for (const [slabs, rows, width] of [[4, 8, 300], [128, 8, 900], [8, 128, 336], [50, 4, 1600]]) {
    const { columns, rowHeight, slabWidth, down } = arrangeSlabs(slabs, rows, width);
    assert.ok(columns * down >= slabs && rowHeight > 0 && slabWidth * columns <= width + 1, `${slabs}×${rows} in ${width}`);
  }
});

test("cells of a view: there and back, and what a pattern lights", () => {
  const view = { name: "q", t: { shape: [3, 2, 5], data: new Float32Array(30) }, rows: [0], columns: [1, 2] };
  assert.deepEqual(indexAt(view, 2, 7), [2, 1, 2]);
  assert.deepEqual(placeOf(view, [2, 1, 2]), { row: 2, column: 7 });
  assert.deepEqual(litIn(view, [1, null, 3]), [{ top: 1, bottom: 2, left: 3, right: 4 }, { top: 1, bottom: 2, left: 8, right: 9 }]);
  assert.deepEqual(litIn({ ...view, columns: [2], fixed: { 1: 0 } }, [1, 1, null]), []);
  const { R, C, down, across } = layout(view);
  assert.deepEqual([R, C, down[2], across[7]], [3, 10, 20, 7]);
});

test("a picture stands on the screen whole times its own size, and never wider than there is room", () => {
  assert.equal(sideOf(28, 1400), 252);
  assert.equal(sideOf(224, 1400), 448);
  assert.equal(sideOf(224, 336), 224);
  assert.equal(sideOf(384, 1400), 384);
  assert.equal(sideOf(384, 336), 336);
  assert.equal(sideOf(1024, 1400), 1024);
});

test("a packed picture: from the most exact on, down to a small one, in letters that an address leaves alone", () => {
  assert.deepEqual(attempts(224)[0], [0.92, 224]);
  assert.deepEqual(attempts(224).at(-1), [0.4, 28]);
  const bytes = String.fromCharCode(...Array.from({ length: 256 }, (_, i) => i));
  const text = toAddress(btoa(bytes));
  assert.match(text, /^[\w-]+$/);
  assert.equal(atob(fromAddress(text)), bytes);
  const long = "A".repeat(30000);
  assert.equal(formatState({ ...DEFAULTS, pixels: long, packed: "AAA" }), "packed=AAA");
  assert.equal(formatState({ ...DEFAULTS, pixels: long }), "");
});

test("pixels: a colour for each number, the largest of many, the hue of its head, and grey for what is hidden", () => {
  globalThis.ImageData ??= /** @type {any} */ (class {
    constructor(width, height) {
      Object.assign(this, { width, height, data: new Uint8ClampedArray(4 * width * height) });
    }
  });
  const t = { shape: [2, 4], data: Float32Array.from([0, 1, -1, 0.5, -Infinity, 0.25, -2, 2]) };
  const view = { name: "t", t, rows: [0], columns: [1] };
  const ink = { scale: { kind: "diverging", low: -2, high: 2 }, theme: "light" };
  const rgb = (image, x, y) => [...image.data.subarray(4 * (y * image.width + x), 4 * (y * image.width + x) + 3)];
  const colour = (value) => [...rgbOf(ink.scale, value, "light")];
  const whole = pixels(view, layout(view), ink, 100, 100);
  assert.deepEqual([whole.width, whole.height, whole.data[3]], [4, 2, 255]);
  assert.deepEqual([rgb(whole, 1, 0), rgb(whole, 2, 0), rgb(whole, 3, 1)], [colour(1), colour(-1), colour(2)]);
  assert.deepEqual(rgb(whole, 0, 1), hiddenColour("light"));
  const small = pixels(view, layout(view), ink, 2, 1); // four cells to a pixel
  assert.deepEqual([rgb(small, 0, 0), rgb(small, 1, 0)], [colour(1), colour(-2)]);
  const hue = (h, value) => [...tint(h, "light").subarray(3 * Math.min(255, Math.floor((Math.abs(value) / 2) * 256))).subarray(0, 3)];
  const across = pixels(view, layout(view), { ...ink, heads: 2, of: { along: "columns", size: 2, first: 0 } }, 9, 9);
  assert.deepEqual([rgb(across, 1, 0), rgb(across, 2, 0), rgb(across, 2, 1)], [hue(0, 1), hue(1, -1), hue(1, -2)]);
  const down = pixels(view, layout(view), { ...ink, heads: 3, of: { along: "rows", size: 1, first: 1 } }, 9, 9);
  assert.deepEqual([rgb(down, 1, 0), rgb(down, 1, 1)], [hue(1, 1), hue(2, 0.25)]);
});

// The wire format: what is read is what was written, and a broken answer is refused in words.
import assert from "node:assert/strict";
import { test } from "node:test";
import { load } from "./page.mjs";

const { canonical, halfToFloat, offset, readAnswer, shapeText, swapAxes, tensor, valueAt } = await load("tensor.js");

function pack(meta, tensors) {
  const header = { meta, tensors: {} };
  const parts = [];
  let at = 0;
  for (const [name, { dtype, shape, bytes }] of Object.entries(tensors)) {
    header.tensors[name] = { dtype, shape, offset: at };
    const padded = new Uint8Array(Math.ceil(bytes.length / 8) * 8);
    padded.set(bytes);
    parts.push(padded);
    at += padded.length;
  }
  let text = JSON.stringify(header);
  while ((8 + new TextEncoder().encode(text).length) % 8) text += " ";
  const json = new TextEncoder().encode(text);
  const out = new Uint8Array(8 + json.length + at);
  out.set([0x4d, 0x48, 0x54, 0x31]);
  new DataView(out.buffer).setUint32(4, json.length, true);
  out.set(json, 8);
  let place = 8 + json.length;
  for (const part of parts) {
    out.set(part, place);
    place += part.length;
  }
  return out.buffer;
}
const bytesOf = (array) => new Uint8Array(array.buffer);

test("every dtype, with infinities and words that are not ASCII", () => {
  const floats = Float32Array.from([1.5, -Infinity, NaN]);
  const halves = Uint16Array.from([0x3c00, 0xc000, 0x7c00, 0x0001]);
  const { meta, tensors } = readAnswer(pack({ label: "␣pizza ⟨E2 98⟩" }, {
    a: { dtype: "float32", shape: [3], bytes: bytesOf(floats) },
    b: { dtype: "float16", shape: [2, 2], bytes: bytesOf(halves) },
    c: { dtype: "int32", shape: [2], bytes: bytesOf(Int32Array.from([-7, 8])) },
    d: { dtype: "bool", shape: [3], bytes: Uint8Array.from([1, 0, 1]) },
    e: { dtype: "float32", shape: [0, 4], bytes: new Uint8Array() },
  }));
  assert.equal(meta.label, "␣pizza ⟨E2 98⟩");
  assert.deepEqual([...tensors.a.data], [1.5, -Infinity, NaN]);
  assert.deepEqual([...tensors.b.data], [1, -2, Infinity, 2 ** -24]);
  assert.deepEqual([...tensors.c.data], [-7, 8]);
  assert.deepEqual([...tensors.d.data], [1, 0, 1]);
  assert.equal(tensors.e.data.length, 0);
});

test("what is no answer is refused in words", () => {
  assert.throws(() => readAnswer(new ArrayBuffer(3)), /MHT1/);
  assert.throws(() => readAnswer(new TextEncoder().encode("<html><body>").buffer), /MHT1/);
  const good = pack({}, { a: { dtype: "float32", shape: [8], bytes: new Uint8Array(32) } });
  assert.throws(() => readAnswer(good.slice(0, good.byteLength - 8)), /cut off/);
  assert.throws(() => readAnswer(good.slice(0, 12)), /header/);
  assert.throws(() => readAnswer(pack({}, { a: { dtype: "complex64", shape: [1], bytes: new Uint8Array(8) } })), /complex64/);
});

test("float16, all special values", () => {
  assert.deepEqual([0, 0x8000, 0x7bff, 0x0400, 0xfc00].map(halfToFloat), [0, -0, 65504, 2 ** -14, -Infinity]);
  assert.ok(Number.isNaN(halfToFloat(0x7e00)));
});

test("indices, shapes and the swap of two axes", () => {
  const t = tensor([2, 3, 2], Float32Array.from({ length: 12 }, (_, n) => n));
  assert.equal(offset([2, 3, 2], [1, 2, 1]), 11);
  const swapped = swapAxes(t);
  assert.deepEqual(swapped.shape, [3, 2, 2]);
  assert.equal(valueAt(swapped, [2, 0, 1]), valueAt(t, [0, 2, 1]));
  assert.equal(shapeText([4]), "(4,)");
  assert.equal(shapeText([4, 8, 128]), "(4, 8, 128)");
});

test("canonical JSON sorts keys at every level and leaves no spaces", () => {
  assert.equal(canonical({ model: "lm", input: { text: "ä\"", kind: "text" }, off: [[0, 1]], layer: 0 }), '{"input":{"kind":"text","text":"ä\\""},"layer":0,"model":"lm","off":[[0,1]]}');
});

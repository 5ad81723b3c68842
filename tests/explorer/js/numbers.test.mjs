// Numbers as files: CSV, npy and npz. What numpy makes of them is checked in tests/explorer/test_page_modules.py.
import assert from "node:assert/strict";
import fs from "node:fs";
import test from "node:test";
import { load } from "./page.mjs";

const { csvOf, crc32, fileName, npyOf, npzOf } = await load("numbers.js");

test("CSV quotes what must be quoted, and writes numbers that Python reads", () => {
  const values = [[0.5, -Infinity], [NaN, 1e-9]];
  const text = csvOf({ rows: 2, columns: 2, rowLabels: ['a"b', "c,d"], columnLabels: ["x", "line\nbreak"], value: (r, c) => values[r][c] });
  assert.equal(text, ',x,"line\nbreak"\n"a""b",0.5,-inf\n"c,d",nan,1e-9\n');
  assert.equal(csvOf({ rows: 1, columns: 1, value: () => 2 }), ",0\n0,2\n");
});

test("names of files hold name and shape, and nothing that a path could mean", () => {
  assert.equal(fileName("weights", [8, 12, 12], "layer 1, head 3"), "weights_8x12x12_layer-1-head-3");
  assert.equal(fileName("../a b", [3], "../../é\u202e"), "..-a-b_3_e");
  assert.equal(fileName("logit", []), "logit_1");
});

test("the checksum is that of zip files", () => {
  assert.equal(crc32(new TextEncoder().encode("123456789")), 0xcbf43926);
  assert.equal(crc32(new Uint8Array()), 0);
});

test("an npy file's data is aligned, and a part of a larger buffer is written as that part", () => {
  const whole = new Float32Array([9, 1, 2, 3, 4, 5, 6, 9]);
  const file = npyOf({ shape: [2, 3], data: whole.subarray(1, 7) });
  assert.equal((file.length - 24) % 64, 0);
  assert.deepEqual([...new Float32Array(file.slice(-24).buffer)], [1, 2, 3, 4, 5, 6]);
  assert.throws(() => npyOf({ shape: [1], data: new BigInt64Array(1) }), /expected floats/);
});

test("a file for numpy", () => {
  const file = npzOf({
    weights: { shape: [2, 1, 3], data: Float32Array.from([1, 2, 3, -Infinity, NaN, 1e-38]) },
    "x.y": { shape: [2], data: Int32Array.from([-1, 7]) },
    allowed: { shape: [1, 2], data: Uint8Array.from([0, 1]) },
    none: { shape: [0, 4], data: new Float32Array() },
    exact: { shape: [], data: Float64Array.from([Math.PI]) },
  });
  const read = new DataView(file.buffer);
  assert.equal(read.getUint32(0, true), 0x04034b50);
  if (process.env.MULTIHEAD_NPZ) fs.writeFileSync(process.env.MULTIHEAD_NPZ, file);
});

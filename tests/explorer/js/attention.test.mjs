// The layer in JavaScript against mh.trace, on the cases that tests/explorer/test_page_modules.py dumps; masks too.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { load } from "./page.mjs";

const { mix, sevenSteps, multiply } = await load("attention.js");
const { allowed, parseMask, formatMask, maskRequest, maskOfAnswer } = await load("mask.js");
const { explain, numberText, sources, ancestry, parseCell, formatCell } = await load("explain.js");

const path = process.env.MULTIHEAD_CASES;
const cases = path ? JSON.parse(readFileSync(path, "utf8")) : [];
const revive = (given) => ({ shape: given.shape, data: Float32Array.from(given.data, (v) => (v === null ? -Infinity : v)) });
const NAMES = ["q", "k", "v", "q_heads", "k_heads", "v_heads", "scores", "masked", "weights", "heads", "transposed", "merged", "output"];

test("there are cases to compare with", { skip: path ? false : "no MULTIHEAD_CASES: run pytest tests/explorer/test_page_modules.py" }, () => assert.ok(cases.length >= 10));

for (const given of cases) {
  test(`as mh.trace: ${given.why}`, () => {
    const known = Object.fromEntries(Object.entries(given.tensors).map(([name, t]) => [name, revive(t)]));
    const [Q, K] = given.trace.weights.shape.slice(1);
    const edits = { allowed: given.mask === null ? null : allowed(parseMask(given.mask), Q, K), off: new Map(given.off), mixing: given.mixing };
    const made = sevenSteps(given.layer, known, edits);
    for (const name of NAMES) {
      const wanted = revive(given.trace[name]);
      assert.deepEqual(made[name].shape, wanted.shape, name);
      let most = 1;
      for (const v of wanted.data) if (Math.abs(v) > most && Number.isFinite(v)) most = Math.abs(v);
      wanted.data.forEach((v, n) => {
        const got = made[name].data[n];
        assert.ok(v === got || Math.abs(v - got) <= 2e-5 * most, `${name}[${n}] is ${got}, expected ${v}`);
      });
    }
    explained(given, known, made, edits);
  });
}

/** Every number of every tensor is the sum of its terms. */
function explained(given, known, made, edits) {
  const scene = { layer: given.layer, tensors: { ...known, ...made }, labels: [...Array(99).keys()].map(String), keyLabels: [...Array(99).keys()].map(String), off: edits.off, mixing: edits.mixing };
  for (const name of NAMES) {
    const { shape, data } = made[name];
    const last = data.length - 1;
    for (const n of [0, Math.floor(last / 2), last]) {
      const index = [];
      let rest = n;
      for (const size of [...shape].reverse()) {
        index.unshift(rest % size);
        rest = Math.floor(rest / size);
      }
      const cell = { name, index };
      const found = explain(scene, cell);
      assert.equal(found.value, data[n]);
      const turned = given.layer.qk_norm && /^[qk]_heads$/.test(name);
      if (name === "masked" || name === "weights" || turned || !found.terms.length) continue;
      const sum = found.terms.reduce((s, term) => s + term.value, 0) + (found.rest?.value ?? 0);
      assert.ok(Math.abs(sum - data[n]) <= 1e-4 * Math.max(1, Math.abs(data[n])), `${formatCell(cell)}: terms add up to ${sum}, not ${data[n]}`);
      for (const term of found.terms) for (const from of term.cells) assert.ok(sources(scene, cell).some((p) => p.name === from.name && p.index.every((i, a) => i === null || i === from.index[a])), `${formatCell(from)} is no source of ${formatCell(cell)}`);
      assert.ok(["x", "context"].some((input) => ancestry(scene, cell).has(input)), `${formatCell(cell)} does not lead to the input`);
    }
  }
}

for (const given of path ? JSON.parse(readFileSync(path.replace(/\.json$/, ".masks.json"), "utf8")) : []) {
  test(`the mask ${given.text} on ${given.Q}×${given.K} is that of multihead.masks`, () => {
    assert.equal([...allowed(parseMask(given.text), given.Q, given.K)].join(""), given.cells);
  });
}

test("masks as text, as requests and back", () => {
  for (const text of ["none", "causal", "causal:4", "window:1,2", "prefix:3", "padding:2", "documents:2,3", "documents:2,3+causal"]) {
    assert.equal(formatMask(parseMask(text)), text);
    assert.equal(formatMask(maskOfAnswer(maskRequest(parseMask(text), 5))), text);
  }
  const cells = Uint8Array.from([1, 0, 0, 1, 1, 0, 1, 1, 1]);
  const drawn = formatMask({ kind: "drawn", numbers: [], cells });
  assert.equal(drawn, "drawn:9b8");
  assert.deepEqual(allowed(parseMask(drawn), 3, 3), cells);
  assert.deepEqual(maskRequest(parseMask(drawn), 3), { kind: "drawn", rows: ["100", "110", "111"] });
  assert.deepEqual(allowed(parseMask(drawn), 2, 2), Uint8Array.from([1, 1, 1, 1]));
  assert.deepEqual(maskRequest(parseMask("documents:2,9"), 4).lengths, [2, 2]);
  assert.deepEqual(maskRequest(parseMask("documents:1"), 4).lengths, [1, 3]);
});

test("a mask that is none is refused in words", () => {
  for (const wrong of ["", "causal:0", "causal:x", "window:1", "prefix:", "drawn:zz", "documents", "causal+causal", "documents:1+window", "padding:-1", "none:1"]) {
    assert.throws(() => parseMask(wrong), /mask=.*expected/, wrong);
  }
});

test("numbers as people write them", () => {
  assert.deepEqual([0, 0.62, -1.5, 12.345, 123.45, 1234.5, 1e-5, -Infinity, NaN].map(numberText), ["0", "0.620", "−1.500", "12.35", "123.5", "1235", "1.0·10⁻⁵", "−∞", "NaN"]);
  assert.deepEqual(parseCell("weights.2.5.1"), { name: "weights", index: [2, 5, 1] });
  for (const wrong of ["", "weights", "weights.", "weights.1.x", "__proto__..1", "<b>.1"]) assert.equal(parseCell(wrong), null);
});

test("rows left over from blocks of four", () => {
  for (const N of [1, 2, 3, 4, 5]) {
    const x = Float32Array.from({ length: N * 3 }, (_, n) => n + 1);
    const out = multiply(x, Float32Array.from([1, 2, 3, 4, 5, 6]), Float32Array.from([10, 20]), N, 3, 2);
    for (let n = 0; n < N; n++) assert.deepEqual([...out.subarray(2 * n, 2 * n + 2)], [0, 1].map((o) => [10, 20][o] + [0, 1, 2].reduce((s, i) => s + x[3 * n + i] * (2 * i + 1 + o), 0)));
  }
});

test("products four rows and four columns at a time are those of one at a time", () => {
  for (const [N, I, O] of [[1, 1, 1], [3, 5, 7], [4, 4, 3], [5, 9, 2], [9, 6, 11], [8, 1024, 5]]) {
    const number = (n) => Math.fround(Math.sin(n * 12.9898) * 3);
    const [x, w] = [Float32Array.from({ length: N * I }, (_, n) => number(n)), Float32Array.from({ length: I * O }, (_, n) => number(n + 77))];
    const bias = Float32Array.from({ length: O }, (_, o) => o);
    const out = multiply(x, w, bias, N, I, O);
    for (let n = 0; n < N; n++) {
      for (let o = 0; o < O; o++) {
        let sum = bias[o];
        for (let i = 0; i < I; i++) sum += x[n * I + i] * w[i * O + o];
        assert.ok(Math.abs(out[n * O + o] - sum) <= 1e-6 * Math.max(1, Math.abs(sum)), `${N}×${I}×${O} at ${n}, ${o}`);
      }
    }
  }
});

test("a value that no weight reaches stays out of the mix, even NaN", () => {
  const weights = { shape: [1, 2, 6], data: Float32Array.from([0.5, 0, 0.25, 0.25, 0, 0, 0, 0, 0.1, 0.2, 0.3, 0.4]) };
  const v = { shape: [1, 6, 2], data: Float32Array.from([2, 4, NaN, NaN, 4, 8, 8, 16, 1, 2, 10, 20]) };
  const { data } = mix(weights, v);
  assert.deepEqual([...data], [4, 8, 6.3, 12.6].map(Math.fround));
});

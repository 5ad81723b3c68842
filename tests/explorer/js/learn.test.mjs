// The lessons' own logic: the live layer, orders of steps, shapes, rows, broken layers, and what is kept.
import assert from "node:assert/strict";
import { test } from "node:test";
import { load } from "./page.mjs";

const { awayInEach, columnsThatDiffer, differentHeads, makeLayer, randoms, run, shareMatrices, sharesOf, wordsOf } = await load("lessons/layer.js");
const { AFTER, INSIDE, faultAfter, faultInside, shuffled } = await load("lessons/order.js");
const { MISTAKES, faultOf, runBroken } = await load("lessons/mistakes.js");
const { faultOfShape } = await load("lessons/shapes.js");
const { faultOfRow, changedRows } = await load("lessons/masking.js");
const { changedOutputs } = await load("lessons/several.js");
const { faultOfGuess, patientLayer } = await load("lessons/patient.js");
const { WAYS, faultOfSplit, heldBy } = await load("lessons/splitting.js");
const { createProgress } = await load("lessons/progress.js");
const { integerOf } = await load("lessons/parts.js");
const { LESSONS } = await load("learn.js");

const words = ["I", "love", "pepperoni", "pizza"];

function permutations(list) {
  return list.length < 2 ? [list] : list.flatMap((first, n) => permutations([...list.slice(0, n), ...list.slice(n + 1)]).map((rest) => [first, ...rest]));
}

test("the live layer: the same for the same sizes, every size it offers fits, weights add up to 1", () => {
  assert.deepEqual(randoms(5, 4, 1), randoms(5, 4, 1));
  const many = randoms(3, 20000, 1);
  assert.ok(Math.abs(many.reduce((a, b) => a + b, 0) / 20000) < 0.02 && Math.max(...many) <= 1 && Math.min(...many) >= -1);
  for (const E of [16, 768]) {
    for (const H of sharesOf(E)) {
      const t = run(makeLayer({ E, H, words }));
      assert.deepEqual([t.heads.shape, t.merged.shape, t.output.shape], [[H, 4, E / H], [4, E], [4, E]]);
      const row = t.weights.data.subarray(12, 16).reduce((a, b) => a + b, 0);
      assert.ok(Math.abs(row - 1) < 1e-6);
    }
  }
  assert.deepEqual(wordsOf("  a  b "), ["a", "b"]);
  assert.equal(wordsOf("").length, 1);
  assert.equal(wordsOf("a ".repeat(30)).length, 8);
});

test("of all orders of the steps exactly one is right, and every other has its reason", () => {
  const layers = [[32, 2], [16, 1], [768, 12]].map(([E, H]) => makeLayer({ E, H, words }));
  for (const [pieces, fault, layer] of layers.flatMap((layer) => [[INSIDE, faultInside, layer], [AFTER, faultAfter, layer]])) {
    const right = pieces.map((p) => p.id);
    for (const order of permutations(right)) {
      const wrong = fault(layer, order);
      assert.equal(wrong === null, order.join() === right.join(), `${order}: ${wrong}`);
      assert.ok(wrong === null || (wrong.length > 30 && !wrong.includes("undefined") && !wrong.includes("NaN")), `${order}: ${wrong}`);
    }
    assert.ok(fault(layer, shuffled(pieces).map((p) => p.id)), "it does not begin solved");
  }
});

test("a broken layer is wrong in its own step, given what it is given, and in no other", () => {
  for (const sizes of [{ E: 32, H: 4 }, { E: 16, H: 2 }, { E: 768, H: 16 }]) {
    const layer = patientLayer(sizes);
    const healthy = runBroken(layer, null);
    assert.ok(awayInEach(healthy.output, run(layer).output).every((by) => by < 1e-6));
    for (const mistake of MISTAKES) wrongInItsOwnStep(layer, healthy, mistake);
  }
});

function wrongInItsOwnStep(layer, healthy, mistake) {
  const broken = runBroken(layer, mistake);
  assert.ok(Math.max(...awayInEach(broken.output, healthy.output)) > 1e-3, mistake.name);
  for (let step = 1; step <= 7; step++) {
    assert.equal(faultOf(layer, broken, step) > 1e-6, step === mistake.step, `${mistake.name}, step ${step}`);
    const said = faultOfGuess(layer, broken, step, mistake.step);
    if (step === mistake.step) assert.equal(said, null);
    else assert.match(said, step > mistake.step ? /further up/ : /comes later/);
  }
}

test("heads in front: each usual mistake has its reason, and cutting anew gives a head the numbers of others", () => {
  assert.equal(faultOfSplit([8, 4, 16], [4, 8, 16]), null);
  assert.match(faultOfSplit([4, 8, 16], [4, 8, 16]), /words still come first/);
  assert.match(faultOfSplit([16, 4, 8], [4, 8, 16]), /heads come first/);
  assert.match(faultOfSplit([8, 16, 4], [4, 8, 16]), /come the words/);
  assert.match(faultOfSplit([8, 4, 128], [4, 8, 16]), /as wide as it was: 16/);
  assert.match(faultOfSplit([8, null, 16], [4, 8, 16]), /integers/);
  for (const [E, H] of [[128, 8], [64, 4], [16, 2], [768, 12]]) {
    const t = run(makeLayer({ E, H, words }));
    assert.deepEqual(WAYS.move.make(t.q), t.q_heads);
    assert.deepEqual(WAYS.cut.make(t.q).shape, t.q_heads.shape);
    for (let h = 0; h < H; h++) {
      assert.deepEqual(heldBy(t.q, WAYS.move.make(t.q), h), words.map((_, n) => [n, h]));
      assert.deepEqual(heldBy(t.q, WAYS.cut.make(t.q), h), words.map((_, n) => [Math.floor((h * 4 + n) / H), (h * 4 + n) % H]));
    }
  }
  const twins = run(makeLayer({ E: 16, H: 2, words: ["so", "so"] })).q;
  assert.deepEqual(heldBy(twins, WAYS.move.make(twins), 1), [[0, 1], [0, 1]]);
});

test("shapes: each usual mistake has its reason", () => {
  assert.equal(faultOfShape("w_q", [1024, 8, 128], [1024, 8, 128]), null);
  assert.match(faultOfShape("w_q", [1024, 128, 8], [1024, 8, 128]), /heads first/);
  assert.match(faultOfShape("w_k", [128, 8, 1024], [1024, 8, 128]), /first number/);
  assert.match(faultOfShape("w_v", [1024, 8, 1024], [1024, 8, 128]), /whole width/);
  assert.match(faultOfShape("w_o", [1024, 8, 128], [8, 128, 1024]), /other way/);
  assert.match(faultOfShape("w_o", [8, 128, 128], [8, 128, 1024]), /as wide as the model/);
  assert.match(faultOfShape("w_o", [8, null, 128], [8, 128, 1024]), /three integers/);
  assert.deepEqual(["64", " 7 ", "6.5", "-3", "", "1e3"].map(integerOf), [64, 7, null, null, null, null]);
});

test("what a row may see, what the mask protects, what W_o spreads", () => {
  const right = [true, true, true, false];
  assert.equal(faultOfRow(words, 2, right, right), null);
  assert.match(faultOfRow(words, 2, [true, true, true, true], right), /pizza.*after/);
  assert.match(faultOfRow(words, 2, [true, true, false, false], right), /itself/);
  assert.match(faultOfRow(words, 2, [false, true, true, false], right), /“I” came before/);
  assert.deepEqual(changedRows(words, "pasta", "causal").map((by) => by > 1e-6), [false, false, false, true]);
  assert.ok(changedRows(words, "pasta", "none").every((by) => by > 1e-6));
  assert.equal(changedOutputs({ E: 32, H: 4 }, true).length, 32);
  assert.deepEqual(changedOutputs({ E: 32, H: 4 }, false), [0, 1, 2, 3, 4, 5, 6, 7]);
});

test("two heads with the same matrices are one, and it takes all three", () => {
  const layer = makeLayer({ E: 32, H: 4, words });
  assert.equal(differentHeads(run(layer).heads), 4);
  for (const names of [["w_q"], ["w_q", "w_k"], ["w_k", "w_v"], ["w_q", "w_v"]]) assert.equal(differentHeads(run(shareMatrices(layer, names, 0, 1)).heads), 4, names.join());
  const t = run(shareMatrices(layer, ["w_q", "w_k", "w_v"], 0, 1));
  assert.equal(differentHeads(t.heads), 3);
  assert.equal(columnsThatDiffer(run(layer).merged, t.merged).length, 8);
});

test("progress is kept where something is kept, and nothing breaks where nothing is", () => {
  const drawer = new Map();
  const storage = { getItem: (k) => drawer.get(k) ?? null, setItem: (k, v) => drawer.set(k, v) };
  const first = createProgress(() => storage);
  first.add("items");
  first.add("width");
  assert.ok(createProgress(() => storage).has("width"));
  first.forget();
  assert.equal(createProgress(() => storage).count, 0);
  for (const text of ["{", "3", "[1, null]", '{"a": 1}']) {
    drawer.set("multihead-learn", text);
    assert.equal(createProgress(() => storage).count, 0, text);
  }
  for (const broken of [() => { throw new Error("blocked"); }, () => undefined, () => ({ getItem: () => null, setItem: () => { throw new Error("full"); } })]) {
    const progress = createProgress(broken);
    progress.add("items");
    assert.ok(progress.has("items") && !progress.kept);
  }
  assert.equal(new Set(LESSONS.map((lesson) => lesson.id)).size, 13);
});

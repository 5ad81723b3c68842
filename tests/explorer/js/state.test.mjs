// The state and its address: every key there and back, and nothing in an address can break the page.
import assert from "node:assert/strict";
import { test } from "node:test";
import { load } from "./page.mjs";

const { DEFAULTS, createSignal, createStore, formatPairs, formatState, parsePairs, parseState, togglePair } = await load("state.js");

test("the default state is an empty address", () => {
  assert.equal(formatState(DEFAULTS), "");
  assert.deepEqual(parseState(""), DEFAULTS);
  assert.deepEqual(parseState("#"), DEFAULTS);
});

test("every key there and back, hostile text too", () => {
  const state = { ...DEFAULTS, model: "vit", layer: 3, text: "<img onerror=alert(1)> & = # \u202e ☃ half \ud83c", sample: "ankle boot", ids: "0,12", step: 7, head: 5, at: "weights.2.5.1", mask: "documents:2,3+causal", off: "0.1,1.3", with: "mean", mixing: false, pins: "0.1", sort: "entropy", metric: "first", least: 40, temperature: 0.35, top: 3, part: "v", colour: "heads", way: "from", rollout: true, speed: 0.5, theme: "dark", pixels: "AA+/==" };
  const again = parseState(formatState(state));
  assert.deepEqual({ ...again, text: null }, { ...state, text: null });
  assert.ok(again.text.startsWith("<img onerror=alert(1)> & = # \u202e ☃ half "));
  assert.deepEqual(parseState(formatState(again)), again);
  assert.equal(parseState(formatState({ ...DEFAULTS, text: "" })).text, "");
});

test("what is not understood stays at its default; numbers are kept in their range", () => {
  const state = parseState("at=weights:3,4,1&step=99&layer=-3&head=x&speed=1e999&with=rm&theme=&mixing=yes&temperature=0&__proto__=1&constructor=2&unknown=3");
  assert.deepEqual({ ...state, step: 3, layer: 0, temperature: 1 }, DEFAULTS);
  assert.deepEqual([state.step, state.layer, state.temperature], [7, 0, 0.05]);
  assert.equal(parseState(`text=${"a".repeat(30000)}`).text, null);
});

test("pairs of layer and head", () => {
  assert.deepEqual(parsePairs("0.1,1.3,0.1,x,1.,9999.1"), [[0, 1], [1, 3]]);
  assert.equal(formatPairs([[0, 1], [1, 3]]), "0.1,1.3");
  assert.equal(togglePair("1.3", 0, 2), "0.2,1.3");
  assert.equal(togglePair("0.2,1.3", 1, 3), "0.2");
});

test("a store tells of changes, and only of changes", () => {
  const store = createStore({ ...DEFAULTS });
  const seen = [];
  store.subscribe((state, before, how) => seen.push([before.step, state.step, how.push]));
  store.set({ step: 3 });
  store.set({ step: 4 }, { push: true });
  assert.deepEqual(seen, [[3, 4, true]]);
  const signal = createSignal(1);
  const values = [];
  signal.subscribe((v) => values.push(v));
  signal.set(1);
  signal.set(2);
  assert.deepEqual(values, [2]);
});

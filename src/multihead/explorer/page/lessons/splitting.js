// The lesson about step 2: heads move in front of words, and the one way to do it that looks right and is not.

import { el, segmented } from "../dom.js";
import { shapeText, swapAxes } from "../tensor.js";
import { SENTENCE, makeLayer, run, wordsOf } from "./layer.js";
import { viewed } from "./mistakes.js";
import { picture, question, shapeFields, sizeChoice } from "./parts.js";

/** @typedef {import("../attention.js").Floats} Floats */

/** How heads can be put in front. @type {Record<string, {name: string, make: (q: Floats) => Floats}>} */
export const WAYS = {
  move: { name: "move the numbers", make: swapAxes },
  cut: { name: "cut one long list anew", make: viewed },
};

/** Why a shape is not that of q with its heads in front; null: it is. @param {(number | null)[]} given @param {number[]} shape of q */
export function faultOfSplit(given, [N, H, D]) {
  if (given.some((n) => n === null)) return "Three integers, please.";
  if (given[0] === N && given[1] === H && N !== H) return `That is the shape it has: the ${N} words still come first.`;
  if (given[0] !== H) return `The heads come first, and there are ${H} of them.`;
  if (given[1] !== N) return `After the heads come the words, ${N} of them.`;
  return given[2] === D ? null : `A head is as wide as it was: ${D}.`;
}

/** Whose numbers each row of a head holds, as [word, head]. @param {Floats} q (N, H, D) @param {Floats} made (H, N, D) @param {number} h */
export function heldBy(q, made, h) {
  const [N, H, D] = q.shape;
  const rowOf = (/** @type {Floats} */ t, /** @type {number} */ n) => t.data.subarray(n * D, (n + 1) * D).join();
  const places = new Map(Array.from({ length: N * H }, (_, n) => [rowOf(q, N * H - 1 - n), N * H - 1 - n])); // of equal words the first
  return Array.from({ length: N }, (_, n) => {
    const at = places.get(rowOf(made, h * N + n)) ?? 0;
    return [Math.floor(at / H), at % H];
  });
}

/** @param {any} room */
export function splitLesson(room) {
  const sizes = { E: 128, H: 8 };
  const words = wordsOf(SENTENCE);
  const [whole, alone] = [picture(room.app, "lesson-q", { height: 120 }), picture(room.app, "lesson-q-head", { height: 120, cell: 22 })];
  let way = "move";
  const switched = segmented("How the heads are put in front", Object.entries(WAYS).map(([id, { name }]) => [id, name]), (id) => {
    way = id;
    draw();
  });
  const asked = el("span");
  const fields = shapeFields("With heads in front");
  /** @type {Floats} */
  let q = { shape: [0, 0, 0], data: new Float32Array() };
  const shape = question({
    words: [asked],
    controls: [el("span", { class: "shape" }, "(", ...fields.nodes, ")")],
    check: () => {
      const wrong = faultOfSplit(fields.values(), q.shape);
      return wrong === null ? { right: true, says: `The live layer agrees: ${shapeText(swapAxes(q).shape)}, as many numbers as before.` } : { right: false, says: wrong };
    },
    done: () => room.done(0),
  });
  const pick = el("select", { "aria-label": "The way that is right" }, el("option", { value: "", text: "…" }), ...Object.entries(WAYS).map(([value, { name }]) => el("option", { value, text: name })));
  const which = question({
    words: ["Two ways give that shape: to move the numbers, or to read them as one long list and cut it anew. Try both in the picture, and see whose numbers head 0 gets. Which way is right?"],
    controls: [pick],
    check: () => {
      if (!pick.value) return { right: false, says: "Choose a way." };
      const strange = heldBy(q, WAYS[pick.value].make(q), 0).filter(([, head]) => head !== 0).length;
      if (strange) return { right: false, says: `The shape is right and nothing complains. But ${strange} of head 0's ${words.length} rows hold numbers of other heads.` };
      return { right: true, says: "Head 0 has its own numbers, of every word. The other way is a mistake that many have made, for its shape is right." };
    },
    done: () => room.done(1),
  });
  const choice = sizeChoice(sizes, () => {
    shape.clear();
    which.clear();
    draw();
  }, 2);
  function draw() {
    q = run(makeLayer({ ...sizes, words })).q;
    asked.textContent = `The questions q have the shape ${shapeText(q.shape)}: words, heads, numbers of one head. What is the shape once the heads stand in front?`;
    switched.show(way);
    whole.show("q", q, { name: "q", note: "head after head in the row of each word", rowLabels: words, rows: [0], columns: [1, 2], bands: { size: q.shape[2], heads: q.shape[1] } });
    const made = WAYS[way].make(q);
    alone.show("q", made, { name: "head 0", shape: "", note: "whose numbers it holds", rowLabels: heldBy(q, made, 0).map(([word, head]) => `head ${head}, ${words[word]}`), rows: [1], columns: [2], fixed: { 0: 0 } }, [q]);
  }
  draw();
  return {
    words: ["In the row of a word its heads lie one after another. Yet from here on a head needs nothing but its own numbers, of every word. So the heads are put in front: which head, then which word, then its numbers.", "Nothing is computed in this step. Every number only gets another place."],
    picture: [choice.node, whole.node, switched.node, alone.node],
    tasks: [shape.node, which.node],
    draw,
  };
}

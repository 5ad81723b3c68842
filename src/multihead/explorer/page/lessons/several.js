// The lessons about why there are several heads, and why W_o brings them together.

import { headColour } from "../colour.js";
import { el } from "../dom.js";
import { numberText } from "../explain.js";
import { fit } from "../paint.js";
import { SENTENCE, away, columnsThatDiffer, differentHeads, makeLayer, run, shareMatrices, wordsOf } from "./layer.js";
import { numberQuestion, picture, sizeChoice } from "./parts.js";
import { tensor } from "../tensor.js";

const words = wordsOf(SENTENCE);

/** One head of a tensor (H, N, D). @param {any} t @param {number} h */
const slab = (t, h) => tensor([t.shape[1], t.shape[2]], t.data.subarray(h * t.shape[1] * t.shape[2], (h + 1) * t.shape[1] * t.shape[2]));

/** @param {any} room */
export function ownLesson(room) {
  const sizes = { E: 64, H: 4 };
  const names = ["w_q", "w_k", "w_v"];
  const boxes = names.map((name) => el("input", { type: "checkbox", "data-share": name, onchange: () => draw(true) }));
  const [left, right] = [0, 1].map((h) => picture(room.app, `lesson-head-${h}`, { square: true, height: 200, cell: 34 }));
  const tell = el("p", { class: "answer", role: "status" });
  const choice = sizeChoice(sizes, () => {
    ask.clear();
    draw(true);
  }, 2);
  /** @type {any} */
  let t = null;
  const ask = numberQuestion({
    label: "How many different heads",
    words: ["With heads 0 and 1 the same: how many different heads does the layer have now?"],
    right: () => differentHeads(run(shareMatrices(makeLayer({ ...sizes, words }), names, 0, 1)).heads),
    why: (given) => (given === sizes.H ? `${sizes.H} heads still run, but two of them say the same. Count what is different.` : `${sizes.H} heads, and two of them have become one.`),
    praise: () => "The twin costs as much as before, and finds nothing new. Matrices of its own are what make a head a head.",
    done: () => room.done(1),
  });
  function draw(/** @type {boolean} */ changed = false) {
    const shared = names.filter((_, n) => boxes[n].checked);
    t = run(shareMatrices(makeLayer({ ...sizes, words }), shared, 0, 1));
    for (const [h, at] of /** @type {[number, any][]} */ ([[0, left], [1, right]])) {
      at.show("weights", t.weights, { name: `head ${h}`, note: "whom each word looks at", rows: [1], columns: [2], fixed: { 0: h }, rowLabels: words, columnLabels: words, edge: headColour(h, sizes.H, room.app.theme()) });
    }
    const [looks, says] = [away(slab(t.weights, 0), slab(t.weights, 1)), away(slab(t.heads, 0), slab(t.heads, 1))];
    const same = says < 1e-6;
    if (!changed) {
      tell.textContent = `Their weights differ by up to ${numberText(looks)}, what they put out by up to ${numberText(says)}.`;
      return;
    }
    tell.className = `answer ${same ? "right" : "wrong"}`;
    if (same) tell.textContent = "Right. Same question, same offer, same message: they have become one head.";
    else if (looks < 1e-6) tell.textContent = `Not yet. They look at the same words now, and still say different things: up to ${numberText(says)} apart. Their messages come from W_v.`;
    else tell.textContent = `Not yet. Their weights differ by up to ${numberText(looks)}: they look at different words. Weights come from questions and offers.`;
    if (same) room.done(0);
  }
  draw();
  const make = el("div", { class: "question" }, el("p", { class: "asked", text: "Give head 1 the matrices of head 0, until the two are the same." }), el("div", { class: "tools" }, ...names.map((name, n) => el("label", { class: "switch" }, boxes[n], ` ${name.replace("w", "W")}`))), tell);
  return { words: ["Why does each head have matrices of its own? Take them away from one, and see."], picture: [choice.node, el("div", { class: "row" }, left.node, right.node)], tasks: [make, ask.node], draw: () => draw() };
}

/** Which outputs change when head 0 is switched off. @param {{E: number, H: number}} sizes @param {boolean} mixing */
export function changedOutputs(sizes, mixing) {
  const layer = makeLayer({ ...sizes, words });
  const [whole, without] = [new Map(), new Map([[0, "zero"]])].map((off) => run(layer, { off, mixing }).output);
  return columnsThatDiffer(whole, without);
}

/** @param {any} room */
export function mixingLesson(room) {
  const sizes = { E: 64, H: 4 };
  const box = el("input", { type: "checkbox", checked: true, onchange: () => draw() });
  const canvas = el("canvas", { role: "img", class: "columns" });
  const says = el("p", { class: "hint" });
  const choice = sizeChoice(sizes, () => {
    withIt.clear();
    without.clear();
    draw();
  }, 2);
  const withIt = numberQuestion({
    label: "Outputs that change with W_o",
    words: ["With W_o: head 0 is switched off. How many numbers of an output row change?"],
    right: () => changedOutputs(sizes, true).length,
    why: (given) => (given === sizes.E / sizes.H ? "So it would be without W_o. With it, each number of a row reads every head." : "Every mark in the picture is a number that changed. W_o lets each number of the row read every head."),
    praise: () => `All ${sizes.E}: each number of the output has something of every head in it.`,
    done: () => room.done(0),
  });
  const without = numberQuestion({
    label: "Outputs that change without W_o",
    words: ["Take W_o away. How many change now?"],
    right: () => changedOutputs(sizes, false).length,
    why: (given) => (given === sizes.E ? "That is with W_o. Without it the row is the heads side by side, and nothing more." : `Head 0 only fills its own part of the row: ${sizes.E} numbers shared by ${sizes.H} heads.`),
    praise: () => `Only head 0's own ${sizes.E / sizes.H}. Without W_o the heads lie side by side and never meet: what one has found helps nobody else.`,
    done: () => room.done(1),
  });
  function draw() {
    const changed = new Set(changedOutputs(sizes, box.checked));
    const [W, high] = [Math.max(260, Math.min(560, canvas.parentElement?.clientWidth || 420)), 46];
    const ctx = fit(canvas, W, high);
    const colours = room.app.colours();
    for (let e = 0; e < sizes.E; e++) {
      ctx.fillStyle = headColour(Math.floor(e / (sizes.E / sizes.H)), sizes.H, room.app.theme());
      ctx.fillRect((e * W) / sizes.E, 0, W / sizes.E + 0.5, 10);
      ctx.fillStyle = changed.has(e) ? colours.accent : colours.hidden;
      ctx.fillRect((e * W) / sizes.E, 14, W / sizes.E - (W / sizes.E > 4 ? 1 : 0), 32);
    }
    const text = `${changed.size} of ${sizes.E} numbers of a row change when head 0 is switched off, ${box.checked ? "with" : "without"} W_o.`;
    canvas.setAttribute("aria-label", text);
    says.textContent = `${box.checked ? "With W_o" : "Without W_o"}: filled where an output changes when head 0 is switched off. The band above says which head the place belongs to.`;
  }
  return { words: ["W_o comes last: it multiplies the row in which the heads lie side by side. What would be missing without it?", "Head 0 is switched off here. What changes in the output shows who was listening to it."], picture: [choice.node, el("label", { class: "switch" }, box, " Multiply by W_o"), el("div", {}, canvas), says], tasks: [withIt.node, without.node], draw };
}

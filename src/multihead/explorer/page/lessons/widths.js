// Lessons about how wide things are: the items, one head, all heads side by side.

import { el } from "../dom.js";
import { shapeText } from "../tensor.js";
import { SENTENCE, itemsOf, makeLayer, run, wordsOf } from "./layer.js";
import { numberQuestion, picture, question, sizeChoice, wordChoice } from "./parts.js";

/** @param {any} room */
export function itemsLesson(room) {
  const sizes = { E: 64, H: 4, words: wordsOf(SENTENCE) };
  const shown = picture(room.app, "lesson-x");
  const words = wordChoice(SENTENCE, (text) => {
    sizes.words = wordsOf(text);
    draw();
  });
  const width = sizeChoice(sizes, () => draw());
  width.heads.parentElement.hidden = true;
  const asked = el("span");
  const many = () => `${sizes.words.length} ${sizes.words.length === 1 ? "word" : "words"}`;
  const ask = numberQuestion({
    label: "How many numbers go in",
    words: [asked],
    right: () => itemsOf(sizes.words, sizes.E).data.length,
    why: (given) => {
      const [N, E] = [sizes.words.length, sizes.E];
      if (given === N) return `That is how many words there are. Each of them brings ${E} numbers.`;
      if (given === E) return `That is one word. There are ${N} of them.`;
      if (given === N + E && N > 1) return `Every one of the ${N} words brings ${E} numbers: times, not plus.`;
      return `${many()}, and each brings ${E} numbers.`;
    },
    praise: () => `${sizes.words.length} × ${sizes.E} numbers, a block of shape ${shapeText([sizes.words.length, sizes.E])}.`,
    done: () => room.done(0),
  });
  function draw() {
    asked.textContent = `${many()} of ${sizes.E} numbers${sizes.words.length === 1 ? "" : " each"}. How many numbers go in, all together?`;
    ask.clear();
    shown.show("x", itemsOf(sizes.words, sizes.E), { name: "what goes in", rowLabels: sizes.words });
  }
  draw();
  return { words: ["A sentence goes in as a row of words, and each word as a list of numbers. How many numbers a word has is the width of the model; we call it E.", "(Real models cut text into smaller pieces, called tokens. Whole words are fine for us.)"], picture: [words.node, width.node, shown.node], tasks: [ask.node], draw };
}

/** The heads of a live layer side by side, each with its hue. @param {any} room @param {{E: number, H: number}} sizes @param {string} [shape] */
function headsSideBySide(room, sizes, shape = undefined) {
  const shown = picture(room.app, "lesson-merged");
  const words = wordsOf(SENTENCE);
  return {
    node: shown.node,
    draw() {
      const t = run(makeLayer({ ...sizes, words }));
      shown.show("merged", t.merged, { name: `${sizes.H} ${sizes.H === 1 ? "head" : "heads side by side"}`, shape, rowLabels: words, bands: { size: sizes.E / sizes.H, heads: sizes.H } });
      return t;
    },
  };
}

/** @param {any} room */
export function widthLesson(room) {
  const sizes = { E: 768, H: 12 };
  const shown = headsSideBySide(room, sizes);
  const choice = sizeChoice(sizes, () => draw());
  const asked = el("span");
  /** @type {any} */
  let t = null;
  const ask = numberQuestion({
    label: "Width of one head's output",
    words: [asked],
    right: () => t.heads.shape[2],
    why: (given) => {
      const { E, H } = sizes;
      if (given === E && H > 1) return `${E} is the whole model. ${H} heads share it.`;
      if (given === H) return `${H} is how many heads there are. How wide is each?`;
      if (given === E * H) return "The heads share the width. They do not each bring a whole one.";
      return `The ${H} heads share ${E} numbers evenly: ${E} divided by ${H}.`;
    },
    praise: () => `The live layer agrees: what its heads put out has the shape ${shapeText(t.heads.shape)}: heads, words, width of one head.`,
    done: () => room.done(0),
  });
  function draw() {
    asked.textContent = `A model of width ${sizes.E} with ${sizes.H} ${sizes.H === 1 ? "head" : "heads"}: how wide is the output of one head?`;
    ask.clear();
    t = shown.draw();
  }
  draw();
  return { words: ["Attention lets every word gather something from the others. It does so several times at once, in heads: each head looks in its own way, and all work side by side.", "The heads share the width of the model evenly. In the picture a band of colour lies above each head.", "All heads together are a layer of attention. One of the size you choose runs in this page: it checks your answers."], picture: [choice.node, shown.node], tasks: [ask.node], draw };
}

/** @param {any} room */
export function wideLesson(room) {
  const sizes = { E: 64, H: 4 };
  const shown = headsSideBySide(room, sizes);
  /** @type {any} */
  let t = null;
  const tell = el("p", { class: "answer", role: "status" });
  const asked = el("span");
  const choice = sizeChoice(sizes, () => {
    ask.clear();
    draw();
    const D = t.heads.shape[2];
    const right = D === sizes.E;
    tell.className = `answer ${right ? "right" : "wrong"}`;
    tell.textContent = right ? `Right. One head alone is as wide as the model: ${D} of ${sizes.E}. With several heads, none is.` : `Not yet. With ${sizes.H} heads each is ${D} wide, and the model ${sizes.E}.`;
    if (right) room.done(1);
  });
  const pick = el("select", { "aria-label": "Is a head's output as wide as the model" }, ...[["", "…"], ["yes", "yes"], ["no", "no"]].map(([value, text]) => el("option", { value, text })));
  const ask = question({
    words: [asked],
    controls: [pick],
    check: () => {
      if (!pick.value) return { right: false, says: "Yes or no?" };
      const { E, H } = sizes;
      const D = t.heads.shape[2];
      if (D === E) return { right: pick.value === "yes", says: `The live layer has one head, and it is ${D} wide: nobody shares with it.` };
      return pick.value === "no" ? { right: true, says: `One head is ${D} wide. It takes all ${H}, side by side, to be ${E} again: something will have to bring them together.` } : { right: false, says: `The live layer has heads of ${D} numbers for each word, and ${E} came in. The ${H} heads share them.` };
    },
    done: () => room.done(0),
  });
  const make = el("div", { class: "question" }, el("p", { class: "asked", text: "Now make it so: choose a number of heads for which one head is as wide as the model." }), choice.node, tell);
  function draw() {
    asked.textContent = `${sizes.H} ${sizes.H === 1 ? "head" : "heads"} in a model of width ${sizes.E}. Is the output of one head as wide as the model?`;
    t = shown.draw();
  }
  draw();
  return { words: ["A word comes in with as many numbers as the model is wide. Each head hands back a row for it: what that head has gathered.", "Could such a row take the word's place?"], picture: [shown.node], tasks: [ask.node, make], draw };
}

/** @param {any} room */
export function concatenateLesson(room) {
  const sizes = { E: 512, H: 8 };
  const shown = headsSideBySide(room, sizes, ""); // its shape is the answer
  const choice = sizeChoice(sizes, () => draw());
  const asked = el("span");
  /** @type {any} */
  let t = null;
  const ask = numberQuestion({
    label: "Width after concatenation",
    words: [asked],
    right: () => t.merged.shape[1],
    why: (given) => {
      const [D, H] = [sizes.E / sizes.H, sizes.H];
      if (given === D && H > 1) return `${D} is one head. ${H} of them lie side by side.`;
      if (given === H) return `${H} is how many heads there are. Each is ${D} wide.`;
      if (given === D + H) return `Each of the ${H} heads brings ${D} numbers: times, not plus.`;
      return `${H} heads with ${D} numbers each, one after another in one row.`;
    },
    praise: () => `The live layer agrees: ${shapeText(t.merged.shape)}, one row for each word, as wide as what came in.`,
    done: () => room.done(0),
  });
  function draw() {
    asked.textContent = `${sizes.H} ${sizes.H === 1 ? "head" : "heads"} of ${sizes.E / sizes.H}: how wide is the row once they are laid side by side?`;
    ask.clear();
    t = shown.draw();
  }
  draw();
  return { words: ["Every head has done its work, and has a short row for each word. Now the rows of a word are laid side by side. That is called concatenation, and it changes no number."], picture: [choice.node, shown.node], tasks: [ask.node], draw };
}

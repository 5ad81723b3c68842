// The lessons about the mask: what a row may see, and what happens without it.

import { el } from "../dom.js";
import { numberText } from "../explain.js";
import { SENTENCE, awayInEach, makeLayer, run, wordsOf } from "./layer.js";
import { numberQuestion, picture, question, wordChoice } from "./parts.js";

/** Why a choice of words is not what a row may see; null: it is. @param {string[]} words @param {number} row @param {boolean[]} chosen @param {boolean[]} right */
export function faultOfRow(words, row, chosen, right) {
  const ahead = words.findIndex((_, n) => chosen[n] && !right[n]);
  if (ahead >= 0) return `“${words[ahead]}” comes after “${words[row]}”. A model that could see it would copy it instead of guessing it.`;
  if (right[row] && !chosen[row]) return `“${words[row]}” sees itself too: it is known by then.`;
  const missing = words.findIndex((_, n) => right[n] && !chosen[n]);
  return missing >= 0 ? `“${words[missing]}” came before, and what came before is known: it may be seen.` : null;
}

/** @param {any} room */
export function causalLesson(room) {
  let words = wordsOf(SENTENCE);
  /** @type {any[]} */
  let buttons = [];
  const host = el("div", { class: "segmented", role: "group" });
  const shown = picture(room.app, "lesson-weights", { square: true, height: 240, cell: 40 });
  const asked = el("span");
  const row = () => Math.min(2, words.length - 1);
  const layer = () => makeLayer({ E: 64, H: 4, words });
  const ask = question({
    words: [asked],
    controls: [host],
    check: () => {
      const { allowed } = layer();
      const right = words.map((_, n) => allowed[row() * words.length + n] === 1);
      const wrong = faultOfRow(words, row(), buttons.map((b) => b.getAttribute("aria-pressed") === "true"), right);
      return wrong === null ? { right: true, says: `Row ${row() + 1} of the output stands for “${words.slice(0, row() + 1).join(" ")}”, and for nothing after it.` } : { right: false, says: wrong };
    },
    done: () => {
      room.done(0);
      shown.node.hidden = false;
      draw();
    },
  });
  const choice = wordChoice(SENTENCE, (text) => {
    words = wordsOf(text);
    fill();
    draw();
  });
  function fill() {
    ask.clear();
    shown.node.hidden = true;
    buttons = words.map((word) => {
      const button = el("button", { type: "button", "aria-pressed": "false", text: word, onclick: () => {
        button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
        ask.clear();
      } });
      return button;
    });
    host.setAttribute("aria-label", `What “${words[row()]}” may see`);
    host.replaceChildren(...buttons);
    asked.textContent = `Choose every word that “${words[row()]}”, ${row() === 2 ? "the third word" : "the last word"}, may see.`;
  }
  function draw() {
    if (!shown.node.hidden) shown.show("weights", run(layer()).weights, { name: "weights of the live layer", note: "head 0: words that look down, words looked at across", rows: [1], columns: [2], fixed: { 0: 0 }, rowLabels: words, columnLabels: words });
  }
  fill();
  return { words: ["A language model learns by guessing the next word. So while it reads a word, it may know that word and what came before, and nothing of what comes after.", "What a word may see is called the mask; this one is the causal mask."], picture: [choice.node, shown.node], tasks: [ask.node], draw };
}

/** Which rows of the output change when the last word does. @param {string[]} words @param {string} other @param {string} mask */
export function changedRows(words, other, mask) {
  const outputs = [words[words.length - 1], other].map((last) => run(makeLayer({ E: 64, H: 4, words: [...words.slice(0, -1), last] }, mask)).output);
  return awayInEach(outputs[0], outputs[1]);
}

/** @param {any} room */
export function unmaskedLesson(room) {
  let words = wordsOf(SENTENCE);
  const box = el("input", { type: "checkbox", checked: true, onchange: () => draw() });
  const last = el("input", { type: "text", value: "pasta", "aria-label": "Another last word", maxlength: "20", autocomplete: "off", oninput: () => draw() });
  const list = el("ol", { class: "bars changes" });
  const end = () => words[words.length - 1];
  const other = () => (last.value.trim() && last.value.trim() !== end() ? last.value.trim() : end() === "pasta" ? "pizza" : "pasta");
  const count = (/** @type {string} */ mask) => changedRows(words, other(), mask).filter((by) => by > 1e-6).length;
  const asked = el("span");
  const choice = wordChoice(SENTENCE, (text) => {
    words = wordsOf(text);
    masked.clear();
    bare.clear();
    draw();
  });
  const masked = numberQuestion({
    label: "Rows that change with the mask",
    words: [asked],
    right: () => count("causal"),
    why: (given) => (given === 0 ? "The last word sees itself: its own row changes." : `Only rows that see the last word can change. With the mask, who sees “${end()}”? Change it, and look at the bars.`),
    praise: () => "Only its own row. What the model wrote about the words before stays what it was.",
    done: () => room.done(0),
  });
  const bare = numberQuestion({
    label: "Rows that change without the mask",
    words: ["Take the mask away. How many rows change now?"],
    right: () => count("none"),
    why: (given) => (given === count("causal") ? "That is with the mask. Without it everybody sees everybody." : "Switch the mask off, and count the bars that are not empty."),
    praise: () => (words.length < 2 ? "One word has nobody to look at but itself. Write more of them, and look again." : `All ${words.length}: each word before the last has looked at what it should have guessed. Trained like this, a model copies, and has learnt nothing about guessing.`),
    done: () => room.done(1),
  });
  function draw() {
    const N = words.length;
    asked.textContent = `With the mask: how many of the ${N} rows of the output change when the last word does?`;
    const by = changedRows(words, other(), box.checked ? "causal" : "none");
    const most = Math.max(...by, 1e-9);
    list.replaceChildren(...words.map((word, n) => {
      const fill = el("span", { class: "fill" });
      fill.style.width = `${(100 * by[n]) / most}%`;
      return el("li", {}, el("div", { class: "term" }, el("bdi", { class: "token-name", text: n === N - 1 ? `${word} → ${other()}` : word }), el("span", { class: "track" }, fill), el("span", { class: "figure", text: numberText(by[n]) })));
    }));
  }
  draw();
  return {
    words: ["What does the mask protect? Put another word in the place of the last one, and see which rows of the output notice.", "The bars say how far each row moves."],
    picture: [choice.node, el("div", { class: "tools" }, el("label", { class: "switch" }, box, " Causal mask"), el("label", {}, "Last word ", last)), list],
    tasks: [masked.node, bare.node],
    draw,
  };
}

// The last lesson: a layer broken on purpose by one of the doctor's mistakes. Find the step.

import { el, segmented } from "../dom.js";
import { numberText } from "../explain.js";
import { makeLayer, wordsOf } from "./layer.js";
import { MISTAKES, SHOWN, faultOf, runBroken } from "./mistakes.js";
import { picture, question, sizeChoice } from "./parts.js";

export const TITLES = ["project", "split", "score", "mix", "transpose back", "concatenate", "output"];
const WORDS = wordsOf("I love pepperoni pizza so");

/** The layer that patients are made of: several heads, for with one some mistakes are none. */
export const patientLayer = (sizes = { E: 32, H: 4 }) => makeLayer({ ...sizes, words: WORDS });

/** How a tensor lies on the page: head 0 of those that have heads. @param {any} t @param {string} name */
function lying(t, name) {
  if (t.shape.length === 2) return { rows: [0], columns: [1] };
  if (["q", "k", "v", "transposed"].includes(name)) return { rows: [0], columns: [1, 2] };
  return { rows: [1], columns: [2], fixed: { 0: 0 }, note: "head 0" };
}

/** Why a step is not the one; null: it is. @param {any} layer @param {any} broken @param {number} given @param {number} right */
export function faultOfGuess(layer, broken, given, right) {
  if (given === right) return null;
  const by = faultOf(layer, broken, given);
  if (by > 1e-6) return `Step ${given} is off by ${numberText(by)} on what it is given.`;
  const made = `Step ${given} makes of what it is given exactly what it should: it is off by ${numberText(by)}.`;
  return given > right ? `${made} If its picture differs, it was given something wrong: look further up.` : `${made} The trouble comes later.`;
}

/** @param {any} room */
export function patientLesson(room) {
  const sizes = { E: 32, H: 4 };
  let layer = patientLayer(sizes);
  let healthy = runBroken(layer, null);
  const choice = sizeChoice(sizes, () => {
    layer = patientLayer(sizes);
    healthy = runBroken(layer, null);
    broken = runBroken(layer, MISTAKES[at]);
    ask.clear();
    draw();
  }, 2);
  let at = 0;
  let step = 1;
  /** @type {any} */
  let broken = null;
  const names = segmented("Which tensor", SHOWN.flat().map((name) => [name, name]), (name) => {
    which = name;
    draw();
  });
  let which = "q";
  const steps = segmented("Step to look at", TITLES.map((title, n) => [String(n + 1), `${n + 1} ${title}`]), (value) => {
    step = Number(value);
    which = SHOWN[step - 1].at(-1) ?? "";
    draw();
  });
  const [mine, right] = ["patient", "healthy"].map((id) => picture(room.app, `lesson-${id}`, { height: 180, cell: 26 }));
  const guess = el("select", { "aria-label": "The step that is wrong" }, el("option", { value: "", text: "…" }), ...TITLES.map((title, n) => el("option", { value: String(n + 1), text: `${n + 1} ${title}` })));
  const who = el("b");
  const ask = question({
    words: [who, " Which step is wrong?"],
    controls: [guess],
    check: () => {
      if (!guess.value) return { right: false, says: "Choose a step." };
      const wrong = faultOfGuess(layer, broken, Number(guess.value), MISTAKES[at].step);
      return wrong === null ? { right: true, says: `Step ${MISTAKES[at].step}: ${MISTAKES[at].name}. ${MISTAKES[at].why}` } : { right: false, says: wrong };
    },
    done: () => {
      room.done(0);
      another.hidden = false;
    },
  });
  const another = el("button", { type: "button", text: "Another patient", hidden: true, onclick: () => {
    at = (at + 1) % MISTAKES.length;
    begin();
    guess.focus();
  } });
  function begin() {
    broken = runBroken(layer, MISTAKES[at]);
    who.textContent = `Patient ${at + 1} of ${MISTAKES.length}.`;
    guess.value = "";
    another.hidden = true;
    ask.clear();
    draw();
  }
  function draw() {
    steps.show(String(step));
    names.show(which);
    for (const button of names.node.children) button.hidden = !SHOWN[step - 1].includes(button.dataset.value);
    for (const [picture, t, name] of /** @type {[any, any, string][]} */ ([[mine, broken, "the patient"], [right, healthy, "a healthy layer"]])) {
      const lies = lying(t[which], which);
      picture.show(which, t[which], { ...lies, name, note: `${which}${lies.note ? `, ${lies.note}` : ""}`, rowLabels: WORDS, ...(which === "weights" ? { columnLabels: WORDS } : {}) }, [broken[which], healthy[which]]);
    }
  }
  begin();
  return {
    words: ["This layer looks like any other. Shapes fit, nothing complains, and it is wrong: somebody made one mistake in one step.", "Beside it stands a healthy layer with the same matrices and the same words. Once a step has gone wrong, everything after it looks different too. Find the step where it begins."],
    picture: [choice.node, steps.node, names.node, el("div", { class: "row" }, mine.node, right.node)],
    tasks: [ask.node, another],
    draw,
  };
}

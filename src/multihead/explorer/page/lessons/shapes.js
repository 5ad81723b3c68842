// The lesson about the four matrices and their shapes.

import { el } from "../dom.js";
import { shapeText } from "../tensor.js";
import { SENTENCE, makeLayer, wordsOf } from "./layer.js";
import { picture, question, shapeFields, sizeChoice } from "./parts.js";

const NAMES = ["w_q", "w_k", "w_v", "w_o"];

/** Why a shape is wrong; null: it is right. @param {string} name @param {(number | null)[]} given @param {number[]} right */
export function faultOfShape(name, given, right) {
  const title = name.replace("w", "W");
  if (given.some((n) => n === null)) return `${title} has three integers.`;
  if (given.every((n, at) => n === right[at])) return null;
  const [E, H, D] = name === "w_o" ? [right[2], right[0], right[1]] : right;
  if (name === "w_o") {
    if (given[0] === E) return `${title} goes the other way: heads go in, and the width of the model comes out. It begins with the heads.`;
    if (given[0] === D && given[1] === H && H !== D) return `${title} lists the heads first, and then the width of one: ${H}, then ${D}.`;
    if (given[2] !== E) return `What comes out of ${title} is as wide as the model: its last number is ${E}.`;
    return `${title} takes ${H} heads of ${D} numbers and gives ${E}.`;
  }
  if (given[0] !== E) return `A word comes in with ${E} numbers, so the first number of ${title} is ${E}.`;
  if (given[1] === D && given[2] === H && H !== D) return `${title} lists the heads first, and then the width of one: ${H}, then ${D}.`;
  if (given[2] === E && H > 1) return `One head does not get the whole width: ${H} heads share ${E}, so each is ${D} wide.`;
  return `${title} turns ${E} numbers into ${H} heads of ${D} each.`;
}

/** @param {any} room */
export function shapesLesson(room) {
  const sizes = { E: 1024, H: 8 };
  const shown = picture(room.app, "lesson-w", { height: 220 });
  /** @type {any} */
  let layer = null;
  const fields = NAMES.map((name) => shapeFields(name.replace("w", "W")));
  const ask = question({
    words: ["Write the shape of each. The first three: what goes in, how many heads, how wide one head is. W_o the other way round: how many heads, how wide one is, what comes out."],
    controls: NAMES.map((name, m) => el("span", { class: "shape" }, el("code", { text: name.replace("w", "W") }), "(", ...fields[m].nodes, ")")),
    check: () => {
      for (const [m, name] of NAMES.entries()) {
        const fault = faultOfShape(name, fields[m].values(), layer.known[name].shape);
        if (fault) return { right: false, says: fault };
      }
      return { right: true, says: `The live layer agrees: W_q, W_k and W_v are ${shapeText(layer.known.w_q.shape)}, W_o is ${shapeText(layer.known.w_o.shape)}. As many numbers in, as many out.` };
    },
    done: () => room.done(0),
  });
  const choice = sizeChoice(sizes, () => draw());
  function draw() {
    layer = makeLayer({ ...sizes, words: wordsOf(SENTENCE) });
    ask.clear();
    const { H } = sizes;
    shown.show("w_q", layer.known.w_q, { name: "one of them", shape: "", note: "a word goes in down the side, the heads lie across", rows: [0], columns: [1, 2], bands: { size: sizes.E / H, heads: H } });
  }
  draw();
  return {
    words: ["Each head makes three things of every word: a question (q, the query), an offer (k, the key), and a message (v, the value). Questions will meet offers, and where they fit, messages pass.", "To make them, the word is multiplied by a matrix, a block of trained numbers: W_q, W_k and W_v. A fourth matrix, W_o, comes last and makes the output of what all heads have found."],
    picture: [choice.node, shown.node],
    tasks: [ask.node],
    draw,
  };
}

// The lessons in which steps are put in order, and run.

import { question, sizeChoice, sortable } from "./parts.js";
import { AFTER, INSIDE, faultAfter, faultInside, shuffled } from "./order.js";
import { SENTENCE, makeLayer, wordsOf } from "./layer.js";

/** @param {any} room @param {import("./order.js").Piece[]} pieces @param {(layer: any, order: string[]) => string | null} fault @param {string} praise */
function ordering(room, pieces, fault, praise) {
  const sizes = { E: 64, H: 4 };
  const list = sortable(room.app, "The steps, in your order", shuffled(pieces), () => ask.clear());
  const ask = question({
    words: ["Put the steps in order: drag them, or choose one and move it with the arrow keys. Check runs them on the live layer."],
    controls: [list.node],
    check: () => {
      const wrong = fault(makeLayer({ ...sizes, words: wordsOf(SENTENCE) }), list.order());
      return wrong === null ? { right: true, says: praise } : { right: false, says: wrong };
    },
    done: () => room.done(0),
  });
  return [sizeChoice(sizes, () => ask.clear()).node, ask.node];
}

/** @param {any} room */
export function insideLesson(room) {
  return {
    words: ["Here is what one head does, all mixed up.", "Every word asks, and every word offers. How well a question fits an offer is a score. The scores of a word become weights: shares that add up to 1. And the weights say how much of each message the word takes home."],
    picture: [],
    tasks: ordering(room, INSIDE, faultInside, "Run in this order, the live layer gives the very numbers it should."),
    draw: () => {},
  };
}

/** @param {any} room */
export function afterLesson(room) {
  return {
    words: ["While they worked, the heads stood in front: head, word, number. For the end we want words in front again, one row each.", "Take care: one wrong order fits, and nothing complains."],
    picture: [],
    tasks: ordering(room, AFTER, faultAfter, "Words in front, heads side by side, then W_o: the live layer agrees to the last digit."),
    draw: () => {},
  };
}

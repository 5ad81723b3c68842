// The steps in the learner's order, run on the live layer as far as they go, and the reason where they go wrong.

import { hide, mix, output, score, weigh } from "../attention.js";
import { numberText } from "../explain.js";
import { shapeText, swapAxes, tensor } from "../tensor.js";
import { away, run } from "./layer.js";

/** @typedef {import("./layer.js").Learner} Learner */
/** @typedef {{id: string, name: string, does: string}} Piece */

/** What one head does. @type {Piece[]} */
export const INSIDE = [
  { id: "project", name: "project", does: "make a question q, an offer k and a message v of every word" },
  { id: "score", name: "score", does: "compare every question with every offer: one number for each pair" },
  { id: "mask", name: "mask", does: "hide the pairs that may not be seen" },
  { id: "softmax", name: "softmax", does: "turn each row of numbers into shares that add up to 1: the weights" },
  { id: "mix", name: "mix", does: "add up the messages, each times its weight" },
];

/** What happens to the heads' outputs. @type {Piece[]} */
export const AFTER = [
  { id: "mix", name: "mix", does: "every head has one row for each word" },
  { id: "transpose", name: "transpose back", does: "words in front again, and in each word its heads" },
  { id: "concatenate", name: "concatenate", does: "the heads of a word side by side, as one row" },
  { id: "output", name: "output", does: "times W_o: every number of a row reads every head" },
];

/** The pieces in an order that is wrong, the same each time. @param {Piece[]} pieces */
export function shuffled(pieces) {
  return [...pieces.filter((_, n) => n % 2), ...pieces.filter((_, n) => n % 2 === 0)];
}

const first = (/** @type {any} */ t) => t.data.subarray(0, t.shape[2]).reduce((/** @type {number} */ a, /** @type {number} */ b) => a + b, 0);

/** What is wrong with an order; null: nothing. @param {Learner} layer @param {string[]} order */
export function faultInside(layer, order) {
  const t = run(layer);
  /** @type {Record<string, any>} */
  const have = {};
  for (const id of order) {
    if (id === "project") Object.assign(have, { q: t.q_heads, k: t.k_heads, v: t.v_heads });
    else if (!have.q) return id === "mix" ? "Mix adds up messages, and there are none yet: they are made when the words are projected." : `To ${id === "score" ? "score" : id === "mask" ? "mask" : "share out"} anything there must be questions and offers first: project makes them.`;
    else if (id === "score") have.scores = score(have.q, have.k, layer.about.scale);
    else if (id === "mask" && have.mixed) return `By now the messages are mixed, and what should be hidden is in them: the row of “${layer.words[0]}” is off by ${numberText(away(have.mixed, t.heads))}.`;
    else if (id === "mask" && have.weights) {
      const left = tensor(have.weights.shape, have.weights.data.map((/** @type {number} */ w, /** @type {number} */ at) => (layer.allowed[at % layer.allowed.length] ? w : 0)));
      return `It runs, but the weights of “${layer.words[0]}” now add up to ${numberText(first(left))}: what is hidden had taken its share already. Hide first, then share out.`;
    } else if (id === "mask" && !have.scores) return "There is nothing to hide yet: the mask hides pairs, and it is the scores that stand for pairs.";
    else if (id === "mask") have.masked = hide(have.scores, layer.allowed);
    else if (id === "softmax" && !have.scores) return "Softmax shares out 1 among the scores of a row: score first.";
    else if (id === "softmax") have.weights = weigh(have.masked ?? have.scores);
    else if (id === "mix" && !have.weights && !have.scores) return "Mix needs to know how much of each message: score first, and make weights of the scores.";
    else if (id === "mix" && !have.weights) return `Mix takes weights, shares of 1. The bare scores of “${layer.words[0]}” add up to ${numberText(first(tensor(have.scores.shape, have.scores.data)))}: softmax turns them into shares.`;
    else have.mixed = mix(have.weights, have.v);
  }
  return away(have.mixed, t.heads) < 1e-6 ? null : "It runs, but gives other numbers than the layer.";
}

/** The same for what comes after the heads. @param {Learner} layer @param {string[]} order */
export function faultAfter(layer, order) {
  const t = run(layer);
  const [H, N, V] = t.heads.shape;
  const E = H * V;
  /** @type {any} */
  let now = null;
  let turned = false;
  for (const id of order) {
    if (id === "mix") now = t.heads;
    else if (!now) return "The heads have put out nothing yet: first each mixes its messages.";
    else if (id === "transpose" && now.shape.length === 2) return "They lie in one row already: there are no heads left to move. Turn back before you lay them side by side.";
    else if (id === "transpose") {
      now = swapAxes(now);
      turned = true;
    } else if (id === "concatenate") now = tensor([N, E], now.data);
    else if (now.shape.length === 3) return `W_o takes one row of ${E} numbers for each word, and these are still heads, ${shapeText(now.shape)}. Lay them side by side first.`;
    else now = output(now, layer.known.w_o);
  }
  if (!turned || away(now, t.output) > 1e-6) return `The shape ${shapeText(now.shape)} is right, and nothing complains. But without turning back first, the row of “${layer.words[0]}” holds what head 0 found for other words: the output is off by ${numberText(away(now, t.output))}.`;
  return null;
}

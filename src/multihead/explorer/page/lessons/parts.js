// What lessons are made of: a question with its check, sizes to choose, a tensor to look at, pieces to put in order.

import { scaleOf } from "../colour.js";
import { el, fillChoice } from "../dom.js";
import { numberText } from "../explain.js";
import { createGrid } from "../grid.js";
import { WIDTHS, sharesOf } from "./layer.js";

/** Something to answer. `check` says whether it is right, and why or why not.
 * @param {{words: (string | Node)[], controls: Node[], check: () => {right: boolean, says: string}, done: () => void}} given */
export function question({ words, controls, check, done }) {
  const says = el("p", { class: "answer", role: "status" });
  const form = el("form", { class: "question", onsubmit: (/** @type {Event} */ event) => {
    event.preventDefault();
    const { right, says: why } = check();
    says.textContent = `${right ? "Right. " : "Not yet. "}${why}`;
    says.className = `answer ${right ? "right" : "wrong"}`;
    if (right) done();
  } }, el("p", { class: "asked" }, ...words), el("div", { class: "tools" }, ...controls, el("button", { type: "submit", text: "Check" })), says);
  return {
    node: form,
    /** The question is another one now. */
    clear() {
      says.textContent = "";
      says.className = "answer";
    },
  };
}

/** A question whose answer is one integer. `why` gives the reason for a wrong one.
 * @param {{label: string, words: (string | Node)[], right: () => number, why: (given: number) => string, praise: () => string, done: () => void}} given */
export function numberQuestion({ label, words, right, why, praise, done }) {
  const field = el("input", { type: "text", inputmode: "numeric", autocomplete: "off", "aria-label": label, class: "short" });
  const made = question({
    words,
    controls: [field],
    check: () => {
      const given = integerOf(field.value);
      if (given === null) return { right: false, says: "An integer, please." };
      return given === right() ? { right: true, says: praise() } : { right: false, says: why(given) };
    },
    done,
  });
  return { ...made, field };
}

/** @param {string} text */
export function integerOf(text) {
  return /^\s*\d{1,9}\s*$/.test(text) ? Number(text) : null;
}

/** Three fields for a shape. @param {string} label */
export function shapeFields(label) {
  const nodes = [1, 2, 3].map((n) => el("input", { type: "text", inputmode: "numeric", autocomplete: "off", class: "short", "aria-label": `${label}, number ${n}` }));
  return { nodes, values: () => nodes.map((field) => integerOf(field.value)) };
}

/** Width and heads to choose, `least` of them or more. @param {{E: number, H: number}} sizes @param {() => void} change */
export function sizeChoice(sizes, change, least = 1) {
  const shares = () => sharesOf(sizes.E).filter((n) => n >= least);
  const pairs = (/** @type {number[]} */ list) => list.map((n) => /** @type {[string, string]} */ ([String(n), String(n)]));
  const width = el("select", { "aria-label": "Width of the model", onchange: () => {
    sizes.E = Number(width.value);
    if (!shares().includes(sizes.H)) sizes.H = shares().filter((n) => n <= sizes.H).at(-1) ?? least;
    show();
    change();
  } });
  const heads = el("select", { "aria-label": "Number of heads", onchange: () => {
    sizes.H = Number(heads.value);
    change();
  } });
  const show = () => {
    fillChoice(width, pairs(WIDTHS), String(sizes.E));
    fillChoice(heads, pairs(shares()), String(sizes.H));
  };
  show();
  return { node: el("div", { class: "tools sizes" }, el("label", {}, "Width E ", width), el("label", {}, "Heads H ", heads)), width, heads };
}

/** Words to choose. @param {string} text @param {(text: string) => void} change */
export function wordChoice(text, change) {
  const field = el("input", { type: "text", value: text, "aria-label": "Your sentence", maxlength: "80", autocomplete: "off", spellcheck: "false", oninput: () => change(field.value) });
  return { node: el("label", { class: "sentence" }, el("span", { text: "Your sentence, up to eight words" }), field), field };
}

/** A tensor of the lesson's layer. @param {any} app @param {string} id @param {{square?: boolean, height?: number, cell?: number}} [how] */
export function picture(app, id, how = {}) {
  /** @type {any} */
  let last = null;
  const says = (/** @type {number} */ r, /** @type {number} */ c, /** @type {number} */ value) => {
    const row = last.rowLabels?.[r] ?? `row ${r}`;
    const column = last.columnLabels?.[c] ?? `number ${c}`;
    return `${row}, ${column}: ${numberText(value)}`;
  };
  const grid = createGrid(app, { id, height: 180, ...how, say: says });
  return {
    node: grid.node,
    /** `name` sets the scale, `shown` is what is written. @param {string} name @param {any} t @param {any} shown @param {any[]} [beside] tensors on the same scale */
    show(name, t, shown, beside = []) {
      last = shown;
      const view = { name: "lesson", t, rows: shown.rows ?? [0], columns: shown.columns ?? [1], fixed: shown.fixed };
      grid.show({ ...shown, view, name: shown.name ?? name, ink: { scale: scaleOf(name, t.data, ...beside.map((b) => b.data)), theme: app.theme() } });
    },
  };
}

/** Pieces to put in order: dragged, moved with the arrow keys, or with their buttons.
 * @param {any} app @param {string} label @param {{id: string, name: string, does: string}[]} pieces @param {() => void} moved */
export function sortable(app, label, pieces, moved) {
  const list = el("ol", { class: "pieces", "aria-label": label });
  const items = pieces.map((piece) => {
    const grip = el("button", { type: "button", class: "piece", "data-piece": piece.id }, el("span", { class: "grip", text: "⠿", "aria-hidden": "true" }), el("b", { text: piece.name }), el("span", { text: piece.does }));
    const up = el("button", { type: "button", class: "quiet", text: "↑", "aria-label": `Move ${piece.name} up`, onclick: () => move(item, -1, up) });
    const down = el("button", { type: "button", class: "quiet", text: "↓", "aria-label": `Move ${piece.name} down`, onclick: () => move(item, 1, down) });
    const item = el("li", { "data-id": piece.id }, grip, up, down);
    grip.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      const by = event.key === "ArrowUp" ? -1 : event.key === "ArrowDown" ? 1 : 0;
      if (!by) return;
      event.preventDefault();
      event.stopPropagation();
      move(item, by, grip);
    });
    grip.addEventListener("pointerdown", (/** @type {PointerEvent} */ event) => {
      if (event.pointerType === "touch" && !(/** @type {Element} */ (event.target).matches(".grip"))) return; // else the page could not be scrolled
      drag(item, event);
    });
    return item;
  });
  list.append(...items);
  name();

  function name() {
    [...list.children].forEach((item, n) => {
      const piece = /** @type {any} */ (pieces.find((p) => p.id === item.dataset.id));
      item.querySelector(".piece").setAttribute("aria-label", `${piece.name}: ${piece.does}. ${n + 1} of ${pieces.length}; arrow keys move it.`);
      item.querySelectorAll(".quiet")[0].disabled = n === 0;
      item.querySelectorAll(".quiet")[1].disabled = n === pieces.length - 1;
    });
  }

  function move(/** @type {any} */ item, /** @type {number} */ by, /** @type {any} */ focus) {
    const at = [...list.children].indexOf(item);
    const to = Math.min(pieces.length - 1, Math.max(0, at + by));
    if (to === at) return;
    list.insertBefore(item, by < 0 ? list.children[to] : list.children[to].nextSibling);
    name();
    (focus.disabled ? item.querySelector(".piece") : focus).focus();
    app.live(`${item.dataset.id}: ${to + 1} of ${pieces.length}`);
    moved();
  }

  function drag(/** @type {any} */ item, /** @type {PointerEvent} */ event) {
    item.classList.add("held");
    const follow = (/** @type {PointerEvent} */ now) => {
      const others = [...list.children].filter((other) => other !== item);
      const after = others.find((other) => {
        const box = other.getBoundingClientRect();
        return now.clientY < box.top + box.height / 2;
      });
      if ((after ?? null) !== item.nextSibling) {
        list.insertBefore(item, after ?? null);
        name();
        moved();
      }
    };
    const drop = () => {
      item.classList.remove("held");
      document.removeEventListener("pointermove", follow);
      document.removeEventListener("pointerup", drop);
      document.removeEventListener("pointercancel", drop);
      item.querySelector(".piece").focus();
    };
    if (event.button > 0) return drop();
    document.addEventListener("pointermove", follow);
    document.addEventListener("pointerup", drop);
    document.addEventListener("pointercancel", drop);
  }

  return { node: list, order: () => [...list.children].map((item) => /** @type {string} */ (item.dataset.id)) };
}

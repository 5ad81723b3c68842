// What goes in: the model, the layer, a line of text with its tokens beneath, or a picture with its patches.

import { cssColour } from "./colour.js";
import { choice, debounce, el, fillChoice } from "./dom.js";
import { createPicture } from "./picture.js";

/** The text that tokens stand for, from their bytes; the start token has none. @param {any[]} tokens */
export function textOf(tokens) {
  const bytes = tokens.flatMap((t) => (t.bytes.match(/../g) ?? []).map((/** @type {string} */ pair) => parseInt(pair, 16)));
  return new TextDecoder().decode(Uint8Array.from(bytes));
}

/** The state of an input as Python names it. @param {any} input */
export function inputState(input) {
  return { text: input.text ?? null, sample: input.name ?? "", pixels: input.pixels ?? "", packed: "", ids: (input.ids ?? []).join(",") };
}

/** @param {any} app */
export function createInput(app) {
  const { store, session } = app;
  const model = choice("Model", [], "", (value) => store.set({ model: value, layer: 0, head: 0, text: null, ids: "", sample: "", pixels: "", packed: "", mask: "", off: "", pins: "", at: "" }, { push: true }));
  const layer = choice("Layer", [], "", (value) => store.set({ layer: Number(value), at: "" }, { push: true }));
  const about = el("p", { class: "hint" });
  const say = debounce(() => store.set({ text: field.value, ids: "", at: "" }), 120);
  const field = el("input", { type: "text", id: "text", "aria-label": "Text that goes in", maxlength: "20000", autocomplete: "off", spellcheck: "false", oninput: say });
  const examples = choice("Examples", [], "", (value) => {
    const example = session.model().examples[Number(value)];
    if (example) store.set({ ...inputState(example.input), at: "" }, { push: true });
  });
  const chips = el("ol", { class: "tokens", "aria-label": "Tokens" });
  const line = el("div", { class: "text-line" }, field, examples);
  const picture = createPicture(app);
  const tip = el("p", { class: "hint", id: "token-tip" });
  const words = el("div", { class: "words" }, line, chips, tip);
  const node = el("section", { class: "input", "aria-label": "What goes in" }, el("div", { class: "choices" }, el("label", {}, el("span", { text: "Model" }), model), el("label", {}, el("span", { text: "Layer" }), layer), app.maskButton), about, el("div", { class: "given" }, picture.node, words));
  let shownFor = "";

  function chip(/** @type {any} */ token, /** @type {number} */ n) {
    const role = () => (store.get().way === "to" ? "query" : "key");
    const cell = () => ({ name: role(), index: [n] });
    return el("li", {}, el("button", { type: "button", class: "token", "aria-label": `Token ${n}: ${token.text}`, onclick: () => app.lock(cell()), onpointerenter: () => app.hover.set(cell()), onpointerleave: () => app.hover.set(null), onfocus: () => app.hover.set(cell()), onblur: () => app.hover.set(null) }, el("bdi", { text: token.text })));
  }

  return {
    node,
    picture,
    update() {
      const state = store.get();
      const scene = session.scene.get();
      const chosen = session.model();
      fillChoice(model, session.models.map((/** @type {any} */ m) => [m.id, m.name]), chosen.id);
      fillChoice(layer, chosen.layers.map((/** @type {any} */ l, /** @type {number} */ n) => [String(n), l.name]), String(state.layer));
      about.textContent = chosen.about;
      const text = chosen.kind === "text";
      field.hidden = !text;
      picture.node.hidden = chosen.kind !== "picture";
      const texts = chosen.examples.map((/** @type {any} */ e, /** @type {number} */ n) => [String(n), e.label]);
      const input = session.inputOf(state);
      const at = chosen.examples.findIndex((/** @type {any} */ e) => JSON.stringify(e.input) === JSON.stringify(input));
      examples.hidden = !texts.length;
      const home = chosen.kind === "picture" ? picture.tools : line;
      if (examples.parentElement !== home) home.append(examples);
      line.hidden = !text;
      words.hidden = chosen.kind === "picture";
      fillChoice(examples, [["-1", "Examples…"], ...texts], String(text ? -1 : at)); // the line above says which text it is
      if (text && document.activeElement !== field) {
        const wanted = state.ids && scene ? textOf(scene.tokens) : input.text ?? "";
        if (field.value !== wanted) field.value = wanted;
      }
      const key = scene ? JSON.stringify(scene.tokens) : "";
      if (scene && key !== shownFor) {
        shownFor = key;
        chips.replaceChildren(...(chosen.kind === "picture" ? [] : scene.tokens.map(chip)));
      }
      chips.hidden = chosen.kind === "picture" || !scene;
      picture.update();
      this.light();
    },
    /** Tokens take the colour of their weight for the token pointed at. */
    light() {
      const scene = session.scene.get();
      tip.hidden = true;
      if (!scene) return;
      const state = store.get();
      const to = state.way === "to";
      const token = app.chosenToken(to ? "query" : "key");
      const { shape: [H, Q, K], data } = scene.tensors.weights;
      const h = Math.min(state.head, H - 1);
      const { scale } = app.ink("weights");
      [...chips.children].forEach((item, n) => {
        const button = /** @type {HTMLElement} */ (item.firstElementChild);
        const weight = token === null ? 0 : to ? data[(h * Q + token) * K + n] : data[(h * Q + n) * K + token];
        const strong = weight > 0.45 * scale.high;
        button.style.setProperty("--weight", token === null ? "transparent" : cssColour(scale, weight, app.theme()));
        button.classList.toggle("strong", token !== null && strong);
        button.setAttribute("aria-pressed", String(token === n));
      });
      tip.textContent = token === null ? `Point at a token to see ${to ? "what it attends to" : "who attends to it"} in head ${h}; click to lock it.` : `The colour is the weight in head ${h} ${to ? "that this token gives to each" : "that each gives to this token"}.`;
      tip.hidden = chips.hidden;
      picture.light();
    },
  };
}

// The chosen step, large: its words, its formula, the heads to choose from, and the operation as a moving thing.

import { headColour } from "./colour.js";
import { el, segmented } from "./dom.js";
import { bitmap, fit, layout, pixels } from "./paint.js";
import { createPlayer } from "./player.js";
import { createConcatenate } from "./steps/concatenate.js";
import { createMix } from "./steps/mix.js";
import { createOutput } from "./steps/output.js";
import { createProject } from "./steps/project.js";
import { createScore } from "./steps/score.js";
import { createSplit } from "./steps/split.js";
import { createTranspose } from "./steps/transpose.js";

const MAKERS = [createProject, createSplit, createScore, createMix, createTranspose, createConcatenate, createOutput];

/** @param {any} app */
export function createStage(app) {
  /** @type {any[]} */
  const steps = [];
  const title = el("h2", { id: "stage-title" });
  const does = el("p", { class: "does" });
  const formula = el("code", { class: "formula" });
  const rail = el("div", { class: "rail", role: "group", "aria-label": "Heads of this layer" });
  const floor = el("div", { class: "floor" });
  const colour = segmented("Colour", [["values", "by value"], ["heads", "by head"]], (value) => app.store.set({ colour: value }));
  const player = createPlayer(app, () => draw());
  const missing = el("p", { class: "hint" });
  const node = el("section", { class: "stage", "aria-labelledby": "stage-title", id: "stage" },
    el("header", {}, title, formula, does), missing,
    el("div", { class: "tools" }, player.node, el("span", { class: "tool-label" }, el("span", { text: "Colour", "aria-hidden": "true" }), colour.node)),
    rail, floor);
  let current = 0;

  function stepOf(/** @type {number} */ number) {
    steps[number] ??= MAKERS[number - 1](app);
    return steps[number];
  }

  function draw() {
    const scene = app.session.scene.get();
    if (!scene || !current) return;
    app.spot(null);
    stepOf(current).update(scene, app.store.get(), player.t);
    app.lightUp();
  }

  function showRail(/** @type {any} */ scene) {
    const { H } = scene.layer.sizes;
    const state = app.store.get();
    if (rail.childElementCount !== H) {
      rail.replaceChildren(...Array.from({ length: H }, (_, h) => el("button", { type: "button", class: "head", onclick: () => app.chooseHead(h) }, el("canvas", { "aria-hidden": "true" }), el("span", { text: `head ${h}` }))));
    }
    const { weights } = scene.tensors;
    [...rail.children].forEach((button, h) => {
      const off = scene.off.has(h);
      button.setAttribute("aria-pressed", String(h === state.head));
      button.setAttribute("aria-label", `Head ${h}${off ? ", switched off" : ""}`);
      button.classList.toggle("off", off);
      button.style.setProperty("--hue", headColour(h, H, app.theme()));
      const view = { name: "weights", t: weights, rows: [1], columns: [2], fixed: { 0: h } };
      const ctx = fit(button.firstElementChild, 44, 44);
      ctx.drawImage(bitmap(pixels(view, layout(view), app.ink("weights"), 88, 88)), 0, 0, 44, 44);
    });
  }

  return {
    node,
    draw,
    player,
    grid: (/** @type {string} */ name) => stepOf(current).grids[name],
    /** A new scene or state. @param {boolean} walked whether the step was walked to */
    update(walked) {
      const scene = app.session.scene.get();
      const state = app.store.get();
      if (!scene) return;
      const step = stepOf(state.step);
      const words = scene.meta.steps[state.step - 1];
      title.textContent = `${words.number}. ${words.title}`;
      does.textContent = words.does;
      formula.textContent = words.formula;
      const lacking = (scene.meta.missing ?? []).filter((/** @type {string} */ name) => words.names.includes(name));
      missing.hidden = !lacking.length;
      missing.textContent = lacking.length ? `This model does not give ${lacking.join(", ")}.` : "";
      colour.show(app.coloursByHead() ? "heads" : "values");
      showRail(scene);
      if (current !== state.step) {
        current = state.step;
        floor.replaceChildren(step.node);
        player.begin(step.beats(scene), walked);
      } else {
        player.resize(step.beats(scene));
        if (!player.playing) draw(); // else the next tick does
      }
    },
    /** The light moved: redraw what it falls on, and nothing else. */
    light() {
      const scene = app.session.scene.get();
      if (!scene || !current) return;
      const step = stepOf(current);
      if (player.t === null && step.light) step.light(scene, app.store.get());
      for (const grid of Object.values(step.grids)) /** @type {any} */ (grid).draw();
    },
  };
}

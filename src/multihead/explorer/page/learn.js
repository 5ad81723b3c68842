// Learn: a guided walk, one idea a screen, with something to do on each that the live layer checks.

import { el } from "./dom.js";
import { causalLesson, unmaskedLesson } from "./lessons/masking.js";
import { afterLesson, insideLesson } from "./lessons/ordering.js";
import { patientLesson } from "./lessons/patient.js";
import { createProgress } from "./lessons/progress.js";
import { mixingLesson, ownLesson } from "./lessons/several.js";
import { shapesLesson } from "./lessons/shapes.js";
import { splitLesson } from "./lessons/splitting.js";
import { concatenateLesson, itemsLesson, wideLesson, widthLesson } from "./lessons/widths.js";

/** A lesson: what to read, what to look at, what to do; `tasks`: how many make it done.
 * @type {{id: string, title: string, tasks: number, make: (room: any) => {words: string[], picture: Node[], tasks: Node[], draw: () => void}}[]} */
export const LESSONS = [
  { id: "items", title: "What goes in", tasks: 1, make: itemsLesson },
  { id: "width", title: "One head's share", tasks: 1, make: widthLesson },
  { id: "wide", title: "Is a head as wide as the model?", tasks: 2, make: wideLesson },
  { id: "shapes", title: "Four matrices", tasks: 1, make: shapesLesson },
  { id: "split", title: "Each head alone", tasks: 2, make: splitLesson },
  { id: "inside", title: "Inside one head", tasks: 1, make: insideLesson },
  { id: "causal", title: "What the third word may see", tasks: 1, make: causalLesson },
  { id: "unmasked", title: "Take the mask away", tasks: 2, make: unmaskedLesson },
  { id: "concatenate", title: "Side by side", tasks: 1, make: concatenateLesson },
  { id: "after", title: "After the heads", tasks: 1, make: afterLesson },
  { id: "own", title: "Matrices of their own", tasks: 2, make: ownLesson },
  { id: "mixing", title: "Take W_o away", tasks: 2, make: mixingLesson },
  { id: "patient", title: "What is wrong with this layer?", tasks: 1, make: patientLesson },
];

/** @param {any} app */
export function createLearn(app) {
  const { store } = app;
  const progress = createProgress(() => globalThis.localStorage);
  const go = (/** @type {string} */ lesson) => store.set({ lesson }, { push: true });
  const begin = () => go((LESSONS.find((lesson) => !progress.has(lesson.id)) ?? LESSONS[0]).id);
  const button = el("button", { type: "button", id: "learn-button", onclick: () => (store.get().lesson ? go("") : begin()) });
  const title = el("h2", { id: "lesson-title", tabindex: "-1" });
  const place = el("p", { class: "hint", id: "lesson-place" });
  const steps = LESSONS.map((lesson, n) => el("button", { type: "button", class: "lesson-step", "data-lesson": lesson.id, onclick: () => go(lesson.id) }, String(n + 1)));
  const body = el("div", { class: "lesson" });
  const back = el("button", { type: "button", text: "← Back", onclick: () => walk(-1) });
  const next = el("button", { type: "button", class: "next", id: "lesson-next", onclick: () => walk(1) });
  const forget = el("button", { type: "button", class: "quiet", text: "Begin anew", onclick: () => {
    progress.forget();
    tasks.clear();
    shown = "";
    go(LESSONS[0].id);
    update();
  } });
  const kept = el("p", { class: "hint" });
  const node = el("main", { class: "learn", "aria-labelledby": "lesson-title", hidden: true }, el("nav", { "aria-label": "Lessons" }, el("ol", { class: "lesson-steps" }, ...steps.map((step) => el("li", {}, step)))), place, title, body, el("div", { class: "tools walk" }, back, next, forget), kept);
  /** @type {Map<string, Set<number>>} */
  const tasks = new Map();
  let shown = "";
  let theme = "";
  /** @type {any} */
  let made = null;

  const at = () => Math.max(0, LESSONS.findIndex((lesson) => lesson.id === store.get().lesson));

  function walk(/** @type {number} */ by) {
    const to = LESSONS[at() + by];
    go(to ? to.id : "");
  }

  function show() {
    const n = at();
    place.textContent = `Lesson ${n + 1} of ${LESSONS.length}${progress.count ? ` · ${progress.count} done` : ""}`;
    steps.forEach((step, s) => {
      const done = progress.has(LESSONS[s].id);
      step.classList.toggle("done", done);
      step.textContent = done ? "✓" : String(s + 1);
      step.title = LESSONS[s].title;
      step.setAttribute("aria-label", `Lesson ${s + 1}, ${LESSONS[s].title}${done ? ", done" : ""}`);
      if (s === n) step.setAttribute("aria-current", "step");
      else step.removeAttribute("aria-current");
    });
    back.disabled = n === 0;
    next.textContent = n + 1 < LESSONS.length ? "Next →" : "On to the explorer →";
    next.classList.toggle("ready", progress.has(LESSONS[n].id));
    forget.hidden = !progress.count;
    kept.textContent = progress.kept ? "" : "This browser keeps nothing for this page: what you have done is forgotten when you close it.";
  }

  /** A task of a lesson is done. @param {string} id @param {number} needed @param {number} task */
  function done(id, needed, task) {
    const found = tasks.get(id) ?? new Set();
    tasks.set(id, found.add(task));
    if (found.size >= needed) progress.add(id);
    show();
  }

  function update() {
    const { lesson } = store.get();
    button.textContent = lesson ? "Explore" : "Learn";
    button.setAttribute("aria-label", lesson ? "Leave the lessons" : "Learn, step by step");
    node.hidden = !lesson;
    if (!lesson) {
      shown = "";
      return;
    }
    const wanted = LESSONS[at()];
    if (shown !== wanted.id) {
      const moved = shown !== "";
      shown = wanted.id;
      theme = app.theme();
      made = wanted.make({ app, done: (/** @type {number} */ task) => done(wanted.id, wanted.tasks, task) });
      title.textContent = wanted.title;
      body.replaceChildren(el("div", { class: "lesson-words" }, ...made.words.map((/** @type {string} */ text) => el("p", { text })), ...made.tasks), ...(made.picture.length ? [el("div", { class: "lesson-picture" }, ...made.picture)] : []));
      body.classList.toggle("alone", !made.picture.length);
      made.draw();
      document.title = `${wanted.title} · Learn · multihead`;
      if (moved || document.activeElement === button) {
        title.focus({ preventScroll: true });
        scrollTo({ top: 0 });
      }
    } else if (theme !== app.theme()) {
      theme = app.theme();
      made.draw();
    }
    show();
  }

  return { button, node, update, progress };
}

// What moves: time in beats, with pause, step and speed. Under prefers-reduced-motion nothing moves by itself, and a step
// jumps to the next beat.

import { choice, el } from "./dom.js";

/** @param {any} app @param {(t: number | null) => void} draw told the beats gone by; null at rest, when all is there */
export function createPlayer(app, draw) {
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  let beats = 1;
  /** @type {number | null} */
  let t = null;
  let playing = false;
  let last = 0;
  const play = el("button", { type: "button", class: "play", onclick: () => (playing ? pause() : start()) });
  const back = el("button", { type: "button", text: "◂", "aria-label": "One beat back", title: "One beat back", onclick: () => jump(-1) });
  const on = el("button", { type: "button", text: "▸", "aria-label": "One beat on", title: "One beat on", onclick: () => jump(1) });
  const slider = el("input", { type: "range", min: "0", max: "1", step: "0.01", "aria-label": "How far the step has gone", oninput: () => {
    playing = false;
    t = Number(slider.value) >= beats ? null : Number(slider.value);
    show();
  } });
  const speed = choice("Speed", [["0.25", "¼×"], ["0.5", "½×"], ["1", "1×"], ["2", "2×"], ["4", "4×"]], "1", (value) => app.store.set({ speed: Number(value) }));
  const node = el("div", { class: "player", role: "group", "aria-label": "Play the step" }, play, back, on, slider, speed);

  function show() {
    play.textContent = playing ? "Pause" : "Play";
    slider.value = String(t ?? beats);
    slider.setAttribute("aria-valuetext", t === null ? "all done" : `beat ${Math.floor(t) + 1} of ${beats}`);
    speed.value = String(app.store.get().speed);
    draw(t);
  }

  function tick(/** @type {number} */ now) {
    if (!playing) return;
    const beat = Math.max(0.2, Math.min(0.9, 7 / beats)); // seconds
    t = (t ?? 0) + (Math.min(0.1, (now - last) / 1000) / beat) * app.store.get().speed;
    last = now;
    if (t >= beats) finish();
    else {
      show();
      requestAnimationFrame(tick);
    }
  }

  function start() {
    if (still.matches) {
      jump(1);
      return;
    }
    playing = true;
    t = t === null ? 0 : t;
    last = performance.now();
    show();
    requestAnimationFrame((now) => {
      last = now;
      tick(now);
    });
  }

  function pause() {
    playing = false;
    show();
  }

  function finish() {
    playing = false;
    t = null;
    show();
  }

  /** @param {number} by */
  function jump(by) {
    playing = false;
    const from = t === null ? (by > 0 ? -1 : beats) : by > 0 ? Math.floor(t) : Math.ceil(t);
    const next = from + by;
    t = next >= beats ? null : Math.max(0, next);
    show();
  }

  return {
    node,
    finish,
    get t() {
      return t;
    },
    get playing() {
      return playing;
    },
    /** A step with so many beats is on the stage; `go`: it was walked to, so let it move. @param {number} count @param {boolean} go */
    begin(count, go) {
      beats = count;
      slider.max = String(count);
      playing = false;
      t = null;
      if (go && !still.matches) start();
      else show();
    },
    /** The number of beats changed, with the input. @param {number} count */
    resize(count) {
      beats = count;
      slider.max = String(count);
      if (t !== null && t >= beats) t = null;
      slider.value = String(t ?? beats);
    },
  };
}

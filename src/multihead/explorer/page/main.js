// The page: put together, and kept in step with the state and the address.

import { createApp } from "./app.js";
import { createAsk } from "./ask.js";
import { createCompare } from "./compare.js";
import { eachFrame, el, segmented } from "./dom.js";
import { createHeads } from "./heads.js";
import { createInput, inputState } from "./input.js";
import { createLearn } from "./learn.js";
import { createMap } from "./map.js";
import { createMaskEditor } from "./mask_editor.js";
import { createNumber } from "./number.js";
import { createPredict } from "./predict.js";
import { selectionOf } from "./selection.js";
import { createSession } from "./session.js";
import { createShare, download } from "./share.js";
import { createStage } from "./stage.js";
import { createStore, formatState, parseState } from "./state.js";
import { createStrip } from "./strip.js";
import { createTable } from "./table.js";

const start = JSON.parse(document.getElementById("multihead-start")?.textContent || '{"mode":"server"}');
/** In a notebook: what the widget around this page offers. */
const host = start.mode === "widget" ? /** @type {any} */ (globalThis.frameElement)?.multihead : null;
const LOADS = ["model", "layer", "text", "sample", "pixels", "ids", "mask", "off", "with", "mixing"];

/** The whole page. @param {HTMLElement} root */
export function openPage(root) {
  /** @type {any} */
  let session = null;
  const python = createAsk({ ...start, host }, (trouble) => session?.trouble.set(trouble));
  const store = createStore(parseState(host ? host.state : location.hash.length > 1 ? location.hash : start.state ?? ""));
  session = createSession(store, python);
  const app = createApp(store, session, start.mode);
  const live = el("p", { id: "live", class: "unseen", "aria-live": "polite" });
  const table = createTable(download);
  const mask = createMaskEditor(app);
  app.maskButton = mask.button;
  app.openTable = table.open;
  app.live = eachFrame((/** @type {string} */ text) => {
    live.textContent = text;
  });
  const input = createInput(app);
  const strip = createStrip(app);
  const stage = createStage(app);
  const number = createNumber(app);
  const heads = createHeads(app);
  const predict = createPredict(app);
  const map = createMap(app);
  const compare = createCompare(app);
  const views = segmented("View", [["steps", "The seven steps"], ["map", "Map of the weights"]], (value) => store.set({ view: value }, { push: true }));
  views.node.classList.add("views");
  const learn = createLearn(app);
  const share = createShare(app, () => (store.get().lesson ? learn.node : stage.node));
  const theme = el("button", { type: "button", id: "theme", onclick: () => store.set({ theme: app.theme() === "dark" ? "light" : "dark" }) });
  const trouble = createTrouble(app);
  const keys = el("p", { class: "hint" });
  const provisional = el("p", { class: "hint provisional", role: "status" });
  root.replaceChildren(
    el("a", { class: "skip", href: "#stage", text: "To the stage", onclick: (/** @type {Event} */ event) => {
      event.preventDefault();
      /** @type {HTMLElement} */ (store.get().lesson ? learn.node.querySelector("h2") : stage.node.querySelector("canvas[tabindex]")).focus();
    } }),
    el("header", { class: "top" }, el("h1", {}, "multihead ", el("span", { text: "explorer" })), el("p", { class: "lede", text: "Multi-head attention in seven steps. Every number can be asked where it came from." }), el("div", { class: "top-tools" }, learn.button, theme, share.button)),
    share.panel, trouble.node,
    el("main", { id: "explore" }, input.node, mask.panel, mask.cheat, compare.node, views.node, map.node, strip.node, provisional, el("div", { class: "desk" }, stage.node, el("div", { class: "side" }, number.node)), predict.node, heads.node),
    learn.node,
    el("footer", {}, keys),
    number.brief, live, table.node);

  const light = () => {
    app.dim();
    strip.draw();
    stage.light();
    number.show();
    input.light();
  };
  app.lightUp = () => {
    strip.draw();
    if (stage.player.t === null) number.show(); // while a step moves, the number stands still
  };
  app.hover.subscribe(eachFrame(light));

  function dress() {
    document.documentElement.dataset.theme = app.theme();
    theme.textContent = app.theme() === "dark" ? "Light" : "Dark";
    theme.setAttribute("aria-label", app.theme() === "dark" ? "Light theme" : "Dark theme");
  }

  /** The lessons, or the page itself. */
  function room() {
    learn.update();
    keys.textContent = store.get().lesson ? "Keys: Tab goes from one thing to the next, Enter checks an answer, Esc leaves the lessons." : map.shows() ? "Keys: arrow keys move inside the map, + and − zoom, 0 shows all of it, Enter locks, Esc frees." : "Keys: ← and → walk the steps, arrow keys move inside a picture, Enter locks, Esc frees.";
    /** @type {HTMLElement} */ (root.querySelector("#explore")).hidden = Boolean(store.get().lesson);
  }

  // Until there is something in it the page is not seen: its parts would jump when their numbers come.
  root.classList.add("opening");
  const opened = () => root.classList.remove("opening");
  session.trouble.subscribe(opened);

  let walked = false;
  let wanted = false; // the stage is to come into sight
  app.toStage = () => {
    wanted = true;
  };

  /** The strip stays at the upper edge, so a step can be chosen from far below: what it shows must be seen. */
  function reveal() {
    const { top } = stage.node.getBoundingClientRect();
    const reading = number.node.contains(document.activeElement) && number.node.getBoundingClientRect().top > top + 300; // the panel, which stands below it
    if (wanted && !reading && (top < strip.node.getBoundingClientRect().bottom || top > 0.7 * innerHeight)) stage.node.scrollIntoView({ block: "start" });
    wanted = false;
  }

  function refresh() {
    dress();
    room();
    const mapped = map.shows();
    root.classList.toggle("mapped", mapped);
    root.classList.toggle("long", session.long.get() !== null);
    views.show(mapped ? "map" : "steps");
    if (session.long.get()) {
      input.update();
      map.update();
      opened();
      if (!store.get().lesson) document.title = `Map · ${session.model().name} · multihead`;
      return;
    }
    if (!session.scene.get() || session.scene.get().model !== session.model()) return; // another model was chosen, and its numbers are on their way
    app.dim();
    number.follow(store.get().at);
    input.update();
    mask.update();
    strip.update();
    stage.update(walked);
    walked = false;
    reveal();
    number.show();
    heads.update();
    predict.update();
    map.update();
    compare.update();
    opened();
    const scene = session.scene.get();
    const alone = !scene.exact && scene.edited && store.get().layer > 0;
    provisional.textContent = !alone ? "" : start.mode === "file" ? "The change is shown in this layer only: what it does to the layers before needs Python." : "";
    if (!store.get().lesson) document.title = `${scene.meta.steps[store.get().step - 1].title} · ${session.model().name} · multihead`;
  }
  const soon = eachFrame(refresh);

  const tellHost = eachFrame(() => host.changed(formatState(store.get()), selectionOf(app)));
  if (host) {
    host.follow = (/** @type {string} */ fragment) => fragment !== formatState(store.get()) && store.set(parseState(fragment));
    session.scene.subscribe(tellHost);
  }

  let fromHistory = false;
  store.subscribe((state, before, how) => {
    const fragment = `#${formatState(state)}`;
    if (host) tellHost();
    else if (!fromHistory && !how.quiet) {
      if (how.push) history.pushState(null, "", fragment);
      else history.replaceState(null, "", fragment);
    }
    if (state.step !== before.step) walked = wanted = true;
    if (LOADS.some((key) => /** @type {any} */ (state)[key] !== /** @type {any} */ (before)[key])) session.load();
    soon();
  });
  const fromAddress = () => {
    const wanted = parseState(location.hash);
    const go = (/** @type {any} */ pixels) => {
      fromHistory = true;
      app.hover.set(null);
      store.set({ ...wanted, ...pixels });
      fromHistory = false;
    };
    if (wanted.packed) input.picture.unpacked(wanted).then(go, session.complain);
    else go({});
  };
  addEventListener("popstate", fromAddress);
  addEventListener("hashchange", fromAddress);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", soon);

  session.scene.subscribe(soon);
  session.wall.subscribe(() => {
    heads.update();
    input.light();
  });
  for (const signal of [session.before, session.after, session.decoded, session.long]) signal.subscribe(soon);
  session.busy.subscribe((/** @type {number} */ n) => root.setAttribute("aria-busy", String(n > 0)));

  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
      if (!share.panel.hidden) share.close();
      else if (store.get().lesson) store.set({ lesson: "" }, { push: true });
      else if (store.get().at) app.free();
      else if (!mask.panel.hidden) mask.open(false);
      else stage.player.finish();
      app.hover.set(null);
    }
    const loose = document.activeElement === document.body || document.activeElement === null;
    if (loose && !store.get().lesson && !event.altKey && !event.ctrlKey && !event.metaKey && (event.key === "ArrowLeft" || event.key === "ArrowRight")) {
      event.preventDefault();
      strip.go(store.get().step + (event.key === "ArrowRight" ? 1 : -1));
    }
  });

  let aligned = false;
  function alignOnce() {
    if (!aligned) app.align();
    aligned = true;
  }

  async function begin() {
    dress();
    room();
    try {
      const first = await session.begin();
      const state = store.get();
      const chosen = session.models.find((/** @type {any} */ m) => m.id === state.model);
      const model = chosen ?? session.models.find((/** @type {any} */ m) => m.id === first.model);
      const named = state.text !== null || state.sample || state.pixels || state.packed || state.ids;
      const given = chosen || named ? {} : inputState(first.input);
      const layer = chosen ? state.layer : state.layer || first.layer;
      const wanted = { model: model.id, ...given, layer: Math.min(layer, model.layers.length - 1) };
      store.set({ ...wanted, ...(await input.picture.unpacked({ ...state, ...wanted })) });
      const loaded = session.load();
      session.scene.subscribe(alignOnce);
      await loaded;
    } catch (error) {
      session.complain(error);
    }
  }
  trouble.retry = () => (session.models.length ? session.load() : begin());
  begin();
  return { app, stage, mask, input, map, learn };
}

/** What went wrong, in words, with what to do. @param {any} app */
function createTrouble(app) {
  const says = el("p");
  const address = el("input", { type: "text", "aria-label": "The address that multihead explore printed", placeholder: "http://127.0.0.1:8421/?token=…" });
  const use = el("button", { type: "button", text: "Go on", onclick: () => {
    app.session.python.useToken(address.value);
    made.retry();
  } });
  const again = el("button", { type: "button", text: "Try again", onclick: () => made.retry() });
  const close = el("button", { type: "button", class: "quiet", text: "Dismiss", onclick: () => app.session.trouble.set(null) });
  const node = el("div", { class: "trouble", role: "alert", hidden: true }, says, address, use, again, close);
  const made = { node, retry: () => {} };
  app.session.trouble.subscribe((/** @type {any} */ trouble) => {
    node.hidden = !trouble;
    if (!trouble) return;
    says.textContent = trouble.message;
    address.hidden = use.hidden = trouble.kind !== "token";
    again.hidden = trouble.kind === "away" || trouble.kind === "token";
  });
  return made;
}

const root = document.getElementById("app");
if (root) /** @type {any} */ (globalThis).multihead = openPage(root);

// The page in a notebook: a frame of its own, so that neither's styles and names reach the other, which asks Python
// through the widget's messages. `render` is what anywidget calls.

/** Whether the notebook is dark: JupyterLab, VS Code and marimo each have a way to say so; else the system does. */
function isDark() {
  const { body, documentElement } = document;
  if (body.dataset.jpThemeLight) return body.dataset.jpThemeLight === "false";
  if (body.dataset.vscodeThemeKind) return !body.dataset.vscodeThemeKind.includes("light");
  if ([body, documentElement].some((node) => node.classList.contains("dark"))) return true;
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

/** @param {{model: any, el: HTMLElement}} widget @param {string} page the HTML of the page */
export function render({ model, el }, page) {
  const frame = document.createElement("iframe");
  frame.title = "multihead explorer";
  frame.style.width = "100%";
  frame.style.height = `${model.get("height")}px`;
  frame.style.border = "0";
  /** @type {Map<number, (answer: any) => void>} */
  const waiting = new Map();
  let last = 0;

  const receive = (/** @type {any} */ message, /** @type {DataView[]} */ buffers) => {
    const done = waiting.get(message.id);
    if (!done) return;
    waiting.delete(message.id);
    const view = buffers?.[0];
    const bytes = view && new Uint8Array(view.buffer, view.byteOffset, view.byteLength).slice();
    done({ ...message, bytes });
  };
  const dressed = (/** @type {string} */ state) => (state.includes("theme=") ? state : [state, isDark() ? "theme=dark" : "theme=light"].filter(Boolean).join("&"));
  const follow = () => host.follow(dressed(model.get("state")));
  const resize = () => {
    frame.style.height = `${model.get("height")}px`;
  };
  const host = {
    state: dressed(model.get("state")),
    /** Ask Python. @param {string} path @param {string | ArrayBuffer} body @returns {Promise<any>} */
    ask(path, body) {
      last += 1;
      const id = last;
      const answer = new Promise((resolve) => waiting.set(id, resolve));
      if (typeof body === "string") model.send({ id, path, body });
      else model.send({ id, path }, undefined, [body]);
      return answer;
    },
    /** The page has another state, or another selection. @param {string} state @param {any} selection */
    changed(state, selection) {
      model.set("state", state);
      model.set("selection", selection);
      model.save_changes();
    },
    /** Set by the page: the state was changed in Python. @type {(state: string) => void} */
    follow: () => {},
  };
  /** @type {any} */ (frame).multihead = host;
  model.on("msg:custom", receive);
  model.on("change:state", follow);
  model.on("change:height", resize);
  frame.srcdoc = page;
  el.replaceChildren(frame);
  return () => {
    model.off("msg:custom", receive);
    model.off("change:state", follow);
    model.off("change:height", resize);
    frame.remove();
  };
}

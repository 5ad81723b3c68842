// Small words for building the page. Everything that comes from outside goes in as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

/** @param {Element} node @param {Record<string, any>} given */
function dress(node, given) {
  for (const [key, value] of Object.entries(given)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "text") node.textContent = String(value);
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else node.setAttribute(key, String(value));
  }
}

/** An element: `text` sets its text, `onclick` and the like listen, all else are attributes.
 * @param {string} tag @param {Record<string, any>} [given] @param {...(Node | string | null | undefined | false)} children @returns {any} */
export function el(tag, given = {}, ...children) {
  const node = document.createElement(tag);
  dress(node, given);
  for (const child of children) if (child) node.append(child);
  return node;
}

/** The same for SVG. @param {string} tag @param {Record<string, any>} [given] @param {...Node} children @returns {any} */
export function svg(tag, given = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  dress(node, given);
  node.append(...children);
  return node;
}

/** A labelled choice. @param {string} label @param {[string, string][]} options value and text @param {string} value @param {(value: string) => void} change */
export function choice(label, options, value, change) {
  const select = el("select", { "aria-label": label, onchange: () => change(select.value) });
  fillChoice(select, options, value);
  return select;
}

/** @param {HTMLSelectElement} select @param {[string, string][]} options @param {string} value */
export function fillChoice(select, options, value) {
  const wanted = JSON.stringify(options);
  if (select.dataset.options !== wanted) {
    select.dataset.options = wanted;
    select.replaceChildren(...options.map(([v, text]) => el("option", { value: v, text })));
  }
  select.value = value;
}

/** A group of buttons of which one is pressed. @param {string} label @param {[string, string][]} options @param {(value: string) => void} change */
export function segmented(label, options, change) {
  const buttons = options.map(([value, text]) => el("button", { type: "button", text, "data-value": value, "aria-pressed": "false", onclick: () => change(value) }));
  const node = el("div", { class: "segmented", role: "group", "aria-label": label }, ...buttons);
  return {
    node,
    /** @param {string} value */
    show(value) {
      for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.value === value));
    },
  };
}

/** Run at most once a frame, with the newest arguments. @template {any[]} A @param {(...given: A) => void} fn @returns {(...given: A) => void} */
export function eachFrame(fn) {
  /** @type {A | null} */
  let waiting = null;
  return (...given) => {
    if (waiting === null) {
      requestAnimationFrame(() => {
        const last = /** @type {A} */ (waiting);
        waiting = null;
        fn(...last);
      });
    }
    waiting = given;
  };
}

/** Run when nothing has been asked for a while. @param {() => void} fn @param {number} wait milliseconds */
export function debounce(fn, wait) {
  /** @type {any} */
  let timer;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(fn, wait);
  };
}

// The one place that talks to Python: a server, or the answers that lie in a saved page.

import { canonical, readAnswer } from "./tensor.js";

/** What went wrong, in words. */
export class AskError extends Error {
  /** @param {string} message @param {string} kind */
  constructor(message, kind) {
    super(message);
    this.kind = kind;
  }
}

/** @typedef {{message: string, kind: string} | null} Trouble */
/** @typedef {(route: string, request: any, signal?: AbortSignal) => Promise<import("./tensor.js").Answer>} Ask */

/** @param {number} wait milliseconds @param {AbortSignal} [signal] */
function pause(wait, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, wait);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(new AskError("no longer wanted", "abort"));
    });
  });
}

/** @param {{mode: string, host?: any}} start @param {(trouble: Trouble) => void} report told when the server goes and when it is back */
export function createAsk(start, report) {
  let token = new URLSearchParams(location.search).get("token") ?? "";
  if (start.mode === "server") {
    try {
      token ||= sessionStorage.getItem("multihead-token") ?? "";
      if (token) sessionStorage.setItem("multihead-token", token);
    } catch {
      // a browser that keeps nothing still has the address
    }
  }
  /** @type {Map<string, Promise<import("./tensor.js").Answer>>} */
  const kept = new Map();

  /** In a notebook Python is asked through the widget. @param {any} host @param {string} path @param {BodyInit} body @param {AbortSignal} [signal] */
  async function throughWidget(host, path, body, signal) {
    const answer = await host.ask(path, typeof body === "string" ? body : await /** @type {Blob} */ (body).arrayBuffer());
    if (signal?.aborted) throw new AskError("no longer wanted", "abort");
    if (answer.error) throw new AskError(answer.error, answer.kind);
    return new Response(answer.bytes);
  }

  /** @param {string} path @param {BodyInit} body @param {AbortSignal} [signal] @returns {Promise<Response>} */
  async function post(path, body, signal) {
    if (start.host) return throughWidget(start.host, path, body, signal);
    for (let attempt = 1; ; attempt++) {
      let response;
      try {
        response = await fetch(path, { method: "POST", body, signal, headers: { "X-Multihead-Token": token } });
      } catch {
        if (signal?.aborted) throw new AskError("no longer wanted", "abort");
        report({ kind: "away", message: "The server does not answer. Start multihead explore again: this page goes on by itself." });
        await pause(1000 * Math.min(attempt, 5), signal);
        continue;
      }
      if (response.ok) {
        report(null);
        return response;
      }
      const { error, kind } = await response.json().catch(() => ({ error: `the server answered with status ${response.status}`, kind: "bug" }));
      if (kind === "busy" && attempt < 5) {
        await pause(300 * attempt, signal);
        continue;
      }
      if (kind === "token") report({ kind, message: error });
      throw new AskError(error, kind);
    }
  }

  /** @type {Ask} */
  async function ask(route, request, signal) {
    const key = `${route} ${canonical(request)}`;
    if (start.mode === "file") {
      const known = kept.get(key) ?? fromPage(key);
      kept.set(key, known);
      return known;
    }
    const response = await post(`api/${route}`, canonical(request), signal);
    return readAnswer(await response.arrayBuffer());
  }

  return {
    ask,
    mode: start.mode,
    /** Whether a saved page holds this answer. @param {string} route @param {any} request */
    has: (route, request) => start.mode !== "file" || findAnswer(`${route} ${canonical(request)}`) !== null,
    /** The bytes of a picture file, as the model sees them. @param {Blob} file @param {string} model */
    async picture(file, model) {
      if (start.mode === "file") throw new AskError("a saved page has no Python to read pictures with: run multihead explore", "file");
      const response = await post(`api/picture?model=${encodeURIComponent(model)}`, file);
      return readAnswer(await response.arrayBuffer());
    },
    /** The single file. @param {any} request @returns {Promise<Blob>} */
    async save(request) {
      if (start.mode === "file") throw new AskError("this page is the single file already: copy it as it is", "file");
      return (await post("api/save", canonical(request))).blob();
    },
    /** A new token, from the address that the server printed. @param {string} address */
    useToken(address) {
      token = /[?&]token=([^&#]+)/.exec(address)?.[1] ?? address.trim();
      try {
        sessionStorage.setItem("multihead-token", token);
      } catch {
        // kept for this page only
      }
      report(null);
    },
  };
}

function findAnswer(/** @type {string} */ key) {
  for (const element of document.querySelectorAll("script.multihead-answer")) {
    if (/** @type {HTMLElement} */ (element).dataset.key === key) return element;
  }
  return null;
}

async function fromPage(/** @type {string} */ key) {
  const element = findAnswer(key);
  if (!element) throw new AskError("this saved page does not hold that answer, and has no Python to ask: run multihead explore", "file");
  const packed = Uint8Array.from(atob(element.textContent ?? ""), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return readAnswer(await new Response(stream).arrayBuffer());
}

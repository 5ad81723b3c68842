// Where the numbers of a map come from: the weights of the scene, if they are at hand, or Python, tile by tile.

import { pooled } from "./tiles.js";

const CHUNK = 512; // names asked for at once
const MOST_CHUNKS = 64;

/** @typedef {{item: number, weight: number, text: string}} Link */
/** @typedef {{rows: number, columns: number, first: number, to: number, sample: boolean, data: Float32Array | null}} Part */
/** `far`: tiles come from Python, and large ones some rows at a time. `named`: items have more than numbers, so that words can be found.
 * @typedef {{key: string, Q: number, K: number, H: number, far: boolean, named: boolean,
 *   name: (role: "query" | "key", item: number) => string | null,
 *   tile: (head: number, place: import("./tiles.js").Place, pool: string, first: number, sample: boolean, signal: AbortSignal) => Promise<Part>,
 *   links: (head: number, role: "query" | "key", item: number, n: number, signal: AbortSignal, part: (links: Link[], done: number) => void) => Promise<void>,
 *   find: (text: string, signal: AbortSignal) => Promise<{count: number, places: number[]}>}} Source */

/** The n largest, the first of equals first. @param {Link[]} links @param {number} n */
export function largest(links, n) {
  return links.filter((link) => link.weight > 0).sort((a, b) => b.weight - a.weight || a.item - b.item).slice(0, n);
}

/** In which items a text begins; items stand side by side as they are, names with a space between them. @param {any[]} tokens @param {string} text */
export function findIn(tokens, text) {
  const between = tokens.some((t) => t.bytes) ? "" : " ";
  const parts = tokens.map((t) => (t.text.replaceAll("␣", " ").replaceAll("⏎", "\n") + between).toLowerCase());
  const needle = text.toLowerCase();
  const whole = parts.join("");
  const places = [];
  let [item, end] = [0, parts[0]?.length ?? 0];
  for (let at = whole.indexOf(needle); needle && at >= 0; at = whole.indexOf(needle, at + needle.length)) {
    while (at >= end) end += parts[++item].length;
    places.push(item);
  }
  return { count: places.length, places };
}

/** @param {any} scene @returns {Source} */
export function sourceOfScene(scene) {
  const { shape: [H, Q, K], data } = scene.tensors.weights;
  const names = { query: scene.labels, key: scene.keyLabels };
  return {
    key: `${scene.key} here`,
    Q,
    K,
    H,
    far: false,
    named: !scene.meta.grid && scene.labels.some((/** @type {string} */ text, /** @type {number} */ n) => text !== String(n)),
    name: (role, item) => names[role][item] ?? null,
    async tile(head, place, pool) {
      return pooled((q, k) => data[(head * Q + q) * K + k], place, Q, K, pool);
    },
    async links(head, role, item, n, signal, part) {
      const to = role === "query";
      const all = Array.from({ length: to ? K : Q }, (_, other) => ({ item: other, weight: data[(head * Q + (to ? item : other)) * K + (to ? other : item)], text: names[to ? "key" : "query"][other] }));
      part(largest(all, n), 1);
    },
    find: async (text) => findIn(scene.tokens, text),
  };
}

/** @param {any} python @param {{key: string, where: any, edits: any, Q: number, K: number, H: number, named: boolean}} long @param {() => void} changed told when names have come @returns {Source} */
export function sourceOfPython(python, long, changed) {
  const { model, layer, input } = long.where;
  const about = { model, layer, input, ...long.edits };
  /** @type {Map<number, string[] | null>} */
  const chunks = new Map();

  async function fetchNames(/** @type {number} */ chunk) {
    chunks.set(chunk, null);
    if (chunks.size > MOST_CHUNKS) chunks.delete(/** @type {number} */ (chunks.keys().next().value));
    try {
      const { meta } = await python.ask("items", { model, input, start: chunk * CHUNK, stop: (chunk + 1) * CHUNK });
      chunks.set(chunk, meta.tokens.map((/** @type {any} */ t) => t.text));
      changed();
    } catch {
      chunks.delete(chunk); // asked for again when it is next needed
    }
  }

  return {
    key: long.key,
    Q: long.Q,
    K: long.K,
    H: long.H,
    far: true,
    named: long.named,
    name(role, item) {
      if (role === "key" && long.K !== long.Q) return String(item);
      const chunk = Math.floor(item / CHUNK);
      if (!chunks.has(chunk)) fetchNames(chunk);
      return chunks.get(chunk)?.[item % CHUNK] ?? null;
    },
    async tile(head, place, pool, first, sample, signal) {
      const more = { ...(pool === "max" ? {} : { pool }), ...(first ? { first } : {}), ...(sample ? { sample: 1 } : {}) };
      const { meta, tensors } = await python.ask("tile", { ...about, head, ...place, ...more }, signal);
      return { rows: meta.rows, columns: meta.columns, first: meta.first, to: meta.to, sample: meta.sample, data: tensors.tile?.data ?? null };
    },
    async links(head, role, item, n, signal, part) {
      /** @type {Link[]} */
      let found = [];
      for (let first = 0; first < long.Q;) {
        const { meta } = await python.ask("links", { ...about, head, n, [role]: item, ...(first ? { first } : {}) }, signal);
        found = largest([...found, ...meta.links], n);
        first = meta.to;
        part(found, first / long.Q);
      }
    },
    async find(text, signal) {
      return (await python.ask("find", { model, input, text }, signal)).meta;
    },
  };
}

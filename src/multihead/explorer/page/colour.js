// Colour scales. Both are even steps in OKLab (Ottosson 2020), so that equal differences of numbers look equal;
// lightness of the sequential one only falls (light theme) or only rises (dark theme).

const STEPS = 256;

// Eight hues that stay apart for normal, protan, deutan and tritan eyes: at least 0.10 in OKLab between any two,
// with the matrices of Machado et al. 2009. Found by search; the test holds them to it.
export const HUES = {
  light: ["#05a5ec", "#b63c13", "#296e6e", "#f667a5", "#032aa1", "#9b9f04", "#8a4dd1", "#6e0453"],
  dark: ["#b5e3fd", "#ff750a", "#17b983", "#f086fd", "#366edc", "#e6e600", "#b13293", "#816322"],
};

/** @typedef {"light" | "dark"} Theme */

/** sRGB 0…255 of a colour in OKLab. @param {number[]} lab @returns {number[]} */
export function fromOklab([L, a, b]) {
  const l = (L + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (L - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (L - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return linear.map((c) => {
    const x = Math.min(1, Math.max(0, c));
    return 255 * (x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055);
  });
}

/** OKLab of an sRGB colour 0…255. @param {number[]} rgb @returns {number[]} */
export function toOklab(rgb) {
  const [r, g, b] = rgb.map((c) => {
    const x = c / 255;
    return x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  });
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return [
    0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s,
    1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s,
    0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s,
  ];
}

/** "#rrggbb" as numbers. @param {string} hex @returns {number[]} */
export function parseHex(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/** A path through OKLCH, resampled so that neighbours are equally far apart. @param {(t: number) => number[]} path */
function evenSteps(path, count = STEPS) {
  /** @type {number[][]} */
  const fine = [];
  for (let i = 0; i <= 2048; i++) {
    const [L, C, h] = path(i / 2048);
    fine.push([L, C * Math.cos((h * Math.PI) / 180), C * Math.sin((h * Math.PI) / 180)]);
  }
  const far = [0];
  for (let i = 1; i < fine.length; i++) {
    far.push(far[i - 1] + Math.hypot(...fine[i].map((c, n) => c - fine[i - 1][n])));
  }
  const table = new Uint8Array(count * 3);
  let at = 0;
  for (let i = 0; i < count; i++) {
    const want = (far[far.length - 1] * i) / (count - 1);
    while (at < far.length - 2 && far[at + 1] < want) at++;
    const share = (want - far[at]) / (far[at + 1] - far[at] || 1);
    const lab = fine[at].map((c, n) => c + share * (fine[at + 1][n] - c));
    fromOklab(lab).forEach((c, n) => (table[3 * i + n] = Math.round(c)));
  }
  return table;
}

const mix = (/** @type {number} */ a, /** @type {number} */ b, /** @type {number} */ t) => a + (b - a) * t;
const bump = (/** @type {number} */ t) => Math.sin(Math.PI * Math.min(1, Math.max(0, t)));

/** @type {Map<string, Uint8Array>} */
const made = new Map();

/** The table of a scale: 256 colours, three bytes each. @param {"sequential" | "diverging"} kind @param {Theme} theme */
export function table(kind, theme) {
  const name = `${kind} ${theme}`;
  const before = made.get(name);
  if (before) return before;
  const dark = theme === "dark";
  let found;
  if (kind === "sequential") {
    found = evenSteps((t) => [
      dark ? mix(0.17, 0.95, t) : mix(0.985, 0.3, t),
      (dark ? 0.02 : 0.004) + 0.12 * bump(mix(dark ? 0.06 : 0, 0.8, t)),
      dark ? mix(285, 100, t ** 1.2) : mix(150, 275, t ** 0.8),
    ]);
  } else {
    const arm = (/** @type {number} */ hue, /** @type {number} */ drift) =>
      evenSteps(
        (t) => [dark ? mix(0.15, 0.74, t) : mix(0.99, 0.46, t), 0.145 * Math.sqrt(t) * mix(0.92, 1, bump(t)), hue + drift * t],
        STEPS / 2,
      );
    const low = arm(dark ? 255 : 240, dark ? -25 : 22);
    const high = arm(dark ? 40 : 65, dark ? 35 : -30);
    found = new Uint8Array(STEPS * 3);
    for (let i = 0; i < STEPS / 2; i++) {
      found.set(low.subarray(3 * (STEPS / 2 - 1 - i), 3 * (STEPS / 2 - i)), 3 * i);
      found.set(high.subarray(3 * i, 3 * i + 3), 3 * (STEPS / 2 + i));
    }
  }
  made.set(name, found);
  return found;
}

/** Where a number stands in a table, 0…255. @param {number} value @param {number} low @param {number} high */
export function place(value, low, high) {
  const t = high > low ? (value - low) / (high - low) : 0;
  return Math.min(STEPS - 1, Math.max(0, Math.floor(t * STEPS)));
}

/** A scale for these numbers; `beyond`: some are larger than its end.
 * @typedef {{kind: "sequential" | "diverging", low: number, high: number, beyond?: boolean}} Scale */

/** @type {WeakMap<Float32Array, number>} */
const known = new WeakMap();

/** The largest size of a finite number. @param {Float32Array} data */
function largest(data) {
  let most = known.get(data) ?? -1;
  if (most >= 0) return most;
  most = 0;
  for (let i = 0; i < data.length; i++) {
    const size = Math.abs(data[i]);
    if (size > most && size < Infinity) most = size;
  }
  known.set(data, most);
  return most;
}

/** @type {WeakMap<Float32Array, number>} */
const ends = new WeakMap();
/** With so few keys 0…1 shows every weight, and changes of the mask keep their scale. */
export const FEW_KEYS = 32;
const SAMPLED = 4096; // weights that are looked at for the end of their scale

/** What all but one in fifty weights stay below; what is hidden does not count. @param {Float32Array} data */
function mostStayBelow(data) {
  let end = ends.get(data);
  if (end === undefined) {
    const by = Math.max(1, Math.floor(data.length / SAMPLED)) | 1; // odd, so that it meets all columns
    const some = Float32Array.from({ length: Math.ceil(data.length / by) }, (_, n) => data[n * by]).filter((w) => w > 0).sort();
    const at = (/** @type {number} */ share) => some[Math.floor(share * (some.length - 1))];
    end = some.length ? Math.max(at(0.98), 2 * at(0.5)) : 1; // weights that are all alike are half way
    ends.set(data, end);
  }
  return end;
}

/** The scale of weights: 0…1. Where they are given and nearly all are smaller than a half, as over many items, it ends
 * where they do: all would be pale. @param {Float32Array[]} tensors @returns {Scale} */
function scaleOfWeights(tensors) {
  const end = Math.max(0, ...tensors.map(mostStayBelow));
  if (!tensors.length || end >= 0.5) return { kind: "sequential", low: 0, high: 1 };
  const high = Number((end * 1.005).toPrecision(2));
  return { kind: "sequential", low: 0, high, beyond: tensors.some((t) => largest(t) > high) };
}

/** The scale of a tensor: from 0 on for weights, symmetric around zero for everything else. −∞ does not count.
 * @param {string} name @param {Float32Array[]} tensors the same scale for all of these @returns {Scale} */
export function scaleOf(name, ...tensors) {
  if (name === "weights") return scaleOfWeights(tensors);
  const most = Math.max(0, ...tensors.map(largest));
  const round = most > 0 ? Number(most.toPrecision(2)) : 1;
  const high = round < most ? round * 1.02 : round;
  return { kind: "diverging", low: -high, high };
}

/** The colour of a number: red, green and blue. @param {Scale} scale @param {number} value @param {Theme} theme */
export function rgbOf(scale, value, theme) {
  const i = 3 * place(value, scale.low, scale.high);
  return table(scale.kind, theme).subarray(i, i + 3);
}

/** The same as CSS. @param {Scale} scale @param {number} value @param {Theme} theme */
export function cssColour(scale, value, theme) {
  return `rgb(${rgbOf(scale, value, theme).join(" ")})`;
}

/** Which of the eight hues head h of H has: with more than eight heads, neighbours share one.
 * @param {number} h @param {number} heads */
export function hueOf(h, heads) {
  return heads <= 8 ? h : Math.floor((h * 8) / heads);
}

/** @param {number} h @param {number} heads @param {Theme} theme */
export function headColour(h, heads, theme) {
  return HUES[theme][hueOf(h, heads)];
}

/** Colours of OKLab blended by their shares, as red, green and blue. @param {number[][]} labs @param {number[]} shares */
export function blend(labs, shares) {
  const total = shares.reduce((sum, share) => sum + share, 0) || 1;
  const lab = [0, 0, 0];
  shares.forEach((share, n) => {
    for (let c = 0; c < 3; c++) lab[c] += (labs[n][c] * share) / total;
  });
  return fromOklab(lab).map(Math.round);
}

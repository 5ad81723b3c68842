// Colour scales: even steps, lightness that only goes one way, hues that colour-blind eyes can tell apart.
import assert from "node:assert/strict";
import { test } from "node:test";
import { load } from "./page.mjs";

const { HUES, blend, cssColour, fromOklab, headColour, hueOf, parseHex, place, scaleOf, table, toOklab } = await load("colour.js");
const lab = (colours, i) => toOklab([...colours.subarray(3 * i, 3 * i + 3)]);
const apart = (a, b) => Math.hypot(...a.map((c, n) => c - b[n]));

for (const theme of ["light", "dark"]) {
  test(`the sequential scale is even and its lightness monotone, ${theme}`, () => {
    const colours = table("sequential", theme);
    const steps = [];
    for (let i = 0; i < 255; i++) {
      const [a, b] = [lab(colours, i), lab(colours, i + 1)];
      const up = (b[0] - a[0]) * (theme === "dark" ? 1 : -1);
      assert.ok(up > -0.004, `lightness turns back at ${i}`); // bytes round by 0.002 each
      if (i % 8 === 0 && i + 8 <= 255) steps.push(apart(a, lab(colours, i + 8)));
    }
    assert.ok(Math.max(...steps) / Math.min(...steps) < 1.4, `steps from ${Math.min(...steps)} to ${Math.max(...steps)}`);
  });

  test(`the diverging scale has white or black at zero and arms of equal lightness, ${theme}`, () => {
    const colours = table("diverging", theme);
    const middle = lab(colours, 128)[0];
    assert.ok(theme === "light" ? middle > 0.98 : middle < 0.17, `lightness at zero is ${middle}`);
    for (let i = 0; i < 128; i++) assert.ok(Math.abs(lab(colours, 127 - i)[0] - lab(colours, 128 + i)[0]) < 0.02);
    assert.ok(apart(lab(colours, 0), lab(colours, 255)) > 0.2);
  });

  test(`eight hues stay apart for normal, protan, deutan and tritan eyes, ${theme}`, () => {
    const eyes = {
      normal: [1, 0, 0, 0, 1, 0, 0, 0, 1],
      protan: [0.152286, 1.052583, -0.204868, 0.114503, 0.786281, 0.099216, -0.003882, -0.048116, 1.051998],
      deutan: [0.367322, 0.860646, -0.227968, 0.280085, 0.672501, 0.047413, -0.01182, 0.04294, 0.968881],
      tritan: [1.255528, -0.076749, -0.178779, -0.078411, 0.930809, 0.147602, 0.004733, 0.691367, 0.3039],
    }; // Machado et al. 2009, severity 1
    const linear = (c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
    const gamma = (x) => 255 * (x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055);
    for (const [eye, m] of Object.entries(eyes)) {
      const seen = HUES[theme].map((hex) => {
        const rgb = parseHex(hex).map(linear);
        return toOklab([0, 1, 2].map((r) => gamma(Math.min(1, Math.max(0, m[3 * r] * rgb[0] + m[3 * r + 1] * rgb[1] + m[3 * r + 2] * rgb[2])))));
      });
      for (let a = 0; a < 8; a++) for (let b = 0; b < a; b++) assert.ok(apart(seen[a], seen[b]) >= (eye === "normal" ? 0.15 : 0.085), `${eye}: ${HUES[theme][a]} and ${HUES[theme][b]} are ${apart(seen[a], seen[b]).toFixed(3)} apart`);
    }
  });
}

test("OKLab and back", () => {
  for (const rgb of [[0, 0, 0], [255, 255, 255], [18, 120, 240]]) fromOklab(toOklab(rgb)).forEach((c, n) => assert.ok(Math.abs(c - rgb[n]) < 0.01));
});

test("weights are on 0…1; everything else is symmetric around zero, and −∞ does not stretch it", () => {
  assert.deepEqual(scaleOf("weights"), { kind: "sequential", low: 0, high: 1 });
  assert.equal(scaleOf("weights", Float32Array.from([0, 0.6, 0.7])).high, 1, "what is hidden does not count");
  const pale = Float32Array.from({ length: 30_000 }, (_, n) => (n % 100 === 0 ? 1 : 0.01 + 0.02 * ((n % 100) / 100)));
  const end = scaleOf("weights", pale);
  assert.ok(end.beyond && end.high >= 0.029 && end.high < 0.045, `ends at ${end.high}`);
  assert.equal(pale.filter((w) => w > end.high).length, 300, "one in a hundred is beyond it");
  assert.equal(scaleOf("weights", new Float32Array(9)).high, 1);
  assert.equal(scaleOf("weights", new Float32Array(5000).fill(0.0125)).high, 0.025, "weights that are all alike are half way");
  const scale = scaleOf("masked", Float32Array.from([-Infinity, 2, -3.21]), Float32Array.from([1]));
  assert.equal(scale.low, -scale.high);
  assert.ok(scale.high >= 3.21 && scale.high < 3.5);
  assert.equal(scaleOf("q", new Float32Array(3)).high, 1);
  assert.equal(place(0, -1, 1), 128);
  assert.equal(place(9, -1, 1), 255);
  assert.equal(place(-9, -1, 1), 0);
  assert.match(cssColour(scale, 0, "light"), /^rgb\(25\d 25\d 25\d\)$/);
});

test("more than eight heads share hues in groups, never in turn", () => {
  assert.deepEqual([0, 1, 2, 3, 14, 15].map((h) => hueOf(h, 16)), [0, 0, 1, 1, 7, 7]);
  assert.equal(headColour(5, 8, "light"), HUES.light[5]);
  const labs = ["#ff0000", "#0000ff"].map((hex) => toOklab(parseHex(hex)));
  assert.deepEqual(blend(labs, [1, 0]), [255, 0, 0]);
  assert.deepEqual(blend(labs, [3, 3]), blend(labs, [0.5, 0.5]));
});

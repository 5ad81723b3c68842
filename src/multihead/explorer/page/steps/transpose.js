// Step 5: positions move in front of heads again.

import { el } from "../dom.js";
import { createRegroup } from "../regroup.js";

/** @param {any} app */
export function createTranspose(app) {
  const move = createRegroup(app, "transpose");
  const missing = el("p", { class: "hint", text: "This model does not give what its heads put out." });
  const node = el("div", { class: "step" }, move.node, missing);
  return {
    node,
    grids: { transpose: move },
    beats: (/** @type {any} */ scene) => scene.layer.sizes.H,
    /** @param {any} scene @param {any} state @param {number | null} t */
    update(scene, state, t) {
      const { heads, transposed } = scene.tensors;
      missing.hidden = Boolean(heads && transposed);
      move.node.hidden = !missing.hidden;
      if (!heads || !transposed) return;
      const [H, N, D] = heads.shape;
      move.show({
        from: { name: "heads", t: heads, lie: "heads", index: (n, h, d) => [h, n, d] },
        to: { name: "transposed", t: transposed, lie: "items", index: (n, h, d) => [n, h, d] },
        N, H, D, labels: scene.labels, ink: app.ink("transposed", { along: "rows", size: N, first: 0 }), heads: H,
      }, t === null ? H : t);
    },
  };
}

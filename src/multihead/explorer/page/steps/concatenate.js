// Step 6: the heads slide side by side; an item is one row again.

import { el } from "../dom.js";
import { createRegroup } from "../regroup.js";

/** @param {any} app */
export function createConcatenate(app) {
  const move = createRegroup(app, "concatenate");
  const missing = el("p", { class: "hint", text: "This model does not give what its heads put out." });
  const node = el("div", { class: "step" }, move.node, missing);
  return {
    node,
    grids: { concatenate: move },
    beats: (/** @type {any} */ scene) => scene.layer.sizes.H,
    /** @param {any} scene @param {any} state @param {number | null} t */
    update(scene, state, t) {
      const { transposed, merged } = scene.tensors;
      missing.hidden = Boolean(transposed && merged);
      move.node.hidden = !missing.hidden;
      if (!transposed || !merged) return;
      const [N, H, D] = transposed.shape;
      move.show({
        from: { name: "transposed", t: transposed, lie: "items", index: (n, h, d) => [n, h, d] },
        to: { name: "merged", t: merged, lie: "merged", index: (n, h, d) => [n, h * D + d] },
        N, H, D, labels: scene.labels, ink: app.ink("merged", { along: "rows", size: N, first: 0 }), heads: H,
      }, t === null ? H : t);
    },
  };
}

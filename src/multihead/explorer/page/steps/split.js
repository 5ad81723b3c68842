// Step 2: heads move in front of positions, and each head becomes a problem of its own.

import { el, segmented } from "../dom.js";
import { createRegroup } from "../regroup.js";

/** @param {any} app */
export function createSplit(app) {
  const part = segmented("Which projection", [["q", "q"], ["k", "k"], ["v", "v"]], (value) => app.store.set({ part: value }));
  const move = createRegroup(app, "split");
  const turn = el("p", { class: "hint" });
  const node = el("div", { class: "step" }, el("div", { class: "tools" }, part.node), move.node, turn);
  return {
    node,
    grids: { split: move },
    beats: (/** @type {any} */ scene) => scene.layer.sizes.H,
    /** @param {any} scene @param {any} state @param {number | null} t */
    update(scene, state, t) {
      const name = state.part;
      const [from, to] = [scene.tensors[name], scene.tensors[`${name}_heads`]];
      part.show(name);
      move.node.hidden = !from || !to;
      const { rope, qk_norm } = scene.layer;
      const turned = [qk_norm && "is brought to one length (QK-norm)", rope && `turns by its position (RoPE, the first ${rope.dim} of ${to?.shape[2]} numbers)`].filter(Boolean);
      turn.hidden = Boolean(from && to) && (name === "v" || !turned.length);
      turn.textContent = !from || !to ? `This model does not give ${name}: it cannot be shown on its way.` : `On its way each row also ${turned.join(" and ")}: the numbers after the move.`;
      if (!from || !to) return;
      const [N, H, D] = from.shape;
      move.show({
        from: { name, t: from, lie: "items", index: (n, h, d) => [n, h, d] },
        to: { name: `${name}_heads`, t: to, lie: "heads", index: (n, h, d) => [h, n, d] },
        N, H, D, labels: name === "q" ? scene.labels : scene.keyLabels, ink: app.ink(`${name}_heads`, { along: "rows", size: N, first: 0 }), heads: H,
      }, t === null ? H : (t * H) / scene.layer.sizes.H);
    },
  };
}

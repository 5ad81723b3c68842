"""Tensor parallelism: each rank has some of the heads, their projections and their caches.

x is the same on all ranks, and so is the output: one sum in the forward pass, one in the backward pass.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from multihead.distributed.agree import agree
from multihead.distributed.attention import draw_seed
from multihead.distributed.blocks import cut_heads, cut_scores
from multihead.distributed.partial import Call
from multihead.distributed.split import split_heads
from multihead.distributed.styles import HeadColumns, HeadRows, Shard, SharedNorm, ToRanks, keep_part
from multihead.distributed.ulysses import attend_all
from multihead.distributed.wire import Wire
from multihead.layer import MultiHeadAttention
from multihead.layer.call import LayerCall
from multihead.lens import Lens
from multihead.masks import Mask, as_mask
from multihead.masks.intervals import Visible


class HeadsSharded(MultiHeadAttention):
    """A layer that `shard_heads` has been called on: it has some of the heads."""

    heads_wire: Wire
    own_heads: tuple[int, int]  # this rank's query heads
    seed: int = 0  # of the call under way

    @property
    def first_head(self) -> int:
        return self.own_heads[0]

    def cut_heads(self, mask: Mask | None) -> Mask | None:
        """A mask of all heads, for this rank's."""
        return cut_heads(mask, self.own_heads, self.sizes.H)

    def cut_bias(self, bias: Tensor | None) -> Tensor | None:
        """A bias of all heads, for this rank's."""
        per_head = bias is not None and bias.dim() >= 3 and bias.shape[-3] == self.sizes.H
        return cut_scores(bias, None, None, self.own_heads) if per_head else bias

    def run(self, call: LayerCall) -> Tensor:
        """As the layer's, with the same arguments on all ranks; masks and biases of all heads are cut."""
        x, context, values, bias = call.x, call.context, call.values, call.bias
        wire, s, dropout = self.heads_wire, self.sizes, self.dropout if self.training else 0.0
        m = x.shape[-2] if context is None else context.shape[-2]
        options = (self.scale, self.softcap, dropout, self.sinks is None, bias is None, str(self.rope))
        grad = torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.parameters()))
        same = {"mask": as_mask(call.mask), "options": options, "gradient": grad}
        sizes = {"B": x.shape[0] if x.dim() == 3 else 1, "H": s.H, "G": s.G, "D": s.D, "V": s.V}
        where: dict[str, Any] = {"dtype": x.dtype, "device": x.device, "seed": draw_seed(dropout)}
        self.seed = agree(wire, "heads", x.shape[-2], m, sizes, same, **where, slices=False).seed
        if torch.is_grad_enabled():
            x = ToRanks.apply(x, wire)
            context, values = (None if t is None else ToRanks.apply(t, wire) for t in (context, values))
        mask = self.cut_heads(as_mask(call.mask))
        return super().run(replace(call, x=x, context=context, mask=mask, bias=self.cut_bias(bias), values=values))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, **options: Any) -> Tensor:  # type: ignore[override]
        """Steps 3 and 4 of this rank's heads."""
        if not options["dropout"]:
            return super().attend(q, k, v, visible, **options)  # type: ignore[return-value]
        sinks, bias, dropout, backend = (options.pop(name) for name in ("sinks", "bias", "dropout", "backend"))
        call = Call(visible, options["scale"], options["softcap"], dropout, self.seed, backend, self.first_head)
        return attend_all(call, q, k, v, sinks, bias, (0, q.shape[2]))

    def look_at(self, call: LayerCall) -> Lens:
        """A lens on the weights of all heads, the same on every rank; every rank has to call it."""
        mask, bias = as_mask(call.mask), call.bias
        if self.cut_heads(mask) is not mask or self.cut_bias(bias) is not bias:
            raise ValueError("mask or bias differs by head: a lens on sharded heads expects one for all heads")
        return super().look_at(call)

    def lens(self, q: Tensor, k: Tensor, visible: Visible, **options: Any) -> Lens:  # type: ignore[override]
        """A lens on the heads of all ranks."""
        wire, sinks = self.heads_wire, options["sinks"]
        queries, keys = split_heads(self.sizes.H, self.sizes.G, wire.size)
        if sinks is not None:
            options["sinks"] = Shard(wire, 0, self.sizes.H, queries).gather(sinks)
        q_all = Shard(wire, 1, self.sizes.H, queries).gather(q)
        k_all = Shard(wire, 1, self.sizes.G, keys).gather(k)
        return super().lens(q_all, k_all, visible, **options)


def shard_heads(layer_or_model: nn.Module, mesh: DeviceMesh | dist.ProcessGroup) -> nn.Module:
    """Give each rank of `mesh` some of the heads, in place; x and the output stay the same on all ranks.

    Heads need not divide by the ranks. With fewer key/value heads than ranks, several ranks have the same one. Sinks
    and caches go with the heads; QK-norm and the output's bias stay whole. `state_dict` is that of the whole layer, and
    every rank has to call it.

    Args:
        layer_or_model: a `MultiHeadAttention`, a model that holds some, or a Hugging Face model, whose attention
            modules are cut and the rest left as it is (`tp_plan` may have cut that).
        mesh: a `DeviceMesh` of one dimension (`mesh["tp"]`), or a process group.

    >>> mesh = torch.distributed.init_device_mesh("cpu", (2,))  # doctest: +SKIP
    >>> y = mh.distributed.shard_heads(layer, mesh)(x)  # the same on both ranks # doctest: +SKIP
    """
    wire = Wire(mesh)
    device_mesh = mesh if isinstance(mesh, DeviceMesh) else DeviceMesh.from_group(mesh, "cpu")
    found = [m for m in layer_or_model.modules() if isinstance(m, MultiHeadAttention)]
    if not found:
        from multihead.distributed.hf import shard_attentions

        return shard_attentions(layer_or_model, device_mesh)
    for layer in found:
        if isinstance(layer, HeadsSharded):
            raise ValueError("the layer is sharded by heads already: expected one that is not")
        split_heads(layer.sizes.H, layer.sizes.G, wire.size)  # refuses more ranks than heads
    for layer in found:
        _shard_layer(layer, device_mesh, wire)
    return layer_or_model


def _shard_layer(layer: MultiHeadAttention, mesh: DeviceMesh, wire: Wire) -> None:
    H, G = layer.sizes.H, layer.sizes.G
    queries, _ = split_heads(H, G, wire.size)
    plan = {
        "q_proj": HeadColumns(H, G, "queries", add_gradients=False),
        "k_proj": HeadColumns(H, G, "keys", add_gradients=False),
        "v_proj": HeadColumns(H, G, "keys", add_gradients=False),
        "o_proj": HeadRows(H, G),
    }
    parallelize_module(layer, mesh, plan)
    if layer.sinks is not None:
        keep_part(layer, "sinks", Shard(wire, 0, H, queries))
    for norm in (layer.q_norm, layer.k_norm):
        if norm is not None:
            norm.__class__ = SharedNorm
            norm.wire = wire  # type: ignore[assignment]
    bases = (HeadsSharded, type(layer))
    if hasattr(layer, "sharding"):  # by sequence already: that comes first
        raise ValueError("the layer is sharded by sequence already: call shard_heads first, then shard_sequence")
    layer.__class__ = type("HeadsSharded" + type(layer).__name__, bases, {})
    layer.heads_wire, layer.own_heads = wire, queries[wire.rank]  # type: ignore[assignment]

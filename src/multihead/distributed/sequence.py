"""Context parallelism: the same layer on a slice of the sequence for each rank.

The layer's projections, norms, RoPE, hooks and edits work on the slice as they would on the whole, because all of them
treat each position alike; only steps 3 and 4 need the others. Positions and masks are those of the whole sequence.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from multihead.cache import Cache, ContextCache
from multihead.distributed.agree import Agreed, agree
from multihead.distributed.attention import Sharding, attend_slices, draw_seed
from multihead.distributed.decode import SpreadCache, attend_spread
from multihead.distributed.exchange import ToHeads
from multihead.distributed.heads import HeadsSharded
from multihead.distributed.schedule import slices
from multihead.distributed.wire import Wire
from multihead.layer import MultiHeadAttention
from multihead.layer.call import Inside, LayerCall
from multihead.lens import Lens
from multihead.masks import Mask, as_mask
from multihead.masks.intervals import Frame, Visible
from multihead.positions import NTKScaling


@dataclass(frozen=True)
class Sliced(Visible):
    """Stands for the mask of the whole sequence while a layer computes on a slice; `attend` reads it."""

    mask: Mask | None = None
    agreed: Agreed | None = None
    cache: SpreadCache | None = None


@dataclass(frozen=True, eq=False)
class OfTheWhole(Mask):
    """A mask of the whole sequence, handed through a layer that sees a slice of it."""

    mask: Mask | None
    agreed: Agreed
    cache: SpreadCache | None = None

    def lower(self, frame: Frame) -> Visible:
        everything = frame.everything
        return Sliced(frame.Q, frame.K, everything.start, everything.stop, None, self.mask, self.agreed, self.cache)


class SequenceSharded(MultiHeadAttention):
    """A layer that `shard_sequence` has been called on: `x` is this rank's slice."""

    sharding: Sharding

    def run(self, call: LayerCall) -> Tensor:
        """As the layer's, for a slice of x (context, values) on each rank; the mask is that of the whole sequence."""
        if self.inside is not Inside.NOTHING:
            raise ValueError("scores, masked and weights are patched or traced: a rank of a sharded sequence has none")
        return super().run(self._open(call))

    def look_at(self, call: LayerCall) -> Lens:
        """A lens on the weights of the whole sequence, the same on every rank; every rank has to call it.

        The queries and keys of all ranks are gathered, so it takes memory for the whole sequence, but not for weights.
        """
        if isinstance(call.cache, SpreadCache):
            raise ValueError("a lens on a spread cache is not offered: look at the whole sequence without a cache")
        return super().look_at(self._open(call))

    def _open(self, call: LayerCall) -> LayerCall:
        """Agree with the other ranks: the call of the layer on this slice, with its mask and where its tokens stand."""
        x, context, cache = call.x, call.context, call.cache
        positions, context_positions = call.positions, call.context_positions
        if call.lengths is not None:
            raise ValueError(
                "lengths= counts tokens of one slice: expected mask=Padding(lengths) of the whole sequence"
            )
        if isinstance(cache, Cache) and not isinstance(cache, SpreadCache):
            raise ValueError("cache holds the keys of one process: expected one from the sharded layer's new_cache()")
        if isinstance(cache, SpreadCache) and cache.wire is not self.sharding.wire:
            raise ValueError("cache is spread over other ranks than the layer: expected one from its own new_cache()")
        n = x.shape[-2]
        m = cache.k.shape[2] if isinstance(cache, ContextCache) else n if context is None else context.shape[-2]
        decoding = isinstance(cache, SpreadCache) and not cache.filling
        agreed = self._agree(x, n, m, as_mask(call.mask), call.bias, slices=not decoding, decoding=decoding)
        if self.rope is not None and not decoding:
            first = slices(agreed.queries)[self.sharding.wire.rank][0]
            if positions is None:
                positions = torch.arange(first, first + n, device=x.device)
            if context is not None and context_positions is None:
                first = slices(agreed.keys)[self.sharding.wire.rank][0]
                context_positions = torch.arange(first, first + m, device=x.device)
        spread = cache if decoding and isinstance(cache, SpreadCache) else None
        mask = as_mask(call.mask)
        mask = self.cut_heads(mask) if isinstance(self, HeadsSharded) else mask
        whole = OfTheWhole(mask, agreed, spread)
        return replace(call, mask=whole, positions=positions, context_positions=context_positions)

    def _agree(
        self, x: Tensor, n: int, m: int, mask: Mask | None, bias: Tensor | None, slices: bool, decoding: bool
    ) -> Agreed:
        s, dropout = self.sizes, self.dropout if self.training else 0.0
        rows = x.shape[0] if x.dim() == 3 else 1
        heads = {"H": _features(self.q_proj, s.H * s.D) // s.D, "G": _features(self.k_proj, s.G * s.D) // s.D}
        grad = torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.parameters()))
        options = (self.scale, self.softcap, dropout, self.sinks is None, bias is None, str(self.rope))
        same = {"mask": mask, "options": options, "gradient": grad}
        method = "decode" if decoding else self.sharding.method
        sizes = {"B": rows, **heads, "D": s.D, "V": s.V}
        dtype = x.dtype if x.dtype.is_floating_point else torch.float32
        where: dict[str, Any] = {"dtype": dtype, "device": x.device, "seed": draw_seed(dropout)}
        return agree(self.sharding.wire, method, n, m, sizes, same, **where, slices=slices)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, **options: Any) -> Tensor:  # type: ignore[override]
        """Steps 3 and 4 over all slices."""
        assert isinstance(visible, Sliced)
        assert visible.agreed is not None
        if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:
            q, k, v = (t.to(torch.get_autocast_dtype(q.device.type)) for t in (q, k, v))
        first_head = self.first_head if isinstance(self, HeadsSharded) else 0
        if visible.cache is not None:
            return attend_spread(visible.cache, q, k, v, visible.mask, **options)
        return attend_slices(self.sharding, visible.agreed, q, k, v, visible.mask, first_head=first_head, **options)

    def lens(self, q: Tensor, k: Tensor, visible: Visible, **options: Any) -> Lens:  # type: ignore[override]
        """A lens on all slices."""
        assert isinstance(visible, Sliced)
        assert visible.agreed is not None
        agreed, wire, bias = visible.agreed, self.sharding.wire, options["bias"]
        Q = sum(agreed.queries)
        if bias is not None and bias.dim() >= 2 and bias.shape[-2] not in (1, Q):
            raise ValueError(f"bias has {bias.shape[-2]} rows: a lens on the whole sequence expects rows for all Q={Q}")
        q = ToHeads.apply(q, wire, slices(agreed.queries), ((0, q.shape[1]),) * wire.size)
        k = ToHeads.apply(k, wire, slices(agreed.keys), ((0, k.shape[1]),) * wire.size)
        whole, _ = self.sharding.lowered(visible.mask, agreed, q.shape[0], q.shape[1], q.device, False)
        return super().lens(q, k, whole, **options)

    def new_cache(self, batch: int = 1, capacity: int | None = None, **more: Any) -> Cache | ContextCache:  # type: ignore[override]
        """A cache whose tokens are spread over the ranks, `capacity` on each; or one of a slice of a context."""
        context = more.get("context")
        if context is not None:
            n = context.shape[-2]
            if self.rope is not None and more.get("context_positions") is None:
                agreed = self._agree(context, n, n, None, None, slices=True, decoding=False)
                first = slices(agreed.keys)[self.sharding.wire.rank][0]
                more["context_positions"] = torch.arange(first, first + n, device=context.device)
            return super().new_cache(**more)
        if more.pop("window", None) is not None:
            raise ValueError("window= is for one process: a spread cache keeps all keys, give mask=Causal(window=…)")
        return SpreadCache(self.sharding.wire, super().new_cache(batch, capacity, **more))


def _features(projection: nn.Module, usual: int) -> int:
    return getattr(projection, "out_features", usual)


def shard_sequence(
    layer_or_model: nn.Module, mesh: DeviceMesh | dist.ProcessGroup, method: str = "ring", *, balance: bool = True
) -> nn.Module:
    """Cut the sequence over the ranks of `mesh`, in place: each rank then calls the layer with its slice of x.

    Args:
        layer_or_model: a `MultiHeadAttention`, a model that holds some, or a Hugging Face model on
            `attn_implementation="multihead"`.
        mesh: a `DeviceMesh` of one dimension (`mesh["cp"]`), or a process group.
        method: "ring" (memory N/ranks, transfers under way while it computes), "ulysses" (two exchanges, at most as
            many ranks as heads) or "gather" (all keys and values on every rank).
        balance: let ranks with little to do compute some of the others' queries ("ring").

    Returns:
        the same module. Its parameters stay whole on every rank, and their gradients are this rank's share: sum them
        (`sum_gradients`), or wrap the model in DistributedDataParallel or FSDP2 over the same ranks.

    >>> mesh = torch.distributed.init_device_mesh("cpu", (2,))  # doctest: +SKIP
    >>> layer = mh.distributed.shard_sequence(layer, mesh)  # doctest: +SKIP
    >>> y = layer(x.tensor_split(2, dim=1)[rank], mask=mh.Causal())  # this rank's slice # doctest: +SKIP
    """
    sharding = Sharding.of(mesh, method, balance)
    found = [m for m in layer_or_model.modules() if isinstance(m, MultiHeadAttention)]
    if not found:
        from multihead.distributed.hf import shard_model

        return shard_model(layer_or_model, sharding)
    for layer in found:
        if isinstance(layer, SequenceSharded):
            raise ValueError(f"{type(layer).__name__} is sharded by sequence already: expected a layer that is not")
        scaling = None if layer.rope is None else layer.rope.scaling
        if isinstance(scaling, NTKScaling) and scaling.original_length is not None:
            raise ValueError(
                f"rope={layer.rope}: dynamic scaling turns keys by the length of the slice, not of the whole"
            )
    for layer in found:
        layer.__class__ = type("SequenceSharded" + type(layer).__name__, (SequenceSharded, type(layer)), {})
        layer.sharding = sharding  # type: ignore[assignment]
    return layer_or_model


@torch.no_grad()
def sum_gradients(module: nn.Module, mesh: DeviceMesh | dist.ProcessGroup) -> None:
    """Add up the gradients of replicated parameters over the ranks that have a slice of the sequence each.

    >>> loss.backward()  # doctest: +SKIP
    >>> mh.distributed.sum_gradients(model, mesh)  # doctest: +SKIP
    """
    wire = Wire(mesh)
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        same = [grad for grad in grads if grad.dtype == dtype]
        total = wire.add_up(torch.cat([grad.flatten() for grad in same]))
        for grad, part in zip(same, total.split([grad.numel() for grad in same])):
            grad.copy_(part.view_as(grad))

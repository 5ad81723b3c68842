"""Tensor parallelism by heads as `ParallelStyle`s, for `parallelize_module` and plans of one's own.

Parameters are plain tensors of this rank's heads, not DTensors: heads need not divide by the ranks, a key/value head
may be on several of them, and the native kernel reads them as they are. `state_dict` gathers them, so that what is
saved is the whole layer; `load_state_dict` takes a whole one.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F

from multihead.distributed.blocks import Range
from multihead.distributed.split import split_heads
from multihead.distributed.wire import Wire

SHARDS = "_multihead_shards"  # attribute of a module: which of its parameters are cut, and how


@dataclass(frozen=True)
class Shard:
    """How a parameter is cut: along an axis of `size`, rank r has `parts[r]`; several ranks may have the same."""

    wire: Wire
    axis: int
    size: int
    parts: tuple[Range, ...]

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part."""
        first, last = self.parts[self.wire.rank]
        return whole.narrow(self.axis, first, last - first).clone()

    def gather(self, part: Tensor) -> Tensor:
        """The whole from all ranks' parts; every rank has to call it."""
        part = part.full_tensor() if isinstance(part, DTensor) else part
        part = part.detach().contiguous()
        shapes = [list(part.shape) for _ in self.parts]
        for shape, (first, last) in zip(shapes, self.parts):
            shape[self.axis] = last - first
        wire = self.wire
        coming = {peer: wire.receive(tuple(shapes[peer]), part.dtype, part.device, peer) for peer in wire.others}
        for peer in wire.others:
            wire.send(part, peer)
        whole = part.new_empty([self.size if n == self.axis else size for n, size in enumerate(part.shape)])
        for rank, (first, last) in enumerate(self.parts):
            whole.narrow(self.axis, first, last - first).copy_(part if rank == wire.rank else coming[rank].wait())
        wire.flush()
        return whole

    def add_shared(self, part: Tensor) -> Tensor:
        """This rank's part plus that of the ranks that have the same."""
        wire, mine = self.wire, self.parts[self.wire.rank]
        sharers = [peer for peer in wire.others if self.parts[peer] == mine]
        wide = part.detach().to(torch.promote_types(part.dtype, torch.float32)).contiguous()
        coming = {peer: wire.receive(tuple(wide.shape), wide.dtype, wide.device, peer) for peer in sharers}
        for peer in sharers:
            wire.send(wide, peer)
        total = torch.zeros_like(wide)
        for rank in sorted([*sharers, wire.rank]):  # in one order, so that sharers stay the same to the last bit
            total += wide if rank == wire.rank else coming[rank].wait()
        wire.flush()
        return total.to(part.dtype)


class ToRanks(torch.autograd.Function):
    """The same on all ranks; the gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, wire: Wire) -> Tensor:
        ctx.wire = wire
        return t.view_as(t)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return ctx.wire.add_up(d), None


class SumOfRanks(torch.autograd.Function):
    """The sum over the ranks; each rank's gradient is that of the sum."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, wire: Wire) -> Tensor:
        return wire.add_up(t)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return d, None


class ToSharers(torch.autograd.Function):
    """A parameter that several ranks have; the gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, shard: Shard) -> Tensor:
        ctx.shard = shard
        return t.view_as(t)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return ctx.shard.add_shared(d), None


class SharedColumns(nn.Linear):
    """A column-wise projection of key/value heads that several ranks have."""

    def forward(self, x: Tensor) -> Tensor:
        shards = getattr(self, SHARDS)
        bias = None if self.bias is None else ToSharers.apply(self.bias, shards["bias"])
        return F.linear(x, ToSharers.apply(self.weight, shards["weight"]), bias)


class Rows(nn.Linear):
    """A row-wise projection: the ranks' products are added up, then the bias, once."""

    def forward(self, x: Tensor) -> Tensor:
        total = SumOfRanks.apply(F.linear(x, self.weight), getattr(self, SHARDS)["weight"].wire)
        return total if self.bias is None else total + self.bias


class SharedNorm(nn.RMSNorm):
    """QK-norm of this rank's heads with a weight that all heads share."""

    wire: Wire

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else ToRanks.apply(self.weight, self.wire)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def keep_part(module: nn.Module, name: str, shard: Shard) -> None:
    """Leave a module this rank's part of a parameter; its state_dict goes on to be that of the whole."""
    whole = getattr(module, name)
    if whole is None:
        return
    setattr(module, name, nn.Parameter(shard.cut(whole.detach()), requires_grad=whole.requires_grad))
    shards: dict[str, Shard] = module.__dict__.setdefault(SHARDS, {})
    if not shards:
        module.register_state_dict_post_hook(_gather_state)
        module.register_load_state_dict_pre_hook(_cut_state)
    shards[name] = shard


def _gather_state(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict) -> None:
    for name, shard in getattr(module, SHARDS).items():
        if prefix + name in state:
            state[prefix + name] = shard.gather(state[prefix + name])


def _cut_state(module: nn.Module, state: dict[str, Any], prefix: str, *rest: object) -> None:
    for name, shard in getattr(module, SHARDS).items():
        given = state.get(prefix + name)
        if isinstance(given, Tensor) and given.shape[shard.axis] == shard.size:
            state[prefix + name] = shard.cut(given)


@dataclass
class HeadColumns(ParallelStyle):
    """A projection to heads, cut so that each rank keeps whole heads.

    Args:
        heads: H, the query heads.
        kv_heads: G, the key/value heads.
        of: "queries" for q_proj, "keys" for k_proj and v_proj: with fewer key/value heads than ranks, several ranks
            keep the same one.
        add_gradients: sum the gradient of the input over the ranks; False where that is done for q, k and v at once.

    >>> from torch.distributed.tensor.parallel import parallelize_module
    >>> cut = {"attention.q_proj": HeadColumns(heads=8, kv_heads=2, of="queries")}
    >>> parallelize_module(model, mesh["tp"], cut)  # doctest: +SKIP
    """

    heads: int
    kv_heads: int
    of: str = "queries"
    add_gradients: bool = True

    def __post_init__(self) -> None:
        if self.of not in ("queries", "keys"):
            raise ValueError(f"of={self.of!r}: expected 'queries' or 'keys'")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear, wire = _linear(module, type(self)), Wire(device_mesh)
        parts = split_heads(self.heads, self.kv_heads, wire.size)[self.of == "keys"]
        count = self.kv_heads if self.of == "keys" else self.heads
        rows = linear.out_features
        if rows % count:
            raise ValueError(f"the projection has {rows} outputs: expected a multiple of its {count} heads")
        width = rows // count
        shard = Shard(wire, 0, rows, tuple((first * width, last * width) for first, last in parts))
        for name in ("weight", "bias"):
            keep_part(linear, name, shard)
        linear.out_features = linear.weight.shape[0]
        if len(set(parts)) < wire.size:
            linear.__class__ = SharedColumns
        if self.add_gradients:
            linear.register_forward_pre_hook(lambda _, inputs: (ToRanks.apply(inputs[0], wire), *inputs[1:]))
        return linear


@dataclass
class HeadRows(ParallelStyle):
    """The projection of the heads to the output, cut along its inputs; its results are added up over the ranks.

    Args:
        heads: H, the query heads.
        kv_heads: G, the key/value heads.

    >>> from torch.distributed.tensor.parallel import parallelize_module
    >>> cut = {"attention.o_proj": HeadRows(heads=8, kv_heads=2)}
    >>> parallelize_module(model, mesh["tp"], cut)  # doctest: +SKIP
    """

    heads: int
    kv_heads: int

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear, wire = _linear(module, type(self)), Wire(device_mesh)
        columns = linear.in_features
        if columns % self.heads:
            raise ValueError(f"the projection has {columns} inputs: expected a multiple of its {self.heads} heads")
        width = columns // self.heads
        parts = split_heads(self.heads, self.kv_heads, wire.size)[0]
        shard = Shard(wire, 1, columns, tuple((first * width, last * width) for first, last in parts))
        keep_part(linear, "weight", shard)
        linear.in_features = linear.weight.shape[1]
        linear.__class__ = Rows
        return linear


def _linear(module: nn.Module, style: type) -> nn.Linear:
    if type(module) is not nn.Linear:
        raise ValueError(f"{style.__name__} is given a {type(module).__name__}: expected a torch.nn.Linear")
    return module

"""Slices of the sequence become ranges of heads, and back: what Ulysses and gathering are made of.

Every rank has all heads of its slice. After `to_heads` it has a range of heads of the whole sequence; ranges of ranks
may overlap, or each be all heads, which is gathering. The gradient goes the way back, summed in float32 where several
ranks had the same head.
"""

from typing import Any

import torch
from torch import Tensor

from multihead.distributed.blocks import Range
from multihead.distributed.wire import Wire


def _gather(wire: Wire, t: Tensor, parts: tuple[Range, ...], heads: tuple[Range, ...]) -> Tensor:
    """T (B,·,n,D), all heads of this rank's slice → this rank's heads of all slices."""
    first, last = heads[wire.rank]
    B, _, _, D = t.shape
    coming = {
        peer: wire.receive((B, last - first, parts[peer][1] - parts[peer][0], D), t.dtype, t.device, peer)
        for peer in wire.others
    }
    for peer in wire.others:
        wire.send(t[:, heads[peer][0] : heads[peer][1]], peer)
    found = [t[:, first:last] if rank == wire.rank else coming[rank].wait() for rank in range(wire.size)]
    whole = torch.cat(found, 2)
    wire.flush()
    return whole


def _scatter(wire: Wire, t: Tensor, parts: tuple[Range, ...], heads: tuple[Range, ...], H: int) -> Tensor:
    """The way back: this rank's heads of all slices → all heads of this rank's slice, added where ranges overlap."""
    first, last = parts[wire.rank]
    B, _, _, D = t.shape
    coming = {
        peer: wire.receive((B, heads[peer][1] - heads[peer][0], last - first, D), t.dtype, t.device, peer)
        for peer in wire.others
    }
    for peer in wire.others:
        wire.send(t[:, :, parts[peer][0] : parts[peer][1]], peer)
    total = t.new_zeros((B, H, last - first, D), dtype=torch.promote_types(t.dtype, torch.float32))
    for rank in range(wire.size):
        total[:, heads[rank][0] : heads[rank][1]] += t[:, :, first:last] if rank == wire.rank else coming[rank].wait()
    wire.flush()
    return total.to(t.dtype)


class ToHeads(torch.autograd.Function):
    """(B,H,n,D), all heads of a slice → (B,h,N,D), some heads of the whole."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, wire: Wire, parts: tuple[Range, ...], heads: tuple[Range, ...]) -> Tensor:
        ctx.how = wire, parts, heads, t.shape[1]
        return _gather(wire, t, parts, heads)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None, None]:
        return _scatter(ctx.how[0], d, *ctx.how[1:]), None, None, None


class ToSlices(torch.autograd.Function):
    """(B,h,N,V), some heads of the whole → (B,H,n,V), all heads of a slice; the ranges of heads do not overlap."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, wire: Wire, parts: tuple[Range, ...], heads: tuple[Range, ...]) -> Tensor:
        ctx.how = wire, parts, heads
        return _scatter(wire, t, parts, heads, heads[-1][1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None, None]:
        return _gather(ctx.how[0], d, *ctx.how[1:]), None, None, None

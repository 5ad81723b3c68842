"""Statistics of attention weights by the C++ kernel, on the CPU: see `lens.statistics`.

A pass over the scores of queries leaves a state for each: top and factor, such that a weight is
2^((score − top)·unit) · factor, where unit is log₂e rounded (see native/README.md).
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multihead.call import Call
from multihead.kernel.attend import marshal
from multihead.kernel.eligible import CPU
from multihead.masks.intervals import Visible

if TYPE_CHECKING:
    from multihead import _native
    from multihead.lens.region import At, Region


def scan(region: "Region", state: Tensor | None = None, entropy_and_peak: bool = True) -> tuple[Tensor | None, ...]:
    """The state, unless given, the entropy, the largest weight and its key."""
    entropy, peak, key = _made(region), _made(region, 1), _made(region, 1, dtype=torch.int64)
    asked = {"entropy": entropy, "top": peak, "keys": key} if entropy_and_peak else {}
    if state is None:
        state = _made(region, 2)
        _attend(region, state=state, **asked)
    else:
        _attend(region, given=state.contiguous(), **asked)
    return (state, entropy, peak[..., 0], key[..., 0]) if entropy_and_peak else (state, None, None, None)


def top(region: "Region", state: Tensor, n: int) -> tuple[Tensor, Tensor]:
    weights, keys = _made(region, n), _made(region, n, dtype=torch.int64)
    _attend(region, given=state.contiguous(), top=weights, keys=keys)
    return weights, keys


def mass(region: "Region", state: Tensor) -> Tensor:
    out = _made(region)
    _attend(_ascending(region)[0], given=state.contiguous(), mass=out)
    return out


def received(region: "Region", state: Tensor) -> Tensor:
    B, H, _, K = region.shape
    out = torch.zeros(B, H, K, dtype=region.exact, device=CPU)
    _look(region, state, received=out)
    return out


def pooled(region: "Region", state: Tensor, height: int, width: int, pool: str) -> Tensor:
    """Of a region whose keys ascend."""
    out = torch.zeros(*region.shape[:2], height, width, dtype=region.exact, device=CPU)
    _look(region, state, map=out, largest=pool == "max")
    return out


def weights(region: "Region", state: Tensor) -> Tensor:
    ordered, places = _ascending(region)
    out = torch.zeros(region.shape, dtype=region.exact, device=CPU)
    _look(ordered, state, weights=out)
    return out if places is None else out.index_select(3, places)


def tiles(region: "Region", state: Tensor, all_heads: bool = False) -> "Iterator[tuple[At, Tensor]]":
    for at, _ in region.blocks(all_heads):
        yield at, weights(region.part(at), state[at.rows])


def weigh(call: Call, state: Tensor) -> Tensor:
    """All weights of a call that has left its state: they are those that were used, with no rounding of a lse."""
    out = torch.zeros(*call.q.shape[:3], call.k.shape[2], dtype=state.dtype, device=CPU)
    without_values = replace(call, v=call.v[..., :0], dropout=0.0)
    marshal(without_values, call.visible).look(torch.get_num_threads(), given=state, weights=out)
    return out


# The calls ------------------------------------------------------------------------------------------------------------


def _read(region: "Region") -> "_native.Attention":
    """The region as a call without values."""
    start, stop = _bounds(region)
    return marshal(region, Visible(region.shape[2], region.shape[3], start, stop, region.dense))


def _attend(region: "Region", **into: Any) -> None:
    """The forward kernel without values."""
    if 0 in region.shape[:3]:  # a part without rows: nothing to fill in
        return
    _read(region).attend(torch.get_num_threads(), **into)


def _look(region: "Region", state: Tensor, **into: Any) -> None:
    if 0 in region.shape[:3]:
        return
    _read(region).look(torch.get_num_threads(), given=state.contiguous(), **into)


def _made(region: "Region", *more: int, dtype: torch.dtype | None = None) -> Tensor:
    """(B, H, Q, …) to be filled."""
    return torch.empty(*region.shape[:3], *more, dtype=dtype or region.exact, device=CPU)


# The state and the log-sum-exp ----------------------------------------------------------------------------------------


def lse(region: "Region", state: Tensor) -> Tensor:
    """What the state of a pass says: float64."""
    top, factor = state.double().unbind(-1)
    alone = torch.full_like(top, -torch.inf)  # what there is where no key has a weight
    if region.sinks is not None:
        alone = region.sinks.double()[:, None].expand_as(top)
    nothing = factor < torch.finfo(region.exact).tiny  # the sink has all of the sum, and factor has lost its digits
    return torch.where(nothing, alone, top * unit_scale(region, region.dense) - factor.log())


def of_lse(region: "Region", lse: Tensor) -> Tensor:
    """The state that a log-sum-exp stands for: top is lse rounded, and factor is what the rounding took."""
    scale, exact = unit_scale(region, region.dense), region.exact
    level = lse.double() / scale  # as the kernel's scores are
    top = level.to(exact)
    unit = float(torch.tensor(scale / math.log(2), dtype=exact, device=CPU))
    factor = torch.exp2((top - level) * unit).clamp(max=torch.finfo(exact).max).to(exact)
    nothing = lse == -torch.inf
    return torch.stack([top.masked_fill(nothing, torch.inf), factor.masked_fill(nothing, 0)], -1)


def unit_scale(of: "Call | Region", dense: Tensor | None) -> float:
    """What the kernel leaves to the unit: the scale of a plain call; else it scales, caps and biases before."""
    plain = dense is None and of.bias is None and not of.softcap and 1e-30 < of.scale < 1e30
    return of.scale if plain else 1.0


# Keys that were selected ----------------------------------------------------------------------------------------------


def _bounds(region: "Region") -> tuple[Tensor, Tensor]:
    """Of the region's own keys, which ascend, those that each query sees."""
    if isinstance(region.keys, slice):
        first = region.keys.start
        return (region.start - first, region.stop - first) if first else (region.start, region.stop)
    start, stop = (torch.searchsorted(region.keys, t.contiguous()) for t in (region.start, region.stop))
    return start, stop


def ascends(region: "Region") -> bool:
    return isinstance(region.keys, slice) or bool((region.keys.diff() >= 0).all())


def _ascending(region: "Region") -> "tuple[Region, Tensor | None]":
    """The region with its keys in order, and where each of them went."""
    if ascends(region):
        return region, None
    assert isinstance(region.keys, Tensor)
    keys, order = region.keys.sort()
    dense, bias = (None if t is None else t if t.shape[3] == 1 else t[..., order] for t in (region.dense, region.bias))
    return replace(region, k=region.k[:, :, order], keys=keys, dense=dense, bias=bias), order.argsort()

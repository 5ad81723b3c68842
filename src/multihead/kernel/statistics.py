"""Statistics of attention weights by the C++ kernel, on the CPU: see `statistics`.

A pass over the scores of queries leaves a state for each: top and factor, such that a weight is
2^((score − top)·unit) · factor, where unit is log₂e rounded (see native/README.md). Any log-sum-exp can be written so,
without losing digits: top is lse rounded, and factor is what the rounding took.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from multihead import native
from multihead.backends import Call, blocked
from multihead.backends.native import DTYPES, MOST, OWN, bound_of, dense_of, lined_up, watched
from multihead.backends.region import At, Region, Scan
from multihead.intervals import inside_torch_func


def accepts(region: Region) -> bool:
    """Whether the kernel computes this region: ordinary CPU tensors of a dtype it knows, outside tracing and modes."""
    q, k = region.q, region.k
    if native.module is None or q.device.type != "cpu" or q.dtype not in DTYPES or type(q) not in OWN:
        return False
    if torch.compiler.is_compiling() or watched() or inside_torch_func():
        return False
    return k.shape[1] > 0 and k.shape[2] <= MOST and q.shape[1] // k.shape[1] * q.shape[2] <= MOST


def scan(region: Region, lse: Tensor | None = None, entropy_and_peak: bool = True) -> Scan:
    shape, exact = region.shape[:3], region.exact
    entropy, peak = torch.empty(shape, dtype=exact), torch.empty(shape, dtype=exact)
    key = torch.empty(shape, dtype=torch.int64)
    asked: dict[str, Any] = {}
    if entropy_and_peak:
        asked = {"entropy": entropy.data_ptr(), "top": (peak.data_ptr(), key.data_ptr(), 1)}
    if lse is None:
        lse = _found(region, asked)
    else:
        _pass(region, lse, **asked)
    return Scan(lse, entropy, peak, key) if entropy_and_peak else Scan(lse, None, None, None)


def top(region: Region, lse: Tensor, n: int) -> tuple[Tensor, Tensor]:
    weights = torch.empty(*region.shape[:3], n, dtype=region.exact)
    keys = torch.empty(weights.shape, dtype=torch.int64)
    _pass(region, lse, top=(weights.data_ptr(), keys.data_ptr(), n))
    return weights, keys


def mass(region: Region, lse: Tensor) -> Tensor:
    out = torch.empty(region.shape[:3], dtype=region.exact)
    _pass(_ascending(region)[0], lse, mass=out.data_ptr())
    return out


def received(region: Region, lse: Tensor) -> Tensor:
    B, H, _, K = region.shape
    out = torch.zeros(B, H, K, dtype=region.exact)
    _look(region, lse, received=out.data_ptr())
    return out


def pooled(region: Region, lse: Tensor, height: int, width: int, pool: str) -> Tensor:
    if not _ascends(region):
        return blocked.pooled(region, lse, height, width, pool, tiles)
    out = torch.zeros(*region.shape[:2], height, width, dtype=region.exact)
    _look(region, lse, map=(out.data_ptr(), height, width, int(pool == "max")))
    return out


def weights(region: Region, lse: Tensor) -> Tensor:
    ordered, places = _ascending(region)
    out = torch.zeros(region.shape, dtype=region.exact)
    _look(ordered, lse, weights=(out.data_ptr(), *out.stride()[:3]))
    return out if places is None else out.index_select(3, places)


def tiles(region: Region, lse: Tensor, all_heads: bool = False) -> Iterator[tuple[At, Tensor]]:
    for at, _ in region.blocks(all_heads):
        yield at, weights(region.part(at), lse[at.rows])


def weigh(call: Call, state: Tensor) -> Tensor:
    """All weights of a call that has left its state: they are those that were used, with no rounding of a lse."""
    B, H, Q, K = (*call.q.shape[:3], call.k.shape[2])
    q, k, visible = lined_up(call.q), lined_up(call.k), call.visible
    out = torch.zeros(B, H, Q, K, dtype=state.dtype)
    bias = None if call.bias is None else call.bias.to(state.dtype)
    assert native.module is not None
    native.module.look(
        q.data_ptr(),
        q.shape,
        q.stride(),
        k.data_ptr(),
        k.shape,
        k.stride(),
        state.data_ptr(),
        DTYPES[q.dtype],
        call.scale,
        torch.get_num_threads(),
        weights=(out.data_ptr(), *out.stride()[:3]),
        start=bound_of(visible.start, (B, H, Q)),
        stop=bound_of(visible.stop, (B, H, Q)),
        allowed=dense_of(visible.dense, (B, H, Q, K)),
        bias=dense_of(bias, (B, H, Q, K)),
        softcap=call.softcap or 0.0,
    )
    return out


# The calls ------------------------------------------------------------------------------------------------------------


def _found(region: Region, asked: dict[str, Any]) -> Tensor:
    """The log-sum-exp, found in a pass that also tells what is asked."""
    shape, exact = region.shape[:3], region.exact
    lse, state = torch.empty(shape, dtype=exact), torch.empty(*shape, 2, dtype=exact)
    _attend(region, lse=lse.data_ptr(), state=state.data_ptr(), **asked)
    top, factor = state.double().unbind(-1)
    exact_lse = top * _scale(region) - factor.log()
    return torch.where(factor > 0, exact_lse, lse.double())  # where only a sink is seen, or nothing, lse is exact


def _scale(region: Region) -> float:
    """What the kernel leaves to the unit: the scale of a plain call; else it scales, caps and biases before."""
    plain = region.dense is None and region.bias is None and not region.softcap and 1e-30 < region.scale < 1e30
    return region.scale if plain else 1.0


def _state(region: Region, lse: Tensor) -> Tensor:
    scale, exact = _scale(region), region.exact
    level = lse.double() / scale  # as the kernel's scores are
    top = level.to(exact)
    unit = torch.tensor(scale / math.log(2), dtype=exact).double()
    factor = torch.exp2((top - level) * unit).clamp(max=torch.finfo(exact).max).to(exact)
    nothing = lse == -torch.inf
    return torch.stack([top.masked_fill(nothing, torch.inf), factor.masked_fill(nothing, 0)], -1)


def _pass(region: Region, lse: Tensor, **asked: Any) -> None:
    state = _state(region, lse)
    _attend(region, given=state.data_ptr(), **asked)


def _attend(region: Region, **asked: Any) -> None:
    """The forward kernel without values."""
    assert native.module is not None
    B, G, K, _ = region.k.shape
    sinks = None if region.sinks is None else region.sinks.to(region.exact).contiguous()
    asked["sinks"] = 0 if sinks is None else sinks.data_ptr()
    none = (0, 0, 0, 1)
    _run(native.module.attend, region, (0, (B, G, K, 0), none, 0, none), asked)


def _look(region: Region, lse: Tensor, **asked: Any) -> None:
    assert native.module is not None
    state = _state(region, lse)
    _run(native.module.look, region, (state.data_ptr(),), asked)


def _run(function: Callable, region: Region, more: tuple, asked: dict[str, Any]) -> None:
    (B, H, Q, K), exact = region.shape, region.exact
    q, k = lined_up(region.q), lined_up(region.k)
    start, stop = _bounds(region)
    bias = None if region.bias is None else region.bias.to(exact)
    function(
        q.data_ptr(),
        tuple(q.shape),
        q.stride(),
        k.data_ptr(),
        tuple(k.shape),
        k.stride(),
        *more,
        DTYPES[q.dtype],
        region.scale,
        torch.get_num_threads(),
        start=bound_of(start, (B, H, Q)),
        stop=bound_of(stop, (B, H, Q)),
        allowed=dense_of(region.dense, (B, H, Q, K)),
        bias=dense_of(bias, (B, H, Q, K)),
        softcap=region.softcap or 0.0,
        **asked,
    )


# Keys that were selected ----------------------------------------------------------------------------------------------


def _bounds(region: Region) -> tuple[Tensor, Tensor]:
    """Of the region's own keys, which ascend, those that each query sees."""
    if isinstance(region.keys, slice):
        first = region.keys.start
        return (region.start - first, region.stop - first) if first else (region.start, region.stop)
    start, stop = (torch.searchsorted(region.keys, t.contiguous()) for t in (region.start, region.stop))
    return start, stop


def _ascends(region: Region) -> bool:
    return isinstance(region.keys, slice) or bool((region.keys.diff() >= 0).all())


def _ascending(region: Region) -> tuple[Region, Tensor | None]:
    """The region with its keys in order, and where each of them went."""
    if _ascends(region):
        return region, None
    assert isinstance(region.keys, Tensor)
    keys, order = region.keys.sort()
    dense, bias = (None if t is None else t if t.shape[3] == 1 else t[..., order] for t in (region.dense, region.bias))
    return replace(region, k=region.k[:, :, order], keys=keys, dense=dense, bias=bias), order.argsort()

"""torch's FlexAttention as a backend, for devices without a kernel of ours: masks and biases without a (Q, K) matrix.

An interval of keys per query says which blocks of keys a block of queries needs, and which of them it sees whole, so
what is hidden is neither read nor computed. Softcap and bias change the scores inside the kernel. A sink joins by the
log-sum-exp. A NaN under the mask is made good here, as for torch's fused kernels.

On a CPU native is faster and differentiates: flex takes a call there only when it is named, without gradients. What it
does on a GPU has not been run by its authors: the tests for it skip by name where there is none.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multihead.attention.sdpa import once, poison
from multihead.call import Call
from multihead.masks.intervals import Visible
from multihead.steps import known_finite, only_finite
from multihead.tensors import inside_torch_func

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # queries, and keys, in a block of the mask: what torch's kernels are made for
DEVICES = ("cuda", "xpu", "cpu")  # where torch compiles FlexAttention
KINDS = 64  # of calls (softcap or not, shapes of masks and biases, dtypes) that may be compiled


def torch_flex() -> ModuleType:
    """Torch's module, imported on use: it takes a tenth of a second."""
    from torch.nn.attention import flex_attention

    return flex_attention


class Flex:
    name = "flex"

    def refuse(self, call: Call) -> str | None:
        if call.q.device.type not in DEVICES:
            return f"torch's FlexAttention is not compiled for {call.q.device.type}"
        if call.dropout:
            return "torch's FlexAttention has no dropout"
        if call.needs_grad and call.q.device.type == "cpu":
            return "torch's FlexAttention has no backward pass on a CPU"
        if call.q.dtype == torch.float64 and call.q.device.type != "cpu":
            return "torch's FlexAttention is not compiled for float64"
        if inside_torch_func():
            return "torch's FlexAttention has no rule for torch.func or forward-mode derivatives"
        if 0 in call.q.shape or 0 in call.k.shape or 0 in call.v.shape:
            return "torch's FlexAttention is not defined for empty sequences"
        if torch.compiler.is_compiling() and call.q.device.type == "cpu" and (call.want_lse or call.sinks is not None):
            return "torch's FlexAttention, compiled for a CPU, has no log-sum-exp"
        return None

    def note(self, call: Call) -> str:
        if call.q.device.type == "cpu" and not torch.compiler.is_compiling():
            return "torch's FlexAttention, not compiled: with the whole (Q, K) matrix in memory"
        return "torch's FlexAttention, by blocks of keys that are seen"

    def run(self, call: Call, seed: Tensor | None) -> tuple[Tensor, Tensor | None]:
        finite = all(known_finite(t) for t in (call.q, call.k, call.v))
        q, k, v = (call.q, call.k, call.v) if finite else (only_finite(t) for t in (call.q, call.k, call.v))
        if call.needs_grad and not torch.compiler.is_compiling():
            q, k, v = (once(t, self.name) for t in (q, k, v))
        wants = call.want_lse or call.sinks is not None
        out, aux = attend()(
            q, k, v,
            score_mod=score_mod(call), block_mask=block_mask(call), scale=call.scale,
            enable_gqa=k.shape[1] != q.shape[1], return_aux=torch_flex().AuxRequest(lse=wants),
        )  # fmt: skip
        lse = aux.lse
        if call.sinks is not None:
            out, lse = sink(out, lse, call.sinks)
        if not finite:
            hides = call.visible.dense is not None or call.bias is not None
            allowed = _allowed(call) if hides else None
            out = poison(out, call, allowed)
            if lse is not None:  # what the values are does not matter to it
                without_values = replace(call, v=torch.zeros_like(call.v[..., :1]))
                lse = poison(lse[..., None], without_values, allowed)[..., 0]
        return out, lse.to(torch.promote_types(call.q.dtype, torch.float32)) if call.want_lse else None


def attend() -> Callable[..., Any]:
    """FlexAttention as it runs here: inside a graph that is being compiled, on the CPU as it is, elsewhere compiled."""
    if torch.compiler.is_compiling():
        return torch_flex().flex_attention
    return _by_device


def _by_device(q: Tensor, *args: Any, **options: Any) -> Any:
    if q.device.type != "cpu":
        return compiled()(q, *args, **options)
    flex: Any = torch_flex()
    before = flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True  # else it would be traced anew for each mask
    try:
        return flex.flex_attention(q, *args, **options)
    finally:
        flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before


@cache
def compiled() -> Callable[..., Any]:
    """FlexAttention as one kernel; numbers reach it in tensors, so that it is compiled once for each kind of call."""
    made = torch.compile(torch_flex().flex_attention, fullgraph=True)

    def run(*args: Any, **options: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=KINDS):
            return made(*args, **options)

    return run


def score_mod(call: Call) -> Callable[..., Tensor] | None:
    """Softcap and bias, as FlexAttention takes them."""
    bias = None if call.bias is None else _at(_finite_bias(call.bias))
    cap = None if call.softcap is None else torch.tensor(float(call.softcap), device=call.q.device)
    if bias is None and cap is None:
        return None

    def modify(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        found = score
        if cap is not None:
            found = (cap * torch.tanh(found / cap)).to(score.dtype)
        if bias is not None:
            found = found + bias(b, h, q, k).to(score.dtype)
        return found

    return modify


def _finite_bias(bias: Tensor) -> Tensor:
    return bias.masked_fill(bias == -torch.inf, 0)  # −inf hides, as a mask


def block_mask(call: Call) -> "BlockMask | None":
    """What is visible, as FlexAttention takes it: the blocks of keys of each block of queries, and the edges inside."""
    visible, device = call.visible, call.q.device
    hidden = [] if visible.dense is None else [visible.dense]
    if call.bias is not None:
        hidden.append((call.bias != -torch.inf).detach())
    if visible.is_everything and not hidden:
        return None
    start, stop = (bound[(None,) * (3 - bound.dim())].to(torch.int32) for bound in visible.bounds(device))
    first, last = _at(start, 3), _at(stop, 3)
    shown = [_at(t.to(device)) for t in hidden]

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        found = (first(b, h, q) <= k) & (k < last(b, h, q))
        for at in shown:
            found = found & at(b, h, q, k)
        return found

    partial, full = blocks(visible, device)
    if hidden:  # what is dense has to be looked at everywhere
        partial, full = partial | full, torch.zeros_like(full)
    return torch_flex().BlockMask.from_kv_blocks(
        *_listed(partial), *_listed(full), BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(visible.Q, visible.K)
    )


def blocks(visible: Visible, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which blocks of keys each block of queries sees in part, and which whole: bool (B|1, H|1, Q blocks, K blocks)."""
    start, stop = torch.broadcast_tensors(*(b[(None,) * (3 - b.dim())] for b in visible.bounds(device)))
    stop = torch.maximum(start, stop)
    rows = -(-visible.Q // BLOCK)
    start, stop = (t.expand(*t.shape[:2], visible.Q) for t in (start, stop))
    pad = (0, rows * BLOCK - visible.Q)
    repeat = [torch.nn.functional.pad(t, pad, value=-1).unflatten(-1, (rows, BLOCK)) for t in (start, stop)]
    real = repeat[0] >= 0  # queries that there are
    sees = real & (repeat[1] > repeat[0])
    far = visible.K + BLOCK
    low = repeat[0].masked_fill(~sees, far).amin(-1, keepdim=True)  # the first key that some query sees
    high = repeat[1].masked_fill(~sees, 0).amax(-1, keepdim=True)
    low_all = repeat[0].masked_fill(~real, 0).amax(-1, keepdim=True)  # the first key that all of them see
    high_all = repeat[1].masked_fill(~real, far).amin(-1, keepdim=True)
    low_all = low_all.masked_fill((real & ~sees).any(-1, keepdim=True), far)
    begin = torch.arange(0, visible.K, BLOCK, device=device)
    end = begin + BLOCK
    some = (begin < high) & (end > low)
    whole = (low_all <= begin) & (end <= high_all) & (end <= visible.K)
    return some & ~whole, some & whole


def _listed(table: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of a row are chosen, and which: they come first."""
    order = torch.argsort((~table).to(torch.int8), dim=-1, stable=True)
    return table.sum(-1).to(torch.int32), order.to(torch.int32)


def _at(t: Tensor, axes: int = 4) -> Callable[..., Tensor]:
    """Read a tensor that broadcasts to (B,H,Q,K), or (B,H,Q), at an index: 0 along the axes that it repeats."""
    t = t[(None,) * (axes - t.dim())]
    varies = [size > 1 for size in t.shape]
    zero = torch.zeros((), dtype=torch.int64, device=t.device)

    def read(*index: Tensor) -> Tensor:
        return t[tuple(i if moves else zero for i, moves in zip(index, varies))]

    return read


def sink(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """The same with a logit for each head in the denominator: a row's weights shrink by exp(lse) / exp(both).

    In float64, for a sink's gradient is the sum of a number of every row, and most of them cancel.
    """
    found = lse.double()
    logits = sinks.double()[:, None].expand_as(found)
    unseen = found == -torch.inf
    nothing = unseen | (logits == -torch.inf)
    both = torch.where(nothing, torch.maximum(found, logits), torch.logaddexp(found.masked_fill(nothing, 0), logits))
    share = torch.sigmoid(found.masked_fill(unseen, 0) - logits)  # exp(lse) / (exp(lse) + exp(sink))
    share = share.masked_fill(unseen, 0).to(lse.dtype)
    return (out.to(lse.dtype) * share[..., None]).to(out.dtype), both.to(lse.dtype)


def _allowed(call: Call) -> Tensor:
    allowed = call.visible.allowed(call.q.device)
    return allowed if call.bias is None else allowed & (call.bias != -torch.inf)

"""The kernel as operators that torch can trace, export and differentiate.

A bound of the mask is a tensor, or three of `ramps` where it has none: (offset, low, high) of start, then of stop.
"""

from typing import Any

import torch
from torch import Tensor

from multihead import steps
from multihead.call import Call
from multihead.kernel.attend import attend, backward, lined_up, marshal
from multihead.masks.intervals import Bound, Ramp, Visible
from multihead.tensors import require_storage


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: tuple[Tensor | None, Tensor | None, list[int], Tensor | None],
    added: tuple[Tensor | None, Tensor | None],
    numbers: tuple[float, float, float],
) -> Call:
    """A call of the operators as a `Call`; softcap 0: none."""
    (start, stop, ramps, allowed), (bias, sinks), (scale, softcap, dropout) = mask, added, numbers
    first: Bound = Ramp(*ramps[:3]) if start is None else start
    last: Bound = Ramp(*ramps[3:]) if stop is None else stop
    visible = Visible(q.shape[2], k.shape[2], first, last, allowed)
    return Call(q, k, v, visible, scale, softcap or None, sinks, bias, dropout, True)


@torch.library.custom_op("multihead::attend", mutates_args=(), device_types="cpu")
def attend_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
    ramps: list[int],
    allowed: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    scale: float,
    softcap: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    call = _call(q, k, v, (start, stop, ramps, allowed), (bias, sinks), (scale, softcap, dropout))
    out, lse, state = attend(marshal(call, call.visible), q, seed=seed, want_lse=True, want_state=True)
    assert lse is not None
    assert state is not None
    return out, lse, state


@attend_op.register_fake
def _(q, k, v, start, stop, ramps, allowed, bias, sinks, seed, scale, softcap, dropout):  # type: ignore[no-untyped-def]
    (B, H, Q, _), V = q.shape, v.shape[3]
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty_strided((B, H, Q, V), (H * Q * V, V, H * V, 1))
    return out, q.new_empty((B, H, Q), dtype=exact), q.new_empty((B, H, Q, 2), dtype=exact)


@torch.library.custom_op("multihead::attend_backward", mutates_args=(), device_types="cpu")
def backward_op(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
    ramps: list[int],
    allowed: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    scale: float,
    softcap: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    call = _call(q, k, v, (start, stop, ramps, allowed), (bias, sinks), (scale, softcap, dropout))
    return backward(call, state, d_out, d_lse, seed)


@backward_op.register_fake
def _(d_out, d_lse, q, k, v, *rest):  # type: ignore[no-untyped-def]
    return tuple(lined_up(torch.empty_like(lined_up(t))) for t in (q, k, v))


def _remember(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, start, stop, ramps, allowed, bias, sinks, seed, scale, softcap, dropout = inputs
    out, lse, state = output
    ctx.mark_non_differentiable(state)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, start, stop, allowed, bias, sinks, seed, out, lse, state)
    ctx.numbers = ramps, scale, softcap, dropout


def _gradients(ctx, d_out, d_lse, _):  # type: ignore[no-untyped-def]
    q, k, v, start, stop, allowed, bias, sinks, seed, out, lse, state = ctx.saved_tensors
    ramps, scale, softcap, dropout = ctx.numbers
    d_bias = d_sinks = None
    if torch.is_grad_enabled() or ctx.needs_input_grad[7]:
        # A gradient that must itself be differentiable (create_graph=True), or that of a bias, which is as large as
        # the (Q, K) matrix itself.
        call = _call(q, k, v, (start, stop, ramps, allowed), (bias, sinks), (scale, softcap, dropout))
        d_q, d_k, d_v, d_bias, d_sinks = _gradients_of_the_specification(call, seed, (d_out, d_lse))
    else:
        d_out = torch.zeros_like(out) if d_out is None else d_out
        d_q, d_k, d_v = backward_op(
            d_out, d_lse, q, k, v, state, start, stop, ramps, allowed, bias, sinks, seed, scale, softcap, dropout
        )
        if sinks is not None and ctx.needs_input_grad[8]:
            share = torch.exp(sinks.to(lse.dtype)[:, None] - lse)  # (B, H, Q): the sink's own weight
            share = share.masked_fill(lse == -torch.inf, 0)  # a sink of −inf beside nothing that is seen: −inf − −inf
            moved = (d_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
            moved = -moved if d_lse is None else d_lse - moved
            d_sinks = (share * moved).sum((0, 2)).to(sinks.dtype)
    return d_q, d_k, d_v, None, None, None, None, d_bias, d_sinks, None, None, None, None


attend_op.register_autograd(_gradients, setup_context=_remember)


def _gradients_of_the_specification(
    call: Call, seed: Tensor | None, grads: tuple[Tensor | None, Tensor | None]
) -> list[Tensor | None]:
    """The gradients of q, k, v, bias and sinks through `steps.attend`, differentiable where gradients are recorded."""
    create_graph = torch.is_grad_enabled()
    for name, t in (("q", call.q), ("k", call.k), ("v", call.v), ("bias", call.bias), ("the mask", call.visible.dense)):
        require_storage(name, t)  # it may have been freed since the forward pass
    with torch.enable_grad():
        # Each input is a tensor of its own here, for one that is given twice must not get the gradients of both.
        inputs = [
            None if t is None else t.view_as(t) if create_graph else t.detach().requires_grad_(t.requires_grad)
            for t in (call.q, call.k, call.v, call.bias, call.sinks)
        ]
        q, k, v, bias, sinks = inputs
        assert q is not None
        assert k is not None
        assert v is not None
        options: dict[str, Any] = {"scale": call.scale, "softcap": call.softcap, "dropout": call.dropout, "seed": seed}
        outputs = steps.attend(q, k, v, allowed=call.allowed(), bias=bias, sinks=sinks, **options)
        # Where only v wants a gradient, the log-sum-exp has none to give.
        asked = [(out, grad) for out, grad in zip(outputs, grads) if grad is not None and out.requires_grad]
        wanted = [t for t in inputs if t is not None and t.requires_grad]
        if not asked:
            return [None] * len(inputs)
        found = torch.autograd.grad(
            [out for out, _ in asked],
            wanted,
            [grad for _, grad in asked],
            create_graph=create_graph,
            allow_unused=True,
        )
    by_input = {id(t): grad for t, grad in zip(wanted, found)}
    return [None if t is None else by_input.get(id(t)) for t in inputs]


def attend_through_torch(call: Call, seed: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and state."""
    tensors = [b if isinstance(b, Tensor) else None for b in (call.visible.start, call.visible.stop)]
    ramps = [
        n
        for b in (call.visible.start, call.visible.stop)
        for n in ((b.offset, b.low, b.high) if isinstance(b, Ramp) else (0, 0, 0))
    ]
    return attend_op(
        call.q,
        call.k,
        call.v,
        *tensors,
        ramps,
        call.visible.dense,
        call.bias,
        call.sinks,
        seed,
        call.scale,
        call.softcap or 0.0,
        call.dropout,
    )

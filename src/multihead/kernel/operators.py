"""The C++ kernel as a backend: steps 3 and 4 on the CPU, without the (Q, K) matrix.

Where nobody watches (no gradient, no tracing, no modes) the call goes straight to the native function with addresses
and strides. Elsewhere it goes through two custom operators that torch can trace, export and differentiate.
"""

from math import isfinite
from typing import Any

import torch
from torch import Tensor

from multihead import native, steps
from multihead.backends import Call
from multihead.intervals import Bound, Ramp, Visible, inside_torch_func
from multihead.masks import Causal, Mask, see

DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
OWN = (Tensor, torch.nn.Parameter)  # a subclass wants to see the call
MOST = 2**30  # keys, or query rows that share them


class Native:
    name = "native"

    def refuse(self, call: Call) -> str | None:
        q = call.q
        if native.module is None:
            return f"the native module is {native.missing}"
        if q.device.type != "cpu":
            return f"the kernel runs on the CPU, and q is on {q.device}"
        if q.dtype not in DTYPES:
            return f"the kernel has no {q.dtype}"
        if inside_torch_func():
            return "the kernel has no batching rule for torch.func"
        if call.k.shape[2] > MOST or q.shape[1] // call.k.shape[1] * q.shape[2] > MOST:
            return f"more than {MOST} keys, or query rows that share them"
        return None

    def note(self, call: Call) -> str:
        return f"the native kernel, {native.instruction_set()}, skipping what is hidden"

    def run(self, call: Call, seed: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if not unwatched(call):
            return _operator(call, seed)
        out, lse, _ = run(call, seed)
        return out, lse


def unwatched(call: Call) -> bool:
    """Whether nobody sees if the native function is called outside torch."""
    return not (call.needs_grad or torch.compiler.is_compiling() or type(call.q) not in OWN or watched())


def run(
    call: Call, seed: Tensor | None, *, want_state: bool = False, weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """out, lse where the call wants it, and the state of every row (see native/README.md); `weights` as in `attend`."""
    return attend(
        call.q,
        call.k,
        call.v,
        call.visible.start,
        call.visible.stop,
        call.visible.dense,
        call.bias,
        call.sinks,
        call.scale,
        call.softcap or 0.0,
        call.dropout,
        0 if seed is None else int(seed),
        want_lse=call.want_lse,
        want_state=want_state,
        weights=weights,
    )


def watched() -> bool:
    """Whether a mode (fake tensors, tracing, a flop counter) must see every call."""
    return torch._C._len_torch_dispatch_stack() > 0


# The native function --------------------------------------------------------------------------------------------------


def straight(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Visible | Tensor | None, scale: float | None
) -> Tensor | None:
    """Steps 3 and 4 for a plain call, with nothing between the caller and the kernel: 10 µs instead of 30.

    None for whatever is out of the ordinary, or wrong: then the call is checked, lowered and explained as all others.
    """
    if native.module is None or not type(q) is type(k) is type(v) is Tensor:
        return None
    name = DTYPES.get(q.dtype)
    if name is None or k.dtype is not q.dtype or v.dtype is not q.dtype or not (q.is_cpu and k.is_cpu and v.is_cpu):
        return None
    if not q.dim() == k.dim() == v.dim() == 4 or not (scale is None or (type(scale) is float and isfinite(scale))):
        return None
    if torch.compiler.is_compiling() or watched() or inside_torch_func() or torch.is_autocast_enabled("cpu"):
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    shape, k_shape, v_shape = q.shape, k.shape, v.shape
    strides, k_strides, v_strides = q.stride(), k.stride(), v.stride()
    (B, H, Q, D), (k_B, G, K, k_D), (v_B, v_G, v_K, V) = shape, k_shape, v_shape
    if not B == k_B == v_B or k_D != D or v_G != G or v_K != K or not D or not G or H % G or not (Q and K and V):
        return None
    if not strides[3] == k_strides[3] == v_strides[3] == 1 or K > MOST or H // G * Q > MOST:
        return None
    start: tuple[int, ...]
    stop: tuple[int, ...]
    if mask is None:
        start, stop = (0, 0, 0), (0, K, K)
    elif type(mask) is Causal and mask.window is None:
        start, stop = (0, 0, 0), (K - Q + 1, 0, K)
    else:
        visible = mask if isinstance(mask, Visible) else see(mask, Q, K, q.device, B, H)
        if visible.dense is not None:
            return None
        start, stop = bound_of(visible.start, (B, H, Q)), bound_of(visible.stop, (B, H, Q))
    out_strides = (H * Q * V, V, H * V, 1)  # step 5 is then a view
    out = torch.empty_strided((B, H, Q, V), out_strides, dtype=q.dtype)
    native.module.attend(
        q.data_ptr(),
        shape,
        strides,
        k.data_ptr(),
        k_shape,
        k_strides,
        v.data_ptr(),
        v_shape,
        v_strides,
        out.data_ptr(),
        out_strides,
        name,
        D**-0.5 if scale is None else scale,
        torch.get_num_threads(),
        0,
        start,
        stop,
    )
    return out


def lined_up(t: Tensor) -> Tensor:
    """`t` with its last axis contiguous: copied once where it is not."""
    return t if t.stride(-1) == 1 or t.shape[-1] <= 1 else t.contiguous()


def bound_of(bound: Bound, shape: tuple[int, int, int]) -> tuple[int, ...]:
    if isinstance(bound, Ramp):
        return bound.offset, bound.low, bound.high
    bound = bound.expand(shape)
    return bound.data_ptr(), 8 * bound.element_size(), *bound.stride()


def dense_of(t: Tensor | None, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    return None if t is None else (t.data_ptr(), *t.expand(shape).stride())


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Bound,
    stop: Bound,
    allowed: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    dropout: float,
    seed: int,
    *,
    want_lse: bool = True,
    want_state: bool = False,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """out, lse, and what a backward pass needs to know. `weights`: zeros to be filled with them, (B,H,Q,K)."""
    q, k, v = lined_up(q), lined_up(k), lined_up(v)
    dtype, shape, k_shape, v_shape = q.dtype, q.shape, k.shape, v.shape
    (B, H, Q, _), K, V = shape, k_shape[2], v_shape[3]
    exact = torch.float64 if dtype is torch.float64 else torch.float32
    strides = (H * Q * V, V, H * V, 1)  # step 5 is then a view
    out = torch.empty_strided((B, H, Q, V), strides, dtype=dtype)
    lse = torch.empty(B, H, Q, dtype=exact) if want_lse else None
    state = torch.empty(B, H, Q, 2, dtype=exact) if want_state else None
    bias = None if bias is None else bias.to(exact)
    sinks = None if sinks is None else sinks.to(exact).contiguous()
    assert native.module is not None
    native.module.attend(
        q.data_ptr(),
        shape,
        q.stride(),
        k.data_ptr(),
        k_shape,
        k.stride(),
        v.data_ptr(),
        v_shape,
        v.stride(),
        out.data_ptr(),
        strides,
        DTYPES[dtype],
        scale,
        torch.get_num_threads(),
        lse=0 if lse is None else lse.data_ptr(),
        start=bound_of(start, (B, H, Q)),
        stop=bound_of(stop, (B, H, Q)),
        allowed=dense_of(allowed, (B, H, Q, K)),
        bias=dense_of(bias, (B, H, Q, K)),
        sinks=0 if sinks is None else sinks.data_ptr(),
        softcap=softcap,
        dropout=dropout,
        seed=seed,
        state=0 if state is None else state.data_ptr(),
        weights=None if weights is None else (weights.data_ptr(), *weights.stride()[:3]),
    )
    return out, lse, state


def backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    start: Bound,
    stop: Bound,
    allowed: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, block by block from what the forward pass left."""
    q, k, v, d_out = (lined_up(t) for t in (q, k, v, d_out))
    (B, H, Q, _), K = q.shape, k.shape[2]
    d_q, d_k, d_v = (lined_up(torch.empty_like(t)) for t in (q, k, v))
    bias = None if bias is None else bias.to(state.dtype)
    d_lse = None if d_lse is None else d_lse.to(state.dtype).contiguous()
    sinks = None if sinks is None else sinks.to(state.dtype).contiguous()
    delta = torch.empty_like(state)
    assert native.module is not None
    native.module.backward(
        q.data_ptr(),
        q.shape,
        q.stride(),
        k.data_ptr(),
        k.shape,
        k.stride(),
        v.data_ptr(),
        v.shape,
        v.stride(),
        d_out.data_ptr(),
        d_out.stride(),
        d_q.data_ptr(),
        d_q.stride(),
        d_k.data_ptr(),
        d_k.stride(),
        d_v.data_ptr(),
        d_v.stride(),
        state.data_ptr(),
        delta.data_ptr(),
        DTYPES[q.dtype],
        scale,
        torch.get_num_threads(),
        d_lse=0 if d_lse is None else d_lse.data_ptr(),
        start=bound_of(start, (B, H, Q)),
        stop=bound_of(stop, (B, H, Q)),
        allowed=dense_of(allowed, (B, H, Q, K)),
        bias=dense_of(bias, (B, H, Q, K)),
        sinks=0 if sinks is None else sinks.data_ptr(),
        softcap=softcap,
        dropout=dropout,
        seed=seed,
    )
    return d_q, d_k, d_v


# The operators that torch traces and differentiates -------------------------------------------------------------------
#
# A bound is a tensor, or three of `ramps` where it has none: (offset, low, high) of start, then of stop.


def _bounds(start: Tensor | None, stop: Tensor | None, ramps: list[int]) -> tuple[Bound, Bound]:
    return Ramp(*ramps[:3]) if start is None else start, Ramp(*ramps[3:]) if stop is None else stop


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
    drawn = 0 if seed is None else int(seed)
    bounds = _bounds(start, stop, ramps)
    out, lse, state = attend(q, k, v, *bounds, allowed, bias, sinks, scale, softcap, dropout, drawn, want_state=True)
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
    drawn = 0 if seed is None else int(seed)
    bounds = _bounds(start, stop, ramps)
    return backward(d_out, d_lse, q, k, v, state, *bounds, allowed, bias, sinks, scale, softcap, dropout, drawn)


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
        first, last = _bounds(start, stop, ramps)
        visible = Visible(q.shape[2], k.shape[2], first, last, allowed)
        options = {"scale": scale, "softcap": softcap or None, "dropout": dropout, "seed": seed}
        grads = _gradients_of_the_specification((d_out, d_lse), (q, k, v, bias, sinks), visible, options)
        d_q, d_k, d_v, d_bias, d_sinks = grads
    else:
        d_out = torch.zeros_like(out) if d_out is None else d_out
        d_q, d_k, d_v = backward_op(
            d_out, d_lse, q, k, v, state, start, stop, ramps, allowed, bias, sinks, seed, scale, softcap, dropout
        )
        if sinks is not None and ctx.needs_input_grad[8]:
            share = torch.exp(sinks.to(lse.dtype)[:, None] - lse)  # (B, H, Q): the sink's own weight
            moved = (d_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
            moved = -moved if d_lse is None else d_lse - moved
            d_sinks = (share * moved).sum((0, 2)).to(sinks.dtype)
    return d_q, d_k, d_v, None, None, None, None, d_bias, d_sinks, None, None, None, None


attend_op.register_autograd(_gradients, setup_context=_remember)


def _gradients_of_the_specification(
    grads: tuple[Tensor | None, ...], inputs: tuple[Tensor | None, ...], visible: Visible, options: dict[str, Any]
) -> list[Tensor | None]:
    """The gradients of q, k, v, bias and sinks through `steps.attend`, differentiable where gradients are wanted of."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        if not create_graph:
            inputs = tuple(None if t is None else t.detach().requires_grad_(t.requires_grad) for t in inputs)
        q, k, v, bias, sinks = inputs
        allowed = None if visible.is_everything else visible.allowed()
        outputs = steps.attend(q, k, v, allowed=allowed, bias=bias, sinks=sinks, **options)  # type: ignore[arg-type]
        asked = [(out, grad) for out, grad in zip(outputs, grads) if grad is not None]
        wanted = [t for t in inputs if t is not None and t.requires_grad]
        found = torch.autograd.grad(
            [out for out, _ in asked],
            wanted,
            [grad for _, grad in asked],
            create_graph=create_graph,
            allow_unused=True,
        )
    by_input = {id(t): grad for t, grad in zip(wanted, found)}
    return [None if t is None else by_input.get(id(t)) for t in inputs]


def _operator(call: Call, seed: Tensor | None) -> tuple[Tensor, Tensor | None]:
    tensors = [b if isinstance(b, Tensor) else None for b in (call.visible.start, call.visible.stop)]
    ramps = [
        n
        for b in (call.visible.start, call.visible.stop)
        for n in ((b.offset, b.low, b.high) if isinstance(b, Ramp) else (0, 0, 0))
    ]
    out, lse, _ = attend_op(
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
    return out, lse

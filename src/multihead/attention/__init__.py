"""One function for steps 3 and 4, and the rules by which it picks who computes them.

The first backend that can compute the call exactly takes it, in this order: `native` (the C++ kernel, on the CPU),
`sdpa` (torch's fused kernels), `reference` (the seven steps as written). A backend that is named, by `backend=` or
`with mh.backend(...)`, takes the call or refuses it in words; it never passes it on.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import local

import torch
from torch import Tensor

from multihead import native
from multihead.backends import Backend, Call, native_statistics, under_autocast, without_autocast
from multihead.backends.native import Native, run, straight, unwatched
from multihead.backends.reference import Reference
from multihead.backends.sdpa import SDPA
from multihead.intervals import Visible
from multihead.masks import Mask, check_broadcast, see
from multihead.sizes import check_attend, check_floating, check_numbers, describe

BACKENDS: dict[str, Backend] = {b.name: b for b in (Native(), SDPA(), Reference())}  # in the order they are asked


class _Named(local):
    """The backend that a `with` block of this thread names. (Not a ContextVar: a compiled graph cannot read one.)"""

    name: str | None = None


_named = _Named()


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Inside the block every call of attention runs on this backend, or is refused by it.

    >>> q = torch.ones(1, 1, 2, 4)
    >>> with mh.backend("reference"):
    ...     print(mh.explain(q, q, q).backend)
    reference
    """
    before, _named.name = _named.name, _known(name)
    try:
        yield
    finally:
        _named.name = before


def named(backend: str | None) -> str | None:
    """The backend that a call must run on: the one it names, or that of the `with` block around it, or none."""
    return _named.name if backend is None else _known(backend)


def _known(name: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"backend={name!r}: expected one of {', '.join(BACKENDS)}")
    return name


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Visible | Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    backend: str | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention for every head at once: softmax(q·kᵀ·scale) · v, with what `mask` hides left out.

    Args:
        q: queries (B,H,Q,D).
        k: keys (B,G,K,D), where G divides H: query head h reads key/value head h // (H//G).
        v: values (B,G,K,V).
        mask: what each query may see, such as `Causal()`; a bool tensor is taken as `Allowed`, True = may attend.
        scale: factor of the scores, 1/√D unless given.
        softcap: scores become softcap · tanh(scores / softcap).
        sinks: (H,) a logit for each head that joins the softmax's denominator and has no value.
        bias: added to the scores; broadcasts right-aligned to (B,H,Q,K). −inf hides.
        dropout: the probability with which a weight is dropped, seeded from torch's generator.
        backend: one of `multihead.attend.BACKENDS`; unless given, the first that can.
        return_lse: give (out, lse); lse (B,H,Q) is the natural log of the softmax's denominator, sinks included, in
            float32 (float64 for float64).

    Returns:
        out (B,H,Q,V). A query that may see nothing gives 0, and an lse of −inf (with a sink, the sink's logit).

    >>> q, k, v = torch.randn(1, 8, 4, 128), torch.randn(1, 2, 4, 128), torch.randn(1, 2, 4, 64)
    >>> mh.attend(q, k, v, mask=mh.Causal()).shape
    torch.Size([1, 8, 4, 64])
    """
    plain = (
        softcap is None and sinks is None and bias is None and type(dropout) is float and not dropout and not return_lse
    )
    if plain and isinstance(q, Tensor) and named(backend) in (None, Native.name):
        out = straight(q, k, v, mask, scale)
        if out is not None:
            return out
    call = prepare(q, k, v, mask, scale, softcap, sinks, bias, dropout, return_lse)
    chosen = _choose(call, backend)
    with without_autocast(call.q.device):
        out, lse = chosen.run(call, _seed(call))
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


def attend_and_weigh(call: Call) -> tuple[Tensor, Tensor] | None:
    """out, and all weights before dropout, by the native kernel; None where another way is taken.

    In one pass where the scores of all keys can be kept until a row ends, else from what the kernel then knows of it. A
    few rows are left to the other way: the kernel for them sums scores in another order than all others do, so that
    weights found beside it would not be to the last digit those that were used.
    """
    few = 16  # and more than there are on any CPU
    (B, H, Q, _), (_, G, K, _) = call.q.shape, call.k.shape
    if not G or few >= H // G * Q or not unwatched(call) or _choose(call, None).name != Native.name:
        return None
    assert native.module is not None
    if native.module.most_weighed_keys < K:
        out, _, state = run(call, _seed(call), want_state=True)
        assert state is not None
        return out, native_statistics.weigh(call, state)
    weights = torch.zeros(B, H, Q, K, dtype=torch.promote_types(call.q.dtype, torch.float32))
    return run(call, _seed(call), weights=weights)[0], weights


def _seed(call: Call) -> Tensor | None:
    return torch.randint(2**63 - 1, (), device=call.q.device) if call.dropout else None


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Visible | Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    dropout: float,
    want_lse: bool,
) -> Call:
    """Check the arguments of `attend` and lower the mask."""
    if isinstance(q, Tensor) and under_autocast(q.device) and q.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (t.to(dtype) if isinstance(t, Tensor) and t.dtype.is_floating_point else t for t in (q, k, v))
    check_attend(q, k, v)
    (B, H, Q, D), K = q.shape, k.shape[2]
    if not isinstance(mask, Visible):
        mask = see(mask, Q, K, q.device, B, H)
    check_numbers(scale, softcap, dropout)
    _check_extra("sinks", sinks, q.device, (H,), "(H,)")
    _check_extra("bias", bias, q.device, (B, H, Q, K), "(B,H,Q,K)")
    if sinks is not None and sinks.shape != (H,):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}: expected one logit for each of the H={H} query heads")
    return Call(q, k, v, mask, D**-0.5 if scale is None else scale, softcap, sinks, bias, dropout, want_lse)


def _check_extra(name: str, t: Tensor | None, device: torch.device, shape: tuple[int, ...], axes: str) -> None:
    if t is None:
        return
    if not isinstance(t, Tensor) or not t.dtype.is_floating_point:
        what = describe(t) if isinstance(t, Tensor) else type(t).__name__
        hint = "; a mask of what may be seen goes to mask=" if name == "bias" else ""
        raise TypeError(f"{name} is {what}: expected a floating tensor {axes}{hint}")
    check_floating(f"{name} has dtype ", t.dtype)
    if t.device != device:
        raise ValueError(f"{name} is on {t.device} but q is on {device}: expected the same device")
    check_broadcast(name, t, shape, axes)


def _choose(call: Call, name: str | None) -> Backend:
    name = named(name)
    if name is not None:
        reason = BACKENDS[name].refuse(call)
        if reason is not None:
            raise ValueError(f"backend={name!r} refuses this call: {reason}")
        return BACKENDS[name]
    return next(b for b in BACKENDS.values() if b.refuse(call) is None)


@dataclass(frozen=True)
class Explanation:
    """Which backend runs a call, and what each of them says of it."""

    backend: str
    reasons: dict[str, str]

    def __str__(self) -> str:
        return "\n".join(f"{'→' if name == self.backend else ' '} {name}: {why}" for name, why in self.reasons.items())


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Visible | Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    backend: str | None = None,
    return_lse: bool = False,
) -> Explanation:
    """Which backend `attend` would run for the same arguments, and why.

    >>> q = torch.randn(1, 8, 4, 128)
    >>> print(mh.explain(q, q, q, softcap=30.0))
    → native: the native kernel, ..., skipping what is hidden
      sdpa: refuses: torch's fused kernels have no softcap
      reference: the seven steps as written, with the whole (Q, K) matrix in memory
    """
    call = prepare(q, k, v, mask, scale, softcap, sinks, bias, dropout, return_lse)
    reasons = {}
    for name, candidate in BACKENDS.items():
        refusal = candidate.refuse(call)
        reasons[name] = candidate.note(call) if refusal is None else f"refuses: {refusal}"
    return Explanation(_choose(call, backend).name, reasons)

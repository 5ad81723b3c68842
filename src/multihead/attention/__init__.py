"""One function for steps 3 and 4, and the rules by which it picks who computes them.

The first backend that can compute the call exactly takes it. On a CPU they are asked in this order: `native` (the C++
kernel), `sdpa` (torch's fused kernels), `reference` (the seven steps as written). Elsewhere: `sdpa`, `flex` (torch's
FlexAttention), `reference`, and `flex` first where torch's fused kernels would need a (Q, K) mask. A backend that is
named, by `backend=` or `with mh.backend(...)`, takes the call or refuses it in words; it never passes it on.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from threading import local
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from multihead import kernel
from multihead.attention import largest
from multihead.attention.flex import Flex
from multihead.attention.reference import Reference
from multihead.attention.sdpa import SDPA
from multihead.call import Arguments, Backend, Call, Reason, under_autocast, without_autocast
from multihead.kernel import attend as by_kernel
from multihead.kernel import eligible, statistics
from multihead.kernel.backend import Native
from multihead.masks import Allowed, Joined, Mask, check_broadcast, see
from multihead.masks.intervals import Visible
from multihead.sizes import check_attend, check_floating, check_numbers, describe
from multihead.tensors import require_storage

if TYPE_CHECKING:
    from multihead import _native

FEW_ROWS = 16  # more than the kernel for a few rows takes on any CPU
BACKENDS: dict[str, Backend] = {b.name: b for b in (Native(), SDPA(), Flex(), Reference())}


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


def modules_watched(backend: str | None = None) -> Reason | None:
    """Why no projection of a call may bypass its module, or None: asked once for all of them."""
    if named(backend) not in (None, Native.name):
        return Reason("another backend is named", True)
    return eligible.modules_watched()


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
    return_max_logit: bool = False,
) -> Tensor | tuple[Tensor, ...]:
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
        backend: "native", "sdpa", "flex" or "reference"; unless given, the first that can.
        return_lse: give (out, lse); lse (B,H,Q) is the natural log of the softmax's denominator, sinks included, in
            float32 (float64 for float64).
        return_max_logit: give (out, top), or (out, lse, top); top (B,H) is the largest score that some query sees,
            after scale, softcap, bias and mask, sinks aside: −inf where none sees anything. It has no gradient.

    Returns:
        out (B,H,Q,V). A query that may see nothing gives 0, and an lse of −inf (with a sink, the sink's logit).

    >>> q, k, v = torch.randn(1, 8, 4, 128), torch.randn(1, 2, 4, 128), torch.randn(1, 2, 4, 64)
    >>> mh.attend(q, k, v, mask=mh.Causal()).shape
    torch.Size([1, 8, 4, 64])
    """
    reason = None
    unnamed = backend is None and _named.name is None
    if unnamed and not (return_lse or return_max_logit or dropout or torch._C._is_any_autocast_enabled()):
        found = eligible.attend((q, k, v, bias, sinks, scale, softcap, dropout), mask)
        if not isinstance(found, Reason):
            return found
        reason = found
    given = Arguments(q, k, v, mask, scale, softcap, sinks, bias, dropout, return_lse, return_max_logit)
    out, lse, top, _ = compute(given, backend, ineligible=reason)
    if not (return_lse or return_max_logit):
        return out
    return tuple(t for t in (out, lse if return_lse else None, top) if t is not None)


class Computed(NamedTuple):
    """What a call gives: out, and what else was wanted of it."""

    out: Tensor  # (B, H, Q, V)
    lse: Tensor | None = None  # (B, H, Q)
    top: Tensor | None = None  # (B, H), the largest score
    weights: Tensor | None = None  # (B, H, Q, K), before dropout, where the kernel gives them


def compute(
    given: Arguments, backend: str | None = None, want_weights: bool = False, ineligible: Reason | None = None
) -> Computed:
    """Steps 3 and 4 by the backend that takes the call. `ineligible`: why not straight by the kernel, where known."""
    name = named(backend)
    if ineligible is not None or not torch._C._is_any_autocast_enabled():
        return _compute(given, name, want_weights, ineligible)
    given = in_autocast_dtype(given)
    with without_autocast(given.q.device):
        return _compute(given, name, want_weights)


def _compute(given: Arguments, name: str | None, want_weights: bool, reason: Reason | None = None) -> Computed:
    if reason is None and (name is None or name == Native.name):
        read = eligible.attention(given, given.mask)
        if not isinstance(read, Reason):
            seed = _seed(given)
            if want_weights:
                return _with_weights(given, read, seed)
            out, lse, state = by_kernel.attend(
                read, given.q, seed=seed, want_lse=given.want_lse, want_state=given.want_top
            )
            return Computed(out, lse, None if state is None else largest.of_state(prepare(given), state))
        reason = read
    call = prepare(given, reason)
    chosen = _choose(call, name)
    if given.want_top and isinstance(chosen, Native):
        out, lse, state = chosen.run_with_state(call, _seed(given))
        return Computed(out, lse, largest.of_state(call, state))
    out, lse = chosen.run(call, _seed(given))
    return Computed(out, lse, largest.of_scores(call) if given.want_top else None)


def _with_weights(given: Arguments, read: "_native.Attention", seed: Tensor | None) -> Computed:
    """In one pass where the scores of all keys can be kept until a row ends, else from what the kernel left of it.

    A few rows are left to the lens: the kernel for them sums scores in another order than all others do, so that
    weights found beside it would not be to the last digit those that were used.
    """
    B, H, G, Q, K, _, _ = read.sizes
    if H // G * Q <= FEW_ROWS:
        out, lse, _ = by_kernel.attend(read, given.q, seed=seed, want_lse=given.want_lse)
        return Computed(out, lse)
    assert kernel.module is not None
    two_passes = kernel.in_pairs() and given.q.dtype is torch.bfloat16  # weights in one pass are made as float32
    if two_passes or kernel.module.most_weighed_keys < K:
        out, lse, state = by_kernel.attend(read, given.q, seed=seed, want_lse=given.want_lse, want_state=True)
        assert state is not None
        return Computed(out, lse, weights=statistics.weigh(prepare(given), state))
    weights = torch.zeros(B, H, Q, K, dtype=torch.promote_types(given.q.dtype, torch.float32), device=given.q.device)
    out, lse, _ = by_kernel.attend(read, given.q, seed=seed, want_lse=given.want_lse, weights=weights)
    return Computed(out, lse, weights=weights)


def _seed(given: Arguments) -> Tensor | None:
    return torch.randint(2**63 - 1, (), device=given.q.device) if given.dropout else None


def in_autocast_dtype(given: Arguments) -> Arguments:
    """The same call with q, k and v as autocast wants them."""
    if not isinstance(given.q, Tensor) or not under_autocast(given.q.device) or given.q.dtype == torch.float64:
        return given
    _require_storages(given)
    dtype = torch.get_autocast_dtype(given.q.device.type)
    q, k, v = (
        t.to(dtype) if isinstance(t, Tensor) and t.dtype.is_floating_point else t for t in (given.q, given.k, given.v)
    )
    return replace(given, q=q, k=k, v=v)


def _require_storages(given: Arguments) -> None:
    for name in ("q", "k", "v", "bias", "sinks"):
        require_storage(name, getattr(given, name))


def prepare(given: Arguments, ineligible: Reason | None = None) -> Call:
    """Check the arguments of `attend` and lower the mask."""
    _require_storages(given)
    given = in_autocast_dtype(given)
    q, k, v, bias, sinks, scale = given.q, given.k, given.v, given.bias, given.sinks, given.scale
    check_attend(q, k, v)
    (B, H, Q, D), K = q.shape, k.shape[2]
    mask = given.mask
    visible = mask.require_storages() if isinstance(mask, Visible) else see(mask, Q, K, q.device, B, H)
    check_numbers(scale, given.softcap, given.dropout, q.dtype)
    _check_extra("sinks", sinks, q.device, (H,), "(H,)")
    _check_extra("bias", bias, q.device, (B, H, Q, K), "(B,H,Q,K)")
    if sinks is not None and sinks.shape != (H,):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}: expected one logit for each of the H={H} query heads")
    scale = D**-0.5 if scale is None else scale
    return Call(q, k, v, visible, scale, given.softcap, sinks, bias, given.dropout, given.want_lse, ineligible)


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
    if name is not None:
        reason = BACKENDS[name].refuse(call)
        if reason is not None:
            raise ValueError(f"backend={name!r} refuses this call: {reason}")
        return BACKENDS[name]
    return next(BACKENDS[name] for name in _order(call) if BACKENDS[name].refuse(call) is None)


def _order(call: Call) -> tuple[str, ...]:
    """The backends that are asked to take a call that names none."""
    if call.q.device.type == "cpu":
        return Native.name, SDPA.name, Reference.name
    if SDPA.needs_mask(call):
        return Flex.name, SDPA.name, Reference.name
    return SDPA.name, Flex.name, Reference.name


@dataclass(frozen=True)
class Explanation:
    """Which backend runs a call, and what each of them says of it."""

    backend: str
    reasons: dict[str, str]
    notes: tuple[str, ...] = ()  # on how an argument is read, where it could be meant otherwise

    def __str__(self) -> str:
        lines = [f"{'→' if name == self.backend else ' '} {name}: {why}" for name, why in self.reasons.items()]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def _by_head(given: Arguments) -> tuple[str, ...]:
    """A note on each tensor of three axes whose first could as well be the batch's, as B is H."""
    (B, H), mask = given.q.shape[:2], given.mask
    parts = mask.parts if isinstance(mask, Joined) else (mask,)
    masks = [part.tensor if isinstance(part, Allowed) else part for part in parts]
    named = [*(("the mask", t) for t in masks), ("bias", given.bias)]
    return tuple(
        f"{name} has shape {tuple(t.shape)}, and B is H: it is taken for (H,Q,K); one for each row of the batch is "
        "given as [:, None] of it"
        for name, t in named
        if isinstance(t, Tensor) and t.dim() == 3 and t.shape[0] == B == H > 1
    )


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
    return_max_logit: bool = False,
) -> Explanation:
    """Which backend `attend` would run for the same arguments, and why.

    >>> q = torch.randn(1, 8, 4, 128)
    >>> print(mh.explain(q, q, q, softcap=30.0))
    → native: the native kernel, ..., skipping what is hidden
      sdpa: refuses: torch's fused kernels have no softcap
      flex: torch's FlexAttention, not compiled: with the whole (Q, K) matrix in memory (only where it is named)
      reference: the seven steps as written, with the whole (Q, K) matrix in memory
    """
    given = in_autocast_dtype(
        Arguments(q, k, v, mask, scale, softcap, sinks, bias, dropout, return_lse, return_max_logit)
    )
    with without_autocast(q.device) if isinstance(q, Tensor) else nullcontext():
        read = eligible.attention(given, mask)
        call = prepare(given, read if isinstance(read, Reason) else None)
        reasons = {}
        for name, candidate in BACKENDS.items():
            refusal = candidate.refuse(call)
            reasons[name] = candidate.note(call) if refusal is None else f"refuses: {refusal}"
            if refusal is None and name not in _order(call):
                reasons[name] += " (only where it is named)"
        return Explanation(_choose(call, named(backend)).name, reasons, _by_head(given))

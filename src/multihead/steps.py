"""The seven steps of multi-head attention: the specification, in plain torch, exact in any floating dtype.

Every line is one that a reader of the seven steps can point at, and every other implementation in this package is
measured against this file. It is differentiable twice, and a (query, key) pair that is hidden touches nothing: not the
output, not a gradient, not even when the hidden numbers are NaN.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from multihead.tensors import readable

Tap = Callable[[str, Tensor], Tensor]  # is shown each intermediate by its trace name, and may give back another


def _pass(name: str, t: Tensor) -> Tensor:
    return t


# Step 1, project ------------------------------------------------------------------------------------------------------


def project(
    x: Float[Tensor, "b n e"], w: Float[Tensor, "e h d"], bias: Float[Tensor, "h d"] | None = None
) -> Float[Tensor, "b n h d"]:
    """Step 1: every item times every head's matrix."""
    heads = torch.einsum("bne,ehd->bnhd", x, w)
    return heads if bias is None else heads + bias


# Step 2, split --------------------------------------------------------------------------------------------------------


def split(t: Float[Tensor, "b n h d"]) -> Float[Tensor, "b h n d"]:
    """Step 2: heads move in front of positions, so that each head is a problem of its own."""
    return t.transpose(1, 2)


# Step 3, score --------------------------------------------------------------------------------------------------------


def repeat_heads(t: Float[Tensor, "b g k d"], heads: int) -> Float[Tensor, "b h k d"]:
    """Key/value heads, once for each query head that reads them: head h reads key/value head h // (H // G)."""
    return t if t.shape[1] == heads else t.repeat_interleave(heads // t.shape[1], dim=1)


def score(q: Float[Tensor, "b h q d"], k: Float[Tensor, "b h k d"], scale: float) -> Float[Tensor, "b h q k"]:
    """Step 3: how well each query matches each key, q·kᵀ·scale."""
    if not (q.requires_grad or k.requires_grad) or (known_finite(q) and known_finite(k)):
        return torch.einsum("bhqd,bhkd->bhqk", q, k) * scale
    # The gradient of q is a sum over all keys, in which a hidden one has weight 0; but 0·NaN is NaN. So the gradient
    # flows through finite numbers only, and a score that is not finite comes in as a constant.
    exact = torch.einsum("bhqd,bhkd->bhqk", q.detach(), k.detach())
    finite = torch.einsum("bhqd,bhkd->bhqk", only_finite(q), only_finite(k))
    return torch.where(exact.isfinite(), finite, exact) * scale


def hide(
    scores: Float[Tensor, "b h q k"],
    *,
    allowed: Bool[Tensor, "..."] | None = None,
    softcap: float | None = None,
    bias: Float[Tensor, "..."] | None = None,
) -> Float[Tensor, "b h q k"]:
    """Step 3: cap the scores, add the bias, and set what the mask hides to −inf; −inf in the bias hides as well."""
    masked = scores
    if softcap is not None:
        masked = torch.tanh(masked / softcap) * softcap
    if bias is not None:
        shown = bias != -torch.inf
        masked = masked + bias.masked_fill(~shown, 0)
        allowed = shown if allowed is None else allowed & shown
    return masked if allowed is None else masked.masked_fill(~allowed, -torch.inf)


def weigh(
    masked: Float[Tensor, "b h q k"], sinks: Float[Tensor, " h"] | None = None
) -> tuple[Float[Tensor, "b h q k"], Float[Tensor, "b h q"]]:
    """Step 3: softmax over keys, and the logarithm of its denominator. A row that sees nothing is all zero.

    A sink is a logit of the head's own that joins the denominator and has no value.
    """
    if masked.shape[-1]:
        top = masked.detach().amax(dim=-1)  # (B, H, Q)
    else:
        top = masked.new_full(masked.shape[:-1], -torch.inf)
    if sinks is not None:
        top = torch.maximum(top, sinks.detach()[:, None])
    empty = top == -torch.inf
    top = top.masked_fill(empty, 0)
    # From the largest score down, so that the gradient of the log-sum-exp has all its digits too.
    logits = masked - top[..., None]
    if sinks is not None:
        logits = torch.cat((logits, (sinks[:, None] - top)[..., None]), dim=-1)  # (B, H, Q, K + 1)
    logits = logits.masked_fill(empty[..., None], 0)  # nothing is visible: −inf alone would be NaN
    weights = torch.softmax(logits, dim=-1)[..., : masked.shape[-1]].masked_fill(masked == -torch.inf, 0)
    return weights, (top + torch.logsumexp(logits, dim=-1)).masked_fill(empty, -torch.inf)


# Step 4, mix ----------------------------------------------------------------------------------------------------------


def mix(
    weights: Float[Tensor, "b h q k"], v: Float[Tensor, "b h k v"], seen: Bool[Tensor, "..."] | None = None
) -> Float[Tensor, "b h q v"]:
    """Step 4: each row a weighted mean of the value rows it has `seen`; the others, even NaN, stay out."""
    if seen is None or known_finite(v):
        return torch.einsum("bhqk,bhkv->bhqv", weights, v)
    mixed = torch.einsum("bhqk,bhkv->bhqv", weights, only_finite(v))
    counts = seen.expand_as(weights).to(v.dtype)
    for odd in (torch.nan, torch.inf, -torch.inf):
        there = v.isnan() if odd != odd else v == odd
        met = torch.einsum("bhqk,bhkv->bhqv", counts, there.to(v.dtype)) > 0
        mixed = mixed + torch.zeros_like(mixed).masked_fill(met, odd)
    return mixed


# Steps 5 to 7, transpose back, concatenate, output --------------------------------------------------------------------


def transpose_back(heads: Float[Tensor, "b h q v"]) -> Float[Tensor, "b q h v"]:
    """Step 5: positions in front of heads again."""
    return heads.transpose(1, 2)


def concatenate(transposed: Float[Tensor, "b q h v"]) -> Float[Tensor, "b q hv"]:
    """Step 6: the heads side by side, Merge(head₁ … head_τ)."""
    return transposed.flatten(2)


def output(
    merged: Float[Tensor, "b q hv"], w: Float[Tensor, "h v e"], bias: Float[Tensor, " e"] | None = None
) -> Float[Tensor, "b q e"]:
    """Step 7: times W_o, so that heads mix."""
    mixed = torch.einsum("bqm,me->bqe", merged, w.flatten(0, 1))
    return mixed if bias is None else mixed + bias


# The steps together ---------------------------------------------------------------------------------------------------


def attend(
    q: Float[Tensor, "b h q d"],
    k: Float[Tensor, "b g k d"],
    v: Float[Tensor, "b g k v"],
    *,
    allowed: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " h"] | None = None,
    bias: Float[Tensor, "..."] | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    tap: Tap = _pass,
) -> tuple[Float[Tensor, "b h q v"], Float[Tensor, "b h q"]]:
    """Steps 3 and 4 for every head at once; `allowed` and `bias` broadcast to (B,H,Q,K).

    Gives the heads and the log-sum-exp of the scores. float16 and bfloat16 are computed in float32.

    >>> q = k = torch.zeros(1, 1, 2, 4)
    >>> v = torch.tensor([[[[1.0], [3.0]]]])
    >>> attend(q, k, v, allowed=torch.tensor([[True, False], [True, True]]))[0].flatten().tolist()
    [1.0, 2.0]
    """
    dtype, heads = q.dtype, q.shape[1]
    exact = torch.promote_types(dtype, torch.float32)
    q, k, v = q.to(exact), repeat_heads(k.to(exact), heads), repeat_heads(v.to(exact), heads)
    sinks, bias = (None if t is None else t.to(exact) for t in (sinks, bias))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = tap("scores", score(q, k, scale))  # (B, H, Q, K)
    masked = tap("masked", hide(scores, allowed=allowed, softcap=softcap, bias=bias))
    weights, lse = weigh(masked, sinks)
    weights = tap("weights", weights)
    seen = None if allowed is None and bias is None else masked != -torch.inf
    if dropout:
        assert seed is not None, "dropout needs a seed"
        weights = weights * kept(seed, weights.shape, dropout) * (1 / (1 - dropout) if dropout < 1 else 0.0)
    return mix(weights, v, seen).to(dtype), lse  # (B, H, Q, V), (B, H, Q)


def seven_steps(
    x: Float[Tensor, "b n e"],
    context: Float[Tensor, "b k c"],
    w_q: Float[Tensor, "e h d"],
    w_k: Float[Tensor, "c g d"],
    w_v: Float[Tensor, "c g v"],
    w_o: Float[Tensor, "h v e"],
    *,
    b_q: Float[Tensor, "h d"] | None = None,
    b_k: Float[Tensor, "g d"] | None = None,
    b_v: Float[Tensor, "g v"] | None = None,
    b_o: Float[Tensor, " e"] | None = None,
    turn_q: Callable[[Tensor], Tensor] | None = None,
    turn_k: Callable[[Tensor], Tensor] | None = None,
    **options: object,
) -> dict[str, Tensor]:
    """All seven steps from plain weights: every intermediate by its trace name.

    `turn_q` and `turn_k` stand for what happens to the heads of q and k before they meet (QK-norm, RoPE).
    `options` are those of `attend`. In self-attention `context` is `x`.
    """
    found: dict[str, Tensor] = {}

    def record(name: str, t: Tensor) -> Tensor:
        found[name] = t
        return t

    q = record("q", project(x, w_q, b_q))
    k = record("k", project(context, w_k, b_k))
    v = record("v", project(context, w_v, b_v))
    q_heads = record("q_heads", split(q) if turn_q is None else turn_q(split(q)))
    k_heads = record("k_heads", split(k) if turn_k is None else turn_k(split(k)))
    v_heads = record("v_heads", split(v))
    heads = record("heads", attend(q_heads, k_heads, v_heads, tap=record, **options)[0])  # type: ignore[arg-type]
    transposed = record("transposed", transpose_back(heads))
    merged = record("merged", concatenate(transposed))
    record("output", output(merged, w_o, b_o))
    return found


# Numbers that are not finite ------------------------------------------------------------------------------------------


def only_finite(t: Tensor) -> Tensor:
    """`t` with 0 for every NaN and inf, and no gradient there."""
    return torch.where(t.isfinite(), t, 0)


def known_finite(t: Tensor) -> bool:
    """Whether `t` is known to hold no NaN and no inf; False where it cannot be looked at."""
    t = t.detach()
    return readable(t) and bool(t.sum().isfinite() or t.isfinite().all())  # a finite sum settles it in one pass


# Dropout --------------------------------------------------------------------------------------------------------------


def _scramble(x: Tensor) -> Tensor:
    """32 well-mixed bits of a 32-bit number (held in int64), as C. Wellons' lowbias32 does."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def kept(
    seed: Tensor, shape: tuple[int, ...] | torch.Size, dropout: float, first_query: int = 0, first_key: int = 0
) -> Bool[Tensor, "b h q k"]:
    """Which of (B, H, Q, K) weights dropout keeps: a function of (seed, b, h, q, k) and nothing else.

    So every backend, thread and block drops the same ones. A block of a larger matrix starts at (first_query,
    first_key).
    """
    B, H, Q, K = shape
    device = seed.device
    row = _scramble(_scramble(seed & 0xFFFFFFFF) ^ ((seed >> 32) & 0xFFFFFFFF))
    row = _scramble(row ^ torch.arange(B, device=device)[:, None, None, None])
    row = _scramble(row ^ torch.arange(H, device=device)[:, None, None])
    row = _scramble(row ^ torch.arange(first_query, first_query + Q, device=device)[:, None])
    key = _scramble((torch.arange(first_key, first_key + K, device=device) + 0x9E3779B9) & 0xFFFFFFFF)
    return _scramble(row ^ key) >= min(int(dropout * 2**32), 2**32 - 1)

"""Attention over a part of the keys, and its gradients once the whole is known.

With the whole's output `o` and denominator, a part with output `o_i` and log-sum-exp `l_i` counts by its share
`w = exp(l_i) / denominator`: its output has the gradient `w·d_o`, its log-sum-exp `w·(d_o·o_i − d_o·o)`. So nothing
of a part has to be kept from the forward pass: it is computed once more, and differentiated.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from multihead import steps
from multihead.attention import attend
from multihead.distributed.blocks import Range, cut, cut_scores
from multihead.distributed.merge import Denominator
from multihead.masks.intervals import Visible
from multihead.sizes import describe

DROPOUT_TILE = 2**22  # scores held at once where weights are dropped


@dataclass(frozen=True)
class Call:
    """One call of attention over the whole sequence: what all parts of it share."""

    visible: Visible  # all queries, all keys
    scale: float | None
    softcap: float | None
    dropout: float
    seed: int
    backend: str | None
    first_head: int = 0  # the number of head 0 in the whole layer, for dropout
    local_rows: Range | None = None  # the queries that a bias has rows for, where not all


def attend_part(
    call: Call, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, queries: Range, keys: Range
) -> tuple[Tensor, Tensor]:
    """Out (B,H,q,V) and lse (B,H,q) of a range of the queries over a range of the keys; `bias` is cut already."""
    visible = cut(call.visible, queries, keys)
    if call.dropout:
        return _with_dropout(call, q, k, v, bias, visible, queries[0], keys[0])
    options: dict[str, Any] = {"scale": call.scale, "softcap": call.softcap, "bias": bias, "backend": call.backend}
    return attend(q, k, v, visible, return_lse=True, **options)  # type: ignore[return-value]


def _with_dropout(
    call: Call, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, visible: Visible, first_query: int, first_key: int
) -> tuple[Tensor, Tensor]:
    """The same with dropout: which weights are kept depends on their place in the whole."""
    if call.backend not in (None, "reference"):
        raise ValueError(f"backend={call.backend!r}: dropout over several ranks is computed by reference")
    (B, H, Q, _), K, first = q.shape, k.shape[2], call.first_head
    seed = torch.tensor(call.seed, device=q.device)
    rows = max(DROPOUT_TILE // max(B * H * K, 1), 1)
    found = []
    for start in range(0, max(Q, 1), rows):
        part = (start, min(start + rows, Q))

        def drop(name: str, t: Tensor, part: Range = part) -> Tensor:
            if name != "weights":
                return t
            shape = (B, first + H, part[1] - part[0], K)
            kept = steps.kept(seed, shape, call.dropout, first_query + part[0], first_key)[:, first:]
            return t * kept * (1 / (1 - call.dropout) if call.dropout < 1 else 0.0)

        options: dict[str, Any] = {"scale": call.scale, "softcap": call.softcap, "tap": drop}
        allowed = cut(visible, part, (0, K)).allowed(q.device)
        found.append(
            steps.attend(
                q[:, :, part[0] : part[1]], k, v, allowed=allowed, bias=cut_scores(bias, part, None), **options
            )
        )
    out, lse = (torch.cat(parts, 2) for parts in zip(*found))
    return out, lse


@dataclass
class Whole:
    """What is known of a run of queries once all keys have been seen, and what it is to be differentiated by."""

    q: Tensor
    out: Tensor
    denominator: Denominator
    d_out: Tensor

    @cached_property
    def moved(self) -> Tensor:
        """d_o·o, (B,H,q)."""
        return self.dot(self.out)

    def dot(self, out: Tensor) -> Tensor:
        """The whole's d_o times an output, (B,H,q), in float64: what is left of two of them is a small difference.

        Head by head, for float64 copies of all heads would be the largest tensors of the backward pass.
        """
        heads = zip(self.d_out.unbind(1), out.unbind(1))
        return torch.stack([(d.double() * o.double()).sum(-1) for d, o in heads], 1)


@torch.enable_grad()
def differentiate_part(
    call: Call, whole: Whole, k: Tensor, v: Tensor, bias: Tensor | None, queries: Range, keys: Range, bias_too: bool
) -> list[Tensor]:
    """The gradients of q, k, v, and of the bias where it is wanted, of one part; in the dtypes of these."""
    inputs = [t.detach().requires_grad_() for t in (whole.q, k, v)]
    cut_bias = None if bias is None else bias.detach().requires_grad_(bias_too)
    out, lse = attend_part(call, inputs[0], inputs[1], inputs[2], cut_bias, queries, keys)
    with torch.no_grad():
        w = whole.denominator.share(lse)
        d_lse = (w * (whole.dot(out) - whole.moved)).to(lse.dtype)
        d_part = (whole.d_out.to(lse.dtype) * w[..., None]).to(out.dtype)
    wanted = inputs + ([cut_bias] if bias_too and cut_bias is not None else [])
    return list(torch.autograd.grad([out, lse], wanted, [d_part, d_lse]))


def d_sinks(whole: Whole, sinks: Tensor) -> Tensor:
    """The gradient of the sinks, (H,): a sink has a weight and no value."""
    top = whole.denominator.top
    weight = whole.denominator.share(sinks.detach().to(top.dtype)[:, None].expand_as(top))
    return -(weight * whole.moved).sum((0, 2)).to(top.dtype)


def cut_bias(call: Call, bias: Tensor | None, queries: Range, keys: Range) -> Tensor | None:
    """The rows and columns of a bias for a part; it has rows for all queries, or for this rank's only."""
    if bias is not None and call.local_rows is not None and bias.dim() >= 2 and bias.shape[-2] > 1:
        queries = (queries[0] - call.local_rows[0], queries[1] - call.local_rows[0])
    return cut_scores(bias, queries, keys)


def check_bias(bias: Tensor | None, B: int, H: int, mine: Range, Q: int, K: int) -> Range | None:
    """Refuse a bias that cannot be cut; the queries it has rows for where these are only this rank's."""
    if bias is None:
        return None
    shape = tuple(bias.shape)
    full = (1,) * (4 - len(shape)) + shape
    local = mine[1] - mine[0]
    fits = (
        len(shape) <= 4 and full[0] in (1, B) and full[1] in (1, H) and full[2] in (1, Q, local) and full[3] in (1, K)
    )
    if not fits:
        raise ValueError(
            f"bias is {describe(bias)}: expected one that broadcasts to (B,H,Q,K)={(B, H, Q, K)} of the whole "
            f"sequence, or that has rows for this rank's {local} queries and columns for all {K} keys"
        )
    return mine if full[2] == local and local != Q and local != 1 else None


def at_head(call: Call, first: int, visible: Visible | None = None) -> Call:
    """The same call for heads from `first` on."""
    return replace(call, first_head=call.first_head + first, visible=call.visible if visible is None else visible)

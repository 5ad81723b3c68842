"""The largest logit of each head: the largest score that some query sees, after scale, softcap, bias and mask.

What QK-clipping in training watches. The native kernel knows it of each row when the row ends, so there it costs
nothing; beside other backends it is a pass of its own, a block of queries at a time.
"""

import torch
from torch import Tensor

from multihead import steps
from multihead.call import Call
from multihead.kernel import statistics

AT_ONCE = 2**22  # scores held at once


def of_state(call: Call, state: Tensor) -> Tensor:
    """(B, H), from the kernel's state (B,H,Q,2) of each row: its largest score and a factor (see native/README.md)."""
    top, factor = state.detach().unbind(-1)
    score = top * statistics.unit_scale(call, call.visible.dense)
    dead = (top == torch.inf) & (factor == 0)
    score = score.masked_fill(dead, -torch.inf).masked_fill(factor.isnan(), torch.nan)
    return _over_queries(score)


@torch.no_grad()
def of_scores(call: Call) -> Tensor:
    """(B, H), from the scores themselves."""
    (B, H, Q, _), K = call.q.shape, call.k.shape[2]
    exact = torch.promote_types(call.q.dtype, torch.float32)
    k = steps.repeat_heads(call.k.detach().to(exact), H)
    allowed, bias = call.allowed(), None if call.bias is None else call.bias.detach().to(exact)
    size = max(1, AT_ONCE // max(1, B * H * K))
    tops = [call.q.new_full((B, H, 1), -torch.inf, dtype=exact)]
    for first in range(0, Q if K else 0, size):
        rows = slice(first, first + size)
        scores = steps.score(call.q[:, :, rows].detach().to(exact), k, call.scale)
        seen = _rows(allowed, rows)
        masked = steps.hide(scores, allowed=seen, softcap=call.softcap, bias=_rows(bias, rows))
        tops.append(masked.amax(-1))
    return _over_queries(torch.cat(tops, -1))


def _rows(t: Tensor | None, rows: slice) -> Tensor | None:
    return t if t is None or t.dim() < 2 or t.shape[-2] == 1 else t[..., rows, :]


def _over_queries(score: Tensor) -> Tensor:
    return score.amax(-1) if score.shape[-1] else score.new_full(score.shape[:-1], -torch.inf)

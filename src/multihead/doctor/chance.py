"""Randomness: a candidate that answers twice differently, and where its dropout sits.

With one item there is one key, and its weight is 1 whatever the score. So dropout on the scores does nothing there;
dropout on the weights multiplies each head by 0 or 1/(1−p), which the heads' known contributions tell; and dropout on
the output does so number by number.
"""

from dataclasses import replace

import torch
from torch import Tensor

from multihead.doctor.candidate import Candidate, Failure
from multihead.doctor.report import Named
from multihead.doctor.variant import Call, Specification
from multihead.doctor.weights import Weights

SAMPLES = 24
EVAL = (
    "dropout active in eval",
    "It answers differently every time it is called: dropout is at work although the module is in eval mode. "
    "`F.dropout(w, p)` drops unless it is told `training=False`; a dropout probability given to "
    "scaled_dot_product_attention is used in eval too.",
    "weights = F.dropout(weights, p, training=self.training)          # or an nn.Dropout module, and model.eval()",
)
SCORES = (
    "dropout applied to scores",
    "It answers differently every time, and not when there is one item only: dropout acts before the softmax. A "
    "dropped score becomes 0, which is not a weight of 0, and the kept ones are sharpened by 1/(1−p). Dropout belongs "
    "after the softmax, and only in training.",
    "weights = scores.softmax(dim=-1)\nweights = F.dropout(weights, p, training=self.training)",
)


def explain(candidate: Candidate, weights: Weights, dtype: torch.dtype) -> Named | None:
    """Where the dropout of a candidate that answers differently every time sits; None if that is not what it is."""
    generator = torch.Generator().manual_seed(1)
    s = weights.sizes
    x = torch.randn(1, 1, s.E, generator=generator, dtype=torch.float64).to(dtype)
    context = torch.randn(1, 1, s.C, generator=generator, dtype=torch.float64).to(dtype) if s.C != s.E else None
    call = Call(x, context)
    try:
        answers = torch.stack([replace(candidate, form=None).answer(call).double() for _ in range(SAMPLES)])
    except Failure:
        return None
    trace = Specification(weights, call).trace()
    right, merged = trace["output"][0, 0], trace["merged"][0, 0]
    if answers.shape[1:] != (1, 1, s.E):
        return None
    answers = answers[:, 0, 0]
    tolerance = 1e4 * torch.finfo(dtype).eps * float(right.abs().max())
    if bool(((answers - right).abs() <= tolerance).all()):
        return Named(SCORES[0], 3, *SCORES[1:])
    bias = 0 if weights.b["o"] is None else weights.b["o"].double()
    parts = torch.einsum("hv,hve->he", merged.view(s.H, s.V), weights.w["o"].double())  # what each head contributes
    factors = torch.linalg.lstsq(parts.T, (answers - bias).T).solution  # (H, samples)
    if s.H < s.E and float((parts.T @ factors - (answers - bias).T).abs().max()) <= tolerance:
        p = _probability(factors)
        if not p and weights.sinks is not None:  # beside a sink, one item's weight does depend on its score
            return Named(SCORES[0], 3, *SCORES[1:])
        return Named(f"{EVAL[0]} (on the weights{p})", 3, *EVAL[1:])
    p = _probability(answers / right)
    if p:
        return Named(f"{EVAL[0]} (on the output{p})", 7, *EVAL[1:])
    return None


def _probability(factors: Tensor) -> str:
    """`, p=0.1`, if all factors are 0 or one and the same number above 1."""
    kept = factors[factors.abs() > 1e-3]
    if not kept.numel() or kept.numel() == factors.numel() or float((kept - kept.mean()).abs().max()) > 1e-2:
        return ""
    return f", p={1 - 1 / float(kept.mean()):.2g}" if float(kept.mean()) > 1 else ", kept ones not scaled"

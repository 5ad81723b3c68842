"""What single choices of a variant come down to: rows packed otherwise, a range that ends, what is done to scores."""

import math

import torch
from torch import Tensor

from multihead.doctor.weights import Weights
from multihead.positions import alibi, alibi_slopes


def repacked(rows: dict[str, Tensor], packing: str) -> dict[str, Tensor]:
    """q, k and v, (H, D, …) each, after they were packed one way and read another."""
    q, k, v = rows["q"], rows["k"], rows["v"]
    H, D, *rest = q.shape
    if packing == "split":  # packed per head, read per matrix
        flat = torch.stack((q, k, v), 1).reshape(3, H, D, *rest)
        return dict(zip("qkv", flat.unbind(0)))
    flat = torch.stack((q, k, v))  # packed per matrix: (3, H, D, …)
    if packing == "per head":
        return dict(zip("qkv", flat.reshape(H, 3, D, *rest).unbind(1)))
    return dict(zip("qkv", flat.reshape(H, D, 3, *rest).unbind(2)))


def beyond(t: Tensor, overflow: str) -> Tensor:
    """`t` as a dtype would hold it, as far as its range goes: what is beyond it is inf, what is below it 0."""
    limits = torch.finfo(getattr(torch, overflow.partition(":")[2]))
    t = torch.where(t.abs() > limits.max, t.sign() * torch.inf, t)
    return torch.where(t.abs() < limits.smallest_normal * limits.eps / 2, 0.0, t)


def scale_of(w: Weights, how: str, K: int) -> float:
    E, H, D = w.sizes.E, w.sizes.H, w.sizes.D
    if how.startswith("times:"):
        return w.scale * float(how[6:])
    return {
        "right": w.scale, "none": 1.0, "after": 1.0, "√E": E**-0.5, "D": 1 / D, "E": 1 / E, "√H": H**-0.5, "H": 1 / H,
        "times √D": D**0.5, "√K": K**-0.5, "√HD": (H * D) ** -0.5, "1/√D": D**-0.5,
    }[how]  # fmt: skip


def capped(scores: Tensor, cap: float, how: str) -> Tensor:
    """The scores as softcap · tanh(scores / softcap), or as what is taken for it."""
    if how == "clamped":
        return scores.clamp(-cap, cap)
    once = torch.tanh(scores / cap) * (1 if how == "not multiplied" else cap)
    return torch.tanh(once / cap) * cap if how == "twice" else once


def fading(how: str, H: int, Q: int, K: int) -> Tensor:
    """ALiBi, (H, Q, K): "alibi", or with other slopes or another sign."""
    right = alibi(H, Q, K, dtype=torch.float64)
    distance = right / alibi_slopes(H, dtype=torch.float64)[:, None, None]  # negative
    first = {"from 1": 0, "by H": 1}.get(how)
    if first is not None:
        slopes = [2 ** (-8 * (h + first) / H) for h in range(H)]
        return distance * torch.tensor(slopes, dtype=torch.float64)[:, None, None]
    if how == "signed":
        later = torch.arange(K) > torch.arange(Q)[:, None] + (K - Q)
        return torch.where(later, -right, right)
    return -right if how == "growing" else right


def sunk(w: Weights, how: str, masked: Tensor) -> Tensor:
    """The sinks' logits, (B, H, Q, 1), of a mistake."""
    assert w.sinks is not None
    logits = w.sinks.view(1, -1, 1, 1).expand(*masked.shape[:-1], 1)
    if how == "unshifted":  # e to the scores less the row's largest, and e to the sink as it is
        return logits + masked.amax(-1, keepdim=True)
    if how == "head 0":
        return logits[:, :1].expand_as(logits)
    return {"scaled": logits * w.scale, "negated": -logits, "twice": logits + math.log(2)}[how]

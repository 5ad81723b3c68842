"""Decision 6 for outputs and gradients: at most twice the error of the plain implementation in the same dtype."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from multihead import steps
from tests import cases

Found = dict[str, Tensor]
ORDERS = ("fused", "one by one", "from the end")  # in which plain may sum


def exact(
    t: Found, mask: Any, weight: Tensor, scale: float | None = None, softcap: float | None = None
) -> dict[str, np.ndarray]:
    """Output and gradients by NumPy in extended precision, sharing no code with the package."""
    n = {name: value.detach().double().numpy().astype(np.longdouble) for name, value in t.items()}
    (B, _, Q, D), (_, G, K, _), group = n["q"].shape, n["k"].shape, n["q"].shape[1] // n["k"].shape[1]
    k, v = (np.repeat(n[name], group, axis=1) for name in "kv")
    scale = np.longdouble(D**-0.5 if scale is None else scale)
    raw = np.einsum("bhqd,bhkd->bhqk", n["q"], k) * scale
    capped = raw if softcap is None else np.tanh(raw / softcap) * softcap
    logits = capped + n.get("bias", np.longdouble(0))
    if mask is not None:
        logits = np.where(mask.dense(Q, K).numpy(), logits, -np.inf)
    sink = np.broadcast_to(n["sinks"][:, None] if "sinks" in n else -np.inf, logits.shape[:-1])
    top = np.maximum(logits.max(-1, initial=-np.inf), sink)
    top = np.where(top == -np.inf, 0, top)
    powers, sunk = np.exp(logits - top[..., None]), np.exp(sink - top)
    total = powers.sum(-1) + sunk
    total = np.where(total == 0, 1, total)
    p, d = powers / total[..., None], weight.double().numpy().astype(np.longdouble)
    out = np.einsum("bhqk,bhkv->bhqv", p, v)
    moved = (d * out).sum(-1)
    d_logits = p * (np.einsum("bhqv,bhkv->bhqk", d, v) - moved[..., None])
    d_raw = d_logits if softcap is None else d_logits * (1 - (capped / softcap) ** 2)

    def grouped(a: np.ndarray) -> np.ndarray:
        return a.reshape(B, G, group, *a.shape[2:]).sum(2)

    found = {
        "out": out,
        "q": np.einsum("bhqk,bhkd->bhqd", d_raw, k) * scale,
        "k": grouped(np.einsum("bhqk,bhqd->bhkd", d_raw, n["q"]) * scale),
        "v": grouped(np.einsum("bhqk,bhqv->bhkv", p, d)),
    }
    if "sinks" in n:
        found["sinks"] = -(sunk / total * moved).sum((0, 2))
    if "bias" in n:
        shape = (1,) * (4 - n["bias"].ndim) + n["bias"].shape
        axes = tuple(axis for axis in range(4) if shape[axis] == 1)
        found["bias"] = d_logits.sum(axes, keepdims=True).reshape(n["bias"].shape)
    return found


def plain(
    t: Found, mask: Any, weight: Tensor, order: str, scale: float | None = None, softcap: float | None = None
) -> Found:
    """The same with every operation rounded to the dtype; `order`: see ORDERS."""
    made = {name: value.detach().clone().requires_grad_() for name, value in t.items()}
    q, H = made["q"], made["q"].shape[1]
    k, v = (steps.repeat_heads(made[name], H) for name in "kv")
    bias, Q, K = made.get("bias"), q.shape[2], k.shape[2]
    allowed = torch.ones(Q, K, dtype=torch.bool) if mask is None else mask.dense(Q, K)
    if order == "from the end":
        q, k, v, allowed = q.flip(-1), k.flip(-1, -2), v.flip(-2), allowed.flip(-1)
        bias = bias.flip(-1) if bias is not None and bias.shape[-1] > 1 else bias
    product = cases.one_by_one if order == "one by one" else cases.fused
    scores = product(q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights, _ = steps.weigh(steps.hide(scores, allowed=allowed, softcap=softcap, bias=bias), made.get("sinks"))
    out = torch.einsum("bhqk,bhkv->bhqv", weights, v)
    (out * weight).sum().backward()
    return {"out": out.detach(), **{name: value.grad for name, value in made.items()}}


def error(found: Tensor, right: np.ndarray) -> float:
    difference = np.abs(found.double().numpy().astype(np.longdouble) - right)
    return float(difference.max(initial=0))


def check(name: str, found: Tensor, plains: list[Tensor], right: np.ndarray, dtype: torch.dtype) -> list[str]:
    """What is wrong, in words; nothing where the bound holds."""
    if found.shape != right.shape:
        return [f"{name}: {tuple(found.shape)} instead of {right.shape}"]
    rounded = 4  # parts that are rounded before they are put together: one for each of up to so many ranks
    own = rounded * torch.finfo(dtype).eps * float(np.abs(right).max(initial=0))
    most = 2 * max(error(p, right) for p in plains) + own
    off = error(found, right)
    return [] if off <= most else [f"{name}: off by {off:.3g}, at most {most:.3g} expected"]

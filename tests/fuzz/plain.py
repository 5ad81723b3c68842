"""The plain implementation in torch, every operation rounded to its dtype, and the bound that its error sets.

Decision 6: the error against the oracle may be twice that of the plain implementation, and one rounding of the largest
number more. "Plain" has no one order of summation: torch's products sum in several parts and with fused multiply-add, and
on a handful of numbers any one order may be lucky. So the worst of three orders counts. Shares nothing with the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]


def one_by_one(a: Tensor, b: Tensor) -> Tensor:
    """A matrix product that rounds every operation: no fused multiply-add, no clever order."""
    total = a[..., :0].sum(-1, keepdim=True) * b[..., :0, :].sum(-2, keepdim=True)  # 0, with a gradient
    for i in range(a.shape[-1]):
        total = total + a[..., i, None] * b[..., i, None, :]
    return total


def from_the_end(a: Tensor, b: Tensor) -> Tensor:
    return one_by_one(a.flip(-1), b.flip(-2))


ORDERS: tuple[Product, ...] = (torch.matmul, one_by_one, from_the_end)

Sum = Callable[[Tensor], Tensor]


def sum_one_by_one(t: Tensor) -> Tensor:
    """The sum along the last axis, every addition rounded."""
    return t.cumsum(-1)[..., -1] if t.shape[-1] else t.sum(-1)


SUMS: dict[Product, Sum] = {
    torch.matmul: lambda t: t.sum(-1),
    one_by_one: sum_one_by_one,
    from_the_end: lambda t: sum_one_by_one(t.flip(-1)),
}


def score(q: Tensor, k: Tensor, seen: Tensor, scale: float, softcap: float | None = None, bias: Tensor | None = None,
          product: Product = torch.matmul) -> Tensor:  # fmt: skip
    """What the softmax sees, (B,H,Q,K): −inf where hidden."""
    k = k.repeat_interleave(q.shape[1] // max(k.shape[1], 1), 1)
    scores = product(q, k.mT) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        seen = seen & (bias != -math.inf)
        scores = scores + bias.to(q.dtype).masked_fill(bias == -math.inf, 0.0)
    return scores.masked_fill(~seen, -math.inf)


def weigh(q: Tensor, k: Tensor, seen: Tensor, scale: float, softcap: float | None = None, sinks: Tensor | None = None,
          bias: Tensor | None = None, product: Product = torch.matmul) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Weights (B,H,Q,K), and the log-sum-exp."""
    scores = score(q, k, seen, scale, softcap, bias, product)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(q.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    some = (scores != -math.inf).any(-1, keepdim=True)
    scores = scores.masked_fill(~some, 0.0)
    lse = torch.logsumexp(scores, -1) if scores.shape[-1] else scores.sum(-1)
    weights = torch.softmax(scores, -1).masked_fill(~some, 0.0)
    return weights[..., : k.shape[2]], lse.masked_fill(~some[..., 0], -math.inf)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, softcap: float | None = None,
           sinks: Tensor | None = None, bias: Tensor | None = None, product: Product = torch.matmul) -> tuple[Tensor, Tensor]:  # fmt: skip
    weights, lse = weigh(q, k, seen, scale, softcap, sinks, bias, product)
    return product(weights, v.repeat_interleave(q.shape[1] // max(v.shape[1], 1), 1)), lse


@dataclass
class Layer:
    """The seven steps with the parameters of a layer, by name."""

    parameters: dict[str, Tensor]
    H: int
    G: int
    scale: float
    softcap: float | None
    rope: tuple[float, int, str] | None  # base, dim, pairing
    product: Product = torch.matmul

    def _project(self, name: str, x: Tensor) -> Tensor:
        y = self.product(x, self.parameters[f"{name}.weight"].mT)
        bias = self.parameters.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _ready(self, name: str, x: Tensor, heads: int, positions: Tensor) -> Tensor:
        t = self._project(f"{name}_proj", x).unflatten(-1, (heads, -1)).transpose(1, 2)
        gain = self.parameters.get(f"{name}_norm.weight")
        if gain is not None:
            t = t * torch.rsqrt((t * t).mean(-1, keepdim=True) + 1e-6) * gain
        return t if self.rope is None else self._rotate(t, positions)

    def _rotate(self, t: Tensor, positions: Tensor) -> Tensor:
        assert self.rope is not None
        base, dim, pairing = self.rope
        dtype = torch.promote_types(t.dtype, torch.float32)  # angles of a position in the thousands need the digits
        angle = positions.to(dtype)[:, None, :, None] * base ** (-torch.arange(0, dim, 2, dtype=dtype) / dim)
        wide, half = t[..., :dim].to(dtype), dim // 2
        a, b = (wide[..., :half], wide[..., half:]) if pairing == "halves" else (wide[..., ::2], wide[..., 1::2])
        one, other = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
        joined = torch.cat([one, other], -1) if pairing == "halves" else torch.stack([one, other], -1).flatten(-2)
        return torch.cat([joined.to(t.dtype), t[..., dim:]], -1)

    def keys_and_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        v = self._project("v_proj", x).unflatten(-1, (self.G, -1)).transpose(1, 2)
        return self._ready("k", x, self.G, positions), v

    def __call__(
        self, x: Tensor, k: Tensor, v: Tensor, seen: Tensor, positions: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        q = self._ready("q", x, self.H, positions)
        heads, _ = attend(q, k, v, seen, self.scale, self.softcap, self.parameters.get("sinks"), bias, self.product)
        return self._project("o_proj", heads.transpose(1, 2).flatten(-2))


# The bound ------------------------------------------------------------------------------------------------------------


class Wrong(AssertionError):
    """What a call gave is not what it may give."""


@dataclass
class Judged:
    """An error, and the most that it may be."""

    what: str
    found: float
    most: float

    @property
    def fine(self) -> bool:
        return self.found <= self.most


def numbers(t: Tensor) -> np.ndarray:
    return t.detach().double().numpy(force=True).astype(np.longdouble)  # by force: it may be a tensor of no memory


def error(what: str, found: np.ndarray, exact: np.ndarray, judged: np.ndarray | None = None) -> float:
    """The largest absolute error where `judged`; infinities must agree, and NaN is never right there."""
    if found.shape != exact.shape:
        raise Wrong(f"{what} has shape {found.shape}, expected {exact.shape}")
    with np.errstate(invalid="ignore"):
        off = np.where(found == exact, 0, np.abs(found - exact))
    off = off if judged is None else off[np.broadcast_to(judged, off.shape)]
    return math.inf if np.isnan(off).any() else float(off.max(initial=0))


def judge(what: str, found: Tensor, exact: np.ndarray, plain: Callable[[Product], Tensor], dtype: torch.dtype,
          judged: np.ndarray | None = None) -> Judged:  # fmt: skip
    """The error of `found`: at most twice that of `plain(order)` in the worst order, and one rounding.

    Below the smallest normal number nothing is promised: weights of that size are 0 in the kernel. A row has up to about
    a thousand of them (`Sizes.draw`), each times a number of about 1.
    """
    where = np.isfinite(exact) if judged is None else np.isfinite(exact) & np.broadcast_to(judged, exact.shape)
    own = torch.finfo(dtype).eps * float(np.abs(exact[where]).max(initial=0))
    own += 1e3 * torch.finfo(torch.promote_types(dtype, torch.float32)).tiny
    verdict = Judged(what, error(what, numbers(found), exact, judged), 0.0)
    for order in ORDERS:
        by_plain = error(what, numbers(plain(order)), exact, where)
        if math.isfinite(by_plain):  # plain may overflow where the kernel does not: that is no excuse
            verdict.most = max(verdict.most, 2 * by_plain + own)
        if verdict.fine:
            break
    verdict.most = max(verdict.most, own)
    return verdict

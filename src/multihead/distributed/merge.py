"""Partial results over parts of the keys become one: each counts by its share of the softmax's denominator.

Sums are float32 (float64 for float64), whatever the parts are: a sum of many parts in bfloat16 would lose digits. The
denominator of the whole is kept as exp(top)·total, not as its logarithm, whose rounding would be an error of every
weight.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Denominator:
    """exp(top)·total of each query, (B,H,Q); total is 0 where nothing has been seen."""

    top: Tensor
    total: Tensor

    def share(self, lse: Tensor) -> Tensor:
        """exp(lse) over the denominator: how much a part with this log-sum-exp counts."""
        return powers(lse, self.top) / self.total.masked_fill(self.total == 0, 1)


def powers(lse: Tensor, top: Tensor) -> Tensor:
    """exp(lse − top), and 0 where both are −inf."""
    return torch.exp(lse - top.masked_fill(top == -torch.inf, 0))


class Merged:
    """What has been attended to so far: `add` another part, then `result`.

    >>> q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    >>> merged = Merged(1, 2, 8, 4, torch.float32, q.device)
    >>> for part in (slice(0, 5), slice(5, 8)):
    ...     merged.add(*mh.attend(q, k[:, :, part], v[:, :, part], return_lse=True))
    >>> torch.allclose(merged.result(), mh.attend(q, k, v), atol=1e-6)
    True
    """

    def __init__(self, B: int, H: int, Q: int, V: int, dtype: torch.dtype, device: torch.device) -> None:
        exact = torch.promote_types(dtype, torch.float32)
        self.dtype = dtype
        self.out = torch.zeros(B, H, Q, V, dtype=exact, device=device)  # times the denominator's total
        top = torch.full((B, H, Q), -torch.inf, dtype=exact, device=device)
        self.denominator = Denominator(top, torch.zeros_like(top))

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Another part: out (B,H,Q,V) and its log-sum-exp (B,H,Q); a row of −inf has seen nothing."""
        more = self._raise_to(lse)
        self.out.addcmul_(out.to(self.out.dtype), more[..., None])

    def add_sinks(self, sinks: Tensor | None) -> None:
        """(H,) logits that join the denominator and have no value."""
        if sinks is not None:
            top = self.denominator.top
            self._raise_to(sinks.detach().to(top.dtype)[:, None].expand_as(top))

    def _raise_to(self, lse: Tensor) -> Tensor:
        before, top = self.denominator.top, torch.maximum(self.denominator.top, lse)
        less, more = powers(before, top), powers(lse, top)
        self.out *= less[..., None]
        self.denominator = Denominator(top, self.denominator.total * less + more)
        return more

    def result(self) -> Tensor:
        """Out (B,H,Q,V), 0 where nothing has been seen; nothing can be added any more."""
        total = self.denominator.total
        self.out /= total.masked_fill(total == 0, 1)[..., None]
        return self.out.to(self.dtype)

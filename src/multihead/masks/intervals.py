"""Intervals: what a mask lowers to, one interval of keys per query, `start <= key < stop`.

A bound is a `Ramp`, made of plain numbers, or a tensor where rows differ. A dense remainder is there only where it must
be. `Frame` says where the queries stand among the keys.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from multihead.tensors import require_storage


@dataclass(frozen=True)
class Ramp:
    """`clamp(q + offset, low, high)` for query q: a bound that needs no tensor. Constant where low = high."""

    offset: int
    low: int
    high: int

    @staticmethod
    def constant(value: int) -> "Ramp":
        return Ramp(0, value, value)

    def at(self, q: int) -> int:
        return max(min(q + self.offset, self.high), self.low)

    def tensor(self, Q: int, device: torch.device | None) -> Tensor:
        return (torch.arange(Q, device=device) + self.offset).clamp(self.low, self.high)  # (Q,)


Bound = Ramp | Tensor  # a tensor broadcasts to (B, H, Q)


def _as_tensor(bound: Bound, frame: "Frame") -> Tensor:
    return bound.tensor(frame.Q, frame.device) if isinstance(bound, Ramp) else bound


def _narrower(a: Bound, b: Bound, frame: "Frame", pick: Callable, pick_tensor: Callable) -> Bound:
    """The lower (pick=min) or the higher (pick=max) of two bounds, query by query."""
    if isinstance(a, Ramp) and isinstance(b, Ramp):
        if a.low == a.high:  # a constant clamps the other ramp
            return Ramp(b.offset, pick(a.low, b.low), pick(a.low, b.high))
        if b.low == b.high or a.offset == b.offset:
            return Ramp(a.offset, pick(a.low, b.low), pick(a.high, b.high))
        if a.low == b.low and a.high == b.high:
            return Ramp(pick(a.offset, b.offset), a.low, a.high)
    return pick_tensor(_as_tensor(a, frame), _as_tensor(b, frame))


def lower_of(a: Bound, b: Bound, frame: "Frame") -> Bound:
    return _narrower(a, b, frame, min, torch.minimum)


def higher_of(a: Bound, b: Bound, frame: "Frame") -> Bound:
    return _narrower(a, b, frame, max, torch.maximum)


@dataclass(frozen=True)
class Frame:
    """Where the queries stand among the keys.

    `position` is the offset of a ramp (query q stands at key q + position) or a tensor (B|1, 1, Q) of positions.
    Rows of a ragged batch use `used` of the K keys, and `real` of the Q queries; both are tensors (B, 1, 1).
    `dropped` is how many older keys a sliding cache has let go: key 0 is then the `dropped`-th of the sequence.
    """

    Q: int
    K: int
    device: torch.device | None
    position: int | Tensor
    origin: int | Tensor = 0  # the first key of the query's document
    end: int | Tensor | None = None  # one past the last key of the query's document
    used: Tensor | None = None
    real: Tensor | None = None
    dropped: int | Tensor = 0

    @staticmethod
    def of(
        Q: int,
        K: int,
        device: torch.device | None = None,
        used: Tensor | None = None,
        real: Tensor | None = None,
        dropped: int | Tensor = 0,
    ) -> "Frame":
        """The last query stands at the last key; in a ragged batch, the last real one at the last used one."""
        if used is None:
            return Frame(Q, K, device, K - Q, dropped=dropped)
        used, real = (t.to(device).view(-1, 1, 1) for t in (used, torch.full_like(used, Q) if real is None else real))
        position = torch.arange(Q, device=device) + (used - real)
        dropped = dropped.view(-1, 1, 1) if isinstance(dropped, Tensor) else dropped
        return Frame(Q, K, device, position, used=used, real=real, dropped=dropped)

    @property
    def slides(self) -> bool:
        """Whether older keys have been dropped, so that key 0 is not the first of the sequence."""
        return isinstance(self.dropped, Tensor) or self.dropped != 0

    def near(self, shift: int) -> Bound:
        """The key `shift` after each query's own, kept within 0…K."""
        if isinstance(self.position, Tensor):
            return (self.position + shift).clamp(0, self.K)
        return Ramp(self.position + shift, 0, self.K)

    def fixed(self, key: int | Tensor) -> Bound:
        """The same key for every query of a row, kept within 0…K."""
        if isinstance(key, Tensor):
            return key.to(self.device).clamp(0, self.K)
        return Ramp.constant(min(max(key, 0), self.K))

    @property
    def everything(self) -> "Visible":
        return Visible(self.Q, self.K, self.fixed(0), self.fixed(self.K))

    @property
    def in_use(self) -> "Visible":
        """What exists: all keys, or in a ragged batch the keys in use, seen by the real queries."""
        if self.used is None or self.real is None:
            return self.everything
        asks = torch.arange(self.Q, device=self.device) < self.real
        return replace(self.everything, stop=torch.where(asks, self.used, 0))


@dataclass(frozen=True)
class Visible:
    """What a mask lowers to: query q sees `start <= key < stop`, of those only where `dense` is True."""

    Q: int
    K: int
    start: Bound
    stop: Bound
    dense: Tensor | None = None  # bool, broadcasts to (B, H, Q, K)

    @property
    def is_everything(self) -> bool:
        if self.dense is not None or isinstance(self.start, Tensor) or isinstance(self.stop, Tensor):
            return False
        return self.start.at(max(self.Q - 1, 0)) <= 0 and self.stop.at(0) >= self.K  # ramps only ever rise

    @property
    def is_square_causal(self) -> bool:
        """As many queries as keys, and query q sees keys 0…q."""
        if self.dense is not None or self.Q != self.K or isinstance(self.stop, Tensor):
            return False
        return (
            self.start == Ramp.constant(0) and self.stop.offset == 1 and self.stop.low <= 1 <= self.K <= self.stop.high
        )

    def require_storages(self) -> "Visible":
        """Itself, if the storage of its tensors holds what they see: they may be somebody else's."""
        for name, t in (("the mask's start", self.start), ("the mask's stop", self.stop), ("the mask", self.dense)):
            require_storage(name, t)
        return self

    def intersect(self, other: "Visible", frame: Frame) -> "Visible":
        """What both allow."""
        dense = self.dense if other.dense is None else other.dense if self.dense is None else self.dense & other.dense
        start = higher_of(self.start, other.start, frame)
        return Visible(self.Q, self.K, start, lower_of(self.stop, other.stop, frame), dense)

    def bounds(self, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """Start and stop as tensors that broadcast to (B, H, Q)."""
        self.require_storages()
        frame = Frame.of(self.Q, self.K, device)
        return _as_tensor(self.start, frame), _as_tensor(self.stop, frame)

    def allowed(
        self, device: torch.device | None = None, queries: slice = slice(None), keys: slice = slice(None)
    ) -> Tensor:
        """A bool tensor that broadcasts to (B, H, Q, K), or to the block of it that `queries` and `keys` cut out."""
        start, stop = (t[..., queries, None] for t in self.bounds(device))
        key = torch.arange(self.K, device=device)[keys]
        seen = (start <= key) & (key < stop)
        if self.dense is None:
            return seen
        dense = self.dense
        for axis, cut in ((-1, keys), (-2, queries)):
            if dense.dim() >= -axis and dense.shape[axis] > 1:
                dense = dense[(..., cut) if axis == -1 else (..., cut, slice(None))]
        return seen & dense.to(device)

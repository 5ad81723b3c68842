"""When two outputs are equal: as close as rounding allows, measured against the specification's own rounding."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from multihead.doctor.variant import RIGHT, Call, Specification, Variant
from multihead.doctor.weights import Weights

FEW = slice(0, 16)  # columns
SLACK = 4.0  # on the bound of twice the plain implementation: another order of summation, other kernels


def gap(a: Tensor, b: Tensor) -> float:
    """The largest difference where both are finite."""
    difference = (a - b).abs()
    finite = difference[difference.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def same_odd_places(a: Tensor, b: Tensor) -> bool:
    """Whether NaN and inf stand at the same places."""
    return bool((a.isfinite() == b.isfinite()).all())


@dataclass(eq=False)
class Observation:
    """What the candidate put out for one call, and the specification to compare it with."""

    call: Call
    output: Tensor  # float64, (B, Q, E)
    dtype: torch.dtype  # what the candidate computed in
    weights: Weights
    rows: Tensor | None = None  # (B, Q): the rows that count, where not all do
    exact: Specification = field(init=False)
    _plain: Specification | None = field(init=False, default=None)
    _bounds: dict[Variant, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.exact = Specification(self.weights, self.call)
        self._right = self.exact.run()
        self._departure = max(gap(self.output[..., FEW], self._right[..., FEW]), self.bound())

    def right(self, variant: Variant = RIGHT) -> Tensor:
        return self._right if variant is RIGHT else self.exact.run(variant)

    def counted(self, *given: Tensor) -> tuple[Tensor, ...]:
        """The rows that count of these, (B, Q, …) each."""
        return given if self.rows is None else tuple(t[self.rows] for t in given)

    def may_equal(self, variant: Variant) -> bool:
        """Whether a few columns leave it possible that `variant` is the candidate: cheap, and never wrongly False."""
        mine, other = self.counted(self.output[..., FEW], self.exact.run(variant, FEW))
        return same_odd_places(mine, other) and gap(mine, other) <= 0.25 * self._departure

    def bound(self, variant: Variant = RIGHT) -> float:
        """How far rounding alone may take an implementation of `variant` from its float64 result."""
        if variant not in self._bounds:
            self._bounds[variant] = self._bound(variant)
        return self._bounds[variant]

    def _bound(self, variant: Variant) -> float:
        exact = self.right(variant)
        if self._plain is None:
            low = self.dtype if self.dtype != torch.float64 else torch.float32
            self._plain = Specification(self.weights, self.call, low)
        plain = gap(self._plain.run(variant).double(), exact)
        size = float(exact[exact.isfinite()].abs().max()) if bool(exact.isfinite().any()) else 0.0
        eps = torch.finfo(self.dtype).eps
        if self.dtype == torch.float64:
            plain *= eps / torch.finfo(torch.float32).eps
        return SLACK * (2 * plain + eps * size)

    def differs(self, variant: Variant = RIGHT) -> float:
        """The largest difference from `variant`, in the rows that count."""
        return gap(*self.counted(self.output, self.right(variant)))

    def equals(self, variant: Variant = RIGHT) -> bool:
        """Whether the candidate's output is that of `variant`, up to rounding."""
        mine, other = self.counted(self.output, self.right(variant))
        return same_odd_places(mine, other) and gap(mine, other) <= self.bound(variant)

    def explains(self, variant: Variant) -> bool:
        """Whether `variant`, which rounds to a lower precision, explains the departure from the same without rounding.

        Rounded twice, a number may go up here and down there, and it takes its row, or a few, along: three rows in
        four have to be explained but for a quarter of their departure. In the others the candidate's rounding and
        this one may go opposite ways, each by as much as rounding does at most: so no row may be further off than
        twice that, which is the triangle inequality and no less would do. A mistake beside the rounding shows,
        however few rows it is in.
        """
        mine, right, other = self.counted(self.output, self.right(variant.unrounded), self.right(variant))
        if not same_odd_places(mine, other):
            return False
        rows = mine.isfinite().all(-1) & right.isfinite().all(-1)
        if not bool(rows.any()):
            return True
        mine, right, other = mine[rows], right[rows], other[rows]
        left, whole = ((t - mine).square().mean(-1).sqrt() for t in (other, right))
        near = (left <= 0.25 * whole) | ((other - mine).abs().amax(-1) <= self.bound())
        return gap(mine, other) <= max(2 * gap(other, right), self.bound()) and float(near.double().mean()) >= 0.75

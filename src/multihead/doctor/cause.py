"""A cause: a known mistake, the step it is made in, how it changes the specification, and how to mend it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from multihead.doctor.variant import Call
from multihead.doctor.weights import Weights

Changes = dict[str, Any]  # of a `Variant`
Ways = Callable[["Setting"], Iterable[tuple[str, Changes]]]


@dataclass(frozen=True)
class Setting:
    """What a mistake can be made in: the layer and the call."""

    weights: Weights
    call: Call

    @property
    def masked(self) -> bool:
        return self.call.mask is not None

    @property
    def square(self) -> bool:
        """Whether W_q, W_k, W_v are of one shape, so that they can be taken for each other."""
        s = self.weights.sizes
        return s.G == s.H and s.V == s.D and s.C == s.E


@dataclass(frozen=True)
class Cause:
    """A known mistake.

    `ways` gives the ways to make it in a setting: each a detail that completes the name ("on v"; often empty) and the
    changes to the specification. `paired`: how many of them are tried together with another mistake.
    """

    name: str
    step: int
    explanation: str
    fix: str
    ways: Ways
    paired: int = 2


def one(**changes: Any) -> Ways:
    """A mistake that can be made in any setting, in one way."""
    return lambda setting: [("", changes)]


def when(condition: Callable[[Setting], bool], *ways: Changes) -> Ways:
    """A mistake that can be made only in some settings, in one or several ways that need no detail."""
    return lambda setting: [("", changes) for changes in ways] if condition(setting) else []

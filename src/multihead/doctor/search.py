"""Search: which known mistake, or which two, turn the specification into the candidate."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from multihead.doctor.cause import Cause, Changes, Setting
from multihead.doctor.causes import KNOWN
from multihead.doctor.measure import Observation, gap, same_odd_places
from multihead.doctor.rotation import OTHER_TURNS
from multihead.doctor.variant import RIGHT, Variant

Progress = Callable[[int, int], None]  # done, of


@dataclass(frozen=True)
class Mistake:
    """A known cause, made in one of its ways."""

    cause: Cause
    detail: str
    changes: tuple[tuple[str, object], ...]

    @property
    def name(self) -> str:
        return f"{self.cause.name} {self.detail}".strip()


@dataclass(frozen=True)
class Match:
    """One mistake, or two together, that reproduce the candidate's output."""

    mistakes: tuple[Mistake, ...]
    variant: Variant


def ways(setting: Setting) -> list[list[Mistake]]:
    """Every known mistake that can be made in this setting, by cause."""
    found = []
    for cause in KNOWN:
        made = [Mistake(cause, detail, tuple(changes.items())) for detail, changes in cause.ways(setting)]
        if made:
            found.append(made)
    return found


def reproduces(variant: Variant, observations: Sequence[Observation]) -> bool:
    """Whether the variant is the candidate on every observation, and is not what would be right anyway."""
    visible = False
    if not all(bool(seen.output.isfinite().any()) for seen in observations):
        return False  # NaN throughout is no evidence of anything
    for seen in observations:
        if variant.lower:
            if variant.unrounded != RIGHT and not seen.may_equal(variant.unrounded):
                return False
            if not seen.explains(variant):
                return False
        elif not seen.may_equal(variant) or not seen.equals(variant):
            return False
        wrong = seen.right(variant)
        visible |= not same_odd_places(wrong, seen.right()) or gap(wrong, seen.right()) > 0.5 * seen.bound()
    return visible


def singles(setting: Setting, observations: Sequence[Observation]) -> list[Match]:
    """All single mistakes that reproduce the candidate; several, where they cannot be told apart."""
    return list(_matches(([m] for made in ways(setting) for m in made), observations))


def pairs(setting: Setting, observations: Sequence[Observation], progress: Progress | None = None) -> list[Match]:
    """All pairs of mistakes, of different steps or choices, that reproduce the candidate."""
    candidates = [made[: made[0].cause.paired] for made in ways(setting)]
    every = list(combinations([made for made in candidates if made], 2))

    def tried() -> Iterator[list[Mistake]]:
        for done, (first, second) in enumerate(every):
            if progress is not None:
                progress(done, len(every))
            yield from ([a, b] for a in first for b in second)

    return list(_matches(tried(), observations))


def together(name: str, one: Any, other: Any) -> Any:
    """What two mistakes in one choice make of it; None where they cannot be made at once."""
    if one is None or one == other:
        return other
    if name in ("unbiased", "transposed"):
        return "".join(letter for letter in "qkvo" if letter in one + other)
    if name == "rope" and one.startswith(OTHER_TURNS) != other.startswith(OTHER_TURNS):
        return f"{one}|{other}"
    if name == "mask" and len({one, other} & {"inverted", "transposed"}) == 1:
        return f"{one}|{other}"
    return None


def _matches(tried: Iterator[list[Mistake]], observations: Sequence[Observation]) -> Iterator[Match]:
    seen: set[Variant] = set()
    for mistakes in tried:
        changes: Changes = {}
        for mistake in mistakes:
            joined = {name: together(name, changes.get(name), value) for name, value in mistake.changes}
            if None in joined.values():
                break
            changes |= joined
        else:
            variant = replace(RIGHT, **changes)
            if variant == RIGHT or variant in seen:
                continue
            seen.add(variant)
            try:
                found = reproduces(variant, observations)
            except RuntimeError:  # shapes that do not fit: with this mistake the candidate could not have run
                continue
            if found:
                yield Match(tuple(mistakes), variant)

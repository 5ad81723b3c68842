"""Mistakes with a number in them that no list holds: the number is fitted, and then has to reproduce every output.

One number is fitted to thousands, so what reproduces them all to rounding is proven as much as any other mistake.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from multihead.doctor.cause import Cause, Changes, Setting
from multihead.doctor.causes import KNOWN
from multihead.doctor.measure import FEW, Observation
from multihead.doctor.search import Match, Mistake, reproduces
from multihead.doctor.variant import RIGHT, Variant

POINTS = 96  # of the first look, evenly in the number's logarithm
STARTS = 3  # the best of them are refined
STEPS = 12
DIGITS = 7
NEVER = KNOWN[0].ways


@dataclass(frozen=True)
class Family:
    """A mistake that has a number: where it can be made, between which numbers, and what each changes."""

    cause: Cause
    made: Callable[[Setting], bool]
    low: float
    high: float
    changes: Callable[[float], Changes]
    detail: Callable[[float, Setting], str]


def _known(name: str) -> Cause:
    return next(cause for cause in KNOWN if cause.name == name)


def _rope(setting: Setting) -> bool:
    return setting.weights.rope is not None


ANOTHER_SCALE = Cause(
    "scale by another number",
    3,
    "Scores are multiplied by another number than the reference's: a temperature, a size that is not D, a softmax to "
    "another base than e, weights that are squared and made to add up to 1 again, or a product that is scaled twice.",
    "scores = q @ k.transpose(-2, -1) / math.sqrt(D)",
    NEVER,
)
ANOTHER_CAP = Cause(
    "softcap of another size",
    3,
    "Scores are capped, softcap · tanh(scores / softcap), at another number than the reference's.",
    "scores = softcap * torch.tanh(scores / softcap)  # attn_logit_softcapping in a configuration",
    NEVER,
)
ADDED_CAP = Cause(
    "softcap where the reference has none",
    3,
    "Scores are capped, softcap · tanh(scores / softcap), and the reference takes them as they are.",
    "scores = q @ k.transpose(-2, -1) / math.sqrt(D)  # or a reference with softcap=",
    NEVER,
)
TIMES = Cause(
    "weights times a number",
    3,
    "The weights of each row add up to this number and not to 1 (or the values, or the merged heads, are multiplied by "
    "it): dropout's 1/(1 − p) where nothing is dropped, or a scale in the wrong place.",
    "weights = scores.softmax(dim=-1)                 # F.dropout(weights, p, training=self.training)",
    NEVER,
)


def _scaled(t: float, setting: Setting) -> str:
    return f"({setting.weights.scale * t:.4g}, {t:.4g} times the right one)"


FAMILIES = (
    Family(
        _known("RoPE with another base"),
        _rope,
        1.5,
        1e10,
        lambda t: {"rope": f"base:{t!r}"},
        lambda t, s: f"({t:,.7g})",
    ),
    Family(
        _known("RoPE with another scaling"),
        _rope,
        1 / 64,
        64.0,
        lambda t: {"rope": f"linear:{t!r}"},
        lambda t, s: f"(linear, factor {t:.7g})",
    ),
    Family(ANOTHER_SCALE, lambda s: True, 1 / 200, 200.0, lambda t: {"scale": f"times:{t!r}"}, _scaled),
    Family(ANOTHER_SCALE, lambda s: True, -1 / 200, -200.0, lambda t: {"scale": f"times:{t!r}"}, _scaled),
    Family(
        ANOTHER_CAP,
        lambda s: s.weights.softcap is not None,
        0.05,
        1000.0,
        lambda t: {"softcap": f"at:{t!r}"},
        lambda t, s: f"({t:.7g})",
    ),
    Family(
        ADDED_CAP,
        lambda s: s.weights.softcap is None,
        0.05,
        1000.0,
        lambda t: {"softcap": f"at:{t!r}"},
        lambda t, s: f"({t:.7g})",
    ),
    Family(
        _known("QK-norm with another eps"),
        lambda s: s.weights.norm is not None,
        1e-9,
        10.0,
        lambda t: {"eps": t},
        lambda t, s: f"({t:.4g})",
    ),
    Family(TIMES, lambda s: True, 1 / 200, 200.0, lambda t: {"mix": f"times:{t!r}"}, lambda t, s: f"({t:.4g})"),
)  # fmt: skip


def fitted(setting: Setting, observations: Sequence[Observation]) -> list[Match]:
    """The mistakes whose number can be found so that it reproduces the candidate."""
    if not all(bool(seen.output.isfinite().all()) for seen in observations):
        return []
    return list(_matches(setting, observations))


def _matches(setting: Setting, observations: Sequence[Observation]) -> Iterator[Match]:
    for family in FAMILIES:
        if not family.made(setting):
            continue
        number = _best(family, observations)
        if number is None or not reproduces(_variant(family, number), observations):
            continue
        number = _tidy(family, number, observations)
        changes = tuple(family.changes(number).items())
        yield Match((Mistake(family.cause, family.detail(number, setting), changes),), _variant(family, number))


def _variant(family: Family, number: float) -> Variant:
    return replace(RIGHT, **family.changes(number))


def _left(family: Family, number: float, observations: Sequence[Observation]) -> Tensor:
    """What the mistake with this number leaves of the candidate's output, in a few columns."""
    parts = []
    for seen in observations:
        left = seen.exact.run(_variant(family, number), FEW) - seen.output[..., FEW]
        parts.append((left if seen.rows is None else left[seen.rows]).flatten())
    return torch.cat(parts).nan_to_num(nan=torch.inf)


def _size(left: Tensor) -> float:
    return float(left.square().sum().sqrt())


def _best(family: Family, observations: Sequence[Observation]) -> float | None:
    """The number that leaves least: a look at many, then Gauss and Newton from the best, on its logarithm."""
    sign = math.copysign(1.0, family.low)
    low, high = math.log(abs(family.low)), math.log(abs(family.high))

    def left(u: float) -> Tensor:
        return _left(family, sign * math.exp(u), observations)

    looked = [(_size(left(u)), u) for u in (low + (high - low) * n / (POINTS - 1) for n in range(POINTS))]
    if not math.isfinite(min(looked)[0]):
        return None
    best = min(looked)
    for size, u in sorted(looked)[:STARTS]:
        h = 1e-4
        for _ in range(STEPS):
            here, slope = left(u), (left(u + h) - left(u - h)) / (2 * h)
            steep = float(slope.square().sum())
            if not math.isfinite(steep) or steep == 0:
                break
            step = -float((here * slope).sum()) / steep
            step = max(-0.5, min(0.5, step))
            size, u = _size(left(u + step)), u + step
            if not low - 1 <= u <= high + 1 or not math.isfinite(size):
                break
            best = min(best, (size, u))
            h = max(min(h, abs(step)), 1e-6)
            if abs(step) < 1e-14:
                break
    return sign * math.exp(best[1])


def _tidy(family: Family, number: float, observations: Sequence[Observation]) -> float:
    """The shortest number that leaves no more than the fitted one, but for what rounding blurs."""
    least = _size(_left(family, number, observations))
    blur = 0.02 * min(seen.bound(_variant(family, number)) for seen in observations)
    for digits in range(DIGITS):
        short = float(f"{number:.{digits}e}")
        left = _left(family, short, observations)
        near = _size(left) <= 1.02 * least or float(left.abs().max()) <= blur
        if near and reproduces(_variant(family, short), observations):
            return short
    return number

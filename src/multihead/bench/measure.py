"""Two contenders side by side: which is faster, by how much, and how sure that is.

Knows nothing of attention or of any peer. Noise on a shared machine is slow drift (clock, neighbours) and spikes:
A,B,B,A within a block cancels drift, the median over blocks ignores spikes, and blocks in which the clock moved are
left out. A ratio is always b's time over a's: above 1, a is faster.
"""

import gc
import math
import random
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

CLOCK_TOLERANCE = 0.03  # how far the clock may move within a comparison
FEWEST_BLOCKS, MOST_BLOCKS = 11, 200
AT_LONGEST = 2  # times as many blocks where the clock is restless
ENOUGH = 1 / 2  # of the blocks, and never fewer than 9: below, the steadiest are kept and the result says so
FEWEST_KEPT = 9  # two disturbed ones among five decide an interval, among nine they do not
SLOT = 0.005  # seconds of calls timed in one go: far above the timer's resolution, below the pace of drift
SLOT_AFTER_REST = 0.05  # the same where each change of hands costs a rest
PATIENCE = 30.0  # seconds; where the fewest blocks would take longer, so many as fit, and the result says so
FEWEST_OF_ALL = 3
LONG_CALL = 0.05  # seconds; beyond it a cold start is lost in the call, and a warm-up would double the cost


class Contender(Protocol):
    """Something that can be timed. `rest`: seconds its idle workers may go on spinning, slowing whoever is next."""

    name: str
    detail: str
    rest: float

    def seconds(self, calls: int) -> float:
        """How long that many calls took, one after another."""
        ...

    def result(self) -> torch.Tensor: ...

    def close(self) -> None: ...


@dataclass
class Local:
    """A contender in this process. `run` allocates its output; `unpack` brings that into the shape to be checked."""

    name: str
    run: Callable[[], Any]
    detail: str = ""
    unpack: Callable[[Any], torch.Tensor] = lambda output: output
    rest: float = 0.0
    mode: Callable[[], Any] = torch.inference_mode  # of the calls; of training, torch.enable_grad

    def seconds(self, calls):
        run = self.run
        with self.mode():
            start = time.perf_counter()
            for _ in range(calls):
                run()
            return time.perf_counter() - start

    def result(self):
        with self.mode():
            return self.unpack(self.run())

    def close(self):
        pass


@dataclass(frozen=True)
class Comparison:
    ratio: float  # median over blocks of b's time over a's
    low: float  # bootstrap 95 % interval of that median
    high: float
    min_ratio: float  # b's best slot over a's best slot
    a_seconds: float  # median per call
    b_seconds: float
    blocks: int  # run
    rejected: int  # of these, left out because the clock moved
    note: str  # why the result deserves less trust, if it does
    ratios: tuple[float, ...]  # of the blocks that count

    @property
    def noise(self):
        """How far from 1 the interval reaches, as a factor less 1, alike for 1.25 and 0.8.

        Of an A/A run: the smallest difference that means anything.
        """
        return max(self.high, 1 / self.low) - 1


@dataclass(frozen=True)
class Pace:
    """How many calls of one contender make a slot, and how many come before it untimed."""

    calls: int
    warm_up: int
    slot_seconds: float


def compare(a, b, *, seconds, seed=0, rest=None, tick=lambda done, total: None):
    """Time a and b in blocks for about `seconds`, up to twice that where the clock is restless: the Comparison.

    `rest` overrides the pause at a change of hands, so that an A/A run can be treated as the A/B run was.
    """
    rest = max(a.rest, b.rest) if rest is None else rest
    with _without_collector():
        time.sleep(rest)
        pace_a = find_pace(a, rest)
        time.sleep(rest)
        pace_b = find_pace(b, rest)
        count = count_blocks(seconds, pace_a.slot_seconds + pace_b.slot_seconds, rest)
        blocks, readings, last = [], [clock_reading()], None
        most = AT_LONGEST * count if count >= FEWEST_BLOCKS else count
        for order in orders(most, seed):
            if len(blocks) >= count and not steady(readings)[1]:
                break
            slots = {"a": [], "b": []}
            for side in order:
                contender, pace = (a, pace_a) if side == "a" else (b, pace_b)
                if side != last:
                    time.sleep(rest)
                    contender.seconds(pace.warm_up)
                    last = side
                slots[side].append(contender.seconds(pace.calls) / pace.calls)
            blocks.append((slots["a"], slots["b"]))
            readings.append(clock_reading())
            tick(len(blocks), max(count, len(blocks)))
    return summarise(blocks, readings, seed)


def find_pace(contender, rest):
    """Warm up, and see how many calls fill a slot."""
    slot, warm = (SLOT_AFTER_REST, 0.01) if rest else (SLOT, 0.001)
    contender.seconds(1)
    calls, took = 1, contender.seconds(1)
    while took < slot / 2:
        calls *= 2
        took = contender.seconds(calls)
    each = took / calls
    calls, warm_up = math.ceil(slot / each), 0 if each > LONG_CALL else math.ceil(warm / each)
    return Pace(calls, warm_up, (calls + warm_up / 2) * each)


def count_blocks(seconds, slots_seconds, rest):
    """How many blocks fit: each has two slots of either side, and about two and a half changes of hands."""
    block = 2 * slots_seconds + 2.5 * rest
    fewest = min(max(int(max(seconds, PATIENCE) / block), FEWEST_OF_ALL), FEWEST_BLOCKS)
    return min(max(int(seconds / block), fewest), MOST_BLOCKS)


def orders(count, seed):
    """For each block a,b,b,a or b,a,a,b by a seeded coin: no rhythm of the machine can favour one side."""
    coin = random.Random(seed)
    return [coin.choice(("abba", "baab")) for _ in range(count)]


def clock_reading():
    """Seconds a fixed loop in registers takes: best of three, so that it shows the clock and not an interruption."""
    best = math.inf
    for _ in range(3):
        start = time.perf_counter()
        sum(range(20_000))
        best = min(best, time.perf_counter() - start)
    return best


def steady(readings):
    """Which blocks count, given the clock before the first block and after each.

    Returns their indices, and a note where the machine was too restless to be choosy.
    """
    usual = median(readings)
    off = [abs(reading / usual - 1) for reading in readings]
    moved = [max(before, after) for before, after in pairwise(off)]
    kept = [i for i, m in enumerate(moved) if m <= CLOCK_TOLERANCE]
    enough = min(max(FEWEST_KEPT, int(len(moved) * ENOUGH)), len(moved))
    if len(kept) >= enough:
        return kept, ""
    steadiest = sorted(sorted(range(len(moved)), key=moved.__getitem__)[:enough])
    worst = max(moved[i] for i in steadiest)
    return steadiest, f"restless clock: {len(kept)} of {len(moved)} blocks steady, kept {enough} within {worst:.0%}"


def summarise(blocks, readings, seed=0):
    """`blocks`: for each, a's and b's seconds per call in its slots; `readings`: the clock around them."""
    kept, note = steady(readings)
    if len(blocks) < FEWEST_BLOCKS:
        note = "; ".join(filter(None, (f"slow: {len(blocks)} blocks are all there was time for", note)))
    blocks_kept = [blocks[i] for i in kept]
    ratios = [sum(b) / sum(a) for a, b in blocks_kept]
    low, high = bootstrap_interval(ratios, seed)
    a, b = ([s for block in blocks_kept for s in block[side]] for side in (0, 1))
    return Comparison(
        ratio=median(ratios),
        low=low,
        high=high,
        min_ratio=min(b) / min(a),
        a_seconds=median(a),
        b_seconds=median(b),
        blocks=len(blocks),
        rejected=len(blocks) - len(kept),
        note=note,
        ratios=tuple(ratios),
    )


def median(values):
    return torch.tensor(list(values), dtype=torch.float64).quantile(0.5).item()


def bootstrap_interval(values, seed=0, level=0.95, resamples=2000):
    """The interval in which the median of `values` lies in `level` of the resamples with replacement."""
    values = torch.tensor(list(values), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(values), (resamples, len(values)), generator=generator)
    medians = values[drawn].quantile(0.5, dim=1)
    tail = (1 - level) / 2
    return medians.quantile(tail).item(), medians.quantile(1 - tail).item()


@contextmanager
def _without_collector():
    """A collection in the middle of a slot would be charged to whoever was running."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

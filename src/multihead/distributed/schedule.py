"""Who computes what, and which keys travel where: worked out alike on every rank from the lengths and the mask.

Each rank has a contiguous slice of the queries and of the keys. Where the mask gives the ranks unequal work (causal:
the last rank has most), every slice of queries is cut in two and a heavy half is computed beside a light one: for a
causal mask that is the zigzag of ranks and halves, r with 2·ranks − 1 − r. Keys stay where they are and are sent, in
the order of the ring, to those ranks only whose queries see them, and only that part of them that is seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from multihead.distributed.blocks import Range, reach, work
from multihead.masks.intervals import Visible

WORTH_MOVING = 1.1  # how much longer the busiest rank may work than the mean before queries move


@dataclass(frozen=True)
class Chunk:
    """A run of queries of one rank's slice, and the rank that computes it."""

    queries: Range  # in the whole sequence
    owner: int
    at: int


@dataclass(frozen=True)
class Schedule:
    """The chunks of queries, and for each rank the keys it needs of each other."""

    queries: tuple[Range, ...]  # the slice of each rank
    keys: tuple[Range, ...]
    chunks: tuple[Chunk, ...]
    reaches: tuple[Range, ...]  # the keys that each chunk sees lie in this range
    shares: tuple[float, ...]  # (query, key) pairs of each chunk

    @property
    def ranks(self) -> int:
        return len(self.keys)

    @cached_property
    def reach_of(self) -> tuple[Range, ...]:
        """For each rank the keys that its chunks see."""
        found = []
        for rank in range(self.ranks):
            mine = [r for c, r in zip(self.chunks, self.reaches) if c.at == rank and r[0] < r[1]]
            found.append((min(r[0] for r in mine), max(r[1] for r in mine)) if mine else (0, 0))
        return tuple(found)

    def needed(self, rank: int, source: int) -> Range:
        """The keys of `source` that `rank` has to see, in the whole sequence; an empty range where it needs none."""
        low, high = self.reach_of[rank]
        first, last = max(low, self.keys[source][0]), min(high, self.keys[source][1])
        return (first, last) if first < last else (0, 0)

    def load(self, rank: int) -> float:
        """(query, key) pairs that a rank scores for each head."""
        return sum(share for chunk, share in zip(self.chunks, self.shares) if chunk.at == rank)

    @property
    def imbalance(self) -> float:
        """The work of the busiest rank over the mean: 1 where none idles."""
        loads = [self.load(rank) for rank in range(self.ranks)]
        return max(loads) * self.ranks / sum(loads) if sum(loads) else 1.0


def slices(lengths: Sequence[int]) -> tuple[Range, ...]:
    """Where each rank's slice lies in the whole.

    >>> slices([4, 3, 3])
    ((0, 4), (4, 7), (7, 10))
    """
    return tuple(pairwise(accumulate(lengths, initial=0)))


def make(visible: Visible, queries: Sequence[int], keys: Sequence[int], balance: bool = True) -> Schedule:
    """The schedule for slices of these lengths; `balance=False` leaves every query with its owner.

    >>> from multihead.masks.intervals import Frame
    >>> causal = make(mh.Causal().lower(Frame.of(8, 8)), [4, 4], [4, 4])
    >>> [(chunk.queries, chunk.owner, chunk.at) for chunk in causal.chunks]
    [((0, 2), 0, 0), ((2, 4), 0, 1), ((4, 6), 1, 1), ((6, 8), 1, 0)]
    >>> causal.imbalance
    1.0
    """
    mine, theirs = slices(queries), slices(keys)
    plain = _with(visible, mine, theirs, tuple(Chunk(part, rank, rank) for rank, part in enumerate(mine)))
    if not balance or len(mine) == 1 or plain.imbalance <= WORTH_MOVING:
        return plain
    moved = _with(visible, mine, theirs, _pair(visible, mine))
    return moved if moved.imbalance * WORTH_MOVING < plain.imbalance else plain


def _with(visible: Visible, queries: tuple[Range, ...], keys: tuple[Range, ...], chunks: tuple[Chunk, ...]) -> Schedule:
    reaches = tuple(reach(visible, chunk.queries) for chunk in chunks)
    return Schedule(queries, keys, chunks, reaches, tuple(work(visible, chunk.queries) for chunk in chunks))


def _pair(visible: Visible, queries: tuple[Range, ...]) -> tuple[Chunk, ...]:
    """Every slice in two halves, the heaviest half of all together with the lightest, and so on."""
    halves: list[tuple[Range, int]] = []
    for rank, (first, last) in enumerate(queries):
        middle = first + (last - first + 1) // 2
        halves += [((first, middle), rank), ((middle, last), rank)]
    weights = [work(visible, part) for part, _ in halves]
    order = sorted(range(len(halves)), key=lambda n: (weights[n], n))
    at = [0] * len(halves)
    free = set(range(len(queries)))
    for light, heavy in zip(order[: len(queries)], reversed(order)):
        wanted = [halves[heavy][1], halves[light][1]] if weights[heavy] == weights[light] else [halves[light][1]]
        rank = next((r for r in (*wanted, halves[heavy][1]) if r in free), -1)
        rank = min(free) if rank < 0 else rank
        free.discard(rank)
        at[light] = at[heavy] = rank
    return tuple(Chunk(part, owner, at[n]) for n, (part, owner) in enumerate(halves))

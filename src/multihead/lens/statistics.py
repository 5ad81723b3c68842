"""Statistics of attention weights in O(Q + K) memory beside a tile: what may be asked, and who computes it.

Every function is given a `Region`: some heads, queries and keys of a call. A pass over the scores of its queries leaves
a `State`, from which any weight can be made without rounding a log-sum-exp, which loses digits where scores are large.
Whoever has the state needs one pass for any of these:

| function | gives | passes |
|---|---|---|
| `scan(region, by, state, entropy_and_peak)` | `Scan`: the state, and entropy and peak | one, with or without it |
| `top(region, state, n)` | weights and keys, (B,H,Q,n) each | one |
| `mass(region, state)` | (B,H,Q), the sum over the region's keys | one |
| `received(region, state)` | (B,H,K), the sum over the region's queries | one |
| `pooled(region, state, height, width, pool)` | (B,H,height,width) | one |
| `weights(region, state)` | (B,H,Q,K) | one |
| `tiles(region, state)` | every weight once, a tile at a time | one |

`state` is that of the region's queries over *all* keys of the call, sinks included. Results have dtype `region.exact`.

The rule: the C++ kernel computes what is eligible (`eligible.scores`), and plain torch the rest, tile by tile. `chosen`
says who, of the whole of a call, and whoever it is computes every pass of it: a score is then the same number in each.
A part of a call may be eligible where the whole is not (a selection of a view with the negative bit is a plain tensor).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from multihead.kernel import eligible
from multihead.kernel import statistics as by_kernel
from multihead.lens import blocked
from multihead.lens.region import At, Region, Scan
from multihead.lens.selections import Chosen, take


def chosen(region: Region) -> ModuleType:
    """Who computes: asked of the whole of a call."""
    return by_kernel if eligible.scores(region) is None else blocked


@dataclass(frozen=True)
class State:
    """What is known of some queries after a pass over their scores, as who made the pass writes it."""

    by: ModuleType
    numbers: Tensor  # (B, H, Q, 2)

    @staticmethod
    def of_lse(region: Region, by: ModuleType, lse: Tensor) -> "State":
        """The state that a log-sum-exp (B,H,Q) of dtype `region.wide` stands for, −inf where a query sees nothing."""
        return State(by, by.of_lse(region, lse))

    def lse(self, region: Region) -> Tensor:
        """The log-sum-exp of the region's queries, (B,H,Q)."""
        return self.by.lse(region, self.numbers).to(region.exact)

    def select(self, heads: Chosen, queries: Chosen) -> "State":
        return State(self.by, take(take(self.numbers, 1, heads), 2, queries))


def scan(region: Region, by: ModuleType, state: State | None = None, entropy_and_peak: bool = True) -> Scan:
    """The state of each query, unless given, and entropy and peak, in one pass."""
    return Scan(*by.scan(region, None if state is None else state.numbers, entropy_and_peak))


def top(region: Region, state: State, n: int) -> tuple[Tensor, Tensor]:
    """The n largest weights of each query and their keys, largest first, ties by key; 0 and −1 where fewer are seen."""
    return state.by.top(region, state.numbers, n)


def mass(region: Region, state: State) -> Tensor:
    return state.by.mass(region, state.numbers)


def received(region: Region, state: State) -> Tensor:
    return state.by.received(region, state.numbers)


def pooled(region: Region, state: State, height: int, width: int, pool: str) -> Tensor:
    """The weights as a picture of height × width: the mean or the largest weight of each bin, hidden ones as 0."""
    if state.by is by_kernel and not by_kernel.ascends(region):
        return blocked.pooled(region, state.numbers, height, width, pool, by_kernel.tiles)
    return state.by.pooled(region, state.numbers, height, width, pool)


def weights(region: Region, state: State) -> Tensor:
    return state.by.weights(region, state.numbers)


def tiles(region: Region, state: State, all_heads: bool = False) -> Iterator[tuple[At, Tensor]]:
    """Every weight that may be more than 0, once: where, and a tile (b, h, q, k) of its own, 0 where hidden."""
    return state.by.tiles(region, state.numbers, all_heads)

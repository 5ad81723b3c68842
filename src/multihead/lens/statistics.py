"""Statistics of attention weights in O(Q + K) memory beside a tile: what may be asked, and who computes it.

Every function is given a `Region`: some heads, queries and keys of a call. A weight is exp(score − lse), so whoever has
the log-sum-exp needs one pass for any of these:

| function | gives | passes |
|---|---|---|
| `scan(region, lse, entropy_and_peak)` | `Scan`: lse, and entropy and peak with it | one, with or without the lse |
| `top(region, lse, n)` | weights and keys, (B,H,Q,n) each | one |
| `mass(region, lse)` | (B,H,Q), the sum over the region's keys | one |
| `received(region, lse)` | (B,H,K), the sum over the region's queries | one |
| `pooled(region, lse, height, width, pool)` | (B,H,height,width) | one |
| `weights(region, lse)` | (B,H,Q,K) | one |
| `tiles(region, lse)` | every weight once, a tile at a time | one |

`lse` is that of the region's queries over *all* keys of the call, sinks included: (B,H,Q) of dtype `region.wide` or
wider, −inf where a query sees nothing. Results have dtype `region.exact`.

The rule: the C++ kernel computes what is eligible (`eligible.scores`), and plain torch the rest, tile by tile. Whoever
it is computes every pass of a lens: a score is then the same number in each.
"""

from collections.abc import Iterator
from types import ModuleType

from torch import Tensor

from multihead.kernel import eligible
from multihead.kernel import statistics as by_kernel
from multihead.lens import blocked
from multihead.lens.region import At, Region, Scan


def _chosen(region: Region) -> ModuleType:
    return by_kernel if eligible.scores(region) is None else blocked


def scan(region: Region, lse: Tensor | None = None, entropy_and_peak: bool = True) -> Scan:
    """The log-sum-exp of each query, unless given, and entropy and peak, in one pass."""
    if lse is not None and not entropy_and_peak:
        return Scan(lse, None, None, None)
    return Scan(*_chosen(region).scan(region, lse, entropy_and_peak))


def top(region: Region, lse: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n largest weights of each query and their keys, largest first, ties by key; 0 and −1 where fewer are seen."""
    return _chosen(region).top(region, lse, n)


def mass(region: Region, lse: Tensor) -> Tensor:
    return _chosen(region).mass(region, lse)


def received(region: Region, lse: Tensor) -> Tensor:
    return _chosen(region).received(region, lse)


def pooled(region: Region, lse: Tensor, height: int, width: int, pool: str) -> Tensor:
    """The weights as a picture of height × width: the mean or the largest weight of each bin, hidden ones as 0."""
    chosen = _chosen(region)
    if chosen is by_kernel and not by_kernel.ascends(region):
        return blocked.pooled(region, lse, height, width, pool, by_kernel.tiles)
    return chosen.pooled(region, lse, height, width, pool)


def weights(region: Region, lse: Tensor) -> Tensor:
    return _chosen(region).weights(region, lse)


def tiles(region: Region, lse: Tensor, all_heads: bool = False) -> Iterator[tuple[At, Tensor]]:
    """Every weight that may be more than 0, once: where, and a tile (b, h, q, k) of its own, 0 where hidden."""
    return _chosen(region).tiles(region, lse, all_heads)

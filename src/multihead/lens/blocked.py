"""Statistics of attention weights in plain torch, tile by tile, on any device: see `statistics`.

The state of a query is top and denominator: a weight is exp(score − top) / denominator.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from multihead.call import without_autocast
from multihead.lens.region import At, Region, Scan

Tiles = Callable[[Region, Tensor], Iterator[tuple[At, Tensor]]]

NEXT_TO_NOTHING = -1e4  # exp of it is 0 in every dtype, and 0 times it too; −inf in its place would make NaN


def scan(region: Region, state: Tensor | None = None, entropy_and_peak: bool = True) -> Scan:
    """The state of each query, unless given, and entropy and peak, in one pass.

    With p = exp(s − m) for a running maximum m: l = Σ p and t = Σ p·(s − m). When m moves by δ = m − m′, l becomes
    exp(δ)·l and t becomes exp(δ)·(t + δ·l). A given top is the m that never moves.
    """
    shape, given = region.shape[:3], None if state is None else state[..., 0]
    top = region.q.new_full(shape, -torch.inf, dtype=region.wide)
    key = torch.full(shape, -1, device=top.device)
    total, slope = torch.zeros_like(top), torch.zeros_like(top)  # l, t
    for at, scores in region.tiles():
        before, best = top[at.rows], scores.amax(-1)
        if entropy_and_peak:
            _note_keys(region, at, scores, best, before, key[at.rows])
        now = torch.maximum(before, best)
        base = _finite(now if given is None else given[at.rows])
        off = scores.sub_(base[..., None]).to(region.exact).clamp_(min=NEXT_TO_NOTHING)
        powers = off.exp()
        if given is None:
            moved = (before - base).clamp_(min=NEXT_TO_NOTHING)
            shrink = moved.exp()
            slope[at.rows] = (slope[at.rows] + moved * total[at.rows]) * shrink
            total[at.rows] *= shrink
        total[at.rows] += powers.sum(-1)
        if entropy_and_peak:
            slope[at.rows] += powers.mul_(off).sum(-1)
        top[at.rows] = now
    if state is None:
        state, total, slope = _close(top, total, slope, region.sinks)
    if not entropy_and_peak:
        return Scan(state, None, None, None)
    base, denominator = state.unbind(-1)
    entropy = (total * denominator.log() - slope) / denominator
    peak = torch.exp(top - _finite(base)) / denominator
    return Scan(state, entropy.clamp_(min=0).to(region.exact), peak.to(region.exact), key)


def lse(region: Region, state: Tensor) -> Tensor:
    return state[..., 0] + state[..., 1].log()


def of_lse(region: Region, lse: Tensor) -> Tensor:
    return torch.stack([lse, torch.ones_like(lse)], -1)


def _finite(t: Tensor) -> Tensor:
    """With 0 for −inf: a query that sees nothing has no maximum, and −inf − −inf is no number."""
    return t.masked_fill(t == -torch.inf, 0)


def _note_keys(region: Region, at: At, scores: Tensor, best: Tensor, before: Tensor, key: Tensor) -> None:
    """Where a tile's best is above all before it, the key it has; on a tie the earlier key stays."""
    wins = ~(best <= before) & (before == before)  # a NaN wins once
    if bool(wins.any()):
        key[wins] = region.numbers(at.keys)[scores[wins].argmax(-1)]


def _close(top: Tensor, total: Tensor, slope: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """State, l and t from m, l and t: with L the denominator, H = −Σ (p/L)·(s − m − ln L) = (l·ln L − t) / L."""
    denominator = total
    if sinks is not None:
        sink = sinks.to(top.dtype)[:, None]
        base = _finite(torch.maximum(top, sink))
        moved = (top - base).clamp_(min=NEXT_TO_NOTHING)
        shrink = moved.exp()
        slope, total = (slope + moved * total) * shrink, total * shrink
        top, denominator = torch.maximum(top, sink), total + torch.exp(sink - base)
    return torch.stack([top, denominator.masked_fill(denominator == 0, 1)], -1), total, slope


def tiles(region: Region, state: Tensor, all_heads: bool = False) -> Iterator[tuple[At, Tensor]]:
    """Every weight that may be more than 0, once: where, and a tile (b, h, q, k) of its own, 0 where hidden."""
    top, denominator = _finite(state[..., 0]), state[..., 1].to(region.exact)
    odd = bool(state.isnan().any())  # a visible NaN makes its row NaN, but not what is hidden in that row
    for at, scores in region.tiles(all_heads):
        hidden = scores == -torch.inf if odd else None
        w = scores.sub_(top[at.rows][..., None]).to(region.exact).exp_().div_(denominator[at.rows][..., None])
        yield at, w if hidden is None else w.masked_fill_(hidden, 0)


def weights(region: Region, state: Tensor) -> Tensor:
    out = region.q.new_zeros(region.shape, dtype=region.exact)
    for at, w in tiles(region, state):
        out[at] = w
    return out


def _wide(region: Region) -> torch.dtype:
    """What many small terms are added up in."""
    return region.exact if region.q.device.type == "mps" else torch.float64  # mps has no float64


def mass(region: Region, state: Tensor) -> Tensor:
    out = region.q.new_zeros(region.shape[:3], dtype=_wide(region))
    for at, w in tiles(region, state):
        out[at.rows] += w.sum(-1)
    return out.to(region.exact)


def received(region: Region, state: Tensor) -> Tensor:
    B, H, _, K = region.shape
    out = region.q.new_zeros((B, H, K), dtype=_wide(region))
    for at, w in tiles(region, state):
        out[at.columns] += w.sum(-2)
    return out.to(region.exact)


# The largest n --------------------------------------------------------------------------------------------------------


def top(region: Region, state: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n largest weights of each query and their keys, largest first, ties by key; 0 and −1 where fewer are seen."""
    scores_of = region.q.new_full((*region.shape[:3], n), -torch.inf, dtype=region.wide)
    keys_of = torch.full(scores_of.shape, -1, device=scores_of.device)
    for at, scores in region.tiles():
        best, best_keys = scores_of[at.rows], keys_of[at.rows]
        wins = ~(scores.amax(-1) <= best[..., -1])
        if not bool(wins.any()):
            continue
        values, index = largest(scores[wins], min(n, scores.shape[-1]))  # (rows, n)
        values = torch.cat([best[wins], values], -1)
        keys = torch.cat([best_keys[wins], region.numbers(at.keys)[index]], -1)
        values, order = values.sort(dim=-1, descending=True, stable=True)  # on a tie the earlier keys stay
        best[wins], best_keys[wins] = values[:, :n], keys.gather(-1, order)[:, :n]
    keys_of.masked_fill_(scores_of == -torch.inf, -1)
    base, denominator = state.unbind(-1)
    weights = torch.exp(scores_of - _finite(base)[..., None]) / denominator[..., None]
    return weights.to(region.exact), keys_of


def largest(scores: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n largest of each row, largest first, and on a tie the first: torch.topk leaves ties open."""
    values, index = scores.topk(n, -1)
    tied = ((values[:, 1:] == values[:, :-1]) & (values[:, 1:] > -torch.inf)).any(-1)
    last = values[:, -1:]
    tied |= (((scores >= last) & (last > -torch.inf)).sum(-1) > n).view_as(tied)
    if bool(tied.any()):
        ordered, order = scores[tied].sort(dim=-1, descending=True, stable=True)
        values[tied], index[tied] = ordered[:, :n], order[:, :n]
    return values, index


# Maps -----------------------------------------------------------------------------------------------------------------


def pooled(region: Region, state: Tensor, height: int, width: int, pool: str, tiles: Tiles = tiles) -> Tensor:
    """The weights as a picture of height × width: the mean or the largest weight of each bin, hidden ones as 0."""
    B, H, Q, K = region.shape
    out = region.q.new_zeros((B, H, height, width), dtype=region.exact if pool == "max" else _wide(region))
    down, across = Bins(Q, height), Bins(K, width)
    odd = bool(state.isnan().any())
    for at, w in tiles(region, state):
        rows, columns = down.touched(at.queries), across.touched(at.keys)
        picture = out[at.batch, at.heads, rows, columns]
        if pool == "max":
            found = across.largest(down.largest(w, -2, at.queries), -1, at.keys)
            torch.maximum(picture, found, out=picture)
            continue
        bad = w.isnan() if odd else None  # a product would spread it over the tile
        w = (w if bad is None else w.masked_fill(bad, 0)).to(out.dtype)
        with without_autocast(w.device):
            picture += down.averages(at.queries, w) @ (w @ across.averages(at.keys, w).T)
        if bad is not None:
            there = across.largest(down.largest(bad.to(w.dtype), -2, at.queries), -1, at.keys)
            picture.masked_fill_(there > 0, torch.nan)
    return out.to(region.exact)


class Bins:
    """n things in `count` bins, as torch's adaptive pooling cuts them: neighbours may share one thing."""

    def __init__(self, n: int, count: int) -> None:
        self.first = [bin * n // count for bin in range(count)]
        self.last = [-(-(bin + 1) * n // count) for bin in range(count)]  # one past it

    def touched(self, part: slice) -> slice:
        """The bins that have something of `part`."""
        return slice(bisect_right(self.last, part.start), bisect_left(self.first, part.stop))

    def _bounds(self, part: slice, device: torch.device) -> tuple[Tensor, Tensor]:
        touched = self.touched(part)
        return tuple(torch.tensor(t[touched], device=device)[:, None] for t in (self.first, self.last))  # type: ignore[return-value]

    def averages(self, part: slice, like: Tensor) -> Tensor:
        """A matrix (bins, part): the share that each thing of `part` has in the mean of each bin."""
        first, last = self._bounds(part, like.device)
        number = torch.arange(part.start, part.stop, device=like.device)
        return ((first <= number) & (number < last)).to(like.dtype) / (last - first)

    def largest(self, w: Tensor, axis: int, part: slice) -> Tensor:
        """The largest of each bin along an axis, which is `part`."""
        first, last = (t.clamp(part.start, part.stop) for t in self._bounds(part, w.device))
        longest = torch.arange(int((last - first).max()), device=w.device)
        index = torch.minimum(first + longest, last - 1) - part.start  # (bins, longest), the last one again and again
        return w.index_select(axis, index.flatten()).unflatten(axis, index.shape).amax(axis)

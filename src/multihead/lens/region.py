"""A region of attention: some heads, queries and keys of one call, and its scores tile by tile.

The scores are never whole in memory: a tile holds at most about `TILE` of them. Keys that no query of a block sees cost
nothing, and a tile in which all is visible is not masked.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from multihead.call import Call, without_autocast
from multihead.lens.selections import Chosen, take

TILE = 2**19  # scores in a tile: on a CPU they stay in the cache
TILE_ELSEWHERE = 2**23  # enough to fill an accelerator
SIDE = 512  # queries, and keys, in a tile, where there are many of both


class At(NamedTuple):
    """Where a tile lies in its region: a slice for each axis of (B, H, Q, K)."""

    batch: slice
    heads: slice
    queries: slice
    keys: slice

    @property
    def rows(self) -> tuple[slice, slice, slice]:
        """Of a tensor (B, H, Q)."""
        return self.batch, self.heads, self.queries

    @property
    def columns(self) -> tuple[slice, slice, slice]:
        """Of a tensor (B, H, K)."""
        return self.batch, self.heads, self.keys


class Scan(NamedTuple):
    """What one pass over the scores of a region tells of each query: (B, H, Q) each, but for the state."""

    state: Tensor  # (B, H, Q, 2), what weights are made from, as whoever made the pass writes it
    entropy: Tensor | None  # −Σ w ln w over keys
    peak: Tensor | None  # the largest weight
    key: Tensor | None  # its key, int64; −1 where nothing is seen


@dataclass(frozen=True)
class Region:
    """Some heads, queries and keys of one call."""

    q: Tensor  # (B, H, Q, D)
    k: Tensor  # (B, G, K, D)
    start: Tensor  # (B|1, H|1, Q): query q sees the keys numbered start <= key < stop
    stop: Tensor
    keys: Chosen  # the number of each of the K keys in the call
    dense: Tensor | None  # bool, (B|1, H|1, Q|1, K|1)
    bias: Tensor | None  # (B|1, H|1, Q|1, K|1)
    scale: float
    softcap: float | None
    sinks: Tensor | None  # (H,)
    v: ClassVar[None] = None  # a call without values, as the kernel reads it
    dropout: ClassVar[float] = 0.0

    @staticmethod
    def of(call: Call) -> "Region":
        """All of a call."""
        start, stop = (t[(None,) * (3 - t.dim())] for t in call.visible.bounds(call.q.device))
        Q, K = call.q.shape[2], call.k.shape[2]
        start, stop = (t.expand(*t.shape[:2], Q) for t in (start, stop))
        dense, bias = (None if t is None else t[(None,) * (4 - t.dim())] for t in (call.visible.dense, call.bias))
        dense = None if dense is None else dense.to(call.q.device)
        q, k = call.q, call.k
        return Region(q, k, start, stop, slice(0, K), dense, bias, call.scale, call.softcap, call.sinks)

    def select(
        self, heads: Chosen | None = None, queries: Chosen | None = None, keys: Chosen | None = None
    ) -> "Region":
        """A part of a region whose keys have not been selected yet; None: all of an axis."""

        def cut(t: Tensor | None, *axes: Chosen | None) -> Tensor | None:
            for axis, chosen in enumerate(axes, start=1):
                if t is not None and chosen is not None and t.shape[axis] > 1:
                    t = take(t, axis, chosen)
            return t

        _, H, Q, K = self.shape
        heads, queries, keys = (
            None if isinstance(chosen, slice) and chosen == slice(0, n) else chosen
            for chosen, n in ((heads, H), (queries, Q), (keys, K))
        )
        part = self
        if heads is not None:
            sinks = None if self.sinks is None else take(self.sinks, 0, heads)
            part = replace(part, q=take(self.q, 1, heads), k=take(self.k, 1, self._shared(heads)), sinks=sinks)
        if queries is not None:
            part = replace(part, q=take(part.q, 2, queries))
        if keys is not None:
            part = replace(part, k=take(part.k, 2, keys), keys=keys)
        start, stop = cut(self.start, heads, queries), cut(self.stop, heads, queries)
        dense, bias = cut(self.dense, heads, queries, keys), cut(self.bias, heads, queries, keys)
        assert start is not None
        assert stop is not None
        return replace(part, start=start, stop=stop, dense=dense, bias=bias)

    def _shared(self, heads: Chosen) -> Chosen:
        """The key/value heads of some heads: as few as serve them, or one for each."""
        group = self.q.shape[1] // self.k.shape[1]
        if isinstance(heads, Tensor):
            return heads // group
        first, last = heads.start // group, (heads.stop - 1) // group + 1
        if last - first <= 1 or (heads.start % group, heads.stop % group) == (0, 0):
            return slice(first, last)
        return torch.arange(heads.start, heads.stop, device=self.k.device) // group

    def detach(self) -> "Region":
        q, k, sinks, bias = (None if t is None else t.detach() for t in (self.q, self.k, self.sinks, self.bias))
        assert q is not None
        assert k is not None
        return replace(self, q=q, k=k, sinks=sinks, bias=bias)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, Q, K)."""
        return (*self.q.shape[:3], self.k.shape[2])

    @property
    def exact(self) -> torch.dtype:
        """The dtype of weights: float32, or float64 for float64."""
        return torch.promote_types(self.q.dtype, torch.float32)

    @property
    def wide(self) -> torch.dtype:
        """The dtype of scores and of the log-sum-exp.

        A product rounds differently in tiles of different shape, by up to eps·|score|, and exp makes that the relative
        error of a weight. So scores are float64 where that costs little: on a CPU. Calls in float64 that the kernel may
        not compute have nothing wider: where a later pass has other tiles, a weight of theirs is off by that.
        """
        return torch.float64 if self.q.device.type == "cpu" else self.exact

    def numbers(self, keys: slice) -> Tensor:
        """The numbers that some of the region's keys have in the call."""
        if isinstance(self.keys, slice):
            return torch.arange(self.keys.start + keys.start, self.keys.start + keys.stop, device=self.q.device)
        return self.keys[keys]

    def allowed(self, at: At) -> Tensor:
        """What may be seen by the intervals and the dense remainder: bool, broadcasts to the tile."""
        number = self.numbers(at.keys)
        start, stop = (_part(t, at.batch, at.heads, at.queries)[..., None] for t in (self.start, self.stop))
        seen = (start <= number) & (number < stop)
        return seen if self.dense is None else seen & _part(self.dense, *at)

    def part(self, at: At) -> "Region":
        """A block of the region, whose heads are all that share their key/value heads."""
        group = self.q.shape[1] // self.k.shape[1]
        kv_heads = slice(at.heads.start // group, at.heads.stop // group)
        keys, offset = self.keys, at.keys.start
        keys = slice(keys.start + offset, keys.start + at.keys.stop) if isinstance(keys, slice) else keys[at.keys]
        dense, bias = (None if t is None else _part(t, *at) for t in (self.dense, self.bias))
        return replace(
            self,
            q=self.q[at.rows],
            k=self.k[at.batch, kv_heads, at.keys],
            start=_part(self.start, *at.rows),
            stop=_part(self.stop, *at.rows),
            keys=keys,
            dense=dense,
            bias=bias,
            sinks=None if self.sinks is None else self.sinks[at.heads],
        )

    def blocks(self, all_heads: bool = False) -> Iterator[tuple[At, bool]]:
        """Where something may be seen: blocks that make good tiles, and whether all of the block is visible.

        Keys ascend within a block of queries. `all_heads`: a block has every head.
        """
        (B, H, Q, K), G = self.shape, self.k.shape[1]
        if 0 in (B, H, Q, K):
            return
        group = H // G
        size = TILE if self.q.device.type == "cpu" else TILE_ELSEWHERE
        rows, heads, queries, keys = _sides(B, G, Q, K, group, size, all_heads)
        for first_row in range(0, B, rows):
            batch = slice(first_row, min(first_row + rows, B))
            for first_head in range(0, G, heads):
                at_heads = slice(first_head * group, min(first_head + heads, G) * group)
                spans = self._spans(batch, at_heads, queries)
                for first_query, span in zip(range(0, Q, queries), spans):
                    at_queries = slice(first_query, min(first_query + queries, Q))
                    for at_keys, whole in self._key_blocks(span, keys):
                        yield At(batch, at_heads, at_queries, at_keys), whole

    def tiles(self, all_heads: bool = False) -> Iterator[tuple[At, Tensor]]:
        """Every score that may be seen, once: where, and a tile (b, h, q, k) of its own, −inf where hidden."""
        group, rows, q = self.q.shape[1] // max(1, self.k.shape[1]), None, self.q
        for at, whole in self.blocks(all_heads):
            if rows != at.rows:
                rows, q = at.rows, self.q[at.rows].to(self.wide)
            kv_heads = slice(at.heads.start // group, at.heads.stop // group)
            yield at, self._scores(q, self.k[at.batch, kv_heads, at.keys], at, whole)

    def _spans(self, batch: slice, heads: slice, queries: int) -> list[list[int]]:
        """For each block of queries: the lowest start and the highest stop, then the highest start and lowest stop."""
        start, stop = (_part(t, batch, heads).flatten(0, 1) for t in (self.start, self.stop))
        awake = start < stop
        never = torch.iinfo(torch.long).max
        spans = []
        for n in range(0, start.shape[-1], queries):
            block = slice(n, n + queries)
            a, b, see = start[:, block], stop[:, block], awake[:, block]
            spans.append(torch.stack([a.where(see, never).amin(), b.where(see, 0).amax(), a.amax(), b.amin()]))
        return torch.stack(spans).tolist()  # one look at the numbers, wherever they are

    def _key_blocks(self, span: list[int], keys: int) -> Iterator[tuple[slice, bool]]:
        """Blocks of the region's keys that somebody may see, and whether everybody sees all of the block."""
        low, high, latest_start, earliest_stop = span
        K = self.k.shape[2]
        if isinstance(self.keys, slice):
            first = self.keys.start
            for n in range(max(low - first, 0), min(high - first, K), keys):
                block = slice(n, min(n + keys, high - first, K))
                yield block, latest_start <= first + block.start and first + block.stop <= earliest_stop
            return
        for n in range(0, K, keys):
            block = slice(n, min(n + keys, K))
            least, most = (int(t) for t in torch.aminmax(self.keys[block]))
            if most >= low and least < high:
                yield block, latest_start <= least and most < earliest_stop

    def _scores(self, q: Tensor, k: Tensor, at: At, whole: bool) -> Tensor:
        b, g, K, D = k.shape
        # The heads that share a key/value head pose as more queries of it, so that keys are read once.
        q, k = q.reshape(b * g, -1, D), k.to(self.wide).reshape(b * g, K, D)
        with without_autocast(q.device):
            scores = torch.baddbmm(q.new_zeros(()), q, k.transpose(1, 2), beta=0, alpha=self.scale)
        scores = scores.view(b, -1, at.queries.stop - at.queries.start, K)
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.bias is not None:
            bias = _part(self.bias, *at).to(self.wide)
            scores.add_(bias).masked_fill_(bias == -torch.inf, -torch.inf)
        if not whole or self.dense is not None:
            scores.masked_fill_(~self.allowed(at), -torch.inf)
        return scores


def _part(t: Tensor, *slices: slice) -> Tensor:
    """Slices of the axes that are there; an axis of size 1 stands for any."""
    return t[tuple(s if size > 1 else slice(None) for s, size in zip(slices, t.shape))]


def _sides(B: int, G: int, Q: int, K: int, group: int, size: int, all_heads: bool) -> tuple[int, int, int, int]:
    """How many rows of the batch, key/value heads, queries and keys make a tile of about `size` scores."""
    together = group * G if all_heads else group  # heads that cannot be parted
    queries = min(Q, SIDE)
    keys = min(K, max(SIDE, size // (queries * together)))
    queries = min(queries, max(1, size // (together * keys)))
    fit = max(1, size // (together * queries * keys))
    if all_heads:
        return min(B, fit), G, queries, keys
    return (min(B, fit // G), G, queries, keys) if fit >= G else (1, fit, queries, keys)

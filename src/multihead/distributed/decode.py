"""Decoding with keys and values spread over ranks: for contexts that do not fit one machine.

Every rank is given the same new tokens, attends to the keys it has, and the partial results are merged by log-sum-exp,
in the same order everywhere, so that all ranks go on with the same numbers. A new token's key and value are kept by one
rank: the one with most room.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor

from multihead.attention import attend
from multihead.cache import Cache, CacheOverflow
from multihead.distributed.merge import Merged
from multihead.distributed.schedule import slices
from multihead.distributed.wire import Wire
from multihead.masks import Mask, lower
from multihead.masks.intervals import Frame, Visible


class SpreadCache(Cache):
    """Keys and values of the tokens so far, each on one rank; made by the sharded layer's `new_cache`.

    `length` counts the tokens of all ranks, `own` holds those of this one, and `positions` says which they are.

    >>> layer = mh.distributed.shard_sequence(layer, mesh)  # doctest: +SKIP
    >>> cache = layer.new_cache(batch=1)  # doctest: +SKIP
    >>> y = layer(x, mask=mh.Causal(), cache=cache)  # doctest: +SKIP
    """

    def __init__(self, wire: Wire, own: Cache) -> None:
        self.wire, self.own = wire, own
        self.capacity, self.window, self.dropped = own.capacity, None, 0
        self.length: int | Tensor = 0
        self.filling = False  # whether x is a slice, see `prefill`
        self.counts = [0] * wire.size  # tokens on each rank
        self.positions = torch.zeros(0, dtype=torch.long)  # of this rank's tokens in the whole, rising

    @property
    def batch(self) -> int:
        return self.own.batch

    @property
    def longest(self) -> int:
        return self.own.longest

    @property
    def k(self) -> Tensor:
        return self.own.k  # (B, G, K on this rank, D)

    @property
    def v(self) -> Tensor:
        return self.own.v  # (B, G, K on this rank, V)

    @property
    def nbytes(self) -> int:
        return self.own.nbytes

    def append(self, k: Tensor, v: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor, Frame]:
        """While filling, a slice from each rank; else new tokens that all ranks have, each kept by one of them."""
        n = k.shape[2]
        if self.filling:
            return self._append_slice(k, v)
        taken, first = self._share_out(n), int(self.length)
        start = sum(taken[: self.wire.rank])
        mine = slice(start, start + taken[self.wire.rank])
        new = range(first + mine.start, first + mine.stop)
        if len(new):
            self.own.append(k[:, :, mine], v[:, :, mine])
            self.positions = torch.cat((self.positions, torch.tensor(new)))
        self.counts = [have + more for have, more in zip(self.counts, taken)]
        self.length = first + n
        return self.k, self.v, Frame.of(n, self.longest, k.device)

    def _append_slice(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Frame]:
        if self.length:
            raise ValueError(f"the cache holds {self.length} tokens: slices can only be put into an empty one")
        n = k.shape[2]
        self.counts = [int(t) for t in self.wire.exchange(torch.tensor([n]))]
        if self.capacity is not None and max(self.counts) > self.capacity:
            rank = self.counts.index(max(self.counts))
            raise CacheOverflow(f"{self.wire.name(rank)} has {max(self.counts)} tokens: more than its {self.capacity=}")
        first, last = slices(self.counts)[self.wire.rank]
        if n:
            self.own.append(k, v)
        self.positions, self.length = torch.arange(first, last), sum(self.counts)
        return k, v, Frame.of(n, n, k.device)

    def _share_out(self, n: int) -> list[int]:
        """How many of n new tokens each rank takes: all on the one with most room, or where they fit."""
        if self.capacity is None:
            return [n if rank == self.counts.index(min(self.counts)) else 0 for rank in range(self.wire.size)]
        room = [self.capacity - count for count in self.counts]
        if n > sum(room):
            raise CacheOverflow(
                f"the cache is full on every rank: {self.length} tokens and {n} more do not fit "
                f"capacity={self.capacity} on each of {self.wire.size} ranks; give new_cache() a larger capacity=, or "
                "none to let it grow"
            )
        best = room.index(max(room))
        if n <= room[best]:
            return [n if rank == best else 0 for rank in range(self.wire.size)]
        taken: list[int] = []
        for free in room:
            taken.append(min(free, n - sum(taken)))
        return taken

    def crop(self, length: int | Tensor) -> None:
        """Forget all but the first `length` tokens."""
        if isinstance(length, Tensor):
            raise TypeError("length is a tensor: the rows of a spread cache have one length, expected an int")
        self.length = min(int(self.length), length)
        owned = self.wire.exchange(torch.tensor([int((self.positions < length).sum())]))
        self.counts = [int(t) for t in owned]
        kept = self.counts[self.wire.rank]
        self.own.crop(kept)
        self.positions = self.positions[:kept]

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        self.own.reorder(rows)

    def mark(self) -> Any:
        return self.length, self.counts, self.positions, self.own.mark()

    def back_to(self, mark: Any) -> None:
        self.length, self.counts, self.positions, own = mark
        self.own.back_to(own)

    def fork(self) -> "SpreadCache":
        other = copy(self)
        other.own = self.own.fork()
        return other

    def reset(self) -> None:
        self.own.reset()
        self.length, self.counts, self.positions = 0, [0] * self.wire.size, self.positions[:0]

    def __repr__(self) -> str:
        return f"SpreadCache({self.length} tokens on {self.wire.size} ranks, here {self.own})"


@contextmanager
def prefill(*caches: SpreadCache) -> Iterator[None]:
    """Inside the block, x is this rank's slice of the prompt; outside, every rank gives the same new tokens.

    >>> with mh.distributed.prefill(cache):  # doctest: +SKIP
    ...     layer(x.tensor_split(ranks, 1)[rank], mask=mh.Causal(), cache=cache)
    """
    for cache in caches:
        if not isinstance(cache, SpreadCache):
            raise TypeError(
                f"prefill is given a {type(cache).__name__}: expected caches of a layer sharded by sequence"
            )
        cache.filling = True
    try:
        yield
    finally:
        for cache in caches:
            cache.filling = False


def attend_spread(
    cache: SpreadCache, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, *, scale: float | None,
    softcap: float | None, sinks: Tensor | None, bias: Tensor | None, dropout: float, backend: str | None,
) -> Tensor:  # fmt: skip
    """Out (B,H,n,V) of new tokens, the same on every rank; k and v are those of this rank."""
    if dropout:
        raise ValueError(f"dropout={dropout} in training: a spread cache is for decoding, expected layer.eval()")
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        raise ValueError("a gradient is wanted, and a spread cache is for decoding: expected torch.no_grad()")
    B, H, n, _ = q.shape
    where = cache.positions.to(q.device)
    whole = lower(mask, Frame.of(n, int(cache.length), q.device), B, H)
    columns = None if bias is None or bias.shape[-1] == 1 else bias.index_select(-1, where)
    visible = _among(whole, where)
    part = bias if columns is None else columns
    out, lse = attend(q, k, v, visible, scale=scale, softcap=softcap, bias=part, backend=backend, return_lse=True)
    merged = Merged(B, H, n, v.shape[3], q.dtype, q.device)
    both = torch.cat((out.to(lse.dtype), lse[..., None]), -1)
    for found in cache.wire.exchange(both):
        merged.add(found[..., :-1], found[..., -1])
    merged.add_sinks(sinks)
    return merged.result()


def _among(whole: Visible, where: Tensor) -> Visible:
    """What is visible of some keys, given where they stand among all: an interval of all is one of these too."""
    start, stop = (torch.searchsorted(where, bound.contiguous()) for bound in whole.bounds(where.device))
    dense = whole.dense
    if dense is not None and dense.dim() and dense.shape[-1] > 1:
        dense = dense.index_select(-1, where)
    return Visible(whole.Q, len(where), start, stop, dense)

"""Ring attention: queries stay, keys and values go round, and each part is attended to while the next is on its way.

Blocks go straight from the rank that has them to the one that needs them, in the order of the ring: at step s a rank
receives from the s-th before it and sends to the s-th after it. So a block that a rank's queries do not see is not
sent, and the rank a message did not come from is known. A block travels in two halves: one is attended to while the
other is on its way, so that never more than the size of one block is held of other ranks. The merging is that of Liu et
al. 2023 (arXiv:2310.01889); what is kept for the backward pass are a rank's own queries, keys and values, its output
and the softmax's denominator: N/ranks of each.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from multihead.distributed.blocks import Range
from multihead.distributed.merge import Denominator, Merged
from multihead.distributed.partial import Call, Whole, attend_part, cut_bias, d_sinks, differentiate_part
from multihead.distributed.schedule import Chunk, Schedule
from multihead.distributed.wire import Receipt, Wire

KEYS, QUERIES, OUTPUTS, GRADIENTS = 3, 4, 5, 6  # tags
WORTH_CUTTING = 128  # keys; a shorter block travels whole


@dataclass(frozen=True)
class Parcel:
    """Keys, with their values, that travel in one message; `turn`: the step of the ring, and the half of the block."""

    turn: tuple[int, int]
    peer: int  # the rank it comes from, or goes to
    keys: Range  # in the whole sequence


class Ring:
    """One pass over the keys: which blocks come, which go, and the chunks of queries that this rank computes."""

    def __init__(self, wire: Wire, schedule: Schedule, call: Call) -> None:
        self.wire, self.schedule, self.call, self.rank = wire, schedule, call, wire.rank
        self.chunks = [chunk for chunk in schedule.chunks if chunk.at == self.rank and _count(chunk.queries)]
        self.own = [chunk for chunk in schedule.chunks if chunk.owner == self.rank and _count(chunk.queries)]
        self.first_query, self.first_key = schedule.queries[self.rank][0], schedule.keys[self.rank][0]
        steps = range(1, wire.size)
        self.coming = [part for step in steps for part in self._parcels(step, self.rank - step, self.rank)]
        self.going = [part for step in steps for part in self._parcels(step, self.rank, self.rank + step)]
        self.packed: dict[Range, Tensor] = {}  # the two latest that were sent: most ranks need the same ones

    def _parcels(self, step: int, source: int, to: int) -> list[Parcel]:
        """What one rank sends another in a step: a block in two halves, or whole where it is short."""
        source, to = source % self.wire.size, to % self.wire.size
        first, last = self.schedule.needed(to, source)
        middle = first + (last - first + 1) // 2 if last - first >= WORTH_CUTTING else last
        peer = source if to == self.rank else to
        halves = ((first, middle), (middle, last))
        return [Parcel((step, half), peer, keys) for half, keys in enumerate(halves) if _count(keys)]

    def at_home(self, t: Tensor, chunk: Chunk) -> Tensor:
        """The rows of this rank's slice that a chunk is."""
        first, last = chunk.queries
        return t[:, :, first - self.first_query : last - self.first_query]

    def bring(self, t: Tensor, tag: int) -> list[Tensor]:
        """Rows of the owners' slices (B,H,q,·), where they are computed: one tensor for each chunk of this rank."""
        B, H, _, D = t.shape
        coming: dict[Chunk, Receipt] = {}
        for chunk in self.chunks:
            if chunk.owner != self.rank:
                shape = (B, H, _count(chunk.queries), D)
                coming[chunk] = self.wire.receive(shape, t.dtype, t.device, chunk.owner, tag)
        for chunk in self.own:
            if chunk.at != self.rank:
                self.wire.send(self.at_home(t, chunk), chunk.at, tag)
        return [coming[c].wait() if c in coming else self.at_home(t, c) for c in self.chunks]

    def take_home(self, found: list[Tensor], into: Tensor, tag: int) -> Tensor:
        """The other way: what was computed for each chunk, in the rows of its owner's slice."""
        B, H, _, V = into.shape
        coming = {
            chunk: self.wire.receive((B, H, _count(chunk.queries), V), into.dtype, into.device, chunk.at, tag)
            for chunk in self.own
            if chunk.at != self.rank
        }
        for chunk, t in zip(self.chunks, found):
            if chunk.owner == self.rank:
                self.at_home(into, chunk).copy_(t)
            else:
                self.wire.send(t.to(into.dtype), chunk.owner, tag)
        for chunk, receipt in coming.items():
            self.at_home(into, chunk).copy_(receipt.wait())
        return into

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[Parcel, Tensor, Tensor]]:
        """This rank's own keys and values, then parcel after parcel of the others', the next already under way.

        A parcel may be read until the next one is asked for: two buffers serve all of them in turn.
        """
        self.packed.clear()
        going, receipt = deque(self.going), None
        most = max((_count(parcel.keys) for parcel in self.coming), default=0)
        buffers = [_message(k, v, most, k.dtype) for _ in self.coming[:2]]
        own = Parcel((0, 0), self.rank, self.schedule.needed(self.rank, self.rank))
        for n, (parcel, after) in enumerate(zip_longest((own, *self.coming), self.coming)):
            following = None if after is None else self._ask(after, k, v, buffers[n % 2])
            while going and (after is None or going[0].turn <= after.turn):
                self._give(going.popleft(), k, v)
            if receipt is None:
                yield parcel, self._own_keys(k, parcel.keys), self._own_keys(v, parcel.keys)
            else:
                yield parcel, *_unpack(receipt.wait(), parcel.keys, k, v)
            receipt = following
        self.packed.clear()

    def _own_keys(self, t: Tensor, keys: Range) -> Tensor:
        first = max(keys[0] - self.first_key, 0)
        return t[:, :, first : first + _count(keys)]

    def _ask(self, parcel: Parcel, k: Tensor, v: Tensor, buffer: Tensor) -> Receipt:
        count = _size(k, v, _count(parcel.keys))
        return self.wire.receive((count,), k.dtype, k.device, parcel.peer, KEYS, into=buffer)

    def _give(self, parcel: Parcel, k: Tensor, v: Tensor) -> None:
        keys = parcel.keys
        if keys not in self.packed:
            while len(self.packed) > 1:
                del self.packed[next(iter(self.packed))]
            self.packed[keys] = _pack(self._own_keys(k, keys), self._own_keys(v, keys))
        self.wire.send(self.packed[keys], parcel.peer, KEYS)


def _count(part: Range) -> int:
    return part[1] - part[0]


def _pack(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat((k.reshape(-1), v.reshape(-1)))


def _size(k: Tensor, v: Tensor, n: int) -> int:
    """Numbers that n keys and their values are."""
    return k.shape[0] * k.shape[1] * n * (k.shape[3] + v.shape[3])


def _message(k: Tensor, v: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(_size(k, v, n), dtype=dtype, device=k.device)


def _unpack(flat: Tensor, keys: Range, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """K and v (B,G,n,·) of a message."""
    (B, G, _, D), V, n = k.shape, v.shape[3], _count(keys)
    return flat[: B * G * n * D].view(B, G, n, D), flat[B * G * n * D :].view(B, G, n, V)


class RingAttention(torch.autograd.Function):
    """out (B,H,n,V) of this rank's slice: q (B,H,n,D), k (B,G,m,D), v (B,G,m,V) are slices as well."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: Tensor | None, ring: Ring
    ) -> Tensor:
        brought = ring.bring(q, QUERIES)
        merged = [Merged(t.shape[0], t.shape[1], t.shape[2], v.shape[3], q.dtype, q.device) for t in brought]
        for parcel, k_part, v_part in ring.blocks(k, v):
            for chunk, rows, so_far in zip(ring.chunks, brought, merged):
                if _count(parcel.keys):
                    part_bias = cut_bias(ring.call, bias, chunk.queries, parcel.keys)
                    so_far.add(*attend_part(ring.call, rows, k_part, v_part, part_bias, chunk.queries, parcel.keys))
        for so_far in merged:
            so_far.add_sinks(sinks)
        known = [t for m in merged for t in (m.denominator.top, m.denominator.total)]
        results = [merged.pop(0).result() for _ in brought]
        if ring.chunks == ring.own and len(results) == 1:
            out = results[0]
        else:
            out = ring.take_home(results, q.new_empty(*q.shape[:3], v.shape[3]), OUTPUTS)
        for n, chunk in enumerate(ring.chunks):
            if chunk.owner == ring.rank:
                results[n] = ring.at_home(out, chunk)
        ring.wire.flush()
        ctx.ring, ctx.chunks = ring, len(brought)
        ctx.save_for_backward(q, k, v, sinks, bias, *brought, *results, *known)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        ring: Ring = ctx.ring
        wire, n = ring.wire, ctx.chunks
        q, k, v, sinks, bias, *rest = ctx.saved_tensors
        d_outs = ring.bring(d_out, OUTPUTS)
        known = [Denominator(*pair) for pair in zip(rest[2 * n :: 2], rest[2 * n + 1 :: 2])]
        wholes = [Whole(*of) for of in zip(rest[:n], rest[n : 2 * n], known, d_outs)]
        exact = torch.promote_types(q.dtype, torch.float32)
        d_q = [torch.zeros_like(whole.q, dtype=exact) for whole in wholes]
        d_keys = Owed(ring, torch.zeros_like(k, dtype=exact), torch.zeros_like(v, dtype=exact))
        bias_too = bias is not None and ctx.needs_input_grad[4]
        d_bias = torch.zeros_like(bias, dtype=exact) if bias_too else None
        for parcel, k_part, v_part in ring.blocks(k, v):
            keys = parcel.keys
            d_keys.ask(parcel)
            found = _message(k, v, _count(keys), exact)
            d_parts = _unpack(found, keys, k, v)
            for i, (chunk, whole) in enumerate(zip(ring.chunks, wholes)):
                if not _count(keys):
                    break
                part_bias = cut_bias(ring.call, bias, chunk.queries, keys)
                parts = differentiate_part(ring.call, whole, k_part, v_part, part_bias, chunk.queries, keys, bias_too)
                for total, part in zip((d_q[i], *d_parts), parts):
                    total += part
                if d_bias is not None:
                    into = cut_bias(ring.call, d_bias, chunk.queries, keys)
                    assert into is not None
                    into += parts[3]
            if parcel.peer == ring.rank:
                d_keys.add(keys, found)
            else:
                wire.send(found, parcel.peer, GRADIENTS)
            del found, d_parts
            d_keys.collect(leave=1)
            wire.flush(GRADIENTS, leave=1)
        d_keys.ask(None)
        d_keys.collect(leave=0)
        home = ring.take_home(d_q, torch.empty_like(q, memory_format=torch.contiguous_format), QUERIES)
        found_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            total = torch.zeros_like(sinks, dtype=exact)
            for whole in wholes:
                total += d_sinks(whole, sinks)
            found_sinks = total.to(sinks.dtype)
        wire.flush()
        found_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return home, d_keys.k.to(k.dtype), d_keys.v.to(v.dtype), found_sinks, found_bias, None


class Owed:
    """The gradients of this rank's keys and values: what it finds itself, and what the others send it."""

    def __init__(self, ring: Ring, k: Tensor, v: Tensor) -> None:
        self.ring, self.k, self.v = ring, k, v
        self.later, self.asked = deque(ring.going), deque[tuple[Range, Receipt]]()

    def ask(self, now: Parcel | None) -> None:
        """Receive what the others find for the parcels that were sent up to this turn; None: for all of them."""
        while self.later and (now is None or self.later[0].turn <= now.turn):
            parcel = self.later.popleft()
            shape = (_size(self.k, self.v, _count(parcel.keys)),)
            receipt = self.ring.wire.receive(shape, self.k.dtype, self.k.device, parcel.peer, GRADIENTS)
            self.asked.append((parcel.keys, receipt))

    def collect(self, leave: int) -> None:
        """Add what has been received, but for the newest `leave`, which are still being computed."""
        while len(self.asked) > leave:
            keys, receipt = self.asked.popleft()
            self.add(keys, receipt.wait())

    def add(self, keys: Range, found: Tensor) -> None:
        for total, part in zip((self.k, self.v), _unpack(found, keys, self.k, self.v)):
            self.ring._own_keys(total, keys).add_(part)

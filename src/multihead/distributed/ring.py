"""Ring attention: queries stay, keys and values go round, and each part is attended to while the next is on its way.

Blocks go straight from the rank that has them to the one that needs them, in the order of the ring: at step s a rank
receives from the s-th before it and sends to the s-th after it. So a block that a rank's queries do not see is not
sent, and the rank a message did not come from is known. The merging is that of Liu et al. 2023 (arXiv:2310.01889); what
is kept for the backward pass are a rank's own queries, keys and values, its output and log-sum-exp: N/ranks of each.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from multihead.distributed.blocks import Range
from multihead.distributed.merge import Denominator, Merged
from multihead.distributed.partial import Call, Whole, attend_part, cut_bias, d_sinks, differentiate_part
from multihead.distributed.schedule import Chunk, Schedule
from multihead.distributed.wire import Receipt, Wire

KEYS, QUERIES, OUTPUTS, GRADIENTS = 3, 4, 5, 6  # tags


class Ring:
    """One pass over the keys: which blocks come, which go, and the chunks of queries that this rank computes."""

    def __init__(self, wire: Wire, schedule: Schedule, call: Call) -> None:
        self.wire, self.schedule, self.call, self.rank = wire, schedule, call, wire.rank
        self.chunks = [chunk for chunk in schedule.chunks if chunk.at == self.rank and _count(chunk.queries)]
        self.own = [chunk for chunk in schedule.chunks if chunk.owner == self.rank and _count(chunk.queries)]
        self.first_query, self.first_key = schedule.queries[self.rank][0], schedule.keys[self.rank][0]
        self.packed: tuple[Range, Tensor] | None = (
            None  # the latest block that was sent: the next one is often the same
        )

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

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, int, Range, Tensor, Tensor]]:
        """step, source, the range of the keys, k and v: one block after another, the next already under way."""
        self.packed = None
        coming = self._ask(1, k, v)
        self._give(1, k, v)
        for step in range(self.wire.size):
            source = (self.rank - step) % self.wire.size
            here = coming if step else None
            if step:
                coming = self._ask(step + 1, k, v)
                self._give(step + 1, k, v)
            keys = self.schedule.needed(self.rank, source)
            if not step:
                k_part, v_part = self._own_keys(k, keys), self._own_keys(v, keys)
            else:
                k_part, v_part = _unpack(here, keys, k, v)
            yield step, source, keys, k_part, v_part

    def _own_keys(self, t: Tensor, keys: Range) -> Tensor:
        first = max(keys[0] - self.first_key, 0)
        return t[:, :, first : first + _count(keys)]

    def _ask(self, step: int, k: Tensor, v: Tensor) -> Receipt | None:
        """Receive the block of the rank `step` before this one, if it is needed."""
        if step >= self.wire.size:
            return None
        source = (self.rank - step) % self.wire.size
        count = k.shape[0] * k.shape[1] * _count(self.schedule.needed(self.rank, source)) * (k.shape[3] + v.shape[3])
        return self.wire.receive((count,), k.dtype, k.device, source, KEYS)

    def _give(self, step: int, k: Tensor, v: Tensor) -> None:
        """Send this rank's block to the rank `step` after it, if that needs it."""
        if step >= self.wire.size:
            return
        to = (self.rank + step) % self.wire.size
        keys = self.schedule.needed(to, self.rank)
        if _count(keys):
            if self.packed is None or self.packed[0] != keys:
                self.packed = keys, _pack(self._own_keys(k, keys), self._own_keys(v, keys))
            self.wire.send(self.packed[1], to, KEYS)


def _count(part: Range) -> int:
    return part[1] - part[0]


def _pack(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat((k.reshape(-1), v.reshape(-1)))


def _unpack(receipt: Receipt | None, keys: Range, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """K and v (B,G,n,·) of a message."""
    assert receipt is not None
    (B, G, _, D), V, n = k.shape, v.shape[3], _count(keys)
    flat = receipt.wait()
    return flat[: B * G * n * D].view(B, G, n, D), flat[B * G * n * D :].view(B, G, n, V)


class RingAttention(torch.autograd.Function):
    """out (B,H,n,V) of this rank's slice: q (B,H,n,D), k (B,G,m,D), v (B,G,m,V) are slices as well."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: Tensor | None, ring: Ring
    ) -> Tensor:
        brought = ring.bring(q, QUERIES)
        merged = [Merged(t.shape[0], t.shape[1], t.shape[2], v.shape[3], q.dtype, q.device) for t in brought]
        for _, _, keys, k_part, v_part in ring.blocks(k, v):
            for chunk, rows, so_far in zip(ring.chunks, brought, merged):
                if _count(keys):
                    part_bias = cut_bias(ring.call, bias, chunk.queries, keys)
                    so_far.add(*attend_part(ring.call, rows, k_part, v_part, part_bias, chunk.queries, keys))
        for so_far in merged:
            so_far.add_sinks(sinks)
        results = [so_far.result() for so_far in merged]
        known = [t for m in merged for t in (m.denominator.top, m.denominator.total)]
        out = ring.take_home(results, q.new_zeros(*q.shape[:3], v.shape[3]), OUTPUTS)
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
        d_k, d_v = torch.zeros_like(k, dtype=exact), torch.zeros_like(v, dtype=exact)
        bias_too = bias is not None and ctx.needs_input_grad[4]
        d_bias = torch.zeros_like(bias, dtype=exact) if bias_too else None
        owed: list[tuple[Range, Receipt]] = []  # what others have found for this rank's keys
        for step, source, keys, k_part, v_part in ring.blocks(k, v):
            owed += _collect(ring, step, d_k, d_v)
            if not _count(keys):
                _add_owed(ring, owed, d_k, d_v, leave=1)
                continue
            part_k, part_v = torch.zeros_like(k_part, dtype=exact), torch.zeros_like(v_part, dtype=exact)
            for i, (chunk, whole) in enumerate(zip(ring.chunks, wholes)):
                part_bias = cut_bias(ring.call, bias, chunk.queries, keys)
                found = differentiate_part(ring.call, whole, k_part, v_part, part_bias, chunk.queries, keys, bias_too)
                for total, part in zip((d_q[i], part_k, part_v), found):
                    total += part
                if d_bias is not None:
                    into = cut_bias(ring.call, d_bias, chunk.queries, keys)
                    assert into is not None
                    into += found[3]
            if source == ring.rank:
                ring._own_keys(d_k, keys).add_(part_k)
                ring._own_keys(d_v, keys).add_(part_v)
            else:
                wire.send(_pack(part_k, part_v), source, GRADIENTS)
            _add_owed(ring, owed, d_k, d_v, leave=1)
        _add_owed(ring, owed, d_k, d_v, leave=0)
        home = ring.take_home(d_q, torch.zeros_like(q, memory_format=torch.contiguous_format), QUERIES)
        found_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            total = torch.zeros_like(sinks, dtype=exact)
            for whole in wholes:
                total += d_sinks(whole, sinks)
            found_sinks = total.to(sinks.dtype)
        wire.flush()
        return (
            home,
            d_k.to(k.dtype),
            d_v.to(v.dtype),
            found_sinks,
            None if d_bias is None else d_bias.to(bias.dtype),
            None,
        )


def _collect(ring: Ring, step: int, d_k: Tensor, d_v: Tensor) -> list[tuple[Range, Receipt]]:
    """Receive what the rank `step` after this one finds for this rank's keys in this step."""
    other = (ring.rank + step) % ring.wire.size
    keys = ring.schedule.needed(other, ring.rank)
    if not step or not _count(keys):
        return []
    count = d_k.shape[0] * d_k.shape[1] * _count(keys) * (d_k.shape[3] + d_v.shape[3])
    return [(keys, ring.wire.receive((count,), d_k.dtype, d_k.device, other, GRADIENTS))]


def _add_owed(ring: Ring, owed: list[tuple[Range, Receipt]], d_k: Tensor, d_v: Tensor, leave: int) -> None:
    """Add what has been received, but for the newest `leave`, which are still being computed."""
    while len(owed) > leave:
        keys, receipt = owed.pop(0)
        for total, part in zip((d_k, d_v), _unpack(receipt, keys, d_k, d_v)):
            ring._own_keys(total, keys).add_(part)

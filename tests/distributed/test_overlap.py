"""Blocks travel while a rank computes: the order in which a ring asks, sends, computes and waits, without a clock."""

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import multihead as mh
import multihead.distributed
from multihead.distributed import ring, wire
from tests.distributed.pool import SIZES, Pool

Event = tuple[Any, ...]  # "ask" | "give" | "wait", tag, peer, the number of that message; or "compute", keys
N = 523
MASKS = {
    "everything": None,
    "causal": mh.Causal(),
    "window": mh.Causal(window=200),
    "documents": mh.Documents([400, 123]) & mh.Causal(),
    "prefix": mh.Prefix(150),
}


def record(mesh: Any, mask: Any, balance: bool) -> tuple[list[Event], list[Event], list[Event], list[Event]]:
    """What happens in a forward and in a backward pass on this rank; the parcels that come, and those that go."""
    events: list[Event] = []
    counts: Counter[tuple[str, int, int]] = Counter()
    rings: list[ring.Ring] = []

    def note(kind: str, peer: int, tag: int) -> tuple[int, int, int]:
        counts[kind, tag, peer] += 1
        events.append((kind, tag, peer, counts[kind, tag, peer] - 1))
        return tag, peer, counts[kind, tag, peer] - 1

    def receive(self: wire.Wire, shape: Any, dtype: Any, device: Any, source: int, tag: int = 0, **more: Any) -> Any:
        receipt = true_receive(self, shape, dtype, device, source, tag, **more)
        if receipt.work is not None:
            receipt.noted = note("ask", source, tag)
        return receipt

    def send(self: wire.Wire, t: torch.Tensor, to: int, tag: int = 0) -> None:
        if t.numel():
            note("give", to, tag)
        true_send(self, t, to, tag)

    def wait(self: wire.Receipt) -> torch.Tensor:
        if self.work is not None:
            events.append(("wait", *self.noted))  # type: ignore[attr-defined]
        return true_wait(self)

    def computing(true: Callable, keys: int) -> Callable:
        def compute(*args: Any) -> Any:
            events.append(("compute", args[keys]))
            return true(*args)

        return compute

    true_receive, true_send, true_wait = wire.Wire.receive, wire.Wire.send, wire.Receipt.wait
    patches = [
        mock.patch.object(wire.Wire, "receive", receive),
        mock.patch.object(wire.Wire, "send", send),
        mock.patch.object(wire.Receipt, "wait", wait),
        mock.patch.object(ring, "attend_part", computing(ring.attend_part, 6)),
        mock.patch.object(ring, "differentiate_part", computing(ring.differentiate_part, 6)),
        mock.patch.object(ring.Ring, "__init__", lambda self, *a: (rings.append(self), true_init(self, *a))[1]),
    ]
    true_init = ring.Ring.__init__
    layer = mh.distributed.shard_sequence(mh.MultiHeadAttention(8, heads=2), mesh, balance=balance)
    x = torch.randn(1, N, 8).tensor_split(mesh.size(), 1)[mesh.get_local_rank()]
    for patch in patches:
        patch.start()
    try:
        y = layer(x, mask=mask)
        forward = events.copy()
        events.clear()
        counts.clear()
        y.sum().backward()
    finally:
        mock.patch.stopall()
    lists = [[(p.turn, p.peer, p.keys) for p in parcels] for parcels in (rings[0].coming, rings[0].going)]
    return forward, events, lists[0], lists[1]


class Timeline:
    """Where in the order of events a message was asked for, given or waited for, and a parcel computed."""

    def __init__(self, events: list[Event], tag: int, parcels: list[Event]) -> None:
        self.events, self.tag, self.parcels = events, tag, parcels

    def at(self, kind: str, n: int) -> int:
        peer = self.parcels[n][1]
        number = sum(other[1] == peer for other in self.parcels[:n])  # messages of one peer and tag come in order
        return self.events.index((kind, self.tag, peer, number))

    def computed(self, n: int) -> range:
        found = [place for place, event in enumerate(self.events) if event == ("compute", self.parcels[n][2])]
        return range(found[0], found[-1] + 1)


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("name", MASKS)
def test_the_next_block_is_under_way_before_one_is_attended(pool: Pool, name: str, balance: bool, ranks: int) -> None:
    answers = pool.run(record, ranks, MASKS[name], balance)
    assert sum(len(coming) for *_, coming, _ in answers) >= ranks - 1
    for rank, (forward, backward, coming, going) in enumerate(answers):
        for events in (forward, backward):
            computed = [event[1] for event in events if event[0] == "compute"]
            own = [keys for keys in dict.fromkeys(computed) if keys not in [parcel[2] for parcel in coming]]
            assert len(own) <= 1
            turns = [((0, 0), rank, keys) for keys in own] + coming
            come = Timeline(events, ring.KEYS, coming)
            work = Timeline(events, ring.KEYS, turns)
            for n, (turn, *_) in enumerate(coming):
                here = n + len(own)  # its place among the turns
                assert come.at("wait", n) < work.computed(here)[0]
                if here:  # something is computed while this parcel travels
                    before = work.computed(here - 1)
                    assert come.at("ask", n) < before[0] <= before[-1] < come.at("wait", n)
                    gone = Timeline(events, ring.KEYS, going)
                    for m, (theirs, *_) in enumerate(going):
                        if theirs <= turn:  # what the others wait for in this turn is sent before this rank computes
                            assert gone.at("give", m) < before[0]
            for n in range(len(turns)):  # nobody is waited for while something could be computed
                run = work.computed(n)
                assert all(events[place][0] == "compute" for place in run)


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("name", MASKS)
def test_gradients_travel_back_while_the_next_block_is_computed(pool: Pool, name: str, ranks: int) -> None:
    for _, events, coming, going in pool.run(record, ranks, MASKS[name], True):
        last = max(place for place, event in enumerate(events) if event[0] == "compute")
        work, sent = Timeline(events, ring.KEYS, coming), Timeline(events, ring.GRADIENTS, coming)
        for n in range(len(coming)):
            assert sent.at("give", n) > work.computed(n)[-1]
            if n + 1 < len(coming):
                assert sent.at("give", n) < work.computed(n + 1)[0]
        back = Timeline(events, ring.GRADIENTS, going)
        for n, (turn, *_) in enumerate(going):
            same = [m for m, (mine, *_) in enumerate(coming) if mine == turn]
            for m in same:  # the other computes it in this turn: it is asked for before, and waited for after
                assert back.at("ask", n) < work.computed(m)[0]
                assert back.at("wait", n) > work.computed(min(m + 1, len(coming) - 1))[-1]
            if not same:
                assert back.at("wait", n) > back.at("ask", n)
        assert any(event[0] == "wait" and event[1] == ring.GRADIENTS for event in events[last:]) or not going

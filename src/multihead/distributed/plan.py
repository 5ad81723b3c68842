"""What each way of sharding would cost, before anything is run: time, bytes and memory, and which to choose.

Bytes are exact: they come from the same schedule that the ranks follow, and a test holds them to what is counted on the
wire. Times are a model, with these assumptions: every rank computes at `flops` and sends at `bandwidth` while it
receives at the same rate, a message takes `latency` more; the network between any two ranks is the same; a ring's
transfers run while it computes, Ulysses' and gathering's do not; a backward pass takes 2.5 times the forward pass, and
one more where a ring computes its parts again. Memory is that of q, k, v, the output and what is in flight, without
weights.
"""

from dataclasses import dataclass
from typing import Any

import torch

from multihead.distributed import schedule as schedules
from multihead.distributed.agree import HEADER_BYTES
from multihead.distributed.split import even, split_heads
from multihead.masks import Mask, lower
from multihead.masks.intervals import Frame
from multihead.sizes import Sizes, require_int


@dataclass(frozen=True)
class Cost:
    """One method: seconds of the slowest rank, bytes that each rank sends, bytes it holds; or why it is refused."""

    method: str
    seconds: float
    sent: tuple[int, ...]
    memory: int
    compute: float  # seconds of the busiest rank
    transfer: float  # seconds of the rank with most to receive, were nothing computed meanwhile
    refused: str | None = None


@dataclass(frozen=True)
class Plan:
    """What `plan` found: `costs` by method, the `best`, and a table when printed.

    >>> found = mh.distributed.plan(mh.MultiHeadAttention(64, heads=4), 2, tokens=1000)
    >>> sorted(found.costs), found.best in found.costs
    (['gather', 'ring', 'ulysses'], True)
    """

    costs: dict[str, Cost]
    one_process: Cost
    setting: str

    @property
    def best(self) -> str:
        """The fastest method."""
        return min((c for c in self.costs.values() if c.refused is None), key=lambda c: c.seconds).method

    def __str__(self) -> str:
        lines = [self.setting, f"{'':12}{'time':>10}{'compute':>10}{'transfer':>10}{'sent, most':>12}{'memory':>10}"]
        for cost in (self.one_process, *self.costs.values()):
            mark = "→ " if cost.method == self.best else "  "
            if cost.refused is not None:
                lines.append(f"{mark}{cost.method:10}  {cost.refused}")
                continue
            times = "".join(f"{_time(t):>10}" for t in (cost.seconds, cost.compute, cost.transfer))
            lines.append(f"{mark}{cost.method:10}{times}{_size(max(cost.sent)):>12}{_size(cost.memory):>10}")
        return "\n".join(lines)


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1 or unit == "µs":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.3g} {unit}"
        count /= 1024
    raise AssertionError


@dataclass(frozen=True)
class _Setting:
    sizes: Sizes
    B: int
    bytes: int  # of a number
    bandwidth: float
    latency: float
    flops: float
    backward: bool

    @property
    def kv(self) -> int:
        """Numbers that one key and its value are, over all key/value heads and rows."""
        return self.B * self.sizes.G * (self.sizes.D + self.sizes.V)

    @property
    def wide(self) -> int:
        return max(self.bytes, 4)

    def compute(self, pairs: float, heads: float, again: bool = False) -> float:
        """Seconds to score and mix so many (query, key) pairs of a row, for so many heads."""
        passes = 1 + (2.5 + again if self.backward else 0)
        return passes * pairs * heads * self.B * 2 * (self.sizes.D + self.sizes.V) / self.flops

    def carry(self, count: float, messages: float) -> float:
        return count / self.bandwidth + messages * self.latency


def plan(
    sizes: Sizes | Any,
    ranks: int,
    *,
    tokens: int,
    mask: Mask | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    backward: bool = False,
    bandwidth: float = 1e9,
    latency: float = 5e-5,
    flops: float = 5e10,
) -> Plan:
    """Predict what steps 3 and 4 cost on `ranks` ranks for each method, and say which to choose.

    Args:
        sizes: `layer.sizes`, or a layer.
        ranks: how many.
        tokens: N, the length of the whole sequence, cut as `torch.tensor_split` cuts it.
        mask: what is seen, such as `Causal()`.
        batch: B.
        dtype: of q, k and v.
        backward: whether a backward pass follows.
        bandwidth: bytes per second that a rank sends, and receives.
        latency: seconds that a message takes besides.
        flops: floating-point operations per second of one rank.

    >>> layer = mh.MultiHeadAttention(512, heads=8)
    >>> found = plan(layer.sizes, 4, tokens=65536, mask=mh.Causal())
    >>> found.best
    'ring'
    >>> found.costs["ring"].memory < found.costs["gather"].memory < found.one_process.memory
    True
    """
    sizes = sizes if isinstance(sizes, Sizes) else sizes.sizes
    require_int("ranks", ranks, 1)
    require_int("tokens", tokens, 0)
    for name, value in (("bandwidth", bandwidth), ("flops", flops)):
        if not value > 0:
            raise ValueError(f"{name}={value}: expected more than 0")
    setting = _Setting(sizes, batch, dtype.itemsize, bandwidth, latency, flops, backward)
    lengths = even(tokens, ranks)
    visible = lower(mask, Frame.of(tokens, tokens), batch, sizes.H)
    balanced, plain = (schedules.make(visible, lengths, lengths, balance) for balance in (True, False))
    pairs = sum(plain.shares)
    alone = setting.compute(pairs, sizes.H)
    memory = tokens * batch * (sizes.H + sizes.G) * (sizes.D + sizes.V) * dtype.itemsize
    words = f"N={tokens:,} on {ranks} ranks, {'forward and backward' if backward else 'forward'}, {dtype}"
    return Plan(
        {
            "ring": _ring(setting, balanced),
            "ulysses": _ulysses(setting, lengths, pairs),
            "gather": _gather(setting, plain),
        },
        Cost("one alone", alone, (0,), memory, alone, 0.0),
        words,
    )


def _ring(s: _Setting, made: schedules.Schedule) -> Cost:
    W, H, D, V = made.ranks, s.sizes.H, s.sizes.D, s.sizes.V
    keys, reach = torch.tensor(made.keys), torch.tensor(made.reach_of)
    low, high = torch.maximum(reach[:, None, 0], keys[None, :, 0]), torch.minimum(reach[:, None, 1], keys[None, :, 1])
    needed = (high - low).clamp(min=0)  # (rank, source)
    away = needed.clone().fill_diagonal_(0)
    moved_out, moved_in = [0] * W, [0] * W  # queries of a rank that another computes, and of others that it computes
    for chunk in made.chunks:
        if chunk.at != chunk.owner:
            moved_out[chunk.owner] += chunk.queries[1] - chunk.queries[0]
            moved_in[chunk.at] += chunk.queries[1] - chunk.queries[0]
    passes = 1 + s.backward
    sent = []
    for rank in range(W):
        count = (W - 1) * HEADER_BYTES + passes * int(away[:, rank].sum()) * s.kv * s.bytes
        count += s.B * H * (moved_out[rank] * D + moved_in[rank] * V) * s.bytes
        if s.backward:
            count += int(away[rank].sum()) * s.kv * s.wide
            count += s.B * H * (moved_out[rank] * V + moved_in[rank] * D) * s.bytes
        sent.append(count)
    loads = torch.tensor([made.load(rank) for rank in range(W)], dtype=torch.float64)
    per_key = loads / needed.sum(1).clamp(min=1)
    work = s.compute(1, H, again=True) * needed * per_key[:, None]  # seconds, (rank, source)
    bytes_each = passes * s.kv * s.bytes + (s.kv * s.wide if s.backward else 0)
    carried = away * bytes_each / s.bandwidth + (away > 0) * s.latency * (passes + s.backward)
    sources = (torch.arange(W)[:, None] - torch.arange(W)) % W  # the order in which blocks come
    work, carried = work.gather(1, sources), carried.gather(1, sources)
    steps = torch.maximum(work[:, :-1], carried[:, 1:]).sum(1) + work[:, -1]  # the next comes while this is computed
    shifted = max(
        (s.carry(2 * s.B * H * n * (D + V) * s.bytes * passes / 2, 2 * passes) for n in moved_out if n), default=0
    )
    longest = max(last - first for first, last in made.queries)
    block = int(away.max()) if W > 1 else 0
    own = s.B * (H + s.sizes.G) * (D + V) * longest * s.bytes
    travelling = 2 * block * s.kv * s.bytes  # two halves that come, two that go
    merging = s.B * H * longest * s.wide * (V * (2 if s.wide > s.bytes else 1) + 8)  # 8: tops, totals, shares
    memory = own + travelling + merging + s.B * H * max(moved_in) * D * s.bytes
    headers = s.carry((W - 1) * HEADER_BYTES, min(W - 1, 1))
    return Cost(
        "ring", float(steps.max()) + shifted + headers, tuple(sent), memory, float(work.sum(1).max()),
        float(carried.sum(1).max()) + shifted,
    )  # fmt: skip


def _ulysses(s: _Setting, lengths: list[int], pairs: float) -> Cost:
    W, D, V = len(lengths), s.sizes.D, s.sizes.V
    try:
        queries, keys = ([last - first for first, last in part] for part in split_heads(s.sizes.H, s.sizes.G, W))
    except ValueError as error:
        return Cost("ulysses", float("inf"), (0,), 0, 0.0, 0.0, str(error))
    sent, total = [], sum(lengths)
    for rank, n in enumerate(lengths):
        others, rest = [p for p in range(W) if p != rank], total - n
        out = sum(queries[p] * D + keys[p] * (D + V) for p in others) * n + queries[rank] * V * rest
        if s.backward:
            out += sum(queries[p] * V for p in others) * n + (queries[rank] * D + keys[rank] * (D + V)) * rest
        sent.append((W - 1) * HEADER_BYTES + s.B * out * s.bytes)
    most, kv = max(queries), max(keys)
    compute = s.compute(pairs, most)
    transfer = s.carry(max(sent), (4 + 4 * s.backward) * (W > 1))
    whole = total * (most + kv) * (D + V) + max(lengths) * (s.sizes.H + s.sizes.G) * (D + V)
    back = max(lengths) * s.sizes.H * V  # the output as it comes back, and as it is added up where that is wider
    memory = s.B * ((whole + back * (W - 1) / W) * s.bytes + (back * s.wide if s.wide > s.bytes else 0))
    return Cost("ulysses", compute + transfer, tuple(sent), int(memory), compute, transfer)


def _gather(s: _Setting, made: schedules.Schedule) -> Cost:
    W = made.ranks
    lengths = [last - first for first, last in made.keys]
    total, sent = sum(lengths), []
    for n in lengths:
        count = (W - 1) * n * s.kv * s.bytes + (W - 1) * HEADER_BYTES
        sent.append(count + ((total - n) * s.kv * s.bytes if s.backward else 0))
    compute = s.compute(max(made.load(rank) for rank in range(W)), s.sizes.H)
    transfer = s.carry(max(sent), (2 + 2 * s.backward) * (W > 1))
    own = s.B * max(lengths) * (s.sizes.H + s.sizes.G) * (s.sizes.D + s.sizes.V)
    return Cost("gather", compute + transfer, tuple(sent), (own + total * s.kv) * s.bytes, compute, transfer)

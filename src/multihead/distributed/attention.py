"""Attention over slices of a sequence: the ranks agree, the mask is lowered for the whole, a method runs."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from multihead.distributed import schedule
from multihead.distributed.agree import Agreed, agree, fingerprint
from multihead.distributed.gather import gather_attention
from multihead.distributed.partial import Call, check_bias
from multihead.distributed.ring import Ring, RingAttention
from multihead.distributed.schedule import Schedule, slices
from multihead.distributed.ulysses import ulysses_attention
from multihead.distributed.wire import Wire
from multihead.masks import Mask, as_mask, lower
from multihead.masks.intervals import Frame, Visible
from multihead.sizes import check_attend, check_numbers

METHODS = ("ring", "ulysses", "gather")
REMEMBERED = 64  # masks and lengths whose schedule is kept


@dataclass
class Sharding:
    """The ranks that a sequence is cut over, and how they attend to it."""

    wire: Wire
    method: str = "ring"
    balance: bool = True
    schedules: OrderedDict[tuple, tuple[Visible, Schedule]] = field(default_factory=OrderedDict)

    @staticmethod
    def of(mesh: DeviceMesh | dist.ProcessGroup, method: str, balance: bool = True) -> "Sharding":
        if method not in METHODS:
            raise ValueError(f"method={method!r}: expected one of {', '.join(METHODS)}")
        return Sharding(Wire(mesh), method, balance)

    def lowered(
        self, mask: Mask | Visible | None, agreed: Agreed, B: int, H: int, device: torch.device, balance: bool
    ) -> tuple[Visible, Schedule]:
        """What the mask lets be seen in the whole sequence, and the schedule for it: worked out once for each shape."""
        key = (fingerprint(mask), agreed.queries, agreed.keys, B, H, device, balance)
        if key not in self.schedules:
            Q, K = sum(agreed.queries), sum(agreed.keys)
            visible = mask if isinstance(mask, Visible) else lower(mask, Frame.of(Q, K, device), B, H)
            self.schedules[key] = visible, schedule.make(visible, agreed.queries, agreed.keys, balance)
            while len(self.schedules) > REMEMBERED:
                self.schedules.popitem(last=False)
        return self.schedules[key]


def draw_seed(dropout: float) -> int:
    """A seed from torch's generator, as `attend` draws it; none is drawn where nothing is dropped."""
    return int(torch.randint(2**63 - 1, ())) if dropout else 0


def attend_slices(
    sharding: Sharding, agreed: Agreed, q: Tensor, k: Tensor, v: Tensor, mask: Mask | Visible | None, *,
    scale: float | None, softcap: float | None, sinks: Tensor | None, bias: Tensor | None, dropout: float,
    backend: str | None, first_head: int = 0,
) -> Tensor:  # fmt: skip
    """Out (B,H,n,V) for slices q (B,H,n,D), k (B,G,m,D) and v (B,G,m,V) whose lengths are agreed on."""
    check_numbers(scale, softcap, dropout, q.dtype)  # of a layer, whose dtype may have changed since it was made
    wire, (B, H, _, _) = sharding.wire, q.shape
    mine, Q, K = slices(agreed.queries)[wire.rank], sum(agreed.queries), sum(agreed.keys)
    local_rows = check_bias(bias, B, H, mine, Q, K)
    may_move = sharding.balance and sharding.method == "ring" and (bias is None or bias.dim() < 2 or local_rows is None)
    visible, made = sharding.lowered(mask, agreed, B, H, q.device, may_move)
    call = Call(visible, scale, softcap, dropout, agreed.seed, backend, first_head, local_rows)
    if sharding.method == "ring":
        return RingAttention.apply(q, k, v, sinks, bias, Ring(wire, made, call))
    run = ulysses_attention if sharding.method == "ulysses" else gather_attention
    return run(call, wire, agreed, q, k, v, sinks, bias)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None = None, *, mesh: DeviceMesh | dist.ProcessGroup,
    method: str = "ring", scale: float | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    bias: Tensor | None = None, dropout: float = 0.0, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """`mh.attend` over slices of a sequence, one on each rank; every rank has to call it.

    Args:
        q: this rank's slice of the queries, (B,H,n,D); all slices in the order of the ranks are the sequence.
        k: this rank's slice of the keys, (B,G,m,D).
        v: this rank's slice of the values, (B,G,m,V).
        mask: what may be seen, in positions of the whole sequence: `Causal()`, `Padding(lengths)`, a bool (Q,K).
        mesh: a `DeviceMesh` of one dimension, or a process group.
        method: "ring", "ulysses" or "gather".
        scale: as in `mh.attend`; `softcap`, `sinks`, `dropout` and `backend` too.
        softcap: see `scale`.
        sinks: see `scale`.
        bias: for the whole sequence, or with rows for this rank's queries and columns for all keys.
        dropout: see `scale`.
        backend: see `scale`.

    Returns:
        out (B,H,n,V), this rank's slice. The gradients of `sinks` and `bias` are this rank's share: their sum over the
        ranks is that of one process.

    >>> q, k, v = (t.tensor_split(ranks, 2)[rank] for t in (q, k, v))  # doctest: +SKIP
    >>> out = mh.distributed.attend(q, k, v, mh.Causal(), mesh=dist.group.WORLD)  # doctest: +SKIP
    """
    check_attend(q, k, v)
    check_numbers(scale, softcap, dropout, q.dtype)
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(
            f"sinks has shape {tuple(sinks.shape)}: expected one logit for each of the H={q.shape[1]} heads"
        )
    sharding, seen = Sharding.of(mesh, method), as_mask(mask)
    (B, H, n, D), (_, G, m, _), V = q.shape, k.shape, v.shape[3]
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "dropout": dropout}
    given = [t for t in (q, k, v, sinks, bias) if t is not None]
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    same = {"mask": seen, "options": (options, sinks is None, bias is None), "gradient": grad}
    sizes = {"B": B, "H": H, "G": G, "D": D, "V": V}
    seed = draw_seed(dropout)
    agreed = agree(sharding.wire, method, n, m, sizes, same, dtype=q.dtype, device=q.device, seed=seed)
    return attend_slices(sharding, agreed, q, k, v, seen, sinks=sinks, bias=bias, backend=backend, **options)

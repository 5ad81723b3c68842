"""Gathering: every rank gets all keys and values, and attends to them with its own queries.

The simplest method, with the fewest messages. Memory for keys and values is that of the whole sequence on every rank.
"""

from torch import Tensor

from multihead.distributed.exchange import ToHeads
from multihead.distributed.partial import Call, cut_bias
from multihead.distributed.schedule import slices
from multihead.distributed.ulysses import attend_all
from multihead.distributed.wire import Wire


def gather_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: Tensor | None, wire: Wire, call: Call,
    queries: tuple[int, ...], keys: tuple[int, ...],
) -> Tensor:  # fmt: skip
    """Out (B,H,n,V) of this rank's slice."""
    mine, parts = slices(queries)[wire.rank], slices(keys)
    everything = ((0, k.shape[1]),) * wire.size
    k_all, v_all = (ToHeads.apply(t, wire, parts, everything) for t in (k, v))  # (B, G, K, ·)
    my_bias = cut_bias(call, bias, mine, (0, sum(keys)))
    return attend_all(call, q, k_all, v_all, sinks, my_bias, mine)

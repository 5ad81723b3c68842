"""Gathering: every rank gets all keys and values, and attends to them with its own queries.

The simplest method, with the fewest messages. Memory for keys and values is that of the whole sequence on every rank.
"""

from torch import Tensor

from multihead.distributed.agree import Agreed
from multihead.distributed.exchange import ToHeads
from multihead.distributed.partial import Call, cut_bias
from multihead.distributed.schedule import slices
from multihead.distributed.ulysses import attend_all
from multihead.distributed.wire import Wire


def gather_attention(
    call: Call, wire: Wire, agreed: Agreed, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Out (B,H,n,V) of this rank's slice."""
    mine, parts = slices(agreed.queries)[wire.rank], slices(agreed.keys)
    everything = ((0, k.shape[1]),) * wire.size
    k_all, v_all = (ToHeads.apply(t, wire, parts, everything) for t in (k, v))  # (B, G, K, ·)
    my_bias = cut_bias(call, bias, mine, (0, sum(agreed.keys)))
    return attend_all(call, q, k_all, v_all, sinks, my_bias, mine)

"""Ulysses: all heads of a slice become some heads of the whole sequence, attention runs as in one process, and back.

Jacobs et al. 2023 (arXiv:2309.14509). Key/value heads fewer than ranks go to every rank that reads them.
"""

from torch import Tensor

from multihead.attention import attend
from multihead.distributed.agree import Agreed
from multihead.distributed.blocks import cut, cut_scores, narrow
from multihead.distributed.exchange import ToHeads, ToSlices
from multihead.distributed.partial import Call, at_head, attend_part
from multihead.distributed.schedule import slices
from multihead.distributed.split import split_heads
from multihead.distributed.wire import Wire


def ulysses_attention(
    call: Call, wire: Wire, agreed: Agreed, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Out (B,H,n,V) of this rank's slice."""
    if call.local_rows is not None:
        raise ValueError(
            f"bias has rows for this rank's queries only, and method='ulysses' attends to all of them for some heads: "
            f"expected a bias with rows for all Q={sum(agreed.queries)} queries, or method='ring' or 'gather'"
        )
    query_heads, kv_heads = split_heads(q.shape[1], k.shape[1], wire.size)
    query_parts, key_parts = slices(agreed.queries), slices(agreed.keys)
    mine = query_heads[wire.rank]
    q_all = ToHeads.apply(q, wire, query_parts, query_heads)  # (B, h, Q, D)
    k_all, v_all = (ToHeads.apply(t, wire, key_parts, kv_heads) for t in (k, v))  # (B, g, K, ·)
    Q, K = q_all.shape[2], k_all.shape[2]
    visible = cut(call.visible, (0, Q), (0, K), mine)
    my_bias = cut_scores(bias, None, None, mine)
    my_sinks = None if sinks is None else narrow(sinks, -1, mine) if sinks.numel() > 1 else sinks
    out = attend_all(at_head(call, mine[0], visible), q_all, k_all, v_all, my_sinks, my_bias, (0, Q))
    return ToSlices.apply(out, wire, query_parts, query_heads)


def attend_all(
    call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: Tensor | None, queries: tuple[int, int]
) -> Tensor:
    """Attention of a run of queries over all keys, as in one process; `call.visible` is the whole's."""
    K = k.shape[2]
    if call.dropout:
        out, lse = attend_part(call, q, k, v, bias, queries, (0, K))
        if sinks is None:
            return out
        both = lse.logaddexp(sinks.to(lse.dtype)[:, None].expand_as(lse))  # never −inf: a sink is always seen
        return (out.to(lse.dtype) * (lse - both).exp()[..., None]).to(out.dtype)
    visible = cut(call.visible, queries, (0, K))
    return attend(  # type: ignore[return-value]
        q, k, v, visible, scale=call.scale, softcap=call.softcap, sinks=sinks, bias=bias, backend=call.backend
    )

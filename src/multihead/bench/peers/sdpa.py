"""torch's `scaled_dot_product_attention`, asked each case's question in the way that is fastest for it.

Whatever can be made beforehand (a dense mask, a padded batch) is made beforehand and not counted.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from multihead.bench.cases import FLEX, GROUPED, PER_DOCUMENT, SDPA
from multihead.bench.measure import Local
from multihead.bench.ours import flat


def plain(case, q, k, v):
    """One call for everything: `is_causal` where torch means by it what the case means, a dense mask elsewhere."""
    if case.mask.documents:
        return padded(case, q, k, v)
    grouped = case.G < case.H
    if not case.mask.causal:
        return Local(SDPA, lambda: sdpa(q, k, v, enable_gqa=grouped))
    if case.Q == case.K and case.mask.window is None:
        return Local(SDPA, lambda: sdpa(q, k, v, is_causal=True, enable_gqa=grouped))
    bias = dense(case)
    return Local(SDPA, lambda: sdpa(q, k, v, attn_mask=bias, enable_gqa=grouped), "dense mask")


def dense(case):
    """(Q,K) in the case's dtype: a bool mask would be turned into this in every call."""
    start, stop = case.mask.intervals(case.Q, case.K)
    keys = torch.arange(case.K)
    hidden = (keys < start[:, None]) | (keys >= stop[:, None])
    return torch.zeros(case.Q, case.K, dtype=case.type).masked_fill(hidden, -torch.inf)


def padded(case, q, k, v):
    """Documents as rows of a batch as long as the longest."""
    lengths = case.mask.documents
    longest = max(lengths)
    q, k, v = (
        torch.cat([torch.nn.functional.pad(part, (0, 0, 0, longest - part.shape[2])) for part in t.split(lengths, 2)])
        for t in (q, k, v)
    )  # (documents, H, longest, D)

    def unpack(out):
        return torch.cat([row[None, :, :length] for row, length in zip(out, lengths)], dim=2)

    detail = f"padded to {longest}"
    if case.mask.causal:  # padding lies behind every real query, so nothing else needs hiding
        return Local(SDPA, lambda: sdpa(q, k, v, is_causal=True), detail, unpack)
    hidden = torch.arange(longest) >= torch.tensor(lengths)[:, None]
    bias = torch.zeros(hidden.shape, dtype=case.type).masked_fill(hidden, -torch.inf)[:, None, None]
    return Local(SDPA, lambda: sdpa(q, k, v, attn_mask=bias), detail, unpack)


def per_document(case, q, k, v):
    """What someone does who minds the padding; the outputs stay apart, so nothing is copied."""
    parts = list(zip(*(t.split(case.mask.documents, 2) for t in (q, k, v))))
    causal = case.mask.causal

    def run():
        return [sdpa(*part, is_causal=causal) for part in parts]

    return Local(PER_DOCUMENT, run, unpack=lambda outputs: torch.cat(outputs, dim=2))


def training(case, q, k, v, d_out):
    causal, grouped = case.mask.causal, case.G < case.H

    def run():
        return torch.autograd.grad(sdpa(q, k, v, is_causal=causal, enable_gqa=grouped), (q, k, v), d_out)

    return Local(SDPA, run, unpack=flat, mode=torch.enable_grad)


def group_as_queries(case, q, k, v):
    """One query a head: the heads of a group can pose as queries of one head, so that keys are read once."""
    shape = (case.B, case.G, case.H // case.G, case.D)
    return Local(GROUPED, lambda: sdpa(q.view(shape), k, v).view(q.shape))


def flex(case, q, k, v):
    """FlexAttention, compiled for this case; its block mask is made beforehand."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    start, stop = case.mask.intervals(case.Q, case.K)
    blocks = create_block_mask(
        lambda b, h, query, key: (key >= start[query]) & (key < stop[query]), None, None, case.Q, case.K, device="cpu"
    )
    torch.compiler.reset()  # it stops compiling after a few sizes
    compiled = torch.compile(flex_attention, dynamic=False)
    return Local(FLEX, lambda: compiled(q, k, v, block_mask=blocks, enable_gqa=case.G < case.H), "compiled")


BUILDERS = {SDPA: plain, PER_DOCUMENT: per_document, GROUPED: group_as_queries, FLEX: flex}

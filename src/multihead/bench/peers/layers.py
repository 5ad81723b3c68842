"""Whole layers in torch: the one it ships, and the one an expert writes by hand."""

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from multihead.bench.cases import FUSED, NN
from multihead.bench.measure import Local


def packed(weights):
    """q, k and v as one projection: (3E, E) and (3E,)."""
    return tuple(torch.cat([weights[f"{part}_{n}"] for n in "qkv"]) for part in "wb")


def shipped(case, x, weights):
    """`nn.MultiheadAttention` as its documentation advises: evaluation, no weights asked for, causal said twice."""
    module = torch.nn.MultiheadAttention(case.E, case.H, batch_first=True).eval().to(x.dtype)
    with torch.no_grad():
        for target, value in zip((module.in_proj_weight, module.in_proj_bias), packed(weights)):
            target.copy_(value)
        module.out_proj.weight.copy_(weights["w_o"])
        module.out_proj.bias.copy_(weights["b_o"])
    causal = case.mask.causal
    mask = torch.nn.Transformer.generate_square_subsequent_mask(case.N, dtype=x.dtype) if causal else None
    return Local(NN, lambda: module(x, x, x, need_weights=False, attn_mask=mask, is_causal=causal)[0])


def by_hand(case, x, weights):
    """One product for q, k and v, torch's fused attention, one product out."""
    w_qkv, b_qkv = packed(weights)
    w_o, b_o = weights["w_o"], weights["b_o"]
    (B, N, E), H, causal = x.shape, case.H, case.mask.causal

    def run():
        q, k, v = linear(x, w_qkv, b_qkv).view(B, N, 3, H, E // H).permute(2, 0, 3, 1, 4).unbind()
        heads = scaled_dot_product_attention(q, k, v, is_causal=causal)  # (B, H, N, D)
        return linear(heads.transpose(1, 2).reshape(B, N, E), w_o, b_o)

    return Local(FUSED, run)


BUILDERS = {NN: shipped, FUSED: by_hand}

"""Step 7 in numbers: what each head writes to the output, and why the heads are multiplied by W_o at all."""

from typing import Any

import torch
from torch import Tensor

from multihead.cache import Cache
from multihead.layer import MultiHeadAttention
from multihead.layer.edit import tapped


def contributions(layer: MultiHeadAttention, x: Tensor, *args: Any, **call: Any) -> Tensor:
    """The length of what each head adds to each output row, ‖head·W_o‖: (B,N,H), without B where x has none.

    The output is the sum over heads of what they write, and the bias of W_o. Divided by its sum over heads, this is
    each head's share of a row. A cache stays as it was.

    Kobayashi et al. 2020, "Attention is Not Only a Weight: Analyzing Transformers with Vector Norms".

    Args:
        layer: the layer.
        x: as the layer takes it, and further arguments too.
        args: `context` and `mask`.
        call: what else the layer takes: `positions=`, `cache=`, …

    >>> layer, x = mh.MultiHeadAttention(32, heads=4), torch.randn(5, 32)
    >>> written = heads.contributions(layer, x)
    >>> share = written / written.sum(-1, keepdim=True)
    >>> share.shape, torch.allclose(share.sum(-1), torch.ones(5))
    (torch.Size([5, 4]), True)
    """
    seen: dict[str, Tensor] = {}

    def keep(name: str, t: Tensor) -> Tensor:
        if name == "heads":
            seen[name] = t
        return t

    if isinstance(call.get("cache"), Cache):
        call["cache"] = call["cache"].fork()
    with tapped(layer, keep), torch.no_grad():
        layer(x, *args, **call)
        # ‖h·W‖² = h·(W·Wᵀ)·h: the written rows, H times as large as the output, are never made.
        w = layer.w_o.double()  # (H, V, E)
        heads = seen["heads"].double()  # (B, H, N, V)
        squares = torch.einsum("bhnv,hvu,bhnu->bnh", heads, torch.einsum("hve,hue->hvu", w, w), heads)
    written = squares.clamp(min=0).sqrt().to(x.dtype)
    return written if x.dim() == 3 else written[0]


def mixing(layer: MultiHeadAttention) -> Tensor:
    """How much each head writes to each group of outputs, by W_o alone: (H, H), rows are heads, columns groups.

    Group g is the g-th of H equal parts of the E outputs: the part that would be head g's own if the heads were only
    laid side by side. An entry is the norm of that block of W_o over that of all of W_o, so that squares add up to 1.
    Without W_o this would be the identity over √H, and nothing a head learnt would reach another's outputs.

    Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits": heads are independent and add up.

    >>> layer = mh.MultiHeadAttention(1024, heads=8)
    >>> mixed = heads.mixing(layer)
    >>> mixed.shape, mixed.square().sum().round(decimals=4)
    (torch.Size([8, 8]), tensor(1.))
    """
    with torch.no_grad():
        w = layer.w_o.double()  # (H, V, E)
        H = w.shape[0]
        blocks = torch.stack([part.square().sum(dim=(1, 2)) for part in w.tensor_split(H, dim=2)], dim=1)  # (H, H)
        total = blocks.sum().clamp(min=torch.finfo(w.dtype).tiny)
        return (blocks / total).sqrt().to(layer.w_o.dtype)

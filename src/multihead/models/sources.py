"""What the vectors of a model are sums of: the embedding, each earlier layer's heads and MLP, and biases."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from multihead.layer.trace import trace
from multihead.masks import Mask

if TYPE_CHECKING:
    from multihead.models.blocks import Stack


@torch.no_grad()
def parts_before_each_layer(
    model: "Stack", items: Tensor, mask: Mask | Tensor | None
) -> list[tuple[Tensor, list[str]]]:
    """For each layer, what is added up before it, (S, B, N, E), and the names; the output's biases are named "bias"."""
    x = model.embed(items)
    parts, names, found = [x], ["embedding"], []
    for number, block in enumerate(model.layers):
        found.append((torch.stack(parts), list(names)))
        attention = block.attention
        steps = trace(attention, block.attention_norm(x), mask=mask)
        heads = steps["heads"]  # (B, H, N, V)
        heads = heads[None] if heads.dim() == 3 else heads
        each = torch.einsum("bhnv,hve->hbne", heads, attention.w_o)
        parts += list(each)
        names += [f"layer {number} head {h}" for h in range(len(each))]
        if attention.o_proj.bias is not None:
            parts.append(attention.o_proj.bias.expand_as(x))
            names.append(f"layer {number} output bias")
        x = x + attention(block.attention_norm(x), mask=mask)
        mlp = block.mlp(block.mlp_norm(x))
        parts.append(mlp)
        names.append(f"layer {number} MLP")
        x = x + mlp
    return found

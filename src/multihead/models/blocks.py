"""What the two models share: the pre-norm block, and a stack of them that can be looked into."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from multihead.cache import Cache
from multihead.layer import MultiHeadAttention
from multihead.lens import Lens
from multihead.masks import Mask
from multihead.positions import RoPE
from multihead.sizes import require_int
from multihead.trace import Trace, trace


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): Xiong et al. 2020, "On Layer Normalization", figure 1b."""

    def __init__(self, width: int, heads: int, rope: bool | RoPE = False) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = MultiHeadAttention(width, heads, rope=rope)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Mask | None = None, cache: Cache | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask=mask, cache=cache)  # (B, N, E)
        return x + self.mlp(self.mlp_norm(x))


class Stack(nn.Module):
    """Blocks one after another. A model says how its items become vectors, `embed`, and what they may see, `mask`."""

    mask: Mask | None = None

    def __init__(self, width: int, heads: int, layers: int, rope: bool | RoPE = False) -> None:
        super().__init__()
        require_int("layers", layers, 1)
        self.blocks = nn.ModuleList(Block(width, heads, rope) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    @property
    def layers(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def embed(self, items: Tensor) -> Tensor:
        """The items as vectors: (B, N, E)."""
        raise NotImplementedError

    def contextualise(self, items: Tensor, caches: Sequence[Cache] | None = None) -> Tensor:
        """Each item as a vector that knows those it may see: (B, N, E)."""
        x = self.embed(items)
        for n, block in enumerate(self.layers):
            x = block(x, self.mask, None if caches is None else caches[n])
        return self.norm(x)

    def _into_attention(self, items: Tensor) -> Iterator[tuple[MultiHeadAttention, Tensor]]:
        """Each attention layer with what goes into it."""
        x = self.embed(items)
        for block in self.layers:
            yield block.attention, block.attention_norm(x)
            x = block(x, self.mask)

    @torch.no_grad()
    def look(self, items: Tensor) -> list[Lens]:
        """A lens on the weights of each layer, the first layer first."""
        return [attention.look(x, mask=self.mask) for attention, x in self._into_attention(items)]

    @torch.no_grad()
    def trace(self, items: Tensor, layer: int = 0, labels: Sequence[str] | None = None) -> Trace:
        """The seven steps of one layer; a negative number counts from the last."""
        count = len(self.blocks)
        if not -count <= require_int("layer", layer, -count) < count:
            raise ValueError(f"layer={layer}: the model has layers 0…{count - 1}")
        attention, x = list(self._into_attention(items))[layer]
        return trace(attention, x[0] if x.shape[0] == 1 else x, mask=self.mask, labels=labels)

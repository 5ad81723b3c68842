"""What the two models share: the pre-norm block, and a stack of them that can be looked into."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from multihead.cache import Cache
from multihead.layer import MultiHeadAttention
from multihead.layer.trace import Trace, trace
from multihead.lens import Lens
from multihead.lens.why import in_terms_of
from multihead.masks import Mask
from multihead.models.sources import parts_before_each_layer
from multihead.positions import RoPE
from multihead.sizes import require_int

Given = Mask | Tensor | None | Literal["own"]  # what a call may put in the place of a model's own mask


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): Xiong et al. 2020, "On Layer Normalization", figure 1b."""

    def __init__(self, width: int, heads: int, rope: bool | RoPE = False) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = MultiHeadAttention(width, heads, rope=rope)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Mask | Tensor | None = None, cache: Cache | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask=mask, cache=cache)  # (B, N, E)
        return x + self.mlp(self.mlp_norm(x))


def _nth(make: Callable[[], Sequence[Any]], n: int) -> Any:
    return make()[n]


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

    def contextualise(self, items: Tensor, caches: Sequence[Cache] | None = None, mask: Given = "own") -> Tensor:
        """Each item as a vector that knows those it may see: (B, N, E). `mask`: instead of the model's own."""
        x = self.embed(items)
        for n, block in enumerate(self.layers):
            x = block(x, self._mask(mask), None if caches is None else caches[n])
        return self.norm(x)

    def _mask(self, given: Given) -> Mask | Tensor | None:
        return self.mask if isinstance(given, str) else given

    def _into_attention(
        self, items: Tensor, mask: Mask | Tensor | None, caches: Sequence[Cache] | None = None
    ) -> Iterator[tuple[MultiHeadAttention, Tensor, Cache | None]]:
        """Each attention layer with what goes into it, and its cache as it is before that."""
        x = self.embed(items)
        for n, block in enumerate(self.layers):
            cache = None if caches is None else caches[n]
            yield block.attention, block.attention_norm(x), None if cache is None else cache.fork()
            x = block(x, mask, cache)

    @torch.no_grad()
    def look(self, items: Tensor, mask: Given = "own") -> list[Lens]:
        """A lens on the weights of each layer, the first layer first; its `why` knows every source of a score.

        `mask`: in every layer, instead of its own.
        """
        seen = self._mask(mask)
        lenses = [attention.look(x, mask=seen) for attention, x, _ in self._into_attention(items, seen)]
        parts = cache(partial(parts_before_each_layer, self, items, seen))  # only if somebody asks why
        for n, (lens, block) in enumerate(zip(lenses, self.layers)):
            if lens.origin is not None and lens.origin.sources is not None:
                lens.origin = in_terms_of(block.attention, block.attention_norm, partial(_nth, parts, n))
        return lenses

    @torch.no_grad()
    def trace(
        self,
        items: Tensor,
        layer: int = 0,
        labels: Sequence[str] | None = None,
        *,
        mask: Given = "own",
        caches: Sequence[Cache] | None = None,
    ) -> Trace:
        """The seven steps of one layer; a negative number counts from the last.

        Args:
            items: what goes into the model.
            layer: which.
            labels: a name for each item.
            mask: what each item may see, in every layer; the model's own unless given.
            caches: one for each layer, of what came before; those below the layer take in the items.
        """
        count = len(self.blocks)
        if not -count <= require_int("layer", layer, -count) < count:
            raise ValueError(f"layer={layer}: the model has layers 0…{count - 1}")
        seen = self._mask(mask)
        into = self._into_attention(items, seen, caches)
        attention, x, cache = next(islice(into, layer % count, None))
        one = x[0] if x.shape[0] == 1 and cache is None else x
        return trace(attention, one, mask=seen, labels=labels, cache=cache)

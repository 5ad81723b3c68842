"""One call of the layer: what it was given, and what those who watch it do to what a fused kernel never holds."""

from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from multihead.cache import Cache, ContextCache
from multihead.call import Reason
from multihead.masks import Mask

INSIDE = ("scores", "masked", "weights")  # what a fused kernel never holds


class Inside(Enum):
    """What a tap does to scores, masked and weights."""

    NOTHING = 0
    WATCH = 1  # they are made beside the kernel; changes do nothing
    CHANGE = 2  # they are made in its place


@dataclass
class LayerCall:
    """What one call of the layer was given; see `MultiHeadAttention.forward`."""

    x: Tensor
    context: Tensor | None
    mask: Mask | Tensor | None
    positions: Tensor | None
    context_positions: Tensor | None
    cache: Cache | ContextCache | None
    lengths: Tensor | list[int] | None
    bias: Tensor | None
    values: Tensor | None = None
    backend: str | None = None
    watched: Reason | None = None  # why the projections may not be bypassed

"""`f(q, k, v)`: a function of the heads, steps 3 and 4 alone, with the other five of a layer around it."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from multihead import steps
from multihead.doctor.candidate import MASK_NAMES, tensors
from multihead.doctor.parameters import role
from multihead.layer import MultiHeadAttention
from multihead.layer.trace import trace


def names_heads(function: Callable[..., Any]) -> bool:
    """Whether a function's first needed arguments are named for q, k and v."""
    if isinstance(function, nn.Module):
        return False
    try:
        named = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    needed = [name for name, p in named.items() if p.default is p.empty]
    return [role(name) for name in needed[:3]] == ["q", "k", "v"]


def takes_heads(function: Callable[..., Any], layer: MultiHeadAttention, dtype: torch.dtype) -> bool:
    """Whether it is a function of heads: named so, and it makes (B,H,Q,V) of them rather than refuse four axes."""
    if not names_heads(function):
        return False
    s = layer.sizes
    q, v = (torch.linspace(-1, 1, 3 * s.H * d, dtype=torch.float64).view(1, s.H, 3, d).to(dtype) for d in (s.D, s.V))
    try:
        with torch.no_grad():
            return tensors(function(q, q.clone(), v))[0].shape == v.shape
    except Exception:
        return False


def surrounded(
    function: Callable[..., Any], reference: MultiHeadAttention | None, x: Tensor, heads: int | None, options: dict
) -> Callable[..., Any]:
    """The function itself; one of heads with the other steps of the reference, or of a new layer, around it."""
    if not names_heads(function):
        return function
    made = {name: value for name, value in options.items() if name in ("kv_heads", "head_dim", "context_dim", "rope")}
    layer = reference or MultiHeadAttention(x.shape[-1], heads or 1, dtype=x.dtype, device=x.device, **made)
    return Core(function, layer) if takes_heads(function, layer, x.dtype) else function


class Core(nn.Module):
    """The function between a layer's own steps 1, 2 and 5, 6, 7; k and v are given to it as H heads."""

    def __init__(self, function: Callable[..., Any], layer: MultiHeadAttention) -> None:
        super().__init__()
        self.function, self.layer = function, layer
        masks = [name for name in MASK_NAMES if name in inspect.signature(function).parameters]
        self.mask_name = masks[0] if masks else None

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Any = None) -> Any:
        t = trace(self.layer, x, context)
        q, k, v = (steps.repeat_heads(t[name], self.layer.sizes.H) for name in ("q_heads", "k_heads", "v_heads"))
        options = {} if self.mask_name is None or mask is None else {self.mask_name: mask}
        found = tensors(self.function(q, k, v, **options))[0]
        return self.layer.o_proj(found.transpose(1, 2).flatten(2))

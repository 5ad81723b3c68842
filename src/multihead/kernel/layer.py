"""The whole layer in one native call on the CPU, where nobody would notice: see `project`."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from multihead import native, project
from multihead.backends.native import OWN, bound_of, dense_of
from multihead.masks import Mask, see
from multihead.project import noticed

if TYPE_CHECKING:
    from multihead.layer import MultiHeadAttention


def reach() -> str:
    """How far one native call goes here, in words."""
    if not hasattr(Tensor, "__dlpack_c_exchange_api__"):  # what `plain_layer` reads tensors by
        return f"step by step: one native call needs torch 2.10 or newer, and this is {torch.__version__}"
    return f"one native call, in inference, for {'any number of' if project.MANY else f'up to {project.ROWS}'} tokens"


def layer(
    of: "MultiHeadAttention", x: Tensor, context: Tensor | None, mask: Mask | Tensor | None, backend: str | None
) -> Tensor | None:
    """What the layer puts out for a call without cache, positions, lengths or bias; None where this is not for us.

    The kernel leaves nothing of the caches to Python, so each line here costs several times what it does in a loop by
    itself: tensors and projections are read in C++.
    """
    if _stands_between(of) or noticed(backend):
        return None
    assert native.module is not None
    s = of.sizes
    call = native.module.plain_layer(x, context, of._modules, (s.E, s.C, s.D, s.V))
    if call is None:
        return None
    B, H, Q, K = call.sizes  # at run time: a layer may be sharded by heads
    if not project.MANY and B * max(Q, K) > project.ROWS:
        return None
    sinks = of.sinks
    if sinks is not None and not (_plain(sinks) and sinks.shape == (H,)):
        return None
    if torch.is_grad_enabled() and (x.requires_grad or _trained(of) or (context is not None and context.requires_grad)):
        return None
    start = stop = allowed = None
    if mask is not None:
        visible = see(mask, Q, K, x.device, B, H)
        start, stop = bound_of(visible.start, (B, H, Q)), bound_of(visible.stop, (B, H, Q))
        allowed = dense_of(visible.dense, (B, H, Q, K))
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    call.run(
        y.data_ptr(),
        of.scale,
        torch.get_num_threads(),
        start,
        stop,
        allowed,
        0 if sinks is None else sinks.data_ptr(),
        of.softcap or 0.0,
    )
    return y


def _stands_between(of: "MultiHeadAttention") -> bool:
    """Whether something is done between the steps."""
    if of._taps or of.rope is not None or of._modules.get("q_norm") is not None:
        return True
    return bool(of.training and of.dropout)


def _plain(t: Tensor) -> bool:
    return type(t) in OWN and t.dtype is torch.float32 and t.is_cpu and t.is_contiguous()


def _trained(of: "MultiHeadAttention") -> bool:
    return any(p.requires_grad for p in of.parameters())

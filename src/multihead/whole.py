"""The whole layer in one native call on the CPU, where nobody would notice.

The kernel reads the four matrices as `nn.Linear` holds them, so nothing is packed, copied or stale. With few tokens the
time goes into reading them once; with many, the kernel's own products are faster than torch's where Intel did not make
the CPU, because those that torch calls are tuned for Intel's own. Whatever could see the difference (a gradient, a
hook, an adapter, a tracer) sends the call through the seven steps one by one, and so does whatever is wrong with it, so
that the error is found there.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.modules import module as hooks

from multihead import native
from multihead.attend import named
from multihead.backends.native import OWN, bound_of, dense_of, watched
from multihead.intervals import inside_torch_func
from multihead.masks import Mask, see

if TYPE_CHECKING:
    from multihead.layer import MultiHeadAttention

ROWS = 16  # up to so many tokens the kernel is faster on every CPU
MANY = native.module is not None and not native.module.cpu_is_intel()  # whether it is with more, too


def reach() -> str:
    """How far one native call goes here, in words."""
    if not hasattr(Tensor, "__dlpack_c_exchange_api__"):  # what `plain_layer` reads tensors by
        return f"step by step: one native call needs torch 2.10 or newer, and this is {torch.__version__}"
    return f"one native call, in inference, for {'any number of' if MANY else f'up to {ROWS}'} tokens"


def layer(
    of: "MultiHeadAttention", x: Tensor, context: Tensor | None, mask: Mask | Tensor | None, backend: str | None
) -> Tensor | None:
    """What the layer puts out for a call without cache, positions, lengths or bias; None where this is not for us.

    The kernel leaves nothing of the caches to Python, so each line here costs several times what it does in a loop by
    itself: tensors and projections are read in C++.
    """
    if _noticed(of, backend):
        return None
    assert native.module is not None
    s = of.sizes
    call = native.module.plain_layer(x, context, of._modules, (s.E, s.C, s.D, s.V))
    if call is None:
        return None
    B, H, Q, K = call.sizes  # at run time: a layer may be sharded by heads
    if not MANY and B * max(Q, K) > ROWS:
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


def _noticed(of: "MultiHeadAttention", backend: str | None) -> bool:
    """Whether something stands between the steps, or watches them."""
    if native.module is None or torch.compiler.is_compiling() or named(backend) not in (None, "native"):
        return True
    if of._taps or of.rope is not None or of._modules.get("q_norm") is not None or (of.training and of.dropout):
        return True
    if hooks._has_any_global_hook() or watched() or torch._C._len_torch_function_stack():
        return True
    return inside_torch_func() or torch.is_autocast_enabled("cpu")


def _plain(t: Tensor) -> bool:
    return type(t) in OWN and t.dtype is torch.float32 and t.is_cpu and t.is_contiguous()


def _trained(of: "MultiHeadAttention") -> bool:
    return any(p.requires_grad for p in of.parameters())

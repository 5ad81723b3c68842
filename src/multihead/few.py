"""The whole layer in one native call, for a few tokens on the CPU, where nobody would notice.

With few tokens the time goes into reading the four matrices once. The kernel reads them as `nn.Linear` holds them, so
nothing is packed, copied or stale. Whatever could see the difference (a gradient, a hook, an adapter, a tracer) sends
the call through the seven steps one by one, and so does whatever is wrong with it, for the error to be found there.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from multihead import native
from multihead.attend import named
from multihead.backends.native import OWN, bound_of, dense_of, watched
from multihead.intervals import inside_torch_func
from multihead.masks import Mask, see

if TYPE_CHECKING:
    from multihead.layer import MultiHeadAttention

ROWS = 16  # beyond so many tokens a matrix product that packs its input is faster


def layer(
    of: "MultiHeadAttention", x: Tensor, context: Tensor | None, mask: Mask | Tensor | None, backend: str | None
) -> Tensor | None:
    """What the layer puts out for a call without cache, positions, lengths or bias; None where this is not for us."""
    source = x if context is None else context
    if not _small(x) or (source is not x and not _small(source)) or _noticed(of, backend):
        return None
    children, s = of._modules, of.sizes  # __getattr__ of a module takes longer than all that follows
    held = [at for name in ("q_proj", "k_proj", "v_proj", "o_proj") if (at := _linear(children[name])) is not None]
    if len(held) < 4 or x.dim() != source.dim() or source.shape[-1] != s.C or x.shape[-1] != s.E:
        return None
    (q, (q_rows, E)), (k, (k_rows, C)), (v, (v_rows, v_C)), (o, (o_rows, o_columns)) = held
    H, G, sinks = q_rows // s.D, k_rows // s.D, of.sinks  # at run time: a layer may be sharded by heads
    if (
        not H
        or not G
        or H % G
        or (v_rows, o_columns, o_rows) != (G * s.V, H * s.V, s.E)
        or (E, C, v_C) != (s.E, s.C, s.C)
    ):
        return None
    if sinks is not None and (sinks.dtype != torch.float32 or sinks.shape != (H,)):
        return None
    if torch.is_grad_enabled() and (x.requires_grad or source.requires_grad or _trained(of)):
        return None
    x3, source3 = (x, source) if x.dim() == 3 else (x[None], source[None])
    (B, N, _), K = x3.shape, source3.shape[1]
    if not N or not K or source3.shape[0] != B:
        return None
    visible = see(mask, N, K, x.device, B, H)
    y = torch.empty(x.shape)
    assert native.module is not None
    native.module.layer(
        x3.data_ptr(),
        x3.shape,
        x3.stride(),
        source3.data_ptr(),
        source3.shape,
        source3.stride(),
        q,
        k,
        v,
        o,
        (H, G, s.D, s.V),
        y.data_ptr(),
        of.scale,
        torch.get_num_threads(),
        start=bound_of(visible.start, (B, H, N)),
        stop=bound_of(visible.stop, (B, H, N)),
        allowed=dense_of(visible.dense, (B, H, N, K)),
        sinks=0 if sinks is None else sinks.data_ptr(),
        softcap=of.softcap or 0.0,
    )
    return y


def _small(t: Tensor) -> bool:
    """A few rows of float32 on the CPU, each contiguous, in a tensor of torch's own."""
    if type(t) is not Tensor or t.dtype is not torch.float32 or not t.is_cpu or t.dim() not in (2, 3):
        return False
    return 0 < t.numel() <= ROWS * t.shape[-1] and t.stride(-1) == 1


def _noticed(of: "MultiHeadAttention", backend: str | None) -> bool:
    """Whether something stands between the steps, or watches them."""
    if native.module is None or torch.compiler.is_compiling() or named(backend) not in (None, "native"):
        return True
    if of._taps or of.rope is not None or of._modules.get("q_norm") is not None or (of.training and of.dropout):
        return True
    if hooks._has_any_global_hook() or watched() or torch._C._len_torch_function_stack():
        return True
    return inside_torch_func() or torch.is_autocast_enabled("cpu")


def _linear(p: nn.Module | None) -> tuple[tuple[int, int, int], torch.Size] | None:
    """Where a plain `nn.Linear` holds its weight and bias; None for anything that does more than multiply and add."""
    if type(p) is not nn.Linear or p._forward_hooks or p._forward_pre_hooks or p._backward_hooks:
        return None
    weight, bias = p._parameters.get("weight"), p._parameters.get("bias")
    if weight is None or not _plain(weight) or not (bias is None or _plain(bias)):
        return None
    if p._backward_pre_hooks or "forward" in p.__dict__ or "weight" in p.__dict__ or "bias" in p.__dict__:
        return None
    return (weight.data_ptr(), weight.stride(0), 0 if bias is None else bias.data_ptr()), weight.shape


def _plain(t: Tensor) -> bool:
    return type(t) in OWN and t.dtype is torch.float32 and t.is_cpu and t.stride(-1) == 1


def _trained(of: "MultiHeadAttention") -> bool:
    return any(p.requires_grad for p in of.parameters())

"""The whole layer in one native call on the CPU, where nobody would notice.

The kernel reads the four matrices as `nn.Linear` holds them, so nothing is packed, copied or stale. With few tokens the
time goes into reading them once; with many, the kernel's own products are faster than torch's where Intel did not make
the CPU, because those that torch calls are tuned for Intel's own. Whatever could see the difference (a gradient, a
hook, an adapter, a tracer) sends the call through the seven steps one by one, and so does whatever is wrong with it, so
that the error is found there.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

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

ROWS = 16  # up to so many tokens the kernel is faster on every CPU
MANY = native.module is not None and not native.module.cpu_is_intel()  # whether it is with more, too


def layer(
    of: "MultiHeadAttention", x: Tensor, context: Tensor | None, mask: Mask | Tensor | None, backend: str | None
) -> Tensor | None:
    """What the layer puts out for a call without cache, positions, lengths or bias; None where this is not for us.

    The kernel leaves nothing of the caches to Python, so each line here costs several times what it does in a loop by
    itself: what is looked up is looked up once.
    """
    source = x if context is None else context
    if not _fits(x) or (source is not x and not _fits(source)) or _noticed(of, backend):
        return None
    children, s = of._modules, of.sizes  # __getattr__ of a module takes longer than all that follows
    q, k = _linear(children["q_proj"]), _linear(children["k_proj"])
    v, o = _linear(children["v_proj"]), _linear(children["o_proj"])
    if q is None or k is None or v is None or o is None:
        return None
    H, G, D, V = q.rows // s.D, k.rows // s.D, s.D, s.V  # at run time: a layer may be sharded by heads
    if not H or not G or H % G or v.rows != G * V or o.columns != H * V or o.rows != s.E:
        return None
    if q.columns != s.E or k.columns != s.C or v.columns != s.C:
        return None
    shape: tuple[int, ...] = x.shape
    source_shape: tuple[int, ...] = source.shape
    strides = x.stride()
    if len(shape) != len(source_shape) or source_shape[-1] != s.C or shape[-1] != s.E:
        return None
    sinks = of.sinks
    if sinks is not None and (sinks.dtype != torch.float32 or sinks.shape != (H,)):
        return None
    if torch.is_grad_enabled() and (x.requires_grad or source.requires_grad or _trained(of)):
        return None
    source_strides = strides if source is x else source.stride()
    if len(shape) == 2:
        shape, source_shape = (1, *shape), (1, *source_shape)
        strides, source_strides = (0, *strides), (0, *source_strides)
    B, N, K = shape[0], shape[1], source_shape[1]
    if not N or not K or source_shape[0] != B:
        return None
    visible = see(mask, N, K, x.device, B, H)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    at = x.data_ptr()
    assert native.module is not None
    native.module.layer(
        at,
        shape,
        strides,
        at if source is x else source.data_ptr(),
        source_shape,
        source_strides,
        q.at,
        k.at,
        v.at,
        o.at,
        (H, G, D, V),
        y.data_ptr(),
        of.scale,
        torch.get_num_threads(),
        bound_of(visible.start, (B, H, N)),
        bound_of(visible.stop, (B, H, N)),
        None if visible.dense is None else dense_of(visible.dense, (B, H, N, K)),
        None,
        0 if sinks is None else sinks.data_ptr(),
        of.softcap or 0.0,
    )
    return y


def _fits(t: Tensor) -> bool:
    """Rows of float32 on the CPU, each contiguous, not too many, in a tensor of torch's own."""
    if type(t) is not Tensor or t.dtype is not torch.float32 or not t.is_cpu or t.dim() not in (2, 3):
        return False
    return t.numel() > 0 and (MANY or t.numel() <= ROWS * t.shape[-1]) and t.stride(-1) == 1


def _noticed(of: "MultiHeadAttention", backend: str | None) -> bool:
    """Whether something stands between the steps, or watches them."""
    if native.module is None or torch.compiler.is_compiling() or named(backend) not in (None, "native"):
        return True
    if of._taps or of.rope is not None or of._modules.get("q_norm") is not None or (of.training and of.dropout):
        return True
    if hooks._has_any_global_hook() or watched() or torch._C._len_torch_function_stack():
        return True
    return inside_torch_func() or torch.is_autocast_enabled("cpu")


@dataclass(frozen=True)
class _Held:
    """Where a plain `nn.Linear` holds its weight and bias, and how it looked when that was found out."""

    at: tuple[int, int, int]  # address of the weight, its row stride, address of the bias or 0
    rows: int
    columns: int
    weight: Tensor
    bias: Tensor | None
    shape: torch.Size

    def still(self, weight: Tensor | None, bias: Tensor | None) -> bool:
        """Whether it holds the same tensors, and these the same numbers: `.data` may have been set anew."""
        if weight is not self.weight or bias is not self.bias or weight.data_ptr() != self.at[0]:
            return False
        if weight.dtype is not torch.float32 or weight.shape != self.shape or weight.stride() != (self.at[1], 1):
            return False
        return bias is None or (bias.data_ptr() == self.at[2] and bias.dtype is torch.float32 and _row(bias, self.rows))


_held: WeakKeyDictionary[nn.Module, _Held] = WeakKeyDictionary()


def _linear(p: nn.Module | None) -> _Held | None:
    """Where a plain `nn.Linear` holds its weight and bias; None for anything that does more than multiply and add."""
    if type(p) is not nn.Linear or p._forward_hooks or p._forward_pre_hooks or p._backward_hooks:
        return None
    own = p.__dict__
    if p._backward_pre_hooks or "forward" in own or "weight" in own or "bias" in own:
        return None
    parameters = own["_parameters"]
    weight, bias = parameters.get("weight"), parameters.get("bias")
    known = _held.get(p)
    if known is not None and known.still(weight, bias):
        return known
    if weight is None or not _plain(weight) or weight.dim() != 2:
        return None
    rows, columns = weight.shape
    if bias is not None and not (_plain(bias) and _row(bias, rows)):
        return None
    at = weight.data_ptr(), weight.stride(0), 0 if bias is None else bias.data_ptr()
    found = _held[p] = _Held(at, rows, columns, weight, bias, weight.shape)
    return found


def _row(bias: Tensor, length: int) -> bool:
    return bias.shape == (length,) and bias.stride() == (1,)


def _plain(t: Tensor) -> bool:
    return type(t) in OWN and t.dtype is torch.float32 and t.is_cpu and t.stride(-1) == 1


def _trained(of: "MultiHeadAttention") -> bool:
    return any(p.requires_grad for p in of.parameters())

"""May this call go straight to the kernel? The one place that decides, asked once per call.

A call that goes straight leaves torch: nothing records it, traces it or sees it pass. So whoever could notice is a
reason against it: a gradient, a compiler or tracer, a mode, torch.func, autocast, a hook; and so is a tensor that is
not what its address says: a subclass, another device, layout or dtype, a negative bit, a storage that was freed or is
too small. The cheapest reasons come first, and every tensor of the call is looked at, in C++
(native/python/tensors.cpp).

What is not eligible goes through torch: attention through the operators that torch can trace and differentiate, a
projection through its module, a lens tile by tile. A reason says why, and `mh.explain` repeats it.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from multihead import kernel
from multihead.call import Arguments, Call, Reason
from multihead.masks import Mask, see
from multihead.masks.intervals import Ramp, Visible
from multihead.positions import RoPE
from multihead.tensors import inside_torch_func

if TYPE_CHECKING:
    from multihead import _native
    from multihead.kernel.layer import Parts
    from multihead.layer import MultiHeadAttention
    from multihead.lens.region import Region

CPU = torch.device("cpu")
ROWS = 16  # up to so many tokens the kernel's product is faster than torch's on every CPU
MANY = kernel.module is not None and not kernel.module.cpu_is_intel()  # whether it is with more, too


GRADIENT = Reason("a gradient is wanted", True)
WATCHED = Reason("somebody watches what happens between the steps", True)
OTHERWISE = Reason("the module is called in a way that is left to it", True)
_NO_VALUES = Reason("v is None", False)
OTHER_DTYPE = Reason("the weight is not of the dtype of x", True)


def watched(modules: bool = False) -> Reason | None:
    """Who would notice that a call leaves torch, or None: asked before any tensor is looked at.

    `modules`: who would notice that modules are not called, hooks aside.
    """
    if torch.compiler.is_compiling():
        return Reason("a compiler traces the call", True)
    if kernel.module is None:
        return Reason(f"the native module is {kernel.missing}", False)
    reason = kernel.module.watched(modules)
    return None if reason is None else Reason(*reason)


def followed() -> bool:
    """Whether somebody follows every operator of torch: none may be left out then, nor what others made be used."""
    if torch.compiler.is_compiling() or inside_torch_func() or torch._C._get_tracing_state() is not None:
        return True
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())


def modules_watched() -> Reason | None:
    """Who would notice that modules are not called."""
    if hooks._has_any_global_hook():
        return Reason("a hook on all modules watches", True)
    return watched(modules=True)


def attend(call: tuple, mask: Mask | Visible | Tensor | None) -> Tensor | Reason:
    """Steps 3 and 4 at once, where nothing but the output is wanted of them.

    `call`: q, k, v, bias, sinks, scale, softcap and a dropout of 0. With few numbers the time is that of the questions:
    all are asked in one call of the core.
    """
    if torch.compiler.is_compiling() or kernel.module is None:
        reason = watched()
        assert reason is not None
        return reason
    out = kernel.module.attend(call, mask, _lowered)
    return Reason(*out) if type(out) is tuple else out


def _lowered(mask: Mask | Visible | Tensor, B: int, H: int, Q: int, K: int) -> Visible:
    return mask if isinstance(mask, Visible) else see(mask, Q, K, CPU, B, H)


def attention(call: Arguments | Call, mask: Mask | Visible | Tensor | None) -> "_native.Attention | Reason":
    """Steps 3 and 4, read and ready to run."""
    reason = watched()
    if reason is not None:
        return reason
    if call.v is None:  # only a lens has no values
        return _NO_VALUES
    assert kernel.module is not None
    read = kernel.module.attention(call, torch.is_grad_enabled())
    if type(read) is tuple:
        return Reason(*read)
    if mask is None:
        return read
    B, H, _, Q, K, _, _ = read.sizes
    refused = read.see(_lowered(mask, B, H, Q, K))
    return read if refused is None else Reason(*refused)


def scores(region: "Region") -> Reason | None:
    """The scores of a region, over which a lens passes: why it may not be the kernel that does."""
    reason = watched()
    if reason is not None:
        return reason
    assert kernel.module is not None
    read = kernel.module.attention(region)
    if type(read) is tuple:
        return Reason(*read)
    K = region.shape[3]
    everything = Ramp.constant(0), Ramp.constant(K)
    refused = read.see(Visible(region.shape[2], K, *everything, region.dense))  # the bounds are made here, and plain
    return None if refused is None else Reason(*refused)


def slower_in(dtype: torch.dtype) -> Reason | None:
    """float32 is faster here than in torch on every CPU, half precision on some.

    bfloat16 is where the CPU multiplies pairs of it; float16 where the CPU can only widen it, which torch does badly.
    """
    if dtype is torch.float32 or (dtype is torch.bfloat16 and kernel.in_pairs()):
        return None
    if dtype is torch.float16 and kernel.widens_float16():
        return None
    return Reason(f"torch's product is as fast in {dtype} on this CPU", True)


def projection(p: nn.Module, x: Tensor, called: bool = False) -> "_native.Linear | Reason":
    """Step 1 or 7 by a module: its product, read and ready to run. Not asked where `modules_watched` says somebody.

    `called`: the module has been called, so that its own hooks see what they are to see.
    """
    assert kernel.module is not None
    return _product(kernel.module.projection(p, x, torch.is_grad_enabled(), called), x)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> "_native.Linear | Reason":
    """The same by the tensors themselves."""
    assert kernel.module is not None
    return _product(kernel.module.linear(x, weight, bias, torch.is_grad_enabled()), x)


def feed_forward(
    gate: nn.Module | None, up: nn.Module | None, down: nn.Module | None, tanh: bool, x: Tensor
) -> "_native.FeedForward | Reason":
    """down(act(gate(x)) * up(x)), read and ready to run. Not asked where `modules_watched` says somebody."""
    assert kernel.module is not None
    read = kernel.module.feed_forward(gate, up, down, tanh, x, torch.is_grad_enabled())
    if isinstance(read, tuple):
        return Reason(*read)
    if not MANY and read.rows > ROWS:
        return _MANY_ROWS
    return slower_in(x.dtype) or read


def norm(x: Tensor, weight: Tensor, eps: float, y: Tensor) -> Reason | None:
    """RMS norm of x into y, done; or why it is not. Not asked where `modules_watched` says somebody."""
    assert kernel.module is not None
    refused = kernel.module.norm(x, weight, eps, y, torch.is_grad_enabled(), torch.get_num_threads())
    return None if refused is None else Reason(*refused)


def _product(read: "_native.Linear | tuple[str, bool]", x: Tensor) -> "_native.Linear | Reason":
    if isinstance(read, tuple):
        return Reason(*read)
    if read.widens:  # torch has no such product
        return read
    if not MANY and read.rows > ROWS:
        return _MANY_ROWS
    return slower_in(x.dtype) or read


_MANY_ROWS = Reason(f"more than {ROWS} rows, where torch's product is as fast on this CPU", True)


_BETWEEN = Reason("something is done between the steps", True)
_ROTATE = RoPE.rotate


def layer(
    of: "MultiHeadAttention", x: Tensor, context: Tensor | None, recalls: bool = False
) -> "_native.Layer | Reason":
    """The whole layer, read and ready to run. Not asked where `modules_watched` says somebody.

    `recalls`: its keys and values are there already.
    """
    assert kernel.module is not None
    if of.taps or (of.training and of.dropout):
        return _BETWEEN
    if of.rope is not None and (type(of.rope) is not RoPE or RoPE.rotate is not _ROTATE):
        return _BETWEEN
    return _whole(kernel.module.layer(of, x, context, torch.is_grad_enabled(), recalls), x)


def parts(of: "Parts", x: Tensor, context: Tensor | None = None) -> "_native.Layer | Reason":
    """The same of any layer by its parts; whether something is done between the steps is for the caller to know."""
    assert kernel.module is not None
    return _whole(kernel.module.parts(of, x, context, torch.is_grad_enabled()), x)


def _whole(read: "_native.Layer | tuple[str, bool]", x: Tensor) -> "_native.Layer | Reason":
    if isinstance(read, tuple):
        return Reason(*read)
    if read.widens:
        return read
    if not MANY:
        B, _, Q, K = read.sizes
        if B * max(Q, K) > ROWS:
            return _MANY_ROWS
    return slower_in(x.dtype) or read

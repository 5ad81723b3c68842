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
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from multihead import kernel
from multihead.call import Arguments, Call, Reason
from multihead.masks import Mask, see
from multihead.masks.intervals import Ramp, Visible, inside_torch_func

if TYPE_CHECKING:
    from multihead import _native
    from multihead.layer import MultiHeadAttention
    from multihead.lens.region import Region

CPU = torch.device("cpu")
ROWS = 16  # up to so many tokens the kernel's product is faster than torch's on every CPU
MANY = kernel.module is not None and not kernel.module.cpu_is_intel()  # whether it is with more, too


GRADIENT = Reason("a gradient is wanted", True)


def watched() -> Reason | None:
    """Who would notice that a call leaves torch, or None: asked before any tensor is looked at."""
    if torch.compiler.is_compiling():
        return Reason("a compiler traces the call", True)
    if kernel.module is None:
        return Reason(f"the native module is {kernel.missing}", False)
    if inside_torch_func():
        return Reason("the kernel has no rule for torch.func or forward-mode derivatives", False)
    if torch._C._len_torch_dispatch_stack():
        return Reason("a dispatch mode watches every operator", True)
    if torch._C._len_torch_function_stack() and not _only_default_devices():
        return Reason("a function mode watches every call of torch", True)
    if torch._C._get_tracing_state() is not None:
        return Reason("torch.jit traces the call", True)
    return None


def _only_default_devices() -> bool:
    """`torch.set_default_device`, and `with torch.device(...)`: here every tensor is made on a device that is named."""
    return all(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def modules_watched() -> Reason | None:
    """Who would notice that modules are not called."""
    if hooks._has_any_global_hook():
        return Reason("a hook on all modules watches", True)
    if torch._C._is_any_autocast_enabled():
        return Reason("autocast chooses the dtype", True)
    return watched()


def attention(call: Arguments | Call, mask: Mask | Visible | Tensor | None) -> "_native.Attention | Reason":
    """Steps 3 and 4, read and ready to run."""
    reason = watched()
    if reason is not None:
        return reason
    assert kernel.module is not None
    read = kernel.module.attention(call, torch.is_grad_enabled())
    if type(read) is tuple:
        return Reason(*read)
    if mask is None:
        return read
    if not isinstance(mask, Visible):
        B, H, _, Q, K, _, _ = read.sizes
        mask = see(mask, Q, K, CPU, B, H)
    hidden = read.see(mask)
    return read if hidden is None else Reason(*hidden)


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
    hidden = read.see(Visible(region.shape[2], K, *everything, region.dense))  # the bounds are made here, and plain
    return None if hidden is None else Reason(*hidden)


def slower_in(dtype: torch.dtype) -> Reason | None:
    """float32 is faster here than in torch on every CPU; bfloat16 where the CPU multiplies pairs of it."""
    if dtype is torch.float32 or (dtype is torch.bfloat16 and kernel.in_pairs()):
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


def _product(read: "_native.Linear | tuple[str, bool]", x: Tensor) -> "_native.Linear | Reason":
    if isinstance(read, tuple):
        return Reason(*read)
    if not MANY and read.rows > ROWS:
        return _MANY_ROWS
    return slower_in(x.dtype) or read


_MANY_ROWS = Reason(f"more than {ROWS} rows, where torch's product is as fast on this CPU", True)


def layer(of: "MultiHeadAttention", x: Tensor, context: Tensor | None) -> "_native.Layer | Reason":
    """The whole layer, read and ready to run. Not asked where `modules_watched` says somebody."""
    assert kernel.module is not None
    read = kernel.module.layer(of, x, context, torch.is_grad_enabled())
    if type(read) is tuple:
        return Reason(*read)
    B, _, Q, K = read.sizes
    if not MANY and B * max(Q, K) > ROWS:
        return _MANY_ROWS
    return slower_in(x.dtype) or read

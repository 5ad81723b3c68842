"""Steps 1 and 7: a projection of x, by the kernel's own product where nobody would notice.

The kernel reads the matrix as `nn.Linear` holds it, so nothing is packed, copied or stale. With few tokens the time
goes into reading it once; with many, the kernel's product is faster than torch's where Intel did not make the CPU,
because the one that torch calls is tuned for Intel's own. Whatever could see the difference (a gradient, a hook, an
adapter, a tracer) sends the call to the module; so does whatever is wrong with it, so that the error is found there.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as hooks

from multihead import native
from multihead.attend import named
from multihead.backends.native import watched
from multihead.intervals import inside_torch_func

ROWS = 16  # up to so many tokens the kernel is faster on every CPU
MANY = native.module is not None and not native.module.cpu_is_intel()  # whether it is with more, too

if native.module is not None:
    native.module.meet_torch()


def project(p: nn.Module, x: Tensor, backend: str | None = None) -> Tensor:
    """What the projection `p` makes of x (..., inputs): (..., outputs)."""
    if not noticed(backend):
        held = native.module.held(p)  # type: ignore[union-attr]
        y = None if held is None else _product(x, *held)
        if y is not None:
            return y
    return p(x)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As torch's function of that name: x (..., inputs), weight (outputs, inputs), bias (outputs,)."""
    y = None if noticed(None) else _product(x, weight, bias)
    return F.linear(x, weight, bias) if y is None else y


def noticed(backend: str | None) -> bool:
    """Whether another backend is named, or something watches what modules and torch do."""
    if native.module is None or torch.compiler.is_compiling() or named(backend) not in (None, "native"):
        return True
    if hooks._has_any_global_hook() or watched() or torch._C._len_torch_function_stack():
        return True
    return inside_torch_func() or torch.is_autocast_enabled("cpu")


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    if type(x) is not Tensor or x.dtype is not torch.float32 or not x.is_cpu or x.dim() not in (2, 3):
        return None
    if not MANY and x.numel() > ROWS * x.shape[-1]:
        return None
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return None
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    return y if native.module.linear(x, weight, bias, y, torch.get_num_threads()) else None  # type: ignore[union-attr]

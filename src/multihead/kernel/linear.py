"""Steps 1 and 7: a projection of x, by the kernel's own product where that is eligible.

The kernel reads the matrix as `nn.Linear` holds it, so nothing is packed, copied or stale. With few tokens the time
goes into reading it once; with many, the kernel's product is faster than torch's where Intel did not make the CPU,
because the one that torch calls is tuned for Intel's own. Whatever could see the difference (a gradient, a hook, an
adapter, a tracer) sends the call to the module; so does whatever is wrong with it, so that the error is found there.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from multihead.call import Reason
from multihead.kernel import eligible

if TYPE_CHECKING:
    from multihead import _native


def project(p: nn.Module, x: Tensor, watched: Reason | None) -> Tensor:
    """What the projection `p` makes of x (..., inputs): (..., outputs)."""
    read = eligible.projection(p, x) if watched is None else watched
    return p(x) if isinstance(read, Reason) else _run(read, x)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, watched: Reason | None) -> Tensor:
    """As torch's function of that name: x (..., inputs), weight (outputs, inputs), bias (outputs,)."""
    read = eligible.linear(x, weight, bias) if watched is None else watched
    return F.linear(x, weight, bias) if isinstance(read, Reason) else _run(read, x)


def _run(read: "_native.Linear", x: Tensor) -> Tensor:
    y = x.new_empty((*x.shape[:-1], read.outputs))
    read.run(y, torch.get_num_threads())
    return y

"""The whole layer in one native call on the CPU, where that is eligible."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from multihead.call import Reason
from multihead.kernel import eligible
from multihead.kernel.eligible import CPU
from multihead.masks import Mask, see

if TYPE_CHECKING:
    from multihead.layer import MultiHeadAttention


def reach() -> str:
    """How far one native call goes here, in words."""
    tokens = "any number of" if eligible.MANY else f"up to {eligible.ROWS}"
    return f"one native call, in inference, for {tokens} tokens"


def layer(of: "MultiHeadAttention", x: Tensor, context: Tensor | None, mask: Mask | Tensor | None) -> Tensor | Reason:
    """What the layer puts out for a call without cache, positions, lengths or bias; or why this is not for us.

    The kernel leaves nothing of the caches to Python, so each line here costs several times what it does in a loop by
    itself: tensors and projections are read in C++.
    """
    if of._taps or of.rope is not None or of._modules.get("q_norm") is not None or (of.training and of.dropout):
        return Reason("something is done between the steps", True)
    read = eligible.layer(of, x, context)
    if isinstance(read, Reason):
        return read
    if mask is not None:
        B, H, Q, K = read.sizes  # at run time: a layer may be sharded by heads
        hidden = read.see(see(mask, Q, K, CPU, B, H))
        if hidden is not None:
            return Reason(*hidden)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    read.run(y, torch.get_num_threads())
    return y

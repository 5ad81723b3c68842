"""Steps 3 and 4, and their gradients, by the kernel: outputs made, a call that was read run into them."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multihead import kernel
from multihead.call import Call
from multihead.kernel.eligible import CPU
from multihead.masks.intervals import Visible

if TYPE_CHECKING:
    from multihead import _native


def attend(
    read: "_native.Attention",
    q: Tensor,
    *,
    seed: Tensor | None = None,
    want_lse: bool = False,
    want_state: bool = False,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """out, lse, and what a backward pass needs to know. `weights`: zeros to be filled with them, (B,H,Q,K)."""
    B, H, _, Q, _, _, V = read.sizes
    out = q.new_empty_strided((B, H, Q, V), (H * Q * V, V, H * V, 1))  # step 5 is then a view
    lse = torch.empty(B, H, Q, dtype=_wide(q), device=CPU) if want_lse else None
    state = torch.empty(B, H, Q, 2, dtype=_wide(q), device=CPU) if want_state else None
    if seed is not None:
        read.seed = int(seed)
    if lse is None and state is None and weights is None:
        read.attend(torch.get_num_threads(), out=out)
    else:
        read.attend(torch.get_num_threads(), out=out, lse=lse, state=state, weights=weights)
    return out, lse, state


def _wide(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype is torch.float64 else torch.float32


def marshal(call: Any, visible: Visible) -> "_native.Attention":
    """A call as the kernel reads it, inside an operator: torch has dealt with what is not eligible by then."""
    assert kernel.module is not None
    read = kernel.module.attention(call)
    refused = read if type(read) is tuple else read.see(visible)
    if refused is not None:
        raise ValueError(refused[0])
    return read


def lined_up(t: Tensor) -> Tensor:
    """`t` with its last axis contiguous: copied once where it is not."""
    return t if t.stride(-1) == 1 or t.shape[-1] <= 1 else t.contiguous()


def _own(t: Tensor) -> Tensor:
    """`t` as torch's own class: one of somebody's own has seen the call by now, or does not want to."""
    return t if type(t) is Tensor else t.as_subclass(Tensor)


def backward(
    call: Call, state: Tensor, d_out: Tensor, d_lse: Tensor | None, seed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, block by block from what the forward pass left."""
    read = marshal(call, call.visible)
    d_q, d_k, d_v = (lined_up(torch.empty_like(lined_up(t))) for t in (call.q, call.k, call.v))
    d_lse = None if d_lse is None else _own(d_lse).to(state.dtype).contiguous()
    if seed is not None:
        read.seed = int(seed)
    read.backward(
        torch.get_num_threads(),
        d_out=lined_up(_own(d_out)),
        d_lse=d_lse,
        state=state,
        delta=torch.empty_like(state),
        d_q=d_q,
        d_k=d_k,
        d_v=d_v,
    )
    return d_q, d_k, d_v

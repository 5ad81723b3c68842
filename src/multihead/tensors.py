"""What may be known of a tensor before its numbers are used: integers or not, to be looked at or not, there or not."""

import torch
from torch import Tensor
from torch.autograd import forward_ad


def holds_integers(t: Tensor) -> bool:
    return not (t.dtype.is_floating_point or t.dtype.is_complex or t.dtype == torch.bool)


def readable(t: Tensor) -> bool:
    """Whether looking at the numbers costs nothing: an ordinary CPU tensor, outside a compiler's tracing."""
    if torch.compiler.is_compiling() or t.device.type != "cpu" or type(t) not in (Tensor, torch.nn.Parameter):
        return False
    return not inside_torch_func()


def require_storage(name: str, t: object) -> None:
    """Refuse a tensor whose storage does not hold all that it sees: torch itself would read beyond its end."""
    if torch.compiler.is_compiling() or not isinstance(t, Tensor):
        return
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    if t.device.type != "cpu" or type(t) not in (Tensor, torch.nn.Parameter):
        return
    if t.layout != torch.strided or t.is_nested or not t.numel() or t._is_zerotensor():
        return
    last = t.storage_offset() + sum((n - 1) * step for n, step in zip(t.shape, t.stride()))
    needed, there = (last + 1) * t.itemsize, t.untyped_storage().nbytes()
    if needed > there:
        raise ValueError(
            f"{name} sees {needed} bytes of a storage that holds {there}: "
            "expected one that was not freed or made smaller"
        )


def inside_torch_func() -> bool:
    """Whether vmap, grad, jvp or forward-mode differentiation is at work: a number may be many, or carry a tangent."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0

"""What the layer is called with, checked: each refusal names the argument, what was given and what was expected."""

import torch
from torch import Tensor, nn

from multihead.cache import Cache, ContextCache
from multihead.call import under_autocast
from multihead.masks import check_broadcast
from multihead.sizes import Sizes, check_floating, describe
from multihead.tensors import holds_integers, inside_torch_func, readable, require_storage


def check_call(
    x: Tensor,
    context: Tensor | None,
    cache: Cache | ContextCache | None,
    context_positions: Tensor | None,
    sizes: Sizes,
    q_proj: nn.Module,
) -> None:
    """Refuse arguments of the wrong kind, and those that do not go together."""
    check_input("x", x, sizes.E, q_proj)
    if context is not None and not isinstance(context, Tensor):
        raise TypeError(f"context is a {type(context).__name__}: expected a tensor; a mask goes to mask=")
    if cache is not None and not isinstance(cache, Cache | ContextCache):
        raise TypeError(f"cache is a {type(cache).__name__}: expected one from new_cache()")
    if isinstance(cache, ContextCache):
        if context is not None:
            raise ValueError("the cache already holds the keys and values of a context: leave out context=")
        if context_positions is not None:
            raise ValueError("the keys of a context cache were turned by their positions when it was made: give "
                             "context_positions= to new_cache(context=…)")  # fmt: skip
    elif cache is not None and context is not None:
        raise ValueError("this cache is for the tokens of x; for a context there is new_cache(context=…)")
    elif context is None:
        if context_positions is not None:
            raise ValueError("context_positions is given without context")
        if sizes.C != sizes.E:
            raise ValueError(f"the layer was made with context_dim={sizes.C}: expected a context (B,K,C)")


def check_input(name: str, x: Tensor, width: int, projection: nn.Module) -> None:
    """Refuse an `x` or a `context` that the projection cannot take."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}: expected a tensor")
    letter = "E" if name == "x" else "C"
    if x.dim() not in (2, 3):
        raise ValueError(f"{name} has shape {tuple(x.shape)}: expected (N,{letter}) or (B,N,{letter})")
    if x.shape[-1] != width:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: expected the last axis to be {letter}={width}")
    check_floating(f"{name} has dtype ", x.dtype)
    if type(projection) is nn.Linear and not brings_its_weights(projection) and not under_autocast(x.device):
        weight = projection.weight
        if (x.dtype, x.device) != (weight.dtype, weight.device):
            said = f"{name} is {describe(x)}, but the layer's weights are {weight.dtype} on {weight.device}"
            if x.dtype is torch.float32 and weight.dtype in (torch.bfloat16, torch.float16):
                said += ": float32 goes with them only in inference on the CPU, where the layer is one native call"
            raise ValueError(said)


def brings_its_weights(projection: nn.Module) -> bool:
    """Whether its weights are elsewhere until it is called, as accelerate's offloading has it: they are on meta."""
    return "forward" in vars(projection) and next(projection.parameters()).is_meta


def check_positions(name: str, given: Tensor | None, x: Tensor) -> None:
    """Refuse positions that are not an integer for each token of `x`, (B, N, …)."""
    if given is None:
        return
    if not isinstance(given, Tensor) or not holds_integers(given):
        what = describe(given) if isinstance(given, Tensor) else repr(given)
        raise TypeError(f"{name} is {what}: expected a tensor of integers")
    require_storage(name, given)
    check_broadcast(name, given, x.shape[:2], "(B,N)")


def check_values(
    values: Tensor | None,
    x: Tensor,
    context: Tensor | None,
    cache: Cache | ContextCache | None,
    sizes: Sizes,
    v_proj: nn.Module,
) -> None:
    """Refuse values that are not made of as many items as the keys are."""
    if values is None:
        return
    if isinstance(cache, ContextCache):
        raise ValueError("the cache already holds the keys and values of a context: leave out values=")
    check_input("values", values, sizes.C, v_proj)
    name, keys = ("x", x) if context is None else ("context", context)
    if values.shape != keys.shape:
        raise ValueError(f"values has shape {tuple(values.shape)}: expected {tuple(keys.shape)}, as {name}")


def check_lengths(
    lengths: Tensor | list[int] | None, x: Tensor, context: Tensor | None, cache: Cache | ContextCache | None
) -> Tensor | None:
    """How many tokens of each row of `x` are real, as a tensor (B,)."""
    if lengths is None:
        return None
    if context is not None or isinstance(cache, ContextCache):
        raise ValueError("lengths= counts the tokens of x that join the keys; with a context give mask=Padding(…)")
    real = torch.as_tensor(lengths, device=x.device)
    if not holds_integers(real) or real.shape != x.shape[:1]:
        raise ValueError(f"lengths is {describe(real)}: expected an integer for each of the B={x.shape[0]} rows")
    require_storage("lengths", real)
    kept = isinstance(cache, Cache) and not torch.compiler.is_compiling()
    if kept and (real.is_meta or inside_torch_func()):
        raise ValueError("lengths= has no numbers to read here, and a cache has to know where each of its rows ends")
    if real.numel() and (kept or readable(real)):
        low, high = int(real.min()), int(real.max())
        if low < 0 or high > x.shape[1]:
            raise ValueError(f"lengths={real.tolist()}: expected 0…{x.shape[1]}, the number of tokens in x")
    return real

"""Bodies for numbers: the many ways in which a tensor can hold the same values, and a few in which it cannot be read."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class Wrapped(Tensor):
    """A tensor that has no memory of its own, as quantised and distributed ones are."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        t = Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, strides=inner.stride(),
            storage_offset=inner.storage_offset(), requires_grad=inner.requires_grad,
        )  # fmt: skip
        t.inner = inner
        return t

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Wrapped({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def bare(t: Any) -> Any:
            return t.inner if isinstance(t, Wrapped) else t

        def dressed(t: Any) -> Any:
            return Wrapped(t) if isinstance(t, Tensor) and not isinstance(t, Wrapped) else t

        return tree_map(dressed, func(*tree_map(bare, args), **tree_map(bare, kwargs or {})))


class Named(Tensor):
    """A subclass that changes nothing."""


class Counted(Tensor):
    """A subclass that watches every function of torch."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Counted.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def bare(t: Tensor) -> Tensor:
    """The numbers of a result, whatever it is dressed in."""
    while isinstance(t, Wrapped):
        t = t.inner
    return t.as_subclass(Tensor) if type(t) is not Tensor else t


def _filler(t: Tensor) -> Any:
    return math.nan if t.dtype.is_floating_point else True  # what lies between and around must not be read


def strided(t: Tensor) -> Tensor:
    room = torch.full((*t.shape[:-1], 2 * t.shape[-1]), _filler(t), dtype=t.dtype)
    room[..., ::2] = t
    return room[..., ::2]


def within(t: Tensor) -> Tensor:
    """In the middle of something larger, at an odd offset."""
    room = torch.full((*(n + 2 for n in t.shape),), _filler(t), dtype=t.dtype)
    part = room[tuple(slice(1, n + 1) for n in t.shape)]
    part.copy_(t)
    return part


def middle_swapped(t: Tensor) -> Tensor:
    """As heads lie after a projection: (B,N,H,D) seen as (B,H,N,D)."""
    return t.transpose(-3, -2).contiguous().transpose(-3, -2) if t.dim() > 2 else t.t().contiguous().t()


def last_swapped(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT if t.dim() > 1 else strided(t)


def same_rows(t: Tensor) -> Tensor:
    """The first along one axis, for all: stride 0."""
    axis = next((a for a, n in enumerate(t.shape) if n > 1), None)
    return t if axis is None else t.narrow(axis, 0, 1).expand(t.shape)


def same_everywhere(t: Tensor) -> Tensor:
    return t.flatten()[:1].view(*[1] * t.dim()).expand(t.shape) if t.numel() else t


def negative_view(t: Tensor) -> Tensor:
    return torch._neg_view(-t)


def conjugate_imaginary(t: Tensor) -> Tensor:
    return torch.complex(torch.zeros_like(t), -t).conj().imag


def real_part(t: Tensor) -> Tensor:
    return torch.complex(t, torch.full_like(t, math.nan)).real


def large_strides(t: Tensor) -> Tensor:
    """An axis of one element may have any stride at all."""
    strides = [10**6 if n == 1 else s for n, s in zip(t.shape, t.contiguous().stride())]
    return t.contiguous().as_strided(t.shape, strides)


def of_inference(t: Tensor) -> Tensor:
    with torch.inference_mode():
        return t.clone()


SAME: dict[str, Callable[[Tensor], Tensor]] = {  # the values may change, but the tensor is readable and must be read
    "contiguous": lambda t: t.clone(),
    "strided": strided,
    "within": within,
    "middle swapped": middle_swapped,
    "last swapped": last_swapped,
    "same rows": same_rows,
    "same everywhere": same_everywhere,
    "large strides": large_strides,
    "parameter": lambda t: torch.nn.Parameter(t.clone(), requires_grad=False),
}
ODD: dict[str, Callable[[Tensor], Tensor]] = {  # floating tensors only; readable too
    "negative bit": negative_view,
    "imaginary part of a conjugate": conjugate_imaginary,
    "real part": real_part,
    "efficient zeros": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    "of inference mode": of_inference,
}
FOREIGN: dict[str, Callable[[Tensor], Tensor]] = {  # may be refused, in words
    "wrapped": lambda t: Wrapped(t.clone()),
    "subclass": lambda t: t.clone().as_subclass(Named),
    "watching subclass": lambda t: t.clone().as_subclass(Counted),
}


def freed(t: Tensor) -> Tensor:
    """As a sharded parameter is between its uses."""
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def cut(t: Tensor) -> Tensor:
    """Storage that ends within the tensor."""
    t = t.clone()
    t.untyped_storage().resize_(t.untyped_storage().nbytes() // 2)
    return t


BROKEN: dict[str, Callable[[Tensor], Tensor]] = {  # must be refused, wherever there is a number to read
    "freed": freed,
    "cut": cut,
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
}


def fits(form: str, t: Tensor) -> bool:
    """Whether torch has such a tensor of this dtype."""
    if form in ODD or form == "strided" or form == "sparse":
        complex_too = t.dtype in (torch.float32, torch.float64, torch.float16)
        if form in ("imaginary part of a conjugate", "real part"):
            return complex_too and t.dtype != torch.float16
        return t.dtype.is_floating_point or form in ("strided", "sparse")
    return True


def choose(rng: random.Random, t: Tensor, odd: float, foreign: float = 0.0, broken: float = 0.0) -> str:
    """A form for this tensor: mostly contiguous, else one of each kind with these probabilities."""
    at = rng.random()
    kind = SAME if at < 0.3 else ODD if at < 0.3 + odd else FOREIGN if at < 0.3 + odd + foreign else \
        BROKEN if at < 0.3 + odd + foreign + broken else {"contiguous": None}  # fmt: skip
    name = rng.choice(list(kind))
    return name if fits(name, t) else "contiguous"


def body(form: str, t: Tensor) -> tuple[Tensor, Tensor]:
    """The tensor, and the numbers that it holds (or held)."""
    made = (SAME | ODD | FOREIGN | BROKEN)[form](t)
    if form in BROKEN:
        return made, t
    if form == "efficient zeros":
        return made, torch.zeros_like(t)
    return made, bare(made).detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)

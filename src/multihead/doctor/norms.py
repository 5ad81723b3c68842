"""Norms: those of q and k, done rightly or not, and those that do not belong."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

OTHER_EPS = (1e-6, 1e-8, 1e-12, torch.finfo(torch.float32).eps)  # where it is not 1e-5


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm over the last axis: a LayerNorm where it centres, an RMSNorm where not."""

    centred: bool
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-5

    def to(self, dtype: torch.dtype) -> "Norm":
        weight, bias = (None if t is None else t.to(dtype) for t in (self.weight, self.bias))
        return Norm(self.centred, weight, bias, self.eps)

    def __call__(self, t: Tensor, axes: tuple[int, ...] = (-1,)) -> Tensor:
        t = t - t.mean(axes, keepdim=True) if self.centred else t
        t = t * (t.square().mean(axes, keepdim=True) + self.eps).rsqrt()
        t = t if self.weight is None else t * self.weight
        return t if self.bias is None else t + self.bias


def norms_of(module: object, width: int) -> tuple[Norm, ...]:
    """The norms over `width` numbers that a module has inside: the first few."""
    if not isinstance(module, nn.Module):
        return ()
    found = []
    for child in module.modules():
        if isinstance(child, nn.LayerNorm | nn.RMSNorm) and tuple(child.normalized_shape) == (width,):
            weight, bias = (None if t is None else t.detach() for t in (child.weight, getattr(child, "bias", None)))
            eps = torch.finfo(torch.float32).eps if child.eps is None else child.eps
            found.append(Norm(isinstance(child, nn.LayerNorm), weight, bias, eps))
    return tuple(found[:3])


def spellings(own: int) -> Iterable[str]:
    """What a norm may be, for `spelt`: one of the candidate's own, or one without parameters and with a usual eps."""
    yield from (f"own {n}" for n in range(own))
    for kind in ("layer", "rms"):
        yield kind
        yield from (f"{kind} eps{eps}" for eps in OTHER_EPS)


def spelt(text: str, own: tuple[Norm, ...]) -> Norm:
    """The norm that "own 0", "layer" or "rms eps1e-06" means."""
    kind, _, number = text.partition(" ")
    if kind == "own":
        return own[int(number)]
    return Norm(kind == "layer", eps=float(number.removeprefix("eps") or 1e-5))


def word(text: str, own: tuple[Norm, ...]) -> str:
    return "LayerNorm" if spelt(text, own).centred else "RMSNorm"

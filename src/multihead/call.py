"""What a call of attention is: as it was made, and checked and lowered; and what a backend is asked about it.

A backend says by name what it refuses and why; one that is named never falls back to another.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from multihead.masks import Mask
from multihead.masks.intervals import Visible


class Reason(NamedTuple):
    """Why a call may not go straight to the kernel."""

    says: str
    dispatched: bool  # torch's dispatcher deals with it: attention may still reach the kernel through torch's operator


@dataclass
class Arguments:
    """One call of `attend` as it was made."""

    q: Tensor  # (B, H, Q, D)
    k: Tensor  # (B, G, K, D)
    v: Tensor  # (B, G, K, V)
    mask: Mask | Visible | Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    bias: Tensor | None = None
    dropout: float = 0.0
    want_lse: bool = False
    want_top: bool = False


@dataclass
class Call:
    """One call of `attend`, checked and lowered: all that a backend needs to know."""

    q: Tensor  # (B, H, Q, D)
    k: Tensor  # (B, G, K, D)
    v: Tensor  # (B, G, K, V)
    visible: Visible
    scale: float
    softcap: float | None
    sinks: Tensor | None  # (H,)
    bias: Tensor | None  # broadcasts to (B, H, Q, K)
    dropout: float
    want_lse: bool
    ineligible: Reason | None = None  # why it may not go straight to the kernel, where that was asked

    def allowed(self) -> Tensor | None:
        """What may be seen, as bool that broadcasts to (B, H, Q, K), or None where that is everything."""
        return None if self.visible.is_everything else self.visible.allowed(self.q.device)

    @property
    def needs_grad(self) -> bool:
        if not torch.is_grad_enabled():
            return False
        tensors = (self.q, self.k, self.v, self.sinks, self.bias)
        return any(t is not None and t.requires_grad for t in tensors)


class Backend(Protocol):
    """`out, lse = run(call, seed)`; lse may be None where it was not asked for; seed where there is dropout."""

    name: str

    def refuse(self, call: Call) -> str | None:
        """Why this backend cannot compute the call exactly, or None."""

    def note(self, call: Call) -> str:
        """How it would compute the call, in a few words."""

    def run(self, call: Call, seed: Tensor | None) -> tuple[Tensor, Tensor | None]: ...


def under_autocast(device: torch.device) -> bool:
    kind = device.type
    # torch 2.9 cannot trace the question; every device it compiles for has autocast.
    there = kind != "meta" if torch.compiler.is_compiling() else torch.amp.is_autocast_available(kind)
    return there and torch.is_autocast_enabled(kind)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Inside the block products are computed in the dtype of their factors."""
    return torch.autocast(device.type, enabled=False) if under_autocast(device) else nullcontext()

"""Modules of Hugging Face models in one native call each: RMS norms, gated feed-forward parts; attention: `whole.py`.

What a module computes is read from its structure: the names its forward uses must be known ones, its children plain
linears that fit each other. That it is what it looks like is then proven: before it is put in place, a forward must
give on random input what the module itself gives.
"""

import inspect

import torch
from torch import Tensor, nn

from multihead.call import Reason
from multihead.kernel import eligible
from multihead.kernel.forward import Forward

ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 4e-3}  # of the largest number, in a proof


def unwatched(module: nn.Module) -> bool:
    """Whether no hook and no other forward stands on the module: its numbers may be computed without calling it."""
    d = module.__dict__
    if d["_forward_hooks"] or d["_forward_pre_hooks"] or d["_backward_hooks"] or d["_backward_pre_hooks"]:
        return False
    return "forward" not in d or isinstance(d["forward"], Forward)


def uses_only(module: nn.Module, known: str) -> str | None:
    """Which name the module's forward uses that is not known, or None."""
    code = inspect.unwrap(type(module).forward).__code__
    keywords = {name for group in code.co_consts if isinstance(group, tuple) for name in group if isinstance(name, str)}
    unknown = sorted({*code.co_names, *keywords} - set(known.split()))
    return None if not unknown else f"does something with {unknown[0]}"


def differs(ours: Tensor, theirs: Tensor) -> bool:
    return not (ours - theirs).abs().max() <= ALLOWED[theirs.dtype] * theirs.abs().max()  # also where it is NaN


def random(*shape: int, like: Tensor, seed: int = 0) -> Tensor:
    """Normal numbers that leave torch's generator alone."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return made.to(like.dtype)


class Recognised(Forward):
    """A forward for modules that look like something."""

    @classmethod
    def looks_like(cls, module: nn.Module) -> bool:
        raise NotImplementedError

    def why_not(self, rotary: int) -> str | None:
        """What tells that the module is something else, or None; `rotary`: how many numbers of a head RoPE turns."""
        raise NotImplementedError


class NormForward(Recognised):
    """x / sqrt(mean(x²) + eps) · weight."""

    what = "RMS norm of the kernel"
    KNOWN = "dtype to torch float float32 pow mean keepdim rsqrt variance_epsilon eps weight"

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.eps = "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps"

    @classmethod
    def looks_like(cls, module: nn.Module) -> bool:
        return "RMSNorm" in type(module).__name__ and type(module) is not nn.RMSNorm

    def why_not(self, rotary: int) -> str | None:
        weight = self.module._parameters.get("weight")
        if weight is None or weight.dim() != 1 or len(self.module._parameters) != 1 or self.module._modules:
            return "is not a norm with one weight"
        unknown = uses_only(self.module, self.KNOWN)
        if unknown or not isinstance(getattr(self.module, self.eps, None), float):
            return unknown or "has no eps"
        x = random(3, weight.shape[0], like=weight)
        ours = self.attempt(x)
        if isinstance(ours, Reason):
            return ours.says
        return "computes something else" if differs(ours, self.plain(x)) else None

    def attempt(self, x: Tensor) -> Tensor | Reason:
        weight = self.module._parameters.get("weight")
        if weight is None or weight.dtype is not x.dtype:
            return eligible.OTHER_DTYPE
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        return eligible.norm(x, weight, getattr(self.module, self.eps), y) or y

    def __call__(self, hidden_states: Tensor) -> Tensor:
        y = eligible.modules_watched() or self.attempt(hidden_states) if self.on else None
        return y if isinstance(y, Tensor) else self.plain(hidden_states)


class GatedForward(Recognised):
    """down(act(gate(x)) · up(x)), act SiLU or GELU by tanh."""

    what = "feed-forward part in one call"
    KNOWN = "gate_proj up_proj gate_up_proj down_proj act_fn activation_fn chunk dim"
    tanh = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.gate = "gate_proj" if "gate_proj" in module._modules else "gate_up_proj"
        self.act = "act_fn" if hasattr(module, "act_fn") else "activation_fn"

    @classmethod
    def looks_like(cls, module: nn.Module) -> bool:
        children = module._modules
        return "down_proj" in children and ("gate_up_proj" in children or {"gate_proj", "up_proj"} <= children.keys())

    def why_not(self, rotary: int) -> str | None:
        unknown = uses_only(self.module, self.KNOWN)
        gate, act = self.module._modules[self.gate], getattr(self.module, self.act, None)
        if unknown or not isinstance(gate, nn.Linear) or not callable(act):
            return unknown or "is not linears and an activation"
        z = random(64, like=torch.empty(0)) * 3
        for self.tanh in (False, True):
            expected = nn.functional.gelu(z, approximate="tanh") if self.tanh else nn.functional.silu(z)
            if torch.allclose(act(z), expected, atol=1e-6):
                break
        else:
            return "its activation is neither SiLU nor GELU by tanh"
        x = random(3, gate.in_features, like=gate.weight)
        ours = self.attempt(x)
        if isinstance(ours, Reason):
            return ours.says
        return "computes something else" if differs(ours, self.plain(x)) else None

    def attempt(self, x: Tensor) -> Tensor | Reason:
        children = self.module._modules
        act = children.get(self.act)
        if act is not None and not unwatched(act):
            return eligible.WATCHED
        read = eligible.feed_forward(children[self.gate], children.get("up_proj"), children["down_proj"], self.tanh, x)
        if isinstance(read, Reason):
            return read
        y = x.new_empty((*x.shape[:-1], read.outputs))
        read.run(y, x.new_empty(read.rows * 2 * read.width), torch.get_num_threads())
        return y

    def __call__(self, x: Tensor) -> Tensor:
        y = eligible.modules_watched() or self.attempt(x) if self.on else None
        return y if isinstance(y, Tensor) else self.plain(x)

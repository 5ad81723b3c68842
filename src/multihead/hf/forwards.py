"""Modules of Hugging Face models in one native call each: RMS norms, gated feed-forward parts, attention.

What a module computes is read from its structure: the names its forward uses must be known ones, its children plain
linears that fit each other. That it is what it looks like is then proven: before it is put in place, a forward must
give on random input what the module itself gives.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from multihead.call import Reason
from multihead.hf.cache import GrowingCache, GrowingLayer, GrowingSlidingLayer
from multihead.hf.interface import EDITS, NAME, NEUTRAL, TRACERS, WATCHERS, weights_are_wanted
from multihead.hf.masks import IntervalMask
from multihead.kernel import eligible
from multihead.kernel.forward import Forward
from multihead.kernel.layer import Parts, Store, Turn, prepare, run
from multihead.masks import Causal, lower
from multihead.masks.intervals import Frame

ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 4e-3}  # of the largest number, in a proof


def unwatched(module: nn.Module) -> bool:
    """Whether nobody would notice that the module is not called."""
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


class AttentionForward(Recognised):
    """All seven steps, with norms of q and k, RoPE and the cache, where the heads are plain ones."""

    what = "attention in one call"
    KNOWN = (
        "shape head_dim q_proj k_proj v_proj qkv_proj o_proj out_proj q_norm k_norm view transpose reshape contiguous "
        "apply_rotary_pos_emb use_rope update layer_idx ALL_ATTENTION_FUNCTIONS get_interface config "
        "_attn_implementation eager_attention_forward training attention_dropout scaling scale sliding_window getattr "
        "num_attention_heads num_key_value_heads is_causal dropout"
    )

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        children, own = module._modules, module.__dict__
        self.fused = "qkv_proj" in children
        self.out = "o_proj" if "o_proj" in children else "out_proj"
        self.rope = own.get("use_rope", True) and "apply_rotary_pos_emb" in _names(module)
        self.D: Any = own.get("head_dim")
        self.scale: Any = own.get("scaling", own.get("scale"))
        self.names = list(inspect.signature(type(module).forward).parameters)[2:]  # behind self and hidden_states

    @classmethod
    def looks_like(cls, module: nn.Module) -> bool:
        children = module._modules
        output = "o_proj" in children or "out_proj" in children
        return output and ("qkv_proj" in children or {"q_proj", "k_proj", "v_proj"} <= children.keys())

    def why_not(self, rotary: int) -> str | None:
        unknown = uses_only(self.module, self.KNOWN)
        if unknown or not isinstance(self.D, int) or not isinstance(self.scale, float):
            return unknown or "has no head_dim and scale"
        if self.rope and not rotary:
            return "the angles of its RoPE are not to be found"
        if any(name in self.module._modules and self.norm(name) is None for name in ("q_norm", "k_norm")):
            return "its norms of q and k are not of each head"
        training, self.module.training = self.module.training, False
        try:
            return self.proof(rotary)
        finally:
            self.module.training = training

    def proof(self, rotary: int) -> str | None:
        """Five tokens at once and then one more, each seeing those before it; or all at once, seeing each other."""
        q: Any = self.module._modules["qkv_proj" if self.fused else "q_proj"]
        if not isinstance(q, nn.Linear):
            return f"its projection is a {type(q).__name__}"
        x = 2 * random(1, 6, q.in_features, like=q.weight)
        takes = inspect.signature(type(self.module).forward).parameters
        caches = [GrowingCache(), GrowingCache()] if "past_key_values" in takes else None
        turns = random(1, 6, rotary // 2, like=q.weight, seed=1).float()
        angles = tuple(f(torch.cat((turns, turns), -1)).to(q.weight.dtype) for f in (torch.cos, torch.sin))
        for start, end in ((0, 5), (5, 6)) if caches else ((0, 6),):
            frame = Frame.of(end - start, end, torch.device("cpu"))
            mask = IntervalMask(lower(Causal(), frame, 1, 1), 1, torch.device("cpu")) if caches else None
            given: dict[str, Any] = {"attention_mask": mask}
            if "position_embeddings" in takes:
                given["position_embeddings"] = tuple(t[:, start:end] for t in angles)
            part = x[:, start:end]
            calls: tuple[Any, Any] = self.attempt, self.plain
            outcomes: list[Any] = []
            for cache, call in zip(caches or (None, None), calls):
                outcomes.append(call(part, **given, **({"past_key_values": cache} if caches else {})))
            ours, theirs = outcomes
            if isinstance(ours, Reason):
                return ours.says
            if differs(ours[0], theirs[0]):
                return "computes something else"
        return None

    def norm(self, name: str) -> tuple[Tensor, float] | None:
        """The weight and eps of the norm of each head of q or k, or None where that is something else, or watched."""
        module: Any = self.module._modules[name]
        weight = module._parameters.get("weight")
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        plain = unwatched(module) and weight is not None and weight.shape == (self.D,)
        return (weight, eps) if plain and isinstance(eps, float) else None

    def parts(self) -> Parts | None:
        children: Any = self.module._modules
        norms: dict[str, Any] = {}
        if "q_norm" in children:
            norms = {"q_norm": self.norm("q_norm"), "k_norm": self.norm("k_norm")}
            if None in norms.values():
                return None
        q, k, v = (
            (children["qkv_proj"], None, None)
            if self.fused
            else (children["q_proj"], children["k_proj"], children["v_proj"])
        )
        return Parts(q, k, v, children[self.out], self.D, scale=self.scale, **norms)

    def attempt(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None] | Reason:
        module = self.module
        own = module.__dict__
        if EDITS in own or WATCHERS in own or TRACERS in own or weights_are_wanted(output_attentions):
            return eligible.WATCHED
        config: Any = module.config
        if own["training"] or config._attn_implementation != NAME or not kwargs.keys() <= NEUTRAL:
            return eligible.OTHERWISE
        if attention_mask is None:
            if own.get("is_causal", True) or past_key_values is not None:
                return eligible.OTHERWISE
        elif type(attention_mask) is not IntervalMask:
            return eligible.OTHERWISE
        parts = self.parts()
        read = eligible.OTHERWISE if parts is None else eligible.parts(parts, hidden_states)
        if isinstance(read, Reason):
            return read
        turn = store = layer = None
        if self.rope:
            if position_embeddings is None:
                return eligible.OTHERWISE
            cos, sin = position_embeddings
            turn = Turn(cos, sin, pairs=cos.shape[-1] // 2)
        new = hidden_states.shape[-2]
        if past_key_values is not None:
            layer = _layer_of(past_key_values, own["layer_idx"])
            if layer is None:
                return eligible.OTHERWISE
            heads = (read.sizes[0], read.kv_heads, self.D)
            room = layer.reserve(new, (heads, heads), hidden_states)
            if room is None:
                return eligible.OTHERWISE
            store = Store(*room, layer.used, layer.used + new)
        wrong = prepare(read, turn=turn, store=store)
        if wrong is not None:
            return wrong
        visible = None if attention_mask is None else attention_mask.visible
        if visible is not None and read.sizes[3] != visible.K:
            return eligible.OTHERWISE
        y = run(read, hidden_states, visible)
        if isinstance(y, Reason):
            return y
        if layer is not None:
            layer.commit(new)
        return y, None

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.on and eligible.modules_watched() is None:
            out = self.attempt(hidden_states, **dict(zip(self.names, args)), **kwargs)
            if not isinstance(out, Reason):
                return out
        return self.plain(hidden_states, *args, **kwargs)


def _names(module: nn.Module) -> tuple[str, ...]:
    return inspect.unwrap(type(module).forward).__code__.co_names


def _layer_of(cache: Cache, number: int) -> GrowingLayer | GrowingSlidingLayer | None:
    """The layer of a cache that grows in place, made where caches make theirs when they are called for."""
    if getattr(cache, "offloading", True):
        return None
    make: Any = cache.layer_class_to_replicate
    while make is GrowingLayer and len(cache.layers) <= number:
        cache.layers.append(make())
    layer: Any = cache.layers[number] if number < len(cache.layers) else None
    return layer if type(layer) in (GrowingLayer, GrowingSlidingLayer) else None


def rotary_width(model: nn.Module) -> int:
    """How many numbers of a head are turned, 0 where that is nowhere to be found or not the same everywhere."""
    found = {2 * t.numel() for name, t in model.named_buffers() if name.split(".")[-1] == "inv_freq"}
    return found.pop() if len(found) == 1 else 0


KINDS: tuple[type[Recognised], ...] = (NormForward, GatedForward, AttentionForward)

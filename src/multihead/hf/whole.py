"""Attention modules of Hugging Face models in one native call each, from projection to projection, with the cache.

What a module is, is read from its structure, and proven on random input before it is replaced: see `forwards.py`.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.pytorch_utils import Conv1D

from multihead.call import Reason
from multihead.hf.cache import GrowingCache, GrowingLayer, GrowingSlidingLayer
from multihead.hf.forwards import GatedForward, NormForward, Recognised, differs, random, unwatched, uses_only
from multihead.hf.interface import EDITS, NAME, NEUTRAL, TRACERS, WATCHERS, weights_are_wanted
from multihead.hf.masks import IntervalMask
from multihead.kernel import eligible
from multihead.kernel.layer import Parts, Store, Turn, prepare, run
from multihead.masks import Causal, lower
from multihead.masks.intervals import Frame


class AttentionForward(Recognised):
    """All seven steps, with norms of q and k, RoPE and the cache, where the heads are plain ones."""

    what = "attention in one call"
    KNOWN = (
        "shape head_dim q_proj k_proj v_proj qkv_proj o_proj out_proj q_norm k_norm view transpose reshape contiguous "
        "apply_rotary_pos_emb use_rope update layer_idx ALL_ATTENTION_FUNCTIONS get_interface config "
        "_attn_implementation eager_attention_forward training attention_dropout scaling scale sliding_window getattr "
        "num_attention_heads num_key_value_heads is_causal dropout"
    )
    product: type[nn.Module] = nn.Linear  # of which class the projections are

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.inner = module  # who calls the attention function
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
        before = [(module, module.training) for module in self.module.modules()]
        try:
            self.module.eval()
            return self.proof(rotary)
        finally:
            for module, training in before:
                module.training = training

    def proof(self, rotary: int) -> str | None:
        """Five tokens at once and then one more, each seeing those before it; or all at once, seeing each other."""
        q = self.queries()
        if not isinstance(q, self.product):
            return f"its projection is a {type(q).__name__}"
        weight: Any = q.weight
        x = 2 * random(1, 6, weight.shape[1 if self.product is nn.Linear else 0], like=weight)
        takes = inspect.signature(type(self.module).forward).parameters
        caches = [GrowingCache(), GrowingCache()] if "past_key_values" in takes else None
        turns = random(1, 6, rotary // 2, like=weight, seed=1).float()
        angles = tuple(f(torch.cat((turns, turns), -1)).to(weight.dtype) for f in (torch.cos, torch.sin))
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

    def queries(self) -> Any:
        """The projection that makes q, or q and more."""
        return self.module._modules["qkv_proj" if self.fused else "q_proj"]

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
        module = self.inner
        own = module.__dict__
        if EDITS in own or WATCHERS in own or TRACERS in own or weights_are_wanted(output_attentions):
            return eligible.WATCHED
        config: Any = module.config
        told = {name for name, given in kwargs.items() if given is not None}
        if own["training"] or config._attn_implementation != NAME or not told <= NEUTRAL:
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


class ApartForward(AttentionForward):
    """The same where the last product lies in a module beside the others, which adds x and norms: BERT's."""

    what = "attention and what it puts out in one call"
    KNOWN = "is_cross_attention self output encoder_hidden_states attention_mask past_key_values"
    INNER = (
        "shape attention_head_size query key value view transpose reshape contiguous isinstance EncoderDecoderCache "
        "self_attention_cache update layer_idx ALL_ATTENTION_FUNCTIONS get_interface config _attn_implementation "
        "eager_attention_forward training dropout p scaling"
    )
    OUTPUT = "dense dropout LayerNorm"

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.inner, self.output = self.beside(module)
        self.D, self.scale = (self.inner.__dict__.get(name) for name in ("attention_head_size", "scaling"))
        self.rope = False

    @staticmethod
    def beside(module: nn.Module) -> tuple[Any, Any]:
        return module._modules.get("self"), module._modules.get("output")

    @classmethod
    def looks_like(cls, module: nn.Module) -> bool:
        inner, output = cls.beside(module)
        if inner is None or output is None:
            return False
        return {"query", "key", "value"} <= inner._modules.keys() and {"dense", "LayerNorm"} <= output._modules.keys()

    def why_not(self, rotary: int) -> str | None:
        unknown = uses_only(self.inner, self.INNER) or uses_only(self.output, self.OUTPUT)
        return unknown or super().why_not(rotary)

    def queries(self) -> Any:
        return self.inner._modules["query"]

    def parts(self) -> Parts | None:
        if not all(map(unwatched, (self.inner, self.output, self.output.dropout))):
            return None
        children: Any = self.inner._modules
        q, k, v = (children[name] for name in ("query", "key", "value"))
        return Parts(q, k, v, self.output._modules["dense"], self.D, scale=self.scale)

    def attempt(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None] | Reason:
        if (self.inner, self.output) != self.beside(self.module) or self.output.training:
            return eligible.OTHERWISE
        out = super().attempt(hidden_states, *args, **kwargs)
        return out if isinstance(out, Reason) else (self.output.LayerNorm(out[0] + hidden_states), None)


class TurnedForward(AttentionForward):
    """The same where weights lie the other way round, inputs by outputs: GPT-2's `Conv1D`."""

    KNOWN = (
        "isinstance EncoderDecoderCache is_updated get layer_idx cross_attention_cache self_attention_cache hasattr "
        "ValueError q_attn layers keys values c_attn split split_size dim shape head_dim view transpose update config "
        "_attn_implementation ALL_ATTENTION_FUNCTIONS get_interface eager_attention_forward reorder_and_upcast_attn "
        "_upcast_and_reordered_attn attn_dropout p training scaling dropout reshape contiguous c_proj resid_dropout"
    )
    product = Conv1D

    @classmethod
    def looks_like(cls, module: nn.Module) -> bool:
        return {"c_attn", "c_proj"} <= module._modules.keys() and "q_attn" not in module._modules

    def queries(self) -> Any:
        return self.module._modules["c_attn"]

    def parts(self) -> Parts | None:
        children: Any = self.module._modules
        dropout, products = children.get("resid_dropout"), [children["c_attn"], children["c_proj"]]
        if type(dropout) is not nn.Dropout or dropout.training or not all(map(unwatched, (dropout, *products))):
            return None
        if not all(type(p) is Conv1D and type(p.weight) is nn.Parameter for p in products):
            return None
        qkv, out = ((p.weight.t(), p.bias) for p in products)
        return Parts(qkv, None, None, out, self.D, scale=self.scale)


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


KINDS: tuple[type[Recognised], ...] = (NormForward, GatedForward, AttentionForward, ApartForward, TurnedForward)

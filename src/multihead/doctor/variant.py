"""The seven steps with every choice spelt out, so that each can be made wrongly: the specification, mutable.

A `Variant` is a set of choices, all of them right unless changed. `Specification` runs a variant on one call, in
float64, or in another dtype to learn how large its rounding is. What variants share is computed once: thousands of
pairs differ in the last cheap steps only.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from multihead import steps
from multihead.doctor import masking
from multihead.doctor.arithmetic import beyond, capped, fading, repacked, scale_of, sunk
from multihead.doctor.norms import Norm, spelt
from multihead.doctor.rotation import turned
from multihead.doctor.weights import Weights
from multihead.masks import Mask


@dataclass(frozen=True, eq=False)
class Call:
    """One call of the candidate: x (B,Q,E), context (B,K,C), what may be seen, and where the items stand."""

    x: Tensor
    context: Tensor | None = None
    mask: Mask | None = None
    positions: Tensor | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """B, Q, K."""
        return self.x.shape[0], self.x.shape[1], (self.x if self.context is None else self.context).shape[1]


@dataclass(frozen=True)
class Variant:
    """How each step is done. The defaults are right; a mistake changes one of them."""

    # Step 1, project
    packing: str = "per matrix"  # "per head", "innermost": how rows that were packed per matrix are read; "split": back
    transposed: str = ""  # which of the matrices q, k, v, o are used transposed
    unbiased: str = ""  # which of the projections q, k, v, o lack their bias
    roles: str = "qkv"  # which matrices make the queries, the keys and the values
    sources: str = "xcc"  # what each is made of: x or context
    over: str = "items"  # or "batch": (B, N, E) is taken for (N, B, E); "heads", "heads, causal": of one item
    normed: str = ""  # a norm that does not belong: see `_normed`
    # Step 2, split, and what makes q and k ready to meet
    split: str = "transpose"  # "view", "interleaved", "none": one head as wide as all
    split_of: str = "qkv"  # which of them are split that way
    norm: str = "right"  # "unit": q and k of length 1, where the reference has no norm; "added own 0, own 1"; "centred"
    norm_of: str = "qk"  # which of them have a norm that the reference has not
    eps: float | None = None
    rope: str = "right"
    # Step 3, score
    repeat: str = "each"  # "all": head h reads key/value head h % G; "all of k", "all of v"; "first": all read head 0
    scale: str = "right"  # or by what; "after": once the softmax is done; "times:1.3"
    precision: str = (
        ""  # the softmax's, where it is lower; "raised: float16": e to the scores alone, "kept: …": not that
    )
    product: str = ""  # the precision of q·k, where it is lower; "scores: float16" where theirs is, once they are made
    core: str = ""  # the precision of q, k, v and of what attention gives, where it is lower; "layer: …": of everything
    overflow: str = ""  # "scores", "scaled", "exp": what leaves the range of a dtype, and which: "exp:float32"
    axis: str = "keys"  # or another; or "none", "sigmoid", "twice", "one more", "base 2": no softmax, or another one
    softcap: str = "right"  # "missing", "after" the mask, "at:30", "twice", "clamped", "not multiplied"
    bias: str = ""  # ALiBi, where the reference has none: see `fading`
    sinks: str = "right"  # "missing", or see `sunk`
    mask: str = "right"
    hide: str = "fill"  # "add", "add seen", "add hidden", "after", "renormalise": how the mask hides
    value: float = -torch.inf  # the number that hides
    empty: str = "zero"  # what a row that sees nothing becomes: "nan", "mean", "all", "own"
    # Steps 4 to 7
    mix: str = "right"  # what is done to the weights first: "transposed", "times:1.1"
    merge: str = "transpose"  # "view", "reverse", "interleaved"
    output: str = "right"  # "missing", "per head", "bias twice"
    residual: bool = False

    @property
    def unrounded(self) -> "Variant":
        """The same formula in the right precision."""
        return replace(self, precision="", product="", core="")

    @property
    def lower(self) -> str:
        """The dtype that it rounds to where the right one does not, or nothing."""
        return (self.precision or self.product or self.core).rpartition(": ")[2]


RIGHT = Variant()
ALL = slice(None)
STEPS_1_AND_2 = "normed packing transposed unbiased roles sources split split_of norm norm_of eps rope"
STEP_3 = "repeat scale precision product core overflow axis softcap bias sinks mask hide value empty"
READY = tuple(STEPS_1_AND_2.split())
SCORED = (*READY, *STEP_3.split())
MOST_KEPT = 2000  # intermediates of one call
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class Specification:
    """Runs variants of the seven steps on one call; `dtype` below float32 is rounded to after every operation."""

    def __init__(self, weights: Weights, call: Call, dtype: torch.dtype = torch.float64, joined: bool = False) -> None:
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.rounded = dtype if dtype != self.dtype else None
        self.joined = joined  # whether a bias joins a product before it is rounded
        self.weights = weights.to(self.dtype)
        self.call = call
        self.x = call.x.to(self.dtype)
        self.context = self.x if call.context is None else call.context.to(self.dtype)
        self.B, self.Q, self.K = call.sizes
        self._made: dict[tuple, Any] = {}
        self._others: dict[str, Specification] = {}

    def run(self, variant: Variant = RIGHT, columns: slice = ALL) -> Tensor:
        """The output, (B, Q, E), or some columns of it: most variants are seen to be wrong in a few."""
        return self.trace(variant, columns)["output"]

    def trace(self, variant: Variant = RIGHT, columns: slice = ALL) -> dict[str, Tensor]:
        """The intermediates from step 2 on, and the output."""
        if variant.over == "batch":
            across = self._across().trace(replace(variant, over="items"), columns)
            return {name: t.transpose(0, 1) for name, t in across.items()}
        if variant.core.startswith("layer"):
            return self._lower(variant.lower).trace(replace(variant, core=""), columns)
        q, k, v = (self._once(f"heads of {'qkv'[n]}", READY, variant, self._ready, n) for n in range(3))
        if variant.over.startswith("heads"):
            weights, heads = self._among_heads(variant, q, k, v)
        else:
            weights = self._once("weights", SCORED, variant, self._weights, q, k)
            heads = self._once("heads", (*SCORED, "mix"), variant, self._mix, weights, v)
        merged = self._normed(self._round(self._merge(heads, variant.merge)), variant, "merged heads")
        found = {"q_heads": q, "k_heads": k, "v_heads": v, "weights": weights, "heads": heads, "merged": merged}
        if variant.normed.endswith("the output"):
            whole = self._normed(self._output(merged, variant, ALL), variant, "the output")
            return found | {"output": whole[..., columns]}
        return found | {"output": self._round(self._output(merged, variant, columns))}

    def _across(self) -> "Specification":
        """The same call with batch and items taken for each other."""
        if "across" not in self._others:
            call = replace(self.call, x=self.call.x.transpose(0, 1))
            self._others["across"] = Specification(self.weights, call, self.rounded or self.dtype)
        return self._others["across"]

    def _lower(self, name: str) -> "Specification":
        """The same call with everything in half precision, rounded after every operation."""
        if name not in self._others:
            call = replace(self.call, x=self._half(self.call.x, name))
            if call.context is not None:
                call = replace(call, context=self._half(call.context, name))
            self._others[name] = Specification(self.weights.to(HALVES[name]), call, HALVES[name], joined=True)
        return self._others[name]

    def _normed(self, t: Tensor, variant: Variant, place: str) -> Tensor:
        """A norm where the seven steps have none: `variant.normed` is "layer on x", "own 0 on merged heads", …."""
        text, _, where = variant.normed.partition(" on ")
        return t if where != place else self._round(spelt(text, self.weights.inner)(t))

    def _half(self, t: Tensor, name: str) -> Tensor:
        return t.to(HALVES[name]).to(self.dtype)

    def _round(self, t: Tensor) -> Tensor:
        return t if self.rounded is None else t.to(self.rounded).to(self.dtype)

    def _product(self, t: Tensor) -> Tensor:
        """A product as it is before a bias joins it: `nn.Linear` rounds once, after that."""
        return t if self.joined else self._round(t)

    def _once(self, name: str, choices: tuple[str, ...], variant: Variant, make: Callable, *given: Any) -> Tensor:
        """What `make` makes, kept by the choices it depends on."""
        key = (name, *(getattr(variant, choice) for choice in choices))
        if key not in self._made:
            if len(self._made) > MOST_KEPT:
                self._made = {k: t for k, t in self._made.items() if k[0] in ("projected", "allowed")}
            self._made[key] = make(variant, *given)
        return self._made[key]

    # Steps 1 and 2

    def projected(self, n: int, variant: Variant) -> Tensor:
        """Step 1 for q, k or v: (B, N, heads, width)."""
        name, source = variant.roles[n], variant.sources[n]
        normed = variant.normed if variant.normed.endswith(" on x") else ""
        marks = (name in variant.transposed, name in variant.unbiased, normed)
        key = ("projected", name, source, variant.packing, *marks)
        if key not in self._made:
            w, b = self.weights.w[name], self.weights.b[name]
            if variant.packing != "per matrix":
                w = repacked({m: self.weights.w[m].permute(1, 2, 0) for m in "qkv"}, variant.packing)[name]
                w = w.permute(2, 0, 1)
                if b is not None:
                    zeros = torch.zeros_like(b)
                    every = {m: zeros if (t := self.weights.b[m]) is None else t for m in "qkv"}
                    b = repacked(every, variant.packing)[name]
            if name in variant.transposed:
                w = w.flatten(1).T.unflatten(1, w.shape[1:])
            given = self._normed(self.x if source == "x" else self.context, variant, "x")
            made = self._product(steps.project(given, w))
            self._made[key] = self._round(made if b is None or name in variant.unbiased else made + b)
        return self._made[key]

    def _ready(self, variant: Variant, n: int) -> Tensor:
        """Step 2: q, k or v by heads, normalised and turned: (B, heads, N, width)."""
        t = self.projected(n, variant)
        B, N, heads, width = t.shape
        how = variant.split if "qkv"[n] in variant.split_of else "transpose"
        normed = n < 2 and self.weights.norm is not None and variant.norm not in ("none", f"{'kq'[n]} only")
        if normed and variant.norm == "flat":
            t = self._rms(t, n, variant, (-2, -1))
        if how == "view":
            t = t.reshape(B, heads, N, width)
        elif how == "none":
            t = t.reshape(B, 1, N, heads * width)
        elif how == "interleaved":
            t = t.reshape(B, N, width, heads).permute(0, 3, 1, 2)
        else:
            t = steps.split(t)
        if normed and variant.norm in ("right", "centred", "q only", "k only"):
            t = self._rms(t, n, variant, (-1,))
        elif normed and variant.norm in ("positions", "heads axis"):
            t = self._rms(t, n, variant, (2,) if variant.norm == "positions" else (1,))
        added = n < 2 and "qk"[n] in variant.norm_of
        if added and variant.norm == "unit":
            t = self._round(t / t.norm(dim=-1, keepdim=True))
        kind, _, which = variant.norm.partition(" ")
        if added and kind == "added":
            t = self._round(spelt(which.split(", ")[n], self.weights.of_heads)(t))
        if self.weights.rope is not None:
            where = None if n and self.call.context is not None else self.call.positions
            t = self._round(turned(self.weights.rope, t, n, variant.rope, where))
        if added and kind == "turned":
            t = self._round(spelt(which.split(", ")[n], self.weights.of_heads)(t))
        return self._rms(t, n, variant, (-1,)) if normed and variant.norm == "after rope" else t

    def _rms(self, t: Tensor, n: int, variant: Variant, axes: tuple[int, ...]) -> Tensor:
        assert self.weights.norm is not None
        eps = self.weights.eps if variant.eps is None else variant.eps
        centred = variant.norm == "centred"
        bias = self.weights.of_heads[n].bias if centred and len(self.weights.of_heads) > 1 else None
        return self._round(Norm(centred, self.weights.norm[n], bias, eps)(t, axes))

    # Steps 3 and 4

    def heads_of(self, t: Tensor, variant: Variant, name: str = "k") -> Tensor:
        H = self.weights.sizes.H
        if variant.split == "none":
            return t
        if variant.repeat == "first":
            return t[:, :1].expand(-1, H, *[-1] * (t.dim() - 2))
        if variant.repeat not in ("all", f"all of {name}") or t.shape[1] == H:
            return steps.repeat_heads(t, H)
        return t.repeat(1, H // t.shape[1], *[1] * (t.dim() - 2))

    def _weights(self, variant: Variant, q: Tensor, k: Tensor) -> Tensor:
        """Step 3: (B, H, Q, K)."""
        w = self.weights
        k = self.heads_of(k, variant)
        form = "bhqd,bhkd->bhqk" if k.dim() == 4 else "bhqd,bhqkd->bhqk"
        scale = scale_of(w, variant.scale, self.K)
        if variant.core:
            q, k = (self._half(t, variant.core) for t in (q, k))
        after, _, product = variant.product.rpartition(": ")
        if after:
            scores = self._half(torch.einsum(form, q, k) * scale, product)
        elif product:
            q, k = (self._half(t, product) for t in (q, k))
            scores = self._round(self._half(torch.einsum(form, q, k), product) * scale)
        elif variant.overflow.startswith("scores"):
            scores = beyond(torch.einsum(form, q, k), variant.overflow) * scale
        else:
            scores = torch.einsum(form, q, k) * scale
            scores = scores if ": " in variant.precision else self._round(scores)
            scores = beyond(scores, variant.overflow) if variant.overflow.startswith("scaled") else scores
        if variant.mask == "right" and self.call.mask is None:
            allowed = None
        else:
            allowed = self._once("allowed", ("mask",), variant, self._allowed)
        cap = None if variant.softcap == "missing" else w.softcap
        cap = float(variant.softcap[3:]) if variant.softcap.startswith("at:") else cap
        if cap is not None and variant.softcap != "after":
            scores = self._round(capped(scores, cap, variant.softcap))
        if variant.bias:
            scores = self._round(scores + fading(variant.bias, *scores.shape[1:]).to(scores))
        masked = self._hide(scores, allowed, variant)
        if cap is not None and variant.softcap == "after":
            masked = self._round(torch.tanh(masked / cap) * cap)
        weights = self._softmax(masked, variant)
        weights = weights * w.scale if variant.scale == "after" else weights
        if allowed is None:
            return weights
        if variant.hide in ("after", "renormalise"):
            weights = weights * allowed
            return weights / weights.sum(-1, keepdim=True) if variant.hide == "renormalise" else weights
        if variant.empty != "zero" and variant.axis == "keys":
            nothing = ~allowed.any(-1, keepdim=True)
            if variant.empty == "own":  # what it should see
                scores = scores.masked_fill(
                    ~masking.dense(self.call.mask, self.B, self.Q, self.K, self.x.device), -torch.inf
                )
            instead = weights * 0 + 1 / self.K if variant.empty == "mean" else self._softmax(scores, variant)
            weights = torch.where(nothing, torch.nan if variant.empty == "nan" else instead, weights)
        return weights

    def _allowed(self, variant: Variant) -> Tensor:
        return masking.mistaken(variant.mask, self.call.mask, self.B, self.Q, self.K, self.x.device)

    def _hide(self, scores: Tensor, allowed: Tensor | None, variant: Variant) -> Tensor:
        if allowed is None or variant.hide in ("after", "renormalise"):
            return scores
        if variant.hide == "fill":
            return scores.masked_fill(~allowed, variant.value)
        if variant.hide == "add":
            return scores + torch.zeros_like(scores).masked_fill(~allowed, variant.value)
        return scores + (allowed if variant.hide == "add seen" else ~allowed).to(scores.dtype)

    def _softmax(self, masked: Tensor, variant: Variant) -> Tensor:
        if variant.axis == "none":
            return masked.masked_fill(masked == -torch.inf, 0)
        if variant.overflow.startswith("exp"):
            raised = beyond(masked.exp(), variant.overflow)
            total = raised.sum(-1, keepdim=True)
            if self.weights.sinks is not None:
                total = total + beyond(self.weights.sinks.exp(), variant.overflow).view(1, -1, 1, 1)
            return raised / beyond(total, variant.overflow)
        fused, _, precision = variant.precision.rpartition(": ")
        if fused:
            e = (masked - masked.amax(-1, keepdim=True)).exp().nan_to_num(0.0)
            raised = self._half(e, precision) if fused == "raised" else e
            return raised / e.sum(-1, keepdim=True).clamp(min=1.0)
        if variant.precision:
            return torch.softmax(masked.to(HALVES[variant.precision]), -1).to(self.dtype)
        if variant.axis == "sigmoid":
            return self._round(masked.sigmoid())
        if self.weights.sinks is not None and variant.sinks not in ("right", "missing"):
            column = sunk(self.weights, variant.sinks, masked)
            return self._round(torch.cat((masked, column), -1).softmax(-1)[..., :-1])
        sinks = None if variant.sinks == "missing" else self.weights.sinks
        if variant.axis == "one more":
            sinks = masked.new_zeros(masked.shape[1])
        if variant.axis in ("keys", "one more", "twice", "base 2"):
            weights = self._round(steps.weigh(masked * (math.log(2) if variant.axis == "base 2" else 1), sinks)[0])
            return weights if variant.axis != "twice" else self._round(weights.softmax(-1))
        return self._round(torch.softmax(masked, {"queries": 2, "heads": 1, "batch": 0}[variant.axis]))

    def _mix(self, variant: Variant, weights: Tensor, v: Tensor) -> Tensor:
        """Step 4: (B, H, Q, V)."""
        v = self.heads_of(v, variant, "v")
        weights = weights.mT if variant.mix == "transposed" else weights
        weights = weights * float(variant.mix[6:]) if variant.mix.startswith("times:") else weights
        if variant.core:
            mixed = torch.einsum("bhqk,bhkv->bhqv", weights, self._half(v, variant.core))
            return self._half(mixed, variant.core)
        return self._round(torch.einsum("bhqk,bhkv->bhqv", weights, v))

    def _among_heads(self, variant: Variant, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Steps 3 and 4 on (B, N, H, D): the heads of one item attend to one another."""
        q, k, v = (self.heads_of(t, variant).transpose(1, 2) for t in (q, k, v))
        scores = self._round(q @ k.mT * scale_of(self.weights, variant.scale, self.K))  # (B, N, H, H)
        if variant.over.endswith("causal"):
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        weights = self._softmax(scores, variant)
        return weights, self._round(weights @ v).transpose(1, 2)

    # Steps 5, 6 and 7

    def _merge(self, heads: Tensor, how: str) -> Tensor:
        B, H, Q, V = heads.shape
        if how == "view":
            return heads.reshape(B, Q, H * V)
        if how == "reverse":
            heads = heads.flip(1)
        if how == "interleaved":
            return heads.permute(0, 2, 3, 1).reshape(B, Q, H * V)
        return steps.concatenate(steps.transpose_back(heads))

    def _output(self, merged: Tensor, variant: Variant, columns: slice) -> Tensor:
        w, b = self.weights.w["o"], self.weights.b["o"]
        H, V, E = w.shape
        if variant.output == "missing":
            out = merged[..., columns]
        elif variant.output == "per head":
            groups = w.reshape(H, V, H, E // H).diagonal(dim1=0, dim2=2)  # (V, E/H, H)
            out = torch.einsum("bqhv,veh->bqhe", merged.unflatten(-1, (H, V)), groups).flatten(2)[..., columns]
        else:
            w = w.flatten(0, 1).T.unflatten(0, (H, V)) if "o" in variant.transposed else w
            out = self._product(steps.output(merged, w[..., columns]))
        if b is not None and variant.output != "missing" and "o" not in variant.unbiased:
            out = out + b[columns] * (2 if variant.output == "bias twice" else 1)
        return out + self.x[..., columns] if variant.residual else out

"""A layer or a model of one's own, with what was handed to `mh.explore`: every layer in it that we know, on that input.

The model is called as it is; what goes into each of its layers is caught on the way, and traced. Layers are ours, or
torch's `nn.MultiheadAttention`, of which a layer of ours is made with the same weights.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from multihead.cache import Cache
from multihead.explorer.request import Refused
from multihead.explorer.subject import MOST_LONG, Grid, Items, Subject, sizes_of, wrong_input
from multihead.explorer.tokens import named
from multihead.layer import MultiHeadAttention
from multihead.layer.trace import Trace, trace
from multihead.lens import Lens, look
from multihead.masks import Allowed, Mask
from multihead.models.blocks import Given
from multihead.nn import read_masks
from multihead.weights import load_weights

Layer = MultiHeadAttention | nn.MultiheadAttention
Call = tuple[MultiHeadAttention, Tensor, dict[str, Any]]  # a layer of ours, x, and what else it is called with


class Own(Subject):
    """Layers in a model, and what each is called with."""

    id, kind, fixed = "given", "given", False

    def __init__(
        self,
        model: nn.Module,
        x: Any,
        labels: Sequence[str] | None = None,
        grid: tuple[int, int] | None = None,
        **call: Any,
    ) -> None:
        self.model, self.x, self.call = model, x, call
        self.name = type(model).__name__
        self.found = {name or "the layer": m for name, m in model.named_modules() if isinstance(m, Layer)}
        if not self.found:
            raise ValueError(
                f"{self.name} has no layer to explore: expected a MultiHeadAttention (ours or torch's), a model with "
                "some, a model of mh.models, or a Hugging Face model"
            )
        calls = self._calls()
        self.found = {name: layer for name, layer in self.found.items() if layer in calls}
        if not self.found:
            raise ValueError(f"{self.name} called none of its layers on x: expected a model that does")
        self.about = f"{len(self.found)} layers on your input." if len(self.found) > 1 else "Your layer, on your input."
        every = [calls[layer] for layer in self.found.values()]
        self._sizes = [sizes_of(ours) for ours, _, _ in every]
        _, first, options = every[0]
        self.mask, N = options.get("mask"), first.shape[-2]
        if N > MOST_LONG:
            raise ValueError(f"x has {N:,} items: expected at most {MOST_LONG:,} on a map")
        self._count = N
        if labels is not None and len(labels) != N:
            raise ValueError(f"labels has {len(labels)} names: expected {N}, one for each item")
        self.labels_given = None if labels is None else [str(label) for label in labels]
        if grid is not None:
            if grid[0] * grid[1] > N:
                raise ValueError(f"grid={grid}: expected at most {N} patches, the number of items")
            self.grid = Grid(*grid, first=N - grid[0] * grid[1])
        self.masks = all(isinstance(options.get("mask"), Mask | None) for _, _, options in every)
        self.ablates = all(isinstance(layer, MultiHeadAttention) for layer in self.found.values())

    def layers(self) -> list[tuple[str, MultiHeadAttention | None, dict[str, int]]]:
        ours = [layer if isinstance(layer, MultiHeadAttention) else None for layer in self.found.values()]
        return list(zip(self.found, ours, self._sizes))

    def layer(self, number: int) -> tuple[str, MultiHeadAttention | None, dict[str, int]]:
        name, _, sizes = super().layer(number)
        return name, ours_of(self.found[name]), sizes

    def examples(self) -> list[dict[str, Any]]:
        return [{"input": {"kind": "given"}, "label": "what was given"}]

    def parts(self) -> list[nn.Module]:
        return [part for part in self.model.children() if not isinstance(part, Layer)]

    def read(self, given: Any, need: int = 1) -> Items:
        if given["kind"] != "given":
            raise wrong_input(self, given)
        calls = self._calls()
        longest = max(calls[layer][1].shape[-2] for layer in self.found.values())
        if longest > self.most:
            raise Refused(f"x has {longest} items: expected at most {self.most} on one screen", "large", 413)
        return self._items()

    def read_long(self, given: Any) -> Items:
        if given["kind"] != "given":
            raise wrong_input(self, given)
        return self._items()

    def _items(self) -> Items:
        return Items(None, named(self.labels_given or [str(n) for n in range(self.given)]))

    @property
    def given(self) -> int:
        return self._count

    @property
    def longest(self) -> int:
        return MOST_LONG

    def version(self) -> str:
        """By the addresses of all tensors, and how often each was written to."""
        tensors = [*self.model.parameters(), *self.model.buffers(), self.x, *self.call.values()]
        marks = [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors if isinstance(t, Tensor)]
        return str(hash(tuple(marks)))

    def trace(self, items: Items, layer: int, mask: Given) -> Trace:
        ours, x, options = self._of(self.found[self.layer(layer)[0]], mask)
        training = ours.training
        try:
            return first_row(trace(ours.eval(), x, **options))  # without dropout
        finally:
            ours.train(training)

    def look_at(self, items: Items, layer: int, mask: Given) -> Lens:
        ours, x, options = self._of(self.found[self.layer(layer)[0]], mask)
        return ours.look(x, **options)

    def look(self, items: Items, mask: Given) -> list[Lens]:
        called = [self._of(layer, mask) for layer in self.found.values()]
        return [ours.look(x, **options) for ours, x, options in called]

    def _of(self, layer: Layer, mask: Given) -> Call:
        ours, x, options = self._calls()[layer]
        options = {name: value for name, value in options.items() if name != "backend"}
        if isinstance(options.get("cache"), Cache):
            options["cache"] = options["cache"].fork()  # the caller's stays as it was
        return ours, x, options if isinstance(mask, str) else options | {"mask": mask}

    def _calls(self) -> dict[nn.Module, Call]:
        """What goes into each layer when the model is called, the latest call of each."""
        calls: dict[nn.Module, Call] = {}

        def keep(layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            assert isinstance(layer, Layer)
            calls[layer] = _call(layer, args, options)

        if isinstance(self.model, MultiHeadAttention):
            return {self.model: _call(self.model, (self.x,), self.call)}
        hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in self.found.values()]
        training = [part for part in self.model.modules() if part.training]
        args = (self.x, self.x, self.x) if isinstance(self.model, nn.MultiheadAttention) else (self.x,)
        try:
            self.model.eval()
            with torch.no_grad():
                self.model(*args[: 1 if {"key", "query"} & set(self.call) else None], **self.call)
        finally:
            for part in training:
                part.training = True
            for hook in hooks:
                hook.remove()
        return calls


def ours_of(layer: Layer) -> MultiHeadAttention:
    """The layer, or a layer of ours with the weights that torch's has now."""
    if isinstance(layer, MultiHeadAttention):
        return layer
    if layer.bias_k is not None or layer.add_zero_attn:
        raise Refused("this nn.MultiheadAttention adds keys of its own: expected add_bias_kv and add_zero_attn off")
    if layer.kdim != layer.vdim:
        raise Refused(f"kdim={layer.kdim} and vdim={layer.vdim}: expected keys and values of one width")
    biased = layer.in_proj_bias is not None
    made = MultiHeadAttention(layer.embed_dim, layer.num_heads, context_dim=layer.kdim, bias=biased)
    load_weights(made, layer.state_dict())
    return made.eval()


def _call(layer: Layer, args: tuple[Any, ...], options: dict[str, Any]) -> Call:
    """A call of a layer as one of ours: of torch's the first row of the batch."""
    signature = inspect.signature(type(layer).forward).bind(layer, *args, **options)
    said = {name: value for name, value in list(signature.arguments.items())[1:] if value is not None}
    if isinstance(layer, MultiHeadAttention):
        return layer, said.pop("x"), said
    query, key, value = (said[name] for name in ("query", "key", "value"))
    if value is not key and not torch.equal(key, value):
        raise Refused("key and value are not the same: expected attention whose values stand where its keys do")
    axis = 0 if layer.batch_first or query.dim() == 2 else 1
    B = 1 if query.dim() == 2 else query.shape[axis]
    x, context = (t if t.dim() == 2 else t.select(axis, 0) for t in (query, key))
    shape = (B, layer.num_heads, x.shape[0], context.shape[0])
    causal = bool(said.get("is_causal"))
    visible, bias = read_masks(said.get("key_padding_mask"), said.get("attn_mask"), causal, shape, 0, x)
    allowed = visible.allowed(x.device)
    called: dict[str, Any] = {} if key is query or torch.equal(x, context) else {"context": context}
    if not visible.is_everything:
        called["mask"] = Allowed(allowed[0] if allowed.dim() == 4 else allowed)
    if bias is not None:
        called["bias"] = bias[0] if bias.dim() == 4 else bias
    return ours_of(layer), x, called


class Recorded(Subject):
    """A trace that is there already, for `trace.html`."""

    id, kind, fixed, masks, ablates = "given", "given", True, False, False
    name, about = "Your layer", "A trace, as it was recorded."

    def __init__(self, traced: Trace) -> None:
        self.traced = first_row(traced)
        self.mask, self.gives_weights = traced.mask, traced.layer is not None
        N = len(self.traced.labels)
        if self.most < N:
            raise ValueError(f"the trace has {N} items: expected at most {self.most} in a page")

    def layers(self) -> list[tuple[str, MultiHeadAttention | None, dict[str, int]]]:
        s = self.traced.sizes
        sizes = {"E": s.E, "H": s.H, "G": s.G, "D": s.D, "V": s.V, "C": s.C}
        return [("the layer", self.traced.layer, sizes)]

    def examples(self) -> list[dict[str, Any]]:
        return [{"input": {"kind": "given"}, "label": "what was traced"}]

    def read(self, given: Any, need: int = 1) -> Items:
        keys = self.traced.key_labels
        extra = {} if keys == self.traced.labels else {"key_tokens": named(keys)}
        return Items(None, named(self.traced.labels), extra=extra)

    def trace(self, items: Items, layer: int, mask: Given) -> Trace:
        return self.traced

    def look(self, items: Items, mask: Given) -> list[Lens]:
        return [lens_of(self.traced)]


def lens_of(traced: Trace) -> Lens:
    """A lens on the weights of a trace without a batch axis."""
    t, layer = traced, traced.layer
    seen = t["masked"] != -torch.inf
    options = {name: t.options.get(name) for name in ("scale", "softcap")}
    if layer is not None:
        options = {"scale": layer.scale, "softcap": layer.softcap, "sinks": layer.sinks}
    return look(t["q_heads"][None], t["k_heads"][None], seen, **options)


class Looked(Subject):
    """A lens that is there already: its weights as a map."""

    id, kind, fixed, masks, ablates, gives_weights = "given", "given", True, False, False, False
    name, about = "Your lens", "Weights of a lens, as they were asked for."
    most = 0  # a lens has no steps: there is nothing but the map

    def __init__(self, lens: Lens) -> None:
        self.lens = lens
        if max(lens.shape[2:]) > MOST_LONG or not lens.shape[2] or not lens.shape[3]:
            raise ValueError(
                f"the lens has {lens.shape[2]} × {lens.shape[3]} weights: expected 1 to {MOST_LONG} a side"
            )

    def layers(self) -> list[tuple[str, MultiHeadAttention | None, dict[str, int]]]:
        H = self.lens.shape[1]
        return [("the lens", None, {"E": 0, "H": H, "G": H, "D": 0, "V": 0, "C": 0})]

    def examples(self) -> list[dict[str, Any]]:
        return [{"input": {"kind": "given"}, "label": "what was looked at"}]

    @property
    def given(self) -> int:
        return self.lens.shape[2]

    @property
    def longest(self) -> int:
        return MOST_LONG

    def read(self, given: Any, need: int = 1) -> Items:
        raise Refused("a lens has no steps: expected its map", "large", 413)

    def read_long(self, given: Any) -> Items:
        return Items(None, named([str(n) for n in range(self.given)]))

    def look_at(self, items: Items, layer: int, mask: Given) -> Lens:
        return self.lens


def first_row(traced: Trace) -> Trace:
    """A trace without its batch axis: the first row of the batch."""
    if traced["x"].dim() == 2:
        return traced
    one = {name: t[0] for name, t in traced.items()}
    first = Trace(one, traced.sizes, traced.labels, traced.key_labels, traced.mask, traced.layer)
    first.options = traced.options
    return first

"""See and change what the attention of a Hugging Face model does, for as long as a `with` block lasts."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from multihead.hf.interface import EDITS, NAME, WATCHERS, lens_of
from multihead.layer.edit import check_heads, real_queries, replacement
from multihead.lens import Lens
from multihead.masks.intervals import Visible

Layer = int | str


def attentions(model: nn.Module) -> dict[str, nn.Module]:
    """The attention modules of a model by name, in the order in which they lie in it: the n-th is layer n.

    These are the modules that use transformers' attention interface. In a model with an encoder and a decoder, or with
    text and images, they are counted through.

    >>> from transformers import GPT2Config, GPT2Model
    >>> model = GPT2Model(GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4))
    >>> list(mh.hf.attentions(model))
    ['h.0.attn', 'h.1.attn']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: expected a Hugging Face model")
    return {name: module for name, module in model.named_modules() if _uses_interface(type(module))}


def _uses_interface(cls: type) -> bool:
    """Whether a method of the class looks up an attention function by name."""
    methods = (inspect.unwrap(method) for method in vars(cls).values() if inspect.isfunction(method))
    if any("ALL_ATTENTION_FUNCTIONS" in method.__code__.co_names for method in methods):
        return True
    return "forward" not in vars(cls) and any(_uses_interface(base) for base in cls.__bases__ if base is not nn.Module)


def find(model: nn.Module, layer: Layer) -> tuple[int, nn.Module]:
    found = attentions(model)
    names, modules = list(found), list(found.values())
    if not modules:
        raise ValueError(f"{type(model).__name__} has no module that uses transformers' attention interface")
    if isinstance(layer, str) and layer in found:
        number = names.index(layer)
    elif isinstance(layer, int) and not isinstance(layer, bool) and -len(modules) <= layer < len(modules):
        number = layer % len(modules)
    else:
        raise ValueError(f"layer={layer!r}: expected 0…{len(modules) - 1}, or a name from attentions(model)")
    module = modules[number]
    used = getattr(getattr(module, "config", None), "_attn_implementation", NAME)
    if used != NAME:
        raise ValueError(
            f"{names[number]} runs on {used!r} attention: call model.set_attn_implementation({NAME!r}) first"
        )
    return number, module


@contextmanager
def attached(module: nn.Module, where: str, fn: Callable) -> Iterator[None]:
    before = getattr(module, where, ())
    setattr(module, where, (*before, fn))
    try:
        yield
    finally:
        setattr(module, where, before)
        if not before:
            delattr(module, where)


class Seen(Mapping[Layer, Lens]):
    """The lens of each layer's latest call, by the layer's number or name; only of layers that were called."""

    def __init__(self, model: nn.Module) -> None:
        self._names = list(attentions(model))
        self._lenses: dict[int, Lens] = {}

    def __getitem__(self, layer: Layer) -> Lens:
        number = self._names.index(layer) if isinstance(layer, str) and layer in self._names else layer
        if isinstance(number, int) and number < 0:
            number += len(self._names)
        if number not in self._lenses:
            raise KeyError(f"layer {layer!r} was not called while watched: expected one of {sorted(self._lenses)}")
        return self._lenses[number]

    def __iter__(self) -> Iterator[Layer]:
        return iter(sorted(self._lenses))

    def __len__(self) -> int:
        return len(self._lenses)

    def __repr__(self) -> str:
        return "\n".join(f"{n} {self._names[n]}: {self._lenses[n]}" for n in sorted(self._lenses)) or "nothing yet"


@contextmanager
def watch(
    model: nn.Module, layers: Layer | Iterable[Layer] | None = None, heads: int | Sequence[int] | None = None
) -> Iterator[Seen]:
    """Inside the block, keep a lens on the latest call of each layer: `seen[layer]`.

    A lens holds the queries and a copy of the keys, O(N) memory, and computes what it is asked for; the kernel that
    runs is the one that would have run unwatched. In `generate` the latest call is the newest token's. What was seen
    stays after the block.

    Args:
        model: a model whose attention is "multihead".
        layers: which, by number or by name as in `attentions(model)`; all unless given.
        heads: which query heads; all unless given. The lens then has only these, numbered from 0.

    >>> from transformers import GPT2Config, GPT2Model
    >>> model = GPT2Model(GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4)).eval()
    >>> model.set_attn_implementation("multihead")
    >>> with torch.no_grad(), mh.hf.watch(model, layers=-1) as seen:
    ...     _ = model(torch.tensor([[5, 6, 7]]))
    >>> seen[1].entropy().shape
    torch.Size([1, 4, 3])
    """
    wanted = range(len(attentions(model))) if layers is None else [layers] if isinstance(layers, int | str) else layers
    chosen = [heads] if isinstance(heads, int) else None if heads is None else list(heads)
    seen = Seen(model)

    def keep(number: int) -> Callable:
        def watcher(query: Tensor, key: Tensor, visible: Visible, options: dict[str, Any]) -> None:
            if chosen is not None:
                check_heads(chosen, query.shape[1])
            seen._lenses[number] = lens_of(query, key, visible, options, chosen)

        return watcher

    with ExitStack() as stack:
        for layer in wanted:
            number, module = find(model, layer)
            stack.enter_context(attached(module, WATCHERS, keep(number)))
        yield seen


@contextmanager
def patch(model: nn.Module, layer: Layer, fn: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside the block, `fn` is given what a layer's heads put out, (B,H,Q,V), and what it returns takes its place.

    In `generate` it is called for every step, with Q the number of new tokens.

    >>> from transformers import GPT2Config, GPT2Model
    >>> model = GPT2Model(GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4)).eval()
    >>> model.set_attn_implementation("multihead")
    >>> with torch.no_grad(), mh.hf.patch(model, 0, lambda heads: heads.flip(1)):  # the heads change places
    ...     changed = model(torch.tensor([[5, 6, 7]]))
    """
    with _edited(model, layer, lambda heads, visible: fn(heads)):
        yield


@contextmanager
def _edited(model: nn.Module, layer: Layer, fn: Callable[[Tensor, Visible], Tensor]) -> Iterator[None]:
    """As `patch`, with what each query sees."""
    _, module = find(model, layer)

    def edit(heads: Tensor, visible: Visible) -> Tensor:
        changed = fn(heads, visible)
        if not isinstance(changed, Tensor) or changed.shape != heads.shape:
            what = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise ValueError(f"the patch of layer {layer!r} gave {what}: expected a tensor {tuple(heads.shape)}")
        return changed

    with attached(module, EDITS, edit):
        yield


@contextmanager
def ablate(
    model: nn.Module, heads: Mapping[Layer, int | Sequence[int]], with_: str | Tensor = "zero"
) -> Iterator[None]:
    """Inside the block, what these heads put out is replaced, on the fast path, before the output projection.

    Args:
        model: a model whose attention is "multihead".
        heads: for each layer, by number or name as in `attentions(model)`, its query heads.
        with_: "zero"; "mean", the head's mean over this call's batch and positions, padded ones left out (for one new
            token of one sequence that is the token's own); or a tensor that broadcasts to (B, number of heads, Q, V).

    >>> from transformers import GPT2Config, GPT2Model
    >>> model = GPT2Model(GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4)).eval()
    >>> model.set_attn_implementation("multihead")
    >>> with torch.no_grad(), mh.hf.ablate(model, {0: [1, 3], 1: 2}):
    ...     without = model(torch.tensor([[5, 6, 7]]))
    """
    if not isinstance(heads, Mapping):
        raise TypeError(f"heads is a {type(heads).__name__}: expected the heads of each layer, {{layer: [head, …]}}")
    with ExitStack() as stack:
        for layer, chosen in heads.items():
            replaced = replacement(chosen, with_)
            edit = lambda t, visible, fn=replaced: fn(t, real_queries(visible, True))  # noqa: E731
            stack.enter_context(_edited(model, layer, edit))
        yield

"""Traces: the seven steps of one call, recorded, with real shapes and numbers."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from multihead.layer import MultiHeadAttention
from multihead.layer.call import Inside
from multihead.layer.edit import tapped
from multihead.layer.picture import render, to_text
from multihead.masks import Mask
from multihead.sizes import Sizes


@dataclass(frozen=True)
class Step:
    """One of the seven: what it does, as a sentence and as a formula, and the trace names of what it makes."""

    number: int
    title: str
    does: str
    formula: str
    names: tuple[str, ...]


STEPS = (
    Step(
        1,
        "project",
        "Every item is multiplied by three matrices: what it asks (q), what it offers (k), what it says (v).",
        "q = x·W_q   k = x·W_k   v = x·W_v",
        ("q", "k", "v"),
    ),
    Step(
        2,
        "split",
        "Heads move in front of positions: from here on each head is a problem of its own.",
        "(N, H, D) → (H, N, D)",
        ("q_heads", "k_heads", "v_heads"),
    ),
    Step(
        3,
        "score",
        "Each head compares every query with every key, hides what the mask hides, and turns each row into weights.",
        "scores = q·kᵀ·scale   weights = softmax(masked)",
        ("scores", "masked", "weights"),
    ),
    Step(
        4,
        "mix",
        "Each row becomes a weighted mean of the value rows it may see.",
        "heads = weights·v",
        ("heads",),
    ),
    Step(5, "transpose back", "Positions move in front of heads again.", "(H, N, V) → (N, H, V)", ("transposed",)),
    Step(
        6,
        "concatenate",
        "The heads are laid side by side.",
        "merged = Merge(head₁ … head_τ)",
        ("merged",),
    ),
    Step(
        7,
        "output",
        "One more matrix, so that heads mix: without it each group of outputs depends on one head only.",
        "output = merged·W_o",
        ("output",),
    ),
)


class Trace(Mapping[str, Tensor]):
    """Every intermediate of one call by name: `t["weights"]`. Print it to see the seven steps.

    Shapes are those of the call: without a batch axis where `x` had none.

    >>> t = mh.trace(mh.MultiHeadAttention(8, heads=2), torch.randn(3, 8))
    >>> list(t)[:4], t["weights"].shape
    (['x', 'q', 'k', 'v'], torch.Size([2, 3, 3]))
    """

    steps = STEPS

    def __init__(
        self,
        tensors: dict[str, Tensor],
        sizes: Sizes,
        labels: Sequence[str],
        key_labels: Sequence[str],
        mask: Mask | Tensor | None,
        layer: MultiHeadAttention | None = None,
    ) -> None:
        self._tensors = tensors
        self.sizes, self.mask = sizes, mask
        self.layer = layer  # the one that was called, as it is now; None where it is not one of ours
        self.options: dict[str, Any] = {}  # scale and softcap of the call, where no layer tells
        self.labels = tuple(labels)  # a name for each query
        self.key_labels = tuple(key_labels)  # a name for each key

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise KeyError(f"{name!r}: this trace has {', '.join(self._tensors)}")
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __str__(self) -> str:
        return to_text(self)

    def __rich__(self) -> Any:
        return render(self)

    def html(self, path: str | os.PathLike) -> None:
        """Write the explorer's page of this trace: one file that works from disk, without Python and without a network.

        The four matrices in it are those that the layer has now.
        """
        from multihead.explorer import write_trace  # it stands on traces, and is not needed before

        write_trace(self, path)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """In a notebook: the explorer's widget, or a still picture."""
        from multihead.explorer.notebook import mimebundle

        return mimebundle(self)

    def _repr_html_(self) -> str:
        """The still picture, for what knows nothing but HTML."""
        from multihead.explorer.still import still

        return still(self)

    def _display_(self) -> Any:
        """The same in marimo."""
        from multihead.explorer.notebook import display

        return display(self)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in self.items())
        return f"Trace({shapes})"


def trace(
    layer: MultiHeadAttention,
    x: Tensor,
    context: Tensor | None = None,
    mask: Mask | Tensor | None = None,
    *,
    labels: Sequence[str] | None = None,
    key_labels: Sequence[str] | None = None,
    **call: Any,
) -> Trace:
    """Run the layer and keep every intermediate of the seven steps.

    The output is that of the same call without a trace, to the last bit: watching does not change which kernel runs.

    Args:
        layer: the layer.
        x: as the layer takes it; `context`, `mask` and further arguments too.
        context: the keys' side in cross-attention.
        mask: what each query may see.
        labels: a name for each row of x (tokens, patches), for printing.
        key_labels: a name for each key, for printing; `labels` in self-attention.
        call: what else the layer takes: `positions=`, `cache=`, …

    >>> layer = mh.MultiHeadAttention(1024, heads=8)
    >>> t = mh.trace(layer, torch.randn(4, 1024), mask=mh.Causal(), labels="I love pepperoni pizza".split())
    >>> t["q"].shape, t["q_heads"].shape, t["weights"].shape
    (torch.Size([4, 8, 128]), torch.Size([8, 4, 128]), torch.Size([8, 4, 4]))
    """
    seen: dict[str, Tensor] = {}

    def record(name: str, t: Tensor) -> Tensor:
        seen[name] = t.detach()
        return t

    with tapped(layer, record, Inside.WATCH):
        layer(x, context, mask, **call)
    tensors = {"x": x.detach()} | ({} if context is None else {"context": context.detach()})
    for step in STEPS:
        for name in step.names:
            if name in seen:  # k and v of a cached context are not made again
                tensors[name] = seen[name] if x.dim() == 3 else seen[name][0]
    queries, keys = tensors["weights"].shape[-2:]
    if key_labels is None and context is None and labels is not None and keys == queries:
        key_labels = labels
    names = []
    for what, given, count in (("labels", labels, queries), ("key_labels", key_labels, keys)):
        if given is not None and len(given) != count:
            raise ValueError(f"{what} has {len(given)} names: expected {count}, one for each row")
        names.append([str(n) for n in range(count)] if given is None else [str(name) for name in given])
    return Trace(tensors, layer.sizes, names[0], names[1], mask, layer)

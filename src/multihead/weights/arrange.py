"""How a checkpoint's tensors hold a layer's parts: side by side, transposed, by groups of heads, or head by head.

A part is one of the layer's own parameters: the matrices `q` (H·D,E), `k` (G·D,C), `v` (G·V,C), `o` (E,H·V), their
biases `q_bias` … `o_bias`, the norms `q_norm` and `k_norm` (D,), and `sinks` (H,). An arrangement joins parts into one
tensor of a checkpoint and splits it again; the second undoes the first to the last bit.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from multihead.sizes import Sizes


def part_shape(part: str, s: Sizes) -> tuple[int, ...]:
    """The shape of a part in a layer of these sizes."""
    rows = {"q": s.H * s.D, "k": s.G * s.D, "v": s.G * s.V, "o": s.E}
    if part in rows:
        return rows[part], {"q": s.E, "o": s.H * s.V}.get(part, s.C)
    return {"q_norm": (s.D,), "k_norm": (s.D,), "sinks": (s.H,)}.get(part) or (rows[part.removesuffix("_bias")],)


def heads_of(part: str, s: Sizes) -> tuple[int, int]:
    """How many heads the rows of q, k or v are, and how wide each."""
    return {"q": (s.H, s.D), "k": (s.G, s.D), "v": (s.G, s.V)}[part.removesuffix("_bias")]


class Arrangement(Protocol):
    def join(self, tensors: Sequence[Tensor], parts: Sequence[str], s: Sizes) -> Tensor: ...

    def split(self, t: Tensor, parts: Sequence[str], s: Sizes) -> Sequence[Tensor]: ...


class Rows:
    """The parts below each other, as `nn.Linear` has them: (rows of all, E)."""

    def join(self, tensors: Sequence[Tensor], parts: Sequence[str], s: Sizes) -> Tensor:
        return torch.cat(list(tensors))

    def split(self, t: Tensor, parts: Sequence[str], s: Sizes) -> Sequence[Tensor]:
        return t.split([part_shape(part, s)[0] for part in parts])


class Columns:
    """The parts side by side, (E, columns of all): `Rows`, transposed. GPT-2's `Conv1D` computes x·W."""

    def join(self, tensors: Sequence[Tensor], parts: Sequence[str], s: Sizes) -> Tensor:
        return torch.cat(list(tensors)).t()

    def split(self, t: Tensor, parts: Sequence[str], s: Sizes) -> Sequence[Tensor]:
        return Rows().split(t.t(), parts, s)


class Groups:
    """q, k and v by key/value head: its H/G query heads, then its key, then its value. (G·((H/G+1)·D+V), E)."""

    def join(self, tensors: Sequence[Tensor], parts: Sequence[str], s: Sizes) -> Tensor:
        return torch.cat([t.unflatten(0, (s.G, -1)) for t in tensors], dim=1).flatten(0, 1)

    def split(self, t: Tensor, parts: Sequence[str], s: Sizes) -> Sequence[Tensor]:
        q, k, v = t.unflatten(0, (s.G, -1)).split([s.H // s.G * s.D, s.D, s.V], dim=1)
        return [part.flatten(0, 1) for part in (q, k, v)]


class Dealt:
    """q (H·D,E) or o (E,H·V) whose query heads were dealt out to the key/value heads in turn: h reads h % G."""

    def join(self, tensors: Sequence[Tensor], parts: Sequence[str], s: Sizes) -> Tensor:
        return self._reordered(tensors[0], parts[0], s, (s.G, s.H // s.G))

    def split(self, t: Tensor, parts: Sequence[str], s: Sizes) -> Sequence[Tensor]:
        return [self._reordered(t, parts[0], s, (s.H // s.G, s.G))]

    def _reordered(self, t: Tensor, part: str, s: Sizes, heads: tuple[int, int]) -> Tensor:
        axis, width = (1, s.V) if part == "o" else (0, s.D)
        return t.unflatten(axis, (*heads, width)).transpose(axis, axis + 1).flatten(axis, axis + 2)


class Kernel:
    """One part with its heads as an axis: q, k, v (E,H,D), their biases (H,D), and o (H,V,E). Keras and Flax."""

    def join(self, tensors: Sequence[Tensor], parts: Sequence[str], s: Sizes) -> Tensor:
        (t,), (part,) = tensors, parts
        if part == "o":
            return t.t().unflatten(0, (s.H, s.V))
        t = t.unflatten(0, heads_of(part, s))
        return t if part.endswith("_bias") else t.permute(2, 0, 1)

    def split(self, t: Tensor, parts: Sequence[str], s: Sizes) -> Sequence[Tensor]:
        (part,) = parts
        if part == "o":
            return [t.flatten(0, 1).t()]
        return [(t if part.endswith("_bias") else t.permute(1, 2, 0)).flatten(0, 1)]


class LessOne:
    """A norm stored as what it adds to 1: Gemma computes x·(1 + w). Exact where 1 + w is, in float32."""

    def join(self, tensors: Sequence[Tensor], parts: Sequence[str], s: Sizes) -> Tensor:
        return tensors[0] - 1

    def split(self, t: Tensor, parts: Sequence[str], s: Sizes) -> Sequence[Tensor]:
        return [t.to(torch.promote_types(t.dtype, torch.float32)) + 1]


def repair(t: Tensor, part: str, s: Sizes, have: str, want: str, dim: int) -> Tensor:
    """`t`, a part that RoPE turns, with each head's numbers moved from the pairing they `have` to the one they `want`.

    "halves" pairs p with p + dim/2, "interleaved" 2p with 2p + 1. q·k does not change if q and k move alike.

    >>> s = Sizes.of(6, heads=1)
    >>> repair(torch.tensor([0, 10, 1, 11, 2, 12]), "q_norm", s, "interleaved", "halves", 6)
    tensor([ 0,  1,  2, 10, 11, 12])
    """
    if have == want:
        return t
    pairs = torch.arange(dim).view((dim // 2, 2) if have == "interleaved" else (2, dim // 2)).t().flatten()
    order = torch.cat([pairs, torch.arange(dim, s.D)]).to(t.device)
    if part.endswith("_norm"):
        return t[order]
    return t.unflatten(0, heads_of(part, s))[:, order].flatten(0, 1)

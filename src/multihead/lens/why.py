"""Why a head attends: one score split into terms that add up to it, by dimension, by RoPE frequency and by source.

A score is q·k·scale, so it is a sum over the head's D dimensions, and over pairs of them where RoPE turns pairs. q and
k are linear in what goes into the layer once the factors of the norms are held at what they were, so it is also a sum
over pairs of sources: whatever was added up to make the item that asks, times whatever was added up to make the one
that is asked.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from multihead.positions import RoPE

if TYPE_CHECKING:
    from multihead.layer import MultiHeadAttention

WIDTH, MOST = 24, 8  # of a bar, in characters; lines for each way to split
BIAS = "bias"


class Sources(NamedTuple):
    """What q and k of one head at one place are sums of: (S, D) each, turned and normalised as they were."""

    names: Sequence[str]
    q: Tensor
    k: Tensor


@dataclass
class Origin:
    """What a lens knows of where its q and k came from."""

    rope: RoPE | None = None
    sources: Callable[[int, int, int, int], Sources] | None = None  # of batch row, head, query, key


@dataclass(frozen=True)
class Why:
    """One score, and the terms that add up to it, in float64; print it for a drawing.

    `dimensions` (D,) · `frequencies` (P,) with `radians` (P,), the turn of each pair per position; where part of the
    head does not turn, the last is that part, with 0 radians · `terms` (S, S), what each source of the query does with
    each source of the key, named by `sources`. The last two are None where the lens does not know them.
    """

    place: tuple[int, int, int, int]  # batch row, head, query, key
    score: float  # q·k·scale
    masked: float  # after softcap, bias and mask
    weight: float
    dimensions: Tensor
    frequencies: Tensor | None = None
    radians: Tensor | None = None
    sources: Sequence[str] = field(default_factory=list)
    terms: Tensor | None = None

    def __str__(self) -> str:
        b, h, q, k = self.place
        row = f", sequence {b}" if b else ""
        lines = [f"head {h}, query {q} for key {k}{row}: score {self.score:+.4g}, weight {self.weight:.3g}"]
        if not math.isclose(self.masked, self.score, rel_tol=1e-3, abs_tol=1e-3):
            lines[0] += f" (after softcap, bias and mask {self.masked:+.4g})"
        if self.terms is not None:
            names = [f"{a} × {b}" for a in self.sources for b in self.sources]
            lines += self._drawn("source, of the query × of the key", names, self.terms.flatten())
        if self.frequencies is not None and self.radians is not None:
            names = [f"{turn:.3g} radians" if turn else "not turned" for turn in self.radians.tolist()]
            lines += self._drawn("RoPE frequency", names, self.frequencies)
        lines += self._drawn("dimension", [f"{d}" for d in range(len(self.dimensions))], self.dimensions)
        return "\n".join(lines)

    def _drawn(self, what: str, names: Sequence[str], terms: Tensor) -> list[str]:
        """The largest terms as bars around 0, and what the others add up to."""
        shown = terms.abs().argsort(descending=True, stable=True)[:MOST].tolist()
        largest = max(float(terms.abs().max()), 1e-30)
        rest = float(terms.sum()) - sum(float(terms[n]) for n in shown)
        rows = [(names[n], float(terms[n])) for n in shown]
        rows += [(f"the other {len(terms) - len(shown)}", rest)] if len(terms) > len(shown) else []
        wide = max(len(name) for name, _ in rows)
        lines = [f"by {what}"]
        for name, value in rows:
            bar = "█" * min(round(abs(value) / largest * WIDTH), WIDTH)
            left, right = (bar, "") if value < 0 else ("", bar)
            lines.append(f"  {name:<{wide}}  {value:>+10.4g}  {left:>{WIDTH}}│{right}".rstrip())
        return lines


def resolve(shape: Sequence[int], batch: int, head: int, query: int, key: int) -> tuple[int, int, int, int]:
    """Where in (B, H, Q, K), with negative numbers counted from the end."""
    found = []
    for name, value, size in zip(("batch", "head", "query", "key"), (batch, head, query, key), shape):
        if isinstance(value, bool) or not isinstance(value, int) or not -size <= value < size:
            raise ValueError(f"{name}={value!r}: expected a number of 0…{size - 1}, or from −{size} on, from the end")
        found.append(value % size)
    return found[0], found[1], found[2], found[3]


def split(
    place: tuple[int, int, int, int],
    q: Tensor,
    k: Tensor,
    scale: float,
    masked: float,
    weight: float,
    origin: Origin | None,
) -> Why:
    """The score of q (D,) and k (D,), which meet at `place`, in terms."""
    q, k = q.double(), k.double()
    dimensions = q * k * scale
    frequencies = radians = terms = None
    names: Sequence[str] = []
    if origin is not None and origin.rope is not None:
        D = len(q)
        radians = origin.rope.frequencies(D, dtype=torch.float64)
        dim = 2 * len(radians)
        shape = (2, dim // 2) if origin.rope.pairing == "halves" else (dim // 2, 2)
        frequencies = dimensions[:dim].view(shape).sum(0 if origin.rope.pairing == "halves" else 1)
        if dim < D:
            frequencies = torch.cat([frequencies, dimensions[dim:].sum()[None]])
            radians = torch.cat([radians, radians.new_zeros(1)])
    if origin is not None and origin.sources is not None:
        names, of_q, of_k = origin.sources(*place)
        terms = of_q @ of_k.T * scale  # (S, S)
    return Why(place, float(dimensions.sum()), masked, weight, dimensions, frequencies, radians, names, terms)


def in_terms_of_x(
    layer: "MultiHeadAttention",
    x: Tensor,
    context: Tensor | None,
    positions: Tensor | None,
    context_positions: Tensor | None,
) -> Origin:
    """Where q and k of a call of a layer come from: x (or the context) and the biases."""
    x = x[None] if x.dim() == 2 else x
    other = x if context is None else context[None] if context.dim() == 2 else context
    where = positions if context is None else context_positions

    def sources(b: int, h: int, query: int, key: int) -> Sources:
        given = (x[b, query][None], other[b, key][None])
        q, k = _made(layer, given, (), h, (_at(positions, b, query), _at(where, b, key)))
        return Sources(["x" if context is None else "x, context", BIAS], q, k)

    return Origin(layer.rope, sources if _plain(layer) else None)


def in_terms_of(
    layer: "MultiHeadAttention", norm: nn.LayerNorm, made: Callable[[], tuple[Tensor, Sequence[str]]]
) -> Origin:
    """The same for a layer behind a norm of what named parts, (S, B, N, E), add up to; biases are one more."""

    def sources(b: int, h: int, query: int, key: int) -> Sources:
        parts, names = made()
        given = (parts[:, b, query], parts[:, b, key])
        q, k = _made(layer, given, (norm,), h, (query, key))
        return Sources([*names, BIAS], q, k)

    return Origin(layer.rope, sources if _plain(layer) else None)


def _plain(layer: "MultiHeadAttention") -> bool:
    """Whether q and k are what the two matrices make, and nothing between changes them."""
    return not layer.taps and all(
        type(p) is nn.Linear and not (p._forward_hooks or p._forward_pre_hooks or "forward" in vars(p))
        for p in (layer.q_proj, layer.k_proj)
    )


def _made(
    layer: "MultiHeadAttention",
    given: tuple[Tensor, Tensor],
    norms: Sequence[nn.LayerNorm],
    h: int,
    positions: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Q of head h and the k it reads, source by source, (S + 1, D) each: the last is what the biases make."""
    group = layer.sizes.H // layer.sizes.G
    made = []
    for parts, projection, norm, head, position in zip(
        given, (layer.q_proj, layer.k_proj), (layer.q_norm, layer.k_norm), (h, h // group), positions
    ):
        t = parts.detach().double()
        t = torch.cat([t, t.new_zeros(1, t.shape[1])])
        for before in norms:
            t = _normalised(t, before)
        rows = slice(head * layer.sizes.D, (head + 1) * layer.sizes.D)
        t = t @ projection.weight[rows].detach().double().T
        if projection.bias is not None:
            t[-1] += projection.bias[rows].detach().double()
        if norm is not None:
            t = t * (t.sum(0).square().mean() + (norm.eps or 0.0)).rsqrt() * norm.weight.detach().double()
        if layer.rope is not None:
            t = layer.rope.rotate(t[:, None], torch.tensor([position], device=t.device))[:, 0]
        made.append(t)
    return made[0], made[1]


def _normalised(t: Tensor, norm: nn.LayerNorm) -> Tensor:
    """LayerNorm of what t, (S, E), adds up to, source by source: its deviation is held at what it was."""
    t = t - t.mean(-1, keepdim=True)
    t = t * (t.sum(0).square().mean() + norm.eps).rsqrt()
    if norm.weight is not None:
        t = t * norm.weight.detach().double()
    if norm.bias is not None:
        t[-1] = t[-1] + norm.bias.detach().double()
    return t


def _at(positions: Tensor | None, b: int, n: int) -> int:
    if positions is None:
        return n
    return int(positions[n] if positions.dim() == 1 else positions[b if positions.shape[0] > 1 else 0, n])

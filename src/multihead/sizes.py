"""Sizes: what B, Q, K, E, H, G, D and V are to each other, and the errors when they do not fit.

`B` batch · `Q` query positions · `K` key positions · `E` model width · `H` query heads · `G` key/value heads ·
`D` head width of q and k · `V` head width of v · `C` width of the context (E in self-attention).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


def require_int(name: str, value: object, at_least: int) -> int:
    """`value`, if it is an integer of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: expected an int of at least {at_least}")
    if value < at_least:
        raise ValueError(f"{name}={value}: expected at least {at_least}")
    return value


@dataclass(frozen=True)
class Sizes:
    """The sizes of one layer.

    >>> Sizes.of(1024, heads=8)
    Sizes(E=1024, H=8, G=8, D=128, V=128, C=1024)
    >>> Sizes.of(1024, heads=7)
    Traceback (most recent call last):
    ...
    ValueError: heads=7 does not divide E=1024: give head_dim=, or a width that is a multiple of 7
    """

    E: int
    H: int
    G: int
    D: int
    V: int
    C: int

    @staticmethod
    def of(
        width: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        context_dim: int | None = None,
    ) -> "Sizes":
        """The sizes that a layer's arguments mean, each checked."""
        E, H = require_int("width", width, 1), require_int("heads", heads, 1)
        G = H if kv_heads is None else require_int("kv_heads", kv_heads, 1)
        if H % G:
            divisors = ", ".join(str(n) for n in range(1, H + 1) if H % n == 0)
            raise ValueError(f"kv_heads={G} does not divide heads={H}: expected one of {divisors}")
        if head_dim is None and E % H:
            raise ValueError(f"heads={H} does not divide E={E}: give head_dim=, or a width that is a multiple of {H}")
        D = E // H if head_dim is None else require_int("head_dim", head_dim, 1)
        V = D if value_dim is None else require_int("value_dim", value_dim, 1)
        C = E if context_dim is None else require_int("context_dim", context_dim, 1)
        return Sizes(E, H, G, D, V, C)

    def shapes(self, tokens: int, context: int | None = None, bias: bool = True) -> Iterator["Row"]:
        """Every parameter and every intermediate of the seven steps for one sequence of `tokens`."""
        E, H, G, D, V, C = self.E, self.H, self.G, self.D, self.V, self.C
        N, K = tokens, tokens if context is None else context
        for name, width, heads, dim, rows in (("q", E, H, D, N), ("k", C, G, D, K), ("v", C, G, V, K)):
            yield Row(1, f"W_{name}", (width, heads, dim), parameters=width * heads * dim)
            if bias:
                yield Row(1, f"b_{name}", (heads, dim), parameters=heads * dim)
            yield Row(1, name, (rows, heads, dim), flops=2 * rows * width * heads * dim)
        yield Row(2, "q_heads", (H, N, D))
        yield Row(2, "k_heads", (G, K, D))
        yield Row(2, "v_heads", (G, K, V))
        yield Row(3, "scores", (H, N, K), flops=2 * H * N * K * D)
        yield Row(3, "masked", (H, N, K))
        yield Row(3, "weights", (H, N, K))
        yield Row(4, "heads", (H, N, V), flops=2 * H * N * K * V)
        yield Row(5, "transposed", (N, H, V))
        yield Row(6, "merged", (N, H * V))
        yield Row(7, "W_o", (H, V, E), parameters=H * V * E)
        if bias:
            yield Row(7, "b_o", (E,), parameters=E)
        yield Row(7, "output", (N, E), flops=2 * N * H * V * E)


@dataclass(frozen=True)
class Row:
    """A parameter or an intermediate: the step it belongs to, its shape, what it holds and what it costs.

    A multiplication with an addition counts as two floating-point operations; only matrix products are counted.
    """

    step: int
    name: str
    shape: tuple[int, ...]
    parameters: int = 0
    flops: int = 0


SOFTCAP_ROOM = 2.0**24


def check_numbers(
    scale: float | None, softcap: float | None, dropout: float, dtype: torch.dtype = torch.float64
) -> None:
    """Refuse what would turn every score into NaN, or lose a gradient: a scale that is a tensor. `dtype`: of q.

    A softcap stays `SOFTCAP_ROOM` away from the ends of the dtype in which scores are computed: scores are divided by
    it, and gradients multiplied, and neither may end in what that dtype cannot hold.
    """
    for name, value in (("scale", scale), ("softcap", softcap), ("dropout", dropout)):
        if isinstance(value, Tensor | str) or (value is None and name == "dropout"):
            raise TypeError(f"{name} is a {type(value).__name__}: expected a number")
    exact = torch.promote_types(dtype, torch.float32)
    ends = torch.finfo(exact)
    if scale is not None and not -ends.max <= scale <= ends.max:
        within = f", at most {ends.max:.3g} in size" if abs(scale) < math.inf else ""
        raise ValueError(
            f"scale={_shown(scale)}: expected a finite number, or None for 1/√D{_scores_in(exact, within)}"
        )
    least, most = ends.tiny * SOFTCAP_ROOM, ends.max / SOFTCAP_ROOM
    if softcap is not None and not least <= softcap <= most:
        within = f", {least:.2g} to {most:.2g}" if 0 < softcap < math.inf else ""
        expected = "a number above 0, or None" + _scores_in(exact, within)
        raise ValueError(f"softcap={_shown(softcap)}: expected {expected}")
    if not 0 <= dropout <= 1:
        raise ValueError(f"dropout={_shown(dropout)}: expected a probability, 0 to 1")


def _scores_in(dtype: torch.dtype, within: str) -> str:
    return within and f"; scores are computed in {str(dtype).removeprefix('torch.')}{within}"


def _shown(number: float) -> str:
    """A number as errors show it: of an integer beyond every float, Python may refuse to write the digits."""
    try:
        float(number)
    except OverflowError:
        return f"an integer of {int(number).bit_length()} bits"
    return str(number)


def check_floating(what: str, dtype: torch.dtype) -> None:
    """Refuse what is not floating, and float8: torch can store it but not compute with it. `what`: "x has dtype "."""
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise TypeError(f"{what}{dtype}: expected a floating dtype of 16, 32 or 64 bits")


def describe(t: Tensor) -> str:
    """A tensor as error messages show it: `(2, 3) float32 on cpu`."""
    return f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device}"


def check_attend(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse q, k, v that do not fit each other: q (B,H,Q,D), k (B,G,K,D), v (B,G,K,V)."""
    for name, t, axes in (("q", q, "(B,H,Q,D)"), ("k", k, "(B,G,K,D)"), ("v", v, "(B,G,K,V)")):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} is a {type(t).__name__}: expected a tensor {axes}")
        if t.is_nested:
            raise TypeError(f"{name} is a nested tensor: expected a padded one {axes}, and mask=Padding(lengths)")
        if t.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(t.shape)}: expected four axes {axes}")
        check_floating(f"{name} has dtype ", t.dtype)
        if t.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {t.dtype} but q has {q.dtype}: expected one dtype for q, k and v")
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device} but q is on {q.device}: expected one device for q, k and v")
    (B, H, _, D), (_, G, K, _) = q.shape, k.shape
    if k.shape[0] != B or v.shape[0] != B:
        raise ValueError(f"q, k, v have batches {B}, {k.shape[0]}, {v.shape[0]}: expected one B")
    if k.shape[3] != D:
        raise ValueError(f"k has head width {k.shape[3]} but q has D={D}: expected the same D")
    if D == 0:
        raise ValueError("q and k have head width D=0: expected at least 1")
    if v.shape[1] != G or v.shape[2] != K:
        raise ValueError(
            f"v has {v.shape[1]} heads of {v.shape[2]} keys but k has G={G} heads of K={K}: expected the same"
        )
    if G == 0 or H % G:
        raise ValueError(f"q has H={H} heads and k has G={G}: expected H to be a multiple of G")

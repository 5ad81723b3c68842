"""Where an item stands: attention by itself sees a set, and each of these tells it the order.

RoPE turns q and k by an angle that grows with position, before step 3. ALiBi, T5 and Swin make a bias (H,Q,K) that
step 3 adds to the scores. As everywhere, query q stands at position i = q + (keys − queries): the last query stands
at the last key. No module here keeps a buffer or branches on a tensor's values, so that all of it compiles, exports,
and runs on any device, `meta` included. N is Q or K: RoPE treats q and k alike.

Longer than other files because each way of saying a position has its arguments and an example beside it.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from multihead.tensors import holds_integers

Device = torch.device | str | None
Length = int | Int[Tensor, "*B"] | None
PAIRINGS = ("halves", "interleaved")
MOST_ROWS = 2**17  # positions that a table of angles has at most
MOST_TABLES = 32
Table = tuple[Tensor, Tensor]  # cosines and sines, (rows, pairs)
_tables: dict[tuple["RoPE", int, torch.device, torch.dtype], Table] = {}


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023, arXiv:2306.15595): every position is divided by `factor`.

    >>> RoPE(scaling=LinearScaling(4.0)).frequencies(4)
    tensor([0.2500, 0.0025])
    """

    factor: float

    def __post_init__(self) -> None:
        _check_positive("factor", self.factor)

    def frequencies(self, base: float, exponents: Float[Tensor, " pairs"], length: Length) -> Float[Tensor, " pairs"]:
        return 1.0 / base**exponents / self.factor


@dataclass(frozen=True)
class NTKScaling:
    """NTK-aware scaling (bloc97 2023; YaRN, arXiv:2309.00071): a larger base slows the slow pairs, spares the fast.

    The slowest pair slows by exactly `factor`, the fastest keeps its pace. With `original_length` the scaling is
    dynamic, as Hugging Face calls it: none up to that length, and beyond it the slowest pair slows by
    1 + factor · (length / original_length − 1). An item's angle then depends on how long the whole sequence is, so
    keys that a cache holds keep the angles of the shorter sequence they were rotated in.

    >>> RoPE(scaling=NTKScaling(4.0)).frequencies(4)
    tensor([1.0000, 0.0025])
    >>> RoPE(scaling=NTKScaling(4.0, original_length=100)).frequencies(4, length=150)
    tensor([1.0000, 0.0033])
    """

    factor: float
    original_length: int | None = None

    def __post_init__(self) -> None:
        _check_positive("factor", self.factor)
        if self.original_length is not None:
            _check_at_least("original_length", self.original_length, 1)

    def frequencies(
        self, base: float, exponents: Float[Tensor, " pairs"], length: Length
    ) -> Float[Tensor, "*rows pairs"]:
        slowdown: float | Tensor = self.factor
        if self.original_length is not None:
            reach = torch.as_tensor(0 if length is None else length, device=exponents.device)[..., None]
            beyond = self.factor * reach.to(exponents.dtype) / self.original_length - (self.factor - 1)
            slowdown = torch.where(reach > self.original_length, beyond, 1.0)
        dim = 2 * len(exponents)
        power = dim / max(dim - 2, 1)  # dim=2 has one pair, at frequency 1 whatever the base
        return 1.0 / (base * slowdown**power) ** exponents


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling (arXiv:2407.21783): slow pairs turn `factor` times slower, fast ones as before.

    A pair that completes fewer than `low_freq_factor` turns in `original_length` positions is slow, one that
    completes more than `high_freq_factor` is fast, and in between the two blend.

    >>> RoPE(scaling=Llama3Scaling(8.0)).frequencies(4)
    tensor([1.0000, 0.0100])
    >>> RoPE(scaling=Llama3Scaling(4.0, original_length=512)).frequencies(4)
    tensor([1.0000, 0.0025])
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            _check_positive(name, getattr(self, name))
        _check_at_least("original_length", self.original_length, 1)
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor!r} is not below high_freq_factor={self.high_freq_factor!r}: "
                "the blend between slow and fast pairs runs from the lower to the higher"
            )

    def frequencies(self, base: float, exponents: Float[Tensor, " pairs"], length: Length) -> Float[Tensor, " pairs"]:
        plain = 1.0 / base**exponents
        turns = self.original_length / (2 * math.pi / plain)
        fast = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return (1 - fast) * plain / self.factor + fast * plain


@dataclass(frozen=True)
class RoPE:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864), for q and k before step 3.

    Pairs of a head's numbers are points in the plane, and pair p of an item at position n turns by the angle
    n · base^(−2p/dim). Of a rotation of q by its position and of k by its own, q·k sees only the difference.
    `pairing` says which numbers make a pair: "halves" joins p and p + dim/2 (GPT-NeoX, Llama in Hugging Face's
    layout), "interleaved" joins 2p and 2p + 1 (the paper, GPT-J, Llama in Meta's layout). Where `dim` is less than
    D the last D − dim numbers stay as they are (partial width: GPT-NeoX, Phi).

    >>> q = torch.tensor([[1.0, 0.0], [1.0, 0.0]])  # two items, D=2
    >>> RoPE().rotate(q, torch.tensor([0, 1]))  # at positions 0 and 1: the second turns by 1 radian
    tensor([[1.0000, 0.0000],
            [0.5403, 0.8415]])
    """

    base: float = 10000.0
    dim: int | None = None  # how many of the D numbers turn; None: all
    pairing: str = "halves"
    scaling: LinearScaling | NTKScaling | Llama3Scaling | None = None  # how it reaches past its training length

    def __post_init__(self) -> None:
        _check_positive("base", self.base)
        if self.dim is not None:
            _check_at_least("dim", self.dim, 2)
            if self.dim % 2:
                raise ValueError(f"dim={self.dim} is odd, and RoPE turns pairs: give an even dim")
        if self.pairing not in PAIRINGS:
            raise ValueError(f"pairing={self.pairing!r} is unknown: expected one of {PAIRINGS}")
        if not isinstance(self.scaling, LinearScaling | NTKScaling | Llama3Scaling | None):
            raise ValueError(f"scaling={self.scaling!r}: expected a LinearScaling, NTKScaling, Llama3Scaling or None")

    def frequencies(
        self, D: int, *, length: Length = None, device: Device = None, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*rows pairs"]:
        """Radians per position of each pair, (dim/2,). Only dynamic NTK scaling reads `length`, one or one per row.

        >>> RoPE().frequencies(8)
        tensor([1.0000, 0.1000, 0.0100, 0.0010])
        """
        dim = self._width(D)
        # The operations, and their order, are those of Hugging Face: at position 100,000 a difference in the last
        # bit of a frequency is a hundredth of a radian.
        exponents = torch.arange(0, dim, 2, device=device, dtype=dtype) / dim
        if self.scaling is None:
            return 1.0 / self.base**exponents
        return self.scaling.frequencies(self.base, exponents, length)

    def rotate(
        self, x: Float[Tensor, "*heads N D"], positions: Int[Tensor, "*B N"], *, length: Length = None
    ) -> Float[Tensor, "*heads N D"]:
        """Turn each row of `x`, e.g. q (B,H,N,D), by its position: (N,), or (B,N) where batch rows differ.

        Angles and products are float32 (float64 for float64), and the result has the dtype of `x`. `length` is for
        dynamic NTK scaling: how long the sequence is, one or (B,), where not each row's highest position + 1.

        >>> k = torch.randn(2, 3, 5, 8)  # (B, H, N, D)
        >>> RoPE(dim=4).rotate(k, torch.arange(5) + 7).shape
        torch.Size([2, 3, 5, 8])
        """
        _check_rotation(x, positions, length)
        dtype = torch.promote_types(x.dtype, torch.float32)
        return self.turn(x, *self.cos_sin(x.shape[-1], positions, length=length, dtype=dtype))

    def cos_sin(
        self, D: int, positions: Int[Tensor, "*B N"], *, length: Length = None, dtype: torch.dtype = torch.float32
    ) -> tuple[Float[Tensor, "*B N pairs"], Float[Tensor, "*B N pairs"]]:
        """The cosine and the sine of each angle: what `turn` needs, for q and for k alike.

        >>> cos, sin = RoPE().cos_sin(8, torch.arange(5))
        >>> cos.shape
        torch.Size([5, 4])
        """
        if length is None and isinstance(self.scaling, NTKScaling):
            length = nn.functional.pad(positions, (0, 1)).amax(-1) + 1  # padded, for N=0 has no maximum
        frequencies = self.frequencies(D, length=length, device=positions.device, dtype=dtype)
        angles = positions.to(dtype)[..., None] * frequencies[..., None, :]  # (N, dim/2) or (B, N, dim/2)
        return angles.cos(), angles.sin()

    def table(self, D: int, rows: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Table | None:
        """`cos_sin` of positions 0, 1, 2 … `rows` − 1 and more, made once for all layers with these settings.

        None where an angle is not a function of the position alone, or the table would be too long.

        >>> cos, sin = RoPE().table(8, 5, torch.device("cpu"))
        >>> cos is RoPE().table(8, 4, torch.device("cpu"))[0]
        True
        """
        if rows > MOST_ROWS or (isinstance(self.scaling, NTKScaling) and self.scaling.original_length is not None):
            return None
        key = (self, D, device, dtype)
        found = _tables.get(key)
        if found is None or found[0].shape[0] < rows:
            rows = max(512, 1 << (rows - 1).bit_length())
            with torch.inference_mode(False), torch.no_grad():  # others than this call will use it
                found = self.cos_sin(D, torch.arange(rows, device=device), dtype=dtype)
            while len(_tables) >= MOST_TABLES:
                _tables.pop(next(iter(_tables)), None)
            _tables[key] = found
        return found

    def turn(
        self, x: Float[Tensor, "*heads N D"], cos: Float[Tensor, "*B N pairs"], sin: Float[Tensor, "*B N pairs"]
    ) -> Float[Tensor, "*heads N D"]:
        """Turn each row of `x` by the angles with these cosines and sines."""
        if cos.ndim == 3:  # every head alike
            cos, sin = (t.reshape(t.shape[0], *[1] * (x.ndim - 3), *t.shape[1:]) for t in (cos, sin))
        D, dim, dtype = x.shape[-1], self._width(x.shape[-1]), cos.dtype
        shape, axis = ((2, dim // 2), -2) if self.pairing == "halves" else ((dim // 2, 2), -1)
        a, b = x[..., :dim].to(dtype).unflatten(-1, shape).unbind(axis)  # (…, N, dim/2) each
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), axis).flatten(-2).to(x.dtype)
        return turned if dim == D else torch.cat((turned, x[..., dim:]), -1)

    def _width(self, D: int) -> int:
        if self.dim is None and D % 2:
            raise ValueError(f"D={D} is odd, and RoPE turns pairs: give an even head width, or an even dim below {D}")
        if self.dim is not None and self.dim > D:
            raise ValueError(f"dim={self.dim} is more than the head width D={D}: expected dim <= D, or None for all")
        return D if self.dim is None else self.dim


def alibi_slopes(heads: int, *, device: Device = None, dtype: torch.dtype = torch.float32) -> Float[Tensor, " H"]:
    """How fast each head's attention fades with distance (Press et al. 2021, arXiv:2108.12409).

    For a power of two, 2^(−8/H), 2^(−16/H) … 2^(−8). Otherwise those of the power of two below, then every other one
    of the power of two above, as the authors' code has it.

    >>> alibi_slopes(6)
    tensor([0.2500, 0.0625, 0.0156, 0.0039, 0.5000, 0.1250])
    """
    _check_at_least("heads", heads, 1)
    below = 1 << (heads.bit_length() - 1)
    steps = [h + 1 for h in range(below)] + [h + 0.5 for h in range(heads - below)]
    return torch.tensor([2 ** (-8 * step / below) for step in steps], device=device, dtype=dtype)


def alibi(
    heads: int, queries: int, keys: int, *, device: Device = None, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "H Q K"]:
    """Attention with linear biases (arXiv:2108.12409): minus each head's slope times the distance of query and key.

    The paper looks only to the left. Keys to the right, where a mask lets them be seen, count by distance as well.

    >>> alibi(1, 2, 3) * 256  # one head: slope 1/256
    tensor([[[-1.,  0., -1.],
             [-2., -1.,  0.]]])
    """
    wide = torch.promote_types(dtype, torch.float32)  # bfloat16 is exact for integers up to 256 only
    slopes = alibi_slopes(heads, device=device, dtype=wide)
    return (slopes[:, None, None] * -_relative(queries, keys, device).abs()).to(dtype)


def relative_buckets(
    relative: Int[Tensor, "*shape"], *, bidirectional: bool = True, buckets: int = 32, max_distance: int = 128
) -> Int[Tensor, "*shape"]:
    """Which of T5's buckets a relative position (key − query) falls in (Raffel et al. 2019, arXiv:1910.10683).

    Half of the buckets hold one distance each, the others ever wider ranges, up to `max_distance`; beyond it all fall
    in the last. `bidirectional` gives half of all buckets to keys on the right; else those share bucket 0.

    >>> relative_buckets(torch.tensor([-200, -20, -2, -1, 0, 1, 2, 20, 200]))
    tensor([15, 10,  2,  1,  0, 17, 18, 26, 31])
    """
    _check_buckets(bidirectional, buckets, max_distance)
    _check_integers("relative", relative)
    side = buckets // 2 if bidirectional else buckets
    exact = side // 2
    # A bucket is the number of bounds at or below the distance. Integer bounds make it the same on every device
    # and compiled, where a logarithm per pair may round either way; 1e-6 keeps rounding from raising an exact one.
    growing = [exact * (max_distance / exact) ** (step / (side - exact)) for step in range(1, side - exact)]
    bounds = [*range(1, exact + 1), *(math.ceil(bound - 1e-6) for bound in growing)]
    relative = relative.long()  # the distance of −128 is no int8
    distance = relative.abs() if bidirectional else (-relative).clamp(min=0)
    found = torch.bucketize(distance, torch.tensor(bounds, device=relative.device), right=True)
    return found + side * (relative > 0) if bidirectional else found


class T5Bias(nn.Module):
    """T5's relative position bias (arXiv:1910.10683): one learned number for each bucket of distances and head.

    `table` (buckets, H) is Hugging Face's `relative_attention_bias.weight`. It starts at zero: no preference.

    >>> T5Bias(heads=2)(3, 5).shape  # 3 queries, standing at the last 3 of 5 keys
    torch.Size([2, 3, 5])
    """

    def __init__(
        self,
        heads: int,
        *,
        bidirectional: bool = True,
        buckets: int = 32,
        max_distance: int = 128,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_at_least("heads", heads, 1)
        _check_buckets(bidirectional, buckets, max_distance)
        self.bidirectional, self.buckets, self.max_distance = bidirectional, buckets, max_distance
        self.table = nn.Parameter(torch.empty(buckets, heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.table)

    def forward(self, queries: int, keys: int) -> Float[Tensor, "H Q K"]:
        relative = _relative(queries, keys, self.table.device)
        both, buckets, farthest = self.bidirectional, self.buckets, self.max_distance
        found = relative_buckets(relative, bidirectional=both, buckets=buckets, max_distance=farthest)
        return self.table.T[:, found]


class SwinBias(nn.Module):
    """Swin's relative position bias (Liu et al. 2021, arXiv:2103.14030), for patches of a window (height, width).

    One learned number for each offset in rows, offset in columns and head. `table` ((2h−1)(2w−1), H) is Hugging
    Face's `relative_position_bias_table`. It starts at zero: no preference. With `class_token`, as BEiT has it
    (arXiv:2106.08254), a token stands before the patches, and three more rows say what it adds as a query, as a key
    and with itself.

    >>> SwinBias(heads=2, window=(3, 5))().shape
    torch.Size([2, 15, 15])
    >>> SwinBias(heads=2, window=(3, 5), class_token=True)().shape
    torch.Size([2, 16, 16])
    """

    def __init__(
        self,
        heads: int,
        window: tuple[int, int],
        *,
        class_token: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_at_least("heads", heads, 1)
        if not isinstance(window, tuple | list) or len(window) != 2:
            raise ValueError(f"window={window!r}: expected (height, width), in patches")
        (self.height, self.width), self.class_token = window, class_token
        _check_at_least("window height", self.height, 1)
        _check_at_least("window width", self.width, 1)
        offsets = (2 * self.height - 1) * (2 * self.width - 1)
        self.table = nn.Parameter(torch.empty(offsets + 3 * class_token, heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.table)

    def forward(self) -> Float[Tensor, "H items items"]:
        patch = torch.arange(self.height * self.width, device=self.table.device)
        row, column = patch // self.width, patch % self.width
        rows = row[:, None] - row + self.height - 1  # from 0 to 2h − 2
        columns = column[:, None] - column + self.width - 1
        offsets = rows * (2 * self.width - 1) + columns
        if self.class_token:
            last = len(self.table)
            offsets = nn.functional.pad(offsets, (1, 0), value=last - 2)
            offsets = nn.functional.pad(offsets, (0, 0, 1, 0), value=last - 3)
            offsets[0, 0] = last - 1
        return self.table.T[:, offsets]


def _relative(queries: int, keys: int, device: Device) -> Int[Tensor, "Q K"]:
    """Key − i for every query and key, where query q stands at i = q + (keys − queries)."""
    _check_at_least("queries", queries, 0)
    _check_at_least("keys", keys, 0)
    i = torch.arange(queries, device=device) + (keys - queries)
    return torch.arange(keys, device=device) - i[:, None]


def _check_positive(name: str, value: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r}: expected a finite number above 0")


def _check_at_least(name: str, value: int, least: int) -> None:
    # A size is a SymInt while torch.export traces a dynamic shape.
    if not isinstance(value, int | torch.SymInt) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r}: expected an integer of at least {least}")


def _check_integers(name: str, tensor: Tensor) -> None:
    if not holds_integers(tensor):
        raise ValueError(f"{name} has dtype {tensor.dtype}: expected integers")


def _check_buckets(bidirectional: bool, buckets: int, max_distance: int) -> None:
    _check_at_least("buckets", buckets, 4 if bidirectional else 2)
    if bidirectional and buckets % 2:
        raise ValueError(f"buckets={buckets} is odd, and bidirectional=True halves it: give an even number")
    _check_at_least("max_distance", max_distance, buckets // (4 if bidirectional else 2) + 1)


def _check_rotation(x: Tensor, positions: Tensor, length: Length) -> None:
    if x.ndim < 2 or not x.dtype.is_floating_point:
        raise ValueError(f"x has shape {tuple(x.shape)} and dtype {x.dtype}: expected floats, (…, N, D)")
    _check_integers("positions", positions)
    N, B = x.shape[-2], x.shape[0] if x.ndim > 2 else None
    # ndim before sizes: a comparison of sizes that comes out false narrows what torch.export allows.
    fits = positions.ndim == 1 or (positions.ndim == 2 and B is not None and positions.shape[0] in (B, 1))
    if not fits or positions.shape[-1] != N:
        either = f"(N,)=({N},)" + ("" if B is None else f" or (B,N)=({B}, {N})")
        raise ValueError(f"positions has shape {tuple(positions.shape)}, and x {tuple(x.shape)}: expected {either}")
    if isinstance(length, Tensor):
        _check_integers("length", length)
        if length.ndim > 1 or (length.ndim == 1 and length.shape[0] != B):
            either = "one number" + ("" if B is None else f" or (B,)=({B},)")
            raise ValueError(f"length has shape {tuple(length.shape)}, and x {tuple(x.shape)}: expected {either}")
    elif length is not None:
        _check_at_least("length", length, 0)

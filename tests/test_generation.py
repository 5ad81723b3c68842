"""The layer with RoPE, QK-norm and cache as one native call, against the steps written out in float64.

The oracle below shares no code with the package: it keeps every token of every row in a list, turns pairs of numbers as
complex numbers, and asks a plain function of two positions what may be seen.

Longer than other files because its oracle stands beside every use of it.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead import kernel
from multihead.kernel import eligible
from multihead.layer import MultiHeadAttention
from multihead.positions import NTKScaling

pytestmark = pytest.mark.skipif(kernel.module is None, reason=f"the native module is {kernel.missing}")

E, H, G, D, V, B = 40, 6, 2, 16, 12, 3
MOST = 24  # tokens of a row


@pytest.fixture
def one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever does not go to the kernel as a whole fails."""

    def refuse(*_: Any) -> Tensor:
        raise AssertionError("the seven steps ran one by one")

    monkeypatch.setattr(MultiHeadAttention, "_seven_steps", refuse)


# The oracle --------------------------------------------------------------------------------------------------------


def forwards(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


def backwards(x: Tensor, y: Tensor) -> Tensor:
    """The same product, summed in the opposite order: on a handful of numbers one order is sometimes lucky."""
    total = torch.zeros(*x.shape[:-1], y.shape[-1], dtype=x.dtype)
    for i in reversed(range(x.shape[-1])):
        total = total + x[..., i, None] * y[i]
    return total


class Oracle:
    """The layer token by token, every operation in `dtype`."""

    def __init__(self, layer: MultiHeadAttention, dtype: torch.dtype, product: Callable):
        self.layer, self.dtype, self.product = layer, dtype, product
        self.keys: list[list[Tensor]] = [[] for _ in range(B)]  # (G, D) each
        self.values: list[list[Tensor]] = [[] for _ in range(B)]

    def project(self, name: str, x: Tensor, width: int) -> Tensor:
        p = self.layer.get_submodule(name)
        y = self.product(x, p.weight.detach().to(self.dtype).T.contiguous())
        return (y if p.bias is None else y + p.bias.detach().to(self.dtype)).unflatten(-1, (-1, width))

    def ready(self, heads: Tensor, norm: Any, positions: list[int]) -> Tensor:
        """QK-norm and RoPE of (N, heads, D)."""
        if norm is not None:
            mean = (heads * heads).mean(-1, keepdim=True)
            heads = heads / (mean + norm.eps).sqrt() * norm.weight.detach().to(self.dtype)
        rope = self.layer.rope
        if rope is None:
            return heads
        dim = rope.dim or D
        wide = torch.promote_types(self.dtype, torch.float32)
        turning, rest = heads[..., :dim].to(wide), heads[..., dim:]
        pairs = turning.unflatten(-1, (2, -1)).mT if rope.pairing == "halves" else turning.unflatten(-1, (-1, 2))
        angle = torch.tensor(positions, dtype=wide)[:, None] / rope.base ** (torch.arange(0, dim, 2, dtype=wide) / dim)
        turned = torch.complex(pairs[..., 0], pairs[..., 1]) * torch.polar(torch.ones_like(angle), angle)[:, None]
        pairs = torch.view_as_real(turned)
        turning = pairs.mT.flatten(-2) if rope.pairing == "halves" else pairs.flatten(-2)
        return torch.cat([turning.to(self.dtype), rest], -1)

    def call(self, x: Tensor, real: list[int], sees: Callable[[int, int, int], bool], stored: Any = None) -> Tensor:
        """One call with x (B, N, E), `real[b]` tokens of which join row b; `sees(b, i, j)`: may query i see key j?"""
        y = torch.zeros(x.shape, dtype=self.dtype)
        for b in range(x.shape[0]):
            before, n = len(self.keys[b]), real[b]
            own, where = x[b, :n].to(self.dtype), list(range(before, before + n))
            q = self.ready(self.project("q_proj", own, D), self.layer.q_norm, where)
            k = self.ready(self.project("k_proj", own, D), self.layer.k_norm, where)
            v = self.project("v_proj", own, V)
            self.keys[b] += list(k)
            self.values[b] += list(v)
            if stored is not None:  # attend to what a cache of fewer bits has made of them
                self.made = k, v
                self.keys[b], self.values[b] = (list(t[b, :, : before + n].to(self.dtype).unbind(1)) for t in stored)
            K = before + n
            heads = torch.zeros(x.shape[1], H, V, dtype=self.dtype)
            hidden = torch.tensor([[not sees(b, i, j) for j in range(K)] for i in where]).view(n, K)
            for h in range(H if n else 0):
                keys, values = (torch.stack([row[h * G // H] for row in of[b]]) for of in (self.keys, self.values))
                scores = self.product(q[:, h], keys.T.contiguous()) * self.layer.scale
                if self.layer.softcap is not None:
                    scores = (scores / self.layer.softcap).tanh() * self.layer.softcap
                scores = scores.masked_fill(hidden, -torch.inf)
                if self.layer.sinks is not None:
                    scores = torch.cat([scores, self.layer.sinks.detach()[h].to(self.dtype).expand(n, 1)], -1)
                weights = (scores - scores.amax(-1, keepdim=True).clamp(min=torch.finfo(self.dtype).min)).exp()
                weights = (weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(self.dtype).tiny))[:, :K]
                heads[:n, h] = self.product(weights, values)
            y[b] = self.project("o_proj", heads.flatten(1), E)[:, 0]
        return y


def within_bound(ours: list[Tensor], exact: list[Tensor], plain: list[list[Tensor]]) -> None:
    """The largest error of all calls is at most twice that of the plain implementation, and one rounding."""

    def error(found: list[Tensor]) -> float:
        return max(float((y.double() - right).abs().max()) for y, right in zip(found, exact))

    largest = max(float(right.abs().max()) for right in exact)
    assert error(ours) <= 2 * max(map(error, plain)) + torch.finfo(ours[0].dtype).eps * largest


# The cases ---------------------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """A mask, and what it means for query i and key j of row b."""

    mask: Any  # or a function of (the rows' first new tokens, their keys)
    sees: Callable[[int, int, int], bool]


LENGTHS = [4, 5, 3]
DOTS = torch.rand(B, 1, MOST, MOST, generator=torch.Generator().manual_seed(5)) < 0.7
MASKS = {
    "everything": Way(None, lambda b, i, j: True),
    "causal": Way(mh.Causal(), lambda b, i, j: j <= i),
    "causal window": Way(mh.Causal(window=3), lambda b, i, j: i - 3 < j <= i),
    "window": Way(mh.Window(4, 2), lambda b, i, j: i - 4 <= j <= i + 2),
    "prefix": Way(mh.Prefix(5), lambda b, i, j: j < 5 or j <= i),
    "causal, padding": Way(mh.Causal() & mh.Padding(LENGTHS), lambda b, i, j: j <= i and j < LENGTHS[b]),
    "dense": Way("dense", lambda b, i, j: bool(DOTS[b, 0, i, j])),
}
CACHES: dict[str, dict[str, Any]] = {"growing": {}, "fixed": {"capacity": MOST}, "sliding": {"window": 6}}
ROPES = {
    "no RoPE": None,
    "halves": mh.RoPE(),
    "interleaved": mh.RoPE(base=500.0, pairing="interleaved"),
    "partial": mh.RoPE(dim=10, pairing="halves"),
    "partial, interleaved": mh.RoPE(dim=6, pairing="interleaved"),
}
PIECES = [[5, 1, 1, 2, 7, 1], [18, 1, 3]]  # prompt, tokens, drafts; 18 · 3 rows are more than few


def a_layer(seed: int = 0, dtype: torch.dtype = torch.float32, **more: Any) -> MultiHeadAttention:
    torch.manual_seed(seed)
    made = MultiHeadAttention(E, H, kv_heads=G, head_dim=D, value_dim=V, **more).eval().requires_grad_(False)
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return made.to(dtype)


def compare(layer: MultiHeadAttention, cache: mh.Cache, way: Way, calls: list[tuple[int, list[int] | None]]) -> None:
    """`calls`: how many tokens each brings, and how many of them are real in each row."""
    dtype = layer.q_proj.weight.dtype
    exact = Oracle(layer, torch.float64, forwards)
    plain = [Oracle(layer, dtype, product) for product in (forwards, backwards)]
    window = cache.window

    def sees(b: int, i: int, j: int) -> bool:
        return way.sees(b, i, j) and (window is None or j > i - window)

    ours, right, rounded = [], [], [[] for _ in plain]
    for new, lengths in calls:
        x = torch.randn(B, new, E).to(dtype)
        real = [new] * B if lengths is None else lengths
        mask = way.mask
        if mask == "dense":
            mask = dense_mask(cache, real, new)
        ours.append(layer(x, mask=mask, cache=cache, lengths=lengths))
        right.append(exact.call(x, real, sees))
        for oracle, outputs in zip(plain, rounded):
            outputs.append(oracle.call(x, real, sees))
    within_bound(ours, right, rounded)
    for b in range(B):
        used = int(cache.used[b]) if isinstance(cache.used, Tensor) else cache.used
        keys = torch.stack(exact.keys[b], 1)[:, -used:]
        error = (cache.k[b, :, :used].double() - keys).abs().max()
        worst = max((torch.stack(p.keys[b], 1)[:, -used:].double() - keys).abs().max() for p in plain)
        assert error <= 2 * worst + torch.finfo(cache.k.dtype).eps * keys.abs().max()


def dense_mask(cache: mh.Cache, real: list[int], new: int) -> Tensor:
    """DOTS, seen from where the new tokens of each row and its keys will stand: (B, 1, new, K)."""
    dropped, used = (torch.as_tensor(n).expand(B) for n in (cache.dropped, cache.used))
    if cache.window is not None and int((used + torch.tensor(real)).max()) > cache._k.shape[2]:
        dropped = dropped + (used - (cache.window - 1)).clamp(min=0)
        used = used.clamp(max=cache.window - 1)
    K = int((used + torch.tensor(real)).max())
    mask = torch.zeros(B, 1, new, K, dtype=torch.bool)
    for b in range(B):
        first = int(dropped[b] + used[b])
        keys = min(K, MOST - int(dropped[b]))
        mask[b, 0, : real[b], :keys] = DOTS[b, 0, first : first + real[b], int(dropped[b]) : int(dropped[b]) + keys]
    return mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("way", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("kind", CACHES.values(), ids=CACHES)
def test_every_cache_mask_and_rotation(kind: dict, way: Way, rope: Any, dtype: torch.dtype, request: Any) -> None:
    if eligible.slower_in(dtype) is None:
        request.getfixturevalue("one_call")
    norm = len(request.node.name) % 2 == 0  # every other case
    layer = a_layer(dtype=dtype, rope=rope or False, qk_norm=norm, softcap=5.0 if norm else None, sinks=not norm)
    compare(layer, layer.new_cache(batch=B, **kind), way, [(n, None) for n in PIECES[len(request.node.name) % 2]])


RAGGED: list[tuple[int, list[int] | None]] = [
    (6, [6, 1, 0]),
    (3, [1, 3, 2]),
    (1, None),
    (12, [2, 12, 5]),
    (1, [1, 0, 1]),
]


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("way", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("kind", CACHES.values(), ids=CACHES)
@pytest.mark.usefixtures("one_call")
def test_rows_of_different_lengths(kind: dict, way: Way, rope: Any, request: Any) -> None:
    layer = a_layer(rope=rope or False, qk_norm=len(request.node.name) % 2 == 0)
    compare(layer, layer.new_cache(batch=B, **kind), way, RAGGED)


# Smaller caches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [[(n, None) for n in PIECES[0]], [(n, None) for n in PIECES[1]], RAGGED],
                         ids=["tokens", "prompt", "ragged"])  # fmt: skip
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, "int8"], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", [MASKS["causal"], MASKS["dense"]], ids=["causal", "dense"])
def test_a_cache_of_fewer_bits(way: Way, dtype: torch.dtype, stored: Any, calls: list, request: Any) -> None:
    """Rows are rounded once, by no more than they must be, and what they became is attended to exactly."""
    if dtype == torch.float32 or kernel.in_pairs():
        request.getfixturevalue("one_call")
    layer = a_layer(dtype=dtype, rope=mh.RoPE(pairing="interleaved"), qk_norm=True)
    cache = layer.new_cache(batch=B, capacity=MOST, dtype=stored)
    exact = Oracle(layer, torch.float64, forwards)
    plain = [Oracle(layer, dtype, product) for product in (forwards, backwards)]
    ours, right, rounded = [], [], [[] for _ in plain]
    for new, lengths in calls:
        x, before = torch.randn(B, new, E).to(dtype), torch.as_tensor(cache.length).expand(B)
        real = [new] * B if lengths is None else lengths
        mask = dense_mask(cache, real, new) if way.mask == "dense" else way.mask
        ours.append(layer(x, mask=mask, cache=cache, lengths=lengths))
        rows = cache.k, cache.v
        right.append(exact.call(x, real, way.sees, rows))
        for oracle, outputs in zip(plain, rounded):
            outputs.append(oracle.call(x, real, way.sees, rows))
        new_rows = rows[0][B - 1, :, int(before[B - 1]) : int(before[B - 1]) + real[B - 1]].double()
        made, other = exact.made[0].transpose(0, 1), plain[0].made[0].transpose(0, 1).double()
        step = made.abs() * 2.0**-8 if stored != "int8" else made.abs().amax(-1, keepdim=True) / 254
        assert ((new_rows - made).abs() <= 1.01 * step + 2 * (other - made).abs().amax(-1, keepdim=True) + 1e-5).all()
    within_bound(ours, right, rounded)


# D and V beside whole vectors of 64 bytes, and rows of every number that share a key: 3, 4, 5 and 8 heads of a group
@pytest.mark.parametrize(
    ("heads", "D", "V", "keys"), [(3, 64, 64, 17), (4, 200, 72, 300), (5, 7, 130, 129), (8, 128, 128, 140)]
)
@pytest.mark.usefixtures("one_call")
def test_products_of_bytes_are_as_exact_as_of_floats(heads: int, D: int, V: int, keys: int) -> None:
    """Three digits of a byte for each number of q and each weight are no further off than float32 is."""
    layer = bare(heads, D, V)
    cache = filled(layer, keys)
    x = torch.randn(1, 1, layer.q_proj.in_features)
    y = layer(x, mask=mh.Causal(), cache=cache).view(2 * heads, V)
    k, v = (t[0].repeat_interleave(heads, 0) for t in (cache.k, cache.v))

    def attention(dtype: torch.dtype, product: Callable) -> Tensor:
        weight, bias = (p.to(dtype) for p in layer.q_proj.parameters())
        q = (product(x[0].to(dtype), weight.T.contiguous()) + bias).view(2 * heads, 1, D)
        each = zip(q, k.to(dtype), v.to(dtype))
        return torch.cat([product((product(a, b.mT.contiguous()) * layer.scale).softmax(-1), c) for a, b, c in each])

    exact = attention(torch.float64, forwards)
    within_bound([y], [exact], [[attention(torch.float32, product)] for product in (forwards, backwards)])


def bare(heads: int, D: int, V: int) -> MultiHeadAttention:
    """Two groups of `heads` heads, whose outputs are put out as they are."""
    torch.manual_seed(4)
    E = 2 * heads * V
    made = MultiHeadAttention(E, 2 * heads, kv_heads=2, head_dim=D, value_dim=V).eval().requires_grad_(False)
    made.o_proj.weight.copy_(torch.eye(E))
    made.o_proj.bias.zero_()
    return made


def filled(layer: MultiHeadAttention, keys: int) -> mh.Cache:
    cache = layer.new_cache(dtype="int8")
    made = torch.Generator().manual_seed(1)
    D, V = layer.sizes.D, layer.sizes.V
    cache.append(*(3 * torch.randn(1, 2, keys, width, generator=made) for width in (D, V)))
    return cache


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf, 1e-38, 0.0, 1e33])
def test_a_query_that_cannot_be_scaled_is_multiplied_as_it_is(number: float) -> None:
    """Its neighbours, multiplied in the same vectors, keep every bit."""
    layer = bare(4, 64, 32)
    x = torch.randn(1, 1, layer.q_proj.in_features)
    cache = filled(layer, 150)
    clean = layer(x, mask=mh.Causal(), cache=cache).view(8, 32)
    layer.q_proj.weight.view(8, 64, -1)[1] = 0
    layer.q_proj.bias.view(8, 64)[1] = number
    cache = filled(layer, 150)
    y = layer(x, mask=mh.Causal(), cache=cache).view(8, 32)
    if not math.isfinite(number):  # W_o spreads it
        assert y.isnan().all()
        return
    others = [0, *range(2, 8)]
    assert torch.equal(y[others], clean[others])
    q = torch.full((1, 64), number, dtype=torch.float64)
    scores = q @ cache.k[0, 0].double().T * layer.scale
    expected = scores.softmax(-1) @ cache.v[0, 0].double()
    torch.testing.assert_close(y[1:2].double(), expected, rtol=1e-4, atol=1e-4)


def test_a_row_that_is_not_finite_stays_where_it_is_hidden() -> None:
    layer = a_layer()
    cache, clean = layer.new_cache(dtype="int8"), layer.new_cache(dtype="int8")
    x = torch.randn(1, 6, E)
    spoilt = x.clone()
    spoilt[0, 2] = torch.nan
    for t in range(6):
        mask = mh.Causal(window=2)
        y = layer(spoilt[:, t : t + 1], mask=mask, cache=cache)
        assert torch.equal(y, layer(x[:, t : t + 1], mask=mask, cache=clean)) == (t not in (2, 3))
    assert layer(x, mask=mh.Causal(window=1), cache=cache).isfinite().all()


def test_what_int8_costs_a_trained_model() -> None:
    """Bits per byte with a cache of float32, bfloat16 and int8, through the same windows."""
    from multihead.models import recipes

    lm = mh.models.load("lm")
    texts = ["The people of the United States have a right to expect of the Congress that the laws be executed. " * 4,
             "Call me Ishmael. Some years ago, never mind how long precisely, I thought I would sail about a little. " * 4]  # fmt: skip

    def bits(dtype: Any) -> float:
        lm.new_caches = lambda batch=1: [  # type: ignore[method-assign]
            block.attention.new_cache(batch=batch, window=lm.context, dtype=dtype) for block in lm.layers
        ]
        return recipes.bits_per_byte(lm, texts, chunk=32)

    with torch.no_grad():
        whole = bits(None)
        assert abs(bits(torch.bfloat16) - whole) < 0.002 * whole
        assert abs(bits("int8") - whole) < 0.005 * whole


def test_a_lens_on_a_cache_of_int8() -> None:
    layer, x = a_layer(), torch.randn(1, 9, E)
    cache = layer.new_cache(dtype="int8")
    layer(x[:, :8], mask=mh.Causal(), cache=cache)
    lens = layer.look(x[:, 8:], mask=mh.Causal(), cache=cache)
    assert cache.length == 8
    layer(x[:, 8:], mask=mh.Causal(), cache=cache)
    k = cache.k.repeat_interleave(H // G, 1).double()
    q = layer.q_proj(x[:, 8:]).view(1, 1, H, D).transpose(1, 2).double()
    torch.testing.assert_close(lens.weights().double(), (q @ k.mT * D**-0.5).softmax(-1), rtol=1e-4, atol=1e-6)


def test_memory_is_what_is_said() -> None:
    layer = MultiHeadAttention(256, 2)  # heads of 128
    sizes = {
        dtype: layer.new_cache(capacity=64, dtype=dtype).nbytes for dtype in (torch.float32, torch.bfloat16, "int8")
    }
    assert sizes[torch.bfloat16] == sizes[torch.float32] / 2
    assert sizes["int8"] <= 0.29 * sizes[torch.float32]


def test_int8_has_no_gradient_and_says_so() -> None:
    layer = a_layer().requires_grad_(True)
    with pytest.raises(ValueError, match="int8 has no gradient"):
        layer(torch.randn(1, 2, E), cache=layer.new_cache(dtype="int8"))
    with pytest.raises(ValueError, match="expected a floating torch dtype"):
        layer.new_cache(dtype="int4")


# What could go wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*CACHES.values(), {"dtype": "int8"}], ids=str)
def test_a_call_that_is_interrupted_leaves_the_cache_as_it_was(kind: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = a_layer(rope=True), torch.randn(B, 11, E)
    cache, other = layer.new_cache(batch=B, **kind), layer.new_cache(batch=B, **kind)
    for c in (cache, other):
        layer(x[:, :8], mask=mh.Causal(), cache=c)
    before, k = cache.length, cache.k.clone()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("multihead.layer.whole.run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        layer(x[:, 8:], mask=mh.Causal(), cache=cache)
    monkeypatch.undo()
    assert cache.length == before
    assert torch.equal(cache.k, k)
    assert torch.equal(layer(x[:, 8:], cache=cache), layer(x[:, 8:], cache=other))


def test_an_overflow_leaves_the_cache_as_it_was() -> None:
    layer = a_layer(rope=True)
    cache = layer.new_cache(capacity=4)
    layer(torch.randn(1, 3, E), mask=mh.Causal(), cache=cache)
    with pytest.raises(mh.CacheOverflow, match="3 tokens and 2 more do not fit capacity=4"):
        layer(torch.randn(1, 2, E), mask=mh.Causal(), cache=cache)
    assert cache.length == 3
    layer(torch.randn(1, 1, E), mask=mh.Causal(), cache=cache)


def test_an_input_that_lies_in_the_cache_is_read_before_it_is_written_over() -> None:
    """Many rows are projected straight into the cache, but not where x is a view of its memory."""
    torch.manual_seed(0)
    layer = MultiHeadAttention(64, 4, kv_heads=1, head_dim=64, rope=True).eval().requires_grad_(False)
    cache, other = layer.new_cache(capacity=80), layer.new_cache(capacity=80)
    first = torch.randn(1, 40, 64)
    for c in (cache, other):
        layer(first, mask=mh.Causal(), cache=c)
    inside = cache.k[:, 0]  # (1, 40, 64)
    expected = layer(inside.clone(), mask=mh.Causal(), cache=other)
    cache.crop(0)
    other.crop(0)
    expected = layer(inside.clone(), mask=mh.Causal(), cache=other)
    assert torch.equal(layer(inside, mask=mh.Causal(), cache=cache), expected)


@pytest.mark.parametrize("new", [1, 3, 40])
@pytest.mark.parametrize("stored", [None, torch.bfloat16, "int8"], ids=str)
def test_equal_bits_on_any_number_of_threads(new: int, stored: Any) -> None:
    layer = MultiHeadAttention(256, 8, kv_heads=2, rope=True, qk_norm=True).eval().requires_grad_(False)
    past, x = torch.randn(2, 700, 256), torch.randn(2, new, 256)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            cache = layer.new_cache(batch=2, dtype=stored)
            layer(past, mask=mh.Causal(), cache=cache)
            results.append(layer(x, mask=mh.Causal(), cache=cache))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_memory_of_a_long_generation_is_as_computed() -> None:
    """A growing cache of 8,192 tokens: its rows are copied when it doubles, and at no other token."""
    layer = MultiHeadAttention(32, 4, kv_heads=2, rope=True).eval().requires_grad_(False)
    cache, places = layer.new_cache(), set()
    with torch.inference_mode():
        for _ in range(8192):
            layer(torch.ones(1, 1, 32), mask=mh.Causal(), cache=cache)
            places.add(cache.k.data_ptr())
        assert cache.nbytes == 2 * 8192 * 2 * 8 * 4  # k and v, tokens, G, D, bytes
        assert len(places) <= 10  # rooms of 16, 32 … 8192
        cache.crop(5000)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            for _ in range(20):
                layer(torch.ones(1, 1, 32), mask=mh.Causal(), cache=cache)
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())
    assert allocated <= 20 * 4096  # x and y; the cache has 640 kB


def watched_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes each call that takes the seven steps one by one."""
    seen: list[str] = []
    plain = MultiHeadAttention._seven_steps
    monkeypatch.setattr(
        MultiHeadAttention, "_seven_steps", lambda self, call: seen.append("one by one") or plain(self, call)
    )
    return seen


class Turned(mh.RoPE):
    def rotate(self, x: Tensor, positions: Tensor, *, length: Any = None) -> Tensor:
        return -super().rotate(x, positions, length=length)


def test_who_could_notice_takes_the_seven_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, x = watched_calls(monkeypatch), torch.randn(1, 3, E)

    def steps_of(layer: MultiHeadAttention, **given: Any) -> int:
        seen.clear()
        layer(x, mask=mh.Causal(), cache=layer.new_cache(), **given)
        return len(seen)

    assert steps_of(a_layer(rope=True, qk_norm=True)) == 0
    assert steps_of(a_layer(rope=Turned())) == 1
    hooked = a_layer(rope=True, qk_norm=True)
    hooked.q_norm.register_forward_hook(lambda *_: None)
    assert steps_of(hooked) == 1
    other = a_layer(qk_norm=True)
    other.k_norm = torch.nn.LayerNorm(D)
    assert steps_of(other) == 1
    plain = a_layer(rope=True)
    with mh.ablate(plain, heads=[1]):
        assert steps_of(plain) == 1
    assert steps_of(plain, bias=torch.zeros(1, 1)) == 1
    assert steps_of(plain.requires_grad_(True)) == 1
    plain.requires_grad_(False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert steps_of(plain) == 1
    monkeypatch.setattr(mh.RoPE, "rotate", lambda self, x, positions, **_: x)
    assert steps_of(plain) == 1


@pytest.mark.usefixtures("one_call")
def test_the_language_model_generates_in_one_call_a_layer() -> None:
    lm = mh.models.load("lm")
    said = lm.generate("The people of the United", tokens=12, temperature=0)
    assert said.startswith(" States")


@pytest.mark.parametrize("pairing", ["halves", "interleaved"])
def test_tables_are_shared_and_equal_what_rotate_does(pairing: str) -> None:
    rope, x, first = mh.RoPE(base=321.0, pairing=pairing), torch.randn(2, 3, 5, 8), 700
    cos, sin = rope.table(8, first + 5, torch.device("cpu"))
    assert rope.table(8, 10, torch.device("cpu"))[0] is cos
    turned = rope.turn(x, cos[first : first + 5], sin[first : first + 5])
    torch.testing.assert_close(turned, rope.rotate(x, torch.arange(first, first + 5)), rtol=0, atol=1e-6)
    assert mh.RoPE(scaling=NTKScaling(2.0, original_length=64)).table(8, 10, torch.device("cpu")) is None
    assert rope.table(8, 2**17 + 1, torch.device("cpu")) is None


@pytest.mark.usefixtures("one_call")
@pytest.mark.parametrize(
    "positions", [torch.tensor([7, 3, 900_000]), torch.tensor([[5, 6, 7]] * B), torch.arange(3)], ids=str
)
def test_positions_of_ones_own(positions: Tensor) -> None:
    layer, x = a_layer(rope=True), torch.randn(B, 3, E)
    y = layer(x, mask=mh.Causal(), positions=positions)
    where = positions.expand(B, 3)
    for b in range(B):
        q, k = (p(x[b]).view(3, -1, D).transpose(0, 1) for p in (layer.q_proj, layer.k_proj))
        q, k = (layer.rope.rotate(t, where[b]).double() for t in (q, k))
        v = layer.v_proj(x[b]).view(3, G, V).transpose(0, 1).double()
        k, v = (t.repeat_interleave(H // G, 0) for t in (k, v))
        scores = (q @ k.mT * D**-0.5).masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf)
        out = (scores.softmax(-1) @ v).transpose(0, 1).reshape(3, H * V)
        expected = out @ layer.o_proj.weight.double().T + layer.o_proj.bias.double()
        torch.testing.assert_close(y[b].double(), expected, rtol=1e-3, atol=1e-3)


def test_the_language_model_says_the_same_step_by_step() -> None:
    """200 tokens, the most likely each time: in one call a layer, and by the seven steps, which a hook asks for."""
    lm = mh.models.load("lm")
    said = lm.generate("The people of the United", tokens=200, temperature=0)
    hooks = [block.attention.q_proj.register_forward_hook(lambda *_: None) for block in lm.layers]
    try:
        assert lm.generate("The people of the United", tokens=200, temperature=0) == said
    finally:
        for hook in hooks:
            hook.remove()

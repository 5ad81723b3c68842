"""A layer by its tensors: RoPE, norms and a cache in one call; nothing beyond a tensor is touched, nothing wrong is run."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import ISAS
from test_kernel_guard import Guarded
from torch import Tensor

from multihead import _native
from multihead.masks import Causal, see

B, E, H, G, D, V, ROOM = 2, 37, 6, 2, 18, 11, 70
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def same(t: Tensor) -> Tensor:
    return t.clone()


def call(N: int, first: int, dtype: torch.dtype, stored: Any, place: Any = same, **more: Any) -> dict[str, Any]:
    """Everything one call is given, each tensor put by `place`."""
    make = torch.Generator().manual_seed(N + first)

    def drawn(*shape: int) -> Tensor:
        return place(torch.randn(*shape, generator=make).to(dtype))

    parts = SimpleNamespace(
        q=(drawn(H * D, E), drawn(H * D)), k=(drawn(G * D, E), None), v=(drawn(G * V, E), drawn(G * V)),
        o=(drawn(E, H * V), drawn(E)), q_norm=(drawn(D), 1e-6), k_norm=(None, 1e-5),
        D=D, V=V, scale=None, softcap=None, sinks=None,
    )  # fmt: skip
    angle = torch.arange(ROOM)[:, None] / 10 ** torch.linspace(0, 3, 7)
    whole = stored == "int8"
    k = (
        torch.randint(-127, 128, (B, G, ROOM, D), generator=make)
        if whole
        else torch.randn(B, G, ROOM, D, generator=make)
    )
    v = (
        torch.randint(-127, 128, (B, G, ROOM, V), generator=make)
        if whole
        else torch.randn(B, G, ROOM, V, generator=make)
    )
    kind = torch.int8 if whole else stored
    given = {
        "parts": parts, "x": drawn(B, N, E), "cos": place(angle.cos()), "sin": place(angle.sin()),
        "k": place(k.to(kind)), "v": place(v.to(kind)), "first": first, "K": first + N, "real": None,
        "k_scales": place(torch.rand(B, G, ROOM, 1, generator=make) / 99) if whole else None,
        "v_scales": place(torch.rand(B, G, ROOM, 1, generator=make) / 99) if whole else None,
        "y": place(torch.zeros(B, N, E, dtype=dtype)), "interleaved": False,
    }  # fmt: skip
    return given | more


def run(given: dict[str, Any], isa: str = "", threads: int = 2) -> Tensor:
    read = _native.parts(given["parts"], given["x"])
    assert not isinstance(read, tuple), read
    assert read.rotate(given["cos"], given["sin"], given["first"], interleaved=given["interleaved"]) is None
    scales = given["k_scales"], given["v_scales"]
    assert read.join(given["k"], given["v"], given["first"], given["K"], given["real"], *scales) is None
    read.run(given["y"], threads, isa)
    return given["y"]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("stored", [*TYPES, "int8"], ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("N", "first"), [(1, ROOM - 1), (1, 0), (5, 30), (33, ROOM - 33)])
def test_nothing_beyond_a_tensor_is_touched(N: int, first: int, dtype: torch.dtype, stored: Any, isa: str) -> None:
    memory = Guarded()
    ours, plain = call(N, first, dtype, stored, memory.copy), call(N, first, dtype, stored)
    before = plain["k"].clone()
    assert torch.equal(run(ours, isa), run(plain, isa))
    assert torch.equal(ours["k"], plain["k"])
    assert torch.equal(ours["v"], plain["v"])
    assert torch.equal(plain["k"][:, :, :first], before[:, :, :first])
    assert torch.equal(plain["k"][:, :, first + N :], before[:, :, first + N :])
    assert torch.equal(run(plain | {"y": torch.zeros_like(plain["y"])}, isa, threads=1), plain["y"])


@pytest.mark.parametrize("N", [1, 20])
def test_q_k_and_v_in_one_weight(N: int) -> None:
    given, fused = call(N, 3, torch.float32, torch.float32), call(N, 3, torch.float32, torch.float32)
    p = fused["parts"]
    given["parts"].k = (given["parts"].k[0], torch.zeros(G * D))
    p.q = torch.cat([p.q[0], p.k[0], p.v[0]]), torch.cat([p.q[1], torch.zeros(G * D), p.v[1]])
    p.k = p.v = None
    assert torch.equal(run(fused), run(given))
    p.q = p.q[0][:-1].contiguous(), None
    assert _native.parts(p, fused["x"])[0] == "the rows of q, k and v in one weight do not fit its heads"


def turned(parts: Any, place: Any = same) -> Any:
    """The same with weights that lie inputs by outputs, as GPT-2's do."""
    products = {name: getattr(parts, name) for name in "qkvo"}
    pairs = {name: (place(weight.t().contiguous()).t(), bias) for name, (weight, bias) in products.items()}
    return SimpleNamespace(**{**vars(parts), **pairs})


def by_hand(parts: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Four products and attention of all to all, every operation rounded to `dtype`."""

    def project(name: str, x: Tensor) -> Tensor:
        weight, bias = getattr(parts, name)
        y = x @ weight.to(dtype).t()
        return y if bias is None else y + bias.to(dtype)

    q, k, v = (project(name, x.to(dtype)).unflatten(-1, (-1, D)).transpose(1, 2) for name in "qkv")
    k, v = (t.repeat_interleave(H // G, 1) for t in (k, v))
    weights = (q @ k.transpose(-1, -2) * D**-0.5).softmax(-1)
    return project("o", (weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("N", [1, 2, 7, 8, 33])
def test_weights_may_lie_the_other_way_round(N: int, dtype: torch.dtype, isa: str) -> None:
    """At most twice the error of plain, few rows and many, and nothing beyond a weight is read."""
    make, memory = torch.Generator().manual_seed(N), Guarded()

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make).to(dtype)

    E = 301  # more than one stretch of a sum, and no multiple of a vector
    products = {
        "q": (drawn(H * D, E), drawn(H * D)),
        "k": (drawn(G * D, E), None),
        "v": (drawn(G * D, E), drawn(G * D)),
    }
    rest = dict.fromkeys(("q_norm", "k_norm", "scale", "softcap", "sinks"))
    parts = SimpleNamespace(**products, o=(drawn(E, H * D), drawn(E)), D=D, V=D, **rest)
    x, y = drawn(B, N, E) / 9, torch.zeros(B, N, E, dtype=dtype)
    read = _native.parts(turned(parts, memory.copy), x)
    assert not isinstance(read, tuple), read
    read.run(y, 2, isa)
    exact, plain = by_hand(parts, x, torch.float64), by_hand(parts, x, dtype)
    bound = 2 * (plain - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
    assert (y - exact).abs().max() <= bound
    again = torch.zeros_like(y)
    read.run(again, 1, isa)
    assert torch.equal(again, y)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [16, 40, 64, 130, 192])
def test_float32_queries_of_a_bfloat16_cache(width: int, group: int, isa: str) -> None:
    """Numbers are read in twos of vectors where there are so many: every width, and what is hidden leaves no trace."""
    make = torch.Generator().manual_seed(width)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make)

    E, heads, K = 24, 2 * group, 150
    products = {name: (drawn(n * width, E) / 4, drawn(n * width)) for name, n in (("q", heads), ("k", 2), ("v", 2))}
    rest = dict.fromkeys(("q_norm", "k_norm", "scale", "softcap", "sinks"))
    parts = SimpleNamespace(**products, o=(drawn(E, heads * width), drawn(E)), D=width, V=width, **rest)
    x = drawn(1, 1, E)
    k, v = (drawn(1, 2, K, width).bfloat16() for _ in range(2))
    hidden = slice(0, 20)
    k[:, :, hidden], v[:, :, hidden, 1::3] = torch.nan, torch.inf
    read, y = _native.parts(parts, x), torch.zeros(1, 1, E)
    assert read.join(k, v, K - 1, K) is None
    assert read.see(see(Causal(window=K - 20), 1, K, torch.device("cpu"), 1, heads)) is None
    read.run(y, 2, isa)

    def by_hand(dtype: torch.dtype) -> Tensor:
        q = (x.to(dtype) @ products["q"][0].to(dtype).t() + products["q"][1].to(dtype)).view(1, heads, 1, width)
        keys, values = (t[:, :, 20:].to(dtype).repeat_interleave(group, 1) for t in (k, v))
        mixed = (q @ keys.transpose(-1, -2) * width**-0.5).softmax(-1) @ values
        return mixed.reshape(1, 1, -1) @ parts.o[0].to(dtype).t() + parts.o[1].to(dtype)

    exact, plain = by_hand(torch.float64), by_hand(torch.float32)
    bound = 2 * (plain - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
    assert (y - exact).abs().max() <= bound


def test_a_weight_that_lies_neither_way_is_refused() -> None:
    given = call(2, 5, torch.float32, torch.float32)
    weight, bias = given["parts"].q
    given["parts"].q = (weight.repeat_interleave(2, 0).t().repeat_interleave(2, 0)[::2, ::2].t(), bias)
    assert "a projection's weight is not rows" in _native.parts(given["parts"], given["x"])[0]
    given["parts"].q = (torch.zeros(1, E).expand(H * D, E).t().contiguous().t()[:, :1].expand(H * D, E), bias)
    assert "a projection's weight is not rows" in _native.parts(given["parts"], given["x"])[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_angles_may_be_given_for_each_token(dtype: torch.dtype) -> None:
    """As Hugging Face's models make them: (B, N, 2 · pairs), each angle twice, in the model's dtype."""
    given, other = call(4, 9, dtype, torch.float32), call(4, 9, dtype, torch.float32)
    rows = slice(9, 13)
    cos, sin = (given[name][rows].to(dtype).float() for name in ("cos", "sin"))
    given["cos"], given["sin"] = (torch.cat([torch.zeros(9, 7), t]) for t in (cos, sin))
    read = _native.parts(other["parts"], other["x"])
    twice = [torch.cat([t, t], -1).expand(B, 4, 14).to(dtype) for t in (cos, sin)]
    assert read.rotate(*twice, pairs=7) is None
    assert read.join(other["k"], other["v"], 9, 13) is None
    read.run(other["y"], 2)
    assert torch.equal(other["y"], run(given))


WRONG = [
    ({"first": ROOM}, "k and v have not the room"),
    ({"first": -1}, "k and v have not the room"),
    ({"first": 2**62}, "k and v have not the room"),
    ({"K": ROOM + 1}, "k and v have not the room"),
    ({"K": 0}, "k and v have not the room"),
    ({"first": torch.tensor([0, ROOM])}, "k and v have not the room"),
    ({"first": torch.tensor([0.0, 1.0])}, "first is not int32 or int64"),
    ({"first": torch.tensor([0, 1, 2])}, "first does not fit x"),
    ({"real": torch.tensor([1, 9])}, "k and v have not the room"),
    ({"k": torch.zeros(B, G, ROOM, D + 1)}, "k is not .B,G,K,width. of this call"),
    ({"k": torch.zeros(B, G + 1, ROOM, D), "v": torch.zeros(B, G + 1, ROOM, V)}, "not of the heads of this layer"),
    ({"k": torch.zeros(B, G, ROOM, D, dtype=torch.float64)}, "k is not float32, bfloat16, float16 or int8"),
    ({"k": torch.zeros(B, G, ROOM, D, dtype=torch.bfloat16)}, "k and v differ in dtype"),
    ({"k": torch.zeros(B, G, D, ROOM).mT}, "k is not .B,G,K,width. of this call"),
    ({"k_scales": torch.zeros(B, G, ROOM, 1)}, "k and v of int8 come with scales"),
    ({"k": torch.zeros(B, G, ROOM, D, dtype=torch.int8), "v": torch.zeros(B, G, ROOM, V, dtype=torch.int8)},
     "k and v of int8 come with scales"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[f"{m} {n}" for n, (_, m) in enumerate(WRONG)])
def test_a_cache_that_does_not_fit_is_refused(change: dict, message: str) -> None:
    given = call(2, 5, torch.float32, torch.float32) | change
    read = _native.parts(given["parts"], given["x"])
    refused = read.join(given["k"], given["v"], given["first"], given["K"], given["real"], given["k_scales"], None)
    assert refused is not None
    assert re.search(message, refused[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": ROOM - 1}, "beyond the rows of cos and sin"),
        ({"positions": -1}, "beyond the rows of cos and sin"),
        ({"positions": torch.tensor([[3, ROOM]])}, "beyond the rows of cos and sin"),
        ({"positions": torch.tensor([3, ROOM - 1]), "counted": True}, "beyond the rows of cos and sin"),
        ({"pairs": 8}, "of more pairs than a head has"),
        ({"pairs": 0}, "of more pairs than a head has"),
        ({"cos": torch.zeros(ROOM, 10), "sin": torch.zeros(ROOM, 10)}, "of more pairs than a head has"),
        ({"sin": torch.zeros(ROOM, 6)}, "differ in shape or layout"),
        ({"positions": None}, "are not a row for each token"),
        ({"positions": torch.tensor([1, 2, 3])}, "positions does not fit x"),
    ],
    ids=str,
)
def test_angles_that_do_not_fit_are_refused(change: dict, message: str) -> None:
    given = call(2, 5, torch.float32, torch.float32)
    read = _native.parts(given["parts"], given["x"])
    options = {"cos": given["cos"], "sin": given["sin"], "positions": 5} | change
    assert message in read.rotate(options.pop("cos"), options.pop("sin"), options.pop("positions"), **options)[0]


def test_what_is_told_is_copied() -> None:
    """Somebody may change the numbers that say where to write after they were checked."""
    given = call(2, 5, torch.float32, torch.float32)
    read = _native.parts(given["parts"], given["x"])
    first = torch.tensor([5, 7])
    assert read.join(given["k"], given["v"], first, 9) is None
    before = given["k"].clone()
    first.fill_(2**40)
    read.run(given["y"], 2)
    changed = (given["k"] != before).any(-1).any(1)
    assert changed.nonzero().tolist() == [[0, 5], [0, 6], [1, 7], [1, 8]]

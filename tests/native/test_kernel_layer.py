"""The whole layer in one call, against the same steps in float64."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from oracle import ISAS, Problem, Wanted, assert_fine, causal, error, rounding

from multihead import _native

CASES = [  # B Q  K   E   C   H  G  D   V   mask    bias   why
    (1, 4, 4, 128, 128, 8, 8, 16, 16, True, True, "the running example, smaller"),
    (2, 3, 5, 37, 29, 6, 3, 7, 11, False, True, "all sizes distinct, cross-attention"),
    (1, 1, 1, 16, 16, 1, 1, 16, 16, False, False, "one token"),
    (1, 13, 13, 65, 65, 5, 1, 13, 9, True, False, "rows that do not fill a group; widths that do not fill a vector"),
    (3, 2, 2, 40, 40, 2, 2, 20, 20, True, True, "a batch"),
    (3, 41, 41, 70, 70, 6, 2, 11, 13, True, True, "many tokens: rows in lanes, strips that cross batch rows"),
    (1, 17, 17, 520, 520, 4, 4, 32, 32, False, False, "one more than few; inputs in three stretches"),
    (2, 5, 60, 33, 90, 3, 1, 16, 8, False, True, "few queries on many keys: both kinds of product"),
    (2, 30, 45, 40, 56, 4, 2, 16, 48, True, True, "many tokens in heads of whole vectors"),
    (1, 200, 3, 48, 17, 2, 2, 24, 24, False, True, "many queries on few keys"),
]


@dataclass
class Whole:
    """A layer of the table with its input: `context` is x itself where there is none."""

    sizes: tuple[int, ...]  # B, Q, K, H, G, D, V
    x: torch.Tensor
    context: torch.Tensor
    weights: list[torch.Tensor]  # of q, k, v and o
    biases: list[torch.Tensor | None]
    mask: dict

    @classmethod
    def of(cls, case: tuple, dtype: torch.dtype = torch.float32) -> Whole:
        B, Q, K, E, C, H, G, D, V, is_causal, biased, _ = case
        make = torch.Generator().manual_seed(1)
        x = torch.randn(B, Q, E, generator=make).to(dtype)
        context = x if (K, C) == (Q, E) else torch.randn(B, K, C, generator=make).to(dtype)
        sizes = [(H * D, E), (G * D, C), (G * V, C), (E, H * V)]
        weights = [(torch.randn(*s, generator=make) * s[1] ** -0.5).to(dtype) for s in sizes]
        biases = [torch.randn(s[0], generator=make).to(dtype) if biased else None for s in sizes]
        return cls((B, Q, K, H, G, D, V), x, context, weights, biases, causal(Q, K) if is_causal else {})

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        (B, Q, K, H, G, D, V), linear = self.sizes, torch.nn.functional.linear
        w = [t.to(dtype) for t in self.weights]
        b = [None if t is None else t.to(dtype) for t in self.biases]
        q = linear(self.x.to(dtype), w[0], b[0]).view(B, Q, H, D).transpose(1, 2)
        k = linear(self.context.to(dtype), w[1], b[1]).view(B, K, G, D).transpose(1, 2)
        v = linear(self.context.to(dtype), w[2], b[2]).view(B, K, G, V).transpose(1, 2)
        out, _ = Problem(q, k, v, D**-0.5, **self.mask).plain(dtype)
        return linear(out.transpose(1, 2).reshape(B, Q, H * V), w[3], b[3])

    def wanted(self) -> Wanted:
        exact, dtype = self.plain(torch.float64), self.x.dtype
        return Wanted(exact, rounding(exact, dtype), lambda _: self.plain(dtype))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c[-1])
def test_error_is_at_most_twice_plain(case, isa):
    B, Q, K, E, C, _, _, D, V, is_causal, biased, _ = case
    whole = Whole.of(case)
    x, context, weights, biases = whole.x, whole.context, whole.weights, whole.biases
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    module = SimpleNamespace(_modules={}, scale=None, softcap=None, sinks=None)
    module.sizes = SimpleNamespace(E=E, C=C, D=D, V=V)
    for name, w, b in zip(names, weights, biases, strict=True):
        child = torch.nn.Linear(w.shape[1], w.shape[0], bias=biased)
        child.weight = torch.nn.Parameter(w)
        if b is not None:
            child.bias = torch.nn.Parameter(b)
        module._modules[name] = child
    results = []
    for threads in (1, 2):
        y = torch.full((B, Q, E), torch.nan)
        call = _native.layer(module, x, None if context is x else context)
        assert not isinstance(call, tuple), call
        if is_causal:
            start, stop = SimpleNamespace(offset=0, low=0, high=0), SimpleNamespace(offset=K - Q + 1, low=0, high=K)
            assert call.see(SimpleNamespace(start=start, stop=stop, dense=None)) is None
        call.run(y, threads, isa)
        results.append(y)
    assert_fine([whole.wanted().judge(results[0])])
    assert torch.equal(*results)


HALVES = [torch.bfloat16, torch.float16]
TYPES = [(t, t) for t in HALVES] + [(torch.float32, t) for t in HALVES]  # of rows, and of weights
ROWS = [  # rows inputs outputs  why
    (1, 64, 48, "one token"),
    (4, 1024, 96, "four tokens"),
    (7, 37, 29, "odd sizes; rows that do not fill a group"),
    (16, 260, 41, "as many as few may be: weights in several runs, the last one short"),
    (61, 130, 77, "many rows, more than a strip"),
    (50, 33, 20, "many rows of odd width: pairs would reach beyond a row"),
    (19, 1100, 70, "several stretches of inputs"),
]


def product_of(case: tuple, types: tuple) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Wanted]:
    """Rows, weight and bias, and what must come out."""
    rows, inputs, outputs, _ = case
    make = torch.Generator().manual_seed(2)
    x = torch.randn(rows, inputs, generator=make).to(types[0])
    weight, bias = (torch.randn(*s, generator=make).to(types[1]) for s in ((outputs, inputs), (outputs,)))
    linear = torch.nn.functional.linear
    exact = linear(x.double(), weight.double(), bias.double())
    plain = linear(x, weight.to(types[0]), bias.to(types[0]))
    return x, weight, bias, Wanted(exact, rounding(exact, types[0]), lambda _: plain)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("case", ROWS, ids=lambda c: c[-1])
def test_products_in_half_precision(case, types, isa):
    """Rows and outputs of one type, weights of the same or of fewer bits; the same bits on any number of threads."""
    x, weight, bias, wanted = product_of(case, types)
    results = [torch.full(wanted.exact.shape, torch.nan, dtype=types[0]) for _ in range(2)]
    for threads, y in enumerate(results, 1):
        _native.linear(x, weight, bias).run(y, threads, isa)
    assert_fine([wanted.judge(results[0])])
    assert torch.equal(*results)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 6, 57])
def test_the_whole_layer_in_half_precision(tokens, types, isa):
    """The weights too, or the weights only: then against float32, given the weights as they are."""
    dtype, weights = types
    torch.manual_seed(0)
    E, D = 64, 16
    children = {n: torch.nn.Linear(E, E).to(weights) for n in ("q_proj", "k_proj", "v_proj", "o_proj")}
    x, results = torch.randn(2, tokens, E).to(dtype), torch.full((2, 2, tokens, E), torch.nan, dtype=dtype)
    sizes = SimpleNamespace(E=E, C=E, D=D, V=D)
    module = SimpleNamespace(_modules=children, sizes=sizes, scale=None, softcap=None, sinks=None)
    for threads, y in enumerate(results, 1):
        call = _native.layer(module, x, None)
        assert call.widens is (dtype != weights)
        call.run(y, threads, isa)

    def plain(dtype: torch.dtype) -> torch.Tensor:
        q, k, v = (torch.nn.functional.linear(x.to(dtype), p.weight.to(dtype), p.bias.to(dtype))
                   .view(2, tokens, E // D, D).transpose(1, 2) for p in list(children.values())[:3])  # fmt: skip
        out, _ = Problem(q, k, v, D**-0.5).plain(dtype)
        o = children["o_proj"]
        return torch.nn.functional.linear(
            out.transpose(1, 2).reshape(2, tokens, E), o.weight.to(dtype), o.bias.to(dtype)
        )

    with torch.no_grad():
        exact = plain(torch.float64)
        assert error(results[0], exact) <= 2 * error(plain(dtype), exact) + rounding(exact, dtype)
    assert torch.equal(*results)


@pytest.mark.parametrize("wrong", ["k_proj", "v_proj", "o_proj"])
def test_the_weights_are_of_one_dtype(wrong):
    children = {n: torch.nn.Linear(8, 8).bfloat16() for n in ("q_proj", "k_proj", "v_proj", "o_proj")}
    module = SimpleNamespace(_modules=children, sizes=SimpleNamespace(E=8, C=8, D=4, V=4))
    children[wrong].half()
    reason, _ = _native.layer(module, torch.randn(3, 8), None)
    assert reason == f"{wrong} is not of the dtype of q_proj"
    children[wrong].bfloat16()
    reason, _ = _native.layer(module, torch.randn(3, 8).half(), None)
    assert reason == "q_proj is not of the dtype of x"

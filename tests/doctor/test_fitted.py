"""Mistakes with a number in them: the number is found, whatever it is, and nothing is fitted to what is no such mistake."""

import math

import pytest
import torch
from torch import nn

import multihead as mh
from multihead.positions import LinearScaling
from tests.doctor.test_learned import D, E, H, attention, named, turned
from tests.doctor.test_planted import layer_of


@pytest.mark.wrong
@pytest.mark.parametrize(("base", "said"), [(9_999, "9,999"), (12_345, "12,345"), (50, "50"), (1.37e6, "1,370,000")])
def test_any_base_of_rope(base, said):
    layer = layer_of(E, H, rope=True)
    candidate = turned(layer, mh.RoPE(base=base), ("q", "k"), 1)
    named(lambda x: candidate(x), layer, torch.randn(2, 7, E), f"RoPE with another base ({said})", 2)


@pytest.mark.wrong
@pytest.mark.parametrize("factor", [3, 0.3])
def test_any_factor_of_linear_scaling(factor):
    layer = layer_of(E, H, rope=mh.RoPE(pairing="interleaved"))
    candidate = turned(layer, mh.RoPE(pairing="interleaved", scaling=LinearScaling(factor)), ("q", "k"), 1)
    cause = f"RoPE with another scaling (linear, factor {factor})"
    named(lambda x: candidate(x), layer, torch.randn(2, 7, E), cause, 2)


@pytest.mark.wrong
@pytest.mark.parametrize(
    ("softmax", "times"),
    [
        (lambda s: (1.3 * s).softmax(-1), "1.3"),
        (lambda s: (-s).softmax(-1), "-1"),
        (lambda s: s.softmax(-1) ** 2 / (s.softmax(-1) ** 2).sum(-1, keepdim=True), "2"),
        (lambda s: 3**s / (3**s).sum(-1, keepdim=True), "1.099"),
    ],
    ids=["temperature", "negative", "weights squared", "base 3"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_any_scale(softmax, times, dtype):
    layer = layer_of(E, H, dtype=dtype)
    report = named(
        lambda x: attention(layer, x, softmax=softmax), layer, torch.randn(2, 6, E, dtype=dtype), "scale by another", 3
    )
    assert f"{times} times the right one" in report.cause
    assert report.sure.startswith("certain")


@pytest.mark.wrong
@pytest.mark.parametrize(("softcap", "cause"), [(None, "where the reference has none"), (30.0, "of another size")])
def test_any_softcap(softcap, cause):
    layer = layer_of(E, H, softcap=softcap)
    product = lambda q, k: math.sqrt(D) * 4.5 * torch.tanh(q @ k.mT / (math.sqrt(D) * 4.5))  # noqa: E731
    named(lambda x: attention(layer, x, product=product), layer, torch.randn(2, 6, E), f"softcap {cause} (4.5)", 3)


@pytest.mark.wrong
def test_any_eps_of_the_norm_of_q_and_k():
    layer, eps = layer_of(E, H, qk_norm=True), 0.02

    def normed(norm):
        return lambda t: nn.functional.rms_norm(t, (D,), norm.weight, eps=eps)

    candidate = lambda x: attention(layer, x, q=normed(layer.q_norm), k=normed(layer.k_norm))  # noqa: E731
    report = named(candidate, layer, torch.randn(2, 6, E), f"QK-norm with another eps ({eps})", 2)
    assert report.sure.startswith("certain")

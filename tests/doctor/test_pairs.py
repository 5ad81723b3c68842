"""Two mistakes at once: the common pairs, and both are named."""

import math

import pytest
import torch

import multihead as mh
from tests.doctor.test_planted import layer_of


def broken(layer, x, mistakes: set[str]):
    """View/transpose style, with any of these mistakes together."""
    B, N, E = x.shape
    H = layer.sizes.H
    D = E // H
    q, k, v = (p(x) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    if "k used as v" in mistakes:
        v = k
    if "heads split by view without transpose" in mistakes:
        q, k, v = (t.view(B, H, N, D) for t in (q, k, v))
    elif "heads interleaved (D, H) instead of (H, D)" in mistakes:
        q, k, v = (t.view(B, N, D, H).permute(0, 3, 1, 2) for t in (q, k, v))
    else:
        q, k, v = (t.view(B, N, H, D).transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(-2, -1)
    if "scale missing" not in mistakes:
        scores = scores / math.sqrt(E if "scale by √E instead of √D" in mistakes else D)
    if "mask missing" not in mistakes:
        offset = 2 if "causal mask off by one, one ahead" in mistakes else 1
        scores = scores.masked_fill(torch.ones(N, N, dtype=torch.bool).triu(offset), -1e9)
    weights = scores.softmax(-2 if "softmax over queries" in mistakes else -1)
    heads = weights @ v
    if "heads merged without transposing back" in mistakes:
        merged = heads.reshape(B, N, E)
    elif "heads merged interleaved (D, H) instead of (H, D)" in mistakes:
        merged = heads.permute(0, 2, 3, 1).reshape(B, N, E)
    else:
        merged = heads.transpose(1, 2).reshape(B, N, E)
    return merged if "W_o missing" in mistakes else layer.o_proj(merged)


PAIRS = [
    ("heads split by view without transpose", "heads merged without transposing back"),
    ("heads interleaved (D, H) instead of (H, D)", "heads merged interleaved (D, H) instead of (H, D)"),
    ("scale missing", "mask missing"),
    ("scale by √E instead of √D", "causal mask off by one, one ahead"),
    ("scale missing", "W_o missing"),
    ("softmax over queries", "heads merged without transposing back"),
    ("k used as v", "mask missing"),
    ("scale missing", "heads merged without transposing back"),
]


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
@pytest.mark.wrong
def test_both_mistakes_are_named(pair):
    layer = layer_of(32, 4)
    report = mh.diagnose(lambda x: broken(layer, x, set(pair)), layer, torch.randn(2, 5, 32), mask=mh.Causal())
    assert report.verdict == "diagnosed", report
    assert {cause.cause for cause in report.causes} == set(pair), report
    assert report.step == min(cause.step for cause in report.causes)


def test_nothing_is_wrong_with_the_implementation_itself():
    layer = layer_of(32, 4)
    report = mh.diagnose(lambda x: broken(layer, x, set()), layer, torch.randn(2, 5, 32), mask=mh.Causal())
    assert report.verdict == "healthy", report

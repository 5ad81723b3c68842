"""`lens.why`: every way to split a score adds up to it, and each term is what it is named for."""

import math

import pytest
import torch
from torch import nn

import multihead as mh

E, H, N = 32, 4, 6


def adds_up(why, exact: float) -> None:
    bound = 1e-5 * max(1.0, abs(exact))
    assert abs(why.score - exact) < bound
    assert abs(float(why.dimensions.sum()) - exact) < bound
    if why.frequencies is not None:
        assert abs(float(why.frequencies.sum()) - exact) < bound
        assert len(why.frequencies) == len(why.radians)
    if why.terms is not None:
        assert abs(float(why.terms.sum()) - exact) < bound
        assert why.terms.shape == (len(why.sources),) * 2


OPTIONS = [
    {},
    {"bias": False},
    {"rope": True},
    {"rope": mh.RoPE(pairing="interleaved", dim=4)},
    {"rope": True, "qk_norm": True, "kv_heads": 2, "softcap": 2.0, "sinks": True, "scale": 0.3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("cross", [False, True])
def test_terms_of_a_layer_add_up(options: dict, cross: bool) -> None:
    layer = mh.MultiHeadAttention(E, H, **options)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.2 * torch.randn_like(p))
    x, context = torch.randn(2, N, E), torch.randn(2, N, E) if cross else None
    trace, lens = mh.trace(layer, x, context, mask=mh.Causal()), layer.look(x, context, mask=mh.Causal())
    for b, h, q, k in ((0, 0, 5, 0), (1, 3, 4, 4), (1, -1, -1, 2), (0, 2, 1, 5)):
        why = lens.why(q, k, h, batch=b)
        adds_up(why, float(trace["scores"][b, h, q, k]))
        assert why.masked == pytest.approx(float(trace["masked"][b, h, q, k]), rel=1e-5)
        assert why.weight == pytest.approx(float(trace["weights"][b, h, q, k]), rel=1e-4, abs=1e-7)
        assert why.sources[-1] == "bias"
        if not options.get("bias", True):
            assert why.terms[-1].abs().max() == 0
        assert (why.frequencies is None) == (layer.rope is None)


def test_positions_and_a_single_sequence() -> None:
    layer, x, where = mh.MultiHeadAttention(E, H, rope=True), torch.randn(N, E), torch.arange(N) * 3 + 7
    scores = mh.trace(layer, x, positions=where)["scores"]
    adds_up(layer.look(x, positions=where).why(4, 1, 2), float(scores.reshape(-1, H, N, N)[0, 2, 4, 1]))


@pytest.mark.parametrize("pairing", ["halves", "interleaved"])
def test_a_frequency_is_its_pair_and_the_rest_does_not_turn(pairing: str) -> None:
    layer = mh.MultiHeadAttention(40, 4, rope=mh.RoPE(dim=6, pairing=pairing))
    why = layer.look(torch.randn(1, N, 40)).why(3, 1, 0)
    d = why.dimensions
    pairs = [(0, 3), (1, 4), (2, 5)] if pairing == "halves" else [(0, 1), (2, 3), (4, 5)]
    expected = torch.stack([*(d[i] + d[j] for i, j in pairs), d[6:].sum()])
    torch.testing.assert_close(why.frequencies, expected)
    assert why.radians.tolist() == pytest.approx([1.0, 10_000 ** (-1 / 3), 10_000 ** (-2 / 3), 0.0])


def test_bare_queries_and_keys_know_dimensions_only() -> None:
    q, k = torch.randn(1, H, N, 8), torch.randn(1, 2, N, 8)
    why = mh.look(q, k).why(2, 3, 3)
    torch.testing.assert_close(why.dimensions, (q[0, 3, 2] * k[0, 1, 3]).double() / math.sqrt(8))
    assert (why.frequencies, why.terms, list(why.sources)) == (None, None, [])


def test_what_cannot_be_split_by_source_says_less() -> None:
    layer, x = mh.MultiHeadAttention(E, H, rope=True), torch.randn(1, N, E)
    cache = layer.new_cache()
    layer(x, mask=mh.Causal(), cache=cache)
    why = layer.look(x[:, :1], mask=mh.Causal(), cache=cache).why(0, 3, 1)
    assert why.terms is None
    assert why.frequencies is not None
    handle = layer.k_proj.register_forward_hook(lambda module, given, output: 2 * output)
    assert layer.look(x).why(0, 3, 1).terms is None
    handle.remove()
    assert layer.look(x).why(0, 3, 1).terms is not None
    layer.q_proj = nn.Sequential(layer.q_proj)
    assert layer.look(x).why(0, 3, 1).terms is None


@pytest.mark.parametrize("mask", ["own", mh.Causal(window=2), None], ids=str)
def test_sources_of_the_package_s_own_models(mask: object) -> None:
    lm = mh.models.LanguageModel(vocabulary=50, width=E, heads=H, layers=3, context=16)
    with torch.no_grad():
        for p in lm.parameters():
            p.add_(0.1 * torch.randn_like(p))
    tokens = torch.randint(50, (2, N))
    for number, lens in enumerate(lm.look(tokens, mask)):
        exact = lm.trace(tokens, number, mask=mask)["scores"]
        why = lens.why(5, 2, 1, batch=1)
        adds_up(why, float(exact[1, 1, 5, 2]))
        each = [f"head {h}" for h in range(H)] + ["output bias", "MLP"]
        assert why.sources == ["embedding", *(f"layer {n} {one}" for n in range(number) for one in each), "bias"]


def test_a_source_is_what_it_is_named_for() -> None:
    """With layer 0's head 2 silenced and its parts alone changed, the other terms stay, the norm's factor being held."""
    lm = mh.models.LanguageModel(vocabulary=50, width=E, heads=H, layers=2, context=16)
    tokens = torch.randint(50, (1, N))
    why = lm.look(tokens)[1].why(4, 1, 0)
    of = {name: n for n, name in enumerate(why.sources)}
    block, first = lm.layers[1], lm.layers[0]
    with torch.no_grad():
        x = lm.embed(tokens)
        head = mh.trace(first.attention, first.attention_norm(x), mask=lm.mask)["heads"].reshape(-1, H, N, E // H)[0, 2]
        whole = first(x, lm.mask)
        spread = whole.var(-1, unbiased=False).add(block.attention_norm.eps).rsqrt()[0]

        def normed(t, n):
            return (t - t.mean()) * spread[n] * block.attention_norm.weight

        made, D = head @ first.attention.w_o[2], E // H
        q = block.attention.q_proj.weight[:D] @ normed(made[4], 4)
        k = block.attention.k_proj.weight[:D] @ normed(x[0, 1], 1)
        rope = block.attention.rope
        q, k = rope.rotate(q[None], torch.tensor([4])), rope.rotate(k[None], torch.tensor([1]))
        expected = float((q * k).sum()) * block.attention.scale
    assert float(why.terms[of["layer 0 head 2"], of["embedding"]]) == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_drawing() -> None:
    layer, x = mh.MultiHeadAttention(E, H, rope=True), torch.randn(2, N, E)
    drawn = str(layer.look(x).why(3, 1, 2, batch=1))
    lines = drawn.splitlines()
    assert lines[0].startswith("head 2, query 3 for key 1, sequence 1: score ")
    assert {"by source, of the query × of the key", "by RoPE frequency", "by dimension"} <= set(lines)
    assert any(line.startswith("  x × x ") and "█" in line for line in lines)
    assert max(len(line) for line in lines) <= 100


def test_bars_go_left_below_0_and_are_as_long_as_their_terms() -> None:
    q, k = torch.zeros(1, 1, 1, 12), torch.ones(1, 1, 1, 12)
    q[..., :10] = torch.tensor([8.0, -4.0, 2.0, -1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.25])
    lines = str(mh.look(q, k, scale=1.0).why(0, 0, 0)).splitlines()
    drawn = {line.split()[0]: line for line in lines[2:]}
    sides = {name: tuple(part.count("█") for part in line.split("│")) for name, line in drawn.items()}
    assert [sides[name] for name in "0123"] == [(0, 24), (12, 0), (0, 6), (3, 0)]
    assert drawn["the"].split()[:4] == ["the", "other", "4", "+0.75"]
    assert lines[0] == "head 0, query 0 for key 0: score +9.75, weight 1"


@pytest.mark.parametrize(
    ("given", "message"),
    [((6, 0, 0), "query=6: expected a number of 0…5"), ((0, 0, -5), "head=-5"), ((0, 1.0, 0), "key=1.0")],
)
def test_places_that_are_not_there(given: tuple, message: str) -> None:
    lens = mh.look(torch.randn(1, H, N, 8), torch.randn(1, H, N, 8))
    with pytest.raises(ValueError, match=message):
        lens.why(*given)

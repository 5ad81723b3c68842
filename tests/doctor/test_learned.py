"""Mistakes that were once unknown: each planted, each named first, with its step."""

import math
import re

import pytest
import torch
from torch import nn

import multihead as mh
from tests.doctor.test_planted import layer_of

E, H, D = 32, 4, 8


def attention(layer, x, *, q=lambda t: t, k=lambda t: t, product=None, before=lambda t: t,
              merged=lambda t: t, output=lambda t: t, offset=None, softmax=lambda s: s.softmax(-1)):  # fmt: skip
    """Right, but for what is passed in; causal if `offset` is a number."""
    x = before(x)
    qh, kh, vh = (p(x).unflatten(-1, (H, D)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    qh, kh = q(qh), k(kh)
    scores = (qh @ kh.transpose(-2, -1) if product is None else product(qh, kh)) / math.sqrt(D)
    if offset is not None:
        N = x.shape[1]
        scores = scores.masked_fill(~torch.ones(N, N, dtype=torch.bool).tril(offset), -1e9)
    return output(layer.o_proj(merged((softmax(scores) @ vh).transpose(1, 2).flatten(2))))


def named(candidate, layer, x, cause, step, **options):
    report = mh.diagnose(candidate, layer, x, **options)
    assert report.verdict == "diagnosed", report
    assert report.cause.startswith(cause), report
    assert report.step == step
    assert report.explanation
    assert report.fix
    return report


TURNED = [
    ("RoPE with another base (500,000)", lambda rope: mh.RoPE(base=500_000.0), ("q", "k"), 1),
    (
        "RoPE with another scaling (linear, factor 4)",
        lambda rope: mh.RoPE(scaling=mh.positions.LinearScaling(4.0)),
        ("q", "k"),
        1,
    ),
    ("RoPE turned backwards (k)", lambda rope: rope, ("q",), -1),
    ("RoPE turned backwards (q and k)", lambda rope: rope, (), -1),
]


def turned(layer, rope, forwards, other):
    def turn(name):
        sign = 1 if name in forwards else other
        return lambda t: rope.rotate(t, sign * torch.arange(t.shape[2]))

    return lambda x, **more: attention(layer, x, q=turn("q"), k=turn("k"), **more)


@pytest.mark.wrong
@pytest.mark.parametrize(("cause", "make", "forwards", "other"), TURNED, ids=[case[0] for case in TURNED])
def test_rope(cause, make, forwards, other):
    layer = layer_of(E, H, rope=True)
    candidate = turned(layer, make(layer.rope), forwards, other)
    named(lambda x: candidate(x), layer, torch.randn(2, 7, E), cause, 2)


@pytest.mark.wrong
def test_a_scaling_that_was_left_out():
    layer = layer_of(E, H, rope=mh.RoPE(scaling=mh.positions.NTKScaling(4.0)))
    candidate = turned(layer, mh.RoPE(), ("q", "k"), 1)
    named(lambda x: candidate(x), layer, torch.randn(2, 7, E), "RoPE with another scaling (none)", 2)


@pytest.mark.wrong
@pytest.mark.parametrize("mask", [None, "causal"])
def test_attention_over_the_batch_axis(mask):
    layer = layer_of(E, H)
    given = {} if mask is None else {"mask": mh.Causal()}

    def candidate(x):
        return layer(x.transpose(0, 1), **given).transpose(0, 1)

    named(candidate, layer, torch.randn(3, 5, E), "attention over the batch axis", 1, **given)


@pytest.mark.wrong
def test_torchs_layer_without_batch_first_inside_a_function():
    layer = layer_of(E, H)
    theirs = nn.MultiheadAttention(E, H).eval()
    theirs.load_state_dict(mh.save_weights(layer, layout="torch"))
    named(lambda x: theirs(x, x, x)[0], layer, torch.randn(2, 5, E), "attention over the batch axis", 1)


def test_torchs_layer_without_batch_first_by_itself_is_healthy_with_a_note():
    for first in (True, False):
        theirs = nn.MultiheadAttention(E, H, batch_first=first)
        report = mh.diagnose(theirs, None, torch.randn(2, 5, E), heads=H)
        assert report.verdict == "healthy", report
        assert any("batch_first=False" in note for note in report.notes) == (not first)


PLACES = {"x": "before", "merged heads": "merged", "the output": "output"}


@pytest.mark.wrong
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_inside(place, kind):
    layer, norm = layer_of(E, H), kind(E, eps=1e-5)
    candidate = lambda x: attention(layer, x, **{PLACES[place]: norm.to(x.dtype)})  # noqa: E731
    named(candidate, layer, torch.randn(2, 5, E), f"a norm inside ({kind.__name__} on {place})", 1)


class Normed(nn.Module):
    """With weights of its own, as TinyViT has it."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(E)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(E, E) for _ in range(4))

    def forward(self, x):
        return attention(self, x, before=self.norm)


@pytest.mark.wrong
def test_a_norm_inside_with_weights_of_its_own():
    report = mh.diagnose(Normed(), None, torch.randn(2, 5, E), heads=H)
    assert report.cause == "a norm inside (LayerNorm on x)", report


TOGETHER = {
    "RoPE pairs halves against interleaved + RoPE turned backwards (k)": lambda layer: turned(
        layer, mh.RoPE(pairing="interleaved"), ("q",), -1
    ),
    "RoPE with another base (500,000) + RoPE applied to q alone or to k alone": lambda layer: (
        lambda x: attention(layer, x, q=lambda t: mh.RoPE(base=5e5).rotate(t, torch.arange(t.shape[2])))
    ),
}


@pytest.mark.wrong
@pytest.mark.parametrize("causes", TOGETHER)
def test_two_mistakes_at_once_in_one_step(causes):
    layer = layer_of(E, H, rope=True)
    candidate = TOGETHER[causes](layer)
    report = mh.diagnose(lambda x: candidate(x), layer, torch.randn(2, 7, E))
    assert report.verdict == "diagnosed", report
    assert {cause.cause for cause in report.causes} == set(causes.split(" + ")), report
    assert {cause.step for cause in report.causes} == {2}


@pytest.mark.wrong
def test_a_mask_off_by_one_and_inverted():
    layer = layer_of(E, H)

    def candidate(x):
        t = mh.trace(layer, x)
        N = x.shape[1]
        scores = t["scores"].masked_fill(torch.ones(N, N, dtype=torch.bool).tril(1), -1e30)  # hides what it should show
        return layer.o_proj((scores.softmax(-1) @ t["v_heads"]).transpose(1, 2).flatten(2))

    report = mh.diagnose(candidate, layer, torch.randn(2, 5, E), mask=mh.Causal())
    assert report.verdict == "diagnosed", report
    assert "mask polarity inverted" in report.cause
    assert "off by one" in report.cause


# f(q, k, v) ----------------------------------------------------------------------------------------------------------


def core(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def wrong_core(q, k, v, mask=None):
    return core(q * math.sqrt(q.shape[-1]), k, v, mask)


@pytest.mark.parametrize("options", [{}, {"kv_heads": 2, "rope": True}], ids=str)
def test_a_function_of_heads(options):
    layer = layer_of(E, H, **options)
    for mask in (None, mh.Causal()):
        assert mh.diagnose(core, layer, torch.randn(2, 5, E), mask=mask).verdict == "healthy"
        named(wrong_core, layer, torch.randn(2, 5, E), "scale missing", 3, mask=mask)


def test_a_function_of_heads_without_a_reference():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    x = torch.ones(2, 5, E)
    assert mh.diagnose(core, None, x, heads=H).verdict == "healthy"
    assert mh.diagnose(wrong_core, None, x, heads=H).cause == "scale missing"
    assert torch.equal(torch.rand(1), expected)


def test_a_function_of_three_sequences_is_not_one_of_heads():
    layer = layer_of(E, H)
    theirs = nn.MultiheadAttention(E, H, batch_first=True).eval()
    theirs.load_state_dict(mh.save_weights(layer, layout="torch"))
    report = mh.diagnose(lambda query, key, value: theirs(query, key, value)[0], layer, torch.randn(2, 5, E))
    assert report.verdict == "healthy", report


# Written by strangers ------------------------------------------------------------------------------------------------


def by_heads(scores=lambda s: s, weigh=lambda s: s.softmax(-1), unit=False):
    """A function of q, k and v, right but for what is passed in."""

    def core(q, k, v):
        q, k = (nn.functional.normalize(t, dim=-1) if unit else t for t in (q, k))
        return weigh(scores(q @ k.mT / math.sqrt(q.shape[-1]))) @ v

    return core


def one_more(s):
    return s.exp() / (1 + s.exp().sum(-1, keepdim=True))


def base_2(s):
    return torch.exp2(s) / torch.exp2(s).sum(-1, keepdim=True)


STRANGERS = [
    ("softmax twice", {"weigh": lambda s: s.softmax(-1).softmax(-1)}),
    ("one more in the softmax's denominator", {"weigh": one_more}),
    ("sigmoid for softmax", {"weigh": torch.sigmoid}),
    ("softmax to the base 2", {"weigh": base_2}),
    ("q and k of length 1", {"unit": True}),
    ("half-precision scores (bfloat16)", {"scores": lambda s: s.bfloat16().float()}),
    ("half-precision scores (float16)", {"scores": lambda s: s.half().float()}),
]


@pytest.mark.wrong
@pytest.mark.parametrize(("cause", "wrong"), STRANGERS, ids=[case[0] for case in STRANGERS])
def test_written_by_a_stranger(cause, wrong):
    layer = layer_of(E, H)
    named(by_heads(**wrong), layer, torch.randn(2, 6, E), cause, 3)


@pytest.mark.wrong
@pytest.mark.parametrize("eps", [1e-6, 1e-12, None])
def test_a_norm_inside_with_another_eps(eps):
    layer = layer_of(E, H)
    normed = lambda x: nn.functional.rms_norm(x, (E,), eps=eps)  # noqa: E731
    named(lambda x: attention(layer, x, before=normed), layer, torch.randn(2, 5, E), "a norm inside (RMSNorm on x)", 1)


SHARED = [
    ("GQA: k and v repeated in two ways (`repeat` of k)", "repeat", "each"),
    ("GQA: k and v repeated in two ways (`repeat` of v)", "each", "repeat"),
    ("GQA: every head reads the first", "first", "first"),
]


@pytest.mark.wrong
@pytest.mark.parametrize(("cause", "k_of", "v_of"), SHARED, ids=[case[0] for case in SHARED])
def test_grouped_heads_shared_in_another_way(cause, k_of, v_of):
    layer = layer_of(E, H, kv_heads=2)
    share = {
        "each": lambda t: t.repeat_interleave(2, 1),
        "repeat": lambda t: t.repeat(1, 2, 1, 1),
        "first": lambda t: t[:, :1],
    }

    def candidate(x):
        q, k, v = (p(x).unflatten(-1, (-1, D)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        heads = (q @ share[k_of](k).mT / math.sqrt(D)).softmax(-1) @ share[v_of](v)
        return layer.o_proj(heads.transpose(1, 2).flatten(2))

    named(candidate, layer, torch.randn(2, 6, E), cause, 3)


@pytest.mark.wrong
@pytest.mark.parametrize("of", ["(q alone)", "(k alone)"])
def test_q_or_k_of_length_1(of):
    layer = layer_of(E, H)
    changed = {of[1]: lambda t: nn.functional.normalize(t, dim=-1)}
    named(lambda x: attention(layer, x, **changed), layer, torch.randn(2, 6, E), f"q and k of length 1 {of}", 3)


@pytest.mark.wrong
def test_a_scale_after_the_softmax():
    layer = layer_of(E, H)
    weigh = lambda s: (s * D**0.5).softmax(-1) / D**0.5  # noqa: E731
    named(lambda x: attention(layer, x, softmax=weigh), layer, torch.randn(2, 6, E), "scale after the softmax", 3)


@pytest.mark.wrong
@pytest.mark.parametrize("width", [D, E])
def test_heads_that_are_not_split(width):
    layer = layer_of(E, H)

    def candidate(x):
        q, k, v = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
        return layer.o_proj((q @ k.mT / math.sqrt(width)).softmax(-1) @ v)

    named(candidate, layer, torch.randn(2, 6, E), "heads not split", 2)


@pytest.mark.wrong
def test_a_strict_mask_whose_first_query_sees_itself():
    layer = layer_of(E, H)

    def candidate(x):
        allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(-1)
        allowed[0, 0] = True
        return layer(x, mask=allowed)

    named(candidate, layer, torch.randn(2, 6, E), "causal mask off by one, strict", 3, mask=mh.Causal())


class Turned(nn.Module):
    """A causal layer with RoPE, of which nothing was said."""

    def __init__(self, base):
        super().__init__()
        layer = mh.MultiHeadAttention(E, H, rope=mh.RoPE(base=base))
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj
        self.rope = layer.rope

    def forward(self, x):
        turn = lambda t: self.rope.rotate(t, torch.arange(t.shape[2]))  # noqa: E731
        return attention(self, x, q=turn, k=turn, offset=0)


@pytest.mark.parametrize("base", [1e4, 5e5, 1e6])
def test_what_was_not_said_is_healthy_and_told(base):
    report = mh.diagnose(Turned(base), None, torch.randn(2, 6, E), heads=H)
    assert report.verdict == "healthy", report
    said = "" if base == 1e4 else f", base {base:,.0f}"
    assert report.notes[0].startswith(
        f"it is attention with RoPE (pairing 'halves'{said}) and a causal mask, which was"
    )
    assert float(re.search(r"largest difference (\S+),", report.sure)[1]) < 1e-4  # compared with that mask
    assert mh.diagnose(Turned(base), None, torch.randn(2, 6, E), heads=H, rope=mh.RoPE(base=base),
                       mask=mh.Causal()).verdict == "healthy"  # fmt: skip


@pytest.mark.wrong
def test_a_bias_twice():
    layer = layer_of(E, H)
    candidate = lambda x: layer(x) + layer.o_proj.bias  # noqa: E731
    named(candidate, layer, torch.randn(2, 5, E), "bias twice on the output", 7)

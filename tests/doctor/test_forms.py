"""Mistakes in the form of one operation: RoPE's rotation, softcap, sinks, ALiBi, an axis that was not moved."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import multihead as mh
from tests.doctor.test_learned import D, E, H, attention, named
from tests.doctor.test_planted import layer_of

CAUSAL = [None, mh.Causal()]


def projected(layer: mh.MultiHeadAttention, x: Tensor) -> list[Tensor]:
    return [p(x).unflatten(-1, (H, D)) for p in (layer.q_proj, layer.k_proj, layer.v_proj)]  # (B, N, H, D) each


@pytest.mark.wrong
@pytest.mark.parametrize("merge", [lambda t: t.flatten(2), lambda t: t.transpose(1, 2).reshape(*t.shape[:2], -1)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", CAUSAL, ids=str)
def test_attention_over_the_heads_axis(mask, causal, merge):
    layer = layer_of(E, H)
    if causal and mask is None:
        pytest.skip("nobody asked for it")

    def candidate(x):
        mixed = F.scaled_dot_product_attention(*projected(layer, x), is_causal=causal)
        return layer.o_proj(merge(mixed))

    named(candidate, layer, torch.randn(2, 6, E), "attention over the heads axis", 2, mask=mask)


@pytest.mark.wrong
@pytest.mark.parametrize("mask", CAUSAL, ids=str)
def test_weights_transposed_before_they_mix(mask):
    layer = layer_of(E, H)

    def candidate(x):
        q, k, v = projected(layer, x)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(D)
        if mask is not None:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        return layer.o_proj(torch.einsum("bhqk,bqhv->bkhv", scores.softmax(-1), v).flatten(2))

    named(candidate, layer, torch.randn(2, 6, E), "weights transposed before they mix", 4, mask=mask)


def half(t: Tensor) -> Tensor:
    a, b = t.chunk(2, -1)
    return torch.cat((-b, a), -1)


def every_two(t: Tensor) -> Tensor:
    return torch.stack((-t[..., 1::2], t[..., ::2]), -1).flatten(-2)


def angles(t: Tensor, pairing: str) -> tuple[Tensor, Tensor]:
    frequencies = 10_000 ** (-torch.arange(0, D, 2).double() / D)
    once = torch.arange(t.shape[-2]).double()[:, None] * frequencies
    both = torch.cat((once, once), -1) if pairing == "halves" else once.repeat_interleave(2, -1)
    return both.cos().to(t), both.sin().to(t)


@pytest.mark.wrong
@pytest.mark.parametrize("reference", ["halves", "interleaved"])
@pytest.mark.parametrize(("partner", "laid"), [(half, "interleaved"), (every_two, "halves")])
def test_pairs_of_one_kind_and_angles_of_the_other(partner, laid, reference):
    layer = layer_of(E, H, rope=mh.RoPE(pairing=reference))

    def turn(t):
        cos, sin = angles(t, laid)
        return t * cos + partner(t) * sin

    cause = "RoPE pairs one way, its angles laid out the other"
    named(lambda x: attention(layer, x, q=turn, k=turn), layer, torch.randn(2, 7, E), cause, 2)


@pytest.mark.wrong
@pytest.mark.parametrize("pairing", ["halves", "interleaved"])
def test_rope_without_its_minus(pairing):
    layer = layer_of(E, H, rope=mh.RoPE(pairing=pairing))

    def turn(t):
        cos, sin = angles(t, pairing)
        partner = t.roll(D // 2, -1) if pairing == "halves" else t.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return t * cos + partner * sin

    cause = "RoPE without its minus"
    named(lambda x: attention(layer, x, q=turn, k=turn), layer, torch.randn(2, 7, E), cause, 2)


@pytest.mark.wrong
@pytest.mark.parametrize("mask", CAUSAL, ids=str)
@pytest.mark.parametrize("kv_heads", [2, H])
def test_rope_along_the_heads(kv_heads, mask):
    """With as many key/value heads as query heads all angles cancel, and nothing tells it from no RoPE at all."""
    layer = layer_of(E, H, rope=True, kv_heads=kv_heads)

    def turn(t):  # (B, N, heads, D)
        return layer.rope.rotate(t, torch.arange(t.shape[2])).transpose(1, 2)

    def candidate(x):
        q, k, v = (p(x).unflatten(-1, (-1, D)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        q, k, v = turn(q), turn(k), v.transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=mask is not None, enable_gqa=True)
        return layer.o_proj(mixed.transpose(1, 2).flatten(2))

    cause = "RoPE missing" if kv_heads == H else "RoPE along the heads instead of the items"
    report = named(candidate, layer, torch.randn(2, 7, E), cause, 2, mask=mask)
    assert "head" in report.explanation


CAPPED = {
    "softcap in another form (twice)": lambda s: 2 * torch.tanh(torch.tanh(s / 2)),
    "softcap in another form (clamped)": lambda s: s.clamp(-2, 2),
    "softcap in another form (not multiplied)": lambda s: torch.tanh(s / 2),
}


@pytest.mark.wrong
@pytest.mark.parametrize("cause", CAPPED)
def test_softcap_in_another_form(cause):
    layer = layer_of(E, H, softcap=2.0)
    softmax = lambda s: CAPPED[cause](s).softmax(-1)  # noqa: E731
    named(lambda x: attention(layer, x, softmax=softmax), layer, 3 * torch.randn(2, 6, E), cause, 3)


def beside(logits):
    """The softmax with a column of its own beside the scores, which is then dropped."""
    return lambda s, sinks: torch.cat((s, logits(sinks).expand(*s.shape[:3], 1)), -1).softmax(-1)[..., :-1]


def unshifted(s, sinks):
    raised = (s - s.amax(-1, keepdim=True)).exp()
    return raised / (raised.sum(-1, keepdim=True) + sinks.exp())


SUNK = {
    "sinks in another form (without the row's largest score taken away)": unshifted,
    "sinks in another form (times the scale)": beside(lambda sinks: sinks / math.sqrt(D)),
    "sinks in another form (negated)": beside(lambda sinks: -sinks),
    "sinks in another form (head 0's for all)": beside(lambda sinks: sinks[:, :1]),
    "sinks in another form (twice)": lambda s, sinks: s.exp() / (s.exp().sum(-1, keepdim=True) + 2 * sinks.exp()),
    "sinks missing": lambda s, sinks: (s + sinks).softmax(-1),  # the same number for a whole row changes nothing
}


@pytest.mark.wrong
@pytest.mark.parametrize("cause", SUNK)
def test_sinks_in_another_form(cause):
    layer = layer_of(E, H, sinks=True)

    def softmax(s):
        return SUNK[cause](s, layer.sinks.detach().to(s).view(1, H, 1, 1))

    named(lambda x: attention(layer, x, softmax=softmax), layer, torch.randn(2, 6, E), cause, 3)


def fading(slopes, distance):
    def softmax(s):
        queries, keys = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])
        return (s - torch.tensor(slopes).to(s)[:, None, None] * distance(queries - keys).to(s)).softmax(-1)

    return softmax


FADING = [  # heads, slopes, distance, what is said
    (4, [2.0 ** (-2 * h) for h in (1, 2, 3, 4)], abs, ""),
    (4, [2.0 ** (-2 * h) for h in (1, 2, 3, 4)], lambda d: d, " (later keys gain)"),
    (4, [2.0 ** (-2 * h) for h in (0, 1, 2, 3)], abs, " (slopes from 1 on)"),
    (4, [-(2.0 ** (-2 * h)) for h in (1, 2, 3, 4)], abs, " (growing with the distance)"),
]


@pytest.mark.wrong
@pytest.mark.parametrize(("heads", "slopes", "distance", "said"), FADING, ids=[case[3] or "right" for case in FADING])
def test_alibi_where_the_reference_has_none(heads, slopes, distance, said):
    layer = layer_of(E, heads)
    candidate = lambda x: attention(layer, x, softmax=fading(slopes, distance))  # noqa: E731
    report = named(candidate, layer, torch.randn(2, 6, E), "ALiBi where the reference has none", 3)
    assert report.cause == f"ALiBi where the reference has none{said}"


@pytest.mark.wrong
def test_alibis_slopes_where_the_heads_are_no_power_of_two():
    layer = layer_of(48, 6)

    def candidate(x):
        q, k, v = (p(x).unflatten(-1, (6, 8)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        softmax = fading([2.0 ** (-8 * h / 6) for h in range(1, 7)], abs)
        return layer.o_proj((softmax(q @ k.mT / math.sqrt(8)) @ v).transpose(1, 2).flatten(2))

    cause = "ALiBi where the reference has none (slopes 2^(−8h/H), though H is no power of two)"
    named(candidate, layer, torch.randn(2, 6, 48), cause, 3)


@pytest.mark.wrong
@pytest.mark.parametrize(("times", "said"), [(2.0, "2"), (1 / 0.9, "1.111")])
def test_weights_times_a_number(times, said):
    layer = layer_of(E, H)
    candidate = lambda x: attention(layer, x, softmax=lambda s: times * s.softmax(-1))  # noqa: E731
    report = named(candidate, layer, torch.randn(2, 6, E), f"weights times a number ({said})", 3)
    assert report.sure.startswith("certain")


def windowed(window):
    def softmax(s):
        queries, keys = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])
        return s.masked_fill((keys > queries) | (keys <= queries - window), -torch.inf).softmax(-1)

    return softmax


WINDOWS = [  # the candidate's, the reference's, what is said
    (3, None, "sliding window of another size (3 keys)"),
    (2, 4, "sliding window of another size (2 keys)"),
    (99, 3, "sliding window missing"),
    (4, 3, "sliding window off by one (one too wide)"),
    (2, 3, "sliding window off by one (one too narrow)"),
]


@pytest.mark.wrong
@pytest.mark.parametrize(("mine", "wanted", "cause"), WINDOWS, ids=[case[2] for case in WINDOWS])
@pytest.mark.parametrize("padded", [False, True])
def test_sliding_windows(mine, wanted, cause, padded):
    layer, mask, hidden = layer_of(E, H), mh.Causal(window=wanted), 0
    if padded:
        lengths = torch.tensor([7, 5])
        mask &= mh.Padding(lengths)
        hidden = torch.zeros(2, 1, 1, 7).masked_fill(torch.arange(7) >= lengths[:, None, None, None], -1e30)
    candidate = lambda x: attention(layer, x, softmax=lambda s: windowed(mine)(s + hidden))  # noqa: E731
    assert named(candidate, layer, torch.randn(2, 7, E), cause, 3, mask=mask).cause == cause

"""The known mistakes that no other file here plants; and that each of them is planted somewhere."""

import math
from pathlib import Path

import pytest
import torch

import multihead as mh
from multihead.doctor.causes import KNOWN
from tests.doctor.test_learned import D, E, H, attention, named
from tests.doctor.test_planted import layer_of

HERE = Path(__file__).parent
SCALES = {  # of a layer with E=48, H=6, D=8
    "scale multiplied instead of divided": lambda K: math.sqrt(8),
    "scale by another size (E)": lambda K: 1 / 48,
    "scale by another size (√H)": lambda K: 1 / math.sqrt(6),
    "scale by another size (H)": lambda K: 1 / 6,
    "scale by another size (√K)": lambda K: 1 / math.sqrt(K),
}


def test_every_known_mistake_is_planted_in_some_test() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in HERE.glob("test_*.py"))
    assert [cause.name for cause in KNOWN if cause.name not in tests] == []


@pytest.mark.wrong
@pytest.mark.parametrize("cause", SCALES)
def test_a_scale_made_of_another_size(cause):
    def core(q, k, v):
        return (q @ k.mT * SCALES[cause](k.shape[-2])).softmax(-1) @ v

    assert named(core, layer_of(48, 6), torch.randn(2, 7, 48), cause, 3).cause == cause


@pytest.mark.wrong
def test_the_usual_scale_where_the_reference_has_its_own():
    layer = layer_of(E, H, scale=1.0)
    named(lambda x: attention(layer, x), layer, torch.randn(2, 6, E), "scale is 1/√D, the reference has its own", 3)


@pytest.mark.wrong
def test_no_softmax():
    layer = layer_of(E, H)
    candidate = lambda x: attention(layer, x, softmax=lambda s: s)  # noqa: E731
    named(candidate, layer, torch.randn(2, 6, E), "softmax missing", 3)


def made_of(layer, q, k, v, roles="qkv"):
    """Attention of q, k and v made of these, by the matrices that `roles` names."""
    by = {"q": layer.q_proj, "k": layer.k_proj, "v": layer.v_proj}
    heads = [by[role](t).unflatten(-1, (H, D)).transpose(1, 2) for role, t in zip(roles, (q, k, v))]
    weights = (heads[0] @ heads[1].mT / math.sqrt(D)).softmax(-1)
    return layer.o_proj((weights @ heads[2]).transpose(1, 2).flatten(2))


@pytest.mark.wrong
@pytest.mark.parametrize(("cause", "roles"), [("q and v swapped", "vkq"), ("q used as k", "qqv")])
def test_matrices_in_each_others_place(cause, roles):
    layer = layer_of(E, H)
    named(lambda x: made_of(layer, x, x, x, roles), layer, torch.randn(2, 6, E), cause, 1)


SOURCES = {
    "k made from x instead of the context": lambda x, context: (x, x, context),
    "context ignored": lambda x, context: (x, x, x),
    "q made from the context instead of x": lambda x, context: (context, context, context),
}


@pytest.mark.wrong
@pytest.mark.parametrize("cause", SOURCES)
def test_what_cross_attention_is_made_of(cause):
    layer = layer_of(E, H)
    candidate = lambda x, context: made_of(layer, *SOURCES[cause](x, context))  # noqa: E731
    named(candidate, layer, torch.randn(2, 6, E), cause, 1, context=torch.randn(2, 6, E))


@pytest.mark.wrong
def test_the_norm_of_q_and_k_after_rope():
    layer = layer_of(E, H, rope=True, qk_norm=True)
    turn = lambda t: layer.rope.rotate(t, torch.arange(t.shape[-2]))  # noqa: E731
    candidate = lambda x: attention(  # noqa: E731
        layer, x, q=lambda t: layer.q_norm(turn(t)), k=lambda t: layer.k_norm(turn(t))
    )
    named(candidate, layer, torch.randn(2, 6, E), "QK-norm after RoPE", 2)


@pytest.mark.wrong
def test_a_residual_inside():
    layer = layer_of(E, H)
    named(lambda x: x + layer(x), layer, torch.randn(2, 6, E), "residual added inside", 7)


def blanked(layer, lengths):
    """Hides padded keys, and the queries at the same places."""
    real = torch.arange(6) < lengths[:, None]
    both = real[:, None, None, :] & real[:, None, :, None]

    def candidate(x, context=None):
        context = x if context is None else context
        q, k, v = (
            p(t).unflatten(-1, (H, D)).transpose(1, 2)
            for p, t in ((layer.q_proj, x), (layer.k_proj, context), (layer.v_proj, context))
        )
        weights = (q @ k.mT / math.sqrt(D)).masked_fill(~both, -1e30).softmax(-1)
        return layer.o_proj((weights @ v).transpose(1, 2).flatten(2))

    return candidate


@pytest.mark.wrong
def test_queries_hidden_as_if_they_stood_on_the_padding_of_the_context():
    layer, lengths = layer_of(E, H), torch.tensor([6, 4])
    x, context = torch.randn(2, 2, 6, E)
    cause = "padding mask on queries as well as keys"
    named(blanked(layer, lengths), layer, x, cause, 3, context=context, mask=mh.Padding(lengths))


def test_queries_that_stand_on_padding_may_put_out_anything():
    layer, lengths = layer_of(E, H), torch.tensor([6, 4])
    candidate = blanked(layer, lengths)
    report = mh.diagnose(lambda x: candidate(x), layer, torch.randn(2, 6, E), mask=mh.Padding(lengths))
    assert report.verdict == "healthy", report
    assert any("stand on padding, hold other numbers" in note for note in report.notes)

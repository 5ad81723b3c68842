"""A norm of q and k that the reference does not have, or has otherwise."""

import pytest
import torch
from torch import nn

import multihead as mh
from tests.doctor.test_learned import D, E, H, attention, named
from tests.doctor.test_planted import layer_of


@pytest.mark.wrong
@pytest.mark.parametrize("of", ["q and k", "q alone", "k alone"])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_a_norm_of_q_and_k_where_the_reference_has_none(kind, of):
    layer = layer_of(E, H)
    norm = {"RMSNorm": nn.functional.rms_norm, "LayerNorm": nn.functional.layer_norm}[kind]
    changed = {name: lambda t: norm(t, (D,)) for name in "qk" if name in of.split()}
    cause = f"QK-norm where the reference has none ({kind} on {of})"
    named(lambda x: attention(layer, x, **changed), layer, torch.randn(2, 6, E), cause, 2)


class NormedHeads(nn.Module):
    def __init__(self, layer, kind, rope=None, late=False):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj
        self.q_norm, self.k_norm = kind(D), kind(D)
        self.rope, self.late = rope, late
        with torch.no_grad():
            for p in (*self.q_norm.parameters(), *self.k_norm.parameters()):
                p.add_(0.3 * torch.randn(D))

    def forward(self, x):
        def ready(norm):
            turn = lambda t: t if self.rope is None else self.rope.rotate(t, torch.arange(t.shape[2]))  # noqa: E731
            return (lambda t: norm(turn(t))) if self.late else (lambda t: turn(norm(t)))

        return attention(self, x, q=ready(self.q_norm), k=ready(self.k_norm))


@pytest.mark.wrong
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", [nn.RMSNorm, nn.LayerNorm])
def test_a_norm_of_q_and_k_with_weights_of_its_own(kind, late):
    layer = layer_of(E, H, rope=True)
    cause = f"QK-norm where the reference has none ({kind.__name__} on q and k{', after RoPE' if late else ''})"
    named(NormedHeads(layer, kind, layer.rope, late), layer, torch.randn(2, 6, E), cause, 2)


@pytest.mark.wrong
def test_a_norm_of_q_and_k_that_is_centred():
    """As timm's, which are LayerNorms unless told otherwise."""
    candidate = NormedHeads(layer_of(E, H), nn.LayerNorm)
    report = mh.diagnose(candidate, None, torch.randn(2, 6, E), heads=H)
    assert report.cause == "QK-norm centred (LayerNorm) instead of RMSNorm", report


def test_a_norm_of_q_and_k_that_is_not_centred_is_healthy():
    candidate = NormedHeads(layer_of(E, H), nn.RMSNorm)
    assert mh.diagnose(candidate, None, torch.randn(2, 6, E), heads=H).verdict == "healthy"

"""A mistake that is not in the list is never given a false name; and what is said about it is true."""

import math

import pytest
import torch
from torch import nn

import multihead as mh
from tests.doctor.test_planted import layer_of

E, H, D = 32, 4, 8


def attention(layer, x, *, scores=lambda s: s, weights=lambda w: w, q=lambda t: t, k=lambda t: t, v=lambda t: t,
              heads=lambda t: t, output=lambda t: t, softmax=lambda s: s.softmax(-1)):  # fmt: skip
    """Right, but for what is passed in."""
    B, N, _ = x.shape
    qh, kh, vh = (p(x).view(B, N, H, D).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    s = scores(q(qh) @ k(kh).transpose(-2, -1) / math.sqrt(D))
    mixed = heads(weights(softmax(s)) @ v(vh))
    return output(layer.o_proj(mixed.transpose(1, 2).reshape(B, N, E)))


def one_head(t):
    return torch.cat([t[:, :1] * 0.5, t[:, 1:]], 1)


UNKNOWN = {
    "temperature 1.3, and a little of the row before": {"scores": lambda s: s * 1.3 + 1e-4 * s.roll(1, 2)},
    "every second head silent": {"heads": lambda t: t * torch.tensor([1.0, 0, 1, 0]).view(1, 4, 1, 1).to(t)},
    "one head halved": {"heads": one_head},
    "heads rolled by one": {"heads": lambda t: t.roll(1, 1)},
    "values shifted by one position": {"v": lambda t: t.roll(1, 2)},
    "keys reversed in time": {"k": lambda t: t.flip(2)},
    "weights squared and renormalised with a small number": {
        "weights": lambda w: w**2 / (1e-2 + (w**2).sum(-1, keepdim=True))},
    "softplus instead of softmax": {"softmax": nn.functional.softplus},
    "relu of scores, normalised": {"softmax": lambda s: s.relu() / (s.relu().sum(-1, keepdim=True) + 1e-3)},
    "half of one more in the denominator": {"softmax": lambda s: s.exp() / (0.5 + s.exp().sum(-1, keepdim=True))},
    "softmax to another base in each head": {
        "softmax": lambda s: (s * torch.tensor([1.0, 2, 3, 4]).view(1, 4, 1, 1).to(s)).softmax(-1)},
    "half-precision scores, and one row twice as large": {
        "scores": lambda s: s.bfloat16().to(s.dtype), "output": lambda t: torch.cat([2 * t[:, :1], t[:, 1:]], 1)},
    "half-precision scores, and one head halved": {"scores": lambda s: s.half().to(s.dtype), "heads": one_head},
    "half-precision scores, and a row that weighs all alike": {
        "scores": lambda s: s.half().to(s.dtype).index_fill(-2, torch.tensor([2]), 0)},
    "noise as large as half precision": {
        "scores": lambda s: s + 1e-3 * torch.sin(1e4 * s.detach()) * s.abs()},
    "weights cut to three digits": {"weights": lambda w: (w * 1000).floor() / 1000},
    "the largest weight only": {"weights": lambda w: w * (w == w.amax(-1, keepdim=True))},
    "output doubled": {"output": lambda t: 2 * t},
    "tanh on the output": {"output": torch.tanh},
    "q of length 1, by the sum of its numbers": {"q": lambda t: t / t.abs().sum(dim=-1, keepdim=True)},
    "a norm of q and k that is added to them": {
        "q": lambda t: t + nn.functional.rms_norm(t, (D,)), "k": lambda t: t + nn.functional.rms_norm(t, (D,))},
    "half-precision scores, scale missing, and one row twice as large": {
        "scores": lambda s: (s * D**0.5).bfloat16().to(s.dtype),
        "output": lambda t: torch.cat([1.02 * t[:, :1], t[:, 1:]], 1)},
    "a layer in half precision, and one head halved": {
        "q": lambda t: t.bfloat16().to(t.dtype), "k": lambda t: t.bfloat16().to(t.dtype),
        "v": lambda t: t.bfloat16().to(t.dtype), "heads": one_head, "output": lambda t: t.bfloat16().to(t.dtype)},
    "capped, but not by tanh": {"scores": lambda s: 2 * (s / 2).atan()},
    "distance penalty": {"scores": lambda s: s - (torch.arange(s.shape[-1]) - torch.arange(s.shape[-2])[:, None]).abs()},
    "small noise of a bug": {"output": lambda t: t + 1e-4 * t.roll(1, -1)},
}  # fmt: skip


@pytest.mark.parametrize("what", UNKNOWN)
@pytest.mark.wrong
def test_no_false_name(what):
    layer = layer_of(E, H)
    report = mh.diagnose(lambda x: attention(layer, x, **UNKNOWN[what]), layer, torch.randn(2, 5, E))
    assert report.verdict == "unknown", report
    assert report.cause is None
    assert report.step is None
    assert report.where
    assert report.exit_status == 2


def where(what, **options):
    layer = layer_of(E, H)
    report = mh.diagnose(lambda x: attention(layer, x, **UNKNOWN[what]), layer, torch.randn(2, 5, E), **options)
    return "\n".join(report.where)


def test_a_wrong_scale_is_measured():
    assert "1.3 times the right ones" in where("temperature 1.3, and a little of the row before")


def test_wrong_heads_are_told():
    assert "these differ: 1, 3; these are right: 0, 2" in where("every second head silent")
    assert "of 4 heads, these differ: 0; these are right: 1, 2, 3" in where("one head halved")


def test_wrong_weights_are_told_from_wrong_values():
    assert "add up to" in where("softplus instead of softmax")
    assert "depends on the order of the items" in where("values shifted by one position")


def test_what_it_depends_on_is_told():
    layer = layer_of(E, H)

    def leaky(x):
        return layer(x, mask=mh.Causal()) + 0.01 * x.mean((0, 1))

    report = mh.diagnose(leaky, layer, torch.randn(2, 5, E), mask=mh.Causal())
    assert report.verdict == "unknown", report
    assert any("depends on the future" in sentence for sentence in report.where)
    assert any("batch neighbour" in sentence for sentence in report.where)


def test_submodules_are_watched():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(E, E) for _ in range(4))

        def forward(self, x):
            B, N, _ = x.shape
            q, k, v = (p(x).view(B, N, H, D).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
            weights = (q @ k.transpose(-2, -1) / math.sqrt(D)).softmax(-1)
            return self.out_proj((weights @ v).roll(1, 1).transpose(1, 2).reshape(B, N, E))

    report = mh.diagnose(Odd(), None, torch.randn(2, 5, E), heads=H)
    assert report.verdict == "unknown", report
    assert "what comes out of q_proj is right" in report.where
    assert "what goes into out_proj is not `merged` of the seven steps" in report.where
    assert "so look in steps 2 to 6" in report.where


def test_rounding_is_told_from_a_mistake():
    layer = layer_of(E, H)

    def rough(x):
        return layer(x) if x.dtype == torch.float64 else layer(x.to(torch.bfloat16).float())

    double = layer_of(E, H).double()
    double.load_state_dict(layer.state_dict())

    def candidate(x):
        return double(x) if x.dtype == torch.float64 else rough(x)

    report = mh.diagnose(candidate, layer, torch.randn(2, 5, E))
    assert report.verdict == "unknown", report
    assert "rounds more" in report.headline

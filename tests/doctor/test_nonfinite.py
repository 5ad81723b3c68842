"""NaN and inf: the doctor says that they are there, where they first appear, and why."""

import math

import pytest
import torch
from torch import nn

import multihead as mh
from tests.doctor.test_planted import layer_of

E, H, D = 32, 4, 8


class Attention(nn.Module):
    """Right, but for what `mistake` names."""

    def __init__(self, layer, mistake="", factor=1.0):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(E, E) for _ in range(4))
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            getattr(self, name).load_state_dict(getattr(layer, name).state_dict())
        self.mistake, self.factor = mistake, factor

    def forward(self, x):
        m = self.mistake
        q, k, v = (p(x).unflatten(-1, (H, D)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        if m == "nan in v":
            v = v.clone()
            v[:, 1, 2] = math.nan
        if m == "half":
            scores = (q.half() @ k.half().transpose(-2, -1)).to(x.dtype) / math.sqrt(D)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(D)
        if m == "no maximum":
            raised = scores.exp()
            weights = raised / raised.sum(-1, keepdim=True)
        else:
            weights = scores.softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.wrong
def test_fp16_scores_beyond_65504():
    layer = layer_of(E, H).half()
    x = torch.randn(2, 5, E)
    x[0, 3] *= 300  # one loud item: q·k of it with itself is beyond the range
    report = mh.diagnose(Attention(layer).half(), layer, x.half())
    assert (report.verdict, report.step) == ("diagnosed", 3), report
    assert report.cause == "scores overflow before the scale"
    assert "NaN" in report.headline
    assert "first appears in step 3, head " in report.where[0]
    assert "query 3, sequence 0" in report.where[0]
    assert "65,504" in report.where[0]


@pytest.mark.wrong
def test_scores_in_half_precision_overflow_in_a_float32_layer():
    layer, x = layer_of(E, H), torch.randn(2, 5, E)
    x[1, 2] *= 300
    report = mh.diagnose(Attention(layer, "half"), layer, x)
    assert report.verdict == "diagnosed", report
    assert report.cause.startswith(("scores overflow", "half-precision scores")), report


@pytest.mark.wrong
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_exp_without_subtracting_the_maximum(dtype):
    layer = layer_of(E, H).to(dtype)
    x = torch.randn(2, 5, E, dtype=dtype)
    x[1, 4] *= 30 if dtype == torch.float32 else 100
    report = mh.diagnose(Attention(layer, "no maximum").to(dtype), layer, x)
    assert (report.verdict, report.cause, report.step) == (
        "diagnosed",
        "softmax without subtracting the maximum",
        3,
    ), report
    assert "query 4, sequence 1" in report.where[0]
    assert "amax" in report.fix


def test_exp_without_subtracting_the_maximum_in_a_healthy_range_is_healthy_with_a_note():
    layer = layer_of(E, H)
    for mistake in ("no maximum", ""):
        report = mh.diagnose(Attention(layer, mistake), layer, torch.randn(2, 5, E))
        assert report.verdict == "healthy", report
        assert any("does not subtract" in note for note in report.notes) == bool(mistake)


def test_nan_of_unknown_making_is_placed():
    layer = layer_of(E, H)
    report = mh.diagnose(Attention(layer, "nan in v"), layer, torch.randn(2, 5, E))
    assert (report.verdict, report.cause) == ("unknown", None)
    assert report.headline == "Its output holds NaN."
    assert report.where == (
        "10 of 10 rows hold NaN where the right numbers are finite; the first is row 0 of sequence 0",
        "NaN goes into o_proj, first in head 1, query 0: so look in steps 2 to 6",
    )
    assert not report.evidence
    assert "rounding" not in str(report)


def test_rows_that_see_nothing_are_said_to_be_the_reason():
    layer, lengths = layer_of(E, H), torch.tensor([5, 0])

    def candidate(x):
        t = mh.trace(layer, x)
        seen = torch.arange(x.shape[1]) < lengths[: x.shape[0], None]
        scores = t["scores"].masked_fill(~seen[:, None, None], -torch.inf)
        return layer.o_proj((scores.softmax(-1) @ t["v_heads"]).transpose(1, 2).flatten(2))

    report = mh.diagnose(candidate, layer, torch.randn(2, 5, E), mask=mh.Padding(lengths))
    assert report.verdict == "healthy", report
    assert any("rows that see nothing, or stand on padding, are NaN" in note for note in report.notes)


@pytest.mark.wrong
def test_nan_throughout_is_no_overflow_although_these_items_would_overflow():
    """Items as loud as this overflow float16 everywhere: NaN everywhere says nothing, the quiet probes do."""
    layer, x = layer_of(E, H), 10_000 * torch.randn(2, 5, E)
    report = mh.diagnose(lambda x: layer(x) * math.nan, layer, x)
    assert report.verdict == "unknown", report
    assert "NaN" in report.headline

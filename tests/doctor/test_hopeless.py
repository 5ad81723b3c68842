"""Hopeless code: each way to fail is itself a finding, well put; and nothing of it reaches the caller."""

import math

import pytest
import torch
from torch import nn

import multihead as mh
from tests.doctor.test_planted import layer_of

E, H = 32, 4


@pytest.fixture
def layer():
    return layer_of(E, H)


def test_an_exception(layer):
    def candidate(x):
        return x.view(3, 3)

    report = mh.diagnose(candidate, layer, torch.randn(2, 5, E))
    assert (report.verdict, report.exit_status, report.cause) == ("unknown", 2, None)
    assert report.headline == "It raises an exception."
    assert "shape '[3, 3]' is invalid" in report.where[0]
    assert "return x.view(3, 3)" in report.where[1]


@pytest.mark.parametrize("what", [None, "text", [], object(), 3])
def test_no_tensor(layer, what):
    report = mh.diagnose(lambda x: what, layer, torch.randn(2, 5, E))
    assert report.verdict == "unknown"
    assert "expected a tensor" in report.where[0]


def test_a_wrong_shape(layer):
    report = mh.diagnose(lambda x: layer(x)[:, :-1], layer, torch.randn(2, 5, E))
    assert report.verdict == "unknown"
    assert report.headline == "It returns the shape (2, 4, 32): expected (2, 5, 32)."
    report = mh.diagnose(lambda x: layer(x).transpose(0, 1), layer, torch.randn(2, 5, E))
    assert "another order" in report.where[0]


@pytest.mark.parametrize(("name", "step"), [("heads", 5), ("transposed", 6), ("weights", 4), ("q_heads", 3)])
def test_an_intermediate_is_recognised(layer, name, step):
    report = mh.diagnose(lambda x: mh.trace(layer, x)[name], layer, torch.randn(2, 5, E))
    assert report.verdict == "diagnosed", report
    assert report.step == step
    assert report.cause == f"it stops after step {step - 1}"


def test_a_wrong_dtype(layer):
    report = mh.diagnose(lambda x: layer(x).double(), layer, torch.randn(2, 5, E))
    assert report.cause == "the output is float64 for an input of float32"
    report = mh.diagnose(lambda x: layer(x).long(), layer, torch.randn(2, 5, E))
    assert report.verdict == "unknown"
    assert "expected floating" in report.headline


def test_an_input_changed_in_place(layer):
    def candidate(x):
        y = layer(x)
        x.mul_(2)
        return y

    x = torch.randn(2, 5, E)
    before = x.clone()
    report = mh.diagnose(candidate, layer, x)
    assert report.cause == "changes its input in place", report
    assert report.exit_status == 1
    assert torch.equal(x, before), "the caller's own tensor is not touched"

    def worse(x):
        t = mh.trace(layer, x)
        x.zero_()
        return layer.o_proj(((t["scores"] * 8**0.5).softmax(-1) @ t["v_heads"]).transpose(1, 2).flatten(2))

    report = mh.diagnose(worse, layer, x)
    assert [cause.cause for cause in report.causes] == ["scale missing", "changes its input in place"]


def test_a_state_that_is_kept(layer):
    calls = []

    def candidate(x):
        calls.append(x)
        return layer(x) + 0.1 * len(calls)

    report = mh.diagnose(candidate, layer, torch.randn(2, 5, E))
    assert report.verdict == "unknown"
    assert report.headline == "It answers differently every time."


def test_nan_everywhere(layer):
    report = mh.diagnose(lambda x: layer(x) * math.nan, layer, torch.randn(2, 5, E))
    assert report.verdict == "unknown", report
    assert report.headline == "Its output holds NaN."
    assert report.where[0].startswith("10 of 10 rows hold NaN where the right numbers are finite; the first is row 0")
    assert "difference" not in str(report)


def test_a_fixed_length_is_noted(layer):
    def candidate(x):
        if x.shape[1] != 5:
            raise ValueError("only five")
        return layer(x)

    report = mh.diagnose(candidate, layer, torch.randn(2, 5, E))
    assert report.verdict == "healthy", report
    assert any("only five" in note for note in report.notes)


def test_a_large_input_is_cut(layer):
    report = mh.diagnose(layer, layer, torch.randn(2, 600, E), mask=mh.Causal())
    assert report.verdict == "healthy"
    assert any("2 sequences of 32 items" in note for note in report.notes)


def test_modes_threads_parameters_and_random_numbers_are_left_as_they_were():
    candidate = nn.MultiheadAttention(E, H, dropout=0.5, batch_first=True).train()
    before = {name: p.clone() for name, p in candidate.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    threads = torch.get_num_threads()
    x = torch.ones(2, 5, E)
    assert mh.diagnose(candidate, None, x, heads=H).verdict == "healthy"
    assert torch.equal(torch.rand(1), expected)
    assert torch.get_num_threads() == threads
    assert candidate.training
    assert all(torch.equal(p, before[name]) for name, p in candidate.state_dict().items())


def test_wrong_arguments_are_refused(layer):
    with pytest.raises(TypeError, match="candidate is a int"):
        mh.diagnose(3, layer, torch.randn(5, E))
    with pytest.raises(ValueError, match=r"x is \(32,\)"):
        mh.diagnose(layer, layer, torch.randn(E))
    with pytest.raises(ValueError, match="give heads="):
        mh.diagnose(layer, None, torch.randn(5, E))
    with pytest.raises(TypeError, match="ropes"):
        mh.diagnose(layer, layer, torch.randn(5, E), ropes=True)

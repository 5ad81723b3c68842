"""`multihead.nn.replace`: what it swaps, what it keeps, and what it leaves as it was and reports."""

import copy
from typing import Any

import torch
from torch import nn
from torch.testing import assert_close

from multihead.nn import MultiheadAttention, replace

N, L, E, H = 2, 5, 12, 4


class Own(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_replace_keeps_everything_but_the_computation() -> None:
    model = nn.ModuleDict({"a": nn.MultiheadAttention(E, H, dropout=0.1, batch_first=True), "b": nn.Linear(E, E)})
    model["again"] = model["a"]
    attention, before = model["a"].eval().double(), copy.deepcopy(model.state_dict())
    parameters, calls = list(model.parameters()), []
    attention.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(N, L, E, dtype=torch.float64)
    expected = attention(x, x, x)
    report = replace(model)
    assert report.replaced == ["a"]
    assert model["a"] is attention is model["again"]
    assert type(attention) is MultiheadAttention
    assert all(one is two for one, two in zip(model.parameters(), parameters))
    assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert (attention.training, attention.dropout, attention.in_proj_weight.dtype) == (False, 0.1, torch.float64)
    assert_close(attention(x, x, x), expected)
    assert len(calls) == 2


def test_replace_takes_the_model_itself_and_is_done_once() -> None:
    model = nn.MultiheadAttention(E, H)
    assert replace(model).replaced == [""]
    assert "(the model)" in str(replace(nn.MultiheadAttention(E, H)))
    assert replace(model).replaced == []


def test_replace_reports_what_it_leaves() -> None:
    model = nn.ModuleDict(
        {"own": Own(E, H), "patched": nn.MultiheadAttention(E, H), "plain": nn.MultiheadAttention(E, H)}
    )
    model["patched"].forward = lambda *args, **kwargs: None
    report = replace(model)
    assert report.replaced == ["plain"]
    assert report.left.keys() == {"own", "patched"}
    assert "left own: a subclass, Own" in str(report)
    assert type(model["own"]) is Own

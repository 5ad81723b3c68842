"""Entropy and the largest weights, in the same pass as the output."""

from __future__ import annotations

import math

import pytest
import torch
from oracle import ISAS, assert_fine, error, judge_both, random
from test_kernel_forward import CASES, OPTIONS, Case

SOME = [CASES[i] for i in (0, 2, 3, 4, 5, 6, 7, 9)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", SOME, ids=lambda c: c.why)
@pytest.mark.parametrize("option", ["none", "sinks", "all at once"])
def test_statistics(option: str, case: Case, dtype: torch.dtype, isa: str) -> None:
    problem = case.problem(dtype, **({} if option == "none" else OPTIONS[option](case)))
    n = 5
    shape = (case.B, case.H, case.Q)
    entropy = torch.full(shape, math.nan, dtype=dtype)
    top, keys = torch.full((*shape, n), math.nan, dtype=dtype), torch.full((*shape, n), -7)
    for judged in judge_both(problem, isa, entropy=entropy, top=top, keys=keys):
        assert_fine([judged])

    weights, _ = problem.weights(torch.float64)
    eps = torch.finfo(dtype).eps
    assert error(entropy, torch.special.entr(weights).sum(-1)) < 60 * eps
    seen = (weights > 0).sum(-1, keepdim=True)
    count = min(n, case.K)
    expected = torch.topk(weights, count, -1).values
    assert error(top[..., :count], expected) < 20 * eps
    there = torch.arange(n) < seen
    assert torch.equal(keys >= 0, there)
    assert (top[~there] == 0).all()
    assert error(top, weights.gather(-1, keys.clamp(0)) * there) < 20 * eps
    distinct = keys.masked_fill(~there, 10**6) + torch.where(there, 0, torch.arange(n))
    assert all(len(set(row)) == n for row in distinct.reshape(-1, n).tolist())


@pytest.mark.parametrize("isa", ISAS)
def test_ties_go_to_the_lowest_key(isa: str) -> None:
    problem = random(1, 1, 1, 3, 300, 8, 8)
    problem.k[:] = 1.0
    top, keys = torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4, dtype=torch.int64)
    problem.native(isa, top=top, keys=keys)
    assert (keys == torch.arange(4)).all()

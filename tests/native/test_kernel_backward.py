"""Gradients against float64 autograd through the definition: the same table of sizes, masks and options."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from oracle import ISAS, Problem, Wanted, assert_fine, remembered, rounding
from test_kernel_forward import CASES, OPTIONS, Case, noise
from torch import Tensor

all_isas = pytest.mark.parametrize("isa", ISAS)
both_products = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)  # of numbers, and of pairs


def gradients_given(problem: Problem, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Of the output, and of the log-sum-exp."""
    B, H, _, Q, _, _, V = problem.sizes
    return noise(B, H, Q, V).to(problem.q.dtype), noise(B, H, Q).to(problem.wide) if with_lse else None


@remembered
def wanted_gradients(problem: Problem, with_lse: bool = False) -> list[Wanted]:
    """Of q, k and v."""
    problem = problem.copy()
    d_out, d_lse = gradients_given(problem, with_lse)
    dtype = problem.q.dtype
    plain = functools.cache(lambda product: problem.plain_gradients(dtype, d_out, d_lse, product))
    found = []
    for i, exact in enumerate(problem.plain_gradients(torch.float64, d_out, d_lse)):
        own = rounding(exact, dtype)
        if dtype == torch.float64:  # the oracle's own error is of the same size
            own += 256 * torch.finfo(dtype).eps * max(1.0, exact.abs().max().item())
        found.append(Wanted(exact, own, lambda product, i=i: plain(product)[i]))
    return found


def check(problem: Problem, isa: str, with_lse: bool = False) -> None:
    given = gradients_given(problem, with_lse)
    for ours, wanted in zip(problem.native_gradients(*given, isa), wanted_gradients(problem, with_lse), strict=True):
        assert_fine([wanted.judge(ours)])


SOME = [c for c in CASES if c.Q and c.K and c.V]


@all_isas
@pytest.mark.parametrize("case", SOME, ids=lambda c: c.why)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_gradients_within_twice_plain(case: Case, isa: str, dtype: torch.dtype) -> None:
    check(case.problem(dtype), isa, with_lse=dtype != torch.bfloat16)


@all_isas
@both_products
@pytest.mark.parametrize("option", [o for o in OPTIONS if o not in ("sinks", "all at once")])
@pytest.mark.parametrize("case", [CASES[2], CASES[5], CASES[9]], ids=lambda c: c.why)
def test_options(option: str, case: Case, dtype: torch.dtype, isa: str) -> None:
    check(case.problem(dtype, **OPTIONS[option](case)), isa)


@all_isas
@both_products
@pytest.mark.parametrize("option", ["sinks", "all at once"])
def test_sinks_stand_in_the_denominator(option: str, dtype: torch.dtype, isa: str) -> None:
    check(CASES[2].problem(dtype, **OPTIONS[option](CASES[2])), isa)


@all_isas
@pytest.mark.parametrize("size", [1e4, 1e12, 1e19], ids=str)
def test_large_logits_keep_their_digits(isa: str, size: float) -> None:
    problem = CASES[4].problem(scale=1.0)
    problem.q[..., 0] = 100.0
    problem.k[..., 0] = torch.where(torch.arange(problem.k.shape[2]) % 3 == 0, size / 100, -size / 100)
    check(problem, isa)


@all_isas
@both_products
@pytest.mark.parametrize("where", ["q", "k", "v", "d_out"])
def test_hidden_numbers_reach_no_gradient(where: str, dtype: torch.dtype, isa: str) -> None:
    """A NaN spoils the gradients of the rows and keys that meet it, and no others."""
    case = CASES[4]
    clean, dirty = case.problem(dtype), case.problem(dtype)
    d_out = noise(case.B, case.H, case.Q, case.V).to(dtype)
    spoiled, at = d_out.clone(), 100
    if where == "d_out":
        spoiled[:, :, at] = math.nan
    else:
        getattr(dirty, where)[:, :, at] = math.nan
    a, b = clean.native_gradients(d_out, isa=isa), dirty.native_gradients(spoiled, isa=isa)
    if where in ("k", "v"):  # queries before key 100 do not see it; keys that only they see do not exist
        assert torch.equal(a[0][:, :, :at], b[0][:, :, :at])
        assert torch.isnan(b[0][:, :, at:]).all()
    else:  # keys after query 100 are hidden from it
        assert torch.equal(a[1][:, :, at + 1 :], b[1][:, :, at + 1 :])
        assert torch.equal(a[2][:, :, at + 1 :], b[2][:, :, at + 1 :])
        assert torch.isnan(b[1][:, :, : at + 1]).all()
        others = [i for i in range(case.Q) if i != at]
        assert torch.equal(a[0][:, :, others], b[0][:, :, others])


@all_isas
@both_products
def test_a_query_that_sees_nothing_has_no_gradient(dtype: torch.dtype, isa: str) -> None:
    problem = CASES[3].problem(dtype)
    d_out = noise(3, 2, 65, 40).to(dtype)
    d_out[:, :, 0] = math.nan
    d_q, d_k, d_v = problem.native_gradients(d_out, isa=isa)
    assert (d_q[:, :, :2] == 0).all()
    assert torch.isfinite(d_k).all()
    assert torch.isfinite(d_v).all()


@all_isas
@both_products
def test_bits_do_not_depend_on_threads(dtype: torch.dtype, isa: str) -> None:
    problem = CASES[4].problem(dtype)
    d_out = noise(1, 2, 197, 64).to(dtype)
    one, three = (problem.native_gradients(d_out, isa=isa, threads=n) for n in (1, 3))
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))


@all_isas
@pytest.mark.parametrize("scale", [3.0, 0.3, 0.03], ids=str)
def test_saturated_rows_keep_their_small_gradients(isa: str, scale: float) -> None:
    """Where one weight is nearly 1, a gradient is what is left of two nearly equal numbers.

    A weight is known to eps * |score|, whoever computes it, and where the gradient is that of one such weight the plain
    implementation is sometimes lucky: this is the condition number that the bound is wider by. One query of eight
    numbers: in a single draw luck decides up to twice the bound. Weights below the smallest normal number are 0.
    """
    d_out = noise(1, 1, 1, 8)
    for seed in range(128):
        make = torch.Generator().manual_seed(seed)
        q, k = 30 * torch.randn(1, 1, 1, 8, generator=make), torch.randn(1, 1, 65, 8, generator=make)
        problem = Problem(q, k, k.clone(), scale)
        ours, exact = problem.native_gradients(d_out, isa=isa), problem.plain_gradients(torch.float64, d_out)
        plain = functools.cache(lambda product, of=problem: of.plain_gradients(torch.float32, d_out, product=product))
        for i in range(2):
            own = rounding(exact[i], torch.float32) * (1 + problem.scores(torch.float64).abs().max().item())
            lost = torch.finfo(torch.float32).tiny * 65 * scale * 100 * q.abs().max().item()
            judged = Wanted(exact[i], lost + own, lambda product, i=i, plain=plain: plain(product)[i]).judge(ours[i])
            assert judged.found <= 2 * judged.most, f"seed {seed}: {judged}"

"""Weights from a given state, and what they add up to: every case and option on every instruction set."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from oracle import ISAS, Problem, error, from_the_end, one_by_one, random, remembered, rounding
from test_kernel_forward import CASES, OPTIONS, Case, causal, noise
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, adaptive_max_pool2d

from multihead import _native

all_isas = pytest.mark.parametrize("isa", ISAS)
SOME = [c for c in CASES if c.Q and c.K]
SIZES = ((3, 4), (1, 1), (70, 5), (2, 300))  # of maps: few bins, one, more of them than queries, than keys
WITHOUT_DROPOUT = [name for name in OPTIONS if not name.startswith("dropout")]


def filled(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, math.nan, dtype=dtype)


def look_at(problem: Problem, isa: str, threads: int = 2) -> dict[str, Tensor]:
    """All that the kernel tells of the weights."""
    (B, H, _, Q, K, _, _), wide = problem.sizes, problem.wide
    entropy, mass, received = filled(B, H, Q, dtype=wide), filled(B, H, Q, dtype=wide), filled(B, H, K, dtype=wide)
    given, top = filled(B, H, Q, dtype=wide), filled(B, H, Q, 3, dtype=wide)
    keys, weights = torch.full((B, H, Q, 3), -7), torch.zeros(B, H, Q, K, dtype=wide)
    state = problem.scan(isa, threads, entropy=entropy)
    asked = {"entropy": given, "mass": mass, "top": top, "keys": keys}
    problem.given(state, isa, threads, **asked)
    problem.look(state, isa, threads, weights=weights)
    problem.look(state, isa, threads, received=received)
    beside = torch.zeros_like(weights)
    if _native.most_weighed_keys >= K:
        problem.native(isa, threads, weights=beside)
        assert torch.equal(beside.nan_to_num(7), weights.nan_to_num(7))  # to the last bit
    found = {"weights": weights, "received": received, "mass": mass, "entropy": entropy, "entropy, given": given}
    for size in SIZES:
        for largest in (False, True):
            picture = filled(B, H, *size, dtype=wide)
            problem.look(state, isa, threads, map=picture, largest=largest)
            found[f"map {size} {largest}"] = picture
    return found | {"top": top, "keys": keys}


def dense(w: Tensor) -> dict[str, Tensor]:
    """The same from all weights."""
    pools: dict[bool, Callable] = {False: adaptive_avg_pool2d, True: adaptive_max_pool2d}
    entropy = torch.special.entr(w).sum(-1)
    found = {"weights": w, "received": w.sum(-2), "mass": w.sum(-1), "entropy": entropy, "entropy, given": entropy}
    padded = torch.nn.functional.pad(w.sort(dim=-1, descending=True).values, (0, 3))
    return (
        found | {f"map {size} {big}": pools[big](w, size) for size in SIZES for big in pools} | {"top": padded[..., :3]}
    )


@remembered
def wanted_of(problem: Problem) -> dict[str, tuple[Tensor, float]]:
    """What the weights tell, and how far from it ours may be: twice as far as plain in the same dtype."""
    own = problem.wide
    plain = [dense(problem.weights(own, product)[0]) for product in (torch.matmul, one_by_one, from_the_end)]
    found = {}
    for name, exact in dense(problem.weights(torch.float64)[0]).items():
        slack = 64 * torch.finfo(own).eps * max(1.0, exact.abs().max().item()) if own == torch.float64 else 0.0
        found[name] = exact, 2 * max(error(p[name], exact) for p in plain) + rounding(exact, own) + slack
    return found


def check(problem: Problem, isa: str) -> None:
    found, own = look_at(problem, isa), problem.wide
    for name, (exact, most) in wanted_of(problem).items():
        assert error(found[name], exact) <= most, name
    seen = problem.visible().sum(-1)
    assert torch.equal((found["keys"] >= 0).sum(-1), seen.clamp(max=3))
    there = torch.nn.functional.pad(found["weights"], (0, 1)).gather(
        -1, found["keys"].where(found["keys"] >= 0, -1) % (problem.k.shape[2] + 1)
    )
    assert error(found["top"], there) <= rounding(there, own) * (64 if own == torch.float64 else 2)


@all_isas
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", SOME, ids=lambda c: c.why)
def test_every_case(case: Case, dtype: torch.dtype, isa: str) -> None:
    check(case.problem(dtype), isa)


@all_isas
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [CASES[2], CASES[4], CASES[5]], ids=lambda c: c.why)
@pytest.mark.parametrize("option", WITHOUT_DROPOUT)
def test_every_option(option: str, case: Case, dtype: torch.dtype, isa: str) -> None:
    check(case.problem(dtype, **OPTIONS[option](case)), isa)


@all_isas
def test_large_scores_keep_their_digits(isa: str) -> None:
    problem = CASES[4].problem(scale=1.0)
    problem.q[..., 0] = 100.0
    problem.k[..., 0] = torch.where(torch.arange(problem.k.shape[2]) % 3 == 0, 100.0, -100.0)
    check(problem, isa)


@all_isas
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", SOME, ids=lambda c: c.why)
def test_bits_do_not_depend_on_threads(case: Case, dtype: torch.dtype, isa: str) -> None:
    problem = case.problem(dtype)
    one = look_at(problem, isa, threads=1)
    for threads in (2, 3, 7):
        many = look_at(problem, isa, threads)
        for name, wanted in one.items():
            assert torch.equal(many[name], wanted), name


@all_isas
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_the_same_numbers_in_every_pass(dtype: torch.dtype, isa: str) -> None:
    """Keys in lanes or queries in lanes, pooled or not: bit for bit."""
    options = {"softcap": 3.0, "bias": noise(1, 2, 41, 300)} | causal(41, 300)
    problem = random(1, 2, 1, 41, 300, 19, 0, dtype=dtype, **options)
    found = look_at(problem, isa)
    alone = problem.q[:, :, :1]
    for q in range(41):  # one query at a time: its column sums are its weights
        single = Problem(alone, problem.k, problem.v, problem.scale, stop=(260 + q, 0, 300), softcap=3.0)
        single.q, single.bias = problem.q[:, :, q : q + 1], problem.bias[:, :, q : q + 1]  # type: ignore[index]
        assert torch.equal(look_at(single, isa)["received"], found["weights"][:, :, q])
    picture = torch.zeros(1, 2, 41, 300)
    problem.look(problem.scan(isa), isa, map=picture)
    state = problem.scan(isa)
    weights = torch.zeros(1, 2, 41, 300)
    problem.look(state, isa, weights=weights)
    assert torch.equal(picture, weights)


@all_isas
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_a_visible_nan_spoils_its_rows_and_nothing_hidden(bad: float, isa: str) -> None:
    clean, dirty = CASES[4].problem(), CASES[4].problem()
    dirty.k[:, :, 100] = bad
    a, b = look_at(clean, isa), look_at(dirty, isa)
    visible = dirty.visible()
    sees = visible[..., 100].expand(a["mass"].shape)
    for name in ("mass", "entropy", "entropy, given", "weights", "top", "keys"):
        assert torch.equal(a[name][~sees], b[name][~sees]), name
    spoiled = sees[..., None] & visible
    assert torch.equal(torch.isnan(b["weights"]), spoiled.expand(b["weights"].shape))
    assert torch.isnan(b["top"][..., 0][sees]).all()
    assert torch.isnan(b["entropy"][sees]).all()
    assert torch.equal(torch.isnan(b["received"]), spoiled.any(-2).expand(b["received"].shape))
    assert torch.equal(a["received"][..., 101:].isnan(), torch.zeros_like(a["received"][..., 101:]).bool())
    for size in SIZES:
        wanted = adaptive_max_pool2d(spoiled.float().expand(b["weights"].shape), size) > 0
        for largest in (False, True):
            assert torch.equal(torch.isnan(b[f"map {size} {largest}"]), wanted)


@all_isas
def test_a_query_that_sees_nothing(isa: str) -> None:
    problem = random(1, 2, 2, 40, 33, 16, 16, **causal(40, 33))
    for problem.sinks in (None, torch.tensor([0.5, -2.0])):
        found = look_at(problem, isa)
        for name in ("mass", "entropy", "entropy, given", "weights", "top"):
            assert (found[name][:, :, :7] == 0).all(), name
        assert (found["keys"][:, :, :7] == -1).all()


@all_isas
@pytest.mark.parametrize("n", [1, 2, 7, 64, 300, 400])
def test_many_of_the_largest_in_order_with_ties(n: int, isa: str) -> None:
    problem = random(1, 2, 2, 26, 300, 4, 1)
    problem.q, problem.k = problem.q.round(), problem.k.round()
    weights, keys = filled(1, 2, 26, n, dtype=torch.float32), torch.full((1, 2, 26, n), -7)
    problem.given(problem.scan(isa), isa, top=weights, keys=keys)
    order = problem.scores(torch.float32).sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(keys[..., :300], order[..., :n])
    assert (keys[..., 300:] == -1).all()
    assert (weights.diff() <= 0).all()


def test_refusals_are_in_words() -> None:
    problem = CASES[0].problem()
    state = problem.scan()
    with pytest.raises(ValueError, match="a map needs a height and a width of at least 1"):
        problem.look(state, map=torch.empty(*problem.sizes[:2], 0, 4))
    with pytest.raises(ValueError, match="with a given state there are statistics only"):
        problem.native(given=state)


@all_isas
def test_weights_beside_the_output_change_nothing_and_are_limited(isa):
    problem = random(1, 2, 1, 70, 1030, 8, 5)
    weights = torch.zeros(1, 2, 70, 1030)
    with pytest.raises(ValueError, match="1024 keys"):
        problem.native(isa, weights=weights)
    short = replace(problem, k=problem.k[:, :, :1024], v=problem.v[:, :, :1024])
    for threads in (1, 2):
        out, lse = short.native(isa, threads, weights=weights[..., :1024])
        assert all(torch.equal(a, b) for a, b in zip((out, lse), short.native(isa, threads), strict=True))
    assert not weights[..., 1024:].any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 70))

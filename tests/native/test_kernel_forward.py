"""The forward kernel on every instruction set of this machine: sizes, masks, options and awkward numbers."""

from __future__ import annotations

import math
from dataclasses import astuple
from typing import Any

import pytest
import torch
from oracle import ISAS, Problem, assert_fine, assert_within_bound, causal, judge_both, random, window
from tests import cases

from multihead.masks import Documents, lower
from multihead.masks.intervals import Frame, Ramp


class Case(cases.Case):
    """A row of the table, as the kernel is called."""

    def problem(self, dtype: torch.dtype = torch.float32, **options: Any) -> Problem:
        sizes = (self.B, self.H, self.G, self.Q, self.K, self.D, self.V)
        visible = lower(self.mask, Frame.of(self.Q, self.K), self.B, self.H)
        bounds = {"start": visible.start, "stop": visible.stop}
        mask = {name: astuple(at) if isinstance(at, Ramp) else at.expand(1, 1, -1) for name, at in bounds.items()}
        return random(*sizes, dtype=dtype, **{**mask, **options})


CASES = [Case(**vars(row)) for row in cases.CASES if row.kernel]
all_isas = pytest.mark.parametrize("isa", ISAS)
all_cases = pytest.mark.parametrize("case", CASES, ids=lambda c: c.why)


@all_isas
@all_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_error_is_at_most_twice_plain(case, isa, dtype):
    assert_within_bound(case.problem(dtype), isa)


OPTIONS = {
    "softcap": lambda c: {"softcap": 1.7},
    "small softcap, large scores": lambda c: {"softcap": 30.0, "scale": 40.0},
    "negative scale": lambda c: {"scale": -0.3},
    "scale zero": lambda c: {"scale": 0.0},
    "sinks": lambda c: {"sinks": torch.linspace(-3, 9, c.H)},
    "bias (B,H,Q,K)": lambda c: {"bias": noise(c.B, c.H, c.Q, c.K)},
    "bias (1,H,1,K)": lambda c: {"bias": noise(1, c.H, 1, c.K)},
    "bias with -inf": lambda c: {"bias": noise(c.B, 1, c.Q, c.K).masked_fill(noise(c.B, 1, c.Q, c.K) > 0, -math.inf)},
    "bias by columns": lambda c: {"bias": noise(c.B, c.H, c.K, c.Q).mT},
    "allowed (B,1,Q,K)": lambda c: {"allowed": noise(c.B, 1, c.Q, c.K) > 0.3},
    "allowed (B,1,1,K)": lambda c: {"allowed": noise(c.B, 1, 1, c.K) > 0.3},
    "allowed by blocks": lambda c: {"allowed": torch.arange(c.K) // 130 % 2 == torch.arange(c.Q)[:, None] // 20 % 2},
    "allowed none": lambda c: {"allowed": torch.zeros(c.Q, c.K, dtype=torch.bool)},
    "dropout": lambda c: {"dropout": 0.3, "seed": 2**40 + 7},
    "dropout everything": lambda c: {"dropout": 1.0, "seed": 3},
    "all at once": lambda c: {
        "softcap": 2.0,
        "bias": noise(1, c.H, c.Q, c.K),
        "allowed": noise(c.B, 1, c.Q, c.K) > -1,
        "sinks": torch.linspace(-1, 1, c.H),
        "dropout": 0.1,
        "seed": 11,
    },
}


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


@all_isas
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [CASES[2], CASES[4], CASES[5], CASES[7], CASES[9]], ids=lambda c: c.why)
@pytest.mark.parametrize("option", OPTIONS)
def test_options(option, case, isa, dtype):
    assert_within_bound(case.problem(dtype, **OPTIONS[option](case)), isa)


SHAPES = {  # how the largest scores lie along the keys
    "rising": lambda K: torch.linspace(-40, 40, K),
    "falling": lambda K: torch.linspace(40, -40, K),
    "constant": lambda K: torch.full((K,), 3.0),
    "±1e4": lambda K: torch.where(torch.arange(K) % 3 == 0, 1e4, -1e4),
    "±1e19": lambda K: torch.where(torch.arange(K) % 3 == 0, 1e19, -1e19),
    "all of 3e38": lambda K: torch.full((K,), 3e38),
    "rising to 1e30": lambda K: torch.logspace(0, 30, K),
    "1e-42": lambda K: torch.full((K,), 1e-42),
    "one hot": lambda K: torch.where(torch.arange(K) == K // 2, 1e4, 0.0),
}


@all_isas
@pytest.mark.parametrize("case", [CASES[4], CASES[7], CASES[10]], ids=lambda c: c.why)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_of_every_shape(shape, case, isa):
    problem = case.problem(scale=1.0)
    problem.q[..., 1:] *= 1e-3
    problem.q[..., 0] = 1.0
    problem.k[..., 0] = SHAPES[shape](case.K)
    assert_within_bound(problem, isa)


@all_isas
@pytest.mark.parametrize("scale", [1e-42, 1e-20, 1e20], ids=str)
def test_tiny_and_huge_values(scale, isa):
    problem = CASES[4].problem()
    problem.v *= scale
    assert_within_bound(problem, isa)


@all_isas
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("case", [CASES[2], CASES[4], CASES[5], CASES[6], CASES[9]], ids=lambda c: c.why)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hidden_numbers_never_reach_a_query(case, where, bad, isa, dtype):
    """Queries that do not see the bad key are bit for bit what they are without it; those that do are not finite."""
    clean, dirty = case.problem(dtype), case.problem(dtype)
    key = case.K * 2 // 3
    getattr(dirty, where)[:, :, key] = bad
    (out, lse), (bad_out, bad_lse) = clean.native(isa), dirty.native(isa)
    sees = clean.visible()[..., key]
    assert torch.equal(out[~sees], bad_out[~sees])
    assert torch.equal(lse[~sees], bad_lse[~sees])
    exact, _ = dirty.plain(torch.float64)
    assert torch.equal(torch.isfinite(exact), torch.isfinite(bad_out))
    if math.isnan(bad):
        assert torch.isnan(bad_out[sees]).all()


@all_isas
@pytest.mark.parametrize("how", ["allowed", "bias"])
@pytest.mark.parametrize("case", [CASES[2], CASES[4], CASES[9]], ids=lambda c: c.why)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_numbers_hidden_by_a_dense_mask_stay_hidden(case, how, isa, dtype):
    shown = noise(case.B, 1, case.Q, case.K) > 0
    shown[..., case.K // 2] = False
    option = {"allowed": shown} if how == "allowed" else {"bias": torch.where(shown, 0.0, -math.inf)}
    clean, dirty = case.problem(dtype, **option), case.problem(dtype, **option)
    dirty.k[:, :, case.K // 2] = math.nan
    dirty.v[:, :, case.K // 2] = math.inf
    for a, b in zip(clean.native(isa), dirty.native(isa), strict=True):
        assert torch.equal(a, b)


@all_isas
def test_a_query_that_is_nan_is_alone(isa):
    problem = CASES[4].problem()
    clean, _ = problem.native(isa)
    problem.q[0, 1, 40] = math.nan
    out, _ = problem.native(isa)
    assert torch.isnan(out[0, 1, 40]).all()
    out[0, 1, 40] = clean[0, 1, 40]
    assert torch.equal(out, clean)


@all_isas
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_query_that_sees_nothing(isa, dtype):
    problem = random(1, 2, 2, 40, 33, 16, 16, dtype=dtype, **causal(40, 33))
    problem.v[:] = math.nan
    out, lse = problem.native(isa)
    assert (out[:, :, :7] == 0).all()
    assert (lse[:, :, :7] == -math.inf).all()
    problem.sinks = torch.tensor([0.5, -2.0])
    out, lse = problem.native(isa)
    assert (out[:, :, :7] == 0).all()
    assert torch.equal(lse[0, :, :7].float(), problem.sinks[:, None].expand(2, 7))


@all_isas
def test_strides_and_broadcast(isa):
    """Any strides with a contiguous last axis, stride 0 among them, and rows so far apart that they are copied."""
    B, H, G, Q, K, D, V = 2, 4, 2, 37, 53, 16, 24
    wide = torch.randn(B, K, G, 700, generator=torch.Generator().manual_seed(1))
    q = torch.randn(B, Q, H, D, generator=torch.Generator().manual_seed(2)).transpose(1, 2)
    k, v = wide[..., :D].transpose(1, 2), wide[..., 100 : 100 + V].transpose(1, 2)
    out = torch.empty(B, Q, H, V).transpose(1, 2)
    assert_within_bound(Problem(q, k, v, 0.25, **causal(Q, K)), isa, out=out)
    same = k[:1].expand(B, G, K, D)
    assert_within_bound(Problem(q, same, v, 0.25), isa)
    assert_within_bound(Problem(q[:, :, :1], k[:, :, :1].expand(B, G, K, D), v, 0.25), isa)


@all_isas
@pytest.mark.parametrize("bits", [torch.int32, torch.int64], ids=str)
def test_bounds_of_every_broadcast(isa, bits):
    B, H, Q, K = 3, 2, 11, 47
    make = torch.Generator().manual_seed(3)
    for shape in [(B, 1, 1), (1, H, 1), (1, 1, Q), (B, H, Q)]:
        start = torch.randint(-5, K, shape, generator=make).to(bits)
        stop = torch.randint(0, K + 9, shape, generator=make).to(bits)
        assert_within_bound(random(B, H, 1, Q, K, 8, 8, start=start, stop=stop), isa)


@all_isas
@pytest.mark.parametrize("case", [c for c in CASES if c.Q and c.K], ids=lambda c: c.why)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_do_not_depend_on_threads_or_batch(case, isa, dtype):
    problem = case.problem(dtype)
    one = problem.native(isa, threads=1)
    for threads in (2, 3, 7):
        for a, b in zip(one, problem.native(isa, threads=threads), strict=True):
            assert torch.equal(a, b)
    if not isinstance(case.mask, Documents):
        last = Problem(problem.q[-1:], problem.k[-1:], problem.v[-1:], problem.scale, problem.start, problem.stop)
        assert torch.equal(last.native(isa)[0], one[0][-1:])


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa.endswith("_bf16")])
def test_bfloat16_is_multiplied_in_pairs_where_that_is_said(isa):
    """An instruction for pairs takes numbers below the smallest normal for 0: no other way of multiplying does."""
    problem = random(1, 1, 1, 40, 64, 32, 32, dtype=torch.bfloat16)
    problem.q.fill_(2.0**-130)
    problem.k.fill_(0.0)
    problem.k[..., :7, :] = 2.0**127
    in_pairs, widened = problem.native(isa)[1], problem.native("portable")[1]
    assert torch.equal(in_pairs, torch.full_like(in_pairs, math.log(64)))
    assert (widened > math.log(64) + 0.1).all()


def test_generator_matches_its_definition():
    """Counted, not only close: the dropped weights are exactly the ones the definition drops."""
    problem = random(2, 3, 3, 19, 101, 8, 101, dropout=0.5, seed=0x123456789ABCDEF)
    problem.v[:] = torch.eye(101)
    out, _ = problem.native()
    from oracle import kept

    assert torch.equal(out != 0, kept(problem.seed, 0.5, 2, 3, 19, 101))


@pytest.mark.parametrize("seed", range(4))
def test_ten_thousand_random_small_cases(seed):
    fuzz(10_000 // len(ISAS) // 4 + 1, seed)


LUCK = 0.01  # the part of all random cases in which one draw may be beyond the bound, and the mean of 16 decides


def fuzz(count: int, seed: int) -> None:
    """So many cases, each on every instruction set."""
    make = torch.Generator().manual_seed(seed)

    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (1,), generator=make))]

    redrawn = dict.fromkeys(ISAS, 0)
    for trial in range(count):
        G = pick(1, 2, 3)
        H, B, Q = G * pick(1, 2, 3, 5), pick(1, 2, 3), pick(1, 2, 3, 4, 5, 8, 17, 24, 25, 49, 70)
        K, D, V = pick(1, 2, 7, 16, 63, 127, 129, 200, 300), pick(1, 3, 8, 15, 16, 31, 40), pick(1, 2, 8, 9, 16, 33)
        lengths = torch.randint(0, K + 1, (B, 1, 1), generator=make)
        masks = [{}, causal(Q, K), window(Q, K, pick(0, 3, 50), pick(0, 4)), {"stop": lengths}]
        options: dict = dict(pick(*masks))
        if pick(True, False, False):
            options["allowed"] = noise(pick(1, B), pick(1, H), pick(1, Q), K) > pick(-1.5, 0.0, 1.5)
        if pick(True, False, False):
            options["bias"] = noise(pick(1, B), pick(1, H), pick(1, Q), K)
        if pick(True, False, False):
            options["softcap"] = pick(0.5, 20.0)
        if pick(True, False, False):
            options["sinks"] = noise(H)
        if pick(True, False, False):
            options |= {"dropout": pick(0.1, 0.9), "seed": trial}
        dtype = pick(torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
        threads = pick(1, 2)

        sizes = (B, H, G, Q, K, D, V)

        def judged(draw: int, isa: str, options: dict = options, sizes: tuple = sizes, dtype=dtype, threads=threads):
            return judge_both(random(*sizes, dtype=dtype, draw=draw, **options), isa, threads=threads)

        for isa in ISAS:
            try:
                if all(j.found <= j.most for j in judged(trial, isa)):
                    continue
                redrawn[isa] += 1
                draws = [judged(draw, isa) for draw in range(trial, trial + 16)]  # few numbers: luck decides in one
                for several in zip(*draws, strict=True):
                    assert_fine(several)
            except AssertionError as failure:
                raise AssertionError(f"{isa} trial {trial}: {sizes} {dtype} {list(options)}") from failure
    for isa, often in redrawn.items():
        assert often <= LUCK * count, f"{isa}: the mean of 16 draws was needed in {often} of {count} cases"


def test_refusals_are_in_words():
    problem = CASES[0].problem()
    with pytest.raises(ValueError, match="unknown: this machine has portable"):
        problem.native("sse9")
    with pytest.raises(ValueError, match="out is not of the shape, dtype or layout"):
        problem.native(out=torch.empty(*problem.q.shape[:3], problem.v.shape[3] + 1))
    with pytest.raises(ValueError, match="a name is not one"):
        problem.native(output=torch.empty(1))
    with pytest.raises(ValueError, match="does not divide H"):
        random(1, 5, 2, 3, 3, 4, 4).native()
    with pytest.raises(ValueError, match="dropout"):
        random(1, 2, 2, 3, 3, 4, 4, dropout=1.5).native()

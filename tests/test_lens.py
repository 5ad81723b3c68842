"""The lens: every method against dense float64 weights, what it refuses, what it shares and what it keeps in memory.

Longer than other files because every method of the lens meets the same dense weights.
"""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import multihead as mh
from multihead import attention, kernel
from multihead import lens as lens_module
from multihead.call import Reason
from multihead.kernel import eligible
from multihead.kernel import statistics as native_statistics
from multihead.lens import region
from tests.cases import CASES, ORDERS, Case, accepting, assert_within_bound, by_why, max_error

WAYS = {"the kernel": {}, "torch": {}, "torch in small tiles": {"SIDE": 8, "TILE": 128}}
SMALL = [case for case in CASES if case.Q * case.K < 1500]  # where many tiles still take no time
COMPUTED = [(case, way) for way in WAYS for case in (SMALL if way == "torch in small tiles" else CASES)]
computed = pytest.mark.parametrize(
    ("case", "way"), COMPUTED, ids=[f"{case.why}, {way}" for case, way in COMPUTED], indirect=["way"]
)
every_way = pytest.mark.parametrize("way", WAYS, indirect=True)


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who computes statistics: the C++ kernel, or plain torch, in tiles of one size or another."""
    for name, value in WAYS[request.param].items():
        monkeypatch.setattr(region, name, value)
    if request.param != "the kernel":
        monkeypatch.setattr(eligible, "scores", lambda region: Reason("the test says so", True))
    elif kernel.module is None:
        pytest.skip(f"the native module is {kernel.missing}")
    return request.param


def lens_of(case: Case, dtype: torch.dtype, lse: Tensor | None = None) -> mh.Lens:
    t = case.tensors(dtype)
    del t["v"]
    return mh.look(**t, **case.options, mask=case.mask, lse=lse)


def dense_weights(case: Case, dtype: torch.dtype, lse: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """Exact ones in float64, and plain ones in `dtype`, which are exp(score − lse) where the lse is given."""
    exact = torch.from_numpy(case.exact_weights(dtype)[0].astype(np.float64))
    if lse is None:
        return exact, [case.plain_weights(dtype, order)[0] for order in ORDERS]
    plain = [torch.exp(case.plain_scores(dtype, order) - lse[..., None]) for order in ORDERS]
    exact_lse = torch.from_numpy(case.exact_weights(dtype)[1].astype(np.float64))
    rounded = (
        exact * torch.exp(torch.where(exact_lse == lse, 0, exact_lse - lse))[..., None]
    )  # by that of the lse alone
    return exact, [w.masked_fill((lse == -torch.inf)[..., None], 0) for w in [*plain, rounded]]


def largest(w: Tensor, n: int) -> Tensor:
    """The n largest weights, filled up with 0."""
    return F.pad(w.sort(dim=-1, descending=True).values, (0, n))[..., :n]


def thirds(n: int) -> list[int]:
    """Some of n things, in no order, from either end."""
    return [n - 1, 0, -1, n // 2] if n else []


# What a lens gives, and the same from all weights w (B,H,Q,K).
METHODS: dict[str, tuple[Callable[[mh.Lens], Tensor], Callable[[Tensor], Tensor]]] = {
    "weights": (lambda lens: lens.weights(), lambda w: w),
    "a row": (lambda lens: lens.rows(slice(-1, None)), lambda w: w[:, :, -1:]),
    "rows": (lambda lens: lens.rows(thirds(lens.shape[2])), lambda w: w[:, :, thirds(w.shape[2])]),
    "rows of heads": (
        lambda lens: lens.rows(slice(None, None, -2), heads=[-1, 0]),
        lambda w: w.flip(2)[:, [-1, 0], ::2],
    ),
    "columns": (lambda lens: lens.columns(slice(2, 5)), lambda w: w[..., 2:5]),
    "columns of heads": (
        lambda lens: lens.columns(thirds(lens.shape[3]), heads=slice(0, 1)),
        lambda w: w[:, :1, :, thirds(w.shape[3])],
    ),
    "entropy": (lambda lens: lens.entropy(), lambda w: torch.special.entr(w).sum(-1)),
    "peak": (lambda lens: lens.peak()[0], lambda w: largest(w, 1)[..., 0]),
    "top": (lambda lens: lens.top(3)[0], lambda w: largest(w, 3)),
    "received": (lambda lens: lens.received(), lambda w: w.sum(-2)),
    "mass": (lambda lens: lens.mass(slice(1, 4)), lambda w: w[..., 1:4].sum(-1)),
    "mass of any": (lambda lens: lens.mass(thirds(lens.shape[3])), lambda w: w[..., thirds(w.shape[3])].sum(-1)),
}
MAPS: dict[str, tuple[Callable[[mh.Lens], Tensor], Callable[[Tensor], Tensor]]] = {
    "map": (lambda lens: lens.map(3, 4), lambda w: F.adaptive_avg_pool2d(w, (3, 4))),
    "map, largest": (lambda lens: lens.map(3, 4, pool="max"), lambda w: F.adaptive_max_pool2d(w, (3, 4))),
    "map, finer": (lambda lens: lens.map(19, 31), lambda w: F.adaptive_avg_pool2d(w, (19, 31))),
    "map, zoomed": (
        lambda lens: lens.map(2, 3, queries=range(lens.shape[2] // 2, lens.shape[2]), keys=slice(1, 6), heads=[0]),
        lambda w: F.adaptive_avg_pool2d(w[:, :1, w.shape[2] // 2 :, 1:6], (2, 3)),
    ),
    "map of any": (
        lambda lens: lens.map(5, 2, queries=slice(None, None, -3), keys=range(0, lens.shape[3], 2), pool="max"),
        lambda w: F.adaptive_max_pool2d(w.flip(2)[:, :, ::3, ::2], (5, 2)),
    ),
}


@pytest.mark.parametrize(
    "lse_of", [None, *sorted({"native", "reference"} & set(accepting(CASES[0])))], ids=lambda name: f"lse of {name}"
)
@computed
def test_every_method_equals_the_same_from_dense_float64_weights(case: Case, way: str, lse_of: str | None) -> None:
    if lse_of == "native" and way != "the kernel":
        return  # to torch one foreign lse is like another
    methods = METHODS | (MAPS if case.Q and case.K > 1 else {})
    for dtype in (torch.float32, torch.bfloat16):
        lse = None if lse_of is None else case.run(dtype, lse_of, return_lse=True)[1]
        exact, plain = dense_weights(case, dtype, lse)
        lens = lens_of(case, dtype, lse)
        for name, (ours, dense) in methods.items():
            found, wanted = ours(lens), dense(exact).numpy()
            assert found.dtype == torch.float32
            worst = max((dense(w) for w in plain), key=lambda w: max_error(w, wanted))
            try:
                assert_within_bound(found, worst, wanted, dtype)
            except AssertionError as error:
                raise AssertionError(f"{name} in {dtype}: {error}") from error


class TestAttendWithWeights:
    """What models are given that ask for all weights beside the output."""

    @pytest.fixture(params=["in one pass", "from the kernel's state", "from the log-sum-exp"])
    def found(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
        if request.param == "from the log-sum-exp":
            monkeypatch.setattr(attention, "FEW_ROWS", 2**40)
        elif kernel.module is None:
            pytest.skip(f"the native module is {kernel.missing}")
        elif request.param == "from the kernel's state":
            monkeypatch.setattr(kernel.module, "most_weighed_keys", 0)
        return request.param

    @pytest.mark.parametrize("case", CASES, **by_why)
    def test_both_are_within_the_bound(self, case: Case, found: str) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            given = {**case.tensors(dtype), **case.options, "mask": case.mask}
            out, weights = lens_module.attend_with_weights(**given)
            assert torch.equal(out, mh.attend(**given))  # asking changes nothing
            assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            lse = case.run(dtype, None, return_lse=True)[1] if found == "from the log-sum-exp" else None
            exact, plain = dense_weights(case, dtype, lse)
            worst = max(plain, key=lambda w: max_error(w, exact.numpy()))
            assert_within_bound(weights, worst, exact.numpy(), dtype)

    @pytest.mark.skipif(kernel.module is None, reason=f"the native module is {kernel.missing}")
    def test_whoever_computes_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert kernel.module is not None
        q, k, v = torch.randn(3, 2, 4, 40, 16)
        q[0, 0, 3], k[1, 2, 7] = torch.nan, torch.inf
        given = {"mask": mh.Causal(window=9), "sinks": torch.randn(4), "bias": torch.randn(4, 40, 40)}
        given["bias"][1, 5] = -torch.inf  # a query that sees only its sink
        out, weights = lens_module.attend_with_weights(q, k, v, **given)
        for owner, name, value in ((kernel.module, "most_weighed_keys", 0), (attention, "FEW_ROWS", 2**40)):
            monkeypatch.setattr(owner, name, value)
            other_out, others = lens_module.attend_with_weights(q, k, v, **given)
            torch.testing.assert_close(out, other_out, equal_nan=True)
            torch.testing.assert_close(weights, others, equal_nan=True)
        assert weights[0, 0, 3].isnan().any()
        assert not weights[0, 1, 5].any()

    def test_long_rows(self) -> None:
        q, k, v = torch.randn(1, 2, 20, 8), *torch.randn(2, 1, 1, 1030, 8)
        for keys in (1024, 1025, 1030):
            weights = lens_module.attend_with_weights(q, k[:, :, :keys], v[:, :, :keys], mask=mh.Causal())[1]
            torch.testing.assert_close(weights, mh.look(q, k[:, :, :keys], mask=mh.Causal()).weights())

    def test_a_dense_mask_may_hide_a_whole_tile(self) -> None:
        q, k, v = torch.randn(3, 1, 2, 300, 8)
        mask = torch.ones(300, 300, dtype=torch.bool)
        mask[:, 128:256], mask[7] = False, False
        weights = lens_module.attend_with_weights(q, k, v, mask=mask)[1]
        torch.testing.assert_close(weights, mh.look(q, k, mask=mask).weights())

    def test_dropout_is_drawn_as_without_weights(self) -> None:
        q, k, v = torch.randn(3, 1, 2, 40, 16)
        torch.manual_seed(5)
        plain = mh.attend(q, k, v, dropout=0.5)
        torch.manual_seed(5)
        out, weights = lens_module.attend_with_weights(q, k, v, dropout=0.5)
        assert torch.equal(out, plain)
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 40))

    def test_a_named_backend_runs(self) -> None:
        q, k, v = torch.randn(3, 1, 2, 40, 16)
        with mh.backend("reference"):
            out, weights = lens_module.attend_with_weights(q, k, v)
            assert torch.equal(out, mh.attend(q, k, v))
        torch.testing.assert_close(weights, torch.softmax(q @ k.mT / 4, -1))


@computed
def test_float64_stays_float64(case: Case, way: str) -> None:
    exact, lens = (
        torch.from_numpy(case.exact_weights(torch.float64)[0].astype(np.float64)),
        lens_of(case, torch.float64),
    )
    for name, (ours, dense) in METHODS.items():
        found = ours(lens)
        torch.testing.assert_close(found, dense(exact), rtol=1e-9, atol=1e-11, msg=lambda m: f"{name}: {m}")  # noqa: B023


@computed
def test_the_keys_of_peak_and_top_are_where_the_weights_are(case: Case, way: str) -> None:
    lens, n = lens_of(case, torch.float64), 4
    weights, (top, keys), (peak, key) = lens.weights(), lens.top(n), lens.peak()
    assert (keys.dtype, key.dtype) == (torch.int64, torch.int64)
    assert torch.equal(keys[..., 0], key)
    torch.testing.assert_close(top[..., 0], peak)
    there = F.pad(weights, (0, 1)).gather(-1, keys.where(keys >= 0, case.K))  # key −1: weight 0
    torch.testing.assert_close(top, there, rtol=1e-9, atol=1e-15)
    for chosen in keys.flatten(0, 2).tolist():
        real = [k for k in chosen if k >= 0]
        assert len(set(real)) == len(real)
        assert chosen[len(real) :] == [-1] * (n - len(real))
    seen = torch.zeros(case.B, case.H, case.Q, case.K, dtype=torch.bool)
    seen |= torch.tensor(True) if case.mask is None else case.mask.dense(case.Q, case.K)
    if "bias" in (t := case.tensors(torch.float64)):
        seen &= t["bias"] != -torch.inf
    assert torch.equal((keys >= 0).sum(-1), seen.sum(-1).clamp(max=n))


@every_way
def test_ties_go_to_the_lowest_key(way: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(0, 3, (1, 2, 33, 4), generator=generator).float()
    k = torch.randint(0, 3, (1, 2, 47, 4), generator=generator).float()
    lens = mh.look(q, k, mh.Causal(), scale=1.0)
    scores = (q @ k.transpose(-1, -2)).masked_fill(~mh.Causal().dense(33, 47), -torch.inf)
    wanted = scores.sort(dim=-1, descending=True, stable=True).indices[..., :9]
    assert torch.equal(lens.top(9)[1], wanted)
    assert torch.equal(lens.peak()[1], wanted[..., 0])


@every_way
def test_a_query_that_sees_nothing(way: str) -> None:
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 3, 8)
    lens = mh.look(q, k, mh.Causal())  # the first two queries stand before the first key
    assert lens.rows([0, 1]).count_nonzero() == 0
    assert lens.entropy()[..., :2].count_nonzero() == 0
    assert (lens.lse[..., :2] == -torch.inf).all()
    for weight, key in (lens.peak(), lens.top(2)):
        assert (weight[:, :, :2] == 0).all()
        assert (key[:, :, :2] == -1).all()
    with_sink = mh.look(q, k, mh.Causal(), sinks=torch.tensor([0.5, -2.0]))
    assert torch.equal(with_sink.lse[0, :, 0], torch.tensor([0.5, -2.0]))
    assert with_sink.peak()[1][0, 0, 0] == -1


@every_way
@pytest.mark.parametrize("pool", ["mean", "max"])
def test_what_is_hidden_stays_hidden_and_a_visible_nan_stays_in_its_rows(pool: str, way: str) -> None:
    q, k = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    k[:, :, 4] = torch.nan  # visible to queries 4 and 5
    lens, clean = mh.look(q, k, mh.Causal()), mh.look(q[:, :, :4], k[:, :, :4], mh.Causal())
    for found, wanted in ((lens.entropy(), clean.entropy()), (lens.peak()[0], clean.peak()[0])):
        assert torch.equal(found[..., :4], wanted)
        assert found[..., 4:].isnan().all()
    w = lens.weights()
    assert torch.equal(w[:, :, :4, :4], clean.weights())
    assert w[:, :, 4, :5].isnan().all()
    assert (w[:, :, 4, 5] == 0).all()
    assert (lens.mass([5])[..., 4] == 0).all()
    assert lens.received()[..., :5].isnan().all()
    picture = lens.map(6, 6, pool=pool)
    assert torch.equal(picture.isnan(), w.isnan())


# What is computed, and what is not ------------------------------------------------------------------------------------


@pytest.fixture
def work(way: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(queries, keys) of each pass over scores that starts, whoever computes it."""
    passes: list[tuple[int, int]] = []
    tiles, read = region.Region.tiles, native_statistics._read

    def read_counted(part: region.Region) -> Any:
        passes.append(part.shape[2:])
        return read(part)

    def counted(self: region.Region, all_heads: bool = False) -> Any:
        passes.append(self.shape[2:])
        return tiles(self, all_heads)

    monkeypatch.setattr(region.Region, "tiles", counted)
    monkeypatch.setattr(native_statistics, "_read", read_counted)
    return passes


@every_way
def test_after_attend_each_question_is_one_pass_over_what_it_is_about(work: list) -> None:
    q, k = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 13, 8)
    lse = mh.attend(q, k, k, mh.Causal(), return_lse=True)[1]
    lens = mh.look(q, k, mh.Causal(), lse=lse)
    assert work == []
    for ask, passes in (
        (lambda: lens.rows([3, 4]), [(2, 13)]),
        (lambda: lens.columns(5), [(9, 1)]),
        (lambda: lens.mass(slice(0, 2)), [(9, 2)]),
        (lambda: lens.map(2, 2, queries=range(4), keys=range(3)), [(4, 3)]),
        (lambda: lens.top(2), [(9, 13)]),
        (lambda: lens.entropy(), [(9, 13)]),
        (lambda: lens.peak(), []),
        (lambda: lens.received(), [(9, 13)]),
        (lambda: lens.received(), []),
        (lambda: lens.lse, []),
    ):
        work.clear()
        ask()
        assert work == passes


@every_way
def test_without_the_lse_entropy_and_peak_are_one_pass_that_finds_it_too(work: list) -> None:
    q = torch.randn(1, 2, 9, 8)
    lens = mh.look(q, q, mh.Causal())
    lens.entropy(), lens.peak(), lens.lse
    assert work == [(9, 9)]
    lens.received()
    assert len(work) == 2


@every_way
def test_a_few_rows_cost_a_few_rows(work: list) -> None:
    q = torch.randn(1, 2, 900, 8)
    mh.look(q, q, mh.Causal()).rows(range(3))
    assert work == [(3, 900), (3, 900)]  # their lse, and they


def test_hidden_blocks_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "SIDE", 16)
    monkeypatch.setattr(region, "TILE", 256)
    q = torch.randn(1, 1, 160, 8)
    done = lambda mask: sum(tile.numel() for _, tile in mh.look(q, q, mask).tiles())  # noqa: E731
    assert done(None) == 160 * 160
    assert done(mh.Causal()) == 16 * 16 * 10 * 11 / 2
    assert done(mh.Causal(window=16)) < 10 * 2 * 16 * 16
    assert done(mh.Documents([80, 80])) == 160 * 80
    assert done(mh.Padding([16])) == 160 * 16


# Gradients ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [c for c in CASES if c.Q * c.K < 10_000 and c.K > 4 and c.Q > 1], **by_why)
def test_rows_and_columns_have_the_gradients_of_the_specification(case: Case) -> None:
    rows, keys, heads = [1, -1], [3, 0], [0, -1]

    def gradients(part: Callable[[dict], Tensor]) -> list[Tensor]:
        t = {n: x.requires_grad_() for n, x in case.tensors(torch.float64).items() if n != "v"}
        found = part(t | case.options | {"mask": case.mask})
        weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=found.dtype)
        return list(torch.autograd.grad((found * weights).sum(), list(t.values())))

    def dense(t: dict) -> Tensor:
        """All weights, as the mean that values of one hot key each would give."""
        eye = torch.eye(case.K, dtype=torch.float64).expand(case.B, case.G, case.K, case.K)
        return mh.attend(v=eye, backend="reference", **t)

    def after_attend(t: dict) -> mh.Lens:
        lse = mh.attend(v=t["k"], backend="reference", return_lse=True, **t)[1]
        return mh.look(**t, lse=lse)

    for ours, spec in (
        (lambda t: mh.look(**t).rows(rows, heads), lambda t: dense(t)[:, heads][:, :, rows]),
        (lambda t: mh.look(**t).columns(keys, heads), lambda t: dense(t)[:, heads][..., keys]),
        (lambda t: after_attend(t).columns(keys), lambda t: dense(t)[..., keys]),
    ):
        for found, wanted in zip(gradients(ours), gradients(spec)):
            torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)


REFUSING = {
    "entropy": lambda lens: lens.entropy(),
    "peak": lambda lens: lens.peak()[0],
    "top": lambda lens: lens.top(2)[0],
    "received": lambda lens: lens.received(),
    "mass": lambda lens: lens.mass(0),
    "map": lambda lens: lens.map(2, 2),
    "lse": lambda lens: lens.lse,
}


@pytest.mark.parametrize("name", REFUSING)
def test_what_has_no_gradient_says_so_when_asked_for_one(name: str) -> None:
    q, k = torch.randn(1, 2, 5, 8, requires_grad=True), torch.randn(1, 2, 5, 8)
    found = REFUSING[name](mh.look(q, k))
    with pytest.raises(RuntimeError, match=rf"{name} of a lens has no gradient.*rows\(\) and columns\(\) have one"):
        found.sum().backward()
    with torch.no_grad():
        assert not REFUSING[name](mh.look(q, k)).requires_grad
    assert torch.equal(REFUSING[name](mh.look(q.detach(), k)), found.detach())


def test_results_are_ones_own_to_change() -> None:
    lens = mh.look(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8))
    for ask in (lens.entropy, lambda: lens.peak()[0], lambda: lens.peak()[1], lens.received, lambda: lens.lse):
        wanted = ask().clone()
        ask().zero_()
        assert torch.equal(ask(), wanted)


# Memory, dtypes, odds and ends ----------------------------------------------------------------------------------------


def test_memory_is_of_order_n_at_long_lengths() -> None:
    """At 16,384 tokens, where the weights are 2 GiB, everything but them fits in 64 MiB."""
    script = """
import resource, torch, multihead as mh
def ask(q, k):
    causal = mh.look(q[:, :1, :4096], k[:, :, :4096], mh.Causal())
    causal.entropy(), causal.peak(), causal.received()
    lens = mh.look(q, k, mh.Causal(window=256))
    lens.entropy(), lens.received(), lens.top(2), lens.mass(slice(0, 9)), lens.map(64, 64), lens.map(64, 64, pool="max")
    lens.rows([5, 9]), lens.columns([7])
q, k = torch.randn(1, 2, 16384, 16), torch.randn(1, 1, 16384, 16)
ask(q[:, :, :600], k[:, :, :600])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ask(q, k)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    used = int(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout)
    assert used < 64 * 2**20


def test_autocast_changes_the_dtype_of_q_and_k_and_nothing_else() -> None:
    q, k = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    with torch.autocast("cpu", torch.bfloat16):
        lens = mh.look(q, k, mh.Causal())
        found = [lens.weights(), lens.map(3, 3), lens.entropy()]
    wanted = mh.look(q.bfloat16(), k.bfloat16(), mh.Causal())
    for a, b in zip(found, [wanted.weights(), wanted.map(3, 3), wanted.entropy()]):
        assert torch.equal(a, b)


def test_views_and_batches_give_what_their_copies_give() -> None:
    q, k = torch.randn(3, 9, 4, 8).transpose(1, 2), torch.randn(3, 11, 2, 16).transpose(1, 2)[..., ::2]
    lens, copied = mh.look(q, k, mh.Causal()), mh.look(q.clone(), k.clone(), mh.Causal())
    torch.testing.assert_close(lens.weights(), copied.weights())
    for b in range(3):
        torch.testing.assert_close(
            mh.look(q[b : b + 1], k[b : b + 1], mh.Causal()).entropy(), lens.entropy()[b : b + 1]
        )


def test_it_says_what_it_is() -> None:
    assert (
        repr(mh.look(torch.ones(2, 6, 5, 8), torch.ones(2, 3, 7, 8))) == "Lens(B=2, H=6, G=3, Q=5, K=7, float32 on cpu)"
    )

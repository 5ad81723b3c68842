"""What a lens keeps of a pass loses no digits: where scores are large, beside a sink far above them, whoever computes."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import multihead as mh
from multihead import kernel
from multihead.call import Reason
from multihead.kernel import eligible

LARGE = 2.0**20


@pytest.fixture(params=["the kernel", "torch"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(eligible, "scores", lambda region: Reason("the test says so", True))
    elif kernel.module is None:
        pytest.skip(f"the native module is {kernel.missing}")
    return request.param


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def large(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys whose scores are large, whole and exact, and their weights, which are those of small scores."""
    steps = torch.tensor([[0.0, -1, -2, 0, -3], [-5, 0, 0, -1, -1], [-1, -1, -9, -1, -1]])
    level = LARGE if dtype == torch.float64 else 2.0**14
    q = torch.cat([torch.full((3, 1), level), torch.eye(3)], -1)  # the first number is common to all
    k = torch.cat([torch.ones(5, 1), steps.T], -1)
    return q.to(dtype)[None, None], k.to(dtype)[None, None], steps.double().softmax(-1)[None, None]


METHODS: dict[str, tuple[Callable[[mh.Lens], Tensor], Callable[[Tensor], Tensor]]] = {
    "weights": (lambda lens: lens.weights(), lambda w: w),
    "rows": (lambda lens: lens.rows([2, 0]), lambda w: w[:, :, [2, 0]]),
    "columns": (lambda lens: lens.columns([4, 1]), lambda w: w[..., [4, 1]]),
    "map": (lambda lens: lens.map(3, 5), lambda w: w),
    "top": (lambda lens: lens.top(2)[0], lambda w: w.sort(-1, descending=True).values[..., :2]),
    "peak": (lambda lens: lens.peak()[0], lambda w: w.amax(-1)),
    "entropy": (lambda lens: lens.entropy(), lambda w: torch.special.entr(w).sum(-1)),
    "mass": (lambda lens: lens.mass([0, 3]), lambda w: w[..., [0, 3]].sum(-1)),
    "received": (lambda lens: lens.received(), lambda w: w.sum(2)),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_large_scores_cost_no_digits(dtype: torch.dtype, method: str) -> None:
    q, k, exact = large(dtype)
    ask, of = METHODS[method]
    found = ask(mh.look(q, k, scale=1.0)).double()
    assert (found - of(exact)).abs().max() <= 4 * torch.finfo(dtype).eps * of(exact).abs().max()


def test_nor_do_they_where_there_is_a_gradient() -> None:
    q, k, exact = large(torch.float32)
    found = mh.look(q.requires_grad_(), k, scale=1.0).columns([4, 1])
    assert found.requires_grad
    assert (found.detach().double() - exact[..., [4, 1]]).abs().max() <= 4 * torch.finfo(torch.float32).eps


def test_a_given_lse_costs_what_look_says_and_whole_rows_nothing() -> None:
    q, k, exact = large(torch.float64)
    lens = mh.look(q, k, scale=1.0, lse=mh.attend(q, k, k, scale=1.0, return_lse=True)[1])
    off = ((lens.columns(slice(None)) - exact) / exact).abs().max()
    assert off <= LARGE * 2.0**-52
    assert ((lens.weights() - exact) / exact).abs().max() <= 8 * 2.0**-52


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_lse_beside_a_sink_far_above(dtype: torch.dtype) -> None:
    """The keys' share of the sum has few digits left, or none: the logarithm of it is not asked."""
    zeros = torch.zeros(1, 30, 2, 4, dtype=dtype)
    sinks = torch.linspace(60, 130, 30).to(dtype) * (7 if dtype == torch.float64 else 1)
    found = mh.look(zeros, zeros, sinks=sinks).lse
    exact = torch.logaddexp(sinks.double(), torch.tensor(2.0).double().log())[:, None].expand(30, 2)
    torch.testing.assert_close(found[0].double(), exact, rtol=torch.finfo(dtype).eps, atol=0)
    nothing = torch.zeros(2, 4, dtype=torch.bool)
    seen = mh.look(zeros, torch.zeros(1, 30, 4, 4, dtype=dtype), mh.Allowed(nothing), sinks=sinks).lse
    assert torch.equal(seen[0], sinks[:, None].expand(30, 2))


@pytest.fixture
def random() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(3)
    q, k = 30 * torch.randn(1, 2, 40, 16, generator=make), torch.randn(1, 2, 50, 16, generator=make)
    bias = torch.randn(40, 50, generator=make)
    exact = (q.double() @ k.double().mT + bias.double()).softmax(-1)
    return q, k, bias, exact


def assert_as_plain(found: Tensor, q: Tensor, k: Tensor, bias: Tensor, exact: Tensor, of: Callable) -> None:
    plain = of((q @ k.mT + bias).softmax(-1)).double()
    most = 2 * (plain - of(exact)).abs().max() + 3 * torch.finfo(torch.float32).eps * of(exact).max()
    assert (found.double() - of(exact)).abs().max() <= most


def test_who_computes_one_pass_computes_all(random: tuple[Tensor, ...]) -> None:
    """A selection of a view with the negative bit is a plain tensor: the whole of the call decides."""
    q, k, bias, exact = random
    lens = mh.look(q, k, scale=1.0, bias=torch._neg_view(-bias))
    keys = [7, 7, 3, 49, 20]
    assert_as_plain(lens.columns(keys), q, k, bias, exact, lambda w: w[..., keys])
    assert_as_plain(lens.mass(keys), q, k, bias, exact, lambda w: w[..., keys].sum(-1))
    few = mh.look(q, k, scale=1.0, bias=torch._neg_view(-bias))
    assert_as_plain(
        few.map(3, 3, queries=[1, 5, 9], keys=[2, 8, 30]), q, k, bias, exact, lambda w: w[:, :, 1:10:4][..., [2, 8, 30]]
    )


@pytest.mark.parametrize("first", [contextlib.nullcontext, Watching])
def test_what_another_has_left_is_not_used(random: tuple[Tensor, ...], first: Callable) -> None:
    q, k, bias, exact = random
    lens = mh.look(q, k, scale=1.0, bias=bias)
    with first():
        lens.columns([0])
        lens.map(4, 4, queries=slice(0, 30))
    with Watching() if first is contextlib.nullcontext else contextlib.nullcontext():
        assert_as_plain(lens.columns([7, 20]), q, k, bias, exact, lambda w: w[..., [7, 20]])
        assert_as_plain(lens.received(), q, k, bias, exact, lambda w: w.sum(2))


@pytest.mark.parametrize("keys", [50, 129, 700, 3000, 5001])
def test_a_long_mean_of_equal_weights_does_not_drift(keys: int) -> None:
    found = mh.look(torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, keys, 8)).map(1, 1)
    assert abs(float(found) * keys - 1) <= 2 * torch.finfo(torch.float32).eps

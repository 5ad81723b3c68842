"""A projection by the kernel's own product: as exact as torch's, and never where somebody would notice."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import multihead as mh
import multihead.nn
from multihead import kernel
from multihead.attention import modules_watched
from multihead.kernel import eligible
from multihead.kernel import linear as project

pytestmark = pytest.mark.skipif(kernel.module is None, reason=f"the native module is {kernel.missing}")

SHAPES = [  # of x     outputs  why
    ((1, 32), 16, "one token"),
    ((4, 1024), 96, "the running example"),
    ((2, 3, 37), 29, "no size fills a vector"),
    ((16, 40), 7, "as many rows as are few"),
    ((17, 40), 7, "one more"),
    ((3, 41, 70), 130, "many rows, across batch rows"),
    ((1, 200, 520), 65, "inputs in three stretches"),
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the kernel multiplied."""
    assert kernel.module is not None
    made: list[int] = []
    run = project._run

    def counted(*args: Any) -> Tensor:
        made.append(1)
        return run(*args)

    monkeypatch.setattr(project, "_run", counted)
    monkeypatch.setattr(eligible, "MANY", True)
    return made


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, threads: int = 1, isa: str = "") -> bool:
    """Whether the kernel takes the product, which is in y then."""
    assert kernel.module is not None
    read = kernel.module.linear(x, weight, bias)
    if isinstance(read, tuple):
        assert len(read[0]) > 5
        return False
    read.run(y, threads, isa)
    return True


@pytest.mark.parametrize("isa", kernel.module.instruction_sets() if kernel.module is not None else [])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("shape", "outputs", "why"), SHAPES, ids=[why for *_, why in SHAPES])
def test_error_is_at_most_twice_plain(shape: tuple[int, ...], outputs: int, why: str, biased: bool, isa: str) -> None:
    assert kernel.module is not None
    torch.manual_seed(0)
    x, weight = torch.randn(shape), torch.randn(outputs, shape[-1])
    bias = torch.randn(outputs) if biased else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    plain = torch.stack([row @ weight.T for row in x.view(-1, shape[-1])]).view(exact.shape)
    plain = plain if bias is None else plain + bias
    found = []
    for threads in (1, 2):
        y = torch.full(exact.shape, torch.nan)
        assert linear(x, weight, bias, y, threads, isa)
        found.append(y)
    bound = 2 * (plain - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
    assert (found[0] - exact).abs().max() <= bound
    assert torch.equal(*found)
    if len(shape) == 3:  # nor does a batch change anything, within one kernel
        alone = torch.empty_like(found[0][:1])
        assert linear(x[:1], weight, bias, alone, 1, isa)
        torch.testing.assert_close(alone, found[0][:1])


def test_rows_may_lie_apart() -> None:
    assert kernel.module is not None
    x, weight = torch.randn(5, 4, 24)[::2, 1:, 3:20], torch.randn(12, 40)[::2, :17]
    y = torch.empty(3, 3, 6)
    assert linear(x, weight, None, y, 1)
    torch.testing.assert_close(y, F.linear(x, weight))


def test_what_is_not_plain_is_left_to_torch() -> None:
    assert kernel.module is not None
    x, weight, bias = torch.randn(5, 8), torch.randn(6, 8), torch.randn(6)
    run, y = linear, torch.empty(5, 6)
    assert run(x, weight, bias, y, 1)
    for other in (x.double(), x.to_sparse(), x.to("meta"), x[0], x.T, x[:0], torch.randn(5, 7)):
        assert not run(other, weight, bias, y, 1)
    for other in (weight.double(), weight.T, torch.randn(7, 8), torch.randn(6, 16)[:, ::2], weight[0]):
        assert not run(x, other, bias, y, 1)
    for other in (bias.double(), bias[:5], bias[:1].expand(6), bias[None]):
        assert not run(x, weight, other, y, 1)
    for other in (y.double(), torch.empty(5, 7), torch.empty(4, 6), torch.empty(6, 5).T):
        with pytest.raises(ValueError, match="y is not of the shape"):
            run(x, weight, bias, other, 1)


class TestWhoUsesIt:
    def test_a_layer_with_a_bias_and_a_cache(self, calls: list[int]) -> None:
        torch.manual_seed(0)
        layer, x = mh.MultiHeadAttention(24, 6, rope=True, kv_heads=2).eval(), torch.randn(2, 20, 24)
        with torch.no_grad():
            whole = layer(x, mask=mh.Causal(), bias=torch.zeros(20, 20))
            assert len(calls) == 4
            cache, nothing = layer.new_cache(batch=2), torch.zeros(1, 1)
            tokens = [layer(t, mask=mh.Causal(), bias=nothing, cache=cache) for t in x.split(1, dim=1)]
            assert len(calls) == 4 + 20 * 4
            with mh.backend("reference"):
                plain = layer(x, mask=mh.Causal())
            assert len(calls) == 84
        torch.testing.assert_close(whole, plain)
        torch.testing.assert_close(torch.cat(tokens, 1), plain)

    def test_the_drop_in_for_torchs_layer(self, calls: list[int]) -> None:
        torch.manual_seed(0)
        theirs = nn.MultiheadAttention(24, 6, batch_first=True).eval()
        ours, x, context = multihead.nn.MultiheadAttention(24, 6, batch_first=True).eval(), *torch.randn(2, 3, 9, 24)
        ours.load_state_dict(theirs.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(ours(x, x, x), theirs(x, x, x))
            assert len(calls) == 2
            torch.testing.assert_close(ours(x, context, context), theirs(x, context, context))
            assert len(calls) == 2 + 4
        ours(x, x, x)[0].sum().backward()
        assert ours.in_proj_weight.grad is not None
        assert len(calls) == 6


def hooked(p: nn.Linear) -> None:
    p.register_forward_hook(lambda *_: None)


def patched(p: nn.Linear) -> None:
    p.forward = lambda x: F.linear(x, p.weight, p.bias)  # type: ignore[method-assign]


def parametrized(p: nn.Linear) -> None:
    parametrize.register_parametrization(p, "weight", nn.Identity())


@pytest.mark.parametrize("change", [hooked, patched, parametrized])
def test_a_module_that_does_more_is_called(change: Callable[[nn.Linear], None], calls: list[int]) -> None:
    p, x = nn.Linear(8, 6), torch.randn(5, 8)
    with torch.no_grad():
        project.project(p, x, modules_watched())
        assert len(calls) == 1
        change(p)
        torch.testing.assert_close(project.project(p, x, modules_watched()), p(x))
    assert len(calls) == 1


def test_a_class_that_is_patched_is_called(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    p, x = nn.Linear(8, 6), torch.randn(5, 8)
    with torch.no_grad():
        project.project(p, x, modules_watched())
        monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
        assert project.project(p, x, modules_watched()) is x
        monkeypatch.undo()


def test_gradients_and_modes_are_torchs(calls: list[int]) -> None:
    p, x = nn.Linear(8, 6), torch.randn(5, 8)
    assert project.project(p, x, modules_watched()).requires_grad
    assert project.linear(x.clone().requires_grad_(), p.weight.detach(), None, None).requires_grad
    with torch.no_grad():
        with mh.backend("reference"):
            project.project(p, x, modules_watched())
        with torch.autocast("cpu", torch.float16):
            assert project.project(p, x, modules_watched()).dtype is torch.float16
        torch.func.vmap(lambda t: project.project(p, t, modules_watched()))(x[:, None])
        hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
        project.project(p, x, modules_watched())
        hook.remove()
        assert not calls
        assert not project.linear(x, p.weight, p.bias, None).requires_grad
    assert len(calls) == 1


def test_an_error_is_torchs() -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        project.project(nn.Linear(8, 6), torch.randn(5, 7), None)


def test_many_tokens_are_torchs_where_it_multiplies_as_fast(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eligible, "MANY", False)
    p = nn.Linear(8, 6)
    with torch.no_grad():
        project.project(p, torch.randn(eligible.ROWS + 1, 8), None)
        assert not calls
        project.project(p, torch.randn(eligible.ROWS, 8), None)
    assert len(calls) == 1


def test_nothing_to_project(calls: list[int]) -> None:
    with torch.no_grad():
        assert project.project(nn.Linear(8, 6), torch.empty(2, 0, 8), None).shape == (2, 0, 6)
    assert not calls


def test_a_tensor_without_a_module() -> None:
    x, weight = torch.randn(2, 5, 8), torch.randn(6, 8)
    expected: Tensor = F.linear(x, weight)
    torch.testing.assert_close(project.linear(x, weight, None, None), expected)

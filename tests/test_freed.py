"""Storage that was freed or made smaller, where it is looked at later or elsewhere than q, k and v.

What masks, positions and caches are told, what a lens is given, norms, and what a backward pass finds of what the forward
pass left: an error in words each time, where torch's own operations read beyond the end or end the process. And what is
no tensor of numbers at all.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead.masks.intervals import Frame, Visible

B, H, Q, K, D, V = 2, 4, 5, 7, 8, 6
IN_WORDS = "expected one that was not freed or made smaller"


def freed(t: Tensor) -> None:
    t.untyped_storage().resize_(0)


def shrunk(t: Tensor) -> None:
    t.untyped_storage().resize_(t.element_size())


either = pytest.mark.parametrize("wrong", [freed, shrunk])


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, H, Q, D), torch.randn(B, H, K, D), torch.randn(B, H, K, V)


LENGTHS: dict[str, tuple[list[int], Callable[[Tensor], mh.Mask]]] = {
    "padding": ([3, 5], mh.Padding),
    "padding on the left": ([3, 5], lambda t: mh.Padding(t, side="left")),
    "prefix": ([3, 5], mh.Prefix),
    "documents": ([2, 3], lambda t: mh.Documents(t, [3, 4])),
    "documents, keys": ([3, 4], lambda t: mh.Documents([2, 3], t)),
}


@either
@pytest.mark.parametrize("name", LENGTHS)
class TestNumbersOfMasks:
    def test_before_the_mask_is_made(self, name: str, wrong: Callable) -> None:
        numbers, make = LENGTHS[name]
        given = torch.tensor(numbers)
        wrong(given)
        with pytest.raises(ValueError, match=IN_WORDS):
            make(given)

    @pytest.mark.parametrize("backend", [None, "native", "sdpa", "reference"])
    @pytest.mark.parametrize("joined", [False, True])
    def test_after_it(self, name: str, joined: bool, backend: str | None, wrong: Callable) -> None:
        numbers, make = LENGTHS[name]
        given = torch.tensor(numbers)
        mask = make(given) & mh.Causal() if joined else make(given)
        mh.attend(*qkv(), mask, backend=backend)
        wrong(given)
        with pytest.raises(ValueError, match=IN_WORDS):
            mh.attend(*qkv(), mask, backend=backend)

    def test_under_vmap(self, name: str, wrong: Callable) -> None:
        numbers, make = LENGTHS[name]
        given = torch.tensor(numbers)
        mask, (q, k, v) = make(given), qkv()
        wrong(given)
        with pytest.raises(ValueError, match=IN_WORDS):
            torch.vmap(lambda q: mh.attend(q, k, v, mask))(torch.stack([q, q]))


class Own(mh.masks.Mask):
    """A mask of somebody's own, that gives bounds it holds."""

    def __init__(self, visible: Visible) -> None:
        self.visible = visible

    def within(self, frame: Frame) -> Visible:
        return self.visible


class Lowers(Own):
    def lower(self, frame: Frame) -> Visible:
        return self.visible


FORMS: dict[str, Callable[[Visible], Any]] = {
    "given directly": lambda visible: visible,
    "of a class of one's own": Own,
    "joined": lambda visible: Own(visible) & mh.Causal(),
    "with a lower of its own": Lowers,
}


@either
@pytest.mark.parametrize("name", ["start", "stop", "dense"])
@pytest.mark.parametrize("form", FORMS)
class TestBoundsThatSomebodyElseMade:
    def made(self, form: str, name: str) -> tuple[Any, Tensor]:
        bounds = {"start": torch.zeros(B, 1, Q, dtype=torch.long), "stop": torch.full((B, 1, Q), K)}
        bounds["dense"] = torch.ones(Q, K, dtype=torch.bool)
        return FORMS[form](Visible(Q, K, **bounds)), bounds[name]

    @pytest.mark.parametrize("backend", [None, "native", "sdpa", "reference"])
    @pytest.mark.parametrize("grad", [False, True])
    def test_attend(self, form: str, name: str, grad: bool, backend: str | None, wrong: Callable) -> None:
        (mask, t), (q, k, v) = self.made(form, name), qkv()
        mh.attend(q, k, v, mask, backend=backend)
        wrong(t)
        with pytest.raises(ValueError, match=f"the mask.* sees .*{IN_WORDS}"):
            mh.attend(q.requires_grad_(grad), k, v, mask, backend=backend)

    def test_a_lens(self, form: str, name: str, wrong: Callable) -> None:
        (mask, t), (q, k, _) = self.made(form, name), qkv()
        wrong(t)
        with pytest.raises(ValueError, match=f"the mask.* sees .*{IN_WORDS}"):
            mh.look(q, k, mask)

    def test_a_picture(self, form: str, name: str, wrong: Callable) -> None:
        mask, t = self.made(form, name)
        wrong(t)
        with pytest.raises(ValueError, match=f"the mask.* sees .*{IN_WORDS}"):
            mask.allowed() if isinstance(mask, Visible) else mask.draw(Q, K)


@either
class TestNumbersOfCalls:
    @pytest.mark.parametrize("what", ["positions", "lengths"])
    @pytest.mark.parametrize("grad", [False, True])
    def test_of_a_layer(self, what: str, grad: bool, wrong: Callable) -> None:
        layer, x = mh.MultiHeadAttention(24, 4, rope=True), torch.randn(2, 5, 24)
        given = torch.arange(5) if what == "positions" else torch.tensor([3, 5])
        wrong(given)
        with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=IN_WORDS):
            layer(x, **{what: given})

    def test_of_rows_of_a_cache(self, wrong: Callable) -> None:
        layer, rows = mh.MultiHeadAttention(24, 4), torch.tensor([1, 0])
        cache = layer.new_cache(batch=2)
        layer(torch.randn(2, 3, 24), mask=mh.Causal(), cache=cache)
        wrong(rows)
        with pytest.raises(ValueError, match=IN_WORDS):
            cache.reorder(rows)

    def test_a_log_sum_exp_of_a_lens(self, wrong: Callable) -> None:
        q, k, v = qkv()
        _, lse = mh.attend(q, k, v, return_lse=True)
        wrong(lse)
        with pytest.raises(ValueError, match=IN_WORDS):
            mh.look(q, k, lse=lse)

    @pytest.mark.parametrize("name", ["q_norm", "k_norm"])
    @pytest.mark.parametrize("grad", [False, True])
    def test_a_norm(self, name: str, grad: bool, wrong: Callable) -> None:
        layer, x = mh.MultiHeadAttention(24, 4, qk_norm=True), torch.randn(2, 5, 24)
        wrong(getattr(layer, name).weight)
        for call in (layer, layer.look, lambda x: mh.trace(layer, x)):
            with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=IN_WORDS):
                call(x)

    def test_a_norm_whose_weight_comes_when_it_is_called(self, wrong: Callable) -> None:
        """As sharding has it: a hook before the module brings the weight."""
        layer, x = mh.MultiHeadAttention(24, 4, qk_norm=True).eval(), torch.randn(2, 5, 24)
        expected, weight = layer(x), layer.q_norm.weight.data  # type: ignore[union-attr]
        there, size = weight.clone(), weight.untyped_storage().nbytes()

        def bring(*_: object) -> None:
            weight.untyped_storage().resize_(size)
            weight.copy_(there)

        layer.q_norm.register_forward_pre_hook(bring)  # type: ignore[union-attr]
        wrong(weight)
        torch.testing.assert_close(layer(x), expected)


@either
class TestBetweenForwardAndBackward:
    @pytest.mark.parametrize(
        ("name", "bias"),  # with a bias the gradients are those of the specification
        [(name, bias) for bias in (False, True) for name in ("q", "k", "v", "mask", "bias")[: 4 + bias]],
    )
    def test_what_was_kept(self, name: str, bias: bool, wrong: Callable) -> None:
        t = {n: x.requires_grad_().clone() for n, x in zip("qkv", qkv())}
        if bias:
            t["bias"] = torch.randn(H, Q, K).requires_grad_().clone()
        t["mask"] = torch.rand(Q, K) > 0.3
        out = mh.attend(**t)
        wrong(t[name].detach())
        with pytest.raises((ValueError, RuntimeError), match=f"{IN_WORDS}|out of bounds for storage"):
            out.sum().backward()

    @pytest.mark.parametrize("which", ["out", "lse"])
    def test_what_is_passed_back(self, which: str, wrong: Callable) -> None:
        q, k, v = (t.requires_grad_() for t in qkv())
        outputs = mh.attend(q, k, v, return_lse=True)
        back = [torch.ones_like(t) for t in outputs]
        wrong(back[which == "lse"])
        with pytest.raises(ValueError, match=f"d_{which} sees .*{IN_WORDS}"):
            torch.autograd.grad(outputs, [q, k, v], back)


@pytest.mark.parametrize("backend", [None, "native", "sdpa", "reference"])
@pytest.mark.parametrize("more", [{}, {"return_lse": True}, {"return_max_logit": True}, {"mask": mh.Causal()}], ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_none_is_no_tensor(name: str, more: dict[str, Any], backend: str | None) -> None:
    t: dict[str, Any] = dict(zip("qkv", qkv()))
    t[name] = None
    with pytest.raises(TypeError, match=f"{name} is a NoneType: expected a tensor"):
        mh.attend(**t, **more, backend=backend)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_nested_tensor_is_refused_in_words(name: str, layout: torch.layout) -> None:
    t = dict(zip("qkv", qkv()))
    t[name] = torch.nested.nested_tensor(list(t[name]), layout=layout)
    with pytest.raises(TypeError, match=f"{name} is a nested tensor: expected a padded one"):
        mh.attend(**t)

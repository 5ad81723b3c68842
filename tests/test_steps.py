"""The specification: shapes as written, twice differentiable, and the statements the source documents make of it."""

import importlib
import sys

import pytest
import torch
from jaxtyping import install_import_hook

import multihead as mh
from multihead import steps


def drawn(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


def weights_of_a_layer(E=10, H=2, G=1, D=3, V=5, C=7) -> dict[str, torch.Tensor]:
    return {
        "w_q": drawn(E, H, D), "w_k": drawn(C, G, D), "w_v": drawn(C, G, V), "w_o": drawn(H, V, E),
        "b_q": drawn(H, D), "b_k": drawn(G, D), "b_v": drawn(G, V), "b_o": drawn(E),
    }  # fmt: skip


@pytest.fixture
def checked():
    """The specification with the shapes in its signatures checked at every call."""
    name = "multihead.steps"
    plain = sys.modules.pop(name)
    try:
        with install_import_hook(name, "beartype.beartype"):
            yield importlib.import_module(name)
    finally:
        sys.modules[name] = plain


def test_shapes_are_those_of_the_signatures(checked) -> None:
    made = checked.seven_steps(drawn(2, 4, 10), drawn(2, 6, 7), **weights_of_a_layer(), softcap=3.0, sinks=drawn(2))
    assert made["output"].shape == (2, 4, 10)


def test_shapes_that_do_not_fit_are_caught_by_the_signatures(checked) -> None:
    with pytest.raises(Exception, match=r"[Tt]ype"):
        checked.score(drawn(1, 2, 3, 4), drawn(1, 2, 3, 5), 1.0)


def test_the_running_example_has_exactly_the_shapes_of_the_design() -> None:
    x = torch.randn(1, 4, 1024)
    w = torch.randn(1024, 8, 128)
    made = steps.seven_steps(x, x, w, w, w, torch.randn(8, 128, 1024))
    assert {name: tuple(t.shape[1:]) for name, t in made.items()} == {
        "q": (4, 8, 128), "k": (4, 8, 128), "v": (4, 8, 128),
        "q_heads": (8, 4, 128), "k_heads": (8, 4, 128), "v_heads": (8, 4, 128),
        "scores": (8, 4, 4), "masked": (8, 4, 4), "weights": (8, 4, 4),
        "heads": (8, 4, 128), "transposed": (4, 8, 128), "merged": (4, 1024), "output": (4, 1024),
    }  # fmt: skip


OPTIONS = {
    "plain": {},
    "causal, the first two queries see nothing": {"allowed": mh.Causal().dense(4, 2)},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": 0.7},
    "dropout": {"dropout": 0.4, "seed": torch.tensor(123456789123)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_and_their_gradients_are_right(options: dict) -> None:
    inputs = (drawn(2, 2, 4, 3), drawn(2, 1, 2, 3), drawn(2, 1, 2, 3))

    def both(q, k, v):
        out, lse = steps.attend(q, k, v, **options)
        return out, lse.masked_fill(lse == -torch.inf, 0)

    assert torch.autograd.gradcheck(both, inputs)
    assert torch.autograd.gradgradcheck(both, inputs)


def test_gradients_of_sinks_and_bias_are_right() -> None:
    bias = torch.randn(2, 4, 3, dtype=torch.float64)
    bias[0, 1, 2] = -torch.inf
    bias[1, 3] = -torch.inf
    hidden = bias == -torch.inf
    inputs = (
        drawn(1, 2, 4, 3),
        drawn(1, 1, 3, 3),
        drawn(1, 1, 3, 3),
        drawn(2),
        bias.masked_fill(hidden, 0).requires_grad_(),
    )

    def attended(q, k, v, sinks, finite):
        return steps.attend(q, k, v, sinks=sinks, bias=finite.masked_fill(hidden, -torch.inf))[0]

    assert torch.autograd.gradcheck(attended, inputs)
    assert torch.autograd.gradgradcheck(attended, inputs)


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("sunk", [False, True])
def test_second_gradients_of_saturated_rows_are_as_exact_as_those_of_softmax(sunk: bool, with_lse: bool) -> None:
    """Powers divided by their sum lose digits there."""

    def second(weigh, logits: torch.Tensor, turns: list[torch.Tensor]) -> torch.Tensor:
        logits = logits.clone().requires_grad_()
        weights, lse = weigh(logits[..., :-1], logits[0, :, 0, -1]) if sunk else weigh(logits, None)
        loss = (weights * turns[0][..., : weights.shape[-1]]).sum() + (lse * turns[2]).sum() * with_lse
        (first,) = torch.autograd.grad(loss, logits, create_graph=True)
        return torch.autograd.grad((first * turns[1]).sum(), logits)[0].double()

    def plain(masked: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if sinks is not None:
            masked = torch.cat((masked, sinks[:, None, None].expand(*masked.shape[1:3], 1)[None]), -1)
        weights = torch.softmax(masked, -1)
        top = masked.amax(-1, keepdim=True).detach()
        return weights if sinks is None else weights[..., :-1], torch.logsumexp(masked - top, -1) + top[..., 0]

    make = torch.Generator().manual_seed(0)
    found, by_softmax = 0.0, 0.0
    for _ in range(32):
        logits = 30 * torch.randn(1, 2, 1, 25, generator=make)
        turns = [1e3 * torch.randn(1, 2, 1, n, generator=make) for n in (25, 25)]
        turns.append(1e3 * torch.randn(1, 2, 1, generator=make))
        exact = second(plain, logits.double(), [t.double() for t in turns])
        found = max(found, float((second(steps.weigh, logits, turns) - exact).abs().max()))
        by_softmax = max(by_softmax, float((second(plain, logits, turns) - exact).abs().max()))
    assert found <= 2 * by_softmax


def test_without_w_o_each_group_of_outputs_depends_on_one_head_only() -> None:
    x = drawn(1, 5, 12)
    w = weights_of_a_layer(E=12, H=3, G=3, D=4, V=4, C=12)
    merged = steps.seven_steps(x, x, **w)["merged"]
    for h in range(3):
        other = w["w_v"].detach().clone()
        other[:, h] += 1.0
        moved = (steps.seven_steps(x, x, **(w | {"w_v": other}))["merged"] - merged).abs().amax(dim=(0, 1)) > 1e-9
        assert moved.tolist() == [h * 4 <= n < (h + 1) * 4 for n in range(12)]


def test_w_o_mixes_the_heads_as_a_sum_of_their_contributions() -> None:
    x = drawn(2, 5, 10)
    w = weights_of_a_layer(C=10)
    made = steps.seven_steps(x, x, **w)
    contributions = torch.einsum("bhqv,hve->bhqe", made["heads"], w["w_o"])
    torch.testing.assert_close(made["output"], contributions.sum(1) + w["b_o"])


class TestDropout:
    """The generator is a contract: other backends and languages must drop the same weights."""

    def test_its_bits_are_fixed(self) -> None:
        def scramble(x: int) -> int:
            x ^= x >> 16
            x = x * 0x7FEB352D % 2**32
            x ^= x >> 15
            x = x * 0x846CA68B % 2**32
            return x ^ x >> 16

        def keeps(seed: int, b: int, h: int, q: int, k: int, dropout: float) -> bool:
            row = scramble(scramble(seed % 2**32) ^ (seed >> 32))
            for index in (b, h, q):
                row = scramble(row ^ index)
            return scramble(row ^ scramble((k + 0x9E3779B9) % 2**32)) >= int(dropout * 2**32)

        seed = 0x0123456789ABCDEF
        found = steps.kept(torch.tensor(seed), (2, 3, 5, 7), 0.37)
        wanted = [
            [[[keeps(seed, b, h, q, k, 0.37) for k in range(7)] for q in range(5)] for h in range(3)] for b in range(2)
        ]
        assert found.tolist() == wanted

    def test_a_block_is_cut_from_the_whole(self) -> None:
        seed = torch.tensor(99)
        whole = steps.kept(seed, (1, 2, 11, 13), 0.5)
        assert torch.equal(steps.kept(seed, (1, 2, 3, 4), 0.5, 5, 7), whole[:, :, 5:8, 7:11])

    @pytest.mark.parametrize("dropout", [0.01, 0.1, 0.5, 0.9])
    def test_it_drops_as_often_as_asked_along_every_axis(self, dropout: float) -> None:
        kept = steps.kept(torch.tensor(2024), (4, 8, 64, 64), dropout).double()
        for axis in range(4):
            rate = 1 - kept.transpose(0, axis).flatten(1).mean(1)
            spread = (dropout * (1 - dropout) / (kept.numel() / kept.shape[axis])) ** 0.5
            assert ((rate - dropout).abs() < 5 * spread).all()

    def test_neighbours_are_not_alike(self) -> None:
        kept = steps.kept(torch.tensor(7), (2, 4, 64, 64), 0.5).double() - 0.5
        for axis in range(4):
            neighbours = (
                kept.narrow(axis, 0, kept.shape[axis] - 1) * kept.narrow(axis, 1, kept.shape[axis] - 1)
            ).mean()
            assert abs(float(neighbours)) < 5 * 0.25 / kept.numel() ** 0.5 * 2

"""Ablation and patching: what they change, what they leave alone, and that ablation keeps the fast path."""

import pytest
import torch

import multihead as mh
from multihead.layer.edit import NAMES


@pytest.fixture
def layer() -> mh.MultiHeadAttention:
    return mh.MultiHeadAttention(24, heads=6, kv_heads=2, rope=True, dtype=torch.float64)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 5, 24, dtype=torch.float64)


def contributions(layer: mh.MultiHeadAttention, x: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bhqv,hve->bhqe", mh.trace(layer, x, mask=mh.Causal())["heads"], layer.w_o)


@pytest.mark.parametrize("heads", [[2, 5], [0], 3, range(6), []], ids=str)
def test_zero_takes_away_what_the_heads_contribute(layer, x, heads) -> None:
    chosen = [heads] if isinstance(heads, int) else list(heads)
    wanted = layer(x, mask=mh.Causal()) - contributions(layer, x)[:, chosen].sum(1)
    with mh.ablate(layer, heads=heads):
        torch.testing.assert_close(layer(x, mask=mh.Causal()), wanted)


def test_mean_puts_the_mean_over_batch_and_positions(layer, x) -> None:
    heads = mh.trace(layer, x)["heads"]
    heads[:, [1, 4]] = heads[:, [1, 4]].mean(dim=(0, 2), keepdim=True)
    wanted = torch.einsum("bhqv,hve->bqe", heads, layer.w_o) + layer.o_proj.bias
    with mh.ablate(layer, heads=[1, 4], with_="mean"):
        torch.testing.assert_close(layer(x), wanted)


def test_a_tensor_takes_the_heads_place(layer, x) -> None:
    clean = mh.trace(layer, x)["heads"]
    other = torch.randn_like(x)
    with mh.ablate(layer, heads=range(6), with_=clean):
        torch.testing.assert_close(layer(other), layer(x))
    with mh.ablate(layer, heads=[2], with_=torch.ones(4, dtype=torch.float64)):
        assert (mh.trace(layer, x)["heads"][:, 2] == 1).all()


def test_ablation_keeps_the_fast_path(layer, x, monkeypatch: pytest.MonkeyPatch) -> None:
    from multihead import steps

    monkeypatch.setattr(steps, "attend", lambda *_, **__: pytest.fail("took the slow path"))
    with mh.ablate(layer, heads=[0], with_="mean"), mh.patch(layer, "q", lambda q: q * 2):
        layer(x, mask=mh.Causal())


def test_ablation_trains_and_compiles(layer, x) -> None:
    with mh.ablate(layer, heads=[0]):
        layer(x).sum().backward()
        wanted = layer(x)
        torch.testing.assert_close(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), wanted)
    assert (layer.q_proj.weight.grad[:4] == 0).all()
    assert layer.q_proj.weight.grad[4:].abs().sum() > 0


@pytest.mark.parametrize("name", NAMES)
def test_every_name_can_be_patched(layer, x, name: str) -> None:
    plain = layer(x, mask=mh.Causal())
    with mh.patch(layer, name, lambda t: t):
        torch.testing.assert_close(layer(x, mask=mh.Causal()), plain)
    with mh.patch(layer, name, lambda t: torch.where(t.isfinite(), t * 1.5, t)):
        assert not torch.allclose(layer(x, mask=mh.Causal()), plain)
    torch.testing.assert_close(layer(x, mask=mh.Causal()), plain)


def test_patching_weights_mixes_by_the_patched_ones(layer, x) -> None:
    with mh.patch(layer, "weights", lambda w: torch.eye(5, dtype=w.dtype).expand_as(w)):
        heads = mh.trace(layer, x)["heads"]
    torch.testing.assert_close(heads, mh.trace(layer, x)["v_heads"].repeat_interleave(3, dim=1))


def test_edits_nest_in_order_and_end_with_their_block(layer, x) -> None:
    plain = layer(x)
    with mh.patch(layer, "merged", torch.zeros_like), mh.patch(layer, "merged", lambda t: t + 1):
        assert (mh.trace(layer, x)["merged"] == 1).all()
    with pytest.raises(RuntimeError, match="boom"), mh.ablate(layer, heads=[0]):
        raise RuntimeError("boom")
    assert torch.equal(layer(x), plain)


def test_edits_that_overlap_end_in_any_order(layer, x) -> None:
    plain, first, second = layer(x), mh.ablate(layer, heads=[0]), mh.patch(layer, "weights", torch.zeros_like)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert (mh.trace(layer, x)["merged"] == 0).all()
    second.__exit__(None, None, None)
    assert torch.equal(layer(x), plain)


def test_a_sharded_layer_has_the_heads_it_has() -> None:
    """Half of the heads: numbers count among these, and one beyond them is refused before and within the call."""
    layer, x = mh.MultiHeadAttention(24, heads=6), torch.randn(2, 5, 24)
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(layer, name, torch.nn.Linear(24, 12))
    layer.o_proj = torch.nn.Linear(12, 24)
    with mh.ablate(layer, heads=range(3)):
        torch.testing.assert_close(layer(x), layer.o_proj.bias.expand(2, 5, 24))
    with pytest.raises(ValueError, match=r"heads=\[4\]: expected head numbers 0…2"), mh.ablate(layer, heads=[4]):
        pass
    layer.q_proj = torch.nn.Sequential(layer.q_proj)  # does not say how wide it is
    with mh.ablate(layer, heads=4), pytest.raises(ValueError, match=r"heads=\[4\]: expected head numbers 0…2"):
        layer(x)


def test_heads_of_the_wrong_kind_are_refused() -> None:
    layer = mh.MultiHeadAttention(24, heads=6)
    for wrong in (1.5, "01", None):
        with pytest.raises(TypeError, match=f"heads={wrong!r}: expected a head number"), mh.ablate(layer, heads=wrong):
            pass


BAD = [
    (lambda a: mh.ablate(a, heads=[6]), r"heads=\[6\]: expected head numbers 0…5"),
    (lambda a: mh.ablate(a, heads=[-1]), r"heads=\[-1\]: expected head numbers 0…5"),
    (lambda a: mh.ablate(a, heads=[1, 1]), r"heads=\[1, 1\]: expected each head once"),
    (lambda a: mh.ablate(a, heads=[1], with_="noise"), "with_='noise': expected 'zero', 'mean' or a tensor"),
    (lambda a: mh.patch(a, "attention", lambda t: t), "name='attention': expected one of q, k, v"),
]


@pytest.mark.parametrize(("edit", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_edits_are_named(layer, edit, message: str) -> None:
    with pytest.raises(ValueError, match=message), edit(layer):
        pass


def test_patched_weights_are_taken_by_the_reference_only_and_checked_as_ever(layer, x) -> None:
    with mh.patch(layer, "weights", lambda w: w):
        with pytest.raises(ValueError, match="which only reference takes"):
            layer(x, backend="sdpa")
        with pytest.raises(ValueError, match="bias has shape"):
            layer(x, bias=torch.ones(9, 9, dtype=torch.float64))
    with mh.ablate(layer, heads=[0], with_=torch.ones(7, 9, 9, 9)), pytest.raises(ValueError, match="with_ has shape"):
        layer(x)


def test_a_trace_under_autocast_keeps_its_weights_exact() -> None:
    layer, x = mh.MultiHeadAttention(24, heads=6), torch.randn(2, 5, 24)
    with torch.autocast("cpu", torch.bfloat16):
        weights = mh.trace(layer, x)["weights"]
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 6, 5))


def test_a_patch_of_the_wrong_shape_is_named(layer, x) -> None:
    with (
        mh.patch(layer, "q", lambda t: t[:1]),
        pytest.raises(
            ValueError, match=r"the patch of 'q' gave \(1, 5, 6, 4\): expected a tensor of shape \(2, 5, 6, 4\)"
        ),
    ):
        layer(x)

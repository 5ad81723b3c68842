"""layer.look: the weights that forward uses, whatever the call; and the pictures of a lens."""

from typing import Any

import pytest
import torch

import multihead as mh
from multihead.lens import plots

B, N, E = 2, 7, 16


def a_layer(**options: Any) -> mh.MultiHeadAttention:
    torch.manual_seed(1)
    layer = mh.MultiHeadAttention(E, heads=4, **options, dtype=torch.float64).requires_grad_(False)
    if layer.sinks is not None:
        layer.sinks.copy_(torch.randn(4))
    return layer


LAYERS = {
    "plain": {},
    "grouped heads, RoPE, QK-norm": {"kv_heads": 2, "rope": True, "qk_norm": True},
    "softcap, sinks, own scale": {"softcap": 2.0, "sinks": True, "scale": 0.7},
    "dropout, which a lens leaves out": {"dropout": 0.5},
}
CALLS: dict[str, dict[str, Any]] = {
    "everything": {},
    "causal": {"mask": mh.Causal()},
    "padding": {"mask": mh.Padding([3, 7])},
    "positions": {"mask": mh.Causal(), "positions": torch.arange(N) * 3 + 5},
    "lengths": {"mask": mh.Causal(), "lengths": [4, 7]},
    "bias": {"bias": torch.randn(4, N, N, dtype=torch.float64)},
    "context": {"context": torch.randn(B, 5, E, dtype=torch.float64)},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("options", LAYERS)
def test_the_weights_are_those_of_forward(options: str, call: str) -> None:
    layer, x = a_layer(**LAYERS[options]), torch.randn(B, N, E, dtype=torch.float64)
    wanted = mh.trace(layer.eval(), x, **CALLS[call])["weights"]
    torch.testing.assert_close(layer.train().look(x, **CALLS[call]).weights(), wanted)


@pytest.mark.parametrize("options", [{}, {"capacity": 32}, {"window": 4}], ids=["growing", "fixed", "sliding"])
@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
def test_a_cache_is_read_and_stays_as_it_was(options: dict, ragged: bool) -> None:
    layer = a_layer(kv_heads=2, rope=True)
    looked, untouched = layer.new_cache(B, **options), layer.new_cache(B, **options)
    for step in range(5):
        x = torch.randn(B, 3, E, dtype=torch.float64)
        call = {"mask": mh.Causal(), "lengths": [3, 1 + step % 2] if ragged else None}
        before = repr(looked)
        lens = layer.look(x, cache=looked, **call)
        assert repr(looked) == before
        layer.look(torch.randn_like(x), cache=looked, **call)  # other tokens, that never were
        out = layer(x, cache=looked, **call)
        t = mh.trace(layer, x, cache=untouched, **call)
        assert torch.equal(out, t["output"])
        torch.testing.assert_close(lens.weights(), t["weights"])  # though the cache has gone on


def test_a_cached_context_is_read() -> None:
    layer, x = a_layer(), torch.randn(B, N, E, dtype=torch.float64)
    context = torch.randn(B, 5, E, dtype=torch.float64)
    cache = layer.new_cache(context=context)
    torch.testing.assert_close(layer.look(x, cache=cache).weights(), layer.look(x, context).weights())


def test_one_sequence_has_a_batch_of_one() -> None:
    layer, x = a_layer(), torch.randn(N, E, dtype=torch.float64)
    assert layer.look(x, mask=mh.Causal()).shape == (1, 4, N, N)
    assert layer.look(x, torch.randn(5, E, dtype=torch.float64)).shape == (1, 4, N, 5)


def test_patches_before_the_scores_are_seen_and_later_ones_refused() -> None:
    layer, x = a_layer(), torch.randn(B, N, E, dtype=torch.float64)
    with mh.patch(layer, "q_heads", torch.zeros_like):
        torch.testing.assert_close(layer.look(x).weights(), torch.full((B, 4, N, N), 1 / N, dtype=torch.float64))
    with (
        mh.patch(layer, "scores", torch.zeros_like),
        pytest.raises(ValueError, match="scores, masked or weights are patched"),
    ):
        layer.look(x)


def test_gradients_reach_the_layers_parameters() -> None:
    layer, x = a_layer().requires_grad_(True), torch.randn(B, N, E, dtype=torch.float64)
    layer.look(x, mask=mh.Causal()).rows(-1)[..., 0].sum().backward()
    assert layer.q_proj.weight.grad.abs().sum() > 0
    assert layer.k_proj.weight.grad.abs().sum() > 0


def test_bad_calls_are_refused_as_forward_refuses_them() -> None:
    layer = a_layer()
    with pytest.raises(ValueError, match="E=16"):
        layer.look(torch.randn(N, E + 1, dtype=torch.float64))
    with pytest.raises(ValueError, match="context_positions is given without context"):
        layer.look(torch.randn(N, E, dtype=torch.float64), context_positions=torch.arange(N))


# Pictures -------------------------------------------------------------------------------------------------------------


def a_lens(Q: int = 40, K: int = 40, heads: int = 3) -> mh.Lens:
    return mh.look(torch.randn(1, heads, Q, 8), torch.randn(1, heads, K, 8), mh.Causal())


@pytest.mark.parametrize("what", plots.WHAT)
def test_plots_are_figures_with_a_part_for_each_head(what: str, tmp_path: Any) -> None:
    figure = a_lens().plot(what, heads=[0, 2])
    figure.savefig(tmp_path / "lens.png", dpi=40)
    assert (tmp_path / "lens.png").stat().st_size > 1000
    axes = [axis for axis in figure.axes if axis.get_label() != "<colorbar>" and axis.axison]
    if what == "entropy":
        assert [line.get_label() for line in axes[0].lines] == ["head 0", "head 2"]
    else:
        assert [axis.get_title() for axis in axes] == ["head 0", "head 2"]


def test_a_map_is_pooled_and_zooms() -> None:
    lens = a_lens(600, 600, heads=1)
    assert lens.plot().axes[0].images[0].get_array().shape == (256, 256)
    zoomed = lens.plot(queries=range(590, 600), keys=range(580, 600)).axes[0].images[0]
    torch.testing.assert_close(torch.tensor(zoomed.get_array()).float(), lens.rows(range(590, 600))[0, 0, :, 580:])
    assert list(zoomed.get_extent()) == [579.5, 599.5, 599.5, 589.5]
    with pytest.raises(TypeError, match="height: only for a map"):
        lens.plot("weights", height=3)


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'lens.plot\(\) needs matplotlib: pip install "multihead\[plot\]"'):
        a_lens().plot()


def test_a_drawing_fits_a_terminal() -> None:
    text = a_lens(5000, 5000).draw()
    assert "5000 queries and 5000 keys as 16 × 16" in text
    assert text.count("█ = ") == 3
    assert max(map(len, text.splitlines())) <= 100
    assert len(text.splitlines()) < 40


def test_small_ones_are_drawn_in_percent() -> None:
    text = mh.look(torch.zeros(1, 2, 2, 4), torch.zeros(1, 2, 4, 4), mh.Causal()).draw(heads=1)
    assert "head 1" in text
    assert "head 0" not in text
    assert "0   33  33  33   ·" in text
    assert mh.look(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 0, 4)).draw() == "no weights: Q=2, K=0"

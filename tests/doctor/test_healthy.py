"""No false alarm: correct implementations are healthy, whoever wrote them, in every dtype; and harmless departures too."""

import pytest
import torch
from torch import nn

import multihead as mh
from tests.doctor.planted import Einsum, Grouped, Modern, Views
from tests.doctor.test_planted import layer_of

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", [None, "causal", "padding"])
@pytest.mark.parametrize("style", [Einsum, Views])
def test_plain_implementations(style, mask, dtype):
    layer, lengths = layer_of(48, 3).to(dtype), torch.tensor([5, 3])
    wanted = {None: None, "causal": mh.Causal(), "padding": mh.Padding(lengths)}[mask]
    candidate = style(layer, "", mask, lengths).to(dtype)
    report = mh.diagnose(candidate, layer, torch.randn(2, 5, 48, dtype=dtype), mask=wanted)
    assert report.verdict == "healthy", report


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("style", ["rotate_half", "complex"])
def test_grouped_heads_rope_norm_softcap_and_sinks(style, dtype):
    rope = mh.RoPE(pairing="halves" if style == "rotate_half" else "interleaved")
    layer = layer_of(32, 4, kv_heads=2, rope=rope, qk_norm=True, softcap=5.0, sinks=True).to(dtype)
    for candidate in (Modern(layer, "", style).to(dtype), Grouped(layer, "", style)):
        report = mh.diagnose(candidate, layer, torch.randn(2, 5, 32, dtype=dtype), mask=mh.Causal())
        assert report.verdict == "healthy", report


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("style", [Einsum, Views])
def test_cross_attention(style, dtype):
    layer = layer_of(32, 4).to(dtype)
    x, context = torch.randn(2, 5, 32, dtype=dtype), torch.randn(2, 7, 32, dtype=dtype)
    report = mh.diagnose(style(layer).to(dtype), layer, x, context)
    assert report.verdict == "healthy", report


@pytest.mark.parametrize("style", [Einsum, Views])
def test_the_width_of_the_running_example(style):
    layer = layer_of(1024, 8)
    report = mh.diagnose(style(layer, "", "causal"), layer, torch.randn(4, 1024)[None], mask=mh.Causal())
    assert report.verdict == "healthy", report


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", [None, mh.Causal(), mh.Padding([5, 3])], ids=str)
def test_torch_multihead_attention_is_read_by_name_and_its_mask_understood(mask, batch_first, dtype):
    candidate = nn.MultiheadAttention(32, 4, batch_first=batch_first).eval().to(dtype)
    report = mh.diagnose(candidate, None, torch.randn(2, 5, 32, dtype=dtype), mask=mask, heads=4)
    assert report.verdict == "healthy", report
    if isinstance(mask, mh.Causal):
        assert "True = hidden" in report.notes[0]
    assert not candidate.in_proj_bias.any(), "the random biases of the examination are gone"


class Taking(nn.Module):
    """Takes a mask by one of the usual names, in one of the usual meanings."""

    def __init__(self, meaning: str, needed: bool = False) -> None:
        super().__init__()
        self.inner = mh.MultiHeadAttention(32, heads=4)
        self.meaning = meaning

    def forward(self, x, attention_mask=None):
        if attention_mask is None:
            return self.inner(x)
        allowed = {
            "keep": lambda m: m,
            "hide": lambda m: ~m,
            "add": lambda m: m == 0,
        }[self.meaning](attention_mask)
        if (attention_mask.dtype == torch.bool) != (self.meaning != "add"):
            raise TypeError("the wrong kind of mask")
        return self.inner(x, mask=allowed)


@pytest.mark.parametrize("meaning", ["keep", "hide", "add"])
def test_the_meaning_of_a_mask_argument_is_found(meaning):
    report = mh.diagnose(Taking(meaning), None, torch.randn(2, 5, 32), mask=mh.Causal(), heads=4)
    assert report.verdict == "healthy", report
    said = {"keep": "True = may attend", "hide": "True = hidden", "add": "added to the scores"}
    assert said[meaning] in report.notes[0]


def test_is_causal_is_passed_where_it_is_named():
    layer = layer_of(32, 4)

    def candidate(x, is_causal=False):
        return layer(x, mask=mh.Causal() if is_causal else None)

    assert mh.diagnose(candidate, layer, torch.randn(5, 32), mask=mh.Causal()).verdict == "healthy"


# Departures that change nothing --------------------------------------------------------------------------------------


def test_no_bias_on_k():
    layer = layer_of(32, 4)
    candidate = Views(layer, "bias missing on k")
    assert mh.diagnose(candidate, layer, torch.randn(2, 5, 32)).verdict == "healthy"
    candidate.key.bias = None
    report = mh.diagnose(Views(layer), layer, torch.randn(2, 5, 32))
    assert report.verdict == "healthy"

    class Unbiased(Views):
        def forward(self, x):
            return super().forward(x)

    candidate = Unbiased(layer)
    candidate.key = nn.Linear(32, 32, bias=False)
    candidate.key.weight = nn.Parameter(layer.k_proj.weight.detach().clone())
    report = mh.diagnose(candidate, layer, torch.randn(2, 5, 32))
    assert report.verdict == "healthy"
    assert any("k has no bias" in note for note in report.notes)


def test_no_bias_on_k_matters_with_rope():
    layer = layer_of(32, 4, rope=True)

    def candidate(x):
        other = mh.MultiHeadAttention(32, heads=4, rope=True)
        other.load_state_dict(layer.state_dict())
        other.k_proj.bias.data.zero_()
        return other(x)

    report = mh.diagnose(candidate, layer, torch.randn(2, 5, 32))
    assert report.cause == "bias missing on k", report


def test_masking_after_softmax_and_renormalising():
    layer = layer_of(32, 4)

    def candidate(x):
        t = mh.trace(layer, x)
        weights = t["weights"].tril()
        weights = weights / weights.sum(-1, keepdim=True)
        return layer.o_proj((weights @ t["v_heads"]).transpose(1, 2).flatten(2))

    report = mh.diagnose(candidate, layer, torch.randn(2, 5, 32), mask=mh.Causal())
    assert report.verdict == "healthy", report
    assert any("renormalising" in note for note in report.notes)


def test_the_same_offset_in_q_and_k():
    layer = layer_of(32, 4, kv_heads=2, rope=True)
    report = mh.diagnose(Modern(layer, "same offset"), layer, torch.randn(2, 5, 32), mask=mh.Causal())
    assert report.verdict == "healthy", report
    assert any("offset common to q and k" in note for note in report.notes)


def test_a_large_finite_fill():
    layer = layer_of(32, 4)
    report = mh.diagnose(Views(layer, "", "causal"), layer, torch.randn(2, 5, 32), mask=mh.Causal())  # −1e30
    assert report.verdict == "healthy", report
    assert any("large finite number" in note for note in report.notes)


def test_rows_that_see_nothing_are_not_held_against_it():
    layer, lengths = layer_of(32, 4), torch.tensor([5, 0])
    candidate = Views(layer, "", "padding", lengths)  # a finite fill: the mean of all values, not 0
    report = mh.diagnose(candidate, layer, torch.randn(2, 5, 32), mask=mh.Padding(lengths))
    assert report.verdict == "healthy", report
    assert any("rows that see nothing" in note for note in report.notes)


# Other libraries ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_x_transformers(dtype):
    attention = pytest.importorskip("x_transformers.x_transformers", exc_type=ImportError).Attention
    layer = layer_of(32, 4, bias=False).to(dtype)
    theirs = attention(dim=32, heads=4, dim_head=8, causal=True).eval().to(dtype)
    with torch.no_grad():
        for mine, other in zip("qkv", (theirs.to_q, theirs.to_k, theirs.to_v)):
            other.weight.copy_(getattr(layer, f"{mine}_proj").weight)
        theirs.to_out.weight.copy_(layer.o_proj.weight)
    x = torch.randn(2, 5, 32, dtype=dtype)
    report = mh.diagnose(lambda x: theirs(x), layer, x, mask=mh.Causal())
    assert report.verdict == "healthy", report
    assert mh.diagnose(lambda x: theirs(x), layer, x).cause == "causal mask where nothing should be hidden"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keras(dtype, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    layer = layer_of(32, 4).to(dtype)
    name = str(dtype).removeprefix("torch.")
    theirs = keras.layers.MultiHeadAttention(num_heads=4, key_dim=8, dtype=name)
    theirs.build((2, 5, 32), (2, 5, 32), (2, 5, 32))
    flat = [(layer.w_q, layer.q_proj.bias.view(4, 8)), (layer.w_k, layer.k_proj.bias.view(4, 8))]
    flat += [(layer.w_v, layer.v_proj.bias.view(4, 8)), (layer.w_o, layer.o_proj.bias)]
    theirs.set_weights([t.detach().double().numpy() for pair in flat for t in pair])

    def candidate(x):
        return theirs(x, value=x, use_causal_mask=True)

    report = mh.diagnose(candidate, layer, torch.randn(2, 5, 32, dtype=dtype), mask=mh.Causal())
    assert report.verdict == "healthy", report


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flax(dtype):
    jax = pytest.importorskip("jax")
    linen = pytest.importorskip("flax.linen")
    jnp = jax.numpy
    layer = layer_of(32, 4).to(dtype)
    name = {torch.float32: jnp.float32, torch.bfloat16: jnp.bfloat16, torch.float64: jnp.float64}[dtype]
    jax.config.update("jax_enable_x64", dtype == torch.float64)

    def array(t):
        return jnp.asarray(t.detach().double().numpy()).astype(name)

    parameters = {
        {"q": "query", "k": "key", "v": "value"}[m]: {
            "kernel": array(getattr(layer, f"w_{m}")),
            "bias": array(getattr(layer, f"{m}_proj").bias.view(4, 8)),
        }
        for m in "qkv"
    }
    parameters["out"] = {"kernel": array(layer.w_o), "bias": array(layer.o_proj.bias)}
    theirs = linen.MultiHeadDotProductAttention(num_heads=4, qkv_features=32, dtype=name, param_dtype=name)

    def candidate(x):
        return theirs.apply({"params": parameters}, array(x))

    report = mh.diagnose(candidate, layer, torch.randn(2, 5, 32, dtype=dtype))
    jax.config.update("jax_enable_x64", False)
    assert report.verdict == "healthy", report

"""Tensors and layers that do not fit each other: clear errors, and the layer stays as it was."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import multihead as mh
from multihead.weights import files

E, H = 12, 3
PREFIX = "model.layers.1.self_attn."


def make(**given: Any) -> mh.MultiHeadAttention:
    return mh.MultiHeadAttention(E, H, **{"bias": False} | given)


def state(prefix: str = PREFIX) -> dict[str, Tensor]:
    return mh.save_weights(make(), layout="llama", prefix=prefix)


def without(name: str) -> Callable[[dict], dict]:
    return lambda t: {n: v for n, v in t.items() if not n.endswith(name)}


def put(name: str, value: Any) -> Callable[[dict], dict]:
    return lambda t: t | {PREFIX + name: value(t[PREFIX + name]) if callable(value) else value}


WRONG: list[tuple[str, Callable[[dict], dict], dict, str]] = [
    ("missing", without("k_proj.weight"), {}, "closest is llama: missing: k_proj.weight"),
    ("missing, named", without("o_proj.weight"), {"layout": "llama"}, "missing: o_proj.weight"),
    ("one bias of four", put("q_proj.bias", torch.zeros(E)), {"layout": "llama"}, "missing: k_proj.bias, v_proj.bias"),
    (
        "shape",
        put("v_proj.weight", torch.zeros(E, E + 1)),
        {},
        r"v_proj.weight has shape \(12, 13\): expected \(12, 12\)",
    ),
    ("transposed axes", put("k_proj.weight", torch.zeros(2 * E, E)), {}, r"k_proj.weight has shape \(24, 12\)"),
    (
        "NaN",
        put("v_proj.weight", lambda t: t.index_fill(0, torch.tensor(3), torch.nan)),
        {},
        "v_proj.weight holds 12 numbers",
    ),
    ("inf", put("o_proj.weight", lambda t: t / 0), {}, "o_proj.weight holds 144 numbers that are NaN or inf"),
    (
        "quantised",
        put("q_proj.weight", lambda t: t.to(torch.int8)),
        {},
        "q_proj.weight is torch.int8: expected dense float64",
    ),
    ("sparse", put("q_proj.weight", lambda t: t.to_sparse()), {}, "q_proj.weight is torch.sparse_coo: expected dense"),
    (
        "foreign prefix",
        lambda t: t,
        {"prefix": "transformer.h.0.attn."},
        "no name in the checkpoint starts so.*attention at prefix='model.layers.1.self_attn.'",
    ),
    ("no prefix", lambda t: t, {"prefix": ""}, "there is attention at prefix='model.layers.1.self_attn.'"),
    ("half a prefix", lambda t: t, {"prefix": "model.layers.1.self"}, "no name in the checkpoint starts so"),
    ("empty", lambda t: {}, {}, "it has nothing"),
    (
        "adapters beside",
        put("q_proj.lora_A.weight", torch.zeros(2, E)),
        {},
        "not part of this layout: q_proj.lora_A.weight",
    ),
    ("another layout", lambda t: t, {"layout": "gpt2"}, "layout='gpt2'.*missing: c_attn.weight, c_proj.weight"),
    ("unknown layout", lambda t: t, {"layout": "gtp2"}, "layout='gtp2': expected one of torch, "),
    ("unknown pairing", lambda t: t, {"pairing": "thirds"}, "pairing='thirds': expected one of halves, interleaved"),
]


@pytest.mark.parametrize(("change", "call", "message"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_wrong_tensors_are_refused_and_change_nothing(change: Callable, call: dict, message: str) -> None:
    layer = make()
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        mh.load_weights(layer, change(state()), **{"prefix": PREFIX} | call)
    assert_close(layer.state_dict(), before, rtol=0, atol=0)


LAYERS: list[tuple[dict, str, str]] = [
    ({"bias": False}, "bert", "the checkpoint has biases: expected a layer made with bias=True"),
    ({"bias": False, "kv_heads": 1}, "falcon", r"query_key_value.weight has shape \(36, 12\): expected \(20, 12\)"),
    ({"qk_norm": True}, "llama", "the layer has qk_norm=True, and the checkpoint has no q_norm"),
    ({"sinks": True}, "llama", "the layer has sinks=True, and the checkpoint has no sinks"),
    ({"bias": False}, "qwen3", "the checkpoint has q_norm: expected a layer made with qk_norm=True"),
    ({"kv_heads": 1}, "gpt2", "the layer has kv_heads=1 of heads=3: as many key/value heads"),
    (
        {"qk_norm": True, "dtype": torch.bfloat16, "bias": False},
        "gemma3",
        "not exact in torch.bfloat16: expected a float32",
    ),
]


@pytest.mark.parametrize(("given", "layout", "message"), LAYERS, ids=[layer[1] for layer in LAYERS])
def test_layers_that_the_checkpoint_does_not_fit(given: dict, layout: str, message: str) -> None:
    parts = {part for entry in mh.weights.LAYOUTS[layout].entries for part in entry.parts}
    bias = not mh.weights.LAYOUTS[layout].either and "q_bias" in parts
    tensors = mh.save_weights(make(bias=bias, qk_norm="q_norm" in parts), layout=layout)
    layer = make(**{"bias": True} | given)
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        mh.load_weights(layer, tensors, layout=layout)
    assert_close(layer.state_dict(), before, rtol=0, atol=0)


def test_what_cannot_be_told_apart_is_said() -> None:
    layer = make(qk_norm=True)
    tensors = mh.save_weights(layer, layout="qwen3")
    with pytest.raises(ValueError, match="names and shapes fit 'qwen3' and 'gemma3', which mean different things"):
        mh.load_weights(layer, tensors)
    mh.load_weights(layer, tensors, layout="qwen3")


PACKED = [  # layer, written as, names both
    ({"bias": True}, "timm", "'timm' and 'timm-per-head'"),
    ({"bias": True}, "timm-per-head", "'timm' and 'timm-per-head'"),
    ({"bias": True}, "timm-no-qkv-bias", "'timm-no-qkv-bias' and 'timm-per-head-no-qkv-bias'"),
    ({"bias": False}, "nanogpt", "'nanogpt' and 'gpt-bigcode'"),
    ({"bias": False}, "gpt-neox", "'gpt-neox' and 'ling'"),
    ({"bias": False, "heads": 4, "kv_heads": 2}, "falcon", "'falcon' and 'ling'"),
]


@pytest.mark.parametrize(("given", "layout", "names"), PACKED, ids=[case[1] for case in PACKED])
def test_packing_per_head_or_per_matrix_cannot_be_told_apart(given: dict, layout: str, names: str) -> None:
    def made() -> mh.MultiHeadAttention:
        layer = mh.MultiHeadAttention(E, **{"heads": H} | given)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.normal_()
            if layout.endswith("no-qkv-bias"):
                for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
                    projection.bias.zero_()
        return layer

    layer, written = made(), made()
    tensors = mh.save_weights(written, layout=layout)
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    with pytest.raises(ValueError, match=f"names and shapes fit {names}, which mean different things: give layout="):
        mh.load_weights(layer, tensors)
    assert_close(layer.state_dict(), before, rtol=0, atol=0)
    mh.load_weights(layer, tensors, layout=layout)
    assert_close(layer.state_dict(), written.state_dict(), rtol=0, atol=0)


def test_a_hint_never_names_the_prefix_that_was_just_refused() -> None:
    tensors = state() | state("model.layers.2.self_attn.")
    tensors[f"{PREFIX}q_proj.lora_A.weight"] = torch.zeros(2, E)
    for options in ({}, {"layout": "llama"}):
        with pytest.raises(ValueError, match=r"prefix='model.layers.2.self_attn.'") as refused:
            mh.load_weights(make(), tensors, prefix=PREFIX.removesuffix("."), **options)
        assert f"attention at prefix='{PREFIX}'" not in str(refused.value)
        assert f"or '{PREFIX}'" not in str(refused.value)


def test_a_refusal_says_each_thing_once_and_what_the_names_are() -> None:
    layer = mh.MultiHeadAttention(64, heads=8)
    checkpoint = mh.save_weights(layer, layout="gpt2", prefix="h.0.attn.")
    with pytest.raises(ValueError, match="missing: q_proj") as refused:
        mh.load_weights(
            layer, checkpoint | mh.save_weights(layer, layout="gpt2", prefix="h.1.attn."), "llama", prefix="h.0.attn"
        )
    assert str(refused.value).endswith("; these are the names of 'gpt2'")
    with pytest.raises(ValueError, match="does not fit the layer, which has Sizes") as refused:
        mh.load_weights(mh.MultiHeadAttention(32, heads=8), checkpoint, prefix="h.0.attn")
    assert str(refused.value).count("c_attn.weight") == 1
    assert str(refused.value).endswith("nor as nanogpt, gpt-bigcode")
    with pytest.raises(ValueError, match=r"layout='gpt-2': .*; did you mean 'gpt2'\?"):
        mh.load_weights(layer, checkpoint, "gpt-2", prefix="h.0.attn")


def test_the_closest_layout_is_named_only_where_it_is_close() -> None:
    odd = {"query.bias": torch.zeros(E), "value.bias": torch.zeros(E), "dense_h.weight": torch.zeros(E, E)}
    with pytest.raises(ValueError, match="no layout has these names") as refused:
        mh.load_weights(make(), odd)
    assert "closest" not in str(refused.value)


def test_hugging_faces_spelling_is_understood() -> None:
    layer = make(bias=True)
    tensors = mh.save_weights(layer, layout="gpt_neox")
    assert mh.load_weights(layer, tensors, layout="gpt_neox").read == mh.load_weights(layer, tensors, "gpt-neox").read


def test_layouts_that_mean_the_same_are_not_a_question() -> None:
    layer = make(bias=True)  # with G = H, falcon's groups are gpt-neox's heads; biases tell it from Ling's
    assert mh.load_weights(layer, mh.save_weights(layer, layout="falcon")).layout == "gpt-neox"


SAVES: list[tuple[dict, str, str]] = [
    ({"bias": True}, "whisper", "the layer has k_bias"),
    ({"bias": True}, "t5", "the layer has q_bias; the layer has k_bias"),
    ({"bias": False}, "bert", "the layer has no k_bias"),
    ({"qk_norm": True}, "llama", "the layer has q_norm"),
    ({"sinks": True}, "llama", "the layer has sinks"),
    ({}, "qwen3", "the layer has no k_norm"),
    ({"kv_heads": 1}, "torch", "as many key/value heads as query heads"),
    ({"head_dim": 5}, "gpt2", "heads that add up to the model's width"),
    ({"value_dim": 5}, "llama", "value_dim=5 and head_dim=4"),
    ({"context_dim": 5}, "bert", "context_dim=5 and E=12"),
    ({}, "auto", "layout='auto': expected one of"),
]


@pytest.mark.parametrize(("given", "layout", "message"), SAVES, ids=[s[1] for s in SAVES])
def test_layouts_that_have_no_room_for_the_layer(given: dict, layout: str, message: str, tmp_path: Path) -> None:
    layer = make(**given)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    with pytest.raises(ValueError, match=message):
        mh.save_weights(layer, tmp_path / "m.safetensors", layout=layout)
    assert os.listdir(tmp_path) == []


def test_biases_that_the_checkpoint_lacks_become_zero() -> None:
    layer = make(bias=True)
    with torch.no_grad():
        layer.q_proj.bias.fill_(7)
    loaded = mh.load_weights(layer, state(), prefix=PREFIX)
    assert loaded.zeroed == ["q_bias", "k_bias", "v_bias", "o_bias"]
    assert layer.q_proj.bias.abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_layer_keeps_its_dtype(dtype: torch.dtype) -> None:
    layer, tensors = make(dtype=dtype), state()
    mh.load_weights(layer, tensors, prefix=PREFIX)
    assert torch.equal(layer.q_proj.weight, tensors[f"{PREFIX}q_proj.weight"].to(dtype))


def test_numbers_that_the_layers_dtype_cannot_hold() -> None:
    layer, tensors = make(dtype=torch.float16), state()
    tensors[f"{PREFIX}v_proj.weight"][0, 0] = 1e6
    with pytest.raises(ValueError, match=r"v holds numbers that are too large for the layer's torch.float16"):
        mh.load_weights(layer, tensors, prefix=PREFIX)


def test_layers_that_cannot_take_a_copy() -> None:
    adapted = make()
    adapted.q_proj = nn.Sequential(adapted.q_proj)
    with pytest.raises(TypeError, match="q_proj is a Sequential: expected a plain"):
        mh.load_weights(adapted, state(), prefix=PREFIX)
    normed = make()
    nn.utils.parametrizations.weight_norm(normed.k_proj)
    with pytest.raises(TypeError, match="k_proj is a ParametrizedLinear"):
        mh.load_weights(normed, state(), prefix=PREFIX)
    with pytest.raises(ValueError, match=r"is on meta and holds nothing: call layer.to_empty"):
        mh.load_weights(make(device="meta"), state(), prefix=PREFIX)
    with pytest.raises(TypeError, match="layer is a Linear"):
        mh.load_weights(nn.Linear(2, 2), state())
    cut = make()
    cut.q_proj = nn.Linear(E, 4, bias=False)
    with pytest.raises(ValueError, match="unsharded"):
        mh.load_weights(cut, state(), prefix=PREFIX)


def test_sources_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        mh.load_weights(make(), tmp_path / "m.safetensors")
    with pytest.raises(TypeError, match="source is a list: expected a state dict or the path"):
        mh.load_weights(make(), [1, 2])
    with pytest.raises(ValueError, match="expected a name that ends in"):
        mh.save_weights(make(), tmp_path / "m.h5", layout="llama")


def test_gradients_and_mode_are_left_alone() -> None:
    layer = make().eval()
    layer.q_proj.weight.requires_grad_(False)
    layer.k_proj.weight.grad = torch.ones(E, E)
    parameters = list(layer.parameters())
    mh.load_weights(layer, {n: np.asarray(t) for n, t in state().items()}, prefix=PREFIX)
    assert all(one is two for one, two in zip(layer.parameters(), parameters))
    assert not layer.q_proj.weight.requires_grad
    assert layer.k_proj.weight.requires_grad
    assert layer.k_proj.weight.grad.sum() == E * E
    assert not layer.training


def test_an_index_is_bounded(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors.index.json"
    for text, said in (
        ('{"weight_map": ' + "[" * 100_000, "is not an index"),
        ('{"weight_map": {"' + "n" * 1025 + '": "a.safetensors"}}', "of 1025 characters: expected at most 1024"),
        ('{"weight_map": {"w": "' + "f" * 2000 + '"}}', "of 2000 characters: expected at most 1024"),
        ('{"weight_map": {"w": "../a.safetensors"}}', "expected files in its own folder"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            mh.load_weights(mh.MultiHeadAttention(8, heads=2), path, layout="llama")
    monkeypatch.setattr(files, "LARGEST_INDEX", 100)
    with path.open("w") as file:
        file.write('{"weight_map": {}}' + " " * 100)
    with pytest.raises(ValueError, match="has 118 bytes: expected an index of at most 100"):
        mh.load_weights(mh.MultiHeadAttention(8, heads=2), path, layout="llama")


def test_nesting_and_names_of_a_state_dict_are_bounded():
    deep: dict = {"w": torch.zeros(1)}
    for _ in range(5000):
        deep = {"m": deep}
    layer = mh.MultiHeadAttention(8, heads=2)
    with pytest.raises(ValueError, match="nested 33 deep: expected mappings in at most 32"):
        mh.load_weights(layer, deep, layout="llama")
    with pytest.raises(ValueError, match="has 2000 characters: expected names of at most 1024"):
        mh.load_weights(layer, {"n" * 2000: torch.zeros(1)}, layout="llama")

"""Every layout against the class it comes from: same output, and a round trip that returns identical bytes.

The real class is built from a tiny random configuration, its weights are loaded, recognised by name and shape, and both
run on the same input.
"""

import importlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import multihead as mh
from multihead.positions import SwinBias, alibi
from multihead.weights import LAYOUTS
from multihead.weights.layouts import REGISTERED
from tests import real_attention as real
from tests import real_vision as vision
from tests.real_attention import CONTEXT, GROUPED, MODEL, PLAIN, B, E, G, H, N, Real, by_hand, plain, randomised, rotary


@dataclass
class Case:
    layout: str
    real: Callable[[], Real]
    make: dict[str, Any] = field(default_factory=dict)  # of our layer
    call: dict[str, Any] = field(default_factory=dict)
    auto: bool = True  # recognised as this layout
    why: str = ""


ROPE, UNBIASED, CAUSALLY = {"rope": mh.RoPE()}, {"bias": False}, {"mask": mh.Causal()}
DECODER = ROPE | UNBIASED | {"kv_heads": G, "head_dim": 8}
LLAMA = GROUPED | {"head_dim": 8}
FALCON = MODEL | {"alibi": False}

CASES = [
    Case("torch", real.torch_packed),
    Case("torch", real.torch_without_bias, UNBIASED, why="no bias"),
    Case("torch-split", real.torch_split, {"context_dim": 10}, {"context": CONTEXT}),
    Case("gpt2", real.gpt2, {}, CAUSALLY),
    Case("nanogpt", real.nanogpt, {}, CAUSALLY, auto=False, why="GPT-2's names, another shape"),
    Case("gpt-bigcode", vision.gpt_bigcode(False), {}, CAUSALLY, auto=False, why="nanoGPT's names and shape"),
    Case("gpt-bigcode", vision.gpt_bigcode(True), {"kv_heads": 1}, CAUSALLY, why="multi-query: one way to read it"),
    Case(
        "gpt-neox",
        rotary("gpt_neox", "GPTNeoX", "GPTNeoXConfig", **MODEL | {"num_attention_heads": 3}),
        {"rope": mh.RoPE(dim=2), "heads": 3},
        CAUSALLY,
        why="partial width",
    ),
    Case("bloom", real.bloom, {}, CAUSALLY | {"bias": alibi(H, N, N)}),
    Case(
        "falcon",
        rotary("falcon", "Falcon", "FalconConfig", **FALCON, num_kv_heads=G, new_decoder_architecture=True),
        ROPE | UNBIASED | {"kv_heads": G},
        CAUSALLY,
        auto=False,
        why="grouped",
    ),
    Case(
        "falcon",
        rotary("falcon", "Falcon", "FalconConfig", **FALCON, multi_query=True, bias=True),
        ROPE | {"kv_heads": 1},
        CAUSALLY,
        why="multi-query",
    ),
    Case(
        "falcon",
        rotary("falcon", "Falcon", "FalconConfig", **FALCON, multi_query=False),
        ROPE | UNBIASED,
        CAUSALLY,
        auto=False,
        why="multi-head",
    ),
    Case(
        "chatglm",
        vision.per_matrix(True, mh.RoPE(pairing="interleaved", dim=2)),
        {"rope": mh.RoPE(pairing="interleaved", dim=2), "kv_heads": G},
        CAUSALLY,
        why="falcon's names, per matrix",
    ),
    Case("ling", vision.per_matrix(False, mh.RoPE()), ROPE | UNBIASED | {"kv_heads": G}, CAUSALLY, auto=False),
    Case("modernbert", vision.modernbert(), vision.MODERNBERT | UNBIASED),
    Case("modernbert", vision.modernbert(attention_bias=True), vision.MODERNBERT, why="biases"),
    Case("x-transformers", vision.x_transformers(), UNBIASED | {"head_dim": 4}, CAUSALLY),
    Case(
        "x-transformers",
        vision.x_transformers(True, kv_heads=G),
        UNBIASED | {"head_dim": 4, "kv_heads": G, "rope": mh.RoPE(pairing="interleaved")},
        CAUSALLY,
        why="grouped: head h reads h % G",
    ),
    Case("bert", real.bert),
    Case("timm", real.timm(True), auto=False),
    Case("timm-no-qkv-bias", real.timm(False), auto=False),
    Case("tiny-vit", vision.tiny_vit, {"head_dim": 3, "value_dim": 6}),
    Case("timm-per-head", vision.bare_tiny_vit, auto=False, why="timm's names and shape"),
    Case("timm-per-head-no-qkv-bias", vision.per_head("qkv", "proj", bias="o"), auto=False),
    Case("swin", vision.swin, {"head_dim": 3}),
    Case("beit", vision.beit),
    Case("sam", vision.sam_decoder, {"head_dim": 2}, why="H·D≠E under out_proj"),
    Case("sam-vit", vision.sam_encoder),
    Case("openai-whisper", vision.openai_whisper),
    Case("clip", plain("clip", "CLIPAttention", "CLIPVisionConfig", **MODEL)),
    Case("siglip", plain("siglip", "SiglipAttention", "SiglipVisionConfig", **MODEL)),
    Case("bart", by_hand("bart", "BartAttention")),
    Case("whisper", by_hand("whisper", "WhisperAttention")),
    Case("gpt-j", real.gptj, {"heads": 3, "rope": mh.RoPE(dim=4, pairing="interleaved")} | UNBIASED, CAUSALLY),
    Case("gpt-j", real.gptj, {"heads": 3, "rope": mh.RoPE(dim=4)} | UNBIASED, CAUSALLY, why="into a layer of halves"),
    Case("t5", real.t5, {"head_dim": 7, "scale": 1.0} | UNBIASED),
    Case("t5", vision.t5_with_positions, {"head_dim": 7, "scale": 1.0} | UNBIASED, why="with its bias"),
    Case("llama", rotary("llama", "Llama", "LlamaConfig", **LLAMA), DECODER, CAUSALLY),
    Case(
        "llama",
        rotary("llama", "Llama", "LlamaConfig", **LLAMA, attention_bias=True),
        DECODER | {"bias": True},
        CAUSALLY,
        why="biases",
    ),
    Case(
        "llama",
        rotary("llama", "Llama", "LlamaConfig", **LLAMA),
        DECODER | {"rope": mh.RoPE(pairing="interleaved")},
        CAUSALLY,
        why="into an interleaved layer",
    ),
    Case("llama", plain("vit", "ViTAttention", "ViTConfig", **MODEL), why="ViT in transformers 5, in memory"),
    Case("mistral", rotary("mistral", "Mistral", "MistralConfig", **LLAMA), DECODER, CAUSALLY),
    Case("gemma", rotary("gemma", "Gemma", "GemmaConfig", **LLAMA), DECODER, CAUSALLY),
    Case("qwen2", rotary("qwen2", "Qwen2", "Qwen2Config", **GROUPED), ROPE | {"kv_heads": G}, CAUSALLY),
    Case("qwen3", rotary("qwen3", "Qwen3", "Qwen3Config", **LLAMA), DECODER | {"qk_norm": True}, CAUSALLY, auto=False),
    Case(
        "qwen3",
        rotary("qwen3", "Qwen3", "Qwen3Config", **LLAMA),
        DECODER | {"qk_norm": True, "rope": mh.RoPE(pairing="interleaved")},
        CAUSALLY,
        auto=False,
        why="the norms move with the pairs",
    ),
    Case(
        "gemma3",
        rotary("gemma3", "Gemma3", "Gemma3TextConfig", **LLAMA, query_pre_attn_scalar=8),
        DECODER | {"qk_norm": True},
        CAUSALLY,
        auto=False,
    ),
    Case(
        "gpt-oss",
        rotary("gpt_oss", "GptOss", "GptOssConfig", **LLAMA, rope_parameters=PLAIN),
        DECODER | {"bias": True, "sinks": True},
        CAUSALLY,
    ),
    Case("meta-llama", real.meta_llama, DECODER | {"rope": mh.RoPE(pairing="interleaved")}, CAUSALLY),
    Case("meta-llama", real.meta_llama, DECODER, CAUSALLY, why="into a layer of halves"),
    Case(
        "phi3",
        rotary("phi3", "Phi3", "Phi3Config", **GROUPED, pad_token_id=0),
        ROPE | UNBIASED | {"kv_heads": G},
        CAUSALLY,
    ),
    Case("keras", real.keras(False), {"head_dim": 5, "value_dim": 7}),
    Case("keras", real.keras(True), {"head_dim": 5, "kv_heads": G}, why="grouped"),
    Case("flax", real.linen, {"head_dim": 5}),
    Case("flax", real.nnx, {"head_dim": 5}, why="nnx"),
]
NOT_IN_MEMORY = {
    "vit",
    "vit-no-qkv-bias",
    "swin-hf",
    "beit-hf",
}  # transformers 5 has these names in files only: see below


def flat(state: dict, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in state.items():
        found |= flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.layout} {c.why}".strip())
def test_same_output_and_identical_bytes(case: Case) -> None:
    theirs = case.real()
    if case.layout == "gemma3":  # so that 1 + w is exact, and its bytes return
        for name in ("q_norm.weight", "k_norm.weight"):
            theirs.state[name].copy_((theirs.state[name] * 1024).round() / 1024)
    layer = mh.MultiHeadAttention(E, **{"heads": H} | case.make)
    loaded = mh.load_weights(layer, theirs.state, layout="auto" if case.auto else case.layout)
    assert LAYOUTS[loaded.layout] in (
        LAYOUTS[case.layout],
        LAYOUTS["gpt-neox" if case.layout == "falcon" else case.layout],
    )
    x = torch.randn(B, N, E)
    with torch.no_grad():
        given = theirs.before(x)
        assert_close(layer(given, **case.call | theirs.call), theirs.run(x), rtol=2e-5, atol=2e-5)

    saved = mh.save_weights(layer, layout=case.layout)
    expected = flat(theirs.state)
    for name in loaded.ignored:
        del expected[name]
    assert saved.keys() == expected.keys()
    for name, t in saved.items():
        other = np.asarray(expected[name])
        assert t.is_contiguous()
        assert (tuple(t.shape), t.numpy().dtype) == (other.shape, other.dtype)
        assert t.numpy().tobytes() == other.tobytes(), name


@pytest.mark.parametrize("family", ["ViT", "DeiT", "Dinov2"])
@pytest.mark.parametrize("qkv_bias", [True, False])
def test_vision_transformers_as_hugging_face_writes_them(family: str, qkv_bias: bool, tmp_path: Any) -> None:
    from safetensors.torch import load_file

    transformers = importlib.import_module("transformers")
    sizes = MODEL | {"num_hidden_layers": 2, "intermediate_size": 16, "qkv_bias": qkv_bias}
    model = randomised(getattr(transformers, f"{family}Model")(getattr(transformers, f"{family}Config")(**sizes)))
    model.save_pretrained(tmp_path)
    prefix = "encoder.layer.1.attention."
    layer = mh.MultiHeadAttention(E, H)
    loaded = mh.load_weights(layer, tmp_path, prefix=prefix)
    layout = "vit" if qkv_bias else "vit-no-qkv-bias"
    assert loaded.layout == layout
    assert loaded.zeroed == ([] if qkv_bias else ["q_bias", "k_bias", "v_bias"])
    modules = [m for name, m in model.named_modules() if name.endswith(("1.attention", "1.self_attn"))]
    x = torch.randn(B, N, E)
    with torch.no_grad():
        found = modules[0](x)
        assert_close(layer(x), found[0] if isinstance(found, tuple) else found, rtol=2e-5, atol=2e-5)
    written = {name: t for name, t in load_file(tmp_path / "model.safetensors").items() if name.startswith(prefix)}
    assert_close(mh.save_weights(layer, layout=layout, prefix=prefix), written, rtol=0, atol=0)


WINDOWED = {
    "Swin": ("swin-hf", {"embed_dim": E, "depths": [2], "num_heads": [H], "window_size": 2}, SwinBias(H, (2, 2))),
    "Beit": (
        "beit-hf",
        MODEL | {"num_hidden_layers": 2, "intermediate_size": 16, "use_relative_position_bias": True},
        SwinBias(H, (2, 2), class_token=True),
    ),
}


@pytest.mark.parametrize("family", WINDOWED)
def test_swin_and_beit_as_hugging_face_writes_them(family: str, tmp_path: Any) -> None:
    from safetensors.torch import load_file

    layout, sizes, bias = WINDOWED[family]
    _, module = vision.hugging_face_file(family, tmp_path, **sizes)
    written = load_file(tmp_path / "model.safetensors")
    table = next(name for name in sorted(written) if name.endswith("relative_position_bias_table"))
    with torch.no_grad():
        bias.table.copy_(written[table])
    prefix = table[: table.index("attention.") + len("attention.")]
    layer, x = mh.MultiHeadAttention(E, H), torch.randn(B, len(bias()[0]), E)
    loaded = mh.load_weights(layer, tmp_path, prefix=prefix)
    assert (loaded.layout, loaded.ignored) == (layout, [table.removeprefix(prefix)])
    assert loaded.zeroed == ([] if family == "Swin" else ["k_bias"])
    with torch.no_grad():
        given = {"attention_mask": bias()[None]} if family == "Beit" else {}
        assert_close(layer(x, bias=bias().detach()), module(x, **given)[0], rtol=2e-5, atol=2e-5)


def test_every_layout_has_a_case_and_a_picture() -> None:
    assert {LAYOUTS[case.layout].name for case in CASES} | NOT_IN_MEMORY == {layout.name for layout in REGISTERED}
    for layout in REGISTERED:
        assert layout.picture.count("\n") >= 4, layout.name
        assert all(len(line) <= 130 for line in str(layout).splitlines())


@pytest.mark.parametrize("layout", REGISTERED, ids=lambda layout: layout.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_save_and_load_undo_each_other(layout: Any, dtype: torch.dtype) -> None:
    """Every layout, with everything that it has room for at once."""
    parts = {part for entry in layout.entries for part in entry.parts}
    if layout.name == "gemma3":
        dtype = torch.float64
    layer = mh.MultiHeadAttention(
        E,
        H,
        kv_heads=G if "G<H" in layout.allows else None,
        head_dim=10 if "H·D≠E" in layout.allows else None,
        value_dim=14 if "V≠D" in layout.allows else None,
        context_dim=13 if "C≠E" in layout.allows else None,
        bias="o_bias" in parts or "q_bias" in parts,
        rope=mh.RoPE(pairing="interleaved") if layout.pairing else False,
        qk_norm="q_norm" in parts,
        sinks="sinks" in parts,
        dtype=dtype,
    )
    randomised(layer)
    with torch.no_grad():
        for part, name in (("k_bias", "k_proj"), ("o_bias", "o_proj"), ("q_bias", "q_proj"), ("v_bias", "v_proj")):
            if part not in parts and layer.q_proj.bias is not None:
                getattr(layer, name).bias.zero_()
        for norm in (layer.q_norm, layer.k_norm):
            if norm is not None:
                norm.weight.copy_((norm.weight * 1024).round() / 1024)
    saved = mh.save_weights(layer, layout=layout.name, prefix="somewhere.")
    again = mh.MultiHeadAttention(
        *(E, H),
        kv_heads=layer.sizes.G,
        head_dim=layer.sizes.D,
        value_dim=layer.sizes.V,
        context_dim=layer.sizes.C,
        bias=layer.q_proj.bias is not None,
        rope=layer.rope or False,
        qk_norm=layer.q_norm is not None,
        sinks=layer.sinks is not None,
        dtype=dtype,
    )
    mh.load_weights(again, saved, layout=layout.name, prefix="somewhere")
    assert_close(again.state_dict(), layer.state_dict(), rtol=0, atol=0)
    assert saved[next(iter(saved))].data_ptr() != layer.q_proj.weight.data_ptr(), "saved tensors are copies"


def test_groups_are_as_they_are_drawn() -> None:
    """The picture of falcon: H=4, G=2, D=1, each row numbered."""
    layer = mh.MultiHeadAttention(1, heads=4, kv_heads=2, head_dim=1, bias=False)
    layer_1 = LAYOUTS["falcon"].entries[0]
    q, k, v = (torch.tensor(rows, dtype=torch.float32)[:, None] for rows in ([0, 1, 2, 3], [10, 11], [20, 21]))
    joined = layer_1.lie.join((q, k, v), layer_1.parts, layer.sizes)
    assert joined.flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_pairing_can_be_told() -> None:
    """Llama's names with interleaved pairs, as Cohere has them."""
    theirs = rotary("cohere", "Cohere", "CohereConfig", **GROUPED, use_qk_norm=False, rope_parameters=PLAIN)()
    x = torch.randn(B, N, E)
    for ours in ("halves", "interleaved"):
        layer = mh.MultiHeadAttention(E, H, kv_heads=G, bias=False, rope=mh.RoPE(pairing=ours))
        mh.load_weights(layer, theirs.state, pairing="interleaved")
        assert_close(layer(x, mask=mh.Causal()), theirs.run(x), rtol=2e-5, atol=2e-5)
        saved = mh.save_weights(layer, layout="llama", pairing="interleaved")
        assert_close(saved, dict(theirs.state), rtol=0, atol=0)


def test_scale_is_the_layers_to_know() -> None:
    """What weights do not carry: T5 does not scale, and the same weights in a scaled layer differ."""
    theirs = real.t5()
    x = torch.randn(B, N, E)
    layer = mh.MultiHeadAttention(E, H, head_dim=7, bias=False)
    assert mh.load_weights(layer, theirs.state).ignored == ["relative_attention_bias.weight"]
    assert not torch.allclose(layer(x), theirs.run(x), atol=1e-3)
    layer.scale = layer.scale * math.sqrt(7)
    assert_close(layer(x), theirs.run(x), rtol=2e-5, atol=2e-5)


def test_the_documentation_names_every_layout_once_and_no_other() -> None:
    text = (Path(__file__).parent.parent / "docs" / "weights.md").read_text(encoding="utf-8")
    table = text[text.index("| layouts | compared with |") : text.index("```text\ntorch: ")]
    assert sorted(re.findall(r"`([a-z0-9-]+)`", table)) == sorted(mh.weights.LAYOUTS)


def test_the_documentation_draws_every_layout() -> None:
    page = (Path(__file__).parents[1] / "docs" / "weights.md").read_text()
    assert [layout.name for layout in REGISTERED if f"```text\n{layout}\n```" not in page] == []


def test_a_checkpoint_that_transformers_sharded(tmp_path: Path) -> None:
    transformers = importlib.import_module("transformers")
    config = transformers.GPT2Config(n_embd=E, n_head=H, n_layer=3, vocab_size=61, n_positions=17)
    model = randomised(transformers.GPT2Model(config))
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    layer, x = mh.MultiHeadAttention(E, H), torch.randn(B, N, E)
    assert mh.load_weights(layer, tmp_path, prefix="h.1.attn").layout == "gpt2"
    with torch.no_grad():
        expected = model.h[1].attn(x, attention_mask=real.CAUSAL)[0]
        assert_close(layer(x, mask=mh.Causal()), expected, rtol=2e-5, atol=2e-5)

"""Layers and models of one's own, recorded traces and Hugging Face models, in the explorer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import multihead as mh
from multihead.explorer.given import Own, Recorded
from multihead.explorer.request import Refused
from multihead.explorer.session import Session
from multihead.explorer.subjects import of_model, of_name
from multihead.explorer.wire import Answer
from tests.models.test_show import write_gguf

GIVEN = {"model": "given", "layer": 0, "input": {"kind": "given"}}


class Model(nn.Module):
    """Two layers of ours, the second one in cross-attention, called in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first = mh.MultiHeadAttention(24, heads=3, rope=True, qk_norm=True)
        self.second = mh.MultiHeadAttention(
            24, heads=4, kv_heads=2, head_dim=6, value_dim=5, context_dim=16, sinks=True, softcap=20.0
        )
        self.unused = mh.MultiHeadAttention(8, heads=2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(x) + self.first(x, mask=mh.Causal())
        return self.second(x, x[..., :16])


@pytest.mark.parametrize("batch", [False, True])
def test_a_layer_of_ones_own(batch: bool) -> None:
    layer = mh.MultiHeadAttention(24, heads=6, kv_heads=2, head_dim=5, value_dim=7, bias=False)
    x = torch.randn(3, 9, 24) if batch else torch.randn(9, 24)
    session = Session([Own(layer, x, mask=mh.Causal(window=4), labels=[f"item {n}" for n in range(9)])])
    answer = session.answer("trace", GIVEN)
    wanted = mh.trace(layer, x[0] if batch else x, mask=mh.Causal(window=4))
    for name in wanted:
        assert torch.allclose(answer.tensors[name], wanted[name], atol=1e-5), name
    assert answer.meta["tokens"][3]["text"] == "item 3"
    assert answer.meta["mask"] == {"kind": "causal", "window": 4}
    weights = session.answer("weights", {"model": "given", "layer": 0}).tensors
    assert weights["w_o"].shape == (6, 7, 24)
    assert "b_q" not in weights
    assert len(session.answer("heads", {"model": "given", "input": {"kind": "given"}}).meta["heads"]) == 6


def test_dropout_is_off_while_one_looks() -> None:
    layer, x = mh.MultiHeadAttention(8, heads=2, dropout=0.9).train(), torch.randn(3, 8)
    output = Session([Own(layer, x)]).answer("trace", GIVEN).tensors["output"]
    assert layer.training
    assert torch.allclose(output, layer.eval()(x), atol=1e-6)


def test_a_layer_that_changes_is_seen_as_it_is() -> None:
    layer, x = mh.MultiHeadAttention(8, heads=2), torch.randn(3, 8)
    session = Session([Own(layer, x)])
    before = session.answer("trace", GIVEN).tensors["output"]
    with torch.no_grad():
        layer.o_proj.bias += 1
    assert torch.allclose(session.answer("trace", GIVEN).tensors["output"], before + 1, atol=1e-6)


def test_a_model_of_ones_own_has_its_layers_caught() -> None:
    model, x = Model().train(), torch.randn(7, 24)
    session = Session([Own(model, x)])
    described = session.answer("models", {}).meta["models"][0]
    assert [layer["name"] for layer in described["layers"]] == ["first", "second"], (
        "the one that is not called is not there"
    )
    assert model.training
    with torch.no_grad():
        model.eval()
        inner = x + model.first(x, mask=mh.Causal())
        wanted = mh.trace(model.second, inner, inner[:, :16])
    answer = session.answer("trace", GIVEN | {"layer": 1})
    for name in wanted:
        assert torch.allclose(answer.tensors[name], wanted[name], atol=1e-5), name
    assert answer.tensors["sinks"].shape == (4,)
    assert answer.meta["softcap"] == 20.0
    first = session.answer("trace", GIVEN)
    assert first.meta["qk_norm"]
    assert first.meta["rope"]["dim"] == 8
    off = session.answer("trace", GIVEN | {"layer": 1, "off": [[0, 1]]})
    assert not torch.allclose(off.tensors["x"], answer.tensors["x"])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masked", [None, "bool", "float", "padding", "causal"])
def test_torchs_own_layer(batch_first: bool, masked: str | None) -> None:
    theirs = nn.MultiheadAttention(24, 3, batch_first=batch_first)
    x = torch.randn(2, 6, 24) if batch_first else torch.randn(6, 2, 24)
    hidden = torch.ones(6, 6).triu(1).bool()
    call = {
        None: {},
        "bool": {"attn_mask": hidden},
        "float": {"attn_mask": torch.randn(6, 6)},
        "padding": {"key_padding_mask": torch.tensor([[False] * 4 + [True] * 2] * 2)},
        "causal": {"attn_mask": hidden, "is_causal": True},
    }[masked]
    session = Session([Own(theirs, x, **call)])
    answer = session.answer("trace", GIVEN)
    with torch.no_grad():
        out, weights = theirs(x, x, x, average_attn_weights=False, **call)
    assert torch.allclose(answer.tensors["output"], out[0] if batch_first else out[:, 0], atol=1e-5)
    assert torch.allclose(answer.tensors["weights"], weights[0], atol=1e-5)
    assert session.answer("weights", {"model": "given", "layer": 0}).tensors["w_q"].shape == (24, 3, 8)
    assert (answer.meta["mask"] or {}).get("kind") == {"bool": "causal", "causal": "causal", "padding": "drawn"}.get(
        masked or ""
    )


def test_a_model_of_torchs_layers_and_encoder_and_decoder() -> None:
    model = nn.TransformerDecoderLayer(24, 3, 32, batch_first=True)
    session = Session([Own(model, torch.randn(1, 5, 24), memory=torch.randn(1, 7, 24))])
    described = session.answer("models", {}).meta["models"][0]
    assert [layer["name"] for layer in described["layers"]] == ["self_attn", "multihead_attn"]
    cross = session.answer("trace", GIVEN | {"layer": 1})
    assert cross.tensors["weights"].shape == (3, 5, 7)
    assert len(cross.meta["key_tokens"]) == 7
    assert len(session.answer("heads", {"model": "given", "input": {"kind": "given"}}).meta["heads"]) == 6
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(24, 3, 32, batch_first=True), 2, enable_nested_tensor=False
    )
    assert len(Session([Own(encoder, torch.randn(1, 5, 24))]).answer("models", {}).meta["models"][0]["layers"]) == 2
    assert encoder.training


def test_torchs_layer_with_keys_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="adds keys of its own"):
        Own(nn.MultiheadAttention(8, 2, add_zero_attn=True), torch.randn(3, 8))


def test_a_cache_stays_as_it_was() -> None:
    layer = mh.MultiHeadAttention(8, heads=2)
    cache = layer.new_cache(batch=1)
    layer(torch.randn(1, 4, 8), mask=mh.Causal(), cache=cache)
    session = Session([Own(layer, torch.randn(1, 1, 8), mask=mh.Causal(), cache=cache)])
    for _ in range(2):
        assert session.answer("trace", GIVEN).tensors["weights"].shape == (2, 1, 5)
    assert cache.used == 4


def test_a_grid_of_patches() -> None:
    layer, x = mh.MultiHeadAttention(8, heads=2), torch.randn(7, 8)
    session = Session([Own(layer, x, grid=(2, 3))])
    assert session.answer("trace", GIVEN).meta["grid"] == {"rows": 2, "columns": 3, "first": 1}


def test_an_input_that_does_not_fit_on_a_screen_is_refused() -> None:
    session = Session([Own(mh.MultiHeadAttention(8, heads=2), torch.randn(3000, 8))])
    with pytest.raises(Refused, match="x has 3000 items: expected at most 512"):
        session.respond("trace", GIVEN)


@pytest.mark.parametrize(
    ("model", "x", "options", "message"),
    [
        (nn.Linear(4, 4), torch.randn(2, 4), {}, "has no layer to explore"),
        (mh.MultiHeadAttention(8, heads=2), None, {}, "x is missing"),
        (mh.MultiHeadAttention(8, heads=2), torch.randn(2, 8), {"labels": ["a"]}, "labels has 1 names: expected 2"),
        (mh.MultiHeadAttention(8, heads=2), torch.randn(2, 8), {"grid": (2, 3)}, "at most 2 patches"),
        ("lm", "text", {}, "expected a layer or a model"),
        (mh.models.LanguageModel(50, 32, 4, 2, 16), "text", {}, "no tokenizer"),
        (mh.models.load("lm"), "text", {"labels": []}, "expected only with a layer"),
    ],
)  # fmt: skip
def test_what_cannot_be_explored_is_refused_in_words(model: Any, x: Any, options: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        of_model(model, x, **options)


def test_a_model_of_the_package_with_an_input_of_ones_own() -> None:
    subject, first = of_model(mh.models.load("lm"), "hello there")
    session = Session([subject])
    session.start_with(first)
    assert session.first == {"model": "model", "layer": 0, "input": {"kind": "text", "text": "hello there"}}
    session.prepare()
    assert of_model(mh.models.load("lm"), torch.tensor([[0, 5, 6]]))[1] == {"kind": "tokens", "ids": [0, 5, 6]}
    subject, first = of_model(mh.models.load("vit"), torch.rand(40, 30))
    assert first is not None
    assert Session([subject]).answer("predict", {"model": "model", "input": first}).meta["kind"] == "classes"


def test_a_recorded_trace() -> None:
    layer, x = mh.MultiHeadAttention(24, heads=3, softcap=5.0), torch.randn(2, 5, 24)
    traced = mh.trace(layer, x, mask=mh.Causal(), labels=list("abcde"))
    session = Session([Recorded(traced)])
    answer = session.answer("trace", GIVEN)
    for name in traced:
        assert torch.equal(answer.tensors[name], traced[name][0]), name
    maps = session.answer("heads", {"model": "given", "input": {"kind": "given"}}).tensors["maps"]
    assert torch.allclose(maps.float(), traced["weights"][0], atol=1e-3)


# Hugging Face ----------------------------------------------------------------------------------------------------------


def llama(folder: Path) -> Path:
    """A llama with random weights and the tokenizer of our language model, as files."""
    transformers = pytest.importorskip("transformers")
    tokenizer = mh.models.load("lm").tokenizer
    (folder / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def test_a_hugging_face_model_answers_every_route(tmp_path: Path) -> None:
    subject = of_name(str(llama(tmp_path)))
    session = Session([subject])
    described = session.answer("models", {}).meta["models"][0]
    assert described["layers"][0]["sizes"] == {"E": 32, "H": 4, "G": 2, "D": 8, "V": 8, "C": 32}
    assert (described["masks"], described["weights"], described["predicts"]) == (False, True, "tokens")
    text = {"kind": "text", "text": "I love ☃ pizza"}
    request = {"model": "model", "layer": 1, "input": text}
    answer = session.answer("trace", request)
    said = b"".join(bytes.fromhex(t["bytes"]) for t in answer.meta["tokens"])
    assert said.decode() == "I love ☃ pizza"
    ids = torch.tensor([[t["id"] for t in answer.meta["tokens"]]])
    wanted = mh.hf.trace(subject.model, 1, input_ids=ids)  # type: ignore[attr-defined]
    for name in wanted:
        assert torch.allclose(answer.tensors[name], wanted[name], atol=1e-6), name
    assert answer.meta["rope"] == {"dim": 8, "interleaved": False}
    assert session.answer("weights", {"model": "model", "layer": 1}).tensors["w_k"].shape == (32, 2, 8)
    heads = session.answer("heads", {"model": "model", "input": text})
    assert len(heads.meta["heads"]) == 8
    before = session.answer("predict", {"model": "model", "input": text}).tensors["logits"]
    after = session.answer("predict", {"model": "model", "input": text, "off": [[0, 3]]}).tensors["logits"]
    with torch.inference_mode():
        assert torch.allclose(before, subject.model(ids).logits[0, -1], atol=1e-5)  # type: ignore[attr-defined]
    assert not torch.equal(before, after)
    assert session.answer("decode", request).meta["difference"]["output"] < 1e-5
    with pytest.raises(Refused, match="makes its masks itself"):
        session.respond("trace", request | {"mask": {"kind": "none"}})


def test_a_gguf_file_is_explored(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    write_gguf(tmp_path / "tiny.gguf")
    subject = of_name(str(tmp_path / "tiny.gguf"))
    session = Session([subject])
    text = {"kind": "text", "text": "I love pizza"}
    answer = session.answer("trace", {"model": "model", "layer": 1, "input": text})
    assert "␣love" in [t["text"] for t in answer.meta["tokens"]]
    ids = torch.tensor([[t["id"] for t in answer.meta["tokens"]]])
    wanted = mh.hf.trace(subject.model, 1, input_ids=ids)  # type: ignore[attr-defined]
    for name in wanted:
        assert torch.allclose(answer.tensors[name], wanted[name], atol=1e-6), name
    shown = session.answer("predict", {"model": "model", "input": text}).tensors["logits"]
    with torch.inference_mode():
        assert torch.allclose(shown, subject.model(ids).logits[0, -1], atol=1e-5)  # type: ignore[attr-defined]


def test_a_hugging_face_model_without_a_tokenizer() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    subject, first = of_model(transformers.BertModel(config).eval(), torch.tensor([[7, 8, 9]]))
    session = Session([subject])
    session.start_with(first)
    session.prepare()
    answer = session.answer("trace", session.first)
    assert [t["text"] for t in answer.meta["tokens"]] == ["⟨7⟩", "⟨8⟩", "⟨9⟩"]
    assert "output" in answer.tensors
    with pytest.raises(Refused, match="without a tokenizer"):
        session.respond("tokens", {"model": "model", "text": "hello"})
    with pytest.raises(Refused, match="predicts nothing"):
        session.respond("predict", {"model": "model", "input": first})


def test_a_hugging_face_vision_transformer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=24, patch_size=8,
        id2label={0: "cat", 1: "dog", 2: "cow"}, label2id={"cat": 0, "dog": 1, "cow": 2},
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.2, 0.25]}')
    session = Session([of_name(str(tmp_path))])
    said = session.answer("models", {}).meta["models"][0]
    assert said["picture"] == {"size": 24, "channels": 3, "patch": 8, "rows": 3, "columns": 3, "first": 1}
    seen = Answer.from_bytes(session.picture("model", mh.models.samples()["bag"].read_bytes()))
    pixels = seen.tensors["pixels"]
    assert pixels.shape == (24, 24, 3)
    shown = {"kind": "pixels", "pixels": seen.meta["pixels"]}
    model = session.subjects["model"].model  # type: ignore[attr-defined]
    given = (pixels.permute(2, 0, 1)[None] / 255 - torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)) / torch.tensor(
        [0.2, 0.2, 0.25]
    ).view(3, 1, 1)
    answer = session.answer("trace", {"model": "model", "layer": 1, "input": shown})
    wanted = mh.hf.trace(model, 1, pixel_values=given)
    assert torch.allclose(answer.tensors["weights"], wanted["weights"], atol=1e-6)
    assert torch.equal(answer.tensors["pixels"], pixels)
    assert [t["text"] for t in answer.meta["tokens"]][:2] == ["class", "patch 0"]
    predicted = session.answer("predict", {"model": "model", "input": shown})
    with torch.inference_mode():
        assert torch.allclose(predicted.tensors["logits"], model(pixel_values=given).logits[0], atol=1e-5)
    assert [label["text"] for label in predicted.meta["labels"]] == ["cat", "dog", "cow"]
    assert len(session.answer("heads", {"model": "model", "input": shown}).meta["heads"]) == 8
    for data in (b"", b"<svg/>", mh.models.samples()["bag"].read_bytes()[:150]):
        with pytest.raises(Refused, match="the picture"):
            session.picture("model", data)
    subject, first = of_model(model, mh.models.samples()["bag"])
    assert first is not None
    assert Session([subject]).answer("predict", {"model": "model", "input": first}).meta["kind"] == "classes"


def test_a_model_that_takes_no_text_is_refused_in_words() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    with pytest.raises(ValueError, match="does not take one text"):
        of_model(transformers.T5ForConditionalGeneration(config), "text")

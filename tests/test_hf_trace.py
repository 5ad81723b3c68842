"""The seven steps of a Hugging Face model: what `hf.trace` gives makes the numbers the model makes."""

import pytest
import torch

import multihead as mh

pytest.importorskip("transformers")

import multihead.hf
from tests.hf_architectures import ARCHITECTURES

WHOLE = [  # whose weights lie in a layout that is known
    "GPT2LMHeadModel", "GPTNeoXForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM",
    "Gemma2ForCausalLM", "Phi3ForCausalLM", "BertModel", "T5ForConditionalGeneration", "ViTModel",
]  # fmt: skip
PARTS = ["OPTForCausalLM", "DeepseekV3ForCausalLM"]
BY_NAME = {architecture.model: architecture for architecture in ARCHITECTURES}
NAMES = [name for step in mh.Trace.steps for name in step.names]


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-4 * float(b.detach().abs().max()), rtol=1e-4)


@pytest.mark.parametrize("name", WHOLE)
def test_all_seven_steps_follow_from_each_other(name: str) -> None:
    model = BY_NAME[name].build()
    inputs = BY_NAME[name].inputs()
    t = mh.hf.trace(model, 1, **inputs)
    assert list(t)[1:] == NAMES
    with mh.hf.watch(model, layers=1) as seen, torch.no_grad():
        model(**inputs)
    assert close(t["weights"], seen[1].weights()[0])
    layer = t.layer
    assert layer is not None
    assert close(t["q"], layer.q_proj(t["x"]).unflatten(-1, (-1, layer.sizes.D)))
    assert close(t["v_heads"], t["v"].transpose(0, 1))
    group = t["weights"].shape[0] // t["v_heads"].shape[0]
    assert close(t["heads"], t["weights"] @ t["v_heads"].repeat_interleave(group, 0))
    assert close(t["output"], layer.o_proj(t["merged"]))
    scale = t.options["scale"]
    assert close(t["scores"], scale * t["q_heads"] @ t["k_heads"].repeat_interleave(group, 0).mT)
    if t.options["rope"] is None:
        assert close(t["q_heads"], t["q"].transpose(0, 1))
    else:
        cos, sin, _ = t.options["rope"]
        assert cos.shape == sin.shape == (len(t.labels), cos.shape[1])


@pytest.mark.parametrize("name", PARTS)
def test_what_is_not_known_is_left_out(name: str) -> None:
    t = mh.hf.trace(BY_NAME[name].build(), 0, **BY_NAME[name].inputs())
    assert "q" not in t
    assert t.layer is None
    assert {"q_heads", "k_heads", "v_heads", "scores", "masked", "weights", "heads", "merged"} <= set(t)


def test_the_newest_token_after_a_cache() -> None:
    model = BY_NAME["LlamaForCausalLM"].build()
    ids = BY_NAME["LlamaForCausalLM"].inputs()["input_ids"][:1]
    whole = mh.hf.trace(model, 1, input_ids=ids)
    with torch.no_grad():
        cache = model(ids[:, :-1], use_cache=True).past_key_values
    alone = mh.hf.trace(model, 1, input_ids=ids[:, -1:], past_key_values=cache)
    assert alone["weights"].shape == (4, 1, ids.shape[1])
    for name in ("weights", "heads"):
        assert close(alone[name][:, -1], whole[name][:, -1])
    assert close(alone["output"][-1], whole["output"][-1])


def test_a_layer_that_is_not_there_is_refused() -> None:
    model = BY_NAME["LlamaForCausalLM"].build()
    with pytest.raises(ValueError, match="layer=7: expected 0…1"):
        mh.hf.trace(model, 7, **BY_NAME["LlamaForCausalLM"].inputs())

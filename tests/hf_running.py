"""Hugging Face models made, called and compared: what the tests of them share."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.hf_architectures import ARCHITECTURES, GROUPED, Architecture

DRAWS = 8  # models, where one is not enough to tell
by_model: dict[str, Any] = {"ids": lambda a: a.model}


def find(model: str) -> Architecture:
    return next(a for a in ARCHITECTURES if a.model.startswith(model))


def llama(attention: str = "multihead", kind: str = "Llama", **options: Any) -> nn.Module:
    return Architecture(f"{kind}ForCausalLM", f"{kind}Config", {**GROUPED, **options}, dict, "").build(attention)


def logits(model: nn.Module, *args: Any, **given: Any) -> Tensor:
    with torch.no_grad():
        return model(*args, **given).logits


def small_llama(**options: Any) -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**{**GROUPED, "max_position_embeddings": 512, **options})
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()


def gpt2() -> nn.Module:
    return ARCHITECTURES[0].build()


def generate(model: nn.Module, inputs: dict[str, Tensor], **options: Any) -> Any:
    """Seven tokens, never padding; with `return_dict_in_generate` and `output_logits` also what they were chosen by."""
    options = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0, "suppress_tokens": [0], **options}
    return model.generate(**inputs, **options)


def tensors(output: Any) -> dict[str, Tensor]:
    """Every tensor of a model's output by name, one for each layer where there are layers."""
    found = {}
    for name, value in output.items():
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, tuple) and value and isinstance(value[0], Tensor):
            found |= {f"{name}.{n}": t for n, t in enumerate(value)}
    return found


def run(model: nn.Module, inputs: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    inputs = {name: t.to(dtype) if t.dtype.is_floating_point else t for name, t in inputs.items()}
    with torch.no_grad():
        return tensors(model.to(dtype)(**inputs, output_attentions=True))


def padding(length: int, side: str) -> Tensor:
    real = torch.ones(2, length, dtype=torch.long)
    real[0, slice(None, 4) if side == "left" else slice(-4, None)] = 0
    return real

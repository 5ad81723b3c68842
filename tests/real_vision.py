"""Attention of models that see or hear, from the packages that publish them, and what x-transformers makes of heads."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from multihead.positions import SwinBias, T5Bias
from tests.real_attention import CAUSAL, B, E, G, H, N, Real, StandIn, hf, randomised, timm_module

CONTEXT = torch.linspace(-1, 1, B * 7 * E).sin().view(B, 7, E)


def table(module: nn.Module, bias: Any) -> dict[str, Tensor]:
    with torch.no_grad():
        bias.table.copy_(module.relative_position_bias_table)
    return {"bias": bias().detach()}


def swin() -> Real:
    made = timm_module("models.swin_transformer").WindowAttention(E, H, head_dim=3, window_size=(N, 1))
    module = randomised(made)
    return Real(module.state_dict(), module, table(module, SwinBias(H, (N, 1))))


def beit() -> Real:
    module = randomised(timm_module("models.beit").Attention(E, H, qkv_bias=True, window_size=(2, 2)))
    return Real(module.state_dict(), module, table(module, SwinBias(H, (2, 2), class_token=True)))


def tiny_vit() -> Real:
    """Packed per head, values wider than keys, and a norm in front."""
    module = timm_module("models.tiny_vit").Attention(E, 3, H, attn_ratio=2, resolution=(N, 1))
    module = randomised(module)
    return Real(module.state_dict(), module, {"bias": module.get_attention_biases(torch.device("cpu"))}, module.norm)


def bare_tiny_vit() -> Real:
    """The same with values as wide as keys, and of its names those alone that timm's other models have."""
    module = randomised(timm_module("models.tiny_vit").Attention(E, E // H, H, attn_ratio=1, resolution=(N, 1)))
    state = {name: t for name, t in module.state_dict().items() if name.startswith(("qkv", "proj"))}
    return Real(state, module, {"bias": module.get_attention_biases(torch.device("cpu"))}, module.norm)


def per_head(qkv: str, o: str, bias: str = "") -> Callable[[], Real]:
    """Written out: q, k and v of one matrix, packed per head."""

    def build() -> Real:
        first, last = nn.Linear(E, 3 * E, bias="q" in bias), nn.Linear(E, E, bias="o" in bias)

        def run(x: Tensor) -> Tensor:
            q, k, v = first(x).view(B, N, H, 3, E // H).permute(3, 0, 2, 1, 4)
            return last(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, E))

        return Real(randomised(nn.ModuleDict({qkv: first, o: last})).state_dict(), run)

    return build


def per_matrix(bias: bool, rope: Any) -> Callable[[], Real]:
    """Written out after ChatGLM 2 and Ling: Falcon's names, all of q, then all of k, then all of v."""

    def build() -> Real:
        D = E // H
        first, last = nn.Linear(E, (H + 2 * G) * D, bias=bias), nn.Linear(E, E, bias=False)

        def run(x: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in first(x).split([H * D, G * D, G * D], -1))
            q, k = rope.rotate(q, torch.arange(N)), rope.rotate(k, torch.arange(N))
            k, v = (t.repeat_interleave(H // G, 1) for t in (k, v))
            heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return last(heads.transpose(1, 2).reshape(B, N, E))

        return Real(randomised(nn.ModuleDict({"query_key_value": first, "dense": last})).state_dict(), run)

    return build


def gpt_bigcode(multi_query: bool) -> Callable[[], Real]:
    def build() -> Real:
        given = {"n_embd": E, "n_head": H, "multi_query": multi_query}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # transformers scripts functions of this one
            module, _ = hf("gpt_bigcode", "GPTBigCodeAttention", "GPTBigCodeConfig", False, 0, **given)
        return Real(module.state_dict(), lambda x: module(x, attention_mask=CAUSAL)[0])

    return build


def segment_anything(name: str) -> Any:
    with StandIn("torchvision"):
        reason = "segment-anything is optional"
        return pytest.importorskip(f"segment_anything.modeling.{name}", reason=reason, exc_type=ImportError)


def sam_decoder() -> Real:
    """Half as wide inside, and across to a context."""
    modeling = segment_anything("transformer")
    module = randomised(modeling.Attention(E, H, downsample_rate=2))
    return Real(module.state_dict(), lambda x: module(x, CONTEXT, CONTEXT), {"context": CONTEXT})


def sam_encoder() -> Real:
    """Its position terms depend on q: theirs are added to scores of 0 to make a bias."""
    modeling = segment_anything("image_encoder")
    module = randomised(modeling.Attention(E, H, use_rel_pos=True, input_size=(N, 1)))
    call: dict[str, Any] = {}

    def before(x: Tensor) -> Tensor:
        q = module.qkv(x).view(B, N, 3, H, -1)[:, :, 0].transpose(1, 2).flatten(0, 1)
        zero = torch.zeros(B * H, N, N)
        bias = modeling.add_decomposed_rel_pos(zero, q, module.rel_pos_h, module.rel_pos_w, (N, 1), (N, 1))
        call["bias"] = bias.view(B, H, N, N).detach()
        return x

    return Real(module.state_dict(), lambda x: module(x.view(B, N, 1, E)).view(B, N, E), call, before)


def openai_whisper() -> Real:
    with StandIn("numba", "tiktoken", "more_itertools"):
        whisper = pytest.importorskip("whisper.model", reason="openai-whisper is optional", exc_type=ImportError)
    module = randomised(whisper.MultiHeadAttention(E, H))
    return Real(module.state_dict(), lambda x: module(x)[0])


def x_transformers(rotary: bool = False, **options: Any) -> Callable[[], Real]:
    def build() -> Real:
        made = pytest.importorskip("x_transformers.x_transformers", exc_type=ImportError)
        module = randomised(made.Attention(dim=E, heads=H, dim_head=4, causal=True, **options))
        turn = made.RotaryEmbedding(4).forward_from_seq_len(N) if rotary else None
        return Real(module.state_dict(), lambda x: module(x, rotary_pos_emb=turn))

    return build


def modernbert(**options: Any) -> Callable[[], Real]:
    def build() -> Real:
        given = {"hidden_size": E, "num_attention_heads": H, "num_hidden_layers": 1, **options}
        module, (config, modeling) = hf("modernbert", "ModernBertAttention", "ModernBertConfig", 0, **given)
        turn = modeling.ModernBertRotaryEmbedding(config)
        kind = config.layer_types[0]
        base = config.rope_parameters[kind]["rope_theta"]
        assert base == 160_000
        return Real(
            module.state_dict(),
            lambda x: module(x, position_embeddings=turn(x, torch.arange(N)[None], kind), attention_mask=None)[0],
        )

    return build


def t5_with_positions() -> Real:
    """T5 in full: with the bias that its table makes of the distances."""
    module, _ = hf("t5", "T5Attention", "T5Config", True, 0, d_model=E, d_kv=7, num_heads=H)
    bias = T5Bias(H)
    with torch.no_grad():
        bias.table.copy_(module.relative_attention_bias.weight)
    return Real(module.state_dict(), lambda x: module(x)[0], {"bias": bias(N, N).detach()})


def hugging_face_file(family: str, folder: Any, **sizes: Any) -> tuple[Any, Any]:
    """A model of transformers, saved; and the first attention module in it."""
    transformers = importlib.import_module("transformers")
    config = getattr(transformers, f"{family}Config")(image_size=4, patch_size=2, **sizes)
    config._attn_implementation = "eager"
    model = randomised(getattr(transformers, f"{family}Model")(config))
    model.save_pretrained(folder)
    return model, next(m for m in model.modules() if type(m).__name__ == f"{family}Attention")


MODERNBERT = {"rope": mh.RoPE(base=160_000.0)}

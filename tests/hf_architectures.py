"""Hugging Face architectures, each as a tiny random model, and why each is there.

`LEDGER` has those that cannot work, with the reason. Sizes are small and distinct enough that a swapped axis fails.

Longer than other files because it is a table, with a row for each architecture.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 61
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ENCODER_DECODER = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
IMAGE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 8,
}


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def text() -> dict[str, Tensor]:
    return {"input_ids": tokens(2, 11)}


def translation() -> dict[str, Tensor]:
    return {"input_ids": tokens(2, 11), "decoder_input_ids": tokens(2, 7)}


def image() -> dict[str, Tensor]:
    return {"pixel_values": numbers(2, 3, 24, 24)}


def large_image() -> dict[str, Tensor]:
    return {"pixel_values": numbers(2, 3, 32, 32)}


def speech() -> dict[str, Tensor]:
    return {"input_features": numbers(2, 16, 24), "decoder_input_ids": tokens(2, 7)}


def captions() -> dict[str, Tensor]:
    ids = tokens(2, 11)
    ids[:, 6] = 5  # the end of the text, whose state stands for the whole: no padding on either side
    return {"input_ids": ids, **image()}


def described_image() -> dict[str, Tensor]:
    """Nine image tokens between text; number VOCABULARY stands for a part of an image."""
    ids = tokens(2, 14)
    ids[:, 1:10] = VOCABULARY
    return {"input_ids": ids, "token_type_ids": (ids == VOCABULARY).long(), **image()}


def prefixed_image() -> dict[str, Tensor]:
    """The same, where all but the last three tokens are a prefix: type 0."""
    types = torch.zeros(2, 14, dtype=torch.long)
    types[:, -3:] = 1
    return {**described_image(), "token_type_ids": types}


@dataclass(frozen=True)
class Architecture:
    """A class of transformers, what its config is made of, and what it is given."""

    model: str
    config: str
    options: dict[str, Any]
    inputs: Callable[[], dict[str, Tensor]]
    why: str
    generates: bool = False
    pads: str | None = None  # the name of the padding mask

    def build(self, attention: str = "multihead", seed: int = 3) -> nn.Module:
        torch.manual_seed(seed)
        config = getattr(transformers, self.config)(**self.options)
        config._experts_implementation = "eager"  # the other ones have no float64
        model = getattr(transformers, self.model)._from_config(config, attn_implementation=attention)
        for parameter in model.parameters():  # sinks, biases and norms that start at 0 or 1 would hide mistakes
            if parameter.dim() < 2:
                parameter.data.add_(0.2 * torch.randn_like(parameter))
            elif not parameter.any():
                nn.init.normal_(parameter, std=0.1)
            else:
                parameter.data.mul_(4)  # sharper than a fresh model, whose attention is all but uniform
        return model.eval()


def decoder(model: str, options: dict[str, Any], why: str, **more: Any) -> Architecture:
    return Architecture(
        f"{model}ForCausalLM", f"{model}Config", options, text, why, True, pads="attention_mask", **more
    )


def encoder(model: str, options: dict[str, Any], why: str) -> Architecture:
    return Architecture(f"{model}Model", f"{model}Config", options, text, why, pads="attention_mask")


def vision(model: str, options: dict[str, Any], why: str) -> Architecture:
    return Architecture(f"{model}Model", f"{model}Config", options, image, why)


GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 2,
    "pad_token_id": 0,
    "eos_token_id": None,
}

ARCHITECTURES = [
    Architecture(
        "GPT2LMHeadModel", "GPT2Config", GPT2, text, "does not pass output_attentions on", True, pads="attention_mask"
    ),
    decoder("GPTNeoX", TEXT, "a part of each head is turned"),
    decoder("GPTBigCode", GPT2, "one key/value head"),
    decoder("OPT", {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32}, "positions from the padding mask"),
    decoder("Llama", GROUPED, "grouped heads"),
    Architecture(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **GROUPED,
            **EXPERTS,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 4,
            "no_rope_layers": [1, 0],
            "interleave_moe_layer_step": 2,
        },
        text,
        "chunks",
        True,
        pads="attention_mask",
    ),
    decoder("Olmo2", GROUPED, "QK-norm over all heads"),
    decoder("Mistral", {**GROUPED, "sliding_window": 4}, "sliding window"),
    decoder("Mixtral", {**GROUPED, **EXPERTS, "sliding_window": 4}, "experts, sliding window"),
    decoder(
        "Qwen2",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        "one layer with a window, one without",
    ),
    decoder("Qwen3", GROUPED, "QK-norm of each head"),
    decoder(
        "Gemma2",
        {**GROUPED, "sliding_window": 4, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 5},
        "softcap, a scale that is not 1/√D",
    ),
    Architecture(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**GROUPED, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        text,
        "two kinds of layers, a cache for each",
        True,
        pads="attention_mask",
    ),
    decoder("GptOss", {**GROUPED, **EXPERTS, "sliding_window": 4}, "sinks"),
    decoder(
        "Phi3",
        {**TEXT, "num_key_value_heads": 2, "sliding_window": 5, "rope_scaling": None},
        "q, k and v in one projection",
    ),
    decoder("SmolLM3", {**GROUPED, "no_rope_layers": [1, 0]}, "no RoPE in some layers"),
    decoder(
        "Cohere2",
        {**GROUPED, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        "windows by layer",
    ),
    decoder("Starcoder2", {**GROUPED, "sliding_window": 4}, "biases, sliding window"),
    decoder(
        "DeepseekV3",
        {
            **TEXT,
            "num_key_value_heads": 4,
            "q_lora_rank": 12,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 6,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        "values narrower than keys",
    ),
    encoder("Bert", TEXT, "everyone sees everyone, but for padding"),
    encoder("Roberta", TEXT, "positions count from the padding"),
    encoder("XLMRoberta", TEXT, "the same, multilingual"),
    encoder("Albert", {**TEXT, "embedding_size": 16}, "one layer's weights for all layers"),
    encoder("Electra", {**TEXT, "embedding_size": 16}, "narrow embeddings"),
    encoder(
        "DistilBert",
        {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "pad_token_id": 0},
        "names of its own",
    ),
    encoder(
        "ModernBert",
        {**TEXT, "local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
        "windows both ways",
    ),
    Architecture(
        "T5ForConditionalGeneration",
        "T5Config",
        T5,
        translation,
        "position bias, no scale",
        True,
        pads="attention_mask",
    ),
    Architecture(
        "BartForConditionalGeneration",
        "BartConfig",
        ENCODER_DECODER,
        translation,
        "cross-attention",
        True,
        pads="attention_mask",
    ),
    Architecture(
        "MarianMTModel",
        "MarianConfig",
        {**ENCODER_DECODER, "decoder_vocab_size": VOCABULARY},
        translation,
        "translation",
        True,
        pads="attention_mask",
    ),
    Architecture(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **ENCODER_DECODER,
            "num_mel_bins": 16,
            "max_source_positions": 12,
            "max_target_positions": 32,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        speech,
        "speech in, text out",
    ),
    vision("ViT", IMAGE, "every patch sees every patch"),
    vision("DeiT", IMAGE, "two extra tokens"),
    vision("Dinov2", {**IMAGE, "mlp_ratio": 2}, "layer scale"),
    vision("IJepa", IMAGE, "no class token"),
    vision("SiglipVision", IMAGE, "a head that pools by attention"),
    Architecture(
        "CLIPModel",
        "CLIPConfig",
        {"text_config": {**TEXT, "eos_token_id": 5}, "vision_config": IMAGE, "projection_dim": 16},
        captions,
        "causal text and images in one model",
        pads="attention_mask",
    ),
    Architecture(
        "SiglipModel",
        "SiglipConfig",
        {"text_config": {**TEXT, "projection_size": 32}, "vision_config": IMAGE},
        captions,
        "text that sees everything, and images",
    ),
    vision(
        "Beit",
        {**IMAGE, "vocab_size": VOCABULARY, "use_relative_position_bias": True},
        "a bias of relative positions in two axes",
    ),
    Architecture(
        "SwinModel",
        "SwinConfig",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4},
        large_image,
        "shifted windows, a bias for each",
    ),
    Architecture(
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        {
            "text_config": {**GROUPED, "model_type": "gemma", "vocab_size": VOCABULARY + 3},
            "vision_config": {**IMAGE, "model_type": "siglip_vision_model"},
            "image_token_id": VOCABULARY,
            "projection_dim": 32,
        },
        prefixed_image,
        "a prefix that sees itself whole",
    ),
    Architecture(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {
            "text_config": {
                **GROUPED,
                "vocab_size": VOCABULARY + 3,
                "sliding_window": 4,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "vision_config": {**IMAGE, "model_type": "siglip_vision_model"},
            "image_token_index": VOCABULARY,
            "mm_tokens_per_image": 9,
        },
        described_image,
        "image tokens see each other in a causal text",
    ),
]

ITSELF = "computes its attention itself: transformers has not moved it to the attention interface"
CLASSES = "picks its attention class from a table by the name of the implementation, and fails for names not in it"


@dataclass(frozen=True)
class Refused:
    """An architecture that cannot work."""

    model: str
    config: str
    options: dict[str, Any]
    inputs: Callable[[], dict[str, Tensor]]
    reason: str

    build = Architecture.build


LEDGER = [
    Refused(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 1, "n_head": 4},
        text,
        ITSELF,
    ),
    Refused("FalconForCausalLM", "FalconConfig", {**TEXT, "alibi": True}, text, CLASSES),
    Refused("GPTJForCausalLM", "GPTJConfig", {**GPT2, "rotary_dim": 4}, text, CLASSES),
    Refused(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {**TEXT, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
        text,
        CLASSES,
    ),
    Refused("CodeGenForCausalLM", "CodeGenConfig", {**GPT2, "rotary_dim": 4}, text, ITSELF),
    Refused(
        "MptForCausalLM",
        "MptConfig",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 1, "max_seq_len": 64},
        text,
        ITSELF,
    ),
    Refused("MPNetModel", "MPNetConfig", TEXT, text, ITSELF),
    Refused("DebertaV2Model", "DebertaV2Config", TEXT, text, ITSELF),
    Refused(
        "SamVisionModel",
        "SamVisionConfig",
        {
            **IMAGE,
            "output_channels": 8,
            "window_size": 2,
            "global_attn_indexes": [1],
            "mlp_dim": 48,
            "num_pos_feats": 8,
        },
        image,
        CLASSES,
    ),
    Refused(
        "Swinv2Model",
        "Swinv2Config",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1], "num_heads": [2], "window_size": 4},
        large_image,
        ITSELF,
    ),
]

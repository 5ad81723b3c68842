"""A Hugging Face model from its files: of texts or of pictures, as its config says."""

from pathlib import Path

import torch

from multihead.explorer.huggingface import NAME, Theirs
from multihead.explorer.huggingface_vision import TheirPictures
from multihead.explorer.subject import Subject
from multihead.hf.place import place, refusal


def load(name: str) -> Subject:
    """A model of texts or of pictures from a folder, a name on the hub, or a GGUF file."""
    path, there = Path(name), place(name)
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(**there)
        classes = " ".join(getattr(config, "architectures", None) or [])
        if hasattr(config, "image_size") and hasattr(config, "patch_size"):
            return _load_pictures(name, classes)
        writes = "CausalLM" in classes or "LMHead" in classes or path.suffix == ".gguf"
        tokenizer = AutoTokenizer.from_pretrained(**there)
        auto = AutoModelForCausalLM if writes else AutoModel
        model = auto.from_pretrained(**there, attn_implementation=NAME, dtype=torch.float32)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise refusal(name, error) from error
    return Theirs(model.eval(), tokenizer, path.name)


def _load_pictures(name: str, classes: str) -> Subject:
    from transformers import AutoModel, AutoModelForImageClassification, ImageProcessingMixin

    auto = AutoModelForImageClassification if "Classification" in classes else AutoModel
    model = auto.from_pretrained(name, attn_implementation=NAME, dtype=torch.float32).eval()
    try:
        said, _ = ImageProcessingMixin.get_image_processor_dict(name)
    except OSError:  # none is there: then the usual means
        said = {}
    means = {key: said[f"image_{key}"] for key in ("mean", "std") if said.get(f"image_{key}")}
    return TheirPictures(model, Path(name).name, **means)

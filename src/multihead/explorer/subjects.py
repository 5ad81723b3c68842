"""Which subject a model, a name or a file becomes."""

import base64
import io
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multihead.explorer.given import Own
from multihead.explorer.packaged import Example, Language, Vision
from multihead.explorer.reading import Reader
from multihead.explorer.subject import Subject
from multihead.models import LanguageModel, VisionTransformer, load
from multihead.models.images import read
from multihead.models.store import NAMES
from multihead.show.screens import without_transformers

Input = dict[str, Any] | None  # of a request; None: the subject's own first example


def of_package() -> list[Subject]:
    """The two trained models, and the running example."""
    lm, vit = load("lm"), load("vit")
    assert isinstance(lm, LanguageModel)
    assert isinstance(vit, VisionTransformer)
    return [Language(lm), Vision(vit), Example()]


def of_name(name: str) -> Subject:
    """A model by its name: lm, vit, a file of `multihead train`, or a Hugging Face folder, hub name or GGUF file."""
    if name in NAMES or Path(name).suffix == ".safetensors":
        return of_model(load(name), None, id=name if name in NAMES else "model", name=Path(name).stem)[0]
    try:
        from multihead.explorer.huggingface_files import load as load_theirs
    except (ImportError, RuntimeError) as error:
        raise without_transformers(name, error) from error
    return load_theirs(name)


def of_model(
    model: nn.Module, x: Any, *, id: str = "model", name: str | None = None, **options: Any
) -> tuple[Subject, Input]:
    """A model as something to explore, and what to begin with."""
    if isinstance(model, LanguageModel):
        _refuse(options)
        language = Language(model, id, name or "Language model")
        return language, _kept(language, x)
    if isinstance(model, VisionTransformer):
        _refuse(options)
        subject = Vision(model, id, name or "Vision transformer")
        return subject, None if x is None else _pixels_input(x, model.size)
    if type(model).__module__.startswith("transformers.") or _from_transformers(model):
        from multihead.explorer.huggingface import Theirs
        from multihead.explorer.huggingface_vision import TheirPictures

        if getattr(model, "main_input_name", "input_ids") == "pixel_values":
            pictures = TheirPictures(model, name or type(model).__name__, **options)
            return pictures, None if x is None else _colour_input(x, pictures)
        tokenizer = options.pop("tokenizer", None)
        _refuse(options)
        theirs = Theirs(model, tokenizer, name or type(model).__name__)
        return theirs, _kept(theirs, x)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: expected a layer or a model, a torch.nn.Module")
    if x is None:
        raise ValueError(f"x is missing: expected what goes into the {type(model).__name__}")
    return Own(model, x, **options), None


def _from_transformers(model: object) -> bool:
    return any(
        cls.__name__ == "PreTrainedModel" and cls.__module__.startswith("transformers.") for cls in type(model).__mro__
    )


def _kept(subject: Reader, x: Any) -> Input:
    if x is None or isinstance(x, str):
        return None if x is None else subject.keep(x)
    ids = x.tolist() if isinstance(x, Tensor) else list(x)
    return subject.keep(ids[0] if len(ids) == 1 and isinstance(ids[0], list) else ids)


def _pixels_input(x: Any, size: int) -> Input:
    pixels = (read(x, size) * 255).round().to(torch.uint8)
    return {"kind": "pixels", "pixels": base64.b64encode(pixels.numpy().tobytes()).decode()}


def _colour_input(x: Any, subject: Subject) -> Input:
    """A picture file, its bytes or a Pillow image, as the model takes it."""
    if isinstance(x, str | os.PathLike):
        x = Path(x).read_bytes()
    elif not isinstance(x, bytes):
        png = io.BytesIO()
        x.save(png, "PNG")
        x = png.getvalue()
    return {"kind": "pixels", "pixels": base64.b64encode(subject.read_picture(x).numpy().tobytes()).decode()}


def _refuse(options: dict[str, Any]) -> None:
    if options:
        raise TypeError(f"{', '.join(options)}: expected only with a layer or a module of your own")

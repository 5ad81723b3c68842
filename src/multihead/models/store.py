"""Trained models as files: safetensors, with the settings (and the tokenizer) in the header.

Those of the package are small files: a matrix is int8 with a float16 scale for each row, a quarter of the bytes, and of
each sign it uses LEVELS numbers only, so that a wheel packs it into less than a fifth.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from multihead.files import replacing
from multihead.models.lm import LanguageModel
from multihead.models.texts import Tokenizer
from multihead.models.vit import VisionTransformer

TRAINED = Path(__file__).parent / "trained"
NAMES = ("lm", "vit")


def save(model: LanguageModel | VisionTransformer, path: str | os.PathLike, *, small: bool = False) -> None:
    """Write a model to one safetensors file: beside its place first, so that what is there is always whole.

    Args:
        model: a model of this package.
        path: the file.
        small: round matrices to six bits a number, with a scale for each row.

    >>> import tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "vit.safetensors")
    >>> mh.models.save(mh.models.load("vit"), path)
    >>> mh.models.load(path).labels[0]
    'T-shirt'
    """
    header = {"kind": "lm" if isinstance(model, LanguageModel) else "vit", "settings": json.dumps(model.settings)}
    if isinstance(model, LanguageModel) and model.tokenizer is not None:
        header["tokenizer"] = model.tokenizer.json
    with replacing(path, make_folder=True) as beside:
        tensors = {name: t.contiguous() for name, t in model.state_dict().items()}
        save_file(_shrunk(tensors) if small else tensors, beside, metadata=header)


def load(name: str | os.PathLike) -> LanguageModel | VisionTransformer:
    """A trained model: "lm" or "vit" from the package, or a file that `multihead train` has written.

    >>> mh.models.load("vit").labels[:3]
    ['T-shirt', 'trousers', 'pullover']
    """
    path = TRAINED / f"{name}.safetensors" if name in NAMES else Path(name)
    if name not in NAMES and path.suffix != ".safetensors":
        raise ValueError(f"name={str(name)!r}: expected {' or '.join(map(repr, NAMES))}, or a .safetensors file")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    try:
        with safe_open(path, framework="pt") as file:
            header, tensors = file.metadata() or {}, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
    try:
        model = _made(header)
    except Exception as error:  # the tokenizers library has no exceptions of its own
        raise ValueError(f"{path} is not a model of `multihead train`: {type(error).__name__}: {error}") from error
    for key, t in tensors.items():
        if not t.isfinite().all():
            raise ValueError(f"{path} is damaged: {key} holds numbers that are not finite")
    try:
        model.load_state_dict(_grown(tensors))
    except RuntimeError as error:
        raise ValueError(f"{path} has weights that do not fit its settings: {error}") from error
    return model.eval()


def samples() -> dict[str, Path]:
    """A picture of each class, by label: the first of each in the test set of Fashion-MNIST (MIT licence).

    >>> list(mh.models.samples())[:3]
    ['T-shirt', 'ankle boot', 'bag']
    """
    return {file.stem.replace("_", " "): file for file in sorted((TRAINED / "samples").glob("*.png"))}


LEVELS = 31
SCALES = ".scales"  # after the name of a matrix of int8: what its rows are multiplied by


def _shrunk(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = dict(tensors)
    for name, t in tensors.items():
        if t.ndim == 2:
            scales = (
                (t.abs().amax(1, keepdim=True) / LEVELS).to(torch.float16).clamp(min=torch.finfo(torch.float16).tiny)
            )
            found[name] = (t / scales.float()).round().clamp(-LEVELS, LEVELS).to(torch.int8)
            found[name + SCALES] = scales
    return found


def _grown(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, t in tensors.items():
        if not name.endswith(SCALES):
            scales = tensors.get(name + SCALES)
            if scales is None and not t.is_floating_point():
                raise RuntimeError(f"{name} is {t.dtype} and has no {SCALES}")
            found[name] = t if scales is None else t.float() * scales.float()
    return found


def _made(header: Mapping[str, str]) -> LanguageModel | VisionTransformer:
    kind, settings = header["kind"], json.loads(header["settings"])
    if kind not in NAMES:
        raise ValueError(f"kind={kind!r}")
    if kind == "vit":
        return VisionTransformer(**settings)
    tokenizer = Tokenizer(header["tokenizer"]) if "tokenizer" in header else None
    return LanguageModel(**settings, tokenizer=tokenizer)

"""Trained models as files: safetensors, with the settings (and the tokenizer) in the header."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from multihead.files import replacing
from multihead.models.lm import LanguageModel
from multihead.models.texts import Tokenizer
from multihead.models.vit import VisionTransformer

TRAINED = Path(__file__).parent / "trained"
NAMES = ("lm", "vit")


def save(model: LanguageModel | VisionTransformer, path: str | os.PathLike) -> None:
    """Write a model to one safetensors file: beside its place first, so that what is there is always whole.

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
        save_file({name: t.contiguous() for name, t in model.state_dict().items()}, beside, metadata=header)


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
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"{path} has weights that do not fit its settings: {error}") from error
    return model.eval()


def samples() -> dict[str, Path]:
    """A picture of each class, by label: the first of each in the test set of Fashion-MNIST (MIT licence).

    >>> list(mh.models.samples())[:3]
    ['T-shirt', 'ankle boot', 'bag']
    """
    return {file.stem.replace("_", " "): file for file in sorted((TRAINED / "samples").glob("*.png"))}


def _made(header: Mapping[str, str]) -> LanguageModel | VisionTransformer:
    kind, settings = header["kind"], json.loads(header["settings"])
    if kind not in NAMES:
        raise ValueError(f"kind={kind!r}")
    if kind == "vit":
        return VisionTransformer(**settings)
    tokenizer = Tokenizer(header["tokenizer"]) if "tokenizer" in header else None
    return LanguageModel(**settings, tokenizer=tokenizer)

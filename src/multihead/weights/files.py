"""Checkpoints as a mapping from names to tensors that are read only when asked for.

safetensors and torch files, single or sharded with an index, and mappings in memory. Nothing in a file is ever run:
torch files are read with `weights_only=True`. What cannot be read is a `ValueError` that names the file.
"""

import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from multihead.files import replacing

TORCH = (".pt", ".pth", ".bin")
IN_FOLDER = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)


LARGEST_INDEX = 64 << 20  # bytes; that of a model with a million tensors has about as many
LONGEST_NAME = 1024  # characters of a tensor's or a file's name
DEEPEST = 32  # mappings in mappings


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint, not read yet."""

    shape: Callable[[], tuple[int, ...]]
    read: Callable[[], Tensor]


Checkpoint = dict[str, Stored]


def open_checkpoint(source: Mapping[str, Any] | str | os.PathLike) -> Checkpoint:
    """What `source` holds: a state dict, a file, an index of shards, or a folder with one of these."""
    if isinstance(source, Mapping):
        return dict(_flatten(source))
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"source is a {type(source).__name__}: expected a state dict or the path of a file")
    path = Path(source)
    if path.is_dir():
        found = [path / name for name in IN_FOLDER if (path / name).is_file()] or sorted(path.glob("*.safetensors"))
        if not found or (len(found) > 1 and found[0].name not in IN_FOLDER):
            raise ValueError(f"{path}: expected one of {', '.join(IN_FOLDER)} in this folder, or one *.safetensors")
        path = found[0]
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    if path.suffix == ".json":
        return _read_index(path)
    return _read_file(path)


def _flatten(values: Mapping[Any, Any], prefix: str = "", depth: int = 1) -> Iterator[tuple[str, Stored]]:
    """The tensors and arrays of a mapping, and of mappings in it, by dotted name; anything else is passed over."""
    if depth > DEEPEST:
        raise ValueError(f"{_shortened(prefix)} is nested {depth} deep: expected mappings in at most {DEEPEST}")
    for name, value in values.items():
        full = f"{prefix}{name}"
        if len(full) > LONGEST_NAME:
            raise ValueError(f"{_shortened(full)} has {len(full)} characters: expected names of at most {LONGEST_NAME}")
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{full}.", depth + 1)
        elif isinstance(value, Tensor):
            yield full, Stored(partial(tuple, value.shape), value.detach)
        elif hasattr(value, "__array__") and hasattr(value, "shape"):
            yield full, Stored(partial(tuple, value.shape), partial(_from_array, value))


def _shortened(name: str) -> str:
    return repr(name if len(name) <= 40 else name[:40] + "…")


def _from_array(value: Any) -> Tensor:
    """A NumPy, JAX or Keras array as a tensor; bfloat16, which NumPy does not know, bit by bit."""
    import numpy as np

    array = np.array(value)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _read_file(path: Path) -> Checkpoint:
    if path.suffix == ".safetensors":
        with _open_safetensors(path) as file:
            return {name: Stored(partial(_shape, path, name), partial(_read, path, name)) for name in file.keys()}  # noqa: SIM118
    if path.suffix in TORCH:
        return dict(_flatten(_load_torch(path)))
    raise ValueError(f"{path}: expected a name that ends in .safetensors, {', '.join(TORCH)} or .index.json")


@contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error


def _shape(path: Path, name: str) -> tuple[int, ...]:
    with _open_safetensors(path) as file:
        return tuple(file.get_slice(name).get_shape())


def _read(path: Path, name: str) -> Tensor:
    with _open_safetensors(path) as file:
        return file.get_tensor(name)


def _load_torch(path: Path) -> Mapping[str, Any]:
    """The mapping in a torch file, mapped into memory, so that only what is looked at is read."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))  # older ones cannot be
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} holds something other than tensors, which is never unpickled: {error}") from error
    except Exception as error:  # torch says in a dozen ways that a file is damaged
        raise ValueError(f"{path} is not a whole torch file: {error}") from error
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{path} holds a {type(loaded).__name__}: expected a state dict")
    return loaded


def _read_index(path: Path) -> Checkpoint:
    """A sharded checkpoint: no shard is opened before one of its tensors is asked for."""
    expected = "expected JSON with a weight_map from names to files"
    size = path.stat().st_size
    if size > LARGEST_INDEX:
        raise ValueError(f"{path} has {size:,} bytes: expected an index of at most {LARGEST_INDEX:,}")
    try:
        shards = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not an index: {expected}") from error
    if not isinstance(shards, dict) or not all(isinstance(file, str) for file in shards.values()):
        raise ValueError(f"{path} is not an index: {expected}")
    long = next((name for pair in shards.items() for name in pair if len(name) > LONGEST_NAME), None)
    if long is not None:
        raise ValueError(
            f"{path} has the name {_shortened(long)} of {len(long)} characters: expected at most {LONGEST_NAME}"
        )
    outside = [file for file in shards.values() if Path(file).name != file]
    if outside:
        raise ValueError(f"{path} names {outside[0]!r}: expected files in its own folder")

    @cache
    def shard(file: str) -> Checkpoint:
        if not (path.parent / file).is_file():
            raise ValueError(f"{path} names {file!r}, which is not there")
        return _read_file(path.parent / file)

    def stored(name: str) -> Stored:
        here = shard(shards[name])
        if name not in here:
            raise ValueError(f"{path} says that {shards[name]!r} holds {name!r}, and it does not")
        return here[name]

    return {
        name: Stored(partial(_later, stored, name, "shape"), partial(_later, stored, name, "read")) for name in shards
    }


def _later(stored: Callable[[str], Stored], name: str, what: str) -> Any:
    return getattr(stored(name), what)()


def write(path: str | os.PathLike, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors or torch file: beside its place first, so that what is there is whole at every moment."""
    path = Path(path)
    if path.suffix != ".safetensors" and path.suffix not in TORCH:
        raise ValueError(f"{path}: expected a name that ends in .safetensors or {', '.join(TORCH)}")
    with replacing(path) as beside:
        if path.suffix == ".safetensors":
            save_file(tensors, beside, metadata={"format": "pt"})
        else:
            with beside.open("wb") as file:
                torch.save(tensors, file)

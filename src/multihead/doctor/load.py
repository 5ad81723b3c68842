"""From `file.py:NAME` to something callable: a class is made with its width and heads, a function taken as it is."""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multihead.doctor.core import Core, names_heads
from multihead.doctor.parameters import role
from multihead.layer import MultiHeadAttention

WIDTHS = ("width", "embed_dim", "d_model", "dim", "hidden_size", "embedding_dim", "emb_dim", "n_embd", "model_dim",
          "d_in", "d_out", "in_dim", "out_dim", "hidden_dim", "emb", "embed_size", "d_embed", "E")  # fmt: skip
HEADS = ("heads", "num_heads", "n_heads", "n_head", "nhead", "nheads", "num_attention_heads", "head_count", "h", "H")
KV_HEADS = ("kv_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "num_key_value_heads", "G")
HEAD_WIDTHS = ("head_dim", "d_head", "dim_head", "head_size", "d_k", "D")
LENGTHS = ("context_length", "block_size", "max_len", "max_length", "max_seq_len", "seq_len", "N")


class NotLoaded(Exception):
    """The file or the name in it could not be loaded: a sentence that says why."""


def load(target: str, width: int, heads: int, tokens: int, kv_heads: int | None, head_dim: int | None) -> Callable:
    """What `file.py:NAME` means. NAME may be an expression: `file.py:MyAttention(64, 4, dropout=0.0)`."""
    path, _, name = target.partition(":")
    if not name:
        raise NotLoaded(f"{target!r}: expected FILE.py:NAME, the name of a class, a function or a module in it")
    file = Path(path).resolve()
    if not file.is_file():
        raise NotLoaded(f"{path} is a folder: expected FILE.py" if file.is_dir() else f"{path}: there is no such file")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise NotLoaded(f"{path}: expected a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise NotLoaded(f"{file.name}, line {error.lineno}: {error.msg}: {(error.text or '').strip()}") from error
    except BaseException as error:
        raise NotLoaded(f"{file.name} cannot be imported: {type(error).__name__}: {error}") from error
    if not name.isidentifier():
        try:
            return _callable(eval(name, vars(module)), name)
        except Exception as error:
            raise NotLoaded(f"{name} cannot be made: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        there = [
            n for n, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == module.__name__
        ]  # fmt: skip
        raise NotLoaded(f"{file.name} has no {name}: it has {', '.join(there) or 'nothing that can be called'}")
    found = getattr(module, name)
    known = dict.fromkeys(WIDTHS, width) | dict.fromkeys(HEADS, heads) | dict.fromkeys(LENGTHS, max(tokens, 64))
    known |= dict.fromkeys(KV_HEADS, kv_heads or heads) | dict.fromkeys(HEAD_WIDTHS, head_dim or width // heads)
    if inspect.isclass(found) or _is_factory(found, known):
        return _callable(_made(found, name, known, width, heads), name)
    return wrapped(_callable(found, name), known, width, heads)


def _is_factory(found: Any, known: dict[str, int]) -> bool:
    """A function whose needed arguments are all sizes makes a layer; it is not one."""
    if isinstance(found, nn.Module) or not callable(found):
        return False
    needed = [p.name for p in inspect.signature(found).parameters.values() if p.default is p.empty]
    return bool(needed) and all(name in known for name in needed)


def _made(make: Callable, name: str, known: dict[str, int], width: int, heads: int) -> Any:
    """An instance: arguments whose names say what they are get it, dropout gets 0, the rest keeps its default."""
    arguments = {}
    unknown = []
    for p in inspect.signature(make).parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        if p.name in known and (p.default is p.empty or p.name in WIDTHS + HEADS + KV_HEADS):
            arguments[p.name] = known[p.name]
        elif "drop" in p.name and p.default is p.empty:
            arguments[p.name] = 0
        elif p.default is p.empty:
            unknown.append(p.name)
    if unknown:
        raise NotLoaded(
            f"{name} needs {', '.join(unknown)}, and what to give is unknown: write the call yourself, as "
            f"'file.py:{name}({width}, {heads}, …)'"
        )
    try:
        return make(**arguments)
    except Exception as error:
        said = ", ".join(f"{key}={value}" for key, value in arguments.items())
        raise NotLoaded(
            f"{name}({said}) raises {type(error).__name__}: {error}; write the call yourself, as "
            f"'file.py:{name}({width}, {heads}, …)'"
        ) from error


def wrapped(function: Callable, known: dict[str, int], width: int, heads: int) -> Callable:
    """A module around a function that takes its weights, or its q, k and v, as arguments; others stay as they are."""
    if isinstance(function, nn.Module):
        return function
    named = inspect.signature(function).parameters
    roles = {name: role(name) for name in named}
    if all(r in roles.values() for r in "qkvo"):
        return _Weights(function, known, width)
    return Core(function, MultiHeadAttention(width, heads)) if names_heads(function) else function


class _Weights(nn.Module):
    """`f(x, W_q, W_k, W_v, W_o, …)`: random matrices (E, E) and biases for the arguments that are named so."""

    def __init__(self, function: Callable, known: dict[str, int], width: int) -> None:
        super().__init__()
        self.function = function
        named = inspect.signature(function).parameters
        self.sizes = {name: known[name] for name in named if name in known and role(name) is None}
        for name in named:
            if role(name) in ("q", "k", "v", "o"):
                bias = name.lower().startswith("b")
                shape = (width,) if bias else (width, width)
                setattr(self, name, nn.Parameter(torch.randn(shape) * (0.3 if bias else width**-0.5)))

    def forward(self, x: Tensor) -> Any:
        return self.function(x, **dict(self.named_parameters()), **self.sizes)


def _callable(found: Any, name: str) -> Callable:
    if not callable(found):
        raise NotLoaded(
            f"{name}: an object of type {type(found).__name__} cannot be called: "
            "expected a class, a module or a function that takes x"
        )
    return found

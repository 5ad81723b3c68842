"""What a page may ask for: JSON, checked field by field, in the words of the package. Nothing in it names a file.

A request is an object. `input` is one of

    {"kind": "text", "text": …}   {"kind": "tokens", "ids": […]}   {"kind": "sample", "name": …}
    {"kind": "pixels", "pixels": base64 of bytes, rows × columns × channels}   {"kind": "given"}

`mask`, the model's own where it is left out, is {"kind": "none"}, or one of `MASKS` below. `off` is a list of [layer,
head], and `with` says what takes their place, "zero" unless it is "mean". A key that has its default is left out: so
equal requests are equal texts, by which answers are kept.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from multihead.masks import Allowed, Causal, Documents, Mask, Padding, Prefix, Window
from multihead.models.blocks import Given

MOST_TEXT = 20_000  # characters
MOST_ITEMS = 100_000  # of a list in a request


class Refused(ValueError):
    """A request that is answered by a sentence. `kind` is the page's word for why, `status` that of HTTP."""

    def __init__(self, message: str, kind: str = "input", status: int = 400) -> None:
        super().__init__(message)
        self.kind, self.status = kind, status


@dataclass(frozen=True)
class Request:
    """A checked request: for which model, and of it which layer, input, mask and heads switched off."""

    model: str = ""
    layer: int = 0
    input: Mapping[str, Any] = field(default_factory=dict)
    mask: Mapping[str, Any] | None = None  # None: the model's own
    off: tuple[tuple[int, int], ...] = ()
    with_: str = "zero"
    text: str = ""
    state: str = ""
    numbers: Mapping[str, int] = field(default_factory=dict)  # which part of a map
    pool: str = "max"


FIELDS = {  # what each route is asked with; a ? marks what may be left out
    "models": (),
    "tokens": ("model", "text"),
    "trace": ("model", "layer", "input", "mask?", "off?", "with?"),
    "weights": ("model", "layer"),
    "heads": ("model", "input", "mask?", "off?", "with?"),
    "predict": ("model", "input", "mask?", "off?", "with?"),
    "decode": ("model", "layer", "input"),
    "compare": ("model", "layer", "input"),
    "overview": ("model", "input"),
    "save": ("model", "layer", "input", "mask?", "off?", "with?", "state?"),
    "items": ("model", "input", "start", "stop"),
    "find": ("model", "input", "text", "start?"),
    "thumbnails": ("model", "layer", "input", "mask?", "off?", "with?"),
    "tile": ("model", "layer", "input", "mask?", "off?", "with?", "head", "level", "row", "column", "first?", "pool?",
             "sample?"),
    "links": ("model", "layer", "input", "mask?", "off?", "with?", "head", "n", "query?", "key?", "first?"),
}  # fmt: skip
NUMBERS = ("start", "stop", "head", "level", "row", "column", "first", "sample", "n", "query", "key")
INPUTS = {"text": "text", "tokens": "ids", "sample": "name", "pixels": "pixels", "given": None}


def key(route: str, request: Mapping[str, Any]) -> str:
    """The name under which an answer is kept: the route and the request, keys sorted, without spaces."""
    return f"{route} {json.dumps(request, sort_keys=True, separators=(',', ':'), ensure_ascii=False)}"


def parse(route: str, given: object) -> Request:
    """A request as it came, checked."""
    if route not in FIELDS:
        raise Refused(f"there is no {route!r}: expected one of {', '.join(FIELDS)}", "missing", 404)
    if not isinstance(given, dict):
        raise Refused(f"the request is {_kind(given)}: expected an object")
    known = {name.rstrip("?") for name in FIELDS[route]}
    for name in given:
        if name not in known:
            raise Refused(f"{route} was asked with {_quoted(name)}: expected {', '.join(sorted(known)) or 'nothing'}")
    for name in FIELDS[route]:
        if not name.endswith("?") and name not in given:
            raise Refused(f"{route} was asked without {name!r}: expected {', '.join(sorted(known))}")
    read: dict[str, Any] = {"model": _text("model", given.get("model", ""), 100)}
    if "layer" in given:
        read["layer"] = _integer("layer", given["layer"], 0)
    if "input" in given:
        read["input"] = _input(given["input"])
    if "mask" in given:
        read["mask"] = _mask(given["mask"])
    if "off" in given:
        read["off"] = _off(given["off"])
    if "with" in given:
        if given["with"] not in ("zero", "mean"):
            raise Refused(f"with={_quoted(given['with'])}: expected 'zero' or 'mean'")
        read["with_"] = given["with"]
    if "text" in given:
        read["text"] = _text("text", given["text"], MOST_TEXT)
    if "state" in given:
        read["state"] = _text("state", given["state"], MOST_TEXT)
    read["numbers"] = {name: _integer(name, given[name], 1 if name == "n" else 0) for name in NUMBERS if name in given}
    if "pool" in given:
        if given["pool"] not in ("max", "mean"):
            raise Refused(f"pool={_quoted(given['pool'])}: expected 'max' or 'mean'")
        read["pool"] = given["pool"]
    return Request(**read)


def as_mask(said: Mapping[str, Any] | None, N: int) -> Given:
    """The mask that a request asks for, of N items."""
    if said is None:
        return "own"
    match said["kind"]:
        case "none":
            return None
        case "causal":
            return Causal(window=said.get("window"))
        case "window":
            return Window(said["left"], said["right"])
        case "prefix":
            return Prefix(min(said["n"], N))
        case "padding":
            return Padding([_at_most("length", said["length"], N)])
        case "documents":
            lengths = said["lengths"]
            if sum(lengths) != N:
                raise Refused(f"lengths={lengths} add up to {sum(lengths)}: expected {N}, the number of items")
            packed: Mask = Documents(lengths)
            return packed & Causal() if said.get("causal") else packed
    rows = said["rows"]
    if len(rows) != N or any(len(row) != N for row in rows):
        raise Refused(f"rows has {len(rows)} rows: expected {N} of {N} characters each, one for each item")
    return Allowed(torch.tensor([[mark == "1" for mark in row] for row in rows]))


def said_of(mask: Mask | Tensor | None) -> dict[str, Any] | None:
    """A mask in the words of a request, for the page to show as chosen; None where there is none, or no such word."""
    if isinstance(mask, Causal):
        return {"kind": "causal"} | ({} if mask.window is None else {"window": mask.window})
    if isinstance(mask, Window) and mask.left is not None and mask.right is not None:
        return {"kind": "window", "left": mask.left, "right": mask.right}
    if isinstance(mask, Prefix) and isinstance(mask.n, int):
        return {"kind": "prefix", "n": mask.n}
    return None


def said_of_seen(allowed: Tensor) -> dict[str, Any] | None:
    """What may be seen, (Q,K), in the words of a request; None where all of it may."""
    Q, K = allowed.shape
    if bool(allowed.all()):
        return None
    if Q == K:
        width = int(allowed[-1].sum())
        for mask in (Causal(), Causal(window=max(width, 1))):
            if bool((mask.dense(Q, K) == allowed).all()):
                return said_of(mask)
    return {"kind": "drawn", "rows": ["".join("1" if seen else "0" for seen in row) for row in allowed.tolist()]}


def _input(given: object) -> dict[str, Any]:
    if not isinstance(given, dict) or given.get("kind") not in INPUTS:
        raise Refused(f"input={_quoted(given)}: expected an object whose kind is one of {', '.join(INPUTS)}")
    holds = INPUTS[given["kind"]]
    if set(given) != {"kind", holds} - {None}:
        raise Refused(f"input has {', '.join(map(_quoted, given))}: expected kind{f' and {holds}' if holds else ''}")
    if given["kind"] == "tokens":
        return {"kind": "tokens", "ids": _integers("ids", given["ids"], 0)}
    if holds is not None:
        _text(holds, given[holds], MOST_TEXT if holds == "text" else 2**24)
    return dict(given)


MASKS: dict[str, tuple[str, ...]] = {
    "none": (),
    "causal": ("window?",),
    "window": ("left", "right"),
    "prefix": ("n",),
    "padding": ("length",),
    "documents": ("lengths", "causal?"),
    "drawn": ("rows",),
}


def _mask(given: object) -> dict[str, Any]:
    if not isinstance(given, dict) or given.get("kind") not in MASKS:
        raise Refused(f"mask={_quoted(given)}: expected an object whose kind is one of {', '.join(MASKS)}")
    fields = MASKS[given["kind"]]
    needed = {name for name in fields if not name.endswith("?")} | {"kind"}
    if not needed <= set(given) <= needed | {name.rstrip("?") for name in fields}:
        raise Refused(f"mask has {', '.join(map(_quoted, given))}: expected {', '.join(('kind', *fields))}")
    for name, value in given.items():
        if name in ("left", "right", "length"):
            _integer(name, value, 0)
        elif name in ("window", "n"):
            _integer(name, value, 1 if name == "window" else 0)
        elif name == "lengths":
            _integers(name, value, 1)
        elif name == "causal" and value is not True:
            raise Refused(f"causal={_quoted(value)}: expected true, or nothing")
        elif name == "rows":
            _rows(value)
    return dict(given)


def _rows(given: object) -> None:
    if not isinstance(given, list) or not all(isinstance(row, str) and set(row) <= {"0", "1"} for row in given):
        raise Refused("rows: expected a list of texts of 0 and 1, one for each query; 1 means it may attend")


def _off(given: object) -> tuple[tuple[int, int], ...]:
    if not isinstance(given, list) or len(given) > MOST_ITEMS:
        raise Refused(f"off={_quoted(given)}: expected a list of [layer, head]")
    pairs = []
    for pair in given:
        if not isinstance(pair, list) or len(pair) != 2:
            raise Refused(f"off has {_quoted(pair)}: expected [layer, head]")
        pairs.append((_integer("layer of off", pair[0], 0), _integer("head of off", pair[1], 0)))
    if len(set(pairs)) != len(pairs):
        raise Refused("off has a head twice: expected each once")
    return tuple(sorted(pairs))


def _integer(name: str, given: object, least: int) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or not least <= given < 2**31:
        raise Refused(f"{name}={_quoted(given)}: expected an integer of at least {least}")
    return given


def _integers(name: str, given: object, least: int) -> list[int]:
    if not isinstance(given, list) or not 0 < len(given) <= MOST_ITEMS:
        raise Refused(f"{name}={_quoted(given)}: expected a list of integers")
    return [_integer(name, value, least) for value in given]


def _at_most(name: str, value: int, most: int) -> int:
    if value > most:
        raise Refused(f"{name}={value}: expected at most {most}, the number of items")
    return value


def _text(name: str, given: object, most: int) -> str:
    if not isinstance(given, str):
        raise Refused(f"{name} is {_kind(given)}: expected text")
    if len(given) > most:
        raise Refused(f"{name} has {len(given):,} characters: expected at most {most:,}", "large", 413)
    return given


def _kind(given: object) -> str:
    names: Sequence[tuple[type, str]] = ((dict, "an object"), (list, "a list"), (str, "text"), (bool, "true or false"))
    return next((name for kind, name in names if isinstance(given, kind)), "nothing" if given is None else "a number")


def _quoted(given: object) -> str:
    """What was given, short enough for a sentence."""
    text = json.dumps(given, ensure_ascii=False)
    return text if len(text) <= 60 else text[:59] + "…"

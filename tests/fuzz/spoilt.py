"""Mistakes put into the package on purpose, in a child: the fuzzer must find each."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

import multihead as mh
from tests.fuzz import calls

_right = mh.attend


def _instead(attend: Any) -> None:
    calls.mh = type("Spoilt", (), {"attend": staticmethod(attend), "__getattr__": lambda _, name: getattr(mh, name)})()  # type: ignore[assignment]


def nothing() -> None:
    """The package as it is."""


def last_key_hidden() -> None:
    def attend(q: Any, k: Any, v: Any, *more: Any, **options: Any) -> Any:
        if k.shape[2] > 1 and not more[0] and options["bias"] is None:
            return _right(q, k[:, :, :-1], v[:, :, :-1], *more, **options)
        return _right(q, k, v, *more, **options)

    _instead(attend)


def ten_roundings_off() -> None:
    """Ten times what float32 rounds by, at the largest number."""

    def attend(q: Any, k: Any, v: Any, *more: Any, **options: Any) -> Any:
        found = _right(q, k, v, *more, **options)
        out = found[0] if isinstance(found, tuple) else found
        off = out * (1 + 40 * torch.finfo(out.dtype).eps)
        return (off, *found[1:]) if isinstance(found, tuple) else off

    _instead(attend)


def crash() -> None:
    """On every fifth call."""
    count = 0

    def attend(*given: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count % 5 == 0:
            os.kill(os.getpid(), signal.SIGSEGV)
        return _right(*given, **options)

    _instead(attend)


def strange_exception() -> None:
    def attend(*given: Any, **options: Any) -> Any:
        raise AttributeError("'NoneType' object has no attribute 'shape'")

    _instead(attend)


def layers_forget() -> None:
    """What values are made of, where tokens stand, and a fiftieth of each key in a cache of fewer bits."""
    right = mh.MultiHeadAttention.forward

    def forward(self: Any, x: Any, *given: Any, positions: Any = None, values: Any = None, **options: Any) -> Any:
        y, cache = right(self, x, *given, **options), options.get("cache")
        if isinstance(cache, mh.Cache) and cache._k.element_size() < x.element_size():
            cache._k[...] = (cache._k.float() * 0.98).to(cache._k.dtype)
        return y

    mh.MultiHeadAttention.forward = forward  # type: ignore[assignment, method-assign]

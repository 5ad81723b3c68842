"""The candidate: anything callable, how it wants to be called, and what it does besides answering."""

import inspect
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from multihead.doctor import masking
from multihead.doctor.variant import Call
from multihead.masks import Causal, Padding

MASK_NAMES = ("mask", "attn_mask", "attention_mask")
CAUSAL_NAMES = ("is_causal", "causal")


class Failure(Exception):
    """The candidate could not be made to answer: what happened, and where."""

    def __init__(self, what: str, message: str, where: str = "") -> None:
        super().__init__(message)
        self.what, self.message, self.where = what, message, where


@dataclass(frozen=True)
class Form:
    """How a mask is passed: which argument, what it means, and how it is made."""

    argument: str
    meaning: str
    make: Callable[[Call, torch.dtype], Any]

    def __str__(self) -> str:
        return f"{self.argument}: {self.meaning}"


@dataclass(frozen=True)
class Candidate:
    """Calls the candidate in the way that was found to work."""

    function: Callable[..., Any]
    layout: str = "x"  # "x", "x, context" or "query, key, value"
    form: Form | None = None  # of the mask, where it is passed
    unbatched: bool = False  # takes (N, E), not (B, N, E)
    first: str = "batch"  # or "sequence": (N, B, E)

    @property
    def module(self) -> nn.Module | None:
        return self.function if isinstance(self.function, nn.Module) else None

    def answer(self, call: Call, dtype: torch.dtype | None = None) -> Tensor:
        """What the candidate puts out, as it comes, with its batch axis in front: (B, Q, E) if all is well."""
        return self.examine(call, dtype)[0]

    def examine(self, call: Call, dtype: torch.dtype | None = None) -> tuple[Tensor, bool, bool]:
        """The answer, whether the candidate changed its input, and whether something else came before the answer."""
        x = call.x if dtype is None else call.x.to(dtype)
        context = call.context if call.context is None or dtype is None else call.context.to(dtype)
        given = [self._shaped(x)] + ([] if context is None else [self._shaped(context)])
        before = [t.clone() for t in given]
        options = {} if self.form is None else {self.form.argument: self.form.make(call, x.dtype)}
        if self.layout == "query, key, value":
            source = given[-1]
            arguments = [given[0], source, source]
        elif self.layout == "x, context" and context is None:
            arguments = [given[0], given[0]]
        else:
            arguments = given
        try:
            with torch.no_grad():
                raw = self.function(*arguments, **options)
        except Exception as error:
            raise Failure("exception", _say(error), _where(error)) from error
        changed = any(not torch.equal(a, b) and not bool(a.isnan().any()) for a, b in zip(given, before))
        found = tensors(raw)
        place = next((n for n, t in enumerate(found) if t.shape == given[0].shape), 0)
        out = found[place]
        if self.unbatched and out.dim() == x.dim() - 1:
            out = out[None]
        elif self.first == "sequence" and out.dim() == 3:
            out = out.transpose(0, 1)
        return out, changed, place > 0

    def _shaped(self, t: Tensor) -> Tensor:
        if self.unbatched:
            return t[0].clone()
        return t.transpose(0, 1).contiguous() if self.first == "sequence" else t.clone()


def tensors(raw: Any) -> list[Tensor]:
    """Those that a candidate returned, in their order: tensors, arrays of other libraries, in tuples and dicts too."""
    found = list(_tensors(raw))
    if not found:
        raise Failure(
            "type", f"it returned a {type(raw).__name__}: expected a tensor (B,N,E), or a tuple or dict with one"
        )
    return found


def _tensors(raw: Any) -> Iterator[Tensor]:
    if isinstance(raw, Tensor):
        yield raw.detach()
    elif isinstance(raw, tuple | list):
        for one in raw:
            yield from _tensors(one)
    elif isinstance(raw, dict):
        for one in raw.values():
            yield from _tensors(one)
    elif hasattr(raw, "__array__") or hasattr(raw, "__dlpack__"):
        import numpy as np

        array = np.asarray(raw)
        if array.dtype.name == "bfloat16":  # NumPy knows it by name only
            yield torch.from_numpy(array.astype(np.float32)).bfloat16()
        elif array.dtype.kind in "fiub":
            yield torch.from_numpy(np.array(array))


def signature(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The arguments the candidate names."""
    try:
        called = function.forward if isinstance(function, nn.Module) else function
        return dict(inspect.signature(called).parameters)
    except (TypeError, ValueError):
        return {}


def layouts(function: Callable[..., Any], call: Call, unbatched: bool) -> Iterator[Candidate]:
    """The ways to call a candidate, likeliest first."""
    named = signature(function)
    masks = (*MASK_NAMES, *CAUSAL_NAMES, "key_padding_mask")
    needed = [
        p.name
        for p in named.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in masks
    ]
    plain = "x" if call.context is None and len(needed) != 2 else "x, context"
    layout = "query, key, value" if len(needed) == 3 else plain
    base = Candidate(function, layout)
    if getattr(function, "batch_first", True) is False:
        base = replace(base, first="sequence")
    alone = [True, False] if unbatched else [False, True]
    for without in alone:
        if without and call.x.shape[0] != 1:
            continue
        yield replace(base, unbatched=without, first="batch" if without else base.first)


def forms(function: Callable[..., Any], call: Call, unbatched: bool) -> list[Form | None]:
    """The ways to pass this call's mask to a candidate whose signature names one; [None] where it names none."""
    named = signature(function)
    found: list[Form | None] = []
    argument = next((name for name in MASK_NAMES if name in named), None)
    causal = next((name for name in CAUSAL_NAMES if name in named), None)
    if call.mask is None:
        if argument is not None and named[argument].default is inspect.Parameter.empty:
            found.append(Form(argument, "None where there is no mask", lambda call, dtype: None))
            found += [Form(argument, meaning, make) for meaning, make in _dense_forms(call, unbatched)]
        return found or [None]
    parts = masking.parts(call.mask)
    if causal is not None and len(parts) == 1 and isinstance(parts[0], Causal) and parts[0].window is None:
        found.append(Form(causal, "True = causal", lambda call, dtype: True))
    if argument is not None:
        found += [Form(argument, meaning, make) for meaning, make in _dense_forms(call, unbatched)]
    if all(isinstance(part, Padding) for part in parts):
        for name in ([argument] if argument else []) + (["key_padding_mask"] if "key_padding_mask" in named else []):
            found.append(Form(name, "(B,K), True = a real item", lambda call, dtype: _keys(call)))
            found.append(Form(name, "(B,K), True = padding", lambda call, dtype: ~_keys(call)))
    return found or [None]


def _dense_forms(call: Call, unbatched: bool) -> Iterator[tuple[str, Callable[[Call, torch.dtype], Any]]]:
    def dense(call: Call) -> Tensor:
        B, Q, K = call.sizes
        return masking.dense(call.mask, B, Q, K, call.x.device)

    allowed = dense(call)
    shapes: list[tuple[str, Callable[[Tensor], Tensor]]] = []
    if allowed.shape[1] == 1 and bool((allowed == allowed[:1]).all()):
        shapes.append(("(Q,K)", lambda t: t[0, 0]))
    if not unbatched:
        shapes.append(("(B,1,Q,K)", lambda t: t))
        shapes.append(("(B,Q,K)", lambda t: t[:, 0]))
    for shape, cut in shapes:
        for meaning, made in (
            ("True = may attend", lambda t, dtype: t.clone()),
            ("True = hidden", lambda t, dtype: ~t),
            ("added to the scores: 0 and −inf", lambda t, dtype: torch.where(t, 0, -torch.inf).to(dtype)),
        ):  # fmt: skip
            yield f"{shape}, {meaning}", partial(_made, dense, cut, made)


def _made(dense: Callable, cut: Callable, made: Callable, call: Call, dtype: torch.dtype) -> Tensor:
    return made(cut(dense(call)), dtype)


def _keys(call: Call) -> Tensor:
    B, Q, K = call.sizes
    return masking.dense(call.mask, B, Q, K, call.x.device)[:, 0, 0].clone()  # (B, K)


def _say(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _where(error: BaseException) -> str:
    """The last line of the candidate's own code that was running."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__)
        if "/multihead/doctor/" not in f.filename and "/torch/" not in f.filename and not f.filename.startswith("<")
    ]  # fmt: skip
    if not frames:
        return ""
    last = frames[-1]
    return f"{last.filename.rsplit('/', 1)[-1]}, line {last.lineno}, in {last.name}: {last.line}"

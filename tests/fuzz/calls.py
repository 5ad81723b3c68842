"""Random calls: what each is given, what the package makes of it, and the judgement of the oracle.

A call is drawn from a `random.Random`, and its numbers from a draw of their own, so that the same call can be judged on
other numbers. Only this folder's `calls`, `lenses` and `layers` know the package.

Longer than other files because what all kinds of calls are drawn from stands beside the simplest of them.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import multihead as mh
from tests.fuzz import oracle, plain, tensors
from tests.fuzz.plain import Judged, Wrong, judge

DTYPES = [torch.float32] * 5 + [torch.float64] * 2 + [torch.bfloat16] * 2 + [torch.float16] * 2
MASK_FORMS = (
    "strided",
    "within",
    "last swapped",
    "large strides",
    "freed",
    "cut",
)  # of equal values: the oracle has its own
SANE = (TypeError, ValueError, RuntimeError)  # NotImplementedError and torch's own are RuntimeErrors


class Refused(Exception):
    """The call was refused in words, as it may be."""


# What a call is given -------------------------------------------------------------------------------------------------


@dataclass
class Sizes:
    B: int
    H: int
    G: int
    Q: int
    K: int
    D: int
    V: int

    @staticmethod
    def draw(rng: random.Random, most: int = 400_000) -> Sizes:
        while True:
            G = rng.choice([1, 1, 2, 3])
            s = Sizes(
                rng.choice([1, 1, 2, 3]), G * rng.choice([1, 1, 2, 3]), G,
                rng.choice([0, 1, 1, 2, 3, 4, 5, 7, 8, 16, 17, 25, 33, 49, 65, 130]),
                rng.choice([0, 1, 2, 3, 5, 7, 16, 17, 31, 63, 65, 127, 129, 200, 300, 520, 1030]),
                rng.choice([1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 33, 40, 64]),
                rng.choice([1, 2, 3, 4, 7, 8, 16, 17, 33, 64]),
            )  # fmt: skip
            if s.B * s.H * s.Q * s.K * max(s.D, s.V) <= most:
                return s


def _cut(rng: random.Random, total: int, pieces: int) -> list[int]:
    edges = sorted(rng.randint(0, total) for _ in range(pieces - 1))
    return [b - a for a, b in zip([0, *edges], [*edges, total])]


def draw_mask(rng: random.Random, s: Sizes, by_row: bool = True) -> list[oracle.Part]:
    """None or up to three masks, joined. `by_row`: rows of the batch may differ."""

    def one() -> oracle.Part:
        kinds = ["causal", "causal", "window", "prefix", "allowed"] + ["padding", "documents", "prefixes"] * by_row
        match rng.choice(kinds):
            case "causal":
                return ("causal", rng.choice([None, None, 1, 3, 40]))
            case "window":
                return ("window", rng.choice([None, 0, 2, 50]), rng.choice([None, 0, 1, 9]))
            case "prefix":
                return ("prefix", rng.choice([0, 1, 4, 70]))
            case "prefixes":
                return ("prefix", [rng.randint(0, s.K + 2) for _ in range(s.B)])
            case "padding":
                return ("padding", [rng.randint(0, s.K) for _ in range(s.B)], rng.choice(["left", "right"]))
            case "documents":
                pieces, each = rng.randint(1, 4), rng.random() < 0.3
                alike = s.Q == s.K and rng.random() < 0.5

                def cuts(n: int) -> list:
                    return [_cut(rng, n, pieces) for _ in range(s.B)] if each else _cut(rng, n, pieces)

                return ("documents", cuts(s.Q), None if alike else cuts(s.K))
        shape = [rng.choice([1, n]) if n else n for n in (s.B if by_row else 1, s.H, s.Q, s.K)][rng.choice([0, 1, 2]) :]
        dense = np.random.default_rng(rng.getrandbits(32)).random(shape) < rng.choice([0.1, 0.6, 0.95])
        return ("allowed", dense)

    parts: list[oracle.Part] = []
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        part = one()
        if part[0] != "documents" or all(p[0] != "documents" for p in parts):
            parts.append(part)
    return parts


def mask_of(parts: Sequence[oracle.Part], form: str = "contiguous") -> Any:
    """The same as the package takes it."""
    joined: Any = None
    for part in parts:
        match part:
            case ("causal", window):
                one: Any = mh.Causal(window)
            case ("window", left, right):
                one = mh.Window(left, right)
            case ("prefix", n):
                one = mh.Prefix(torch.tensor(n) if isinstance(n, list) else n)
            case ("padding", lengths, side):
                one = mh.Padding(lengths, side)
            case ("documents", lengths, keys):
                one = mh.Documents(lengths, keys)
            case ("allowed", dense):
                one = mh.Allowed(tensors.body(form, torch.from_numpy(dense))[0])
        joined = one if joined is None else joined & one
    return joined


# Modes around a call --------------------------------------------------------------------------------------------------


class _PassFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _PassDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


MODES: dict[str, Any] = {
    "none": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "default device meta": lambda: torch.device("meta"),
    "default dtype float64": _default_dtype,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "function mode": _PassFunctions,
    "dispatch mode": _PassDispatch,
    "two threads": _two_threads,
}
TRANSFORMS = ("vmap", "compile")


def draw_mode(rng: random.Random) -> str:
    return rng.choice(list(MODES)) if rng.random() < 0.35 else "none"


# attend ---------------------------------------------------------------------------------------------------------------


@dataclass
class Options:
    """What q, k and v are weighed with."""

    scale: float | None
    softcap: float | None
    sinks: str  # "", "drawn", "one is -inf"
    bias: tuple[int, ...] | None  # its shape
    bias_hides: bool

    @staticmethod
    def draw(rng: random.Random, s: Sizes) -> Options:
        shape = tuple(rng.choice([1, n]) if n else n for n in (s.B, s.H, s.Q, s.K))[rng.choice([0, 0, 1, 2]) :]
        return Options(
            scale=rng.choice([None, None, None, 0.3, 1.0, -0.2, 3.0, 0.0]),
            softcap=rng.choice([None, None, None, 0.7, 20.0]),
            sinks=rng.choice(["", "", "", "drawn", "one is -inf"]),
            bias=rng.choice([None, None, shape]),
            bias_hides=rng.random() < 0.4,
        )

    def tensors(self, make: torch.Generator, H: int, dtype: torch.dtype) -> dict[str, Tensor]:
        given = {}
        if self.sinks:
            given["sinks"] = torch.randn(H, generator=make, dtype=torch.float64).to(dtype)
            if self.sinks != "drawn":
                given["sinks"][0] = -math.inf
        if self.bias is not None:
            bias = torch.randn(self.bias, generator=make, dtype=torch.float64)
            if self.bias_hides:
                bias = bias.masked_fill(torch.rand(self.bias, generator=make) < 0.3, -math.inf)
            given["bias"] = bias.to(dtype)
        return given


@dataclass
class Attend:
    """A call of `attend`: its output, and the log-sum-exp where asked for."""

    s: Sizes
    dtype: torch.dtype
    options: Options
    parts: list
    size: float  # of the numbers in q
    poison: float | None  # put into a key, a value or a query
    forms: dict[str, str]
    mode: str
    backend: str | None
    lse: bool
    top: bool = False
    lenient: bool = field(init=False)  # may be refused in words
    hopeless: bool = field(init=False)  # must be

    @staticmethod
    def draw(rng: random.Random) -> Attend:
        s = Sizes.draw(rng)
        transform = rng.choice(TRANSFORMS) if rng.random() < 0.02 else None
        mode = transform or draw_mode(rng)
        odd = rng.random() < 0.5
        dtype = rng.choice(DTYPES)
        probe = torch.zeros(1, dtype=dtype)
        kinds = {"odd": 0.15, "foreign": 0.04, "broken": 0.04} if odd and transform is None else {"odd": 0.0}
        forms = {name: tensors.choose(rng, probe, **kinds) for name in ("q", "k", "v", "sinks", "bias")}
        forms["mask"] = rng.choice(MASK_FORMS) if odd and rng.random() < 0.3 else "contiguous"
        if mode == "compile" and forms["mask"] in tensors.BROKEN:
            forms["mask"] = "contiguous"  # a compiled program reads it, in which there is nobody to refuse
        return Attend(
            s, dtype, Options.draw(rng, s), draw_mask(rng, s, by_row=transform != "vmap"),
            rng.choice([1.0, 1.0, 1.0, 30.0, 0.0, 1e4]), rng.choice([None] * 8 + [math.nan, math.inf]), forms, mode,
            rng.choice([None] * 6 + ["native", "sdpa", "reference"]), rng.random() < 0.3,
            rng.random() < 0.1 and "return_max_logit" in inspect.signature(mh.attend).parameters,
        )  # fmt: skip

    def __post_init__(self) -> None:
        s = self.s
        counts = {"q": s.B * s.H * s.Q * s.D, "k": s.B * s.G * s.K * s.D, "v": s.B * s.G * s.K * s.V, "sinks": s.H,
                  "bias": 0 if self.options.bias is None else math.prod(self.options.bias),
                  "mask": min([p[1].size for p in self.parts if p[0] == "allowed"], default=0)}  # fmt: skip
        given = {n for n in counts if not (n == "sinks" and not self.options.sinks)
                 and not (n == "bias" and self.options.bias is None)}  # fmt: skip
        self.forms = {n: f for n, f in self.forms.items() if n in given}
        kinds = {n: f for n, f in self.forms.items() if counts[n] > 0}
        elsewhere = any(f in ("meta", "sparse") for f in self.forms.values())
        self.hopeless = elsewhere or any(f in tensors.BROKEN for f in kinds.values())
        if elsewhere and not all(counts[n] for n, f in self.forms.items() if f in ("meta", "sparse")):
            self.hopeless = False  # nothing to read, so that nothing can be missed
        self.lenient = elsewhere or self.backend is not None or any(f in tensors.FOREIGN for f in self.forms.values())
        self.lenient |= any(f in tensors.BROKEN for f in self.forms.values())
        self.lenient |= "of inference mode" in self.forms.values() and self.mode in TRANSFORMS

    def numbers(self, draw: int) -> dict[str, Tensor]:
        """q, k, v, and what of sinks and bias there is, before they get their bodies."""
        make, s = torch.Generator().manual_seed(draw), self.s

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=make, dtype=torch.float64)

        given = {
            "q": drawn(s.B, s.H, s.Q, s.D) * self.size,
            "k": drawn(s.B, s.G, s.K, s.D),
            "v": drawn(s.B, s.G, s.K, s.V),
        }
        given |= self.options.tensors(make, s.H, torch.float64)
        return {name: t.to(self.dtype) for name, t in given.items()}

    def run(self, draw: int) -> list[Judged]:
        bodies, values = {}, {}
        for name, t in self.numbers(draw).items():
            if self.poison is not None and name == ("q", "k", "v")[draw % 3] and t.numel():
                t[:, :, t.shape[2] // 2] = self.poison
            bodies[name], values[name] = tensors.body(self.forms[name], t)
        found = refusing(self.lenient, self.hopeless, lambda: self._call(bodies))
        for name, t in bodies.items():
            if self.forms[name] not in tensors.BROKEN:
                now = tensors.bare(t).detach().resolve_neg().clone()
                if not torch.equal(now.nan_to_num(7.0), values[name].nan_to_num(7.0)):
                    raise Wrong(f"the call changed its argument {name}")
        return self.judge(values, found)

    def _call(self, given: dict[str, Tensor]) -> tuple[Tensor, ...]:
        mask = mask_of(self.parts, self.forms["mask"])
        more: dict[str, Any] = {"backend": self.backend, "scale": self.options.scale, "softcap": self.options.softcap}
        if self.lse:
            more["return_lse"] = True
        if self.top:
            more["return_max_logit"] = True

        def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
            out = mh.attend(q, k, v, mask, sinks=sinks, bias=bias, **more)
            return out if isinstance(out, tuple) else (out,)

        q, k, v, sinks, bias = (given.get(n) for n in ("q", "k", "v", "sinks", "bias"))
        assert q is not None
        assert k is not None
        assert v is not None
        if self.mode == "vmap":
            if bias is not None:
                bias = bias.expand(self.s.B, self.s.H, self.s.Q, self.s.K)
            rows = torch.vmap(lambda q, k, v, bias: tuple(t[0] for t in call(
                q[None], k[None], v[None], sinks, None if bias is None else bias[None])),
                in_dims=(0, 0, 0, None if bias is None else 0))  # fmt: skip
            return rows(q, k, v, bias)
        if self.mode == "compile":
            torch._dynamo.reset()
            return torch.compile(call, backend="aot_eager")(q, k, v, sinks, bias)
        with MODES[self.mode]():
            return call(q, k, v, sinks, bias)

    def judge(self, values: dict[str, Tensor], found: Sequence[Tensor]) -> list[Judged]:
        cast = self.mode == "autocast" and self.dtype != torch.float64
        dtype = torch.bfloat16 if cast else self.dtype
        broad = torch.promote_types(dtype, torch.float32)
        values = {n: t.to(dtype) if n in ("q", "k", "v") else t for n, t in values.items()}
        s, o = self.s, self.options
        seen = oracle.visible(self.parts, s.B, s.H, s.Q, s.K)
        scale = s.D**-0.5 if o.scale is None else o.scale
        if "bias" in values:
            seen = seen & (np.broadcast_to(values["bias"].double().numpy(), seen.shape) != -math.inf)
        rows, lse_rows = spoiled(values, seen)
        values = {n: t.nan_to_num(0.0, 0.0, 0.0) if n in ("q", "k", "v") else t for n, t in values.items()}
        exact = oracle.attend(*(values[n].double().numpy() for n in ("q", "k", "v")), seen, scale, o.softcap,
                              *(values[n].double().numpy() if n in values else None for n in ("sinks", "bias")))  # fmt: skip
        shown = torch.from_numpy(seen)

        def by_plain(order: plain.Product, dtype: torch.dtype, which: int) -> Tensor:
            t = {n: x.to(dtype) for n, x in values.items()}
            return plain.attend(t["q"], t["k"], t["v"], shown, scale, o.softcap, t.get("sinks"), t.get("bias"), order)[
                which
            ]

        out = tensors.bare(found[0])
        for what, t, wanted in (
            ("out", out, dtype),
            *(("lse", tensors.bare(t), broad) for t in found[1:2] if self.lse),
        ):
            if (t.dtype, t.device.type) != (wanted, "cpu"):
                raise Wrong(f"{what} is {t.dtype} on {t.device}, expected {wanted} on cpu")
        if self.poison is not None and math.isnan(self.poison) and not out[torch.from_numpy(rows)].isnan().all():
            raise Wrong("a visible NaN did not make its row NaN")
        judged = [judge("out", out, exact.out, lambda order: by_plain(order, dtype, 0), dtype, ~rows[..., None])]
        if self.lse:
            lse = tensors.bare(found[1])
            judged.append(judge("lse", lse, exact.lse, lambda order: by_plain(order, broad, 1), broad, ~lse_rows))
        if self.top and not rows.any():
            top = tensors.bare(found[-1])

            def largest(order: plain.Product) -> Tensor:
                t = {n: x.to(broad) for n, x in values.items()}
                scores = plain.score(t["q"], t["k"], shown, scale, o.softcap, t.get("bias"), order)
                return scores.flatten(2).amax(-1) if scores.numel() else scores.new_full(scores.shape[:2], -math.inf)

            judged.append(judge("max_logit", top, exact.top, largest, broad))
        return judged


def spoiled(values: dict[str, Tensor], seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows (B,H,Q) that meet a number that is none, in q, k or v; and those that meet it in q or k."""
    group = values["q"].shape[1] // max(values["k"].shape[1], 1)

    def bad(name: str, times: int) -> np.ndarray:
        return np.repeat(~values[name].double().isfinite().all(-1).numpy(), times, axis=1)

    asking = bad("q", 1) & seen.any(-1)
    met = asking | (bad("k", group)[:, :, None] & seen).any(-1)
    return met | (bad("v", group)[:, :, None] & seen).any(-1), met


def refusing(lenient: bool, hopeless: bool, call: Any) -> Any:
    """What a call gives; a refusal is fine where it may be, and missed where it must be."""
    try:
        found = call()
    except SANE as refusal:
        if lenient or hopeless:
            raise Refused(f"{type(refusal).__name__}: {refusal}") from refusal
        raise Wrong(f"refused: {type(refusal).__name__}: {refusal}") from refusal
    except Exception as strange:
        raise Wrong(f"{type(strange).__name__}: {strange}") from strange
    if hopeless:
        raise Wrong("numbers were given where there is nothing to read")
    return found

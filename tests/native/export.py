"""The table of cases of these tests as a file, for the driver that runs the core without Python (native/driver).

`python tests/native/export.py TABLE`. A case is lines of text: `case KIND why`, then `number NAME value`, `tensor NAME
type shape…` with its bytes behind the line, and `expect NAME bound shape…` with the exact float64 numbers; last, `end`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

import test_kernel_layer as layers
from oracle import Problem, Wanted, wanted
from test_kernel_backward import gradients_given, wanted_gradients
from test_kernel_forward import CASES, OPTIONS, SHAPES
from test_kernel_look import wanted_of

TYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.bool: "bool",
    torch.int32: "i32",
    torch.int64: "i64",
}
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Table:
    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.cases = file, 0

    def line(self, *words: object) -> None:
        self.file.write((" ".join(map(str, words)) + "\n").encode())

    def raw(self, t: Tensor) -> None:
        self.file.write(t.reshape(-1).clone().view(torch.uint8).numpy().tobytes() + b"\n")

    def case(self, kind: str, why: str) -> None:
        self.cases += 1
        self.line("case", kind, why)

    def number(self, name: str, value: float) -> None:
        assert float(value) == value, f"{name} is a double there"
        self.line("number", name, repr(float(value)))

    def tensor(self, name: str, t: Tensor | None) -> None:
        if t is not None:
            self.line("tensor", name, TYPES[t.dtype], *t.shape)
            self.raw(t.detach())

    def expect(self, name: str, exact: Tensor, bound: float) -> None:
        self.line("expect", name, repr(bound), *exact.shape)
        self.raw(exact.double())

    def mask(self, problem: Problem | dict) -> None:
        given = problem if isinstance(problem, dict) else vars(problem)
        for name in ("start", "stop"):
            bound = given.get(name)
            if isinstance(bound, tuple):
                for part, value in zip(("offset", "low", "high"), bound, strict=True):
                    self.number(f"{name}.{part}", value)
            else:
                self.tensor(name, bound)

    def attention(self, why: str, problem: Problem, ask: str) -> None:
        """`ask`: "out", and "gradients" or "look" beside it."""
        self.case("attention", f"{why}, {TYPES[problem.q.dtype]}, {ask}")
        for name in ("q", "k", "v", "allowed"):
            self.tensor(name, getattr(problem, name))
        for name in ("bias", "sinks"):
            t = getattr(problem, name)
            self.tensor(name, None if t is None else t.to(problem.wide))
        for name in ("scale", "softcap", "dropout", "seed"):
            self.number(name, getattr(problem, name))
        self.mask(problem)
        if "out" in ask:
            for name, one in zip(("out", "lse"), wanted(problem), strict=True):
                self.expect(name, one.exact, one.bound())
        if "gradients" in ask:
            with_lse = problem.wide == problem.q.dtype
            d_out, d_lse = gradients_given(problem, with_lse)
            self.tensor("d_out", d_out)
            self.tensor("d_lse", d_lse)
            for name, one in zip(("d_q", "d_k", "d_v"), wanted_gradients(problem, with_lse), strict=True):
                self.expect(name, one.exact, one.bound())
        if "look" in ask:
            names = {"weights": "weights", "received": "received", "mass": "mass", "entropy": "entropy", "top": "top"}
            names |= {"map (3, 4) False": "map", "map (3, 4) True": "largest"}
            for name, (exact, bound) in wanted_of(problem).items():
                if name in names:
                    self.expect(names[name], exact, bound)
        self.line("end")

    def layer(self, case: tuple, dtype: torch.dtype) -> None:
        made = layers.Whole.of(case, dtype)
        self.case("layer", f"{case[-1]}, {TYPES[dtype]}")
        self.tensor("x", made.x)
        if made.context is not made.x:
            self.tensor("context", made.context)
        for letter, w, b in zip("qkvo", made.weights, made.biases, strict=True):
            self.tensor(f"w_{letter}", w)
            self.tensor(f"b_{letter}", b)
        D, V = made.sizes[-2:]
        for name, value in (("D", D), ("V", V), ("scale", D**-0.5)):
            self.number(name, value)
        self.mask(made.mask)
        self.expected("y", made.wanted())

    def linear(self, case: tuple, types: tuple) -> None:
        x, weight, bias, wanted = layers.product_of(case, types)
        self.case("linear", f"{case[-1]}, {TYPES[types[0]]} times {TYPES[types[1]]}")
        for name, t in (("x", x), ("w", weight), ("b", bias)):
            self.tensor(name, t)
        self.expected("y", wanted)

    def expected(self, name: str, wanted: Wanted) -> None:
        self.expect(name, wanted.exact, wanted.bound())
        self.line("end")


def poisoned(problem: Problem) -> Problem:
    """A key and a value that are NaN: whoever does not see them must not notice."""
    at = problem.k.shape[2] * 2 // 3
    problem.k[:, :, at] = torch.nan
    problem.v[:, :, at] = torch.nan
    return problem


def shaped(problem: Problem, shape: str) -> Problem:
    """Scores that rise, fall or are huge, as in test_logits_of_every_shape."""
    problem.q[..., 1:] *= 1e-3
    problem.q[..., 0] = 1.0
    problem.k[..., 0] = SHAPES[shape](problem.k.shape[2])
    return problem


def problems() -> Iterator[tuple[str, Problem, str]]:
    for case in CASES:
        whole = case.Q and case.K and case.V
        for dtype in FLOATS:
            gradients = whole and case.K < 1000 and dtype != torch.float16
            yield case.why, case.problem(dtype), "out, gradients" if gradients else "out"
        if case.Q and case.K:
            yield case.why, case.problem(torch.float32), "look"
            yield case.why, case.problem(torch.bfloat16), "look"
    for option, made in OPTIONS.items():
        for case, ask in ((CASES[2], "out, gradients"), (CASES[9], "out"), (CASES[5], "out")):
            for dtype in (torch.float32, torch.bfloat16):
                yield (
                    f"{option}, {case.why}",
                    case.problem(dtype, **made(case)),
                    ask if dtype == torch.float32 else "out",
                )
        if "dropout" not in option:
            yield f"{option}, {CASES[2].why}", CASES[2].problem(**made(CASES[2])), "look"
    for shape in SHAPES:
        yield f"{shape}, {CASES[10].why}", shaped(CASES[10].problem(scale=1.0), shape), "out"
    for case in (CASES[2], CASES[5], CASES[6], CASES[9]):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            yield f"NaN, {case.why}", poisoned(case.problem(dtype)), "out"


def write(file: IO[bytes]) -> int:
    table = Table(file)
    for why, problem, ask in problems():
        table.attention(why, problem, ask)
    for case in layers.CASES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            table.layer(case, dtype)
    for rows in layers.ROWS:
        for x in (torch.float32, torch.bfloat16, torch.float16):
            for weight in {x, torch.float32, torch.bfloat16, torch.float16} if x == torch.float32 else {x}:
                table.linear(rows, (x, weight))
    return table.cases


if __name__ == "__main__":
    to = Path(sys.argv[1])
    beside = to.with_name(f".{to.name}.{os.getpid()}")
    with beside.open("wb") as file:
        count = write(file)
    beside.replace(to)
    print(f"{to}: {count} cases, {to.stat().st_size / 1e6:.0f} MB")

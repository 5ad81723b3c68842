"""Random layers: the seven steps, with a cache that grows, is fixed or slides, with rows of different lengths, and trained."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import multihead as mh
from tests.fuzz import calls, oracle, plain
from tests.fuzz.calls import mask_of, refusing
from tests.fuzz.plain import Judged, judge


@dataclass
class Layer:
    """A layer, and the pieces in which it is given a sequence."""

    B: int
    H: int
    G: int
    D: int
    V: int
    E: int
    options: dict[str, Any]
    rope: tuple[float, int, str] | None
    dtype: torch.dtype
    cache: str  # "", "growing", "fixed", "sliding"
    window: int
    pieces: list[list[int]]  # for each call, how many tokens of each row are real
    ragged: bool
    parts: list
    gradients: bool
    broken: str  # a projection whose weight is freed
    mode: str

    @staticmethod
    def draw(rng: random.Random) -> Layer:
        G = rng.choice([1, 1, 2, 3])
        B, H, D, V = (
            rng.choice([1, 1, 2, 3]),
            G * rng.choice([1, 2]),
            rng.choice([2, 4, 6, 8, 16]),
            rng.choice([1, 4, 5, 8]),
        )
        cache = rng.choice(["", "", "growing", "fixed", "sliding"])
        ragged = rng.random() < 0.4
        count = rng.randint(1, 5) if cache else 1
        longest = [rng.choice([1, 1, 1, 2, 5, 9]) for _ in range(count)]
        pieces = [[rng.randint(0, n) if ragged else n for _ in range(B)] + [n] for n in longest]
        rope = rng.choice([None, (10000.0, D, "halves"), (500.0, 2, "interleaved"), (77.0, D, "interleaved")])
        options = {"bias": rng.random() < 0.7, "qk_norm": rng.random() < 0.3, "sinks": rng.random() < 0.3,
                   "softcap": rng.choice([None, None, 3.0]), "scale": rng.choice([None, None, 0.4])}  # fmt: skip
        parts = rng.choice(
            [[], [("causal", None)], [("causal", None)], [("causal", 3)], [("window", 2, 1)], [("prefix", 2)]]
        )
        if cache == "sliding" and parts and parts[0][0] == "prefix":
            parts = []
        return Layer(
            B, H, G, D, V, rng.choice([4, 12, 24]), options, rope, rng.choice(calls.DTYPES), cache, rng.choice([1, 2, 3, 8]),
            pieces, ragged, parts, not cache and rng.random() < 0.4,
            rng.choice(["q_proj", "o_proj"]) if rng.random() < 0.03 else "",
            rng.choice(["none"] * 6 + ["no_grad", "inference", "default device meta", "dispatch mode", "function mode"]),
        )  # fmt: skip

    def run(self, draw: int) -> list[Judged]:
        make = torch.Generator().manual_seed(draw)
        base, dim, pairing = self.rope or (1.0, 2, "halves")
        layer = mh.MultiHeadAttention(
            self.E, heads=self.H, kv_heads=self.G, head_dim=self.D, value_dim=self.V, dtype=self.dtype,
            rope=mh.RoPE(base=base, dim=dim, pairing=pairing) if self.rope else False, **self.options,
        )  # fmt: skip
        with torch.no_grad():
            for p in layer.parameters():
                p.copy_(torch.randn(p.shape, generator=make, dtype=torch.float64) * self.E**-0.5)
        values = {name: p.detach().clone() for name, p in layer.named_parameters()}
        inputs = [
            torch.randn(self.B, piece[-1], self.E, generator=make, dtype=torch.float64).to(self.dtype)
            for piece in self.pieces
        ]
        if self.broken:
            getattr(layer, self.broken).weight.untyped_storage().resize_(0)
        found = refusing(False, bool(self.broken), lambda: self._call(layer, inputs))
        exact = self._by_oracle(values, inputs)

        def by_plain(order: plain.Product, at: int) -> Tensor:
            return self._by_plain(values, inputs, order)[at]

        judged = [
            judge(f"call {n}", y, exact[n], lambda order, n=n: by_plain(order, n), self.dtype)
            for n, y in enumerate(found)
        ]
        return judged + (self._judge_gradients(layer, values, inputs[0]) if self.gradients else [])

    def _lengths(self, piece: list[int]) -> Any:
        return piece[: self.B] if self.ragged else None

    def _call(self, layer: mh.MultiHeadAttention, inputs: list[Tensor]) -> list[Tensor]:
        with calls.MODES[self.mode]():
            total = max(1, sum(piece[-1] for piece in self.pieces))
            kind: dict[str, Any] = {
                "growing": {},
                "fixed": {"capacity": total},
                "sliding": {"window": self.window},
            }.get(self.cache, {})
            cache = layer.new_cache(batch=self.B, **kind) if self.cache else None
            return [
                layer(x, mask=mask_of(self.parts), cache=cache, lengths=self._lengths(piece))
                for x, piece in zip(inputs, self.pieces)
            ]

    def _steps(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each call, what its queries see of all keys of all rows so far, and where they stand."""
        had, steps = [0] * self.B, []
        for piece in self.pieces:
            real, N = piece[: self.B], piece[-1]
            K = max(h + r for h, r in zip(had, real)) if self.B else 0
            parts = [*self.parts, ("window", self.window - 1, None)] if self.cache == "sliding" else self.parts
            steps.append((
                oracle.visible(parts, self.B, self.H, N, K, list(zip(had, real))),
                np.array([[h + n for n in range(N)] for h in had]).reshape(self.B, N),
            ))  # fmt: skip
            had = [h + r for h, r in zip(had, real)]
        return steps

    def _history(self, inputs: list[Any], upto: int, stack: Any, empty: Any) -> Any:
        """The real tokens of every row up to a call, each row at its own length, filled up with zeros: (B,K,E)."""
        rows = []
        for b in range(self.B):
            real = [x[b, : piece[b]] for x, piece in zip(inputs[: upto + 1], self.pieces)]
            rows.append(real)
        K = max(sum(len(x) for x in row) for row in rows)
        return stack([[*row, empty(K - sum(len(x) for x in row))] for row in rows])

    def _by_oracle(self, values: dict[str, Tensor], inputs: list[Tensor]) -> list[np.ndarray]:
        made = oracle.Layer(
            {name: t.double().numpy() for name, t in values.items()}, self.H, self.G, self.D, self.V,
            self.D**-0.5 if self.options["scale"] is None else self.options["scale"], self.options["softcap"], self.rope,
        )  # fmt: skip
        wide = [x.double().numpy() for x in inputs]
        results = []
        for n, (seen, where) in enumerate(self._steps()):
            tokens = self._history(
                wide, n, lambda rows: np.stack([np.concatenate(r) for r in rows]), lambda k: np.zeros((k, self.E))
            )
            k, v = made.keys_and_values(tokens, np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape[:2]))
            results.append(made(wide[n], k, v, seen, where))
        return results

    def _plain_layer(self, values: dict[str, Tensor], order: plain.Product) -> plain.Layer:
        scale = self.D**-0.5 if self.options["scale"] is None else self.options["scale"]
        return plain.Layer(values, self.H, self.G, scale, self.options["softcap"], self.rope, order)

    def _by_plain(self, values: dict[str, Tensor], inputs: list[Tensor], order: plain.Product) -> list[Tensor]:
        made, results = self._plain_layer(values, order), []
        for n, (seen, where) in enumerate(self._steps()):
            tokens = self._history(
                inputs,
                n,
                lambda rows: torch.stack([torch.cat(r) for r in rows]),
                lambda k: torch.zeros(k, self.E, dtype=self.dtype),
            )
            k, v = made.keys_and_values(tokens, torch.arange(tokens.shape[1]).expand(tokens.shape[:2]))
            results.append(made(inputs[n], k, v, torch.from_numpy(seen), torch.from_numpy(where)))
        return results

    def _judge_gradients(self, layer: mh.MultiHeadAttention, values: dict[str, Tensor], x: Tensor) -> list[Judged]:
        """Of x and of every parameter, against float64 autograd of the plain layer."""
        turn = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(self.dtype)
        own = x.clone().requires_grad_()

        def ours() -> Any:
            y = layer(own, mask=mask_of(self.parts), lengths=self._lengths(self.pieces[0]))
            return torch.autograd.grad((y * turn).sum(), [own, *layer.parameters()])

        found = refusing(False, False, ours)

        def plainly(order: plain.Product, dtype: torch.dtype) -> Any:
            leaves = [t.to(dtype).requires_grad_() for t in (x, *values.values())]
            (y,) = self._by_plain(dict(zip(values, leaves[1:])), [leaves[0]], order) if dtype == self.dtype else \
                self._in_double()._by_plain(dict(zip(values, leaves[1:])), [leaves[0]], order)  # fmt: skip
            return torch.autograd.grad((y * turn.to(dtype)).sum(), leaves)

        exact, judged = plainly(torch.matmul, torch.float64), []
        for n, name in enumerate(("x", *values)):
            wanted = plain.numbers(exact[n])
            verdict = judge(
                f"gradient of {name}", found[n], wanted, lambda order, n=n: plainly(order, self.dtype)[n], self.dtype
            )
            if self.dtype == torch.float64:  # the oracle's own error is of the same size
                verdict.most += 256 * torch.finfo(torch.float64).eps * max(1.0, float(np.abs(wanted).max(initial=0)))
            judged.append(verdict)
        return judged

    def _in_double(self) -> Layer:
        return Layer(**(vars(self) | {"dtype": torch.float64}))

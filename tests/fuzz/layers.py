"""Random layers: the seven steps, with a cache that grows, is fixed or slides, with rows of different lengths, and trained.

What is drawn besides: a context, and keys of it that are kept; values of their own; positions; scores to add; weights that
lie transposed or in something larger; caches of fewer bits than the layer; x of float32 on weights of half precision.

Longer than other files because what is drawn, run and judged of a layer is one case.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import multihead as mh
from tests.fuzz import calls, oracle, plain, tensors
from tests.fuzz.calls import mask_of, refusing
from tests.fuzz.plain import Judged, Wrong, judge

FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
LAYOUTS = ("last swapped", "last swapped", "last swapped", "strided", "within")  # of weights
FORMS = (*tensors.SAME, *(form for form in tensors.ODD if form != "of inference mode"))  # of x
MODES = ["none"] * 9 + ["no_grad", "inference", "default device meta", "dispatch mode", "function mode", "two threads"]


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
    weights: torch.dtype
    dtype: torch.dtype  # of x
    cache: str  # "", "growing", "fixed", "sliding", "context"
    stored: str  # what the cache is made of, where that is not what the weights are
    window: int
    pieces: list[list[int]]  # for each call, how many tokens of each row are real, and how many are given
    ragged: bool
    context: tuple[int, int] | None  # how many items, and how wide
    own_values: bool
    places: list[Any] | None  # positions, for each call
    bias: tuple[int, ...] | None  # its shape
    parts: list
    frozen: bool
    gradients: bool
    layouts: dict[str, str]
    form: str  # of x
    broken: str  # a projection whose weight is freed, or "x"
    mode: str

    @staticmethod
    def draw(rng: random.Random) -> Layer:
        G = rng.choice([1, 1, 2, 3])
        B, H, D, V = (
            rng.choice([1, 1, 2, 3]),
            G * rng.choice([1, 2, 4]),
            rng.choice([2, 4, 6, 8, 16, 64]),
            rng.choice([1, 4, 5, 8, 64]),
        )
        cache = rng.choice(["", "", "", "growing", "fixed", "sliding", "growing", "context"])
        keeps = cache not in ("", "context")
        ragged = rng.random() < 0.4 and cache != "context"
        pieces = []
        for n in [rng.choice([1, 1, 1, 2, 5, 9]) for _ in range(rng.randint(1, 5) if cache else 1)]:
            pieces.append([rng.randint(0, n) if ragged else n for _ in range(B)] + [n])
        context = None
        if cache == "context" or (not cache and not ragged and rng.random() < 0.3):
            context = rng.choice([1, 2, 7, 33]), rng.choice([3, 8, 20])
        rope = rng.choice([None, (10000.0, D, "halves"), (500.0, 2, "interleaved"), (77.0, D, "interleaved")])
        options = {"bias": rng.random() < 0.7, "qk_norm": rng.random() < 0.3, "sinks": rng.random() < 0.3,
                   "softcap": rng.choice([None, None, 3.0]), "scale": rng.choice([None, None, 0.4])}  # fmt: skip
        parts = rng.choice(
            [[], [("causal", None)], [("causal", None)], [("causal", 3)], [("window", 2, 1)], [("prefix", 2)]]
        )
        if cache == "sliding" and parts and parts[0][0] == "prefix":
            parts = []
        weights = rng.choice([torch.float32] * 5 + [torch.float64] + [torch.bfloat16] * 3 + [torch.float16] * 2)
        half = weights in FLOATS.values()
        stored = rng.choice(["int8", "int8", *FLOATS]) if keeps and rng.random() < 0.4 else ""
        mixed = half and rng.random() < 0.3
        gradients = not cache and not mixed and rng.random() < 0.3
        bias = None
        if not cache and rng.random() < 0.15:
            sizes = B, H, pieces[0][-1], pieces[0][-1] if context is None else context[0]
            bias = tuple(rng.choice([1, n]) for n in sizes)[rng.choice([0, 1, 2]) :]
        form = rng.choice(FORMS) if rng.random() < 0.3 else "contiguous"
        dtype = torch.float32 if mixed else weights

        def place(N: int) -> Any:
            rows = [[rng.randint(0, 40) for _ in range(N)] for _ in range(B)]
            return rows if rng.random() < 0.5 else rows[0]

        return Layer(
            B, H, G, D, V, rng.choice([4, 12, 24, 64]), options, rope, weights, dtype, cache, stored, rng.choice([1, 2, 3, 8]),
            pieces, ragged, context, cache != "context" and rng.random() < 0.15,
            [place(piece[-1]) for piece in pieces] if rope and rng.random() < 0.2 else None,
            bias, parts, bool(stored == "int8" or mixed or rng.random() < 0.6) and not gradients, gradients,
            {name: rng.choice(LAYOUTS) for name in PROJECTIONS if rng.random() < 0.5} if rng.random() < 0.3 else {},
            form if tensors.fits(form, torch.zeros(1, dtype=dtype)) else "contiguous",
            rng.choice(["q_proj", "o_proj", "x"]) if rng.random() < 0.03 else "", rng.choice(MODES),
        )  # fmt: skip

    @property
    def _mixed(self) -> bool:
        return self.weights != self.dtype

    @property
    def _rounds(self) -> bool:
        """Whether the cache holds other numbers than the layer computes with."""
        return self.cache not in ("", "context") and bool(self.stored or self._mixed)

    # The call -----------------------------------------------------------------------------------------------------

    def run(self, draw: int) -> list[Judged]:
        make = torch.Generator().manual_seed(draw)
        layer = self._layer(make)
        values = {name: p.detach().to(self.dtype, copy=True) for name, p in layer.named_parameters()}

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=make, dtype=torch.float64).to(self.dtype)

        N = [piece[-1] for piece in self.pieces]
        width = self.E if self.context is None else self.context[1]
        bodies = [tensors.body(self.form, drawn(self.B, n, self.E)) for n in N]
        given = [(body if self.form != "parameter" else body.detach(), x) for body, x in bodies]
        context = None if self.context is None else drawn(self.B, *self.context)
        items = N if self.context is None else [self.context[0]] * len(N)
        own = [drawn(self.B, n, width) for n in items] if self.own_values else None
        bias = None if self.bias is None else drawn(*self.bias)
        more = More(context, own, bias)
        if self.broken == "x":
            given[0] = tensors.freed(given[0][1]), given[0][1]
        elif self.broken:
            getattr(layer, self.broken).weight.untyped_storage().resize_(0)
        found, kept = refusing(self._mixed, bool(self.broken), lambda: self._call(layer, [x for x, _ in given], more))
        inputs = [x for _, x in given]
        judged = self._judge_rounded(values, inputs, more, found, kept) if self._rounds else \
            self._judge(values, inputs, more, found)  # fmt: skip
        return judged + (self._judge_gradients(layer, values, inputs[0], more) if self.gradients else [])

    def _layer(self, make: torch.Generator) -> mh.MultiHeadAttention:
        base, dim, pairing = self.rope or (1.0, 2, "halves")
        layer = mh.MultiHeadAttention(
            self.E, heads=self.H, kv_heads=self.G, head_dim=self.D, value_dim=self.V, dtype=self.weights,
            context_dim=None if self.context is None else self.context[1],
            rope=mh.RoPE(base=base, dim=dim, pairing=pairing) if self.rope else False, **self.options,
        )  # fmt: skip
        with torch.no_grad():
            for p in layer.parameters():
                p.copy_(torch.randn(p.shape, generator=make, dtype=torch.float64) * self.E**-0.5)
            for name, form in self.layouts.items():
                projection = getattr(layer, name)
                projection.weight = torch.nn.Parameter(tensors.SAME[form](projection.weight.detach()))
        return layer.requires_grad_(not self.frozen)

    def _lengths(self, piece: list[int]) -> Any:
        return piece[: self.B] if self.ragged else None

    def _call(self, layer: mh.MultiHeadAttention, inputs: list[Tensor], more: More) -> tuple[list[Tensor], list[Any]]:
        """What each call gives, and after each what the cache holds."""
        with calls.MODES[self.mode]():
            total = max(1, sum(piece[-1] for piece in self.pieces))
            kind: dict[str, Any] = {
                "growing": {},
                "fixed": {"capacity": total},
                "sliding": {"window": self.window},
            }.get(self.cache, {})
            if self.stored:
                kind["dtype"] = FLOATS.get(self.stored, self.stored)
            if self.cache == "context":
                cache = layer.new_cache(context=more.context)
            else:
                cache = layer.new_cache(batch=self.B, **kind) if self.cache else None
            outputs, kept = [], []
            for n, (x, piece) in enumerate(zip(inputs, self.pieces)):
                given: dict[str, Any] = {"cache": cache, "lengths": self._lengths(piece), "bias": more.bias}
                given["context"] = more.context if cache is None else None
                given["values"] = None if more.values is None else more.values[n]
                given["positions"] = None if self.places is None else torch.tensor(self.places[n], device="cpu")
                outputs.append(layer(x, mask=mask_of(self.parts), **given))
                if self._rounds:
                    kept.append(self._kept(cache))
            return outputs, kept

    def _kept(self, cache: Any) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Keys and values exactly as the cache holds them, and how many older tokens of each row it has let go."""
        k, v = cache._k.detach().double(), cache._v.detach().double()
        if cache.scales is not None and self.dtype == torch.float64:  # read as the cache gives them, in float32
            k, v = cache.k.double(), cache.v.double()
        elif cache.scales is not None:
            k, v = (t * scale.double() for t, scale in zip((k, v), cache.scales))
        dropped = cache.dropped
        return k.numpy(), v.numpy(), [int(dropped)] * self.B if isinstance(dropped, int) else dropped.tolist()

    # What is right ------------------------------------------------------------------------------------------------

    def _steps(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each call, what its queries see of all keys of all rows so far, and where they stand."""
        had, steps = [0] * self.B, []
        for n, piece in enumerate(self.pieces):
            real, N = piece[: self.B], piece[-1]
            if self.context is not None:
                seen = oracle.visible(self.parts, self.B, self.H, N, self.context[0])
                steps.append((seen, self._places(n, [0] * self.B)))
                continue
            K = max(h + r for h, r in zip(had, real)) if self.cache else N
            parts = [*self.parts, ("window", self.window - 1, None)] if self.cache == "sliding" else self.parts
            seen = oracle.visible(parts, self.B, self.H, N, K, list(zip(had, real)))
            steps.append((seen, self._places(n, had)))
            had = [h + r for h, r in zip(had, real)]
        return steps

    def _places(self, n: int, had: list[int]) -> np.ndarray:
        """Where the tokens of call n stand, (B,N)."""
        N = self.pieces[n][-1]
        if self.places is not None:
            return np.broadcast_to(np.array(self.places[n]), (self.B, N))
        return np.array([[h + n for n in range(N)] for h in had]).reshape(self.B, N)

    def _history(self, inputs: list[Any], upto: int, stack: Any, empty: Any) -> Any:
        """The real tokens of every row up to a call, each row at its own length, filled up with zeros: (B,K,…)."""
        rows = []
        for b in range(self.B):
            real = [x[b, : piece[b]] for x, piece in zip(inputs[: upto + 1], self.pieces)]
            rows.append(real)
        K = max(sum(len(x) for x in row) for row in rows)
        return stack([[*row, empty(K - sum(len(x) for x in row))] for row in rows])

    def _sources(self, inputs: list[np.ndarray], more: More, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What keys and values of call n are made of, and where keys stand."""
        if more.context is not None:
            where = np.broadcast_to(np.arange(more.context.shape[1]), more.context.shape[:2])
            return more.context, more.context if more.values is None else more.values[n], where
        if not self.cache:  # tokens that are not real are hidden, but they are there
            return inputs[0], inputs[0] if more.values is None else more.values[0], self._steps()[0][1]

        def stacked(parts: list[Any]) -> np.ndarray:
            return self._history(parts, n, lambda rows: np.stack([np.concatenate(r) for r in rows]),
                                 lambda k: np.zeros((k, *parts[0].shape[2:]), parts[0].dtype))  # fmt: skip

        tokens = stacked(inputs)
        where = stacked([where for _, where in self._steps()])
        return tokens, tokens if more.values is None else stacked(more.values), where

    def _oracle(self, values: dict[str, Tensor]) -> oracle.Layer:
        return oracle.Layer(
            {name: t.double().numpy() for name, t in values.items()}, self.H, self.G, self.D, self.V,
            self.D**-0.5 if self.options["scale"] is None else self.options["scale"], self.options["softcap"], self.rope,
        )  # fmt: skip

    def _by_oracle(self, values: dict[str, Tensor], inputs: list[Tensor], more: More) -> list[np.ndarray]:
        made, wide, more = self._oracle(values), [x.double().numpy() for x in inputs], more.in_numpy
        results = []
        for n, (seen, where) in enumerate(self._steps()):
            tokens, others, places = self._sources(wide, more, n)
            k, _ = made.keys_and_values(tokens, places)
            _, v = made.keys_and_values(others, places)
            results.append(made(wide[n], k, v, seen, where, more.bias))
        return results

    def _plain_layer(self, values: dict[str, Tensor], order: plain.Product) -> plain.Layer:
        scale = self.D**-0.5 if self.options["scale"] is None else self.options["scale"]
        return plain.Layer(values, self.H, self.G, scale, self.options["softcap"], self.rope, order)

    def _by_plain(
        self, values: dict[str, Tensor], inputs: list[Tensor], more: More, order: plain.Product
    ) -> list[Tensor]:
        made, results = self._plain_layer(values, order), []
        for n, (seen, where) in enumerate(self._steps()):
            tokens, others, places = self._plain_sources(inputs, more, n)
            k, _ = made.keys_and_values(tokens, places)
            _, v = made.keys_and_values(others, places)
            results.append(made(inputs[n], k, v, torch.from_numpy(seen), torch.tensor(where), more.bias))
        return results

    def _plain_sources(self, inputs: list[Tensor], more: More, n: int) -> tuple[Tensor, Tensor, Tensor]:
        if len(inputs) == 1 and not self.cache and more.context is None:  # x may want a gradient
            x = inputs[0]
            return x, x if more.values is None else more.values[0], torch.tensor(self._steps()[0][1])
        dtype = inputs[0].dtype
        tokens, others, where = self._sources([x.detach().double().numpy() for x in inputs], more.in_numpy, n)
        return torch.tensor(tokens).to(dtype), torch.tensor(others).to(dtype), torch.tensor(where)

    # The judgement ------------------------------------------------------------------------------------------------

    def _judge(self, values: dict[str, Tensor], inputs: list[Tensor], more: More, found: list[Tensor]) -> list[Judged]:
        """From x to y, all at once."""
        exact = self._by_oracle(values, inputs, more)
        return [
            judge(f"call {n}", self._typed(y), exact[n],
                  lambda order, n=n: self._by_plain(values, inputs, more, order)[n], self.dtype)
            for n, y in enumerate(found)
        ]  # fmt: skip

    def _typed(self, y: Tensor) -> Tensor:
        if (y.dtype, y.device.type) != (self.dtype, "cpu"):
            raise Wrong(f"the layer gives {y.dtype} on {y.device}, expected {self.dtype} on cpu")
        return y

    def _judge_rounded(
        self, values: dict[str, Tensor], inputs: list[Tensor], more: More, found: list[Tensor], kept: list[Any]
    ) -> list[Judged]:
        """In two parts: new rows join the cache rounded once, and what is held is attended to as exactly as any."""
        made, wide, steps = self._oracle(values), [x.double().numpy() for x in inputs], self._steps()
        had, before, judged = [0] * self.B, None, []
        for n, (seen, where) in enumerate(steps):
            tokens, others, places = self._sources(wide, more.in_numpy, n)
            exact = made.keys_and_values(tokens, places)[0], made.keys_and_values(others, places)[1]
            now = tuple(np.zeros(t.shape, np.longdouble) for t in exact)
            fresh = np.zeros(exact[0].shape[:3], bool)
            for b, dropped in enumerate(kept[n][2]):
                real = had[b] + self.pieces[n][b]
                for stored, rows in zip(kept[n], now):
                    rows[b, :, dropped:real] = stored[b, :, : real - dropped]
                fresh[b, :, had[b] : real] = True
                if before is not None:
                    for old, rows in zip(before, now):
                        if (old[b, :, dropped : had[b]] != rows[b, :, dropped : had[b]]).any():
                            raise Wrong(f"call {n} changed what the cache held of row {b}")
                had[b] = real
            for which, name in enumerate("kv"):
                judged.append(self._judge_kept(f"{name} of call {n}", now[which], exact[which], fresh,
                    lambda order, which=which, n=n: self._plain_rows(values, inputs, more, n, order)[which]))  # fmt: skip

            def by_plain(order: plain.Product, n: int = n, now: Any = now) -> Tensor:
                k, v = (torch.from_numpy(t.astype(np.float64)).to(self.dtype) for t in now)
                seen, where = (torch.tensor(t) for t in steps[n])
                return self._plain_layer(values, order)(inputs[n], k, v, seen, where)

            y = made(wide[n], *now, seen, where)
            judged.append(judge(f"call {n}, of what the cache holds", self._typed(found[n]), y, by_plain, self.dtype))
            before = now
        return judged

    def _plain_rows(
        self, values: dict[str, Tensor], inputs: list[Tensor], more: More, n: int, order: plain.Product
    ) -> tuple[Tensor, Tensor]:
        tokens, others, places = self._plain_sources(inputs, more, n)
        layer = self._plain_layer(values, order)
        return layer.keys_and_values(tokens, places)[0], layer.keys_and_values(others, places)[1]

    def _judge_kept(self, what: str, kept: np.ndarray, exact: np.ndarray, fresh: np.ndarray, by_plain: Any) -> Judged:
        """How far new rows are off, beyond the half step that the cache must round by."""
        kind = self.stored or str(self.weights).removeprefix("torch.")
        if kind == "int8":
            step = np.abs(exact).max(-1, initial=0, keepdims=True) / 254
        elif kind in FLOATS:
            step = np.abs(exact) * torch.finfo(FLOATS[kind]).eps / 2 + 2.0**-25
        else:
            step = np.zeros_like(exact)
        beyond = np.maximum(np.abs(kept - exact) - 1.01 * step, 0)
        found = float(beyond[fresh].max(initial=0)) if not np.isnan(kept[fresh]).any() else np.inf
        most = 0.0
        for order in plain.ORDERS:
            off = plain.error(what, plain.numbers(by_plain(order)), exact, fresh[..., None])
            most = max(most, 2 * off)
        # a row that is off by so much in all moves its largest number, and with it the step
        return Judged(what, found, 2 * most + torch.finfo(self.dtype).eps * float(np.abs(exact).max(initial=0)))

    def _judge_gradients(
        self, layer: mh.MultiHeadAttention, values: dict[str, Tensor], x: Tensor, more: More
    ) -> list[Judged]:
        """Of x and of every parameter, against float64 autograd of the plain layer."""
        turn = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(self.dtype)
        own = x.clone().requires_grad_()
        given: dict[str, Any] = {"context": more.context, "bias": more.bias}
        given["values"] = None if more.values is None else more.values[0]
        given["positions"] = None if self.places is None else torch.tensor(self.places[0])

        def ours() -> Any:
            y = layer(own, mask=mask_of(self.parts), lengths=self._lengths(self.pieces[0]), **given)
            return torch.autograd.grad((y * turn).sum(), [own, *layer.parameters()])

        found = refusing(False, False, ours)

        def plainly(order: plain.Product, dtype: torch.dtype) -> Any:
            leaves = [t.to(dtype).requires_grad_() for t in (x, *values.values())]
            (y,) = self._by_plain(dict(zip(values, leaves[1:])), [leaves[0]], more.to(dtype), order)
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


@dataclass
class More:
    """What a layer is given besides x."""

    context: Any
    values: Any  # for each call
    bias: Any

    @property
    def in_numpy(self) -> More:
        def wide(t: Tensor) -> np.ndarray:
            return t.detach().double().numpy()

        return self._each(wide)

    def to(self, dtype: torch.dtype) -> More:
        return self._each(lambda t: t.to(dtype))

    def _each(self, change: Any) -> More:
        return More(
            None if self.context is None else change(self.context),
            None if self.values is None else [change(t) for t in self.values],
            None if self.bias is None else change(self.bias),
        )

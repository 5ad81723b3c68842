"""Random lenses: every statistic against the weights of the oracle."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import multihead as mh
from tests.fuzz import calls, oracle, plain, tensors
from tests.fuzz.calls import Options, Sizes, draw_mask, mask_of, refusing
from tests.fuzz.plain import Judged, Wrong, judge

ASKED = ("rows", "columns", "weights", "map mean", "map max", "top", "peak", "entropy", "mass", "received", "lse")


@dataclass
class Lens:
    """One lens, asked for some statistics in some order."""

    s: Sizes
    dtype: torch.dtype
    options: Options
    parts: list
    size: float
    given_lse: bool
    forms: dict[str, str]
    asked: list[str]
    chosen: tuple[list[int], list[int], tuple[int, int]]  # queries, keys, height and width
    mode: str

    @staticmethod
    def draw(rng: random.Random) -> Lens:
        s = Sizes.draw(rng, 200_000)
        dtype = rng.choice(calls.DTYPES)
        probe, odd = torch.zeros(1, dtype=dtype), 0.2 * (rng.random() < 0.4)
        queries, keys = ([rng.randrange(n) for _ in range(rng.randint(1, 3))] if n else [] for n in (s.Q, s.K))
        return Lens(
            s, dtype, Options.draw(rng, s), draw_mask(rng, s), rng.choice([1.0, 1.0, 30.0, 0.0]), rng.random() < 0.3,
            {name: tensors.choose(rng, probe, odd) for name in ("q", "k", "sinks", "bias")},
            rng.sample(ASKED, rng.randint(1, 4)), (queries, keys, (rng.randint(1, 9), rng.randint(1, 9))),
            rng.choice(["none"] * 7 + ["no_grad", "inference", "default device meta", "default dtype float64", "dispatch mode"]),
        )  # fmt: skip

    def run(self, draw: int) -> list[Judged]:
        s, o, make = self.s, self.options, torch.Generator().manual_seed(draw)
        given: dict[str, Tensor] = {}
        values: dict[str, Tensor] = {}
        numbers = {"q": torch.randn(s.B, s.H, s.Q, s.D, generator=make, dtype=torch.float64) * self.size,
                   "k": torch.randn(s.B, s.G, s.K, s.D, generator=make, dtype=torch.float64)}  # fmt: skip
        for name, t in (numbers | o.tensors(make, s.H, torch.float64)).items():
            given[name], values[name] = tensors.body(self.forms[name], t.to(self.dtype))
        found = refusing(False, False, lambda: self._ask(given))

        seen = oracle.visible(self.parts, s.B, s.H, s.Q, s.K)
        shown, scale = torch.from_numpy(seen), s.D**-0.5 if o.scale is None else o.scale
        extra = [values[n].double().numpy() if n in values else None for n in ("sinks", "bias")]
        k = values["k"].double().numpy()
        exact = oracle.attend(values["q"].double().numpy(), k, k, seen, scale, o.softcap, *extra)
        if "bias" in values:
            seen = seen & (np.broadcast_to(values["bias"].double().numpy(), seen.shape) != -np.inf)
        broad = torch.promote_types(self.dtype, torch.float32)  # what a lens computes in
        t = {n: x.to(broad) for n, x in values.items()}
        by_lse = judge("lse", found["given"], exact.lse, lambda order: plain.weigh(
            t["q"], t["k"], shown, scale, o.softcap, t.get("sinks"), t.get("bias"), order)[1], broad)  # fmt: skip
        judged = [by_lse]
        for what in self.asked:
            if what not in found:
                continue
            by_oracle, by_torch = self._statistic(what)

            def by_plain(order: plain.Product, by_torch: Any = by_torch) -> Tensor:
                given = t["q"], t["k"], shown, scale, o.softcap, t.get("sinks"), t.get("bias")
                # Narrower numbers are added up in float64, of which nothing is left; float64 has nothing wider.
                total = plain.SUMS[order if broad == torch.float64 else torch.matmul]
                return by_torch(*plain.weigh(*given, order), total)

            result = found[what]
            weights = tensors.bare(result[0] if isinstance(result, tuple) else result)
            if weights.dtype != broad or weights.device.type != "cpu":
                raise Wrong(f"{what} is {weights.dtype} on {weights.device}, expected {broad} on cpu")
            verdict = judge(what, weights, by_oracle(exact), by_plain, broad)
            # A weight is a power times a factor, both rounded, where plain divides once: equal weights round alike.
            verdict.most += (
                2
                * torch.finfo(broad).eps
                * float(np.abs(by_oracle(exact)).max(initial=0, where=np.isfinite(by_oracle(exact))))
            )
            if (self.given_lse and what not in ("rows", "weights", "lse")) or self._in_tiles_of_torch:
                verdict.most += self._share_of_scores(what, by_lse, by_oracle(exact))
            judged.append(verdict)
            if isinstance(result, tuple):
                judged.append(self._check_keys(what, result[1], exact.weights, seen, verdict))
        return judged

    @property
    def _in_tiles_of_torch(self) -> bool:
        """Whether torch computes the scores, in float64: there is nothing wider to hide in that its product rounds
        differently in tiles of different shape, as `Region.wide` says.
        """
        odd = set(self.forms.values()) - set(tensors.SAME) - {"real part", "of inference mode"}
        return self.dtype == torch.float64 and (bool(odd) or self.mode == "dispatch mode")

    def _share_of_scores(self, what: str, by_lse: Judged, statistic: np.ndarray) -> float:
        """What it costs that a score and the log-sum-exp come from two roundings, as `look` says: a weight is off by
        both of itself, and so is each sum, mean or largest of weights; −Σ w ln w by its own size and Σ w ≤ 1 together.
        Both are the error of the log-sum-exp, and what it may be.
        """
        finite = np.abs(statistic[np.isfinite(statistic)])
        size = float(finite.max(initial=0)) + (1.0 if what == "entropy" else 0.0)
        return (by_lse.found + by_lse.most) * size

    def _ask(self, given: dict[str, Tensor]) -> dict[str, Any]:
        o, (queries, keys, size) = self.options, self.chosen
        more: dict[str, Any] = {
            "scale": o.scale,
            "softcap": o.softcap,
            "sinks": given.get("sinks"),
            "bias": given.get("bias"),
        }
        mask = mask_of(self.parts)
        with calls.MODES[self.mode]():
            lse = (
                mh.attend(given["q"], given["k"], given["k"], mask, return_lse=True, **more)[1]
                if self.given_lse
                else None
            )
            lens = mh.look(given["q"], given["k"], mask, lse=lse, **more)
            ask: dict[str, Callable[[], Any]] = {
                "rows": lambda: lens.rows(queries), "columns": lambda: lens.columns(keys), "weights": lens.weights,
                "map mean": lambda: lens.map(*size), "map max": lambda: lens.map(*size, pool="max"),
                "top": lambda: lens.top(size[0]), "peak": lens.peak, "entropy": lens.entropy,
                "mass": lambda: lens.mass(keys), "received": lens.received, "lse": lambda: lens.lse,
            }  # fmt: skip
            empty = not (self.s.Q and self.s.K)
            answers = {
                what: ask[what]()
                for what in self.asked
                if not (empty and what in ("rows", "columns", "mass", "map mean", "map max"))
            }
            return answers | {"given": lens.lse if lse is None else lse}

    def _statistic(
        self, what: str
    ) -> tuple[Callable[[oracle.Attended], np.ndarray], Callable[[Tensor, Tensor, plain.Sum], Tensor]]:
        """The statistic from the oracle's weights, and from plain ones, which may be added up in any order, too."""
        queries, keys, (height, width) = self.chosen

        def pooled(weights: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
            return torch.stack([torch.stack([reduce(weights[:, :, r, c]) for c in oracle.bins(self.s.K, width)], -1)
                                for r in oracle.bins(self.s.Q, height)], -2)  # fmt: skip

        def mean(t: Tensor, total: plain.Sum) -> Tensor:
            return total(total(t)) / (t.shape[-2] * t.shape[-1])

        def top(weights: Tensor, n: int) -> Tensor:
            best = weights.sort(-1, descending=True).values[..., :n]
            return torch.nn.functional.pad(best, (0, n - best.shape[-1]))

        return {
            "rows": (lambda a: a.weights[:, :, queries], lambda w, *_: w[:, :, queries]),
            "columns": (lambda a: a.weights[..., keys], lambda w, *_: w[..., keys]),
            "weights": (lambda a: a.weights, lambda w, *_: w),
            "map mean": (
                lambda a: oracle.pooled(a.weights, height, width, "mean"),
                lambda w, _, total: pooled(w, lambda bin: mean(bin, total)),
            ),
            "map max": (
                lambda a: oracle.pooled(a.weights, height, width, "max"),
                lambda w, *_: pooled(w, lambda bin: bin.amax((-2, -1))),
            ),
            "top": (lambda a: oracle.top(a.weights, height), lambda w, *_: top(w, height)),
            "peak": (lambda a: oracle.top(a.weights, 1)[..., 0], lambda w, *_: top(w, 1)[..., 0]),
            "entropy": (lambda a: oracle.entropy(a.weights), lambda w, _, total: total(torch.special.entr(w))),
            "mass": (lambda a: a.weights[..., keys].sum(-1), lambda w, _, total: total(w[..., keys])),
            "received": (lambda a: a.weights.sum(2), lambda w, _, total: total(w.mT)),
            "lse": (lambda a: a.lse, lambda _, lse, __: lse),
        }[what]  # type: ignore[return-value]

    def _check_keys(self, what: str, keys: Tensor, weights: np.ndarray, seen: np.ndarray, verdict: Judged) -> Judged:
        """Each key is one that is seen, named once; −1 where there is none. Judged: how far its weight is from the one
        it should have: of two keys in the wrong order both weights are off, each by what a weight may be.
        """
        found = keys.numpy()[..., None] if what == "peak" else keys.numpy()
        wanted = oracle.top(weights, found.shape[-1])
        if not weights.shape[-1]:
            if (found != -1).any():
                raise Wrong(f"{what} names a key where there are none")
            return Judged(f"keys of {what}", 0.0, 0.0)
        there = found >= 0
        at = np.take_along_axis(weights, np.maximum(found, 0), -1)
        if (~np.take_along_axis(seen, np.maximum(found, 0), -1) & there).any():
            raise Wrong(f"{what} names a key that is hidden")
        off = float(np.where(there, np.abs(at - wanted), wanted).max(initial=0))
        for row in found.reshape(weights[..., 0].size, found.shape[-1]):
            named = row[row >= 0]
            if len(set(named.tolist())) < len(named):
                raise Wrong(f"{what} names a key twice: {row.tolist()}")
        if what == "peak" and self.size == 0.0 and self.options.bias is None:  # all weights of a row are equal
            first = np.where(seen.any(-1), seen.argmax(-1), -1)
            if (found[..., 0] != first).any():
                raise Wrong("peak: a tie does not go to the lowest key")
        return Judged(f"keys of {what}", off, 2 * verdict.most + 1e-300)

"""Attention once more, from its definitions, in NumPy and extended precision: an oracle that shares nothing with the package.

Masks are plain data, written out query by query. Gradients are written by hand, not by autograd. Everything here knows
numbers and nothing else: no torch, no package. (Where long double is no wider than double, as on some ARM machines, the
oracle's own rounding is that of the float64 calls it judges.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray
Part = tuple  # ("causal", window) · ("window", left, right) · ("prefix", n) · ("padding", lengths, side) ·
#               ("documents", lengths, key_lengths) · ("allowed", bool array)


def wide(numbers: Any) -> Array:
    return np.asarray(numbers, dtype=np.longdouble)


# Masks ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a query stands: the position it has among the keys, and which keys are its own document's."""

    position: int
    first: int
    stop: int


def _of_row(value: Any, b: int) -> Any:
    """The entry of row b where there is one for each row."""
    return value[b] if isinstance(value, Sequence) else value


def _document(lengths: Sequence[int], key_lengths: Sequence[int], q: int) -> Place:
    """The place of query q: as far from its document's end among the keys as it is among the queries."""
    first_query = first_key = 0
    for queries, keys in zip(lengths, key_lengths, strict=True):
        if q < first_query + queries:
            from_the_end = first_query + queries - 1 - q
            return Place(first_key + keys - 1 - from_the_end, first_key, first_key + keys)
        first_query, first_key = first_query + queries, first_key + keys
    raise AssertionError(f"query {q} is in no document")


def _sees(part: Part, b: int, at: Place, K: int) -> Array | bool:
    """Which of K keys a query at `at` in row b sees under one mask: (K,)."""
    key, i = np.arange(K), at.position
    match part:
        case ("causal", window):
            return (key <= i) & (True if window is None else key > i - window)
        case ("window", left, right):
            return (True if left is None else key >= i - left) & (True if right is None else key <= i + right)
        case ("prefix", n):
            return (key - at.first < _of_row(n, b)) | (key <= i)
        case ("padding", lengths, side):
            return key < lengths[b] if side == "right" else key >= K - lengths[b]
        case ("documents", *_):
            return (key >= at.first) & (key < at.stop)
    raise AssertionError(part)


def visible(
    parts: Sequence[Part], B: int, H: int, Q: int, K: int, rows: Sequence[tuple[int, int]] | None = None
) -> Array:
    """What each query sees, (B,H,Q,K). `rows`: of a ragged batch, how many keys each row had before, and how many of its
    queries are real; these add as many keys, and stand at them. The others see nothing, and add none.
    """
    seen = np.ones((B, H, Q, K), dtype=bool)
    documents = next((p for p in parts if p[0] == "documents"), None)
    for part in parts:
        if part[0] == "allowed":
            seen &= np.broadcast_to(part[1], seen.shape)
    for b in range(B):
        for q in range(Q):
            before, real = (K - Q, Q) if rows is None else rows[b]
            at = Place(before + q, 0, K)
            if documents is not None:
                lengths, key_lengths = documents[1:]
                lengths = lengths[b] if isinstance(lengths[0], Sequence) else lengths
                keys = lengths if key_lengths is None else key_lengths
                at = _document(lengths, keys[b] if isinstance(keys[0], Sequence) else keys, q)
            row = (np.arange(K) < before + real) & (q < real)
            for part in parts:
                if part[0] != "allowed":
                    row = row & _sees(part, b, at, K)
            seen[b, :, q] &= row
    return seen


# Attention ------------------------------------------------------------------------------------------------------------


@dataclass
class Attended:
    """One call, and what its gradients need."""

    q: Array
    k: Array
    v: Array
    scale: np.longdouble
    out: Array  # (B,H,Q,V)
    lse: Array  # (B,H,Q)
    weights: Array  # (B,H,Q,K), after the sink joined the denominator
    sunk: Array  # (B,H,Q), the sink's own share
    slope: Array  # (B,H,Q,K), of the softcap
    top: Array  # (B,H), the largest score


def attend(q: Any, k: Any, v: Any, seen: Array, scale: float, softcap: float | None = None, sinks: Any = None,
           bias: Any = None) -> Attended:  # fmt: skip
    """q·k · scale → softcap → + bias → mask → softmax with the sink in the denominator → · v."""
    q, k, v = wide(q), wide(k), wide(v)
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k_each, v_each = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    logits = np.einsum("bhqd,bhkd->bhqk", q, k_each) * wide(scale)
    slope = np.ones_like(logits)
    if softcap is not None:
        bent = np.tanh(logits / wide(softcap))
        with np.errstate(over="ignore"):
            slope = np.cosh(logits / wide(softcap)) ** -2  # 1 − bent² would be 0 long before it is
        logits = wide(softcap) * bent
    if bias is not None:
        added = np.broadcast_to(wide(bias), logits.shape)
        seen = seen & (added != -math.inf)
        logits = logits + np.where(seen, added, 0)
    logits = np.where(seen, logits, -np.inf)
    sink = np.full(logits.shape[:3], -np.inf, np.longdouble) if sinks is None else \
        np.broadcast_to(wide(sinks)[None, :, None], logits.shape[:3])  # fmt: skip
    top = np.maximum(logits.max(-1, initial=-np.inf), sink)
    shift = np.where(np.isfinite(top), top, 0)
    powers, sunk = np.exp(logits - shift[..., None]), np.exp(sink - shift)
    total = powers.sum(-1) + sunk
    safe = np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = shift + np.log(total)
    weights = powers / safe[..., None]
    out = np.einsum("bhqk,bhkv->bhqv", weights, v_each)
    largest = logits.max((2, 3), initial=-np.inf)
    return Attended(q, k, v, wide(scale), out, lse, weights, sunk / safe, slope, largest)


def gradients(a: Attended, d_out: Any, d_lse: Any = None) -> dict[str, Array]:
    """Of Σ out·d_out + Σ lse·d_lse: q, k, v as given, sinks (H,), and bias as (B,H,Q,K)."""
    B, H = a.q.shape[:2]
    G, K = a.k.shape[1], a.k.shape[2]
    group = H // G if G else 1
    k_each, v_each, d_out = np.repeat(a.k, group, axis=1), np.repeat(a.v, group, axis=1), wide(d_out)
    d_weights = np.einsum("bhqv,bhkv->bhqk", d_out, v_each)
    drawn = (a.weights * d_weights).sum(-1)  # what the softmax takes back from every weight
    if d_lse is not None:
        drawn = drawn - np.where(np.isfinite(a.lse), wide(d_lse), 0)
    d_logits = a.weights * (d_weights - drawn[..., None])
    d_scores = d_logits * a.slope * a.scale
    d_q = np.einsum("bhqk,bhkd->bhqd", d_scores, k_each)
    d_k = np.einsum("bhqk,bhqd->bhkd", d_scores, a.q).reshape(B, G, group, K, a.q.shape[3]).sum(2)
    d_v = np.einsum("bhqk,bhqv->bhkv", a.weights, d_out).reshape(B, G, group, K, a.v.shape[3]).sum(2)
    return {"q": d_q, "k": d_k, "v": d_v, "sinks": -(a.sunk * drawn).sum((0, 2)), "bias": d_logits}


def summed_to(gradient: Array, shape: Sequence[int]) -> Array:
    """The gradient of what was broadcast from `shape`."""
    gradient = gradient.sum(tuple(range(gradient.ndim - len(shape))))
    for axis, size in enumerate(shape):
        if size == 1:
            gradient = gradient.sum(axis, keepdims=True)
    return gradient


# What a lens tells of weights (B,H,Q,K) -------------------------------------------------------------------------------


def entropy(weights: Array) -> Array:
    logs = np.log(np.where(weights > 0, weights, 1))
    return -(weights * logs).sum(-1)


def bins(n: int, count: int) -> list[slice]:
    """Adaptive pooling: bin i runs from ⌊i·n/count⌋ to ⌈(i+1)·n/count⌉."""
    return [slice(i * n // count, -(-(i + 1) * n // count)) for i in range(count)]


def pooled(weights: Array, height: int, width: int, pool: str) -> Array:
    reduce = {"mean": np.mean, "max": np.max}[pool]
    return np.stack(
        [
            np.stack(
                [reduce(weights[:, :, rows, columns], axis=(2, 3)) for columns in bins(weights.shape[3], width)], -1
            )
            for rows in bins(weights.shape[2], height)
        ],
        -2,
    )


def top(weights: Array, n: int) -> Array:
    """The n largest weights of each query, largest first, 0 where there are fewer keys."""
    best = -np.sort(-weights, axis=-1)[..., :n]
    return np.concatenate([best, np.zeros((*best.shape[:-1], n - best.shape[-1]), best.dtype)], -1)


# The layer ------------------------------------------------------------------------------------------------------------


def rotate(x: Array, positions: Array, base: float, dim: int, pairing: str) -> Array:
    """RoPE on (B,H,N,D), at positions (B,N): pair p turns by position · base^(−2p/dim)."""
    turned, half = x.copy(), dim // 2
    for p in range(half):
        angle = wide(positions)[:, None] * wide(base) ** (-wide(2 * p) / dim)  # (B,1,N)
        one, other = (p, p + half) if pairing == "halves" else (2 * p, 2 * p + 1)
        a, b = x[..., one], x[..., other]
        turned[..., one] = a * np.cos(angle) - b * np.sin(angle)
        turned[..., other] = b * np.cos(angle) + a * np.sin(angle)
    return turned


def normalise(x: Array, gain: Any) -> Array:
    """RMS norm, as QK-norm does it."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + wide(1e-6)) * wide(gain)


@dataclass
class Layer:
    """The seven steps with the weights of a layer, by the name of each parameter; sizes as in the alphabet."""

    parameters: dict[str, Array]
    H: int
    G: int
    D: int
    V: int
    scale: float
    softcap: float | None
    rope: tuple[float, int, str] | None  # base, dim, pairing

    def _project(self, name: str, x: Array, heads: int) -> Array:
        y = np.einsum("bne,fe->bnf", x, wide(self.parameters[f"{name}.weight"]))
        y = y + wide(self.parameters.get(f"{name}.bias", 0))
        return y.reshape(*y.shape[:2], heads, y.shape[2] // heads).transpose(0, 2, 1, 3)

    def _ready(self, name: str, x: Array, heads: int, positions: Array) -> Array:
        turned = self._project(f"{name}_proj", x, heads)
        if f"{name}_norm.weight" in self.parameters:
            turned = normalise(turned, self.parameters[f"{name}_norm.weight"])
        return turned if self.rope is None else rotate(turned, positions, *self.rope)

    def keys_and_values(self, x: Array, positions: Array) -> tuple[Array, Array]:
        x = wide(x)
        return self._ready("k", x, self.G, positions), self._project("v_proj", x, self.G)

    def __call__(self, x: Array, k: Array, v: Array, seen: Array, positions: Array, bias: Any = None) -> Array:
        q = self._ready("q", wide(x), self.H, positions)
        heads = attend(q, k, v, seen, self.scale, self.softcap, self.parameters.get("sinks"), bias).out
        merged = heads.transpose(0, 2, 1, 3).reshape(*x.shape[:2], self.H * self.V)
        y = np.einsum("bnf,ef->bne", merged, wide(self.parameters["o_proj.weight"]))
        return y + wide(self.parameters.get("o_proj.bias", 0))

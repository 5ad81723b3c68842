"""Reading a module's parameters as the weights of the seven steps: by name, then by shape, then by search.

Every reading says how it came about. Where names do not tell q from k, the one declared first is taken for q and no
other order is tried: an order found by search would call a swap healthy.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from multihead.doctor.weights import Weights
from multihead.layer import MultiHeadAttention
from multihead.positions import RoPE
from multihead.sizes import Sizes
from multihead.weights import load_weights

ROLES = {
    "q": "q", "query": "q", "queries": "q", "wq": "q", "bq": "q",
    "k": "k", "key": "k", "keys": "k", "wk": "k", "bk": "k",
    "v": "v", "value": "v", "values": "v", "val": "v", "wv": "v", "bv": "v",
    "o": "o", "out": "o", "output": "o", "wo": "o", "bo": "o", "unifyheads": "o", "final": "o", "combine": "o",
    "qkv": "qkv", "wqkv": "qkv", "in": "qkv", "kv": "kv",
    "sink": "sinks", "sinks": "sinks",
}  # fmt: skip


@dataclass
class Reading:
    """The weights that were read, and how."""

    weights: Weights
    how: list[str] = field(default_factory=list)


class Unreadable(ValueError):
    """No way was found to take the parameters for the weights of attention."""


def role(name: str) -> str | None:
    """Which of q, k, v, o, qkv, kv, q norm, k norm or sinks a parameter's name means.

    >>> [
    ...     role(name)
    ...     for name in ("to_q.weight", "W_k", "c_attn.weight", "attn.out_proj.bias", "q_norm.weight", "a.weight")
    ... ]
    ['q', 'k', 'qkv', 'o', 'q norm', None]
    """
    words = [w for w in re.split(r"[._\d]+|(?<=[a-z])(?=[A-Z])", name) if w]
    lower = [w.lower() for w in words]
    joined = "_".join(lower)
    if "query_key_value" in joined or "c_attn" in joined or "q_k_v" in joined:
        return "qkv"
    found = [ROLES[w] for w in lower if w in ROLES]
    if any(w in ("norm", "ln", "layernorm", "rmsnorm") for w in lower):
        return f"{found[-1]} norm" if found and found[-1] in "qk" else None
    if found:
        return found[-1]
    return "o" if {"proj", "fc", "dense"} & set(lower) else None


def readings(
    module: nn.Module, x_width: int, heads: int, names: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[Reading]:
    """Every way to read the module's parameters, likeliest first. `names`: a map given by the user."""
    found = {name: p.detach() for name, p in module.named_parameters() if p.dtype.is_floating_point}
    if not found:
        raise Unreadable("it has no parameters to read: give reference=, a layer with the same weights")
    builder = _Builder(module, found, x_width, heads, options)
    if names is not None:
        yield builder.mapped(names)
        return
    by_role = builder.by_role()
    matrices = {r: [n for n in found_names if found[n].dim() >= 2] for r, found_names in by_role.items()}
    if matrices.get("o") and (matrices.get("qkv") or all(matrices.get(r) for r in "qkv") or matrices.get("kv")):
        yield from builder.named(by_role)
    else:
        yield from builder.shaped()


def in_layout(module: nn.Module, layout: str, width: int, heads: int, **options: Any) -> Reading:
    """The reading that a named layout of `mh.load_weights` gives."""
    found = module.state_dict()
    options = {name: value for name, value in options.items() if value is not None}
    biased = any(name.endswith("bias") for name in found)
    normed, sunk = (any(word in name for name in found) for word in ("norm", "sink"))
    layer = MultiHeadAttention(width, heads, bias=biased, qk_norm=normed, sinks=sunk, dtype=torch.float64, **options)
    load_weights(layer, found, layout)
    return Reading(Weights.of(layer), [f"read in the layout {layout!r}"])


@dataclass
class _Builder:
    module: nn.Module
    found: dict[str, Tensor]
    E: int
    H: int
    options: dict[str, Any]

    def owner(self, name: str) -> nn.Module:
        return self.module.get_submodule(name.rpartition(".")[0])

    def by_role(self) -> dict[str, list[str]]:
        """The parameters' names by what they mean; a norm is one by its type too, whatever it stands in."""
        found: dict[str, list[str]] = {}
        for name in self.found:
            meant = role(name) or "?"
            if "norm" in type(self.owner(name)).__name__.lower() and not meant.endswith("norm"):
                meant = f"{meant} norm" if meant in ("q", "k") else "?"
            found.setdefault(meant, []).append(name)
        return found

    def stored(self, name: str) -> str | None:
        """How a matrix is stored: "out, in", "in, out", or None where only its use would tell."""
        owner = self.owner(name)
        if isinstance(owner, nn.Linear) or name.endswith("in_proj_weight"):
            return "out, in"
        return "in, out" if type(owner).__name__ == "Conv1D" else None

    def matrix(self, name: str, width: int | None, raw: str) -> Tensor:
        """A parameter as (in, out); `raw` says how plain square parameters are stored."""
        t = self.found[name]
        stored = self.stored(name)
        if t.dim() == 3:
            return self.three(t, width)
        if stored is None and t.shape[0] != t.shape[1]:
            stored = "in, out" if t.shape[0] == width else "out, in"
        return t if (stored or raw) == "in, out" else t.T

    def three(self, t: Tensor, width: int | None) -> Tensor:
        """(E,H,D), (H,E,D) or (H,D,E) as (E, H·D); for W_o (width None) (H,V,E) or (E,H,V) as (H·V, E)."""
        if width is None:
            return t.flatten(0, 1) if t.shape[0] == self.H else t.permute(1, 2, 0).flatten(0, 1)
        if t.shape[0] == width and t.shape[1] <= self.H:
            return t.flatten(1)
        if t.shape[1] == width:
            return t.permute(1, 0, 2).flatten(1)
        return t.permute(2, 0, 1).flatten(1)

    def named(self, by_role: dict[str, list[str]]) -> Iterator[Reading]:
        """Readings by name: one, or one for each way plain square parameters may be stored."""
        raws = [("in, out", "in, out")]
        plain = [n for r in ("q", "k", "v", "o", "qkv") for n in by_role.get(r, []) if self.found[n].dim() == 2]
        if any(self.stored(n) is None for n in plain):
            raws += [("out, in", "out, in"), ("in, out", "out, in"), ("out, in", "in, out")]
        for raw, raw_o in raws:
            how = ["read by name"]
            if len(raws) > 1:
                how.append(f"plain parameters read as ({raw}), the output as ({raw_o})")
            w, b = self.gather(by_role, raw, raw_o)
            yield self.reading(w, b, how, by_role)

    def gather(self, by_role: dict[str, list[str]], raw: str, raw_o: str) -> tuple[dict, dict]:
        w: dict[str, Tensor] = {}
        b: dict[str, Tensor | None] = dict.fromkeys("qkvo")
        C = self.options.get("context_dim") or self.E
        for letters in ("qkv", "kv", "q", "k", "v", "o"):
            names = by_role.get(letters, [])
            matrices = [n for n in names if self.found[n].dim() >= 2]
            biases = [n for n in names if self.found[n].dim() == 1]
            if not matrices:
                continue
            width = None if letters == "o" else self.E if letters[0] == "q" else C
            raw_here = raw_o if letters == "o" else raw
            whole = torch.cat([self.matrix(n, width, raw_here) for n in matrices], 1)  # several: one for each head
            parts = self.cut(whole, letters)
            w |= parts
            bias = torch.cat([self.found[n] for n in biases]) if biases else None
            if bias is not None and bias.numel() == whole.shape[1]:
                b |= {m: t[0] for m, t in self.cut(bias[None], letters).items()}
        return w, b

    def cut(self, whole: Tensor, letters: str) -> dict[str, Tensor]:
        """A packed matrix, (in, out), per matrix."""
        if len(letters) == 1:
            return {letters: whole}
        D = self.options.get("head_dim") or self.E // self.H
        q = self.H * D if letters == "qkv" else 0
        rest = (whole.shape[1] - q) // 2
        sizes = [q, rest, rest] if q else [rest, rest]
        return dict(zip(letters, whole.split(sizes, 1)))

    def shaped(self) -> Iterator[Reading]:
        """Readings by shape, in the order of declaration; then by search, with q before k always."""
        matrices = [n for n, t in self.found.items() if t.dim() == 2]
        E = self.E
        packed = [n for n in matrices if sorted(self.found[n].shape) == sorted((E, 3 * E))]
        square = [n for n in matrices if self.found[n].shape == (E, E)]
        if packed and square:
            orders = [{"qkv": packed[0], "o": name} for name in square]
        elif len(square) >= 4:
            every = [dict(zip("qkvo", order)) for order in permutations(square[:5], 4)]
            orders = [order for order in every if square.index(order["q"]) < square.index(order["k"])]
            orders.sort(key=lambda order: [square.index(order[m]) for m in "qkvo"])
        else:
            listed = ", ".join(f"{n} {tuple(t.shape)}" for n, t in self.found.items())
            raise Unreadable(
                f"its parameters ({listed}) were not recognised as W_q, W_k, W_v and W_o: name them in a map "
                "(weights=, --weights map.toml), or give reference=, a layer with the same weights"
            )
        for number, order in enumerate(orders):
            by_role = {letters: [name] for letters, name in order.items()}
            for letters, name in order.items():
                bias = f"{name.rpartition('.')[0]}.bias".lstrip(".")
                by_role[letters] += [bias] if bias in self.found and bias != name else []
            said = ", ".join(f"{name} as W_{letters}" for letters, name in order.items())
            how = [f"read by shape, in the order of declaration: {said}" if not number else f"read by search: {said}"]
            how.append("names do not tell q from k: the one declared first was taken for q, so a swap of the two shows "
                       "only against that order")  # fmt: skip
            for reading in self.named(by_role):
                reading.how = how + reading.how[1:]
                yield reading

    def mapped(self, names: Mapping[str, Any]) -> Reading:
        """The reading that a map says: q, k, v, o (or qkv) = "name", or a table with weight, bias and stored."""
        w: dict[str, Tensor] = {}
        b: dict[str, Tensor | None] = dict.fromkeys("qkvo")
        for letters, entry in names.items():
            if letters not in ("q", "k", "v", "o", "qkv", "kv"):
                raise ValueError(f"the map has {letters!r}: expected q, k, v, o, qkv or kv")
            table = {"weight": entry} if isinstance(entry, str) else dict(entry)
            if unknown := table.keys() - {"weight", "bias", "stored"}:
                raise ValueError(f"the map's {letters} has {sorted(unknown)}: expected weight, bias and stored")
            for what in ("weight", "bias"):
                if what in table and table[what] not in self.found:
                    raise ValueError(
                        f"the map's {letters} names {table[what]!r}, but the parameters are {', '.join(self.found)}"
                    )
            name = table["weight"]
            bias = table.get("bias", f"{name.rpartition('.')[0]}.bias")
            stored = table.get("stored", self.stored(name) or "in, out")
            if stored not in ("in, out", "out, in"):
                raise ValueError(f"the map's {letters} has stored={stored!r}: expected 'in, out' or 'out, in'")
            t = self.found[name]
            if t.dim() == 3:
                t = self.three(t, None if letters == "o" else self.E)
            else:
                t = t if stored == "in, out" else t.T
            w |= self.cut(t, letters)
            if bias in self.found and bias != name:
                b |= {m: part[0] for m, part in self.cut(self.found[bias][None], letters).items()}
        if missing := set("qkvo") - w.keys():
            raise ValueError(f"the map lacks {', '.join(sorted(missing))}: expected q, k, v (or qkv) and o")
        return self.reading(w, b, ["read by the map"], self.by_role())

    def reading(self, w: dict, b: dict, how: list[str], by_role: dict[str, list[str]]) -> Reading:
        """Plain matrices (in, out), made into heads and checked against each other."""
        H, D = self.H, w["q"].shape[1] // self.H
        G = max(w["k"].shape[1] // max(D, 1), 1)
        V = w["v"].shape[1] // G
        s = Sizes(self.E, H, G, D, V, w["k"].shape[0])
        expected = {"q": (s.E, H * D), "k": (s.C, G * D), "v": (s.C, G * V), "o": (H * V, s.E)}
        for name, shape in expected.items():
            if tuple(w[name].shape) != shape or H % G:
                raise Unreadable(
                    f"W_{name} was read as {tuple(w[name].shape)}: expected {shape} (in, out) for E={s.E}, H={H}, "
                    f"G={G}, D={D}, V={V}; name the parameters in a map (weights=, --weights map.toml)"
                )
        shape_of = {"q": (H, D), "k": (G, D), "v": (G, V)}
        heads = {m: w[m].unflatten(1, shape_of[m]) for m in "qkv"} | {"o": w["o"].unflatten(0, (H, V))}
        biases = {m: None if b[m] is None else b[m].unflatten(0, shape_of[m]) for m in "qkv"} | {"o": b["o"]}
        norm, eps = None, 1e-6
        if by_role.get("q norm") and by_role.get("k norm"):
            q_norm, k_norm = (self.found[by_role[f"{m} norm"][0]] for m in "qk")
            if q_norm.numel() == D == k_norm.numel():
                norm = (q_norm, k_norm)
                eps = getattr(self.owner(by_role["q norm"][0]), "eps", None) or torch.finfo(q_norm.dtype).eps
        sinks = next((self.found[n].flatten() for n in by_role.get("sinks", []) if self.found[n].numel() == H), None)
        rope = self.options.get("rope")
        weights = Weights(
            s, heads, biases,
            scale=self.options.get("scale") or D**-0.5,
            rope=RoPE() if rope is True else rope or None,
            norm=norm, eps=eps,
            softcap=self.options.get("softcap"),
            sinks=sinks,
        )  # fmt: skip
        return Reading(weights, how)

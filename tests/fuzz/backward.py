"""Random gradients: every way in which q, k and v can be one another, and every way to ask for a gradient."""

from __future__ import annotations

import functools
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

Leaves = list[Tensor]
PlainLoss = Callable[[Leaves, plain.Product], Tensor]


@dataclass(frozen=True)
class Alias:
    """How q, k and v come from the leaves: what it asks of the sizes, the leaves' shapes, and the views."""

    fit: Callable[[Sizes], Sizes]
    shapes: Callable[[Sizes], list[tuple[int, ...]]]
    build: Callable[[Leaves, Sizes], tuple[Tensor, Tensor, Tensor]]


def _square(s: Sizes) -> Sizes:
    return Sizes(s.B, s.G, s.G, s.K, s.K, s.D, s.D)


ALIASES: dict[str, Alias] = {
    "apart": Alias(
        lambda s: s,
        lambda s: [(s.B, s.H, s.Q, s.D), (s.B, s.G, s.K, s.D), (s.B, s.G, s.K, s.V)],
        lambda t, s: (t[0], t[1], t[2]),
    ),
    "not leaves": Alias(
        lambda s: s,
        lambda s: [(s.B, s.H, s.Q, s.D), (s.B, s.G, s.K, s.D), (s.B, s.G, s.K, s.V)],
        lambda t, s: (t[0] * 1, t[1] * 1, t[2] * 1),
    ),
    "q=k=v": Alias(_square, lambda s: [(s.B, s.G, s.K, s.D)], lambda t, s: (t[0], t[0], t[0])),
    "q=k": Alias(
        lambda s: Sizes(s.B, s.G, s.G, s.K, s.K, s.D, s.V),
        lambda s: [(s.B, s.G, s.K, s.D), (s.B, s.G, s.K, s.V)],
        lambda t, s: (t[0], t[0], t[1]),
    ),
    "k=v": Alias(
        lambda s: Sizes(s.B, s.H, s.G, s.Q, s.K, s.D, s.D),
        lambda s: [(s.B, s.H, s.Q, s.D), (s.B, s.G, s.K, s.D)],
        lambda t, s: (t[0], t[1], t[1]),
    ),
    "q=v": Alias(_square, lambda s: [(s.B, s.G, s.K, s.D)] * 2, lambda t, s: (t[0], t[1], t[0])),
    "one packed tensor": Alias(
        _square,
        lambda s: [(s.B, s.K, 3, s.G, s.D)],
        lambda t, s: tuple(t[0][:, :, i].transpose(1, 2) for i in range(3)),  # type: ignore[return-value]
    ),
    "v a part of k": Alias(
        lambda s: Sizes(s.B, s.H, s.G, s.Q, s.K, s.D, min(s.D, s.V)),
        lambda s: [(s.B, s.H, s.Q, s.D), (s.B, s.G, s.K, s.D)],
        lambda t, s: (t[0], t[1], t[1][..., : s.V]),
    ),
    "overlapping views": Alias(
        lambda s: Sizes(s.B, s.H, s.G, s.Q, s.K, s.D, s.D),
        lambda s: [(s.B, s.H, s.Q, s.D), (s.B, s.G, s.K, s.D + 1)],
        lambda t, s: (t[0], t[1][..., 1:], t[1][..., :-1]),
    ),
    "two views of one": Alias(_square, lambda s: [(s.B, s.G, s.K, s.D)], lambda t, s: (t[0].view_as(t[0]), t[0], t[0][:])),
    "expanded": Alias(
        lambda s: s,
        lambda s: [(1, s.H, s.Q, s.D), (s.B, 1, s.K, s.D), (s.B, s.G, s.K, s.V)],
        lambda t, s: (t[0].expand(s.B, -1, -1, -1), t[1].expand(-1, s.G, -1, -1), t[2]),
    ),
}  # fmt: skip
WAYS = ("grad", "backward", "create_graph", "create_graph", "func.grad", "func.vjp", "saved on hooks", "checkpoint")
FORMS = ("contiguous", "contiguous", "contiguous", "strided", "within", "middle swapped", "negative bit", "real part")


@dataclass
class Backward:
    """The gradients of one call, of all that asks for one."""

    s: Sizes
    dtype: torch.dtype
    options: Options
    parts: list
    alias: str
    asking: list[bool]  # for each leaf, and then for sinks and bias
    way: str
    size: float
    lse: bool
    form: str
    backend: str | None
    mode: str

    @staticmethod
    def draw(rng: random.Random) -> Backward:
        alias = rng.choice(list(ALIASES))
        s = ALIASES[alias].fit(Sizes.draw(rng, 100_000))
        while s.B * s.H * s.Q * s.K * max(s.D, s.V) > 200_000:
            s = ALIASES[alias].fit(Sizes.draw(rng, 50_000))
        dtype = rng.choice(calls.DTYPES)
        form = rng.choice(FORMS)
        asking = [rng.random() < 0.8 for _ in range(5)]
        asking[0] |= not any(asking[: len(ALIASES[alias].shapes(s))])
        return Backward(
            s, dtype, Options.draw(rng, s), draw_mask(rng, s), alias, asking, rng.choice(WAYS),
            rng.choice([1.0, 1.0, 1.0, 30.0]), rng.random() < 0.3,
            form if tensors.fits(form, torch.zeros(1, dtype=dtype)) else "contiguous",
            rng.choice([None] * 6 + ["native", "reference"]),
            rng.choice(["none"] * 8 + ["default dtype float64", "function mode", "two threads", "default device meta"]),
        )  # fmt: skip

    def run(self, draw: int) -> list[Judged]:
        s, o, alias = self.s, self.options, ALIASES[self.alias]
        make = torch.Generator().manual_seed(draw)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=make, dtype=torch.float64).to(self.dtype)

        leaves, values, names = [], [], []
        given = [(f"leaf {n}", drawn(*shape)) for n, shape in enumerate(alias.shapes(s))]
        given[0][1].mul_(self.size)
        count = len(given)
        given += list(o.tensors(make, s.H, self.dtype).items())
        broad = torch.promote_types(self.dtype, torch.float32)
        d_out, d_lse = drawn(s.B, s.H, s.Q, s.V), drawn(s.B, s.H, s.Q).to(broad)
        for n, (name, t) in enumerate(given):
            placed, value = tensors.body(self.form if n < count else "contiguous", t)
            ask = self.asking[n] if n < count else self.asking[3 if name == "sinks" else 4]
            leaves.append(placed.detach().requires_grad_(ask))
            values.append(value)
            names.append(name)

        mask = mask_of(self.parts)

        def loss(leaves: Leaves) -> Tensor:
            q, k, v = alias.build(leaves[:count], s)
            extra = dict(zip(names[count:], leaves[count:]))
            options: dict[str, Any] = {"scale": o.scale, "softcap": o.softcap, "backend": self.backend, **extra}
            found = mh.attend(q, k, v, mask, return_lse=self.lse, **options)
            if not self.lse:
                return (found * d_out).sum()
            out, lse = found
            return (out * d_out).sum() + (lse.masked_fill(lse == -torch.inf, 0.0) * d_lse).sum()

        wanted = [n for n, t in enumerate(leaves) if t.requires_grad]
        lenient = self.backend is not None
        turns = [drawn(*values[n].shape) for n in wanted]  # what gradients of gradients are taken along
        gradients, second = refusing(lenient, False, lambda: self._differentiate(loss, leaves, wanted, turns))
        for n, g in zip(wanted, gradients):
            if (g.dtype, g.shape, g.device.type) != (values[n].dtype, values[n].shape, "cpu"):
                raise Wrong(f"the gradient of {names[n]} is {g.dtype} {tuple(g.shape)} on {g.device}")
        judged = self._judge(values, names, count, wanted, gradients, d_out, d_lse)
        if second is None:
            return judged
        plainly = self._plain_loss(names, count, d_out, d_lse)
        return [*judged, *judge_second(plainly, values, names, wanted, turns, second, self.dtype)]

    def _differentiate(self, loss: Any, leaves: Leaves, wanted: list[int], turns: Leaves) -> tuple[Any, Any]:
        asked = [leaves[n] for n in wanted]

        def of_asked(*asked: Tensor) -> Tensor:
            full = list(leaves)
            for n, t in zip(wanted, asked):
                full[n] = t
            return loss(full)

        with calls.MODES[self.mode]():
            match self.way:
                case "backward":
                    loss(leaves).backward()
                    return [t.grad for t in asked], None
                case "create_graph":
                    first = torch.autograd.grad(loss(leaves), asked, create_graph=True)
                    total = sum((g * turn).sum() for g, turn in zip(first, turns))
                    assert isinstance(total, Tensor)
                    try:
                        return first, torch.autograd.grad(total, asked, allow_unused=True)
                    except calls.SANE:  # gradients of gradients may be refused, wrong first ones may not
                        return first, None
                case "func.grad":
                    return torch.func.grad(of_asked, argnums=tuple(range(len(asked))))(
                        *(t.detach() for t in asked)
                    ), None
                case "func.vjp":
                    total, back = torch.func.vjp(of_asked, *(t.detach() for t in asked))
                    return back(torch.ones_like(total)), None
                case "saved on hooks":
                    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
                        return torch.autograd.grad(loss(leaves), asked), None
                case "checkpoint":
                    total = torch.utils.checkpoint.checkpoint(of_asked, *asked, use_reentrant=False)
                    return torch.autograd.grad(total, asked), None
            return torch.autograd.grad(loss(leaves), asked), None

    def _plain_loss(self, names: list[str], count: int, d_out: Tensor, d_lse: Tensor) -> PlainLoss:
        """The loss of the same call by the plain implementation, in whatever dtype the leaves have."""
        s, o = self.s, self.options
        scale = s.D**-0.5 if o.scale is None else o.scale
        shown = torch.from_numpy(oracle.visible(self.parts, s.B, s.H, s.Q, s.K))

        def loss(leaves: Leaves, order: plain.Product) -> Tensor:
            q, k, v = ALIASES[self.alias].build(leaves[:count], s)
            more, dtype = dict(zip(names[count:], leaves[count:])), q.dtype
            out, lse = plain.attend(q, k, v, shown, scale, o.softcap, more.get("sinks"), more.get("bias"), order)
            total = (out * d_out.to(dtype)).sum()
            return total + (lse.masked_fill(lse == -torch.inf, 0.0) * d_lse.to(dtype)).sum() if self.lse else total

        return loss

    def _judge(self, values: Leaves, names: list[str], count: int, wanted: list[int], gradients: Any, d_out: Tensor,
               d_lse: Tensor) -> list[Judged]:  # fmt: skip
        s, o, alias = self.s, self.options, ALIASES[self.alias]
        scale = s.D**-0.5 if o.scale is None else o.scale
        extra = dict(zip(names[count:], values[count:]))
        seen = oracle.visible(self.parts, s.B, s.H, s.Q, s.K)
        wide = [t.double().requires_grad_() for t in values[:count]]
        made = alias.build(wide, s)
        a = oracle.attend(*(t.detach().numpy() for t in made), seen, scale, o.softcap,
                          *(extra[n].double().numpy() if n in extra else None for n in ("sinks", "bias")))  # fmt: skip
        by_hand = oracle.gradients(a, d_out.double().numpy(), d_lse.double().numpy() if self.lse else None)
        back = [torch.from_numpy(by_hand[n].astype(np.float64)) for n in ("q", "k", "v")]
        joined = torch.autograd.grad(made, wide, back)
        exact = {n: g.numpy().astype(np.longdouble) for n, g in enumerate(joined)}
        for n, name in enumerate(names[count:], count):
            exact[n] = by_hand["sinks"] if name == "sinks" else oracle.summed_to(by_hand["bias"], values[n].shape)

        loss = self._plain_loss(names, count, d_out, d_lse)

        @functools.cache
        def plainly(order: plain.Product) -> Leaves:
            own = [t.detach().clone().requires_grad_() for t in values]
            return filled(torch.autograd.grad(loss(own, order), own, allow_unused=True), own)

        judged = [
            judge(f"gradient of {names[n]}", g, exact[n], lambda order, n=n: plainly(order)[n], self.dtype)
            for n, g in zip(wanted, gradients)
        ]
        for verdict in judged:
            verdict.most += torch.finfo(self.dtype).eps * cancelled(made, d_out, d_lse if self.lse else None, scale)
        return judged


def cancelled(made: Leaves, d_out: Tensor, d_lse: Tensor | None, scale: float) -> float:
    """The size of what cancels in a gradient of scores: w·(d_weight − Σ w·d_weight) is 0 where one weight is nearly 1.

    Its rounding, of the size of d_weight and not of the difference, goes into every gradient that is made of it: the
    condition number of decision 6. Plain cancels to exactly 0 where both terms are the same number.
    """
    q, k, v = (t.detach().double().abs() for t in made)
    if not (q.numel() and k.numel()):
        return 0.0
    d_weight = float((d_out.double().abs().sum(-1).max() * v.max()) if v.numel() else 0.0)
    d_weight += 0.0 if d_lse is None else float(d_lse.double().abs().max())
    rows = q.shape[1] // k.shape[1] * q.shape[2]  # whose gradients a key adds up
    return d_weight * max(abs(scale) * float(torch.maximum(q.max(), k.max())), 1.0) * rows


def filled(gradients: Any, leaves: Leaves) -> Leaves:
    """Zeros where torch says that nothing depends on a leaf."""
    return [torch.zeros_like(t) if g is None else g for g, t in zip(gradients, leaves)]


def judge_second(loss: PlainLoss, values: Leaves, names: list[str], wanted: list[int], turns: Leaves, found: Any,
                 dtype: torch.dtype) -> list[Judged]:  # fmt: skip
    """Gradients of gradients, against float64 autograd of the plain implementation, twice."""

    @functools.cache
    def plainly(order: plain.Product, dtype: torch.dtype) -> Leaves:
        own = [t.detach().to(dtype).requires_grad_() for t in values]
        asked = [own[n] for n in wanted]
        first = torch.autograd.grad(loss(own, order), asked, create_graph=True, allow_unused=True)
        total = sum((g * turn.to(dtype)).sum() for g, turn in zip(filled(first, asked), turns))
        assert isinstance(total, Tensor)
        if not total.requires_grad:
            return [torch.zeros_like(t) for t in asked]
        return filled(torch.autograd.grad(total, asked, allow_unused=True), asked)

    judged = []
    for at, (n, g) in enumerate(zip(wanted, filled(found, [values[n] for n in wanted]))):
        exact = plain.numbers(plainly(torch.matmul, torch.float64)[at])
        # Of what float16 cannot hold, an infinity is the nearest that it has.
        beyond = (np.abs(exact) > torch.finfo(dtype).max) & (plain.numbers(g) == np.sign(exact) * np.inf)
        exact = np.where(beyond, np.sign(exact) * np.inf, exact)
        verdict = judge(
            f"second gradient of {names[n]}", g, exact, lambda order, at=at: plainly(order, dtype)[at], dtype
        )
        # What cancels in a second derivative has no size of its own here: so many roundings of the first are allowed.
        size = max([1.0, *(float(t.detach().double().abs().max()) for t in (*values, *turns) if t.numel())])
        verdict.most += 16 * torch.finfo(dtype).eps * size**4
        if dtype == torch.float64:  # the oracle's own error is of the same size
            verdict.most += 256 * torch.finfo(dtype).eps * max(1.0, float(np.abs(exact).max(initial=0)))
        judged.append(verdict)
    return judged

"""Attention as its definition says it, in any dtype, and the native call on the same arguments."""

from __future__ import annotations

import functools
import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from multihead import _native

ISAS = _native.instruction_sets()
M32 = 0xFFFFFFFF


def mix32(x: Tensor) -> Tensor:
    x = (x ^ (x >> 16)) * 0x7FEB352D & M32
    x = (x ^ (x >> 15)) * 0x846CA68B & M32
    return x ^ (x >> 16)


def kept(seed: int, p: float, B: int, H: int, Q: int, K: int) -> Tensor:
    """Which weights dropout keeps, (B,H,Q,K)."""
    b, h, q, k = (torch.arange(n) for n in (B, H, Q, K))
    row = mix32(torch.tensor(seed & M32))
    row = mix32(row ^ (seed >> 32))
    row = mix32(row ^ b)[:, None]
    row = mix32(row ^ h)[:, :, None]
    row = mix32(row ^ q)[..., None]
    bits = mix32(row ^ mix32((k + 0x9E3779B9) & M32))
    return bits >= min(int(p * 2**32), M32)


def one_by_one(a: Tensor, b: Tensor) -> Tensor:
    """A matrix product that rounds every operation: no fused multiply-add, no clever order."""
    if not a.shape[-1]:
        return torch.matmul(a, b)
    total = a[..., :0].sum(-1, keepdim=True) * b[..., :1, :].nan_to_num()
    for i in range(a.shape[-1]):
        total = total + a[..., i, None] * b[..., i, None, :]
    return total


def from_the_end(a: Tensor, b: Tensor) -> Tensor:
    """The same in the opposite order: on a handful of numbers one order is sometimes lucky."""
    return one_by_one(a.flip(-1), b.flip(-2))


REMEMBERED = 16  # answers: the tests of one call on every instruction set stand together


def remembered(answer: Callable) -> Callable:
    """An answer about a problem, once for all that ask it of the same numbers."""
    known: OrderedDict[tuple, Any] = OrderedDict()

    @functools.wraps(answer)
    def ask(problem: Problem, *given: Any) -> Any:
        key = (problem.key(), *given)
        if key not in known:
            known[key] = answer(problem, *given)
            if len(known) > REMEMBERED:
                known.popitem(last=False)
        known.move_to_end(key)
        return known[key]

    return ask


@dataclass
class Problem:
    """Everything one call is given. `start` and `stop` are None, a ramp (offset, low, high) or an integer tensor."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    start: Any = None
    stop: Any = None
    allowed: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    softcap: float = 0.0
    dropout: float = 0.0
    seed: int = 0

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        (B, H, Q, D), G, K, V = self.q.shape, self.k.shape[1], self.k.shape[2], self.v.shape[3]
        return B, H, G, Q, K, D, V

    def key(self) -> tuple:
        """The same for the same numbers: what is right for one call is right on every instruction set."""

        def of(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            bits = value.detach().contiguous().view(torch.uint8).numpy().tobytes() if value.numel() else b""
            return value.dtype, tuple(value.shape), hashlib.sha256(bits).digest()

        return tuple(of(value) for value in vars(self).values())

    def visible(self) -> Tensor:
        """(B,H,Q,K), what each query sees."""
        B, H, _, Q, K, _, _ = self.sizes
        key, query = torch.arange(K), torch.arange(Q)[:, None]

        def bound(given: Any, otherwise: int) -> Any:
            if given is None:
                return otherwise
            if isinstance(given, tuple):
                return (query + given[0]).clamp(given[1], given[2])
            return given[..., None]

        seen = (key >= bound(self.start, 0)) & (key < bound(self.stop, K))
        seen = torch.broadcast_to(seen, (B, H, Q, K))
        if self.allowed is not None:
            seen = seen & self.allowed
        if self.bias is not None:
            seen = seen & (self.bias != -math.inf)
        return seen

    def scores(self, dtype: torch.dtype, product: Callable = torch.matmul) -> Tensor:
        group = self.q.shape[1] // self.k.shape[1]
        k = self.k.to(dtype).repeat_interleave(group, 1)
        scores = product(self.q.to(dtype), k.mT) * self.scale
        if self.softcap:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if self.bias is not None:
            scores = scores + self.bias.to(dtype)
        return scores.masked_fill(~self.visible(), -math.inf)

    def weights(self, dtype: torch.dtype, product: Callable = torch.matmul) -> tuple[Tensor, Tensor]:
        """Weights before dropout, and the log-sum-exp."""
        scores = self.scores(dtype, product)
        if self.sinks is not None:
            sink = self.sinks.to(dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sink], -1)
        lse = torch.logsumexp(scores, -1) if scores.shape[-1] else scores.new_full(scores.shape[:3], -math.inf)
        seen = (scores != -math.inf).any(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(~seen, 0.0), -1).masked_fill(~seen, 0.0)
        return weights[..., : self.k.shape[2]], lse

    def plain(self, dtype: torch.dtype, product: Callable = torch.matmul) -> tuple[Tensor, Tensor]:
        """Every operation in `dtype`; hidden values take no part."""
        B, H, G, Q, K, _, _ = self.sizes
        weights, lse = self.weights(dtype, product)
        if self.dropout:
            keep = kept(self.seed, self.dropout, B, H, Q, K)
            weights = weights * keep / (1 - self.dropout) if self.dropout < 1 else weights * 0
        v = self.v.to(dtype).repeat_interleave(H // G, 1)
        if torch.isfinite(v).all():
            return product(weights, v), lse
        mixed = weights[..., None] * v[:, :, None]
        return mixed.masked_fill(~self.visible()[..., None], 0.0).sum(-2), lse

    def read(self, v: Tensor | None, dropout: float | None = None) -> Any:
        """The call as the kernel reads it, off any object that has these names."""
        numbers = {"scale": self.scale, "softcap": self.softcap or None}
        numbers["dropout"] = self.dropout if dropout is None else dropout
        call = _native.attention(SimpleNamespace(q=self.q, k=self.k, v=v, bias=self.bias, sinks=self.sinks, **numbers))
        if isinstance(call, tuple):
            raise ValueError(call[0])
        hidden = call.see(
            SimpleNamespace(start=_bound(self.start, 0), stop=_bound(self.stop, self.k.shape[2]), dense=self.allowed)
        )
        assert hidden is None, hidden
        call.seed = self.seed
        return call

    def copy(self) -> Problem:
        """With tensors of its own: what is asked of it later is asked of the numbers of now."""
        return replace(self, **{name: t.clone() for name, t in vars(self).items() if isinstance(t, Tensor)})

    @property
    def wide(self) -> torch.dtype:
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def native(self, isa: str = "", threads: int = 2, out: Tensor | None = None, **more: Any) -> tuple[Tensor, Tensor]:
        B, H, _, Q, _, _, V = self.sizes
        out = torch.full((B, H, Q, V), math.nan, dtype=self.q.dtype) if out is None else out
        lse = torch.full((B, H, Q), math.nan, dtype=self.wide)
        self.read(self.v).attend(threads, isa, out=out, lse=lse, **more)
        return out, lse

    def scan(self, isa: str = "", threads: int = 2, **more: Any) -> Tensor:
        """A pass over the scores alone, which leaves the state (B,H,Q,2) that `look` starts from."""
        B, H, _, Q, _, _, _ = self.sizes
        state = torch.full((B, H, Q, 2), math.nan, dtype=self.wide)
        self.read(None, dropout=0.0).attend(threads, isa, state=state, **more)
        return state

    def given(self, state: Tensor, isa: str = "", threads: int = 2, **more: Any) -> None:
        """A pass over the scores whose state is known."""
        self.read(None, dropout=0.0).attend(threads, isa, given=state, **more)

    def look(self, state: Tensor, isa: str = "", threads: int = 2, **more: Any) -> None:
        self.read(None, dropout=0.0).look(threads, isa, given=state, **more)

    def native_gradients(self, d_out: Tensor, d_lse: Tensor | None = None, isa: str = "",
                         threads: int = 2) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        B, H, _, Q, _, _, _ = self.sizes
        state = torch.full((B, H, Q, 2), math.nan, dtype=self.wide)
        self.native(isa, threads, state=state)
        delta = torch.empty(B, H, Q, 2, dtype=self.wide)
        grads = [torch.full_like(t, math.nan, memory_format=torch.contiguous_format) for t in (self.q, self.k, self.v)]
        into = dict(zip(("d_q", "d_k", "d_v"), grads, strict=True))
        self.read(self.v).backward(threads, isa, d_out=d_out, d_lse=d_lse, state=state, delta=delta, **into)
        return grads[0], grads[1], grads[2]

    def plain_gradients(self, dtype: torch.dtype, d_out: Tensor, d_lse: Tensor | None = None,
                        product: Callable = torch.matmul) -> list[Tensor]:  # fmt: skip
        """By autograd, every operation in `dtype`."""
        inputs = [t.to(dtype).detach().requires_grad_() for t in (self.q, self.k, self.v)]
        own = replace(self, q=inputs[0], k=inputs[1], v=inputs[2])
        out, lse = own.plain(dtype, product)
        total = (out * d_out.to(dtype)).sum()
        if d_lse is not None:
            total = total + (lse.masked_fill(lse == -math.inf, 0.0) * d_lse.to(dtype)).sum()
        return [g.detach() for g in torch.autograd.grad(total, inputs)]


def _bound(given: Any, otherwise: int) -> Any:
    if isinstance(given, Tensor):
        return given
    offset, low, high = (0, otherwise, otherwise) if given is None else given
    return SimpleNamespace(offset=offset, low=low, high=high)


def error(given: Tensor, exact: Tensor) -> float:
    """The largest absolute error; infinities and NaN must agree."""
    given, exact = given.double(), exact.double()
    special = ~torch.isfinite(exact)
    assert torch.equal(torch.isnan(given), torch.isnan(exact)), "NaN in other places"
    assert torch.equal(given[special].nan_to_num(), exact[special].nan_to_num()), "infinities in other places"
    return (given - exact)[~special].abs().max().item() if (~special).any() else 0.0


def rounding(exact: Tensor, dtype: torch.dtype) -> float:
    finite = exact[torch.isfinite(exact)]
    return torch.finfo(dtype).eps * (finite.abs().max().item() if finite.numel() else 0.0)


@dataclass
class Judged:
    """An error, and the most that it may be."""

    found: float
    most: float


@dataclass
class Wanted:
    """A right answer, and how wrong one may be: twice as far from it as `plain(product)`, and `own` more.

    torch's product is one way to round every operation; where it was lucky, those in other orders speak too. In float64
    the oracle's own error is of the same size, so that `own` alone decides.
    """

    exact: Tensor
    own: float
    plain: Callable[[Callable], Tensor] | None = None
    known: list[float] = field(default_factory=list)  # bounds, as far as they were needed

    def bounds(self) -> Iterator[float]:
        if self.plain is None:
            yield self.own
            return
        for n, product in enumerate((torch.matmul, one_by_one, from_the_end)):
            if n == len(self.known):
                self.known.append(2 * error(self.plain(product), self.exact) + self.own)
            yield self.known[n]

    def bound(self) -> float:
        return max(self.bounds())

    def judge(self, ours: Tensor) -> Judged:
        judged = Judged(error(ours, self.exact), 0.0)
        for bound in self.bounds():
            judged.most = max(judged.most, bound)
            if judged.found <= judged.most:
                break
        return judged


@remembered
def wanted(problem: Problem) -> tuple[Wanted, Wanted]:
    """The output, and the log-sum-exp."""
    problem = problem.copy()
    exact, exact_lse = problem.plain(torch.float64)
    dtype = problem.q.dtype
    if dtype == torch.float64:
        most = 64 * (rounding(exact_lse, dtype) + torch.finfo(dtype).eps)
        return Wanted(exact, 64 * rounding(problem.v, dtype)), Wanted(exact_lse, most)
    own = rounding(exact_lse, torch.float32)  # the log-sum-exp is float32 whatever the tensors are
    plain = functools.cache(problem.plain)
    return (
        Wanted(exact, rounding(exact, dtype), lambda product: plain(dtype, product)[0]),
        Wanted(exact_lse, own, lambda product: plain(torch.float32, product)[1]),
    )


def judge_both(problem: Problem, isa: str, **call: Any) -> tuple[Judged, Judged]:
    """Of the output, and of the log-sum-exp."""
    found = problem.native(isa, **call)
    out, lse = (one.judge(ours) for one, ours in zip(wanted(problem), found, strict=True))
    return out, lse


def assert_fine(judged: Sequence[Judged]) -> None:
    """Of one draw, or of several on the mean."""
    found, most = sum(j.found for j in judged), sum(j.most for j in judged)
    assert found <= most, f"error {found / len(judged):.3g}, at most {most / len(judged):.3g} is allowed"


def assert_within_bound(problem: Problem, isa: str, **call: Any) -> None:
    """At most twice the error of the plain implementation in the same dtype."""
    for judged in judge_both(problem, isa, **call):
        assert_fine([judged])


def random(B: int, H: int, G: int, Q: int, K: int, D: int, V: int, dtype: torch.dtype = torch.float32, draw: int = 0,
           **options: Any) -> Problem:  # fmt: skip
    make = torch.Generator().manual_seed(draw)
    q, k, v = (torch.randn(B, h, n, d, generator=make, dtype=torch.float64).to(dtype)
               for h, n, d in ((H, Q, D), (G, K, D), (G, K, V)))  # fmt: skip
    return Problem(q, k, v, **{"scale": D**-0.5, **options})


def causal(Q: int, K: int) -> dict:
    return {"stop": (K - Q + 1, 0, K)}


def window(Q: int, K: int, left: int, right: int) -> dict:
    return {"start": (K - Q - left, 0, K), "stop": (K - Q + right + 1, 0, K)}

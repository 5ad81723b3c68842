"""The table of attention cases: sizes that are distinct, so that a swapped axis cannot pass, and why each is there.

Correctness tests run every case on every backend, and the rows marked `kernel` on every instruction set of the core
(tests/native), in a program without Python too; the error bound is decision 6 of the design.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import multihead as mh
from multihead import steps
from multihead.attention import BACKENDS
from multihead.masks import lower
from multihead.masks.intervals import Frame
from tests.fuzz import oracle


def block_lower(H: int, Q: int, K: int) -> Tensor:
    """A different dense mask for each head, with some rows that see nothing."""
    allowed = torch.rand(H, Q, K, generator=torch.Generator().manual_seed(7)) < 0.6
    allowed[0, Q // 2] = False
    return allowed


def fused(q: Tensor, k: Tensor) -> Tensor:
    """q·kᵀ as torch's libraries sum it: in several parts, with fused multiply-add."""
    return torch.einsum("bhqd,bhkd->bhqk", q, k)


def one_by_one(q: Tensor, k: Tensor) -> Tensor:
    """q·kᵀ with every operation rounded: no fused multiply-add, no clever order."""
    total = torch.zeros(*q.shape[:3], k.shape[2], dtype=q.dtype)
    for d in range(q.shape[-1]):
        total = total + q[..., d, None] * k[:, :, None, :, d]
    return total


def from_the_end(q: Tensor, k: Tensor) -> Tensor:
    """The same in the opposite order: on a handful of numbers one order is sometimes lucky."""
    return one_by_one(q.flip(-1), k.flip(-1))


ORDERS = (fused, one_by_one, from_the_end)


@dataclass(frozen=True)
class Case:
    """One call of attend, made of seeded numbers."""

    B: int
    H: int
    G: int
    Q: int
    K: int
    D: int
    V: int
    mask: Any
    why: str
    options: dict[str, Any] = field(default_factory=dict)
    bias: Callable[["Case"], Tensor] | None = None
    sinks: bool = False
    size: float = 1.0  # of the numbers in q: 1 gives scores of about ±1
    kernel: bool = False  # a row of tests/native too, which adds options and dtypes of its own

    def tensors(self, dtype: torch.dtype) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.B + 3 * self.H + 5 * self.Q + 7 * self.K + 11 * self.D)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        made: dict[str, Any] = {
            "q": draw(self.B, self.H, self.Q, self.D) * self.size,
            "k": draw(self.B, self.G, self.K, self.D),
            "v": draw(self.B, self.G, self.K, self.V),
        }
        if self.sinks:
            made["sinks"] = draw(self.H)
        if self.bias is not None:
            made["bias"] = self.bias(self)
        return {name: t.to(dtype) for name, t in made.items()}

    def run(self, dtype: torch.dtype, backend: str, **more: Any) -> Any:
        return mh.attend(**self.tensors(dtype), mask=self.mask, backend=backend, **self.options, **more)

    def exact(self, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
        """An oracle that shares no code with the package, masks included: NumPy, in extended precision."""
        weights, lse = self.exact_weights(dtype)
        v = self.tensors(dtype)["v"].double().numpy().astype(np.longdouble)
        return np.einsum("bhqk,bhkv->bhqv", weights, np.repeat(v, self.H // self.G, axis=1)), lse

    def exact_weights(self, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
        """The weights (B,H,Q,K) and the log-sum-exp of the same oracle."""
        t = {name: tensor.double().numpy().astype(np.longdouble) for name, tensor in self.tensors(dtype).items()}
        k = np.repeat(t["k"], self.H // self.G, axis=1)
        logits = np.einsum("bhqd,bhkd->bhqk", t["q"], k) * np.longdouble(self.options.get("scale", self.D**-0.5))
        if "softcap" in self.options:
            logits = np.tanh(logits / self.options["softcap"]) * self.options["softcap"]
        logits = logits + t.get("bias", np.longdouble(0))
        if self.mask is not None:
            seen = oracle.visible(parts_of(self.mask), self.B, self.H, self.Q, self.K)
            logits = np.where(seen, logits, -np.inf)
        sink = np.broadcast_to(t["sinks"][:, None] if self.sinks else -np.inf, logits.shape[:-1])
        top = np.maximum(logits.max(-1, initial=-np.inf), sink)
        top = np.where(top == -np.inf, 0, top)
        powers = np.exp(logits - top[..., None])
        total = powers.sum(-1) + np.exp(sink - top)
        with np.errstate(divide="ignore"):
            lse = top + np.log(total)
        return powers / np.where(total == 0, 1, total)[..., None], lse

    def plain(self, dtype: torch.dtype, score: Callable = fused) -> tuple[Tensor, Tensor]:
        """The specification with every operation rounded to `dtype`."""
        weights, lse = self.plain_weights(dtype, score)
        return torch.einsum("bhqk,bhkv->bhqv", weights, steps.repeat_heads(self.tensors(dtype)["v"], self.H)), lse

    def plain_weights(self, dtype: torch.dtype, score: Callable = fused) -> tuple[Tensor, Tensor]:
        """The weights (B,H,Q,K) and the log-sum-exp of the same."""
        return steps.weigh(self.plain_scores(dtype, score), self.tensors(dtype).get("sinks"))

    def plain_scores(self, dtype: torch.dtype, score: Callable = fused) -> Tensor:
        """What the softmax sees, (B,H,Q,K)."""
        t = self.tensors(dtype)
        visible = lower(self.mask, Frame.of(self.Q, self.K), self.B, self.H)
        q, k = t["q"], steps.repeat_heads(t["k"], self.H)
        scores = score(q, k) * self.options.get("scale", self.D**-0.5)
        return steps.hide(scores, allowed=visible.allowed(), softcap=self.options.get("softcap"), bias=t.get("bias"))


def parts_of(mask: Any) -> list[oracle.Part]:
    """A mask as the oracle takes it: what it was made of, not what the package makes of it."""
    match mask:
        case mh.Causal():
            return [("causal", mask.window)]
        case mh.Window():
            return [("window", mask.left, mask.right)]
        case mh.Prefix():
            return [("prefix", mask.n.tolist() if isinstance(mask.n, Tensor) else mask.n)]
        case mh.Padding():
            return [("padding", mask.lengths.tolist(), mask.side)]
        case mh.Documents():
            keys = mask.key_lengths
            return [("documents", mask.lengths.tolist(), None if keys is None else keys.tolist())]
        case mh.Allowed():
            return [("allowed", mask.tensor.numpy())]
    return [part for one in mask.parts for part in parts_of(one)]


def max_error(found: Tensor, exact: np.ndarray) -> float:
    """The largest absolute difference; equal infinities are no difference."""
    numbers = found.detach().double().numpy().astype(np.longdouble)
    with np.errstate(invalid="ignore"):
        difference = np.where(numbers == exact, 0, np.abs(numbers - exact))
    return float(difference.max(initial=0))


def assert_within_bound(found: Tensor, plain: Tensor, exact: np.ndarray, dtype: torch.dtype) -> None:
    """Decision 6: at most twice the error of the plain implementation in the same dtype, and one rounding."""
    assert found.shape == exact.shape
    size = float(np.abs(exact[np.isfinite(exact)]).max(initial=0))
    assert max_error(found, exact) <= 2 * max_error(plain, exact) + torch.finfo(dtype).eps * size


def alibi_bias(case: Case) -> Tensor:
    distance = torch.arange(case.K) - (torch.arange(case.Q)[:, None] + case.K - case.Q)
    return -distance.abs().float() * torch.arange(1, case.H + 1)[:, None, None] / 8


def hiding_bias(case: Case) -> Tensor:
    bias = torch.randn(case.B, 1, case.Q, case.K, generator=torch.Generator().manual_seed(3))
    bias[:, :, :, ::3] = -torch.inf
    bias[:, :, 1] = -torch.inf
    return bias


CASES = [  # B  H  G   Q   K   D   V  mask
    Case(2, 6, 3, 5, 7, 11, 13, None, "all sizes distinct: a swapped axis cannot pass", kernel=True),
    Case(1, 1, 1, 1, 1, 1, 1, None, "the smallest", kernel=True),
    Case(2, 3, 1, 29, 31, 17, 19, mh.Causal(), "causal, one kv head, odd sizes", kernel=True),
    Case(1, 8, 8, 4, 4, 128, 128, mh.Causal(), "the running example"),
    Case(1, 4, 1, 1, 97, 64, 64, mh.Causal(), "decode, one kv head"),
    Case(3, 2, 2, 65, 63, 40, 40, mh.Causal(), "the first queries see nothing", kernel=True),
    Case(1, 2, 2, 17, 17, 1, 3, mh.Causal(), "heads one wide"),
    Case(1, 3, 1, 113, 203, 59, 61, mh.Causal(), "awkward sizes, many keys before the first query"),
    Case(2, 3, 3, 37, 37, 16, 16, mh.Causal(window=5), "sliding window"),
    Case(1, 2, 1, 41, 29, 8, 8, mh.Window(3, 2), "window both ways, more queries than keys"),
    Case(2, 2, 2, 13, 19, 8, 24, mh.Prefix(6), "prefix-LM"),
    Case(3, 2, 1, 11, 23, 8, 8, mh.Padding([0, 5, 23]), "right padding, one row with no key at all"),
    Case(3, 2, 2, 7, 7, 8, 8, mh.Padding([3, 1, 7], side="left") & mh.Causal(), "left padding under a causal mask"),
    Case(1, 4, 2, 31, 31, 12, 12, mh.Documents([3, 17, 11]), "packed documents"),
    Case(1, 2, 2, 10, 16, 8, 8, mh.Documents([3, 7], [9, 7]) & mh.Causal(), "documents, other keys, causal in each"),
    Case(2, 3, 3, 7, 11, 8, 8, mh.Allowed(block_lower(3, 7, 11)), "a dense mask for each head"),
    Case(1, 3, 1, 7, 11, 8, 8, mh.Causal() & mh.Allowed(block_lower(3, 7, 11)), "dense and interval together"),
    Case(2, 2, 1, 9, 14, 8, 8, mh.Causal(), "softcap", {"softcap": 2.0}, size=3.0),
    Case(2, 4, 2, 9, 14, 8, 8, mh.Causal(window=3), "sinks", sinks=True),
    Case(2, 3, 3, 17, 13, 8, 8, mh.Causal(), "sinks where the first queries see nothing", sinks=True),
    Case(2, 3, 3, 9, 14, 8, 8, None, "bias by head", bias=alibi_bias),
    Case(2, 3, 3, 9, 14, 8, 8, mh.Causal(), "bias that hides, one row of it everything", bias=hiding_bias),
    Case(1, 2, 2, 12, 12, 8, 8, mh.Causal(), "a scale of one's own", {"scale": 0.5}),
    Case(1, 2, 2, 23, 23, 32, 32, mh.Causal(), "scores of ±1e4", {"scale": 1.0}, size=2000.0),
    Case(1, 2, 1, 0, 5, 8, 8, mh.Causal(), "no queries"),
    Case(1, 2, 1, 5, 0, 8, 8, mh.Causal(), "no keys"),
    Case(1, 2, 1, 5, 0, 8, 8, None, "no keys but a sink", sinks=True),
    Case(1, 2, 2, 600, 1100, 16, 16, mh.Causal(window=300), "more than one tile of the log-sum-exp pass"),
    # sizes at which the kernel changes its way: blocks of rows, tiles of keys, a cache split into parts
    Case(
        1, 2, 1, 197, 197, 64, 64, mh.Causal(), "a vision transformer's length; several blocks and tiles", kernel=True
    ),
    Case(1, 2, 2, 113, 203, 59, 61, mh.Window(9, 2), "a narrow window skips tiles on both sides", kernel=True),
    Case(
        3,
        2,
        2,
        67,
        131,
        23,
        29,
        mh.Documents([23, 22, 22], [26, 39, 66]),
        "packed documents: bounds as a tensor",
        kernel=True,
    ),
    Case(1, 4, 1, 1, 1531, 64, 67, None, "decode: four rows share a kv head, keys are split", kernel=True),
    Case(2, 5, 5, 1, 1033, 41, 43, mh.Causal(), "decode: one row, odd widths", kernel=True),
    Case(1, 2, 1, 3, 601, 8, 5, mh.Causal(), "decode: few queries, each with its own stop", kernel=True),
    Case(1, 3, 3, 13, 2311, 37, 31, None, "few rows and many keys: split outside decode", kernel=True),
    Case(1, 1, 1, 71, 131, 512, 257, mh.Causal(), "wide heads shrink the block of rows", kernel=True),
    Case(1, 1, 1, 7, 5, 1, 1, None, "width one", kernel=True),
    Case(1, 2, 2, 31, 0, 8, 8, None, "no keys: every query sees nothing", kernel=True),
    Case(2, 2, 1, 0, 5, 8, 8, None, "no queries, no mask", kernel=True),
    Case(1, 1, 1, 9, 11, 8, 0, None, "no width of v", kernel=True),
]

by_why = {"ids": lambda case: case.why}


def accepting(case: Case, dtype: torch.dtype = torch.float32, **more: Any) -> list[str]:
    """The backends that take a case."""
    t = case.tensors(dtype)
    why = mh.explain(**t, mask=case.mask, **case.options, **more).reasons
    return [name for name in BACKENDS if not why[name].startswith("refuses")]

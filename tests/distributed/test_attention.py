"""Every method × mask × grouped heads × dtype × number of ranks: output and gradients as in one process."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
import multihead.distributed
from tests.cases import Case
from tests.distributed import bound
from tests.distributed.pool import SIZES, Pool

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class Sharded(Case):
    """A case of sizes that ranks share badly."""

    added: tuple[int, ...] | None = None  # the shape of the bias

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.Q + 3 * self.K + 5 * self.H)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        made = {"q": draw(self.B, self.H, self.Q, self.D), "k": draw(self.B, self.G, self.K, self.D)}
        made["v"] = draw(self.B, self.G, self.K, self.V)
        if self.sinks:
            made["sinks"] = draw(self.H)
        if self.added is not None:
            made["bias"] = draw(*self.added)
        return made

    def weight(self, dtype: torch.dtype) -> Tensor:
        return torch.randn(self.B, self.H, self.Q, self.V, generator=torch.Generator().manual_seed(1)).to(dtype)


def some_allowed() -> Tensor:
    allowed = torch.rand(4, 31, 31, generator=torch.Generator().manual_seed(7)) < 0.5
    allowed[0, 5] = False
    return allowed


CASES = [  # B  H  G   Q   K   D   V  mask
    Sharded(2, 4, 2, 37, 37, 6, 10, None, "everything is seen, a prime length"),
    Sharded(2, 4, 2, 41, 41, 6, 10, mh.Causal(), "causal, balanced inside"),
    Sharded(1, 6, 3, 43, 43, 4, 4, mh.Causal(window=5), "a window: most blocks do not travel"),
    Sharded(1, 4, 4, 29, 29, 4, 4, mh.Window(3, 2), "a window both ways"),
    Sharded(2, 4, 1, 31, 31, 4, 4, mh.Prefix(11), "prefix-LM, one kv head"),
    Sharded(2, 4, 4, 31, 31, 4, 4, mh.Prefix(torch.tensor([3, 19])), "a prefix for each row"),
    Sharded(3, 4, 2, 23, 23, 4, 4, mh.Padding([0, 9, 23]), "padding, one row with no key"),
    Sharded(2, 4, 2, 23, 23, 4, 4, mh.Padding([5, 21], side="left") & mh.Causal(), "left padding under a causal mask"),
    Sharded(1, 4, 2, 47, 47, 4, 4, mh.Documents([3, 17, 11, 16]) & mh.Causal(), "packed documents"),
    Sharded(2, 4, 2, 20, 20, 4, 4, mh.Documents([[3, 17], [20, 0]]), "documents that differ by row"),
    Sharded(2, 4, 2, 31, 31, 4, 4, mh.Allowed(some_allowed()), "a dense mask for each head"),
    Sharded(1, 4, 2, 31, 31, 4, 4, mh.Causal() & mh.Allowed(some_allowed()), "dense and causal together"),
    Sharded(1, 4, 2, 17, 29, 4, 8, mh.Causal(), "more keys than queries"),
    Sharded(1, 4, 2, 29, 17, 4, 8, mh.Causal(), "the first queries see nothing"),
    Sharded(2, 4, 2, 31, 31, 4, 4, mh.Causal(), "softcap", {"softcap": 1.5}),
    Sharded(2, 4, 2, 31, 31, 4, 4, mh.Causal(window=7), "sinks", sinks=True),
    Sharded(1, 4, 2, 29, 17, 4, 4, mh.Causal(), "sinks where the first queries see nothing", sinks=True),
    Sharded(2, 4, 2, 31, 31, 4, 4, mh.Causal(), "a bias for each head", added=(4, 31, 31)),
    Sharded(2, 4, 2, 31, 31, 4, 4, None, "a bias for each key", added=(2, 1, 1, 31)),
    Sharded(1, 4, 2, 19, 19, 4, 4, mh.Causal(), "a scale of one's own", {"scale": 3.0}),
    Sharded(1, 4, 2, 2, 2, 4, 4, mh.Causal(), "ranks whose slice is empty"),
    Sharded(1, 5, 5, 13, 13, 4, 4, mh.Causal(), "heads that do not divide by the ranks"),
    Sharded(1, 4, 2, 523, 523, 4, 6, mh.Causal(), "blocks long enough to travel in halves"),
    Sharded(1, 4, 2, 523, 541, 4, 6, mh.Documents([300, 223], [241, 300]), "halves, of which some are not needed"),
]


@cache
def oracle(number: int, dtype: torch.dtype) -> tuple[dict[str, Any], list[bound.Found]]:
    case = CASES[number]
    t, weight = case.tensors(dtype), case.weight(dtype)
    right = bound.exact(t, case.mask, weight, **case.options)
    return right, [bound.plain(t, case.mask, weight, order, **case.options) for order in bound.ORDERS]


def run_cases(mesh: Any, method: str, numbers: list[int]) -> dict[tuple[int, torch.dtype], dict[str, Any]]:
    """On each rank: the slices of the output and of the gradients of every case, as float64."""
    rank, ranks, found = mesh.get_local_rank(), mesh.size(), {}
    for number in numbers:
        case = CASES[number]
        for dtype in DTYPES:
            t = case.tensors(dtype)
            mine = {n: v.tensor_split(ranks, 2)[rank] if n in "qkv" else v for n, v in t.items()}
            mine = {n: v.clone().requires_grad_() for n, v in mine.items()}
            out = mh.distributed.attend(**mine, mask=case.mask, mesh=mesh, method=method, **case.options)
            (out * case.weight(dtype).tensor_split(ranks, 2)[rank]).sum().backward()
            found[number, dtype] = {
                "out": out.detach().double().numpy(), **{n: v.grad.double().numpy() for n, v in mine.items()}
            }  # fmt: skip
    return found


def judge(answers: list[Any], numbers: list[int]) -> list[str]:
    """What is wrong with the answers of all ranks to `run_cases`."""
    wrong = []
    for number in numbers:
        case = CASES[number]
        for dtype in DTYPES:
            right, plains = oracle(number, dtype)
            parts = [{n: torch.from_numpy(a) for n, a in answer[number, dtype].items()} for answer in answers]
            for name in right:
                if name in ("out", "q", "k", "v"):
                    found = torch.cat([part[name] for part in parts], 2)
                else:
                    found = torch.stack([part[name] for part in parts]).sum(0)
                label = f"{case.why}, {dtype}, {name}"
                wrong += bound.check(label, found, [p[name] for p in plains], right[name], dtype)
    return wrong


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("method", ["ring", "ulysses", "gather"])
def test_outputs_and_gradients_are_those_of_one_process(pool: Pool, method: str, ranks: int) -> None:
    numbers = list(range(len(CASES)))
    wrong = judge(pool.run(run_cases, ranks, method, numbers), numbers)
    assert not wrong, "\n".join(wrong)

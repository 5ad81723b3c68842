"""Training over several ranks gives the losses of one process, after a restart on another number of ranks too."""

from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import multihead as mh
import multihead.distributed
from tests.distributed import bound
from tests.distributed.pool import Pool

STEPS, B, N = 50, 2, 23


def make(dtype: torch.dtype = torch.float64) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(5)
    lm = mh.models.LanguageModel(vocabulary=30, width=32, heads=4, layers=2, context=9).to(dtype)
    return lm, torch.optim.AdamW(lm.parameters(), lr=3e-3)


def tokens(step: int) -> Tensor:
    return torch.randint(30, (B, N + 1), generator=torch.Generator().manual_seed(step % 7))


def train(lm: Any, optimizer: Any, mesh: Any, how: str, steps: range) -> list[float]:
    losses, by_sequence = [], how in ("ring", "ulysses", "gather")
    for step in steps:
        batch = tokens(step)
        x, y = batch[:, :-1], batch[:, 1:]
        if by_sequence:
            x, y = (t.tensor_split(mesh.size(), 1)[mesh.get_local_rank()] for t in (x, y))
        logits = torch.cat([lm(row[None]) for row in x]) if how == "row by row" else lm(x)
        loss = cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / (B * N)
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach()
        if by_sequence:
            mh.distributed.sum_gradients(lm, mesh)
            total = total.clone()
            torch.distributed.all_reduce(total, group=mesh.get_group())
        optimizer.step()
        losses.append(total.item())
    return losses


def sharded(mesh: Any, how: str) -> tuple[Any, torch.optim.Optimizer]:
    lm, _ = make()
    if how == "heads":
        mh.distributed.shard_heads(lm, mesh)
    elif how != "alone":
        mh.distributed.shard_sequence(lm, mesh, method=how)
    return lm, torch.optim.AdamW(lm.parameters(), lr=3e-3)  # of the parameters as they are now


@cache
def alone(order: str = "as it comes") -> Tensor:
    """The losses of one process in float64; `order`: one in which it may sum as well."""
    backend = "reference" if order == "reference" else None
    with mh.backend(backend) if backend else nullcontext():
        return torch.tensor(train(*make(), None, order, range(STEPS)))


def compare(found: list[float], first: int = 0) -> list[str]:
    """The bound on errors, where no wider numbers are at hand: at most twice what another order of sums makes."""
    right = alone()[first:]
    others = [alone(order)[first:] for order in ("row by row", "reference")]
    return bound.check("losses", torch.tensor(found), others, right.numpy(), torch.float64)


def fifty(mesh: Any, how: str) -> list[float]:
    return train(*sharded(mesh, how), mesh, how, range(STEPS))


@pytest.mark.parametrize(("how", "ranks"), [("ring", 3), ("ulysses", 2), ("gather", 2), ("heads", 3)])
def test_fifty_steps_give_the_losses_of_one_process(pool: Pool, how: str, ranks: int) -> None:
    assert alone()[-1] < 0.6 * alone()[0]  # it learns
    for answer in pool.run(fifty, ranks, how):
        assert not compare(answer)


def begin(mesh: Any, how: str, path: str) -> list[float]:
    lm, optimizer = sharded(mesh, how)
    losses = train(lm, optimizer, mesh, how, range(STEPS // 2))
    mh.distributed.save_checkpoint(path, lm, optimizer, group=mesh.get_group())
    return losses


def go_on(mesh: Any, how: str, path: str) -> list[float]:
    lm, optimizer = sharded(mesh, how)
    with torch.no_grad():
        for p in lm.parameters():
            p.zero_()  # what counts is what is loaded
    mh.distributed.load_checkpoint(path, lm, optimizer, group=mesh.get_group())
    return train(lm, optimizer, mesh, how, range(STEPS // 2, STEPS))


@pytest.mark.parametrize(("how", "then", "ranks", "later"), [("heads", "heads", 4, 3), ("ring", "heads", 2, 3)])
def test_restart_on_another_number_of_ranks(
    pool: Pool, tmp_path: Path, how: str, then: str, ranks: int, later: int
) -> None:
    first = pool.run(begin, ranks, how, str(tmp_path / "saved"))
    second = pool.run(go_on, later, then, str(tmp_path / "saved"))
    assert not compare(first[0] + second[0])


def test_a_checkpoint_is_read_by_one_process(pool: Pool, tmp_path: Path) -> None:
    pool.run(begin, 3, "heads", str(tmp_path / "saved"))
    lm, optimizer = make()
    mh.distributed.load_checkpoint(tmp_path / "saved", lm, optimizer)
    assert not compare(train(lm, optimizer, None, "alone", range(STEPS // 2, STEPS)), STEPS // 2)


def beside_fsdp(mesh: Any) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    lm, _ = make(torch.float32)
    mh.distributed.shard_sequence(lm, mesh)
    for block in lm.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(lm, mesh=mesh)
    batch, rank = tokens(0), mesh.get_local_rank()
    x, y = (t.tensor_split(mesh.size(), 1)[rank] for t in (batch[:, :-1], batch[:, 1:]))
    loss = cross_entropy(lm(x).flatten(0, 1), y.flatten(), reduction="sum") / (B * N)
    (loss * mesh.size()).backward()  # FSDP2 takes the mean over the ranks, and their shares are to be added
    return {name: p.grad.full_tensor().numpy() for name, p in lm.named_parameters()}


def test_beside_fsdp(pool: Pool) -> None:
    def grads(dtype: torch.dtype, row_by_row: bool = False) -> dict[str, Tensor]:
        lm, _ = make(dtype)
        x, y = tokens(0)[:, :-1], tokens(0)[:, 1:]
        logits = torch.cat([lm(row[None]) for row in x]) if row_by_row else lm(x)
        (cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / (B * N)).backward()
        return {name: p.grad for name, p in lm.named_parameters()}

    right, plains = grads(torch.float64), [grads(torch.float32, rows) for rows in (False, True)]
    with mh.backend("reference"):
        plains += [grads(torch.float32, rows) for rows in (False, True)]
    for answer in pool.run(beside_fsdp, 2):
        for name, value in right.items():
            others = [plain[name] for plain in plains]
            assert not bound.check(name, torch.as_tensor(answer[name]), others, value.numpy(), torch.float32)

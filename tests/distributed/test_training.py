"""Training over several ranks gives the losses of one process, after a restart on another number of ranks too."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import multihead as mh
import multihead.distributed
from tests.distributed.pool import Pool

STEPS, B, N = 50, 2, 23


def make() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(5)
    lm = mh.models.LanguageModel(vocabulary=30, width=32, heads=4, layers=2, context=9).double()
    return lm, torch.optim.AdamW(lm.parameters(), lr=3e-3)


def tokens(step: int) -> Tensor:
    return torch.randint(30, (B, N + 1), generator=torch.Generator().manual_seed(step % 7))


def train(lm: Any, optimizer: Any, mesh: Any, how: str, steps: range) -> list[float]:
    losses, by_sequence = [], how not in ("alone", "heads")
    for step in steps:
        batch = tokens(step)
        x, y = batch[:, :-1], batch[:, 1:]
        if by_sequence:
            x, y = (t.tensor_split(mesh.size(), 1)[mesh.get_local_rank()] for t in (x, y))
        loss = cross_entropy(lm(x).flatten(0, 1), y.flatten(), reduction="sum") / (B * N)
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
def alone() -> list[float]:
    return train(*make(), None, "alone", range(STEPS))


def fifty(mesh: Any, how: str) -> list[float]:
    return train(*sharded(mesh, how), mesh, how, range(STEPS))


@pytest.mark.parametrize(("how", "ranks"), [("ring", 3), ("ulysses", 2), ("gather", 2), ("heads", 3)])
def test_fifty_steps_give_the_losses_of_one_process(pool: Pool, how: str, ranks: int) -> None:
    right = torch.tensor(alone())
    assert right[-1] < 0.6 * right[0]  # it learns
    for answer in pool.run(fifty, ranks, how):
        found = torch.tensor(answer)
        # float64: what the order of sums leaves after 50 steps is far below anything a wrong gradient would leave
        assert float((found - right).abs().max()) < 1e-9


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
    found = torch.tensor(first[0] + second[0])
    assert float((found - torch.tensor(alone())).abs().max()) < 1e-9


def test_a_checkpoint_is_read_by_one_process(pool: Pool, tmp_path: Path) -> None:
    pool.run(begin, 3, "heads", str(tmp_path / "saved"))
    lm, optimizer = make()
    mh.distributed.load_checkpoint(tmp_path / "saved", lm, optimizer)
    found = torch.tensor(train(lm, optimizer, None, "alone", range(STEPS // 2, STEPS)))
    assert float((found - torch.tensor(alone())[STEPS // 2 :]).abs().max()) < 1e-9


def beside_fsdp(mesh: Any) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    lm, _ = make()
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
    lm, _ = make()
    batch = tokens(0)
    cross_entropy(lm(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
    for answer in pool.run(beside_fsdp, 2):
        for name, p in lm.named_parameters():
            torch.testing.assert_close(torch.as_tensor(answer[name]), p.grad, rtol=1e-9, atol=1e-12)

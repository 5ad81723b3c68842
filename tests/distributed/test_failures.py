"""A rank that dies, hangs, or comes with something else: a clear error on the others in time, naming the rank."""

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import multihead as mh
import multihead.distributed
from multihead.distributed import ring
from tests.distributed.pool import run_once

TIMEOUT = 3.0  # of the process group, seconds
HANG = 120.0  # seconds; what takes longer hangs, however busy the machine is


def stop(how: str) -> None:
    if how == "dies":
        os._exit(1)
    time.sleep(2 * HANG)


def attention(group: Any, how: str, when: str, method: str) -> Any:
    """Rank 1 fails; what the others say, and after how long."""
    rank, impatient = dist.get_rank(), dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    torch.manual_seed(0)
    layer, x = mh.MultiHeadAttention(16, heads=4), torch.randn(1, 9, 16)
    layer(x).sum().backward()  # what is imported and made on first use is there
    dist.barrier()
    if method == "heads":
        mh.distributed.shard_heads(layer, impatient)
    else:
        mh.distributed.shard_sequence(layer, impatient, method=method)
    layer(x)  # all is well
    if rank == 1:
        if when == "before":
            stop(how)
        elif when == "backward":
            layer(x, mask=mh.Causal())
            stop(how)
        else:  # in the middle of a ring: keys are awaited, and never sent
            ring.Ring._give = lambda *args: stop(how)  # type: ignore[method-assign]
    try:
        y = layer(x, mask=mh.Causal())
        y.sum().backward()
    except mh.distributed.RankLost as error:
        return str(error), error.rank
    return "no error", None


@pytest.mark.parametrize(
    ("how", "when", "method"),
    [
        ("dies", "before", "ring"),
        ("hangs", "before", "ring"),
        ("dies", "during", "ring"),
        ("hangs", "during", "ring"),
        ("hangs", "backward", "ring"),
        ("dies", "before", "heads"),
        ("hangs", "before", "ulysses"),
        ("dies", "backward", "gather"),
    ],
)
def test_a_lost_rank_is_named_in_time(how: str, when: str, method: str) -> None:
    answers = run_once(attention, 3, how, when, method, timeout=HANG, wait=HANG, but=1)
    for rank in (0, 2):
        assert answers[rank] is not None, "no answer: a hang"
        said, lost = answers[rank]
        assert lost == 1, said
        assert "rank 1" in said


def another(group: Any, what: str) -> Any:
    """Rank 2 brings something else: all of them say so, and nothing is computed."""
    odd = dist.get_rank() == 2
    torch.manual_seed(0)
    layer = mh.MultiHeadAttention(16, heads=4, scale=0.25 if what == "options" and odd else None)
    mask: Any = mh.Causal()
    if odd and what == "mask":
        mask = mh.Causal(window=3)
    if what == "lengths":
        mask = mh.Padding([5, 7 if odd else 8])
    rows = 3 if what == "sizes" and odd else 2
    method = "gather" if what == "method" and odd else "ring"
    if what == "heads":
        layer = mh.distributed.shard_heads(layer, group)
        return layer(torch.randn(2, 7 if odd else 6, 16))
    mh.distributed.shard_sequence(layer, group, method=method)
    grad = torch.no_grad() if what == "gradient" and odd else torch.enable_grad()
    with grad:
        return layer(torch.randn(rows, 5, 16), mask=mask)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("mask", "rank 2 has mask=Causal(window=3), rank 0 and rank 1 mask=Causal(window=None)"),
        ("lengths", "rank 2 has mask=Padding("),
        ("sizes", "rank 2 has B=3, rank 0 and rank 1 B=2"),
        ("method", "rank 2 has method=gather, rank 0 and rank 1 method=ring"),
        ("options", "rank 2 has options="),
        ("gradient", "rank 2 has gradient=False"),
        ("heads", "rank 2 has N=7, rank 0 and rank 1 N=6"),
    ],
)
def test_a_rank_with_something_else_is_named_by_all(what: str, said: str) -> None:
    for answer in run_once(another, 3, what, timeout=HANG):
        assert answer is not None
        assert said in answer[0]
        assert answer[2] == "ValueError"

"""One rank on a host of its own: a process in a network namespace, told what to do by lines on its standard input."""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import multihead as mh
import multihead.distributed

TIMEOUT = 6.0


def say(*words: object) -> None:
    print("SAY", *words, flush=True)


def check() -> None:
    """Every method, forward and backward, beside one process on the same numbers."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = [torch.randn(1, heads, 53, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    right = [t.clone().requires_grad_() for t in whole]
    out = mh.attend(*right, mask=mh.Causal())
    out.square().sum().backward()
    off = 0.0
    for method in ("ring", "ulysses", "gather"):
        mine = [t.tensor_split(ranks, 2)[rank].clone().requires_grad_() for t in whole]
        found = mh.distributed.attend(*mine, mh.Causal(), mesh=dist.group.WORLD, method=method)
        found.square().sum().backward()
        pairs = [(found, out), *((a.grad, b.grad) for a, b in zip(mine, right))]
        off = max(off, *(float((a - b.tensor_split(ranks, 2)[rank]).detach().abs().max()) for a, b in pairs))
    say(off)


def time_ring(tokens: int, pair: dist.ProcessGroup) -> None:
    """Of two hosts, the seconds of a ring, those of them in which it waited, and those of its transfer alone.

    Computation is what is left of the ring's own time, so that whatever else runs on this machine counts on both sides.
    """
    if dist.get_rank() > 1:
        return
    torch.manual_seed(0)
    layer, x = mh.MultiHeadAttention(256, heads=4), torch.randn(1, tokens, 256)
    mh.distributed.shard_sequence(layer, pair)
    wire, found = layer.sharding.wire, []
    with torch.no_grad():
        for _ in range(3):
            dist.barrier(pair)
            before, began = wire.waited, time.perf_counter()
            layer(x)
            together, waited = time.perf_counter() - began, wire.waited - before
            dist.barrier(pair)
            began = time.perf_counter()
            wire.exchange(torch.cat((x, x)))  # as much as the keys and values
            found.append((waited, together, time.perf_counter() - began))
    waited, together, transfer = sorted(found)[1]
    say(together, waited, transfer)


def go_on_until_cut() -> None:
    """Attention again and again, until a rank is lost: which one, and how long its last call took."""
    q = torch.randn(1, 4, 64, 8)
    say("ready")
    while True:
        began = time.monotonic()
        try:
            mh.distributed.attend(q, q, q, mesh=dist.group.WORLD)
        except mh.distributed.RankLost as lost:
            say(lost.rank, time.monotonic() - began)
            return
        time.sleep(0.05)


def main() -> None:
    rank, ranks, host, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    os.environ["GLOO_SOCKET_IFNAME"] = sys.argv[5]
    torch.set_num_threads(1)
    where = f"tcp://{host}:{port}"
    dist.init_process_group("gloo", where, rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT))
    pair = dist.new_group([0, 1])
    say("joined")
    for line in sys.stdin:
        match line.split():
            case ["check"]:
                check()
            case ["time", tokens]:
                time_ring(int(tokens), pair)
            case ["until-cut"]:
                go_on_until_cut()
            case ["leave"]:
                break
    os._exit(0)  # the others may be cut off: nobody is waited for


if __name__ == "__main__":
    main()

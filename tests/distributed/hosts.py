"""One rank on a host of its own: a process in a network namespace, told what to do by lines on its standard input."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import multihead as mh
import multihead.distributed

TIMEOUT = 60.0  # seconds in which a link that was down may come back
SHORT = 4.0  # after which a cut is noticed


def say(*words: object) -> None:
    print("SAY", *words, flush=True)


def go_on_until_cut(group: dist.ProcessGroup) -> None:
    """Attention again and again, until a rank is lost: which one."""
    q = torch.randn(1, 4, 64, 8)
    say("ready")
    while True:
        try:
            mh.distributed.attend(q, q, q, mesh=group)
        except mh.distributed.RankLost as lost:
            say(lost.rank)
            return
        time.sleep(0.05)


def time_ring(tokens: int, repeats: int) -> None:
    """Of a ring of all hosts: its seconds, those in which it waited, and those of its transfer alone; medians."""
    torch.manual_seed(0)
    layer, x = mh.MultiHeadAttention(256, heads=4), torch.randn(1, tokens, 256)
    mh.distributed.shard_sequence(layer, dist.group.WORLD)
    wire, found = layer.sharding.wire, []
    with torch.no_grad():
        for _ in range(repeats + 1):  # the first one warms up
            dist.barrier()
            before, began = wire.waited, time.perf_counter()
            layer(x)
            together, waited = time.perf_counter() - began, wire.waited - before
            dist.barrier()
            began = time.perf_counter()
            wire.exchange(torch.cat((x, x)))  # as much as the keys and values
            found.append((together, waited, time.perf_counter() - began))
    say(*(sorted(column)[len(column) // 2] for column in zip(*found[1:])))


def answer(function: str, path: str, mesh: DeviceMesh, *args: Any) -> None:
    """What a function of the tests gives on this rank, put where they find it."""
    from tests.distributed import test_attention, test_layer

    known = {"run_cases": test_attention.run_cases, "decoded": test_layer.decoded}
    torch.save(known[function](mesh, *args), Path(path) / f"{dist.get_rank()}.pt")
    say("done")


def main() -> None:
    rank, ranks, host, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    os.environ["GLOO_SOCKET_IFNAME"] = sys.argv[5]
    torch.set_num_threads(1)
    where = f"tcp://{host}:{port}"
    dist.init_process_group("gloo", where, rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT))
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("ranks",))
    impatient = dist.new_group(list(range(ranks)), timeout=timedelta(seconds=SHORT))
    say("joined")
    for line in sys.stdin:
        match line.split():
            case ["cases", path, method, numbers]:
                answer("run_cases", path, mesh, method, [int(n) for n in numbers.split(",")])
            case ["decode", path]:
                answer("decoded", path, mesh, 10)
            case ["time", tokens, repeats]:
                time_ring(int(tokens), int(repeats))
            case ["until-cut"]:
                go_on_until_cut(impatient)
            case ["leave"]:
                break
    os._exit(0)  # the others may be cut off: nobody is waited for


if __name__ == "__main__":
    main()

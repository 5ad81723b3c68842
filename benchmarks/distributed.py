"""Ranks × lengths: ring, Ulysses and gathering against one process on the same cores.

python benchmarks/distributed.py            # 2 ranks of one thread against one process of two threads

Two ranks of one thread have exactly the cores that one process of two threads has, so what the table shows is what the
exchange costs, and whether the work is shared out evenly; that more machines are faster, it cannot show. More ranks
than cores are measured for their overhead only. Times are the best of several, of the slowest rank.
"""

import argparse
import os
import socket
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import multihead as mh
import multihead.distributed

METHODS = ("ring", "ulysses", "gather")
SIZES: dict[str, int] = {"H": 8, "G": 2, "D": 64}


def best(act: Any, repeats: int) -> float:
    found = []
    for _ in range(repeats + 1):  # the first one warms up
        began = time.perf_counter()
        act()
        found.append(time.perf_counter() - began)
    return min(found[1:])


def tensors(N: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, SIZES[heads], N, SIZES["D"]) for heads in ("H", "G", "G")]


def measure(rank: int, ranks: int, port: int, lengths: list[int], repeats: int, results: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    for N in lengths:
        mine = [t.tensor_split(ranks, 2)[rank].clone() for t in tensors(N)]
        for method in METHODS:
            for backward in (False, True):

                def run(method: str = method, backward: bool = backward, mine: list[torch.Tensor] = mine) -> None:
                    q, k, v = (t.detach().requires_grad_(backward) for t in mine)
                    out = mh.distributed.attend(q, k, v, mh.Causal(), mesh=dist.group.WORLD, method=method)
                    if backward:
                        out.sum().backward()

                seconds = torch.tensor([best(run, repeats)], dtype=torch.float64)
                dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
                if rank == 0:
                    results[ranks, N, method, backward] = float(seconds)
    dist.destroy_process_group()


def alone(N: int, threads: int, backward: bool, repeats: int) -> float:
    torch.set_num_threads(threads)

    def run() -> None:
        q, k, v = (t.requires_grad_(backward) for t in tensors(N))
        out = mh.attend(q, k, v, mh.Causal())
        if backward:
            out.sum().backward()  # type: ignore[union-attr]

    return best(run, repeats)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments.add_argument("--lengths", type=int, nargs="+", default=[1021, 4093, 8191])
    arguments.add_argument("--repeats", type=int, default=3)
    chosen = arguments.parse_args()
    cores = len(os.sched_getaffinity(0))
    results = mp.Manager().dict()
    for ranks in chosen.ranks:
        mp.spawn(measure, (ranks, free_port(), chosen.lengths, chosen.repeats, results), nprocs=ranks)
    print(f"causal, B=1, H={SIZES['H']}, G={SIZES['G']}, D={SIZES['D']}, float32; {cores} cores; milliseconds\n")
    print("| N | pass | one process, 1 thread | 2 threads |", end="")
    print("".join(f" {m}, {r} ranks |" for r in chosen.ranks for m in METHODS))
    print("|" + "---|" * (4 + len(chosen.ranks) * len(METHODS)))
    for N in chosen.lengths:
        for backward in (False, True):
            cells = [alone(N, threads, backward, chosen.repeats) for threads in (1, 2)]
            cells += [results[r, N, m, backward] for r in chosen.ranks for m in METHODS]
            name = "forward, backward" if backward else "forward"
            print(f"| {N} | {name} | " + " | ".join(f"{1e3 * c:.1f}" for c in cells) + " |")


if __name__ == "__main__":
    main()

"""Ranks × lengths: ring, Ulysses and gathering against one process on the same cores; and what overlaps a slow link.

python -m benchmarks.distributed                            # ranks on loopback
python -m benchmarks.distributed --rates 100mbit 200mbit    # two hosts in network namespaces: needs root and iproute2

Two ranks of one thread have exactly the cores that one process of two threads has, so what the table shows is what the
exchange costs, and whether the work is shared out evenly; that more machines are faster, it cannot show. More ranks
than cores are measured for their overhead only. Every way is run in turn, round after round; times are medians of the
slowest rank's, and A/A is one process measured twice.
"""

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed.network import Hosts
from tests.distributed.pool import Pool

import multihead as mh
import multihead.distributed
from multihead.distributed.agree import agree
from multihead.distributed.wire import Wire

METHODS = ("ring", "ulysses", "gather")
SIZES: dict[str, int] = {"H": 8, "G": 2, "D": 64}
LEAST, MOST = 3, 15  # rounds


def tensors(N: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, SIZES[heads], N, SIZES["D"]) for heads in ("H", "G", "G")]


def seconds(run: Callable[..., Any], inputs: list[torch.Tensor], backward: bool) -> float:
    q, k, v = (t.requires_grad_(backward) for t in inputs)
    began = time.perf_counter()
    out = run(q, k, v, mh.Causal())
    if backward:
        out.sum().backward()
    return time.perf_counter() - began


def on_a_rank(mesh: Any, method: str, N: int, backward: bool) -> float:
    inputs = [t.tensor_split(mesh.size(), 2)[mesh.get_local_rank()].clone() for t in tensors(N)]
    dist.barrier(mesh.get_group())
    return seconds(lambda *qkv: mh.distributed.attend(*qkv, mesh=mesh, method=method), inputs, backward)


def alone(threads: int, N: int, backward: bool) -> float:
    torch.set_num_threads(threads)
    return seconds(mh.attend, tensors(N), backward)


def headers(mesh: Any, count: int = 200) -> float:
    """Seconds of the header that crosses before each call."""
    wire, sizes = Wire(mesh), {"B": 1, "H": 8, "G": 2, "D": 64, "V": 64}
    dist.barrier(mesh.get_group())
    began = time.perf_counter()
    for _ in range(count):
        agree(wire, "ring", 512, 512, sizes, torch.float32, {"mask": mh.Causal()}, torch.device("cpu"))
    return (time.perf_counter() - began) / count


def table(pool: Pool, lengths: list[int], ranks: list[int], budget: float) -> None:
    ways: dict[str, Callable[[int, bool], float]] = {
        "1 thread": lambda N, backward: alone(1, N, backward),
        "2 threads": lambda N, backward: alone(2, N, backward),
        "2 threads again": lambda N, backward: alone(2, N, backward),
    }
    for count in ranks:
        for method in METHODS:
            ways[f"{method}, {count} ranks"] = lambda N, backward, m=method, c=count: max(
                pool.run(on_a_rank, c, m, N, backward)
            )
    shown = [name for name in ways if name != "2 threads again"]
    print("| N | pass | " + " | ".join(shown) + " | A/A | rounds |")
    print("|" + "---|" * (len(shown) + 4))
    for N in lengths:
        for backward in (False, True):
            found: dict[str, list[float]] = defaultdict(list)
            for run in ways.values():
                run(min(N, 257), backward)  # warm
            began, rounds = time.monotonic(), 0
            while rounds < LEAST or (rounds < MOST and time.monotonic() - began < budget):
                for name, run in ways.items():
                    found[name].append(run(N, backward))
                rounds += 1
            middle = {name: median(times) for name, times in found.items()}
            cells = [f"{1e3 * middle[name]:.1f}" for name in shown]
            again = middle["2 threads again"] / middle["2 threads"]
            name = "forward, backward" if backward else "forward"
            print(f"| {N} | {name} | " + " | ".join(cells) + f" | {again:.2f} | {rounds} |", flush=True)


def across_a_link(rates: list[str], tokens: int) -> None:
    """Two hosts: the seconds of a ring, beside those of its computation and of its transfer one after the other."""
    hosts = Hosts(2)
    print("| rate of the link | computation | transfer | one after the other | ring | hidden |")
    print("|" + "---|" * 6)
    try:
        hosts.build()
        hosts.start()
        for rate in rates:
            hosts.shape(f"tbf rate {rate} burst 64kb latency 400ms")
            hosts.tell(f"time {tokens} 7")
            told = [[float(word) for word in said] for said in hosts.hear_all()]
            together, _, transfer = (max(column) for column in zip(*told))
            compute = max(whole - waited for whole, waited, _ in told)
            hidden = (compute + transfer - together) / min(compute, transfer)
            cells = [f"{1e3 * t:.0f}" for t in (compute, transfer, compute + transfer, together)]
            print(f"| {rate} | " + " | ".join(cells) + f" | {hidden:.0%} |", flush=True)
            hosts.shape(None)
    finally:
        hosts.close()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="up to four")
    arguments.add_argument("--lengths", type=int, nargs="+", default=[1021, 4093, 8191])
    arguments.add_argument("--seconds", type=float, default=15, help="for each row, three rounds at least")
    arguments.add_argument("--rates", nargs="+", help="of the link between two hosts, as tc writes them: no table then")
    arguments.add_argument("--tokens", type=int, default=2048, help="on each host")
    chosen = arguments.parse_args()
    cores = len(os.sched_getaffinity(0))
    if chosen.rates:
        print(f"{chosen.tokens} tokens on each of 2 hosts, E=256, 4 heads, float32; {cores} cores; milliseconds\n")
        across_a_link(chosen.rates, chosen.tokens)
        return
    pool = Pool()
    print(f"causal, B=1, H={SIZES['H']}, G={SIZES['G']}, D={SIZES['D']}, float32; {cores} cores; milliseconds\n")
    table(pool, chosen.lengths, chosen.ranks, chosen.seconds)
    each = ", ".join(f"{1e6 * max(pool.run(headers, count)):.0f} µs on {count} ranks" for count in chosen.ranks)
    print(f"\nThe header before each call: {each}.")
    pool.close()


if __name__ == "__main__":
    main()

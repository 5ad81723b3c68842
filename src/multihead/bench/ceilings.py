"""How fast this machine could go at best: the fp32 rate of a large matrix product, and the rate of reading memory."""

import math
import time
from dataclasses import dataclass

import torch

GEMM_SIZES = ((1024, 1024, 1024), (2048, 1024, 3072), (2048, 2048, 2048))
MIB = 2**20
SMALLEST_READ = 16 * MIB  # bytes; below, the call costs more than the reading


@dataclass(frozen=True)
class Ceilings:
    gemm: float  # useful flops a second
    read: dict[int, float]  # bytes a second, by working set: caches make it differ

    def seconds(self, case):
        """The least time the case could take here, and which ceiling says so."""
        compute, memory = case.flops / self.gemm, case.bytes / self.read[working_set(case)]
        return (compute, "GEMM") if compute >= memory else (memory, "read")

    def best(self, other):
        """The higher of two measurements of each ceiling: noise only ever lowers them."""
        return Ceilings(max(self.gemm, other.gemm), {n: max(rate, other.read[n]) for n, rate in self.read.items()})


def working_set(case):
    """Whole MiB, so that near equals are measured once."""
    return max(round(case.bytes / MIB) * MIB, SMALLEST_READ)


def measure_ceilings(cases, seconds=0.3):
    """`seconds` for each rate; the best repetition counts."""
    return Ceilings(gemm_rate(seconds), {n: read_rate(n, seconds) for n in sorted({working_set(c) for c in cases})})


def gemm_rate(seconds):
    rates = []
    with torch.inference_mode():
        for m, k, n in GEMM_SIZES:
            a, b, out = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)
            rates.append(2 * m * k * n / _best(lambda: torch.mm(a, b, out=out), seconds / len(GEMM_SIZES)))  # noqa: B023
    return max(rates)


def read_rate(size, seconds):
    """Two ways to read every byte once; the faster one counts."""
    data = torch.ones(size // 4)
    with torch.inference_mode():
        return size / min(_best(data.sum, seconds / 2), _best(data.amax, seconds / 2))


def _best(run, seconds):
    run()
    best, end = math.inf, time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        run()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            return best

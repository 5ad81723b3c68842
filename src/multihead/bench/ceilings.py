"""How fast this machine could go at best: the rate of a large matrix product in each dtype, and of reading memory.

Each is what the fastest of several ways reaches, ours among them: on a Zen 5 torch's product (MKL) reaches 0.42 of what
the FMA units can do in float32, so that ours alone would be at twice "the ceiling".
"""

import math
import time
from dataclasses import dataclass

import torch

from multihead.bench.cases import DTYPES
from multihead.kernel.linear import linear

GEMM_SIZES = ((1024, 1024, 1024), (2048, 1024, 3072), (2048, 2048, 2048))
TRIAL = ((256, 256, 256),)
HOPELESS = 1 / 10  # of fp32's rate: torch's float16 product was seen at a thousandth, a minute for the sizes above
MIB = 2**20
SMALLEST_READ = 16 * MIB  # bytes; below, the call costs more than the reading


@dataclass(frozen=True)
class Ceilings:
    gemm: dict[str, float]  # useful flops a second, by dtype
    read: dict[int, float]  # bytes a second, by working set: caches make it differ

    def seconds(self, case):
        """The least time the case could take here, and which ceiling says so."""
        compute, memory = case.flops / self.gemm[case.dtype], case.bytes / self.read[working_set(case)]
        return (compute, "GEMM") if compute >= memory else (memory, "read")

    def best(self, other):
        """The higher of two measurements of each ceiling: noise only ever lowers them."""
        gemm, read = ({n: max(rate, theirs[n]) for n, rate in mine.items()}
                      for mine, theirs in ((self.gemm, other.gemm), (self.read, other.read)))  # fmt: skip
        return Ceilings(gemm, read)


def working_set(case):
    """Whole MiB, so that near equals are measured once."""
    return max(round(case.bytes / MIB) * MIB, SMALLEST_READ)


def measure_ceilings(cases, seconds=0.3):
    """`seconds` for each rate; the best repetition counts."""
    single = gemm_rate("fp32", seconds)
    # Whoever is slow at half precision may convert: single precision is what can be had in any case.
    gemm = {"fp32": single}
    for t in sorted({c.dtype for c in cases} - {"fp32"}):
        hopeless = gemm_rate(t, seconds, TRIAL) < HOPELESS * gemm_rate("fp32", seconds, TRIAL)
        gemm[t] = single if hopeless else max(single, gemm_rate(t, seconds))
    return Ceilings(gemm, {n: read_rate(n, seconds) for n in sorted({working_set(c) for c in cases})})


def gemm_rate(dtype, seconds, sizes=GEMM_SIZES):
    rates = []
    with torch.inference_mode():
        for m, k, n in sizes:
            a, b, w, out = (torch.randn(size).to(DTYPES[dtype]) for size in ((m, k), (k, n), (n, k), (m, n)))
            ways = lambda: torch.mm(a, b, out=out), lambda: linear(a, w, None, None)  # noqa: B023
            rates += [2 * m * k * n / _best(way, seconds / len(sizes) / len(ways)) for way in ways]
    return max(rates)


def read_rate(size, seconds):
    """Three ways to read every byte once; the fastest counts."""
    data = torch.ones(size // 4)
    width = 1024  # of the rows that a product of one row of input reads
    matrix, x = data[: data.numel() // width * width].view(-1, width), torch.ones(1, width)
    ways = data.sum, data.amax, lambda: linear(x, matrix, None, None)
    with torch.inference_mode():
        return size / min(_best(way, seconds / len(ways)) for way in ways)


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

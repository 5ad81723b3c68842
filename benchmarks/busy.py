"""A decoding step of one layer, beside busy neighbours and without them: ours against torch written by hand.

    python benchmarks/busy.py --busy 2 --cached 1024

Four contestants take turns in blocks of some milliseconds, in random order, in one process: the layer, the layer once
more (the A/A ratio: what chance makes of nothing), and the same step by hand in torch on all threads and on one, with
cosines and sines computed beforehand and a cache that is allocated once. Neighbours are processes that count for ever.
The table gives medians over blocks, and ratios of a peer's time over ours.
"""

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

import multihead as mh

E, H, G, D = 1024, 16, 4, 64


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many processes that never rest."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.3 if count else 0)
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


class ByHand:
    """The step as one writes it in torch, in place where that helps."""

    def __init__(self, layer: mh.MultiHeadAttention, cached: int, new: int = 1) -> None:
        self.layer, self.cached, self.new = layer, cached, new
        self.k, self.v = torch.randn(2, 1, G, cached + new, D).unbind()
        positions = torch.arange(cached, cached + new)[:, None] / 10000 ** (torch.arange(0, D, 2) / D)
        self.cos, self.sin = positions.cos().repeat(1, 2), positions.sin().repeat(1, 2)

    def turn(self, x: Tensor) -> Tensor:
        return x * self.cos + torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1) * self.sin

    def __call__(self, x: Tensor) -> Tensor:
        p = self.layer
        q = self.turn(F.linear(x, p.q_proj.weight, p.q_proj.bias).view(1, self.new, H, D).transpose(1, 2))
        self.k[:, :, self.cached :] = self.turn(
            F.linear(x, p.k_proj.weight, p.k_proj.bias).view(1, self.new, G, D).transpose(1, 2)
        )
        self.v[:, :, self.cached :] = (
            F.linear(x, p.v_proj.weight, p.v_proj.bias).view(1, self.new, G, D).transpose(1, 2)
        )
        causal = self.new > 1 and self.cached == 0
        out = F.scaled_dot_product_attention(q, self.k, self.v, is_causal=causal, enable_gqa=True)
        return F.linear(out.transpose(1, 2).reshape(1, self.new, H * D), p.o_proj.weight, p.o_proj.bias)


class Ours:
    def __init__(self, layer: mh.MultiHeadAttention, by_hand: ByHand) -> None:
        self.layer, self.by_hand = layer, by_hand
        self.cache = layer.new_cache(capacity=by_hand.cached + by_hand.new)
        if by_hand.cached:
            self.cache.append(*(t[:, :, : by_hand.cached].clone() for t in (by_hand.k, by_hand.v)))

    def __call__(self, x: Tensor) -> Tensor:
        y = self.layer(x, mask=mh.Causal(), cache=self.cache)
        self.cache.crop(self.by_hand.cached)
        return y


def measure(steps: dict[str, tuple[Callable[[Tensor], Tensor], int]], x: Tensor, seconds: float) -> dict[str, float]:
    """Milliseconds a step, the median over blocks of at least 20 ms, of contestants on so many threads each."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name in random.sample(list(steps), len(steps)):
            step, threads = steps[name]
            torch.set_num_threads(threads)
            step(x)
            count, start = 0, time.perf_counter()
            while (took := time.perf_counter() - start) < 0.02 or count < 3:
                step(x)
                count += 1
            times[name].append(took / count * 1e3)
    return {name: statistics.median(of) for name, of in times.items()}


def bandwidth() -> float:
    """GB/s that a plain sum reads, of numbers that stay in the last cache."""
    numbers = torch.randn(10 * 1024 * 1024 // 4)
    best = min(_timed(numbers.sum) for _ in range(50))
    return numbers.nbytes / best / 1e9


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--busy", type=int, nargs="*", default=[0, 2], help="numbers of busy neighbours, one table row each"
    )
    parser.add_argument("--cached", type=int, nargs="*", default=[128, 1024, 4096], help="tokens in the cache")
    parser.add_argument("--new", type=int, default=1, help="tokens a step brings")
    parser.add_argument("--seconds", type=float, default=6, help="for each table row")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.manual_seed(0)
    layer = mh.MultiHeadAttention(E, H, kv_heads=G, rope=True, bias=False).eval().requires_grad_(False)
    x = torch.randn(1, given.new, E)
    weights = sum(p.nbytes for p in layer.parameters())
    torch.set_num_threads(given.threads)
    print(
        f"E={E} H={H} G={G} D={D}, {given.new} new, {given.threads} threads; a plain sum reads {bandwidth():.0f} GB/s"
    )
    print("cached busy |  ours ms  A/A | by hand  ratio | on one   ratio | GB/s")
    for cached in given.cached:
        by_hand = ByHand(layer, cached, given.new)
        ours = Ours(layer, by_hand)
        with torch.inference_mode():
            torch.testing.assert_close(ours(x), by_hand(x), rtol=1e-3, atol=1e-3)
            steps = {"ours": (ours, given.threads), "again": (ours, given.threads),
                     "by hand": (by_hand, given.threads), "on one": (by_hand, 1)}  # fmt: skip
            for count in given.busy:
                with neighbours(count):
                    took = measure(steps, x, given.seconds)
                own, hand, one = took["ours"], took["by hand"], took["on one"]
                read = weights + 2 * G * D * 4 * (cached + given.new)
                print(
                    f"{cached:6} {count:4} | {own:8.3f} {took['again'] / own:5.2f} | {hand:7.3f} {hand / own:6.2f} "
                    f"| {one:6.3f} {one / own:7.2f} | {read / own / 1e6:4.0f}"
                )


if __name__ == "__main__":
    main()

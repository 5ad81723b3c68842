"""Every `nn.Linear` of a model in a published size, one row of input, as generating a token calls them one by one: ours
against torch's, and in share of what a plain sum of as many bytes reads.

    python benchmarks/linears.py --size SmolLM2-135M --dtype fp32

Contestants take turns in random order, in one process; ours takes part twice (the A/A ratio). Most sizes do not fit in
any cache, so that the rate is the memory's.
"""

import argparse

import torch
from busy import measure
from torch import nn

from multihead import hf
from multihead.bench.cases import DTYPES
from multihead.bench.ceilings import read_rate
from multihead.bench.generating import build
from multihead.bench.generation import SIZES, Whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="SmolLM2-135M")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--rows", type=int, default=1, help="tokens")
    parser.add_argument("--seconds", type=float, default=10)
    given = parser.parse_args()
    model, _ = build(Whole(given.size, 1, 0, "", dtype=given.dtype))
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    read = sum(linear.weight.nbytes for linear in linears)
    rows = {n: torch.randn(given.rows, n, dtype=DTYPES[given.dtype]) for n in {p.in_features for p in linears}}
    plain = [(p.forward, rows[p.in_features]) for p in linears]

    def call(products: list) -> None:
        for product, x in products:
            product(x)

    with hf.speed_up(nn.ModuleList(linears)), torch.inference_mode():
        ours = [(p.forward, rows[p.in_features]) for p in linears]
        for (a, x), (b, _) in zip(ours, plain, strict=True):
            torch.testing.assert_close(a(x), b(x), rtol=2e-2, atol=2e-2)
        threads = torch.get_num_threads()
        steps = {name: (lambda _, products=products: call(products), threads)
                 for name, products in (("ours", ours), ("again", ours), ("torch", plain))}  # fmt: skip
        before = read_rate(read, 1)
        took = measure(steps, torch.empty(0), given.seconds)
        sum_reads = max(before, read_rate(read, 1)) / 1e9
    rates = {name: read / ms / 1e6 for name, ms in took.items()}
    print(f"{given.size}, {given.dtype}: {len(linears)} linears, {read / 1e6:.0f} MB, {threads} threads")
    print(f"a plain sum reads {sum_reads:.1f} GB/s; A/A {took['again'] / took['ours']:.3f}")
    for name in ("ours", "torch"):
        print(f"{name:<6} {took[name]:7.2f} ms {rates[name]:6.1f} GB/s, {rates[name] / sum_reads:4.0%} of it")


if __name__ == "__main__":
    main()

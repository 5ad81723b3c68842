"""The figure of docs/distributed.md: what the plan says of a million tokens on up to 1,024 ranks.

python benchmarks/distributed_plan.py docs/distributed.svg
"""

import sys

import matplotlib
import torch

import multihead as mh
import multihead.distributed
from multihead.files import replacing

SETTING = {"tokens": 2**20, "mask": mh.Causal(), "dtype": torch.bfloat16, "backward": True}
MACHINE = {"bandwidth": 2.5e10, "latency": 1e-5, "flops": 5e13}  # bytes/s and flop/s of one accelerator; seconds


def main() -> None:
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    layer = mh.MultiHeadAttention(4096, heads=32, kv_heads=8, device="meta")
    ranks = [2**n for n in range(1, 11)]
    plans = [mh.distributed.plan(layer, count, **SETTING, **MACHINE) for count in ranks]
    print(plans[-1])
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for method in ("ring", "ulysses", "gather"):
        costs = [(n, p.costs[method]) for n, p in zip(ranks, plans) if p.costs[method].refused is None]
        left.loglog([n for n, _ in costs], [c.seconds for _, c in costs], marker="o", label=method)
        right.loglog([n for n, _ in costs], [c.memory / 2**30 for _, c in costs], marker="o", label=method)
    left.loglog(ranks, [plans[0].one_process.seconds / n for n in ranks], "k:", label="compute alone / ranks")
    left.set(title="seconds, forward and backward", xlabel="ranks")
    right.set(title="GiB of a rank", xlabel="ranks")
    left.legend()
    with replacing(sys.argv[1] if len(sys.argv) > 1 else "docs/distributed.svg") as beside:
        figure.savefig(beside, metadata={"Date": None})


if __name__ == "__main__":
    main()

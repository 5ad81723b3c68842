"""Attend over a long document of which each rank has a slice, and ask a lens where the last token looks.

torchrun --nproc-per-node 2 examples/distributed/long_document.py --tokens 8192
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import multihead as mh
import multihead.distributed


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tokens", type=int, default=4096)
    arguments.add_argument("--method", choices=["ring", "ulysses", "gather"], default="ring")
    chosen = arguments.parse_args()

    dist.init_process_group("gloo")
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    torch.manual_seed(0)
    layer = mh.MultiHeadAttention(256, heads=8, kv_heads=2, rope=True)
    mh.distributed.shard_sequence(layer, mesh, method=chosen.method)

    length = len(torch.arange(chosen.tokens).tensor_split(mesh.size())[rank])
    torch.manual_seed(rank + 1)
    x = torch.randn(1, length, 256)  # no rank ever has the whole document
    with torch.no_grad():
        began = time.perf_counter()
        y = layer(x, mask=mh.Causal())
        seconds = time.perf_counter() - began
        lens = layer.look(x, mask=mh.Causal())
        weights, keys = lens.top(3)
    wire = layer.sharding.wire
    print(f"rank {rank}: {tuple(y.shape)} in {seconds:.2f} s, {wire.sent / 2**20:.1f} MiB sent")
    if rank == 0:
        print(f"head 0, last token: keys {keys[0, 0, -1].tolist()} with {weights[0, 0, -1].tolist()}")
        print(mh.distributed.plan(layer, mesh.size(), tokens=chosen.tokens, mask=mh.Causal()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train the language model with its sequence, or its heads, cut over the ranks.

torchrun --nproc-per-node 2 examples/distributed/train.py
torchrun --nproc-per-node 2 examples/distributed/train.py --shard heads --checkpoint /tmp/lm
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

import multihead as mh
import multihead.distributed

VOCABULARY, ROWS, LENGTH = 64, 4, 257  # tokens of each row: a prime, so that the slices differ


def batch(step: int) -> torch.Tensor:
    """Rows that say everything twice: after the first half, a model that looks back knows what comes."""
    half = torch.randint(VOCABULARY, (ROWS, LENGTH // 2 + 1), generator=torch.Generator().manual_seed(step))
    return torch.cat((half, half), 1)[:, : LENGTH + 1]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--shard", choices=["ring", "ulysses", "gather", "heads"], default="ring")
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--checkpoint", type=Path)
    chosen = arguments.parse_args()

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same weights everywhere
    lm = mh.models.LanguageModel(VOCABULARY, width=64, heads=4, layers=2, context=LENGTH)
    by_heads = chosen.shard == "heads"
    if by_heads:
        mh.distributed.shard_heads(lm, mesh)
    else:
        mh.distributed.shard_sequence(lm, mesh, method=chosen.shard)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-3)
    if chosen.checkpoint is not None and chosen.checkpoint.exists():
        mh.distributed.load_checkpoint(chosen.checkpoint, lm, optimizer)

    for step in range(chosen.steps):
        tokens = batch(step)
        x, y = tokens[:, :-1], tokens[:, 1:]
        if not by_heads:  # each rank has its slice of the tokens, and of those that follow them
            x, y = (t.tensor_split(mesh.size(), 1)[rank] for t in (x, y))
        loss = cross_entropy(lm(x).flatten(0, 1), y.flatten(), reduction="sum") / (ROWS * LENGTH)
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach()
        if not by_heads:
            mh.distributed.sum_gradients(lm, mesh)
            dist.all_reduce(total)
        optimizer.step()
        if rank == 0 and (step % 5 == 0 or step == chosen.steps - 1):
            print(f"step {step}: loss {total.item():.4f}")
    if chosen.checkpoint is not None:
        mh.distributed.save_checkpoint(chosen.checkpoint, lm, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

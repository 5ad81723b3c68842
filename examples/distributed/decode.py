"""Write with a context whose keys and values are spread over the ranks.

torchrun --nproc-per-node 2 examples/distributed/decode.py "The people of the United"
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import multihead as mh
import multihead.distributed


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("text", nargs="?", default="The people of the United")
    arguments.add_argument("--tokens", type=int, default=12)
    chosen = arguments.parse_args()

    dist.init_process_group("gloo")
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    lm = mh.models.load("lm")
    prompt = torch.tensor([lm.tokenizer.begin(chosen.text)])
    mh.distributed.shard_sequence(lm, mesh)
    caches = [block.attention.new_cache(batch=1) for block in lm.layers]
    written: list[int] = []
    with torch.no_grad():
        with mh.distributed.prefill(*caches):  # each rank reads its slice of the prompt
            logits = lm(prompt.tensor_split(mesh.size(), 1)[rank], caches)
        last = mesh.size() - 1
        token = logits[:, -1:].argmax(-1) if rank == last else torch.zeros(1, 1, dtype=torch.long)
        dist.broadcast(token, last)
        for _ in range(chosen.tokens):
            written.append(int(token))
            token = lm(token, caches)[:, -1:].argmax(-1)  # the same on every rank
    print(f"rank {rank} has {caches[0].counts[rank]} of {caches[0].length} tokens: {lm.tokenizer.decode(written)!r}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

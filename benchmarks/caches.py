"""A decoding step over a long cache, held in float32, bfloat16 and int8.

    python benchmarks/caches.py --cached 32768

The layer is narrow (E=64), so that nearly all of the time goes into reading the cache. Caches take turns in blocks, in
random order, in one process; the float32 cache takes part twice (the A/A ratio). Ratios are float32's time over theirs.
"""

import argparse
from functools import partial

import torch
from busy import measure

import multihead as mh

G, D = 8, 128


def step(layer: mh.MultiHeadAttention, cache: mh.Cache, cached: int, x: torch.Tensor) -> torch.Tensor:
    y = layer(x, mask=mh.Causal(), cache=cache)
    cache.crop(cached)
    return y


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cached", type=int, default=32768, help="tokens in the cache")
    parser.add_argument("--heads", type=int, nargs="*", default=[8, 32], help="query heads, on 8 key/value heads")
    parser.add_argument("--seconds", type=float, default=8, help="for each number of heads")
    given = parser.parse_args()
    threads, x = torch.get_num_threads(), torch.randn(1, 1, 64)
    print(f"{given.cached} keys of {D}, {threads} threads")
    for heads in given.heads:
        layer = mh.MultiHeadAttention(64, heads, kv_heads=G, head_dim=D, bias=False).eval().requires_grad_(False)
        k, v = torch.randn(2, 1, G, given.cached, D).unbind()
        steps, sizes = {}, {}
        for name, dtype in {"float32": None, "again": None, "bfloat16": torch.bfloat16, "int8": "int8"}.items():
            cache = layer.new_cache(capacity=given.cached + 1, dtype=dtype)
            cache.append(k, v)

            steps[name], sizes[name] = (partial(step, layer, cache, given.cached), threads), cache.nbytes
        with torch.inference_mode():
            took = measure(steps, x, given.seconds)
        for name, ms in took.items():
            print(
                f"{heads:3} on {G} {name:<9} {ms:7.3f} ms  {took['float32'] / ms:5.2f} times  "
                f"memory {sizes[name] / sizes['float32']:5.3f}  {sizes[name] / ms / 1e6:4.0f} GB/s"
            )


if __name__ == "__main__":
    main()

"""zentorch, AMD's extension of torch, in a child process: loaded, it changes the torch that everybody else runs on.

A process for each case: its linear operator was seen to give wrong numbers for a second shape of the same weight.
"""

import torch

from multihead.bench.cases import ZENTORCH
from multihead.bench.peers import runtimes
from multihead.bench.peers.layers import packed
from multihead.bench.peers.sdpa import dense


def attend(case, q, k, v, threads):
    tensors, square = {"q": q, "k": k, "v": v}, case.Q == case.K
    if case.mask.causal and not square:  # its causal mask begins at the first key
        tensors["mask"] = dense(case)[None, None]
    return start("attend", case, tensors, {"causal": case.mask.causal and square}, threads)


def layer(case, x, weights, threads):
    w_qkv, b_qkv = packed(weights)
    tensors = {"x": x, "w_qkv": w_qkv, "b_qkv": b_qkv, "w_o": weights["w_o"], "b_o": weights["b_o"]}
    return start("layer", case, tensors, {"causal": case.mask.causal, "heads": case.H}, threads)


def start(kind, case, tensors, options, threads):
    runtimes.require(runtimes.MODULES[ZENTORCH])
    runtime = runtimes.Runtime(ZENTORCH, threads)
    try:
        arrays = {name: bits(t) for name, t in tensors.items()}
        runtime.ask("load", kind, arrays, str(case.type).removeprefix("torch."), options)
    except BaseException:
        runtime.close()
        raise
    return runtime


def bits(t):
    """As NumPy can hold them: it has no bfloat16."""
    return t.contiguous().view(torch.int16).numpy() if t.itemsize == 2 else t.contiguous().numpy()

"""The calls a candidate is examined on: the user's own, and a few that bring out what it might hide."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from multihead.doctor import masking
from multihead.doctor.variant import Call
from multihead.doctor.weights import Weights
from multihead.masks import Allowed, Causal, Mask, Window

MOST_PAIRS = 2**14  # query-key pairs that are compared in float64
LOUD = 3.0  # louder items have scores further apart: caps and finite fills show


def movable(mask: Mask | None) -> bool:
    """Whether the mask means something for any number of items."""
    return all(isinstance(part, Causal | Window) for part in masking.parts(mask))


def smaller(call: Call) -> Call:
    """The first items of the first sequences, where the call is larger than needs be."""
    B, Q, K = call.sizes
    if B * Q * K <= MOST_PAIRS:
        return call
    b, q, k = min(B, 2), min(Q, 32), min(K, 32)
    mask = call.mask
    if not movable(mask):
        mask = Allowed(masking.dense(mask, B, Q, K, call.x.device)[:b, :, :q, :k].clone())
    context = None if call.context is None else call.context[:b, :k]
    positions = None if call.positions is None else call.positions[..., :q]
    return Call(call.x[:b, :q], context, mask, positions)


def probes(call: Call, weights: Weights, batched: bool) -> list[Call]:
    """Calls of the doctor's own: random items, several sequences, loud items, other numbers of keys."""
    generator = torch.Generator().manual_seed(0)
    E, C = weights.sizes.E, weights.sizes.C
    B, Q, K = call.sizes

    def items(B: int, N: int, width: int) -> Tensor:
        drawn = torch.randn(B, N, width, generator=generator, dtype=torch.float64)
        return drawn.to(call.x.dtype).to(call.x.device)

    if not movable(call.mask) or call.positions is not None:
        sizes = [(B, Q, K)]
    elif call.context is None:
        sizes = [(3 if batched else 1, 7, 7)]
    else:
        sizes = [(3 if batched else 1, 7, 7), (2 if batched else 1, 5, 8)]
    made = []
    for b, q, k in sizes:
        context = None if call.context is None else items(b, k, C)
        made.append(replace(call, x=items(b, q, E), context=context))
    made.append(replace(made[0], x=made[0].x * LOUD))
    return made


@contextmanager
def shaken(module: nn.Module | None) -> Iterator[list[str]]:
    """Inside the block, parameters whose numbers are all alike have random ones: a missing zero bias does not show."""
    saved = {}
    generator = torch.Generator().manual_seed(2)
    for name, p in () if module is None else module.named_parameters():
        alike = p.dim() == 1 and p.numel() > 1 and p.dtype.is_floating_point and bool((p == p[0]).all())
        if alike and p.device.type != "meta":
            saved[name] = (p, p.detach().clone())
            p.data = p.data + (0.3 * torch.randn(p.shape, generator=generator)).to(p)
    try:
        yield list(saved)
    finally:
        for p, before in saved.values():
            p.data = before


@contextmanager
def at_rest(module: nn.Module | None) -> Iterator[bool]:
    """Inside the block: eval mode, one thread (thousands of tiny products), and random numbers that leave no trace.

    Gives whether the module was in training mode.
    """
    modes = {} if module is None else {child: child.training for child in module.modules()}
    threads = torch.get_num_threads()
    try:
        if module is not None:
            module.eval()
        torch.set_num_threads(1)
        with torch.random.fork_rng(devices=[]):
            yield any(modes.values())
    finally:
        torch.set_num_threads(threads)
        for child, training in modes.items():
            child.training = training

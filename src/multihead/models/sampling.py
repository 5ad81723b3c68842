"""Which token comes next, given the logits of all of them."""

import torch
from torch import Tensor

from multihead.sizes import require_int


def choose(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> int:
    """A token, drawn by its logits (vocabulary,). Ties go to the lowest."""
    if temperature == 0:
        return int(logits.argmax())
    logits, order = logits.double().cpu().sort(descending=True, stable=True)
    p = ((logits - logits[0]) / temperature).softmax(-1)  # 0 for the first, however low the temperature
    before = p.cumsum(-1) - p  # the probability of those that are likelier
    keep = torch.ones_like(p, dtype=torch.bool) if top_p is None else before < top_p
    if top_k is not None:
        keep[top_k:] = False
    return int(order[torch.multinomial(p * keep, 1, generator=generator)])


def check(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Refuse what has no meaning."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature}: expected a number of at least 0")
    if top_k is not None:
        require_int("top_k", top_k, 1)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: expected a probability above 0, at most 1")

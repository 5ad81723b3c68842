"""Without a reference nobody may have said that it is causal, or has RoPE, or of what base: what it would be then."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from multihead.doctor.parameters import Reading
from multihead.doctor.variant import Call
from multihead.layer import MultiHeadAttention
from multihead.masks import Causal, Mask
from multihead.positions import RoPE

BASES = (1e4, 5e5, 1e6)  # the paper's, Llama 3's, Qwen's


def unsaid(
    readings: Sequence[Reading],
    call: Call,
    reference: MultiHeadAttention | None,
    options: dict[str, Any],
    bases: bool = True,
) -> Iterator[tuple[Reading, Mask | None, str]]:
    """The weights and mask of each, and how to say it; `bases`: with those of RoPE that are not the usual one, too."""
    if reference is not None:
        return
    ropes: list[RoPE | None] = [None]
    if options.get("rope") is None:
        ropes += [RoPE(base=base, pairing=pairing) for base in (BASES if bases else BASES[:1])
                  for pairing in ("halves", "interleaved")]  # fmt: skip
    masks: list[Mask | None] = [None, *([Causal()] if call.mask is None and call.context is None else [])]
    for reading in readings[:4]:
        for rope in ropes:
            for mask in masks:
                if (rope, mask) == (None, None) or (rope is not None and reading.weights.sizes.D % 2):
                    continue
                weights = replace(reading.weights, rope=rope or reading.weights.rope)
                base = f", base {rope.base:,.0f}" if rope and rope.base != BASES[0] else ""
                said = [f"RoPE (pairing {rope.pairing!r}{base})"] if rope else []
                said += ["a causal mask"] if mask else []
                yield Reading(weights, reading.how), mask, " and ".join(said)

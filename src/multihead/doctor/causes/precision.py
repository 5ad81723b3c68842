"""Half precision where the reference has more: the formula is right, and the numbers are rounded on the way."""

from multihead.doctor.cause import Cause, Changes
from multihead.doctor.variant import HALVES

CORES: dict[str, list[Changes]] = {  # attention in half precision: as a fused kernel sums, or step by step
    name: [
        {"core": name} | more
        for more in (
            {"precision": f"raised: {name}"},
            {},
            {"product": name},
            {"product": name, "precision": name},
        )
    ]
    for name in HALVES
}
LAYERS: dict[
    str, list[Changes]
] = {  # the whole layer: step by step, scaled at once or by itself, or with a fused kernel
    name: [
        {"core": f"layer: {name}"} | more
        for more in (
            {},
            {"product": name},
            {"precision": f"raised: {name}"},
            {"precision": f"kept: {name}"},
        )
    ]
    for name in HALVES
}

CAUSES = (
    Cause(
        "half-precision scores",
        3,
        "q·k runs in float16 or bfloat16 (often under autocast, or with q and k cast for speed): the scores are good "
        "to three digits (two in bfloat16), and a score of 30 is off by up to 0.1. The formula is right; the numbers "
        "are rounded before the softmax, which raises e to them.",
        "scores = q.float() @ k.float().transpose(-2, -1) / math.sqrt(D)",
        lambda s: [
            (f"({name})", {"product": f"{when}{name}"}) for when in ("", "scores: ") for name in ("bfloat16", "float16")
        ],
        paired=4,
    ),
    Cause(
        "half-precision softmax",
        3,
        "The softmax runs in float16 or bfloat16: weights are good to three digits (two in bfloat16), and what is "
        "below about 6e-8 in float16 becomes 0. The formula is right; the numbers are rounded on the way.",
        "weights = scores.float().softmax(dim=-1).to(v.dtype)",
        lambda s: [(f"({name})", {"precision": name}) for name in ("bfloat16", "float16")],
        paired=2,
    ),
    Cause(
        "attention in half precision",
        3,
        "q, k and v are cast to float16 or bfloat16, and attention runs in it (often for a fused kernel that takes no "
        "float32): the output is good to three digits (two in bfloat16). The formula is right.",
        "out = attend(q, k, v)            # in their own dtype; or compare with a reference in that dtype",
        lambda s: [(f"({name})", changes) for name, ways in CORES.items() for changes in ways],
        paired=0,
    ),
    Cause(
        "the whole layer in half precision",
        1,
        "x and the weights are cast to float16 or bfloat16, and every step runs in it: the output is good to three "
        "digits (two in bfloat16). The formula is right.",
        "layer.float()(x.float())         # or compare with a reference in that dtype",
        lambda s: [(f"({name})", changes) for name, ways in LAYERS.items() for changes in ways],
        paired=0,
    ),
)

"""The table: every case, each with the reason it is there, in single precision and again in both kinds of half.

Sizes that people run. The table of the tests (tests/cases.py) has sizes at which mistakes show, small enough for an
oracle in extended precision; timed they would say nothing. Every case here is checked before it is timed, too.
"""

from dataclasses import replace
from fnmatch import fnmatchcase

from multihead.bench.cases import (
    CAUSAL,
    FULL,
    HALF_LAYER_PEERS,
    LAYER_PEERS,
    NN,
    ONE_ATTEND,
    OURS_FP32,
    SDPA,
    ZENTORCH,
    Attend,
    Layer,
    Lens,
    Mask,
    Model,
    Train,
)
from multihead.bench.generation import GENERATION


def lens(B, H, N, D, why, **options):
    """Each question at one size, causal, with what it may cost in calls of attend."""
    attends = {"statistics": 2.5, "rows": 0.01, "map": 1.5}
    return [Lens(what, B, H, N, D, CAUSAL, why, {ONE_ATTEND: 1 / most}, **options) for what, most in attends.items()]


def pair(B, H, N, D, why, full=1.0, causal=1.0, quick=False):
    """One size, full and causal, with the ratio to reach for each."""
    return [
        Attend(B, H, H, N, N, D, mask, why, {SDPA: ratio}, quick) for mask, ratio in ((FULL, full), (CAUSAL, causal))
    ]


def training(B, H, N, D, why):
    return [Train(B, H, H, N, N, D, mask, why, quick=N == 512) for mask in (FULL, CAUSAL)]


# Short and long alternate, so that neither order nor equal sharing balances them by luck.
DOCUMENTS = (1500, 17, 411, 930, 63, 1210, 257, 640)
PACKED = sum(DOCUMENTS)

# fmt: off
SINGLE = [
    *pair(1,  8,  512,  64, "torch does the whole square for causal", 1.15, 1.9, quick=True),
    *pair(1,  8, 2048,  64, "a language model's prompt", 1.15, 1.4),
    *pair(1,  8, 2048, 128, "the usual head width of large models", 1.1, 1.4),
    *pair(1,  8, 8192, 128, "long: the scores would need 2 GiB", 1.1, 1.15),
    *pair(8, 12,  197,  64, "vision transformer, ViT-B/16: 197 is no multiple of anything", 1.4, 2.2),

    *pair(1, 8,   17, 120, "the call is the cost", quick=True),
    *pair(1, 8,   63,  40, "one less than a block, narrow heads"),
    *pair(1, 8,  257,  80, "one more than a block"),
    *pair(1, 8, 1000,  96, "head width of no power of two, ragged end"),
    *pair(1, 8, 1000, 120, "head width of no vector's multiple"),
    Attend(1, 8, 8,  63, 1000,  80, FULL,   "cross-attention: few queries, many keys", {}),
    Attend(1, 8, 8, 1000,  63,  40, FULL,   "cross-attention: many queries, few keys", {}),
    Attend(1, 8, 8, 257, 1000,  96, CAUSAL, "a further chunk of a prompt: torch needs a dense mask", {}),

    Attend(1, 8, 8, 8192, 8192, 64, Mask(causal=True, window=256), "sliding window: 3 % of the square is useful",
           {SDPA: 8.0}),
    Attend(1, 8, 8, PACKED, PACKED, 64, Mask(documents=DOCUMENTS), "packed 17 to 1500 tokens; torch pads",
           {SDPA: 1.5}),
    Attend(1, 8, 8, PACKED, PACKED, 64, Mask(causal=True, documents=DOCUMENTS), "the same for a language model",
           {SDPA: 1.5}),

    Attend(1,  8, 8, 1, 4096, 128, FULL, "decode: reading keys and values is all there is to do", {SDPA: 0.97}),
    Attend(1, 32, 8, 1, 4096, 128, FULL, "decode, grouped: read once, or once per head?", {SDPA: 3.5}, quick=True),

    *training(1,  8,  512, 64, "training: short"),
    *training(1,  8, 2048, 64, "training: a language model's text"),
    *training(8, 12,  197, 64, "training: a vision transformer"),

    Layer(1,    1, 1024,  8, FULL,   "one token: nothing but the reading of weights"),
    Layer(1,    4, 1024,  8, FULL,   "the running example: reading the weights is the cost", {NN: 1.8}, quick=True),
    Layer(8,  197,  768, 12, FULL,   "ViT-B/16: projections are 80 % of it", dict.fromkeys(LAYER_PEERS[:-1], 1.05)),
    Layer(1, 2048, 1024,  8, CAUSAL, "a language model's prompt", dict.fromkeys(LAYER_PEERS[:-1], 1.15)),

    *lens(1, 8,  2048, 64, "where a peer that keeps the weights still fits"),
    *lens(1, 8, 32768, 64, "all weights would need 34 GB", fits=False, named=True),

    # kind    size     B    N    E   H   G     F  layers
    Model("ViT",   "tiny",  1,  197, 192,  3,  3,  768, 12, "DeiT-tiny: an image at a time", quick=True),
    Model("ViT",   "base",  1,  197, 768, 12, 12, 3072, 12, "ViT-B/16: the attention is a small part of it"),
    Model("BERT",  "tiny",  8,  128, 128,  2,  2,  512,  2, "the smallest BERT: the calls are the cost"),
    Model("BERT",  "base",  1,  512, 768, 12, 12, 3072, 12, "an encoder at its full length"),
    Model("Llama", "tiny",  1,  256, 288,  6,  6,  768,  6, "the size of a story-teller"),
    Model("Llama", "base",  1,  512, 768, 12,  4, 2048, 12, "grouped heads, causal"),
    Model("Llama", "small", 1, 4096, 512,  8,  4, 1376,  4, "prefill of 4096 tokens"),
    Model("Llama", "base",  1,    1, 768, 12,  4, 2048, 12, "decode: one token after 1024", cached=1024),
    Model("Llama", "small", 1,    1, 512,  8,  4, 1376,  4, "decode: one token after 4096", cached=4096),
    Model("ViT",   "tiny",  1,  197, 192,  3,  3,  768, 12, "attentions of every layer", attentions=True),
    Model("BERT",  "base",  1,  512, 768, 12, 12, 3072, 12, "attentions of every layer", attentions=True),
    Model("Llama", "small", 1, 1024, 512,  8,  4, 1376,  4, "half of them are hidden", attentions=True),
]
# fmt: on


def both(ratio):
    """Against torch and zentorch."""
    return {SDPA: ratio, ZENTORCH: ratio}


def layer_goals(fp32, peer):
    return dict.fromkeys(HALF_LAYER_PEERS["bf16"], peer) | {OURS_FP32: fp32}


HALF_GOALS = {  # 1 where nothing is said, as in single precision
    "attend/1x8x512x64/full/bf16": both(1.1),
    "attend/1x8x512x64/causal/bf16": both(2.0),
    "attend/1x8x2048x128/full/bf16": both(1.1),
    "attend/1x8x2048x128/causal/bf16": both(1.4),
    "attend/8x12x197x64/full/bf16": both(1.05),
    "attend/8x12x197x64/causal/bf16": both(1.5),
    "decode/1x32:8x1:4096x128/full/bf16": {OURS_FP32: 1.7},
    "train/1x8x2048x64/causal/bf16": {SDPA: 1.5},
    "layer/1x1x1024/8-heads/full/bf16": layer_goals(1.5, 1.1),
    "layer/1x4x1024/8-heads/full/bf16": layer_goals(1.7, 1.1),
    "layer/8x197x768/12-heads/full/bf16": layer_goals(1.6, 1.1),
    "layer/1x2048x1024/8-heads/causal/bf16": layer_goals(1.6, 1.1),
    "layer/1x4x1024/8-heads/full/fp16": {OURS_FP32: 1.3},
}


def in_half(case, dtype):
    """The same case in `dtype`. A lens may cost as many calls of attend as in single precision."""
    case = replace(case, dtype=dtype, goals={k: v for k, v in case.goals.items() if k == ONE_ATTEND})
    return replace(case, goals=case.goals | HALF_GOALS.get(case.name, {}))


CASES = [*SINGLE, *(in_half(case, dtype) for dtype in ("bf16", "fp16") for case in SINGLE), *GENERATION]


def select(patterns=(), quick=False, named=False, dtypes=("fp32",)):
    """Cases whose name contains a pattern, or matches it as a glob; where no pattern is given, all but the `named`."""
    chosen = [case for case in CASES if (case.quick or not quick) and case.dtype in dtypes]
    if patterns:
        return [c for c in chosen if any(p in c.name or fnmatchcase(c.name, p) for p in patterns)]
    return [case for case in chosen if named or not getattr(case, "named", False)]

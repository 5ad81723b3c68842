"""What is measured: one table of cases, each with the reason it is there. Data only; nothing here runs anything.

B batch · H query heads · G key/value heads · Q queries · K keys · D head width (of v too) · E model width.
"""

from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

FLOAT = 4  # bytes; every case is float32

SDPA = "torch SDPA"
PER_DOCUMENT = "torch SDPA, a call per document"
GROUPED = "torch SDPA, group as queries"
NN, FUSED = "nn.MultiheadAttention", "torch, fused by hand"
ORT, OPENVINO = "ONNX Runtime", "OpenVINO"
LAYER_PEERS = (NN, FUSED, ORT, OPENVINO)
ONE_ATTEND, MATERIALISED = "one attend of the same size", "torch, all weights in memory"
HF_SDPA, HF_EAGER = "transformers, sdpa", "transformers, eager"
PEERS = (SDPA, PER_DOCUMENT, GROUPED, *LAYER_PEERS, ONE_ATTEND, MATERIALISED, HF_SDPA, HF_EAGER)


@dataclass(frozen=True)
class Mask:
    """Which keys each query sees, worked out here and not by the package, whose masks are part of what is checked."""

    causal: bool = False
    window: int | None = None  # how many newest keys stay visible; causal only
    documents: tuple[int, ...] = ()  # lengths of packed sequences, each seeing itself only

    @property
    def label(self):
        parts = ["documents"] * bool(self.documents) + [f"window{self.window}"] * bool(self.window)
        return "-".join(parts + ["causal"] * self.causal) or "full"

    def intervals(self, Q, K):
        """Query q sees keys start[q] <= key < stop[q]: two int64 tensors (Q,). The last query sees the last key."""
        position = torch.arange(Q) + (K - Q)
        start, stop = torch.zeros(Q, dtype=torch.int64), torch.full((Q,), K)
        if self.documents:
            lengths = torch.tensor(self.documents)
            stop = lengths.cumsum(0).repeat_interleave(lengths)
            start = stop - lengths.repeat_interleave(lengths)
        if self.causal:
            stop = torch.minimum(stop, position + 1)
        if self.window:
            start = torch.maximum(start, position + 1 - self.window)
        return start, stop

    def pairs(self, Q, K):
        """How many (query, key) pairs are visible: the useful work."""
        start, stop = self.intervals(Q, K)
        return int((stop - start).clamp(min=0).sum())


FULL, CAUSAL = Mask(), Mask(causal=True)


@dataclass(frozen=True)
class Attend:
    """`attend(q, k, v)` against what torch offers for the same question."""

    B: int
    H: int
    G: int
    Q: int
    K: int
    D: int
    mask: Mask
    why: str
    goals: dict[str, float] = field(default_factory=dict, hash=False)  # ratio to reach, by peer; 1 where none is named
    quick: bool = False  # in the short list

    @property
    def name(self):
        heads = str(self.H) if self.H == self.G else f"{self.H}:{self.G}"
        length = str(self.Q) if self.Q == self.K else f"{self.Q}:{self.K}"
        kind = "decode" if self.Q == 1 else "attend"
        return f"{kind}/{self.B}x{heads}x{length}x{self.D}/{self.mask.label}"

    @property
    def peers(self):
        per_document = [PER_DOCUMENT] if self.mask.documents else []
        grouped = [GROUPED] if self.Q == 1 and self.G < self.H else []
        return (SDPA, *per_document, *grouped)

    @property
    def flops(self):
        """Useful ones only: two products, a multiplication and an addition each, for visible pairs."""
        return 4 * self.B * self.H * self.mask.pairs(self.Q, self.K) * self.D

    @property
    def bytes(self):
        """K and v, read once."""
        return 2 * self.B * self.G * self.K * self.D * FLOAT


@dataclass(frozen=True)
class Layer:
    """The whole layer, projections included, on (B,N,E), with as many key/value heads as heads."""

    B: int
    N: int
    E: int
    H: int
    mask: Mask
    why: str
    goals: dict[str, float] = field(default_factory=dict, hash=False)
    quick: bool = False
    peers = LAYER_PEERS

    @property
    def name(self):
        return f"layer/{self.B}x{self.N}x{self.E}/{self.H}-heads/{self.mask.label}"

    @property
    def flops(self):
        """Four projections, and attention over visible pairs."""
        return self.B * (8 * self.N * self.E**2 + 4 * self.mask.pairs(self.N, self.N) * self.E)

    @property
    def bytes(self):
        """Four weight matrices and their biases, read once."""
        return 4 * (self.E**2 + self.E) * FLOAT


@dataclass(frozen=True)
class Lens:
    """What a lens tells of the weights of (B,H,N,D), against one `attend` and against a peer that keeps all weights."""

    what: str  # "statistics" (entropy, peak and received), "rows" (of 16 queries) or "map" (512 × 512)
    B: int
    H: int
    N: int
    D: int
    mask: Mask
    why: str
    goals: dict[str, float] = field(default_factory=dict, hash=False)
    quick: bool = False
    fits: bool = True  # whether all weights fit in memory, and the peer that keeps them takes part
    named: bool = False  # takes minutes, and is run only where --case asks for it

    @property
    def name(self):
        return f"lens-{self.what}/{self.B}x{self.H}x{self.N}x{self.D}/{self.mask.label}"

    @property
    def peers(self):
        return (ONE_ATTEND, MATERIALISED) if self.fits else (ONE_ATTEND,)

    @property
    def queries(self):
        """Of `rows`: 16, spread over the sequence."""
        return list(range(self.N - 1, -1, -max(1, self.N // 16)))[:16]

    @property
    def flops(self):
        """One product, for the visible pairs that are asked about."""
        if self.what == "rows":
            start, stop = self.mask.intervals(self.N, self.N)
            pairs = int((stop - start)[self.queries].sum())
        else:
            pairs = self.mask.pairs(self.N, self.N)
        return 2 * self.B * self.H * pairs * self.D

    @property
    def bytes(self):
        """K, read once."""
        return self.B * self.H * self.N * self.D * FLOAT


@dataclass(frozen=True)
class Model:
    """A Hugging Face model with random weights, a whole forward pass, on our attention and on transformers' own."""

    kind: str  # "ViT" (images of 224 × 224, so N is 197), "BERT" or "Llama"
    size: str
    B: int
    N: int
    E: int
    H: int
    G: int
    F: int  # width between the two matrices of the feed-forward part
    layers: int
    why: str
    attentions: bool = False  # whether output_attentions=True, against the attention that can: eager
    goals: dict[str, float] = field(default_factory=dict, hash=False)
    quick: bool = False

    @property
    def name(self):
        return f"model/{self.kind}-{self.size}/{self.B}x{self.N}{'/attentions' if self.attentions else ''}"

    @property
    def peers(self):
        return (HF_EAGER,) if self.attentions else (HF_SDPA,)

    @property
    def matrices(self):
        """Numbers in the matrices of all layers; a Llama's feed-forward part has three."""
        narrow = 2 * self.E * self.E * self.G // self.H  # k and v
        return self.layers * (2 * self.E**2 + narrow + (3 if self.kind == "Llama" else 2) * self.E * self.F)

    @property
    def flops(self):
        """Every matrix for every token, and attention over visible pairs."""
        pairs = (CAUSAL if self.kind == "Llama" else FULL).pairs(self.N, self.N)
        return self.B * (2 * self.N * self.matrices + 4 * self.layers * pairs * self.E)

    @property
    def bytes(self):
        """The matrices, read once."""
        return self.matrices * FLOAT


def goal(case, peer):
    return case.goals.get(peer, 1.0)


def lens(B, H, N, D, why, **options):
    """Each question at one size, causal, with what it may cost in calls of attend."""
    attends = {"statistics": 2.5, "rows": 0.01, "map": 1.5}
    return [Lens(what, B, H, N, D, CAUSAL, why, {ONE_ATTEND: 1 / most}, **options) for what, most in attends.items()]


def pair(B, H, N, D, why, full=1.0, causal=1.0, quick=False):
    """One size, full and causal, with the ratio to reach for each."""
    return [
        Attend(B, H, H, N, N, D, mask, why, {SDPA: ratio}, quick) for mask, ratio in ((FULL, full), (CAUSAL, causal))
    ]


# Short and long alternate, so that neither order nor equal sharing balances them by luck.
DOCUMENTS = (1500, 17, 411, 930, 63, 1210, 257, 640)
PACKED = sum(DOCUMENTS)

# fmt: off
CASES = [
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

    Layer(1,    4, 1024,  8, FULL,   "the running example: reading the weights is the cost", {NN: 1.8}, quick=True),
    Layer(8,  197,  768, 12, FULL,   "ViT-B/16: projections are 80 % of it", dict.fromkeys(LAYER_PEERS, 1.05)),
    Layer(1, 2048, 1024,  8, CAUSAL, "a language model's prompt", dict.fromkeys(LAYER_PEERS, 1.15)),

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
    Model("ViT",   "tiny",  1,  197, 192,  3,  3,  768, 12, "attentions of every layer", attentions=True),
    Model("BERT",  "base",  1,  512, 768, 12, 12, 3072, 12, "attentions of every layer", attentions=True),
    Model("Llama", "small", 1, 1024, 512,  8,  4, 1376,  4, "half of them are hidden", attentions=True),
]
# fmt: on


def select(patterns=(), quick=False, named=False):
    """Cases whose name contains a pattern, or matches it as a glob; where no pattern is given, all but the `named`."""
    chosen = [case for case in CASES if case.quick or not quick]
    if patterns:
        return [c for c in chosen if any(p in c.name or fnmatchcase(c.name, p) for p in patterns)]
    return [case for case in chosen if named or not getattr(case, "named", False)]

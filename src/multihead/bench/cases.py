"""What is measured: kinds of cases, each in any dtype, and who takes part. Data only; nothing here runs anything.

B batch · H query heads · G key/value heads · Q queries · K keys · D head width (of v too) · E model width.
"""

from dataclasses import dataclass, field

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

SDPA = "torch SDPA"
PER_DOCUMENT = "torch SDPA, a call per document"
GROUPED = "torch SDPA, group as queries"
FLEX = "torch FlexAttention"
ZENTORCH = "zentorch"
NN, FUSED = "nn.MultiheadAttention", "torch, fused by hand"
ORT, OPENVINO = "ONNX Runtime", "OpenVINO"
LAYER_PEERS = (NN, FUSED, ORT, OPENVINO, ZENTORCH)
HALF_LAYER_PEERS = {"bf16": (NN, FUSED, OPENVINO, ZENTORCH), "fp16": (NN, FUSED, ZENTORCH)}  # who computes in it
OURS_FP32 = "ours in fp32"
ONE_ATTEND, MATERIALISED = "one attend of the same size", "torch, all weights in memory"
HF_SDPA, HF_EAGER = "transformers, sdpa", "transformers, eager"
BY_HAND, BY_HAND_COMPILED = "torch, step by hand", "torch, step by hand, compiled"
HF_STATIC, HF_COMPILED = "transformers, sdpa, static cache", "transformers, compiled, static cache"
PEERS = (
    *(SDPA, PER_DOCUMENT, GROUPED, FLEX),
    *LAYER_PEERS,
    *(ONE_ATTEND, MATERIALISED, HF_SDPA, HF_EAGER, OURS_FP32),
    *(BY_HAND, BY_HAND_COMPILED, HF_STATIC, HF_COMPILED),
)


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


class Numbers:
    """What the dtype of a case decides."""

    dtype: str  # a name in DTYPES

    @property
    def type(self):
        return DTYPES[self.dtype]

    @property
    def suffix(self):
        """Of the name."""
        return "" if self.dtype == "fp32" else f"/{self.dtype}"

    @property
    def own(self):
        """In half precision, ourselves in single: whether it pays to change."""
        return () if self.dtype == "fp32" else (OURS_FP32,)


@dataclass(frozen=True)
class Attend(Numbers):
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
    dtype: str = "fp32"

    @property
    def name(self):
        heads = str(self.H) if self.H == self.G else f"{self.H}:{self.G}"
        length = str(self.Q) if self.Q == self.K else f"{self.Q}:{self.K}"
        kind = "decode" if self.Q == 1 else "attend"
        return f"{kind}/{self.B}x{heads}x{length}x{self.D}/{self.mask.label}{self.suffix}"

    @property
    def peers(self):
        per_document = [PER_DOCUMENT] if self.mask.documents else []
        grouped = [GROUPED] if self.Q == 1 and self.G < self.H else []
        blocks = self.mask.documents or self.mask.window
        fits = (
            [FLEX] if blocks or (self.mask.causal and self.Q != self.K) else []
        )  # where SDPA has no word for the mask
        zentorch = [] if blocks else [ZENTORCH]
        return (SDPA, *per_document, *grouped, *fits, *zentorch, *self.own)

    @property
    def flops(self):
        """Useful ones only: two products, a multiplication and an addition each, for visible pairs."""
        return 4 * self.B * self.H * self.mask.pairs(self.Q, self.K) * self.D

    @property
    def bytes(self):
        """K and v, read once."""
        return 2 * self.B * self.G * self.K * self.D * self.type.itemsize


@dataclass(frozen=True)
class Train(Attend):
    """Forward and backward of the same: the gradients of q, k and v for a given one of the output."""

    @property
    def name(self):
        return "train" + super().name.removeprefix("attend")

    @property
    def peers(self):
        return (SDPA, *self.own)

    @property
    def flops(self):
        """Two products forward; five backward, of which one makes the scores again."""
        return super().flops * 7 // 2


@dataclass(frozen=True)
class Layer(Numbers):
    """The whole layer, projections included, on (B,N,E), with as many key/value heads as heads."""

    B: int
    N: int
    E: int
    H: int
    mask: Mask
    why: str
    goals: dict[str, float] = field(default_factory=dict, hash=False)
    quick: bool = False
    dtype: str = "fp32"

    @property
    def name(self):
        return f"layer/{self.B}x{self.N}x{self.E}/{self.H}-heads/{self.mask.label}{self.suffix}"

    @property
    def peers(self):
        return (*HALF_LAYER_PEERS.get(self.dtype, LAYER_PEERS), *self.own)

    @property
    def flops(self):
        """Four projections, and attention over visible pairs."""
        return self.B * (8 * self.N * self.E**2 + 4 * self.mask.pairs(self.N, self.N) * self.E)

    @property
    def bytes(self):
        """Four weight matrices and their biases, read once."""
        return 4 * (self.E**2 + self.E) * self.type.itemsize


@dataclass(frozen=True)
class Lens(Numbers):
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
    dtype: str = "fp32"

    @property
    def name(self):
        return f"lens-{self.what}/{self.B}x{self.H}x{self.N}x{self.D}/{self.mask.label}{self.suffix}"

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
        return self.B * self.H * self.N * self.D * self.type.itemsize


@dataclass(frozen=True)
class Model(Numbers):
    """A Hugging Face model with random weights, a whole forward pass, on our attention and on transformers' own.

    `cached`: how many tokens stand in the key/value cache already; of a Llama, N new ones follow them.
    """

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
    dtype: str = "fp32"
    cached: int = 0

    @property
    def name(self):
        length = f"{self.N}:{self.N + self.cached}" if self.cached else f"{self.N}"
        attentions = "/attentions" if self.attentions else ""
        return f"model/{self.kind}-{self.size}/{self.B}x{length}{attentions}{self.suffix}"

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
        pairs = (CAUSAL if self.kind == "Llama" else FULL).pairs(self.N, self.N + self.cached)
        return self.B * (2 * self.N * self.matrices + 4 * self.layers * pairs * self.E)

    @property
    def bytes(self):
        """The matrices, read once, and the cached keys and values."""
        cached = 2 * self.B * self.layers * self.cached * self.E * self.G // self.H
        return (self.matrices + cached) * self.type.itemsize


def goal(case, peer):
    return case.goals.get(peer, 1.0)

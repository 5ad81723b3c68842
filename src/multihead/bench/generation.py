"""Cases of generating text: decoding steps of a layer, and whole models in their published sizes. Data only."""

from dataclasses import dataclass, field

from multihead.bench.cases import (
    BY_HAND,
    BY_HAND_COMPILED,
    HF_COMPILED,
    HF_EAGER,
    HF_SDPA,
    HF_STATIC,
    Numbers,
)

# kind, vocabulary, E, F, layers, H, G of checkpoints that are published; the weights here are random
SIZES = {
    "SmolLM2-135M": ("Llama", 49152, 576, 1536, 30, 9, 3),
    "SmolLM2-360M": ("Llama", 49152, 960, 2560, 32, 15, 5),
    "Qwen2.5-0.5B": ("Qwen2", 151936, 896, 4864, 24, 14, 2),
    "Llama-3.2-1B": ("Llama", 128256, 2048, 8192, 16, 32, 8),
    "BERT-base": ("BERT", 30522, 768, 3072, 12, 12, 12),
    "ViT-base": ("ViT", 0, 768, 3072, 12, 12, 12),
    "Whisper-tiny": ("Whisper", 51865, 384, 1536, 4, 6, 6),
}


@dataclass(frozen=True)
class Step(Numbers):
    """N new tokens of each of B rows through a layer with RoPE, `cached` before them; `ragged`: half as many in half.

    One is a step of decoding; many behind none are a prompt.
    """

    B: int
    cached: int
    E: int
    H: int
    G: int
    why: str
    goals: dict[str, float] = field(default_factory=dict, hash=False)
    ragged: bool = False
    quick: bool = False
    dtype: str = "fp32"
    N: int = 1
    peers = (BY_HAND, BY_HAND_COMPILED)

    @property
    def name(self):
        ragged = "/ragged" if self.ragged else ""
        what = f"prompt/{self.B}x{self.N}" if self.N > 1 else f"step/{self.B}x1:{self.cached}"
        return f"{what}/{self.E}/{self.H}:{self.G}-heads{ragged}{self.suffix}"

    @property
    def D(self):
        return self.E // self.H

    @property
    def lengths(self):
        """How many tokens each row has before this one."""
        return [self.cached // 2 if self.ragged and b % 2 else self.cached for b in range(self.B)]

    @property
    def matrices(self):
        return 2 * self.E * (self.H + self.G) * self.D

    @property
    def flops(self):
        pairs = sum(self.N * length + self.N * (self.N + 1) // 2 for length in self.lengths)
        return 2 * self.B * self.N * self.matrices + 4 * self.E * pairs

    @property
    def bytes(self):
        """The matrices, and the keys and values that are seen, read once."""
        return (self.matrices + 2 * self.G * self.D * sum(self.lengths)) * self.type.itemsize


@dataclass(frozen=True)
class Whole(Numbers):
    """A model sped up by `hf.speed_up`, against transformers as it is.

    `N` new tokens behind `cached` ones: one is a step of `generate`, many behind none are the time to the first token.
    An encoder has N only.
    """

    size: str  # a name in SIZES
    N: int
    cached: int
    why: str
    goals: dict[str, float] = field(default_factory=dict, hash=False)
    peers: tuple[str, ...] = (HF_SDPA,)
    named: bool = False
    quick: bool = False
    dtype: str = "fp32"

    @property
    def name(self):
        what = "token" if self.N == 1 else "prefill" if self.generates else "forward"
        length = f"{self.N}:{self.cached}" if self.cached else f"{self.N}"
        return f"whole/{self.size}/{what}/{length}{self.suffix}"

    @property
    def generates(self):
        return SIZES[self.size][0] in ("Llama", "Qwen2")

    @property
    def tokens(self):
        """Of a call, where tokens a second say something."""
        return self.N if self.generates else None

    @property
    def matrices(self):
        kind, vocabulary, E, F, layers, H, G = SIZES[self.size]
        each = 2 * E * E + 2 * E * E * G // H + (3 if self.generates else 2) * E * F
        if kind == "Whisper":  # an encoder, and a decoder that attends to it too
            each = 2 * each + 4 * E * E
        return layers * each + (vocabulary * E if self.generates else 0)  # the head asks about one token

    @property
    def flops(self):
        kind, vocabulary, E, _, layers, _, _ = SIZES[self.size]
        head = vocabulary * E if self.generates else 0
        pairs = self.N * self.cached + (self.N * (self.N + 1) // 2 if self.generates else self.N**2)
        if kind == "Whisper":
            return 2 * 1500 * self.matrices // 2 + 4 * layers * 1500**2 * E
        return 2 * (self.N * (self.matrices - head) + head) + 4 * layers * pairs * E

    @property
    def bytes(self):
        _, _, E, _, layers, H, G = SIZES[self.size]
        return (self.matrices + 2 * layers * self.cached * E * G // H) * self.type.itemsize


def steps(why, goals, **options):
    """One token behind more and more, with the ratio to reach for each."""
    return [
        Step(1, cached, 1024, 16, 4, why, {BY_HAND: goals.get(cached, 1.0)}, quick=cached == 1024, **options)
        for cached in (128, 1024, 4096, 32768)
    ]


SMALL, EVERYONE = "SmolLM2-135M", (HF_SDPA, HF_EAGER, HF_STATIC, HF_COMPILED)

GENERATION = [
    *steps("a decoding step: projections, RoPE, cache, attention", {128: 1.8, 1024: 2.0, 4096: 3.0}),
    *steps("the same in half the bytes", {}, dtype="bf16"),
    *(Step(1, 0, 1024, 16, 4, "a prompt through the same layer", {BY_HAND: 1.3}, N=N) for N in (64, 512, 2048)),
    Step(8, 1024, 1024, 16, 4, "eight conversations at once"),
    Step(8, 1024, 1024, 16, 4, "eight of two lengths: torch needs a mask", ragged=True),
    Whole(SMALL, 1, 64, "a token soon after the start: weights are all there is to read", {HF_SDPA: 2.0}),
    Whole(SMALL, 1, 1024, "a token of a page", {HF_SDPA: 2.0}, EVERYONE),
    Whole(SMALL, 1, 4096, "a token of a long text: DynamicCache copies it all", {HF_SDPA: 2.2}, EVERYONE[:3]),
    Whole(SMALL, 1024, 0, "time to the first token", {HF_SDPA: 1.1}),
    Whole(SMALL, 4096, 0, "the same of a long prompt", {HF_SDPA: 1.2}),
    Whole(SMALL, 1, 64, "half the bytes", {HF_SDPA: 2.0}, dtype="bf16"),
    Whole(SMALL, 1, 1024, "half the bytes", {HF_SDPA: 2.0}, dtype="bf16"),
    Whole(SMALL, 1, 4096, "half the bytes of a long text, too", {HF_SDPA: 2.0}, dtype="bf16"),
    *(Whole(SMALL, N, 0, "time to the first token", dtype="bf16") for N in (1024, 4096)),
    Whole("BERT-base", 512, 0, "an encoder", dtype="bf16"),
    Whole("ViT-base", 197, 0, "a picture", dtype="bf16"),
    Whole("SmolLM2-360M", 1, 1024, "the next size", named=True),
    Whole("Qwen2.5-0.5B", 1, 1024, "a large vocabulary, biases of q, k and v", named=True),
    Whole("Llama-3.2-1B", 1, 1024, "2.5 GB of weights", named=True, dtype="bf16"),
    Whole("BERT-base", 512, 0, "an encoder", {HF_SDPA: 1.05}),
    Whole("ViT-base", 197, 0, "a picture", {HF_SDPA: 1.05}),
    Whole("Whisper-tiny", 4, 0, "half a minute of speech, and its first tokens"),
]

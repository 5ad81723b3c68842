"""What a layout is: which tensors a checkpoint has for one attention layer, and a picture of how q, k and v lie.

In the pictures a box is one tensor, `q0` the rows (D of them) of query head 0, and E runs across; a file's name for it
stands beside. All boxes are drawn as the file has them.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from multihead.sizes import Sizes
from multihead.weights.arrange import Arrangement, Groups, Kernel, LessOne, Rows

QKV = ("q", "k", "v")
QKV_BIAS = ("q_bias", "k_bias", "v_bias")
ROWS = Rows()


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint: its name after the prefix, and which parts it holds, how."""

    key: str
    parts: tuple[str, ...]
    lie: Arrangement = ROWS

    @property
    def is_bias(self) -> bool:
        return self.parts[0].endswith("_bias")


@dataclass(frozen=True)
class Layout:
    """A way to keep an attention layer's weights. Print it for its picture."""

    name: str
    of: str  # whose it is
    picture: str
    entries: tuple[Entry, ...]
    also: tuple[str, ...] = ()  # other names for the same
    either: bool = False  # biases are all there, or none
    pairing: str | None = None  # of RoPE, if the layers that are kept this way have it
    allows: str = ""  # which of "G<H", "H·D≠E", "V≠D" and "C≠E" it has room for
    ignores: tuple[str, ...] = ()  # names beside the weights that are no weights of the layer

    def required(self) -> list[str]:
        return [e.key for e in self.entries if not (self.either and e.is_bias)]

    def ignored(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.ignores)

    def no_room(self, s: Sizes) -> list[str]:
        """What a layer of these sizes has that this layout has no room for."""
        has = {
            "G<H": (s.G < s.H, f"kv_heads={s.G} of heads={s.H}: as many key/value heads as query heads"),
            "H·D≠E": (s.H * s.D != s.E, f"H·D={s.H * s.D} and E={s.E}: heads that add up to the model's width"),
            "V≠D": (s.V != s.D, f"value_dim={s.V} and head_dim={s.D}: one width for both"),
            "C≠E": (s.C != s.E, f"context_dim={s.C} and E={s.E}: one width for both"),
        }
        return [f"the layer has {what}" for sign, (there, what) in has.items() if there and sign not in self.allows]

    def __str__(self) -> str:
        title = f"{self.name}{''.join(f' = {name}' for name in self.also)}: {self.of}"
        biases = [e for e in self.entries if e.is_bias]
        covered = {part for e in biases for part in e.parts}
        lacks = [part[0] for part in (*QKV_BIAS, "o_bias") if part not in covered]
        bias = "no biases" if not biases else "biases all or none" if self.either else "biases always"
        bias += f", none for {', '.join(lacks)}" if biases and lacks else ""
        rope = f"; RoPE pairs {self.pairing}" if self.pairing else ""
        return f"{title}\n{self.picture.strip(chr(10))}\n{bias}{rope}"


def linear(q: str, k: str, v: str, o: str, bias: str = "qkvo") -> tuple[Entry, ...]:
    """Four `nn.Linear`, of which those in `bias` have one."""
    names = {"q": q, "k": k, "v": v, "o": o}
    weights = tuple(Entry(f"{name}.weight", (part,)) for part, name in names.items())
    return weights + tuple(Entry(f"{names[part]}.bias", (f"{part}_bias",)) for part in bias)


def fused(
    qkv: str, o: str, lie: Arrangement = ROWS, o_lie: Arrangement = ROWS, bias: str = "qkvo"
) -> tuple[Entry, ...]:
    """Two linear layers, the first for q, k and v together."""
    entries = [Entry(f"{qkv}.weight", QKV, lie), Entry(f"{o}.weight", ("o",), o_lie)]
    entries += [Entry(f"{qkv}.bias", QKV_BIAS, lie if isinstance(lie, Groups) else ROWS)] if "qkv" in bias else []
    entries += [Entry(f"{o}.bias", ("o_bias",))] if "o" in bias else []
    return tuple(entries)


def kernels(o: str) -> tuple[Entry, ...]:
    names = {"q": "query", "k": "key", "v": "value", "o": o}
    kernels = tuple(Entry(f"{name}/kernel", (part,), Kernel()) for part, name in names.items())
    biases = [
        Entry(f"{name}/bias", (f"{part}_bias",), ROWS if part == "o" else Kernel()) for part, name in names.items()
    ]
    return kernels + tuple(biases)


NORMS = (Entry("q_norm.weight", ("q_norm",)), Entry("k_norm.weight", ("k_norm",)))
NORMS_LESS_ONE = tuple(Entry(e.key, e.parts, LessOne()) for e in NORMS)
BUFFERS = ("bias", "masked_bias", "rotary_emb.inv_freq", "attention.bias", "attention.masked_bias")

SEPARATE = """
  {q:<22} ┌────┐  {k:<22} ┌────┐  {v:<22} ┌────┐
  {q_shape:<22} │ q0 │  {k_shape:<22} │ k0 │  {k_shape:<22} │ v0 │
                         │ q1 │                         │ k1 │                         │ v1 │
                         │ …  │                         │ …  │                         │ …  │
                         └────┘                         └────┘                         └────┘
  {o:<22} {o_shape}"""
BELOW = """
  {qkv:<22} ┌────┐
  {shape:<22} │ q0 │  all heads of q,
                         │ q1 │
                         │ …  │
                         ├────┤
                         │ k0 │  then all of k,
                         │ …  │
                         ├────┤
                         │ v0 │  then all of v
                         │ …  │
                         └────┘
  {o:<22} {o_shape}"""
PER_HEAD = """
  {qkv:<22} ┌────┐
  {shape:<22} │ q0 │  head 0
                         │ k0 │
                         │ v0 │
                         ├────┤
                         │ q1 │  head 1
                         │ k1 │
                         │ v1 │
                         │ …  │
                         └────┘
  {o:<22} {o_shape}"""
KERNELS = """
  query/kernel (E,H,D)   key/kernel {k}   value/kernel {v}: for each input, the heads
                         ┌────┬────┬───┐
  input 0                │ q0 │ q1 │ … │
  input 1                │ q0 │ q1 │ … │
  …                      └────┴────┴───┘
  query/bias (H,D)       {o}/kernel {o_shape}"""


def separate(q: str, k: str, v: str, o: str, *, q_shape: str = "(E,E)", k_shape: str = "(E,E)") -> str:
    o_shape = "(E,H·D)" if "D" in q_shape else "(E,E)"
    return SEPARATE.format(q=q, k=k, v=v, o=o, q_shape=q_shape, k_shape=k_shape, o_shape=o_shape)


def below(qkv: str, o: str, shape: str = "(3E,E)", o_shape: str = "(E,E)") -> str:
    return BELOW.format(qkv=qkv, o=o, shape=shape, o_shape=o_shape)


def per_head(qkv: str, o: str, shape: str = "(3E,E)", o_shape: str = "(E,E)") -> str:
    return PER_HEAD.format(qkv=qkv, o=o, shape=shape, o_shape=o_shape)


GROUPED = {"q_shape": "(H·D,E)", "k_shape": "(G·D,E)"}
LLAMA = separate("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", **GROUPED)
OUT = separate("q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight")

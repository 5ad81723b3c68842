"""A whole layer in one native call on the CPU, where that is eligible: project, norm, turn, keep, attend, project.

`MultiHeadAttention` comes here through `layer/whole.py`. Any other module that is four products, heads and RoPE can use
the same call by its tensors:

    parts = Parts(q=(w_q, b_q), k=(w_k, None), v=(w_v, None), o=(w_o, None), D=64)
    read = eligible.parts(parts, x)                      # or a Reason; asked only where `modules_watched()` is None
    reason = prepare(read, turn=Turn(cos, sin), store=Store(k_cache, v_cache, first=17, K=17 + N))
    y = run(read, x, mask) if reason is None else reason # (B, N, E), or a Reason: then nothing has happened

The call reads what it is given and writes only y and, behind the first `first` tokens, the new rows of the cache.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

from multihead.call import Reason
from multihead.kernel import eligible
from multihead.kernel.eligible import CPU
from multihead.masks import Mask, lower, see
from multihead.masks.intervals import Frame, Visible

if TYPE_CHECKING:
    from multihead import _native

Product = nn.Module | tuple[Tensor, Tensor | None]  # an nn.Linear that nobody watches, or its weight and bias


@dataclass
class Parts:
    """What a layer is made of. `k` and `v` None: the rows of q's weight are q's, then k's, then v's."""

    q: Product  # weight (H·D, E)
    k: Product | None  # (G·D, E)
    v: Product | None  # (G·V, E)
    o: Product  # (E, H·V)
    D: int
    V: int | None = None  # D unless given
    q_norm: tuple[Tensor | None, float] | None = None  # weight (D,) and eps of an RMS norm of each head
    k_norm: tuple[Tensor | None, float] | None = None
    scale: float | None = None  # 1/√D unless given
    softcap: float | None = None
    sinks: Tensor | None = None  # (H,)

    def __post_init__(self) -> None:
        self.V = self.D if self.V is None else self.V


class Turn(NamedTuple):
    """RoPE by the cosines and sines of its angles.

    Without `positions` a row for each token: (N,pairs), (1,N,pairs) or (B,N,pairs). With them a table (rows,pairs), and
    they say which row: a number, that of the first token of every batch row; with `counted` a tensor (B,), that of each
    batch row's first; else a tensor that broadcasts to (B,N).
    """

    cos: Tensor
    sin: Tensor
    positions: int | Tensor | None = None
    counted: bool = False
    interleaved: bool = False  # numbers 2p and 2p + 1 are a pair, instead of p and p + pairs
    pairs: int = -1  # use only so many numbers of each row: half of them where a row has each angle twice


class Store(NamedTuple):
    """A cache that the call's keys and values join: token n of batch row b becomes row `first` + n."""

    k: Tensor  # (B, G, room, D), of float32, bfloat16 or float16, whatever the layer's dtype; or of int8
    v: Tensor  # (B, G, room, V)
    first: int | Tensor  # the same for all rows, or (B,)
    K: int  # how many keys there are then, in the longest row
    real: Tensor | None = None  # (B,): how many tokens of each row join; all unless given
    scales: tuple[Tensor, Tensor] | None = None  # of int8: what a row of k, and of v, is multiplied by, (B, G, room, 1)


def reach() -> str:
    """How far one native call goes here, in words."""
    tokens = "any number of" if eligible.MANY else f"up to {eligible.ROWS}"
    return f"one native call, in inference, for {tokens} tokens"


def prepare(
    read: "_native.Layer",
    *,
    turn: Turn | None = None,
    context_turn: Turn | None = None,
    store: Store | None = None,
    recalled: tuple[Tensor, Tensor] | None = None,
) -> Reason | None:
    """Tell a call that was read what happens between projections and attention, or say why that is not for us.

    `context_turn` is for the keys, where they are of a context; `recalled` are keys and values that are there already,
    for a call that was read so.
    """
    wrong: tuple[str, bool] | None = None
    if turn is not None:
        wrong = _turned(read, turn, keys=context_turn is None and recalled is None)
    if context_turn is not None and wrong is None:
        wrong = _turned(read, context_turn, queries=False)
    if store is not None and wrong is None:
        scales = (None, None) if store.scales is None else store.scales
        wrong = read.join(store.k, store.v, store.first, store.K, store.real, *scales)
    if recalled is not None and wrong is None:
        wrong = read.recall(*recalled, recalled[0].shape[2])
    return None if wrong is None else Reason(*wrong)


def _turned(read: "_native.Layer", turn: Turn, queries: bool = True, keys: bool = True) -> tuple[str, bool] | None:
    cos, sin, positions, counted, interleaved, pairs = turn
    return read.rotate(
        cos, sin, positions, counted=counted, interleaved=interleaved, pairs=pairs, queries=queries, keys=keys
    )


def run(
    read: "_native.Layer", x: Tensor, mask: Mask | Visible | Tensor | None = None, frame: Frame | None = None
) -> Tensor | Reason:
    """What the layer puts out, of the shape of x but for its width; `frame`: where the queries stand among the keys.

    The kernel leaves nothing of the caches to Python, so each line here costs several times what it does in a loop by
    itself: tensors and projections are read in C++.
    """
    if mask is not None or frame is not None:
        if not isinstance(mask, Visible):
            B, H, Q, K = read.sizes  # at run time: a layer may be sharded by heads
            mask = see(mask, Q, K, CPU, B, H) if frame is None else lower(mask, frame, B, H)
        refused = read.see(mask)
        if refused is not None:
            return Reason(*refused)
    return read.put_out(x)

"""Ablate heads, and patch any intermediate, for as long as a `with` block lasts."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from multihead import steps
from multihead.layer import MultiHeadAttention
from multihead.layer.call import INSIDE, Inside
from multihead.masks import Joined, Mask, Padding, check_broadcast
from multihead.masks.intervals import Visible

NAMES = ("q", "k", "v", "q_heads", "k_heads", "v_heads", *INSIDE, "heads", "transposed", "merged")


@contextmanager
def tapped(layer: MultiHeadAttention, tap: steps.Tap, inside: Inside = Inside.NOTHING) -> Iterator[None]:
    """Show every intermediate of `layer` to `tap`, which may change it; `inside`: what it does to those of `INSIDE`."""
    layer.taps = (*layer.taps, (tap, inside))
    try:
        yield
    finally:  # this tap only: blocks that overlap may end in any order
        layer.taps = tuple(other for other in layer.taps if other[0] is not tap)
        layer._visibility = None


@contextmanager
def patch(layer: MultiHeadAttention, name: str, fn: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside the block, `fn` is given the intermediate `name` and what it returns takes its place.

    `scores`, `masked` and `weights` exist only outside fused kernels, so patching them takes the slower path; all
    others keep the fast one.

    >>> layer, x = mh.MultiHeadAttention(32, heads=4), torch.randn(5, 32)
    >>> with mh.patch(layer, "weights", lambda w: torch.full_like(w, 1 / 5)):
    ...     y = layer(x)  # every item looks at all items alike
    >>> torch.allclose(y[0], y[4], atol=1e-6)
    True
    """
    if name not in NAMES:
        raise ValueError(f"name={name!r}: expected one of {', '.join(NAMES)}")

    def tap(seen: str, t: Tensor) -> Tensor:
        if seen != name:
            return t
        changed = fn(t)
        if not isinstance(changed, Tensor) or changed.shape != t.shape:
            what = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise ValueError(f"the patch of {name!r} gave {what}: expected a tensor of shape {tuple(t.shape)}")
        return changed

    with tapped(layer, tap, Inside.CHANGE if name in INSIDE else Inside.NOTHING):
        yield


@contextmanager
def ablate(layer: MultiHeadAttention, heads: int | Sequence[int], with_: str | Tensor = "zero") -> Iterator[None]:
    """Inside the block, what these heads put out is replaced: on the fast path, before W_o mixes it in.

    Args:
        layer: the layer.
        heads: which heads, 0…H−1.
        with_: "zero"; "mean", the head's mean over this call's batch and positions, padded ones left out; or a tensor
            that broadcasts to (B, len(heads), Q, V).

    >>> layer, x = mh.MultiHeadAttention(32, heads=4), torch.randn(5, 32)
    >>> with mh.ablate(layer, heads=range(4)):
    ...     y = layer(x)
    >>> torch.equal(y, layer.o_proj.bias.expand(5, 32))
    True
    """
    fn = replacement(heads, with_)
    width = getattr(layer.q_proj, "out_features", layer.sizes.H * layer.sizes.D)  # a layer may be sharded by heads
    check_heads([heads] if isinstance(heads, int) else heads, width // layer.sizes.D)

    def replaced(t: Tensor) -> Tensor:
        visible, mask = layer._visibility or (None, None)
        return fn(t, None if visible is None else real_queries(visible, _pads(mask)))

    with patch(layer, "heads", replaced):
        yield


def real_queries(visible: Visible, own_keys: bool) -> Tensor | None:
    """Which queries do not stand on padding, (B, Q) or (1, Q); None: all of them.

    One that sees nothing does; and where the keys are the queries' own, one whose key nobody sees.
    """
    if visible.is_everything:
        return None
    allowed = visible.allowed(None)
    allowed = allowed[(None,) * (4 - allowed.dim())]  # (B, H, Q, K), an axis that does not matter being 1
    allowed = allowed.expand(*allowed.shape[:2], visible.Q, visible.K)
    real = allowed.any(-1).any(1)
    if own_keys and visible.Q == visible.K:
        real = real & allowed.any(-2).any(1)
    return real if bool(real.any()) else None


def _pads(mask: Mask | Tensor | None) -> bool:
    parts = mask.parts if isinstance(mask, Joined) else (mask,)
    return any(isinstance(part, Padding) for part in parts)


def check_heads(heads: Sequence[int], H: int) -> None:
    if any(isinstance(h, bool) or not isinstance(h, int) or not 0 <= h < H for h in heads):
        raise ValueError(f"heads={list(heads)}: expected head numbers 0…{H - 1}")


def replacement(heads: int | Sequence[int], with_: str | Tensor) -> Callable[[Tensor, Tensor | None], Tensor]:
    """A function of what all heads put out, (B, H, Q, V), and of which queries are real, (B, Q) or None for all.

    It replaces these heads' part of it; see `ablate`.
    """
    if not isinstance(heads, int | Iterable) or isinstance(heads, str):
        raise TypeError(f"heads={heads!r}: expected a head number or several of them")
    chosen = [heads] if isinstance(heads, int) else list(heads)
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"heads={chosen}: expected each head once")
    if not isinstance(with_, Tensor) and with_ not in ("zero", "mean"):
        raise ValueError(f"with_={with_!r}: expected 'zero', 'mean' or a tensor")

    def replace(t: Tensor, real: Tensor | None = None) -> Tensor:
        check_heads(chosen, t.shape[1])
        index = torch.tensor(chosen, device=t.device, dtype=torch.long)
        old = t.index_select(1, index)  # (B, h, Q, V)
        if isinstance(with_, Tensor):
            check_broadcast("with_", with_, old.shape, "(B,heads,Q,V)")
            new = with_.to(t).expand_as(old)
        elif with_ == "mean":
            if real is None:
                new = old.mean(dim=(0, 2), keepdim=True).expand_as(old)
            else:
                counted = real.expand(len(old), -1)[:, None, :, None]  # (B, 1, Q, 1)
                total = old.where(counted, 0).sum(dim=(0, 2), keepdim=True)
                new = (total / counted.sum()).expand_as(old)
        else:
            new = torch.zeros_like(old)
        return t.index_copy(1, index, new)

    return replace

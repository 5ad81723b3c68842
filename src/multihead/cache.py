"""Key/value caches: what earlier tokens left behind for later ones to read.

Keys lie in order from the start of the buffer, never wrapped around, so that what a query may see stays one interval.
Rows of a batch may have different lengths.

Longer than other files because growing, fixed and sliding caches share one buffer.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from multihead.masks import Mask, Window
from multihead.masks.intervals import Frame
from multihead.sizes import Sizes, describe, require_int
from multihead.tensors import holds_integers, require_storage

_T = TypeVar("_T")


def _row_numbers(rows: Tensor | Sequence[int], batch: int, device: torch.device) -> Tensor:
    """`rows` as a tensor, if they are numbers of rows of the batch."""
    if isinstance(rows, Sequence) and not isinstance(rows, str):
        rows = torch.tensor([require_int(f"rows[{n}]", row, 0) for n, row in enumerate(rows)], dtype=torch.long)
    if not isinstance(rows, Tensor):
        raise TypeError(f"rows is a {type(rows).__name__}: expected row numbers, a tensor or a list")
    if rows.dim() != 1 or not holds_integers(rows):
        raise ValueError(f"rows is {describe(rows)}: expected one axis of row numbers")
    require_storage("rows", rows)
    if rows.numel() and not (int(rows.min()) >= 0 and int(rows.max()) < batch):
        raise ValueError(f"rows={rows.tolist()}: expected row numbers 0…{batch - 1}")
    return rows.to(device)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (…, width) as integers of a byte, and what to multiply each row by, (…, 1) float32.

    The largest number of a row becomes ±127, and each is off by at most half a step, largest / 254. A row that is not
    finite has a scale of NaN.

    >>> numbers, scale = quantise(torch.tensor([[-1.0, 0.5, 0.25]]))
    >>> numbers
    tensor([[-127,   64,   32]], dtype=torch.int8)
    """
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True)
    some = largest > 1e-30  # the inverse of less may be infinite
    numbers = (x * torch.where(some & largest.isfinite(), 127 / largest, 0.0)).nan_to_num(0.0).round().to(torch.int8)
    scale = torch.where(some, largest / 127, 0.0)
    return numbers, torch.where(largest.isfinite(), scale, torch.nan)


class CacheOverflow(ValueError):
    """More tokens than a cache of fixed capacity can hold.

    >>> layer = mh.MultiHeadAttention(8, heads=2)
    >>> layer(torch.randn(1, 3, 8), mask=mh.Causal(), cache=layer.new_cache(batch=1, capacity=2))
    Traceback (most recent call last):
    ...
    multihead.cache.CacheOverflow: ...
    """


class Room(NamedTuple):
    """Where new tokens go in a cache: token n of row b as its row `first` + n."""

    k: Tensor  # (B, G, room, D), the whole buffer
    v: Tensor  # (B, G, room, V)
    first: int | Tensor  # the same for all rows, or (B,)
    real: Tensor | None  # (B,): how many of the new tokens of each row are real; all unless given
    frame: Frame  # where they stand among all
    length: int | Tensor  # of the cache with them
    dropped: int | Tensor
    scales: tuple[Tensor, Tensor] | None = None  # see `Cache.scales`


class Cache:
    """Keys (B,G,K,D) and values (B,G,K,V) of the tokens so far: growing, of fixed capacity, or sliding.

    Made by `layer.new_cache(...)`. `length` is how many tokens each row has seen: an int, or a tensor (B,) once rows
    differ.

    >>> layer = mh.MultiHeadAttention(32, heads=4)
    >>> cache = layer.new_cache(batch=1, capacity=8)
    >>> for t in range(3):
    ...     y = layer(torch.randn(1, 1, 32), mask=mh.Causal(), cache=cache)
    >>> cache
    Cache(3 of 8 tokens, B=1, G=4, D=8, V=8, float32 on cpu)
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int,
        *,
        capacity: int | None = None,
        window: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        require_int("batch", batch, 1)
        if isinstance(dtype, str) and dtype != "int8":
            raise ValueError(f'dtype={dtype!r}: expected a floating torch dtype, or "int8"')
        kind = torch.int8 if isinstance(dtype, str) else dtype
        if capacity is not None and window is not None:
            raise ValueError(f"capacity={capacity} and window={window}: give one of them (a window bounds the memory)")
        if capacity is not None:
            require_int("capacity", capacity, 1)
        if window is not None:
            require_int("window", window, 1)
        self.capacity, self.window = capacity, window
        room = capacity if capacity is not None else 2 * window if window is not None else 16
        self._k = torch.zeros(batch, kv_heads, room, head_dim, device=device, dtype=kind)
        self._v = torch.zeros(batch, kv_heads, room, value_dim, device=device, dtype=kind)
        self._buffers: tuple[str, ...] = ("_k", "_v")
        if kind == torch.int8:  # a row of k or v is its integers times its scale
            self._k_scales = torch.zeros(batch, kv_heads, room, 1, device=device)
            self._v_scales = torch.zeros(batch, kv_heads, room, 1, device=device)
            self._buffers = ("_k", "_v", "_k_scales", "_v_scales")
        self.length: int | Tensor = 0  # tokens seen
        self.dropped: int | Tensor = 0  # tokens that a sliding cache has let go

    @property
    def batch(self) -> int:
        return self._k.shape[0]

    @property
    def used(self) -> int | Tensor:
        """How many tokens of the buffer each row uses."""
        return self.length - self.dropped

    @property
    def longest(self) -> int:
        used = self.used
        return int(used.max()) if isinstance(used, Tensor) else used

    @property
    def k(self) -> Tensor:
        """The keys (B,G,K,D), as they are held; of int8, what they stand for, in float32 whatever the layer's dtype."""
        k = self._k[:, :, : self.longest]
        return k * self._k_scales[:, :, : self.longest] if self.quantised else k

    @property
    def v(self) -> Tensor:
        """The values (B,G,K,V), likewise."""
        v = self._v[:, :, : self.longest]
        return v * self._v_scales[:, :, : self.longest] if self.quantised else v

    @property
    def quantised(self) -> bool:
        return len(self._buffers) == 4

    @property
    def scales(self) -> tuple[Tensor, Tensor] | None:
        """Of int8, what each row of the buffers of k and v is to be multiplied by: (B,G,room,1) each."""
        return (self._k_scales, self._v_scales) if self.quantised else None

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in self._buffers)

    def append(self, k: Tensor, v: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor, Frame]:
        """Add new tokens, the first `lengths[b]` of row b real: all keys, all values, and where the new ones stand."""
        self._check(k, v)
        room = self.reserve(k.shape[2], lengths)
        if isinstance(room.first, Tensor):
            assert room.real is not None
            row, token = (torch.arange(k.shape[2], device=k.device) < room.real[:, None]).nonzero(as_tuple=True)
            where = room.first[row] + token
            if self._records(k):
                self._k, self._v = self._k.clone(), self._v.clone()
            for name, new in zip(self._buffers, self._as_stored(k, v)):
                getattr(self, name)[row, :, where] = new[row, :, token]
        else:
            self._write(k, v, room.first)
        self.commit(room)
        return self.k, self.v, room.frame

    def reserve(self, new: int, lengths: Tensor | None = None) -> Room:
        """Room for `new` tokens, the first `lengths[b]` of row b real, who are there when `commit` is told so."""
        if lengths is None and not isinstance(self.length, Tensor):
            self._make_room(self.longest + new, new)
            first = self.used
            assert isinstance(first, int)
            frame = Frame.of(new, first + new, self._k.device, dropped=self.dropped)
            return Room(self._k, self._v, first, None, frame, self.length + new, self.dropped, self.scales)
        device = self._k.device
        real = torch.full((self.batch,), new, device=device) if lengths is None else lengths.to(device)
        self._make_room(int((self.used + real).max()), int(real.max()))
        length, dropped = self.length, self.dropped
        if not isinstance(length, Tensor):
            length = torch.full((self.batch,), length, device=device)
            if self.window is not None:
                dropped = torch.full((self.batch,), int(dropped), device=device)
        first = length - dropped
        used = first + real
        frame = Frame.of(new, int(used.max()), device, used=used, real=real, dropped=dropped)
        return Room(self._k, self._v, first, real, frame, length + real, dropped, self.scales)

    def through_window(self, mask: Mask | Tensor | None) -> Mask | Tensor | None:
        """What `mask` lets a query see, and of that what a sliding cache is meant to show."""
        if self.window is None:
            return mask
        newest = Window(self.window - 1, None)
        return newest if mask is None else newest & mask

    def commit(self, room: Room) -> None:
        """The tokens for whom `room` was made are there now."""
        self.length, self.dropped = room.length, room.dropped

    def _check(self, k: Tensor, v: Tensor) -> None:
        for name, new, buffer in (("k", k, self._k), ("v", v, self._v)):
            B, G, _, D = buffer.shape
            if (new.shape[0], new.shape[1], new.shape[3]) != (B, G, D):
                raise ValueError(
                    f"the layer's new {name} has B={new.shape[0]}, G={new.shape[1]} and head width {new.shape[3]}, "
                    f"but the cache was made for B={B}, G={G} and head width {D}: expected layer.new_cache(batch=…)"
                )
            if new.device != buffer.device:
                raise ValueError(
                    f"the layer's new {name} is {describe(new)}, but the cache holds {buffer.dtype} on "
                    f"{buffer.device}: make one with layer.new_cache(device=…)"
                )

    def _write(self, k: Tensor, v: Tensor, first: int) -> None:
        last = first + k.shape[2]
        for name, new in zip(self._buffers, self._as_stored(k, v)):
            if self._records(k):
                setattr(self, name, getattr(self, name).slice_scatter(new, 2, first, last))
            else:
                getattr(self, name)[:, :, first:last] = new

    def _records(self, k: Tensor) -> bool:
        """Whether a gradient will need what it has read."""
        return torch.is_grad_enabled() and (k.requires_grad or self._k.requires_grad)

    def _as_stored(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """New keys and values as the buffers have them."""
        if not self.quantised:
            return [k.to(self._k.dtype), v.to(self._v.dtype)]
        if self._records(k):
            raise ValueError(
                "a cache of int8 has no gradient: expected torch.no_grad(), or new_cache(dtype=…) of floats"
            )
        (k, k_scales), (v, v_scales) = quantise(k), quantise(v)
        return [k, v, k_scales, v_scales]

    def _make_room(self, needed: int, new: int) -> None:
        """Room for `needed` tokens in the fullest row, where no row brings more than `new`."""
        room = self._k.shape[2]
        if not torch.compiler.is_compiling() and self._k.is_inference() and not torch.is_inference_mode_enabled():
            for name in self._buffers:
                setattr(self, name, getattr(self, name).clone())  # torch lets no one else write into these
        if needed <= room:
            return
        if self.capacity is not None:
            more = needed - self.longest
            raise CacheOverflow(
                f"the cache is full: {self.longest} tokens and {more} more do not fit capacity={self.capacity}; "
                "give new_cache() a larger capacity=, window= to keep only the newest, or neither to let it grow"
            )
        if self.window is not None:
            self._slide(new)
        else:
            self._resize(max(needed, 2 * room))

    def _resize(self, room: int) -> None:
        used = self.longest
        for name in self._buffers:
            buffer = getattr(self, name)
            larger = buffer.new_zeros(*buffer.shape[:2], room, buffer.shape[3])
            larger[:, :, :used] = buffer[:, :, :used]
            setattr(self, name, larger)

    def _slide(self, new: int) -> None:
        """Move the newest `window − 1` tokens of each row to the front: all that a coming query can see of the past."""
        assert self.window is not None
        used, room = self.used, max(2 * self.window, self.window - 1 + new)
        let_go: int | Tensor
        if isinstance(used, Tensor):
            let_go = (used - (self.window - 1)).clamp(min=0)
            kept = torch.arange(min(self.longest, self.window - 1), device=self._k.device)
            index = (let_go[:, None] + kept).clamp(max=self._k.shape[2] - 1)[:, None, :, None]
        else:
            let_go = max(used - (self.window - 1), 0)
        for name in self._buffers:
            buffer = getattr(self, name)
            if isinstance(let_go, Tensor):
                front = buffer.gather(2, index.expand(-1, buffer.shape[1], -1, buffer.shape[3]))
            else:
                front = buffer[:, :, let_go:used]
            larger = buffer.new_zeros(*buffer.shape[:2], room, buffer.shape[3])
            larger[:, :, : front.shape[2]] = front
            setattr(self, name, larger)
        self.dropped = self.dropped + let_go

    def crop(self, length: int | Tensor) -> None:
        """Forget all but the first `length` tokens of each row (speculative decoding); rows that are shorter stay."""
        if not isinstance(length, Tensor):
            require_int("length", length, 0)
        elif not holds_integers(length) or length.shape != (self.batch,) or bool((length < 0).any()):
            raise ValueError(f"length is {describe(length)}: expected integers, one for each of B={self.batch}")
        shorter: int | Tensor
        if isinstance(length, Tensor) or isinstance(self.length, Tensor):
            device = self._k.device
            kept, now = (torch.as_tensor(n, device=device).expand(self.batch) for n in (length, self.length))
            shorter = torch.minimum(kept, now)
        else:
            shorter = min(length, self.length)
        if self.window is not None:
            oldest = torch.as_tensor(shorter - (self.window - 1)).clamp(min=0)  # that the next query may see
            if bool((torch.as_tensor(self.dropped) > oldest).any()):
                raise ValueError(f"crop({length}): the window has let go of tokens that would be visible again")
        self.length = shorter

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Row b becomes what row `rows[b]` was (beam search); a row may be taken twice or not at all."""
        rows = _row_numbers(rows, self.batch, self._k.device)
        for name in self._buffers:
            setattr(self, name, getattr(self, name).index_select(0, rows))
        self.length = self.length[rows] if isinstance(self.length, Tensor) else self.length
        self.dropped = self.dropped[rows] if isinstance(self.dropped, Tensor) else self.dropped

    def mark(self) -> Any:
        """Where the cache stands now, for `back_to`: new tokens are only ever written behind it."""
        return self.length, self.dropped, [getattr(self, name) for name in self._buffers]

    def back_to(self, mark: Any) -> None:
        """Forget what came since `mark`."""
        self.length, self.dropped, buffers = mark
        for name, buffer in zip(self._buffers, buffers):
            setattr(self, name, buffer)

    def fork(self) -> "Cache":
        """A cache that goes on from here on its own: what joins one does not reach the other."""
        other = copy(self)
        for name in self._buffers:
            setattr(other, name, getattr(self, name).clone())
        return other

    def reset(self) -> None:
        """Forget everything; the memory stays."""
        self.length = self.dropped = 0
        for name in self._buffers:
            setattr(self, name, getattr(self, name).detach())

    def __repr__(self) -> str:
        tokens = self.length.tolist() if isinstance(self.length, Tensor) else self.length
        of = "" if self.capacity is None else f" of {self.capacity}"
        window = "" if self.window is None else f", window={self.window}"
        (B, G, _, D), V = self._k.shape, self._v.shape[3]
        dtype = str(self._k.dtype).removeprefix("torch.")
        return f"Cache({tokens}{of} tokens{window}, B={B}, G={G}, D={D}, V={V}, {dtype} on {self._k.device})"


def keeping(cache: object, step: Callable[..., _T], *given: Any) -> _T:
    """`step(*given)`; where it fails, or is interrupted, a cache of tokens is as it was before."""
    if not isinstance(cache, Cache) or torch.compiler.is_compiling():
        return step(*given)
    before = cache.mark()
    try:
        return step(*given)
    except BaseException:
        cache.back_to(before)
        raise


class ContextCache:
    """The keys and values of a context, projected once, for cross-attention from many calls.

    >>> layer = mh.MultiHeadAttention(32, heads=4)
    >>> cache = layer.new_cache(context=torch.randn(1, 7, 32))
    >>> layer(torch.randn(1, 1, 32), cache=cache).shape
    torch.Size([1, 1, 32])
    """

    def __init__(self, k: Tensor, v: Tensor, sizes: Sizes) -> None:
        self.k, self.v, self.sizes = k, v, sizes  # the sizes of the layer that made it

    @property
    def batch(self) -> int:
        return self.k.shape[0]

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Row b becomes what row `rows[b]` was (beam search)."""
        rows = _row_numbers(rows, self.batch, self.k.device)
        self.k, self.v = self.k.index_select(0, rows), self.v.index_select(0, rows)

    def check(self, batch: int, sizes: Sizes) -> None:
        """Refuse a batch of other rows, or a layer of other sizes."""
        if batch != self.batch:
            raise ValueError(f"the context cache has B={self.batch} rows, but this call has B={batch}")
        if sizes != self.sizes:
            raise ValueError(
                f"the context cache was made by a layer of {self.sizes}, but this one is {sizes}: make it with this "
                "layer's new_cache(context=…)"
            )

    def __repr__(self) -> str:
        return f"ContextCache({self.k.shape[2]} keys, B={self.batch}, G={self.k.shape[1]})"

"""Key/value caches: what earlier tokens left behind for later ones to read.

Keys lie in order from the start of the buffer, never wrapped around, so that what a query may see stays one interval.
Rows of a batch may have different lengths.
"""

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from multihead.masks.intervals import Frame
from multihead.sizes import Sizes, describe, require_int


def _row_numbers(rows: Tensor | Sequence[int], batch: int, device: torch.device) -> Tensor:
    """`rows` as a tensor, if they are numbers of rows of the batch."""
    if isinstance(rows, Sequence) and not isinstance(rows, str):
        rows = torch.tensor([require_int(f"rows[{n}]", row, 0) for n, row in enumerate(rows)], dtype=torch.long)
    if not isinstance(rows, Tensor):
        raise TypeError(f"rows is a {type(rows).__name__}: expected row numbers, a tensor or a list")
    if rows.dim() != 1 or rows.dtype.is_floating_point or rows.dtype == torch.bool:
        raise ValueError(f"rows is {describe(rows)}: expected one axis of row numbers")
    if rows.numel() and not (int(rows.min()) >= 0 and int(rows.max()) < batch):
        raise ValueError(f"rows={rows.tolist()}: expected row numbers 0…{batch - 1}")
    return rows.to(device)


class CacheOverflow(ValueError):
    """More tokens than a cache of fixed capacity can hold.

    >>> layer = mh.MultiHeadAttention(8, heads=2)
    >>> layer(torch.randn(1, 3, 8), mask=mh.Causal(), cache=layer.new_cache(batch=1, capacity=2))
    Traceback (most recent call last):
    ...
    multihead.cache.CacheOverflow: ...
    """


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
        dtype: torch.dtype | None = None,
    ) -> None:
        require_int("batch", batch, 1)
        if capacity is not None and window is not None:
            raise ValueError(f"capacity={capacity} and window={window}: give one of them (a window bounds the memory)")
        if capacity is not None:
            require_int("capacity", capacity, 1)
        if window is not None:
            require_int("window", window, 1)
        self.capacity, self.window = capacity, window
        room = capacity if capacity is not None else 2 * window if window is not None else 16
        self._k = torch.zeros(batch, kv_heads, room, head_dim, device=device, dtype=dtype)
        self._v = torch.zeros(batch, kv_heads, room, value_dim, device=device, dtype=dtype)
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
        return self._k[:, :, : self.longest]  # (B, G, K, D)

    @property
    def v(self) -> Tensor:
        return self._v[:, :, : self.longest]  # (B, G, K, V)

    @property
    def nbytes(self) -> int:
        return self._k.nbytes + self._v.nbytes

    def append(self, k: Tensor, v: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor, Frame]:
        """Add new tokens, the first `lengths[b]` of row b real: all keys, all values, and where the new ones stand."""
        self._check(k, v)
        new = k.shape[2]
        if lengths is not None or isinstance(self.length, Tensor):
            return self._append_ragged(k, v, lengths)
        self._make_room(self.longest + new, new)
        first = self.used
        assert isinstance(first, int)
        self._write(k, v, first)
        self.length = self.length + new
        return self.k, self.v, Frame.of(new, first + new, k.device, dropped=self.dropped)

    def _append_ragged(self, k: Tensor, v: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor, Frame]:
        new, device = k.shape[2], k.device
        real = torch.full((self.batch,), new, device=device) if lengths is None else lengths.to(device)
        self._make_room(int((self.used + real).max()), int(real.max()))
        if not isinstance(self.length, Tensor):
            self.length = torch.full((self.batch,), self.length, device=device)
            if self.window is not None:
                self.dropped = torch.full((self.batch,), int(self.dropped), device=device)
        row, token = (torch.arange(new, device=device) < real[:, None]).nonzero(as_tuple=True)
        where = (self.length - self.dropped)[row] + token
        if torch.is_grad_enabled() and (k.requires_grad or self._k.requires_grad):
            self._k, self._v = self._k.clone(), self._v.clone()
        self._k[row, :, where] = k[row, :, token].to(self._k.dtype)
        self._v[row, :, where] = v[row, :, token].to(self._v.dtype)
        self.length = self.length + real
        used = self.length - self.dropped
        return self.k, self.v, Frame.of(new, self.longest, device, used=used, real=real, dropped=self.dropped)

    def _check(self, k: Tensor, v: Tensor) -> None:
        for name, new, held in (("k", k, self._k), ("v", v, self._v)):
            B, G, _, D = held.shape
            if (new.shape[0], new.shape[1], new.shape[3]) != (B, G, D):
                raise ValueError(
                    f"the layer's new {name} has B={new.shape[0]}, G={new.shape[1]} and head width {new.shape[3]}, "
                    f"but the cache was made for B={B}, G={G} and head width {D}: expected layer.new_cache(batch=…)"
                )
            if new.device != held.device or torch.promote_types(new.dtype, held.dtype) != held.dtype:
                raise ValueError(
                    f"the layer's new {name} is {describe(new)}, but the cache holds {held.dtype} on {held.device}: "
                    "make one with layer.new_cache(dtype=…, device=…)"
                )

    def _write(self, k: Tensor, v: Tensor, first: int) -> None:
        last = first + k.shape[2]
        k, v = k.to(self._k.dtype), v.to(self._v.dtype)
        if torch.is_grad_enabled() and (k.requires_grad or self._k.requires_grad):  # a gradient needs what it has read
            self._k = self._k.slice_scatter(k, 2, first, last)
            self._v = self._v.slice_scatter(v, 2, first, last)
        else:
            self._k[:, :, first:last] = k
            self._v[:, :, first:last] = v

    def _make_room(self, needed: int, new: int) -> None:
        """Room for `needed` tokens in the fullest row, where no row brings more than `new`."""
        room = self._k.shape[2]
        if not torch.compiler.is_compiling() and self._k.is_inference() and not torch.is_inference_mode_enabled():
            self._k, self._v = self._k.clone(), self._v.clone()  # torch lets no one else write into these
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
        for name in ("_k", "_v"):
            held = getattr(self, name)
            larger = held.new_zeros(*held.shape[:2], room, held.shape[3])
            larger[:, :, :used] = held[:, :, :used]
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
        for name in ("_k", "_v"):
            held = getattr(self, name)
            if isinstance(let_go, Tensor):
                front = held.gather(2, index.expand(-1, held.shape[1], -1, held.shape[3]))
            else:
                front = held[:, :, let_go:used]
            larger = held.new_zeros(*held.shape[:2], room, held.shape[3])
            larger[:, :, : front.shape[2]] = front
            setattr(self, name, larger)
        self.dropped = self.dropped + let_go

    def crop(self, length: int | Tensor) -> None:
        """Forget all but the first `length` tokens of each row (speculative decoding); rows that are shorter stay."""
        if not isinstance(length, Tensor):
            require_int("length", length, 0)
        elif length.dtype.is_floating_point or length.shape != (self.batch,) or bool((length < 0).any()):
            raise ValueError(f"length is {describe(length)}: expected integers, one for each of B={self.batch}")
        shorter: int | Tensor
        if isinstance(length, Tensor) or isinstance(self.length, Tensor):
            device = self._k.device
            kept, now = (torch.as_tensor(n, device=device).expand(self.batch) for n in (length, self.length))
            shorter = torch.minimum(kept, now)
        else:
            shorter = min(length, self.length)
        if self.window is not None:
            wanted = torch.as_tensor(shorter - (self.window - 1)).clamp(
                min=0
            )  # the oldest token the next query may see
            if bool((torch.as_tensor(self.dropped) > wanted).any()):
                raise ValueError(f"crop({length}): the window has let go of tokens that would be visible again")
        self.length = shorter

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Row b becomes what row `rows[b]` was (beam search); a row may be taken twice or not at all."""
        rows = _row_numbers(rows, self.batch, self._k.device)
        self._k, self._v = self._k.index_select(0, rows), self._v.index_select(0, rows)
        self.length = self.length[rows] if isinstance(self.length, Tensor) else self.length
        self.dropped = self.dropped[rows] if isinstance(self.dropped, Tensor) else self.dropped

    def mark(self) -> tuple[int | Tensor, int | Tensor, Tensor, Tensor]:
        """Where the cache stands now, for `back_to`: new tokens are only ever written behind it."""
        return self.length, self.dropped, self._k, self._v

    def back_to(self, mark: tuple[int | Tensor, int | Tensor, Tensor, Tensor]) -> None:
        """Forget what came since `mark`."""
        self.length, self.dropped, self._k, self._v = mark

    def fork(self) -> "Cache":
        """A cache that goes on from here on its own: what joins one does not reach the other."""
        other = copy(self)
        other._k, other._v = self._k.clone(), self._v.clone()
        return other

    def reset(self) -> None:
        """Forget everything; the memory stays."""
        self.length = self.dropped = 0
        self._k, self._v = self._k.detach(), self._v.detach()

    def __repr__(self) -> str:
        tokens = self.length.tolist() if isinstance(self.length, Tensor) else self.length
        of = "" if self.capacity is None else f" of {self.capacity}"
        window = "" if self.window is None else f", window={self.window}"
        (B, G, _, D), V = self._k.shape, self._v.shape[3]
        dtype = str(self._k.dtype).removeprefix("torch.")
        return f"Cache({tokens}{of} tokens{window}, B={B}, G={G}, D={D}, V={V}, {dtype} on {self._k.device})"


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

"""Masks: what each query may see. True, and a filled square, mean *may attend*.

A mask is an object that says what it means and draws itself. Query `q` of `Q` stands at position `i = q + (K - Q)`
among the `K` keys, so the last query sees the last key: the only meaning that also works with a cache.

A mask lowers to one interval of keys per query, plus a dense remainder only where it must: see `intervals`.

Longer than other files because each of seven masks has its picture beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, reduce
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from multihead.draw import squares
from multihead.masks.intervals import Frame, Ramp, Visible, higher_of
from multihead.sizes import require_int
from multihead.tensors import holds_integers, readable, require_storage


class Mask:
    """What each query may see. Masks are joined with `&`: what both allow.

    >>> print((Causal() & Padding([3, 5])).draw(5, 5, batch=0))
    ■ · · · ·
    ■ ■ · · ·
    ■ ■ ■ · ·
    ■ ■ ■ · ·
    ■ ■ ■ · ·
    """

    def __and__(self, other: "Mask | Tensor") -> "Mask":
        joined = as_mask(other)
        if joined is None:
            return self
        mine = self.parts if isinstance(self, Joined) else (self,)
        return Joined((*mine, *(joined.parts if isinstance(joined, Joined) else (joined,))))

    __rand__ = __and__

    def reframe(self, frame: Frame) -> Frame:
        """Where the queries stand under this mask: only packed documents move them."""
        return frame

    def within(self, frame: Frame) -> Visible:
        """What is visible in a frame that every mask of a join has agreed on."""
        raise NotImplementedError

    def lower(self, frame: Frame) -> Visible:
        """One interval of keys per query, and a dense remainder only where it must be."""
        frame = self.reframe(frame)
        seen = _within(self, frame)
        if frame.used is None and isinstance(seen.start, Ramp) and isinstance(seen.stop, Ramp):
            return seen  # bounds are within 0…K as they are
        return seen.intersect(frame.in_use, frame)

    def dense(self, Q: int, K: int, device: torch.device | None = None) -> Tensor:
        """A bool tensor, True where query may attend to key: (Q, K), or (B, H|1, Q, K) where rows differ."""
        return self.lower(Frame.of(Q, K, device)).allowed(device)

    def draw(self, Q: int, K: int, batch: int = 0, head: int = 0) -> str:
        """The mask as text, a line for each query: ■ may attend, · hidden.

        One that is the same for all batch rows, or all heads, is drawn for whichever is asked for.
        """
        allowed = self.dense(Q, K)
        if allowed.dim() < 4:
            allowed = allowed[(None,) * (4 - allowed.dim())]
        for axis, (name, number) in enumerate((("batch", batch), ("head", head))):
            count = allowed.shape[axis]
            if require_int(name, number, 0) >= count > 1:
                raise ValueError(f"{name}={number}: the mask is for {count}, expected 0…{count - 1}")
            allowed = allowed.select(axis, number if count > 1 else 0).unsqueeze(axis)
        allowed = allowed[0, 0].expand(Q, K)
        return "\n".join(squares(allowed))


_M = TypeVar("_M", bound=type[Mask])
_OURS: set[type[Mask]] = set()  # whose bounds are made anew, of tensors that were looked at


def _within(mask: Mask, frame: Frame) -> Visible:
    seen = mask.within(frame)
    return seen if torch.compiler.is_compiling() or type(mask) in _OURS else seen.require_storages()


def _is_child(value: object) -> bool:
    return isinstance(value, Tensor | Mask) or (isinstance(value, tuple) and any(_is_child(v) for v in value))


def _register(cls: _M) -> _M:
    """Make a mask a pytree: tensors and masks are its children, plain numbers part of its structure."""

    def flatten(mask: Mask) -> tuple[list, tuple]:
        values = [(f.name, getattr(mask, f.name)) for f in fields(mask)]  # type: ignore[arg-type]
        children = [(name, value) for name, value in values if _is_child(value)]
        static = tuple((name, value) for name, value in values if not _is_child(value))
        return [value for _, value in children], (tuple(name for name, _ in children), static)

    def flatten_with_keys(mask: Mask) -> tuple[list, tuple]:
        children, context = flatten(mask)
        return [(pytree.GetAttrKey(name), child) for name, child in zip(context[0], children)], context

    def unflatten(children: Any, context: tuple) -> Mask:
        mask = object.__new__(cls)  # not through __init__: while tracing, a child need not be a tensor
        for name, value in (*zip(context[0], children), *context[1]):
            object.__setattr__(mask, name, value)
        return mask

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"multihead.{cls.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
    _OURS.add(cls)
    return cls


def _int_tensor(name: str, value: object) -> Tensor:
    """`value`, a tensor or a sequence of integers, as an int64 tensor."""
    if isinstance(value, Tensor):
        if not holds_integers(value):
            raise TypeError(f"{name} has dtype {value.dtype}: expected integers")
        require_storage(name, value)
        return value.long()
    if isinstance(value, Sequence) and not isinstance(value, str):
        if value and all(isinstance(row, Sequence) and not isinstance(row, str) for row in value):
            return torch.stack([_int_tensor(f"{name}[{n}]", row) for n, row in enumerate(value)])
        return torch.tensor(
            [require_int(f"{name}[{n}]", length, 0) for n, length in enumerate(value)], dtype=torch.long
        )
    raise TypeError(f"{name}={value!r}: expected a tensor or a list of integers")


def _per_row(name: str, value: object) -> Tensor:
    numbers = _int_tensor(name, value)
    if numbers.dim() != 1:
        raise ValueError(
            f"{name} has shape {tuple(numbers.shape)}: expected one axis, a number for each row of the batch"
        )
    return numbers


def _check_range(name: str, lengths: Tensor, most: int | None, what: str) -> None:
    require_storage(name, lengths)
    if readable(lengths) and lengths.numel():
        low, high = int(lengths.min()), int(lengths.max())
        if low < 0 or (most is not None and high > most):
            expected = f"0…{most}" if most is not None else "at least 0"
            raise ValueError(f"{name}={lengths.tolist()}: expected {expected}, {what}")


@_register
@dataclass(frozen=True)
class Causal(Mask):
    """Query q sees keys up to its own, and with `window` only the newest `window` of them.

    >>> print(Causal().draw(3, 5))
    ■ ■ ■ · ·
    ■ ■ ■ ■ ·
    ■ ■ ■ ■ ■
    >>> print(Causal(window=2).draw(4, 4))
    ■ · · ·
    ■ ■ · ·
    · ■ ■ ·
    · · ■ ■
    """

    window: int | None = None  # how many newest keys stay visible

    def __post_init__(self) -> None:
        if self.window is not None:
            require_int("window", self.window, 1)

    def within(self, frame: Frame) -> Visible:
        start = frame.fixed(0) if self.window is None else frame.near(1 - self.window)
        return Visible(frame.Q, frame.K, start, frame.near(1))


@_register
@dataclass(frozen=True)
class Window(Mask):
    """Query at position i sees keys i − left … i + right; None leaves a side open.

    >>> print(Window(1, 1).draw(4, 4))
    ■ ■ · ·
    ■ ■ ■ ·
    · ■ ■ ■
    · · ■ ■
    """

    left: int | None
    right: int | None

    def __post_init__(self) -> None:
        for name, reach in (("left", self.left), ("right", self.right)):
            if reach is not None:
                require_int(name, reach, 0)

    def within(self, frame: Frame) -> Visible:
        start = frame.fixed(0) if self.left is None else frame.near(-self.left)
        stop = frame.fixed(frame.K) if self.right is None else frame.near(self.right + 1)
        return Visible(frame.Q, frame.K, start, stop)


@_register
@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """Every query sees the first `n` keys, and keys up to its own (prefix-LM). `n`: an int, or one for each row.

    >>> print(Prefix(2).draw(4, 4))
    ■ ■ · ·
    ■ ■ · ·
    ■ ■ ■ ·
    ■ ■ ■ ■
    """

    n: int | Tensor

    def __post_init__(self) -> None:
        if isinstance(self.n, int):
            require_int("n", self.n, 0)
        else:
            object.__setattr__(self, "n", _per_row("n", self.n))
            _check_range("n", self.n, None, "a number of keys")

    def within(self, frame: Frame) -> Visible:
        require_storage("n", self.n)
        n = self.n.to(frame.device)[:, None, None] if isinstance(self.n, Tensor) else self.n
        prefix = frame.fixed(frame.origin + n - frame.dropped)
        return Visible(frame.Q, frame.K, frame.fixed(0), higher_of(prefix, frame.near(1), frame))


@_register
@dataclass(frozen=True, eq=False)
class Padding(Mask):
    """Row b of the batch has `lengths[b]` real keys, at the left end (side="right" pads) or the right end ("left").

    It hides keys, not queries: what a padded query puts out is yours to ignore.

    >>> print(Padding([2]).draw(2, 4))
    ■ ■ · ·
    ■ ■ · ·
    >>> print(Padding([2], side="left").draw(2, 4))
    · · ■ ■
    · · ■ ■
    """

    lengths: Tensor
    side: str = "right"

    def __init__(self, lengths: Tensor | Sequence[int], side: str = "right") -> None:
        object.__setattr__(self, "lengths", _per_row("lengths", lengths))
        object.__setattr__(self, "side", side)
        if side not in ("left", "right"):
            raise ValueError(f"side={side!r}: expected 'left' or 'right'")

    def within(self, frame: Frame) -> Visible:
        _check_range("lengths", self.lengths, None if frame.slides else frame.K, f"the number of keys K={frame.K}")
        lengths = self.lengths.to(frame.device)[:, None, None]
        if self.side == "right":
            return Visible(frame.Q, frame.K, frame.fixed(0), frame.fixed(lengths - frame.dropped))
        used = frame.K if frame.used is None else frame.used
        return Visible(frame.Q, frame.K, frame.fixed(used - lengths), frame.fixed(frame.K))


@_register
@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Packed sequences: a query sees the keys of its own document only.

    `lengths`: the length of each document, for all rows of the batch or (B, documents) for each; 0 is allowed, so
    rows may hold different numbers of documents. `key_lengths` where the keys are cut differently from the queries.
    Joined with `Causal`, `Window` or `Prefix`, these count within each document.

    >>> print((Documents([2, 3]) & Causal()).draw(5, 5))
    ■ · · · ·
    ■ ■ · · ·
    · · ■ · ·
    · · ■ ■ ·
    · · ■ ■ ■
    """

    lengths: Tensor
    key_lengths: Tensor | None = None

    def __init__(self, lengths: Tensor | Sequence[int], key_lengths: Tensor | Sequence[int] | None = None) -> None:
        object.__setattr__(self, "lengths", _int_tensor("lengths", lengths))
        object.__setattr__(
            self, "key_lengths", None if key_lengths is None else _int_tensor("key_lengths", key_lengths)
        )
        for name, t in (("lengths", self.lengths), ("key_lengths", self.key_lengths)):
            if t is not None and (t.dim() not in (1, 2) or t.shape[-1] == 0):
                raise ValueError(f"{name} has shape {tuple(t.shape)}: expected (documents,) or (B, documents)")
        if self.key_lengths is not None and self.key_lengths.shape[-1] != self.lengths.shape[-1]:
            queries, keys = self.lengths.shape[-1], self.key_lengths.shape[-1]
            raise ValueError(f"lengths has {queries} documents and key_lengths {keys}: expected as many of each")

    def reframe(self, frame: Frame) -> Frame:
        if frame.used is not None or frame.slides or frame.end is not None:
            raise ValueError("Documents cannot be joined with other Documents, a sliding cache or ragged rows")
        lengths = self.lengths.to(frame.device)
        keys = lengths if self.key_lengths is None else self.key_lengths.to(frame.device)
        for name, t, total, axis in (("lengths", lengths, frame.Q, "Q"), ("key_lengths", keys, frame.K, "K")):
            _check_range(name, t, None, "document lengths")
            if readable(t) and bool((t.sum(-1) != total).any()):
                raise ValueError(f"{name}={t.tolist()} adds up to {t.sum(-1).tolist()}: expected {axis}={total}")
        lengths, keys = torch.broadcast_tensors(lengths, keys)
        query_end, key_end = lengths.cumsum(-1), keys.cumsum(-1)
        query = torch.arange(frame.Q, device=frame.device).expand(*lengths.shape[:-1], frame.Q).contiguous()
        document = torch.searchsorted(query_end, query, right=True)  # the first that ends after the query

        def mine(t: Tensor) -> Tensor:
            return t.expand(*document.shape[:-1], t.shape[-1]).gather(-1, document)

        position = query - mine(query_end) + mine(key_end)  # as far from its document's end among keys as among queries
        origin, end = mine(key_end - keys), mine(key_end)
        if lengths.dim() == 2:
            position, origin, end = (t[:, None] for t in (position, origin, end))  # (B, 1, Q)
        return replace(frame, position=position, origin=origin, end=end)

    def within(self, frame: Frame) -> Visible:
        assert frame.end is not None
        return Visible(frame.Q, frame.K, frame.fixed(frame.origin), frame.fixed(frame.end))


@_register
@dataclass(frozen=True, eq=False)
class Allowed(Mask):
    """A dense mask: a bool tensor, True = may attend, that broadcasts right-aligned to (B, H, Q, K).

    Right-aligned, three axes are (H, Q, K), also where B happens to be H: one for each row of the batch, (B, Q, K), is
    given as `[:, None]` of it. `mh.explain` says how such a mask is read.

    >>> print(Allowed(torch.eye(3, dtype=torch.bool)).draw(3, 3))
    ■ · ·
    · ■ ·
    · · ■
    """

    tensor: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, Tensor):
            raise TypeError(f"tensor is a {type(self.tensor).__name__}: expected a bool tensor, True = may attend")
        if self.tensor.dtype.is_floating_point:
            raise TypeError(
                f"the mask is a {self.tensor.dtype} tensor: a mask is bool, True = may attend; "
                "give scores to add as bias=, and what a layer's values are made of as values="
            )
        if self.tensor.dtype != torch.bool:
            raise TypeError(f"the mask is a {self.tensor.dtype} tensor: expected bool, True = may attend")

    def within(self, frame: Frame) -> Visible:
        require_storage("the mask", self.tensor)
        rows = self.tensor.shape[-2:]
        if len(rows) and any(have not in (1, want) for have, want in zip(reversed(rows), (frame.K, frame.Q))):
            shape, wanted = tuple(self.tensor.shape), (frame.Q, frame.K)
            raise ValueError(f"the mask has shape {shape}: expected one that broadcasts, with (Q,K)={wanted}")
        return replace(frame.everything, dense=self.tensor.to(frame.device))


@_register
@dataclass(frozen=True, eq=False)
class Joined(Mask):
    """What all `parts` allow: `a & b`."""

    parts: tuple[Mask, ...]

    def reframe(self, frame: Frame) -> Frame:
        return reduce(lambda f, part: part.reframe(f), self.parts, frame)

    def within(self, frame: Frame) -> Visible:
        seen = [_within(part, frame) for part in self.parts]
        return reduce(lambda a, b: a.intersect(b, frame), seen)


def as_mask(mask: Mask | Tensor | None) -> Mask | None:
    """A mask as users may give it: None, a mask, or a bare bool tensor, which is taken as `Allowed`."""
    if mask is None or isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        return Allowed(mask)
    raise TypeError(f"mask is a {type(mask).__name__}: expected None, a mask such as Causal(), or a bool tensor")


def check_broadcast(name: str, t: Tensor, shape: Sequence[int], axes: str) -> None:
    """Refuse a tensor that does not broadcast, right-aligned, to `shape`."""
    fits = t.dim() <= len(shape) and all(have in (1, want) for have, want in zip(reversed(t.shape), reversed(shape)))
    if not fits:
        by_row = t.dim() == 3 < len(shape) and t.shape[0] == shape[0]
        hint = "; one for each row of the batch is given as [:, None] of it" if by_row else ""
        to = f"{axes}={tuple(shape)}{hint}"
        raise ValueError(f"{name} has shape {tuple(t.shape)}: expected one that broadcasts to {to}")


def see(mask: Mask | Tensor | None, Q: int, K: int, device: torch.device, B: int, H: int) -> Visible:
    """What `mask` lets Q queries see of K keys, the last of them at the last key."""
    plain = mask is None or type(mask) is Causal or type(mask) is Window  # lower to numbers alone
    if plain and type(Q) is type(K) is int and not torch.compiler.is_compiling():
        return _remembered(mask, Q, K)
    return lower(mask, Frame.of(Q, K, device), B, H)


@lru_cache(maxsize=256)
def _remembered(mask: Mask | None, Q: int, K: int) -> Visible:
    return lower(mask, Frame.of(Q, K), 1, 1)


def lower(mask: Mask | Tensor | None, frame: Frame, B: int, H: int) -> Visible:
    """What `mask` lets each query see in `frame`, checked against a batch of B rows and H heads."""
    mask = as_mask(mask)
    visible = frame.in_use if mask is None else mask.lower(frame)
    if not (mask is None or torch.compiler.is_compiling() or type(mask) in _OURS):
        visible.require_storages()  # a class of somebody's own may have a `lower` of its own
    for bound in (visible.start, visible.stop):
        if isinstance(bound, Tensor) and bound.dim() == 3 and bound.shape[0] not in (1, B):
            raise ValueError(f"the mask is for {bound.shape[0]} batch rows: expected B={B}, or one row for all")
    if visible.dense is not None:
        check_broadcast("the mask", visible.dense, (B, H, frame.Q, frame.K), "(B,H,Q,K)")
    return visible

"""Selections: which heads, queries or keys are meant: an int, a slice, a range, a list or a tensor of numbers."""

from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor

from multihead.sizes import describe, require_int
from multihead.tensors import holds_integers

Selection = int | slice | range | Sequence[int] | Tensor | None
Chosen = slice | Tensor  # a slice start:stop within 0…n, or an int64 tensor of one axis, each within 0…n−1


def choose(name: str, given: Selection, n: int, device: torch.device | None = None) -> Chosen:
    """What `given` selects of n things. None: all; an int keeps its axis; negative numbers count from the end.

    A slice is cut to what there is, as in Python; everything else must be in range. Nothing at all may be selected.

    >>> choose("keys", -1, 7)
    slice(6, 7, None)
    >>> choose("keys", slice(None, None, -3), 7)
    tensor([6, 3, 0])
    >>> choose("keys", 7, 7)
    Traceback (most recent call last):
    ...
    IndexError: keys=7: expected -7…6, there are 7
    """
    if given is None:
        return slice(0, n)
    if isinstance(given, Tensor) and given.dim() == 0 and holds_integers(given):
        given = int(given)
    if isinstance(given, Integral) and not isinstance(given, bool):
        [index] = _in_range(name, [int(given)], n, given)
        return slice(index, index + 1)
    if isinstance(given, slice):
        return _from_range(_cut(name, given, n), device)
    if isinstance(given, range):
        if given and min(given[0], given[-1]) < 0:
            return _indices(name, given, n, device)
        _in_range(name, [given[0], given[-1]] if given else [], n, given)
        return _from_range(given, device)
    if isinstance(given, Tensor):
        if not holds_integers(given):
            hint = "; of a bool tensor take .nonzero().flatten()" if given.dtype == torch.bool else ""
            raise TypeError(f"{name} has dtype {given.dtype}: expected integers{hint}")
        if given.dim() != 1:
            raise ValueError(f"{name} is {describe(given)}: expected one axis of numbers")
        return _indices(name, given.tolist(), n, device)
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        for item in given:
            if isinstance(item, bool) or not isinstance(item, Integral):
                raise TypeError(f"{name} has {item!r} in it: expected integers")
        return _indices(name, [int(item) for item in given], n, device)
    what = type(given).__name__
    raise TypeError(f"{name} is a {what}: expected an int, a slice, a range, a list or a tensor of integers")


def take(t: Tensor, axis: int, chosen: Chosen) -> Tensor:
    """The chosen part of an axis: a view for a slice."""
    if isinstance(chosen, slice):
        return t.narrow(axis, chosen.start, chosen.stop - chosen.start)
    return t.index_select(axis, chosen)


def check_row(batch: int, B: int) -> None:
    """Refuse what is no row of a batch of B."""
    require_int("batch", batch, 0)
    if batch >= B:
        raise ValueError(f"batch={batch}: expected 0…{B - 1}, a row of the batch")


def count(chosen: Chosen) -> int:
    return chosen.stop - chosen.start if isinstance(chosen, slice) else chosen.numel()


def _in_range(name: str, numbers: Sequence[int], n: int, given: object) -> list[int]:
    for number in numbers:
        if not -n <= number < n:
            shown = f"{name} has {number} in it" if isinstance(given, list) else f"{name}={given!r}"
            raise IndexError(f"{shown}: expected {-n}…{n - 1}, there are {n}" if n else f"{shown}: there are none")
    return [number % n for number in numbers]


def _cut(name: str, given: slice, n: int) -> range:
    try:
        return range(*given.indices(n))
    except TypeError:
        raise TypeError(f"{name}={given!r}: expected integers in the slice") from None
    except ValueError:
        raise ValueError(f"{name}={given!r}: expected a step other than 0") from None


def _from_range(given: range, device: torch.device | None) -> Chosen:
    if given.step == 1 or len(given) < 2:
        return slice(given[0], given[0] + len(given)) if given else slice(0, 0)
    return torch.tensor(given, device=device)


def _indices(name: str, numbers: Sequence[int], n: int, device: torch.device | None) -> Tensor:
    return torch.tensor(_in_range(name, numbers, n, numbers), dtype=torch.long, device=device)

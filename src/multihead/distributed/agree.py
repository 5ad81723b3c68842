"""What the ranks agree on before each call: the lengths of their slices, and that they all mean the same call.

A header of 128 bytes goes from every rank to every other. A rank that brings other sizes, another mask or other options
is named on all of them, before any number is computed.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from multihead.distributed.wire import Wire

WORDS = 16  # of 8 bytes, in a header
HEADER_BYTES = 8 * WORDS
SAID = 1024  # bytes of words that follow where the ranks disagree
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HEADER, WORDS_TAG = 1, 2  # tags


def fingerprint(value: object) -> int:
    """A number that is the same for equal masks and options, and for no others that anyone will meet."""
    digest = hashlib.blake2b(digest_size=7)
    _feed(digest, value)
    return int.from_bytes(digest.digest(), "little")


def _feed(digest: Any, value: object) -> None:
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    elif is_dataclass(value):
        digest.update(type(value).__name__.encode())
        for field in fields(value):
            _feed(digest, getattr(value, field.name))
    elif isinstance(value, tuple | list):
        digest.update(f"{len(value)}".encode())
        for part in value:
            _feed(digest, part)
    else:
        digest.update(repr(value).encode())


@dataclass(frozen=True)
class Agreed:
    """What all ranks know after the exchange of headers."""

    queries: tuple[int, ...]  # the length of each rank's slice
    keys: tuple[int, ...]
    seed: int  # that of the first rank


def agree(
    wire: Wire,
    what: str,
    queries: int,
    keys: int,
    sizes: dict[str, int],
    same: Mapping[str, object],
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    slices: bool = True,
) -> Agreed:
    """Exchange headers: the lengths of all slices, or an error that names the rank that stands out.

    Args:
        wire: the ranks.
        what: the method, which must be the same.
        queries: the length of this rank's slice of x.
        keys: the length of this rank's slice of the keys.
        sizes: the sizes that must be the same, by their letters; at most six.
        same: what else must be the same, by name: the mask, and the options.
        dtype: of q.
        device: where the header travels.
        seed: for dropout; that of the first rank is taken.
        slices: whether the lengths may differ.
    """
    marks = [fingerprint(value) for value in same.values()]
    checked = {"method": fingerprint(what), "dtype": DTYPES.index(dtype), **sizes, **dict(zip(same, marks))}
    if not slices:
        checked |= {"N": queries, "K": keys}
    words = [queries, keys, seed, *checked.values()]
    assert len(words) <= WORDS, "a header is too short for so much"
    header = torch.tensor(words + [0] * (WORDS - len(words)), dtype=torch.int64, device=device)
    found = [t.tolist() for t in wire.exchange(header, HEADER)]
    if any(other[3:] != found[0][3:] for other in found):
        _disagree(wire, found, list(checked), {"method": what, "dtype": dtype, **sizes, **same}, device)
    return Agreed(tuple(f[0] for f in found), tuple(f[1] for f in found), found[0][2])


def _disagree(wire: Wire, found: list[list[int]], names: list[str], mine: dict[str, Any], device: torch.device) -> None:
    """All ranks have seen the same headers, so all of them come here, tell what they have, and raise."""
    wrong = [n for n, name in enumerate(names) if len({other[3 + n] for other in found}) > 1]
    name = names[wrong[0]] if wrong else "call"
    said = f"{mine[name]}" if name in mine else f"{found[wire.rank][3 + wrong[0]] if wrong else 'another'}"
    text = " ".join(said.split()).encode()[:SAID]
    words = torch.zeros(SAID, dtype=torch.uint8, device=device)
    words[: len(text)] = torch.tensor(list(text), dtype=torch.uint8, device=device)
    told = [bytes(t.tolist()).rstrip(b"\0").decode(errors="replace") for t in wire.exchange(words, WORDS_TAG)]
    values = [other[3 + wrong[0]] if wrong else tuple(other[3:]) for other in found]
    usual, count = Counter(values).most_common(1)[0]
    odd = [rank for rank, value in enumerate(values) if value != usual] if count > 1 else list(range(wire.size))
    others = [rank for rank in range(wire.size) if rank not in odd]
    told_odd = ", ".join(f"{wire.name(rank)} has {name}={told[rank]}" for rank in odd)
    told_others = f", {' and '.join(wire.name(r) for r in others)} {name}={told[others[0]]}" if others else ""
    raise ValueError(f"the ranks do not call the same attention: {told_odd}{told_others}: expected the same on all")

"""Tensors on their way to the page: a short JSON header, then little-endian bytes, aligned.

    bytes 0-3   MHT1
    bytes 4-7   the length of the header in bytes, little-endian, so that 8 + length is a multiple of 8
    header      UTF-8 JSON, padded: {"meta": {…}, "tensors": {"q": {"dtype": "float32", "shape": [4, 8], "offset": 0}}}
    data        each tensor in C order at its offset, counted from here, a multiple of 8

The server, the single file and the widget speak it alike. `meta` is what a page shows as words and single numbers, and
never holds NaN or inf, which JSON has not; tensors may.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

MAGIC = b"MHT1"
ALIGNED = 8  # bytes: any typed array of JavaScript can be laid on the data as it is
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Answer:
    """What the page is told: words and single numbers in `meta`, and tensors by name.

    >>> from multihead.explorer.wire import Answer
    >>> again = Answer.from_bytes(Answer({"layer": 0}, {"q": torch.ones(2, 3)}).to_bytes())
    >>> again.meta, again.tensors["q"].shape
    ({'layer': 0}, torch.Size([2, 3]))
    """

    meta: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        places, parts, offset = {}, [], 0
        for name, t in self.tensors.items():
            t = t.detach().cpu()
            if t.dtype not in NAMES:
                t = t.float() if t.dtype.is_floating_point else t.to(torch.int32)
            data = t.contiguous().numpy().astype(t.numpy().dtype.newbyteorder("<"), copy=False).tobytes()
            places[name] = {"dtype": NAMES[t.dtype], "shape": list(t.shape), "offset": offset}
            data += bytes(-len(data) % ALIGNED)
            parts.append(data)
            offset += len(data)
        text = json.dumps({"meta": self.meta, "tensors": places}, ensure_ascii=False, allow_nan=False)
        header = text.encode("utf-8", "replace")  # half a surrogate pair is no character
        header += b" " * (-len(header) % ALIGNED)
        return b"".join([MAGIC, struct.pack("<I", len(header)), header, *parts])

    @staticmethod
    def from_bytes(data: bytes) -> "Answer":
        """Read what `to_bytes` wrote; anything else is refused."""
        if data[:4] != MAGIC or len(data) < 8:
            raise ValueError(f"data starts with {data[:8]!r}: expected {MAGIC!r} and the length of a header")
        start = 8 + struct.unpack_from("<I", data, 4)[0]
        if start > len(data):
            raise ValueError(f"the header ends at byte {start}: the data has only {len(data)} bytes")
        header, tensors = json.loads(data[8:start]), {}
        for name, place in header["tensors"].items():
            dtype, shape = DTYPES[place["dtype"]], place["shape"]
            count, first = int(torch.Size(shape).numel()), start + place["offset"]
            if first + count * dtype.itemsize > len(data):
                raise ValueError(f"{name} ends beyond the data, which has {len(data)} bytes")
            flat = torch.frombuffer(bytearray(data[first : first + count * dtype.itemsize]), dtype=dtype) \
                if count else torch.empty(0, dtype=dtype)  # fmt: skip
            tensors[name] = flat.view(shape)
        return Answer(header["meta"], tensors)


def narrow(t: Tensor) -> Tensor:
    """As float16 where that loses nothing, else as it is."""
    half = t.to(torch.float16)
    return half if bool((half.to(t.dtype) == t).all()) else t


def shortened(t: Tensor) -> Tensor:
    """float32 rounded to 15 bits of mantissa: a relative error of 2⁻¹⁶ that no screen shows, and a quarter less.

    >>> from multihead.explorer.wire import shortened
    >>> x = torch.randn(1000)
    >>> bool(((shortened(x) - x).abs() <= x.abs() * 2**-16).all())
    True
    """
    if t.dtype != torch.float32:
        return t
    bits = t.contiguous().view(torch.int32).to(torch.int64)
    rounded = ((bits + 128) & ~255).to(torch.int32).view(torch.float32)  # 8 of 23 bits go
    return rounded.where(t.isfinite() & rounded.isfinite(), t)

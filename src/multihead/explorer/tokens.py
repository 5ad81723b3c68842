"""Tokens as text that is safe to show: nothing invisible, nothing that turns the line round, no half characters.

Tokens of today's tokenizers are runs of bytes. One may end in the middle of a character: its bytes are then shown as
numbers, ⟨E2 98⟩.
"""

import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

Token = dict[str, Any]  # {"id", "text": visible, "bytes": hexadecimal}


def token(number: int, data: bytes) -> Token:
    r"""A token for the page.

    >>> from multihead.explorer.tokens import token
    >>> token(7, b" love")
    {'id': 7, 'text': '␣love', 'bytes': '206c6f7665'}
    >>> token(8, "é".encode()[:1])["text"], token(9, "\u202eevil".encode())["text"]
    ('⟨C3⟩', '⟨U+202E⟩evil')
    """
    return {"id": number, "text": visible(data), "bytes": data.hex()}


def named(names: Sequence[str]) -> list[Token]:
    """Items that are no tokens, such as patches, by name: a space in a name is a space."""
    shown = [" ".join(visible(part.encode("utf-8", "replace")) for part in name.split(" ")) for name in names]
    return [{"id": n, "text": text, "bytes": ""} for n, text in enumerate(shown)]


def visible(data: bytes) -> str:
    """Bytes as text that shows all of them."""
    shown, at = [], 0
    while at < len(data):
        try:
            rest = data[at:].decode("utf-8")
            stop, bad = len(data), b""
        except UnicodeDecodeError as error:
            rest, stop = data[at : at + error.start].decode("utf-8"), at + error.end
            bad = data[at + error.start : stop]
        shown.append("".join(map(_character, rest)))
        if bad:
            shown.append(f"⟨{bad.hex(' ').upper()}⟩")
        at = stop
    return "".join(shown)


def _character(c: str) -> str:
    if c == " ":
        return "␣"
    if c == "\n":
        return "⏎"
    if c == "\t":
        return "⇥"
    # controls, formats (bidi among them), lone surrogates, private and unassigned ones, and odd spaces
    return f"⟨U+{ord(c):04X}⟩" if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs") else c


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """The byte that each letter of a byte-level tokenizer stands for (GPT-2's `bytes_to_unicode`)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


def bytes_of(piece: str | None, decoded: Callable[[], str], byte_level: bool) -> bytes:
    """The bytes a token stands for, from its name in the vocabulary; what decoding gives where that does not tell."""
    if piece is not None and byte_level and all(c in _byte_alphabet() for c in piece):
        return bytes(_byte_alphabet()[c] for c in piece)
    if piece is not None and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):  # sentencepiece
        return bytes([int(piece[3:5], 16)])
    return decoded().encode("utf-8", "replace")

"""What subjects that read text share: text becomes tokens, few of them for a trace, up to 100,000 for a map."""

from typing import Any

import torch

from multihead.explorer.request import MOST_TEXT, Refused
from multihead.explorer.subject import Items, Subject, wrong_input
from multihead.explorer.tokens import Token


class Reader(Subject):
    """A subject whose items are tokens. Subclasses say how text is cut, and what a token is."""

    kind = "text"
    size: int  # of the vocabulary
    long: list[int] | None = None  # tokens that were handed over, too many to travel with each request

    def encode(self, text: str) -> list[int]:
        """All tokens of a text, as they go into the model."""
        raise NotImplementedError

    def cut(self, text: str) -> tuple[list[Token], int]:
        ids = self.encode(text)
        return [self.token(number) for number in ids[: self.most]], len(ids)

    def keep(self, x: Any) -> dict[str, Any]:
        """The input that a text, or token numbers, become; what is too long for a request is kept here."""
        if isinstance(x, str) and len(x) <= MOST_TEXT:
            return {"kind": "text", "text": x}
        ids = self.encode(x) if isinstance(x, str) else [int(number) for number in x]
        if len(ids) <= self.most:
            return {"kind": "tokens", "ids": ids}
        if len(ids) > self.longest:
            raise ValueError(f"x has {len(ids):,} tokens: expected at most {self.longest:,}")
        self.long = ids
        return {"kind": "given"}

    @property
    def given(self) -> int | None:
        return None if self.long is None else len(self.long)

    def read(self, given: Any, need: int = 1) -> Items:
        return self._read(given, need, self.most)

    def read_long(self, given: Any) -> Items:
        return self._read(given, 1, self.longest)

    def _read(self, given: Any, need: int, most: int) -> Items:
        if given["kind"] == "text":
            ids = self.encode(given["text"])
        elif given["kind"] == "tokens":
            ids = given["ids"]
        elif given["kind"] == "given" and self.long is not None:
            ids = self.long
        else:
            raise wrong_input(self, given)
        if len(ids) > most:
            raise Refused(f"the text has {len(ids)} tokens: expected at most {most}", "large", 413)
        if len(ids) < need:
            raise Refused("one token has nothing before it: expected at least two" if ids else "there are no tokens")
        if ids and max(ids) >= self.size:
            raise Refused(f"ids has {max(ids)}: expected 0…{self.size - 1}, numbers of tokens")
        data = torch.tensor([ids])
        known = {number: self.token(number) for number in set(ids)}
        return Items(data, [known[number] for number in ids], data[0])

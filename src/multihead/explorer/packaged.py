"""The subjects that come with the package: its two trained models, and the running example of the documents."""

import zlib
from typing import Any

import torch
from torch import Tensor, nn

from multihead.explorer.reading import Reader
from multihead.explorer.request import Refused
from multihead.explorer.subject import MOST_LONG, Grid, Items, Subject, bytes_from, sizes_of, wrong_input
from multihead.explorer.tokens import Token, bytes_of, named, token
from multihead.layer import MultiHeadAttention
from multihead.layer.trace import Trace, trace
from multihead.lens import Lens
from multihead.masks import Causal
from multihead.models import LanguageModel, VisionTransformer, samples
from multihead.models.blocks import Given, Stack
from multihead.models.images import read

SENTENCE = "I love pepperoni pizza"
SENTENCES = (
    SENTENCE,
    "The people of the United States",
    "one two three four one two three",
    "Call me Ishmael. Some years ago, never mind how long",
)
START = "‹start›"  # how the token that begins each document is shown


class _Trained(Subject):
    """What the two models share: a stack of blocks on our layer."""

    model: Stack

    def layers(self) -> list[tuple[str, MultiHeadAttention | None, dict[str, int]]]:
        blocks = self.model.layers
        return [(f"layer {n}", block.attention, sizes_of(block.attention)) for n, block in enumerate(blocks)]

    def parts(self) -> list[nn.Module]:
        return list(self.model.blocks)

    def trace(self, items: Items, layer: int, mask: Given) -> Trace:
        return self.model.trace(items.data, layer, mask=mask)

    def look(self, items: Items, mask: Given) -> list[Lens]:
        return self.model.look(items.data, mask)


class Language(Reader, _Trained):
    """A language model of the package, or of `multihead train lm`."""

    model: LanguageModel
    id, name = "lm", "Language model"
    predicts, decodes = "tokens", True

    def __init__(self, model: LanguageModel, id: str = "lm", name: str = "Language model") -> None:
        self.model, self.id, self.name, self.mask = model, id, name, model.mask
        count = sum(p.numel() for p in model.parameters())
        self.about = f"{len(model.blocks)} layers, {count:,} trained parameters; says what comes next."
        if model.tokenizer is None:
            raise ValueError("this language model has no tokenizer: expected one that reads text")
        self.tokenizer, self.size = model.tokenizer, model.tokenizer.size

    def examples(self) -> list[dict[str, Any]]:
        given = [] if self.long is None else [{"input": {"kind": "given"}, "label": "what was given"}]
        return [*given, *({"input": {"kind": "text", "text": said}, "label": said} for said in SENTENCES)]

    @property
    def most(self) -> int:
        return min(super().most, self.model.context)

    def token(self, number: int) -> Token:
        if number == self.tokenizer.end:
            return {"id": number, "text": START, "bytes": ""}
        data = bytes_of(self.tokenizer.piece(number), lambda: self.tokenizer.decode([number]), byte_level=True)
        return token(number, data)

    @property
    def longest(self) -> int:
        return MOST_LONG  # it sees `context` tokens at a time, wherever they stand

    def encode(self, text: str) -> list[int]:
        return [self.tokenizer.end, *self.tokenizer.encode(_whole_characters(text))]

    def logits(self, items: Items, mask: Given) -> Tensor:
        return self.model(items.data, mask=mask)[0]

    def decode(self, items: Items, layer: int) -> Trace:
        caches = self.model.new_caches()
        self.model(items.data[:, :-1], caches)
        return self.model.trace(items.data[:, -1:], layer, caches=caches)


class Vision(_Trained):
    """A vision transformer of the package, or of `multihead train vit`."""

    model: VisionTransformer
    kind, predicts = "picture", "classes"

    def __init__(self, model: VisionTransformer, id: str = "vit", name: str = "Vision transformer") -> None:
        self.model, self.id, self.name, self.labels = model, id, name, model.labels
        count = sum(p.numel() for p in model.parameters())
        self.about = f"{len(model.blocks)} layers, {count:,} trained parameters; says what a picture shows."
        self.grid = Grid(model.grid, model.grid)
        g, p = model.grid, model.patch
        self.picture = {"size": model.size, "channels": 1, "patch": p, "rows": g, "columns": g, "first": 1}

    def examples(self) -> list[dict[str, Any]]:
        names = sorted(samples(), key=lambda name: name != "ankle boot")
        return [{"input": {"kind": "sample", "name": name}, "label": name} for name in names]

    def read(self, given: Any, need: int = 1) -> Items:
        size = self.model.size
        if given["kind"] == "sample":
            pictures = samples()  # the name is looked up here, and never becomes a path
            if given["name"] not in pictures:
                raise Refused(f"name={given['name'][:60]!r}: expected one of {', '.join(pictures)}")
            pixels = (read(pictures[given["name"]], size) * 255).round().to(torch.uint8)
        elif given["kind"] == "pixels":
            pixels = bytes_from(given["pixels"], (size, size))
        else:
            raise wrong_input(self, given)
        names = named(["class", *(f"patch {n}" for n in range(self.model.grid**2))])
        return Items((pixels / 255)[None], names, pixels=pixels)

    def read_picture(self, data: bytes) -> Tensor:
        try:
            pixels = read(data, self.model.size)
        except ValueError as error:
            raise Refused(str(error)) from error
        return (pixels * 255).round().to(torch.uint8)

    def logits(self, items: Items, mask: Given) -> Tensor:
        return self.model(items.data, mask=mask)[0]


class Example(Subject):
    """The running example: four items, width 1024, eight heads. The weights are random, the numbers are real."""

    id, name, words = "example", "Running example", True
    about = "4 items of width 1024, 8 heads of 128: random weights and a random vector for each word."
    mask = Causal()
    width, heads = 1024, 8

    def __init__(self) -> None:
        generator = torch.random.get_rng_state()
        torch.manual_seed(0)
        self._layer = MultiHeadAttention(self.width, heads=self.heads).eval()
        torch.random.set_rng_state(generator)
        with torch.no_grad():
            for parameter in self._layer.parameters():
                parameter.copy_(parameter.half().float())  # so that they travel in half the bytes, and lose nothing

    def layers(self) -> list[tuple[str, MultiHeadAttention | None, dict[str, int]]]:
        return [("the layer", self._layer, sizes_of(self._layer))]

    def examples(self) -> list[dict[str, Any]]:
        return [{"input": {"kind": "text", "text": SENTENCE}, "label": SENTENCE}]

    @property
    def most(self) -> int:
        return 64  # items of width 1024: a trace of them is 3 MB

    def cut(self, text: str) -> tuple[list[Token], int]:
        words = text.split()
        return [_word(n, word) for n, word in enumerate(words[: self.most])], len(words)

    def read(self, given: Any, need: int = 1) -> Items:
        if given["kind"] != "text":
            raise wrong_input(self, given)
        words = given["text"].split()
        if not words or len(words) > self.most:
            raise Refused(f"the text has {len(words)} words: expected 1 to {self.most}")
        x = torch.stack([self._vector(word) for word in words])  # (N, E)
        known = {word: n for n, word in enumerate(dict.fromkeys(words))}
        return Items(x, [_word(n, word) for n, word in enumerate(words)], torch.tensor([known[w] for w in words]))

    def _vector(self, word: str) -> Tensor:
        """The same word has the same vector, wherever it stands: that of `multihead show --example`."""
        seed = zlib.crc32(word.encode("utf-8", "replace"))
        return torch.randn(self.width, generator=torch.Generator().manual_seed(seed))

    def trace(self, items: Items, layer: int, mask: Given) -> Trace:
        return trace(self._layer, items.data, mask=self.mask if isinstance(mask, str) else mask)

    def look(self, items: Items, mask: Given) -> list[Lens]:
        return [self._layer.look(items.data, mask=self.mask if isinstance(mask, str) else mask)]


def _word(number: int, word: str) -> Token:
    return token(number, word.encode("utf-8", "replace"))


def _whole_characters(text: str) -> str:
    """Half a surrogate pair, which JSON can hold, is no character: it becomes the sign for one that is missing."""
    return text.encode("utf-8", "replace").decode("utf-8")

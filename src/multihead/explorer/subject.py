"""What can be explored: a model, or a layer of one's own, behind one face, so that the routes need not know which.

A subject reads an input into items, and gives traces, lenses and logits of them; it reaches into nothing deeper.
"""

import base64
import binascii
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from multihead.explorer.request import Refused, Request, said_of
from multihead.explorer.tokens import Token
from multihead.layer import MultiHeadAttention
from multihead.layer.edit import ablate
from multihead.layer.trace import Trace
from multihead.lens import Lens
from multihead.masks import Mask
from multihead.models.blocks import Given

MOST_BYTES = 32 * 2**20  # of scores, masked and weights together
MOST_ITEMS = 512
MOST_LONG = 100_000  # items of a map


@dataclass(frozen=True)
class Grid:
    """How items lie on a picture: patches row by row, after `first` items that are no patches."""

    rows: int
    columns: int
    first: int = 1

    def places(self) -> Tensor:
        """Row and column of each item, (N,2); an item that is no patch stands in the middle."""
        down, across = torch.meshgrid(torch.arange(self.rows), torch.arange(self.columns), indexing="ij")
        patches = torch.stack([down.flatten(), across.flatten()], dim=1).double()
        return torch.cat([patches.mean(0).expand(self.first, 2), patches])


@dataclass(frozen=True)
class Items:
    """An input as a model takes it."""

    data: Any  # token numbers (1,N), pixels, or what was handed to `explore`
    tokens: list[Token]
    ids: Tensor | None = None  # (N,) integers, where items are tokens
    pixels: Tensor | None = None  # (rows, columns[, channels]) uint8
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.tokens)


class Subject:
    """A model to explore. Subclasses say how it reads, traces, looks and predicts; what they lack is refused."""

    id = "model"
    name = "Your model"
    about = ""
    kind = "text"  # or "picture", "given"
    predicts: str | None = None  # "tokens", "classes"
    decodes = False  # whether one token can go through it alone, after a cache
    masks = True  # whether another mask can go through the whole of it
    ablates = True
    words = False  # whether text is cut at spaces
    gives_weights = True  # whether its matrices are known
    fixed = True  # whether it stays the same, so that answers can be kept
    mask: Mask | Tensor | None = None
    grid: Grid | None = None
    picture: dict[str, int] | None = None
    labels: Sequence[str] = ()

    def layers(self) -> list[tuple[str, MultiHeadAttention | None, dict[str, int]]]:
        """Name, layer and sizes of each; None where the layer is not one of ours."""
        raise NotImplementedError

    def examples(self) -> list[dict[str, Any]]:
        """Inputs to begin with."""
        return []

    def read(self, given: Any, need: int = 1) -> Items:
        raise NotImplementedError

    def read_long(self, given: Any) -> Items:
        """The same for a map, which may have more items than a trace."""
        return self.read(given)

    def trace(self, items: Items, layer: int, mask: Given) -> Trace:
        raise NotImplementedError

    def look(self, items: Items, mask: Given) -> list[Lens]:
        raise NotImplementedError

    def look_at(self, items: Items, layer: int, mask: Given) -> Lens:
        """A lens on one layer."""
        return self.look(items, mask)[layer]

    def version(self) -> str:
        """Another text once the subject has changed, where it can: what was kept of it is then computed again."""
        return ""

    def logits(self, items: Items, mask: Given) -> Tensor:
        """Of the token after each, (N, vocabulary), or of each class, (classes,)."""
        raise Refused(f"{self.name} predicts nothing: expected a language model or a classifier")

    def token(self, number: int) -> Token:
        """A token of the vocabulary."""
        raise Refused(f"{self.name} has no vocabulary")

    def cut(self, text: str) -> tuple[list[Token], int]:
        """The first tokens of a text, as they go into the model, and how many there are in all."""
        raise Refused(f"{self.name} takes no text")

    def decode(self, items: Items, layer: int) -> Trace:
        """The last item alone, against a cache of those before it."""
        raise Refused(f"{self.name} keeps no cache: expected a language model")

    def read_picture(self, data: bytes) -> Tensor:
        """The pixels of a picture file as the model takes them, uint8."""
        raise Refused(f"{self.name} takes no pictures: expected a vision transformer")

    def parts(self) -> list[nn.Module]:
        """Modules that are called one after another: work can be stopped before each."""
        return []

    def describe(self) -> dict[str, Any]:
        """The entry of `models`."""
        layers = [{"name": name, "sizes": sizes} for name, _, sizes in self.layers()]
        return {
            "id": self.id,
            "name": self.name,
            "about": self.about,
            "kind": self.kind,
            "layers": layers,
            "mask": said_of(self.mask),
            "predicts": self.predicts,
            "decodes": self.decodes,
            "masks": self.masks,
            "ablates": self.ablates,
            "weights": self.gives_weights,
            "most": self.most,
            "longest": self.longest,
            "given": self.given,
            "words": self.words,
            "examples": self.examples(),
            "picture": self.picture,
        }

    @property
    def most(self) -> int:
        """Items of a trace at most: what it holds grows by their square."""
        heads = max(sizes["H"] for _, _, sizes in self.layers())
        return min(MOST_ITEMS, int((MOST_BYTES / (12 * heads)) ** 0.5))

    @property
    def longest(self) -> int:
        """Items of a map at most."""
        return self.most

    @property
    def given(self) -> int | None:
        """Items of the input {"kind": "given"}, where there is one."""
        return None

    def layer(self, number: int) -> tuple[str, MultiHeadAttention | None, dict[str, int]]:
        layers = self.layers()
        if number >= len(layers):
            raise Refused(f"layer={number}: {self.name} has layers 0…{len(layers) - 1}")
        return layers[number]

    @contextmanager
    def without(self, request: Request) -> Iterator[None]:
        """Inside the block, the heads that a request switches off are off."""
        if not request.off:
            yield
            return
        if not self.ablates:
            raise Refused(f"heads of {self.name} cannot be switched off")
        with ExitStack() as stack:
            for number in sorted({layer for layer, _ in request.off}):
                heads = [head for layer, head in request.off if layer == number]
                _, _, sizes = self.layer(number)
                if max(heads) >= sizes["H"]:
                    raise Refused(f"off has head {max(heads)} of layer {number}: it has heads 0…{sizes['H'] - 1}")
                stack.enter_context(self.ablated(number, heads, request.with_))
            yield

    @contextmanager
    def ablated(self, number: int, heads: list[int], with_: str) -> Iterator[None]:
        _, layer, _ = self.layer(number)
        assert layer is not None
        with ablate(layer, heads, with_):
            yield


def allowed_by(subject: Subject, request: Request, mask: Any) -> Any:
    """The mask of a request, unless the subject makes its own."""
    if request.mask is not None and not subject.masks:
        raise Refused(f"{subject.name} makes its masks itself: expected no mask, or one on the stage alone")
    return mask


def sizes_of(layer: MultiHeadAttention) -> dict[str, int]:
    s = layer.sizes
    return {"E": s.E, "H": s.H, "G": s.G, "D": s.D, "V": s.V, "C": s.C}


def wrong_input(subject: Subject, given: Any) -> Refused:
    takes = {"text": "text or tokens", "picture": "a sample or pixels", "given": "given"}[subject.kind]
    return Refused(f"input is {given['kind']}: {subject.name} takes {takes}")


def bytes_from(pixels: str, shape: tuple[int, ...]) -> Tensor:
    """The pixels of a request: base64 of one byte for each number of `shape`."""
    try:
        data = base64.b64decode(pixels, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused(f"pixels is not base64: {error}") from error
    wanted = torch.Size(shape).numel()
    if len(data) != wanted:
        raise Refused(f"pixels has {len(data)} bytes: expected {wanted}, {' × '.join(map(str, shape))}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(shape)

"""A Hugging Face vision transformer as something to explore: one that cuts a square picture into patches."""

import io
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from multihead import hf
from multihead.explorer.huggingface import NAME, find_layers, twins_of
from multihead.explorer.request import Refused
from multihead.explorer.subject import Grid, Items, Subject, bytes_from, wrong_input
from multihead.explorer.tokens import named
from multihead.layer import MultiHeadAttention
from multihead.layer.trace import Trace
from multihead.lens import Lens
from multihead.models import samples
from multihead.models.blocks import Given
from multihead.models.images import FORMATS, MOST_PIXELS


class TheirPictures(Subject):
    """A vision transformer of transformers, a classifier or not; pictures are squeezed to the size it was made for."""

    id, kind, masks = "model", "picture", False

    def __init__(
        self, model: Any, name: str, mean: Sequence[float] = (0.5,) * 3, std: Sequence[float] = (0.5,) * 3
    ) -> None:
        self.model, self.name = model, name
        if model.config._attn_implementation != NAME:
            model.set_attn_implementation(NAME)
        settings = getattr(model.config, "vision_config", model.config)
        self.size, self.patch = _side(settings, "image_size"), _side(settings, "patch_size")
        self.mean, self.std = (torch.tensor(list(given)).view(1, -1, 1, 1) for given in (mean, std))
        first = hf.trace(model, 0, pixel_values=self._blank())
        across, N = self.size // self.patch, len(first.labels)
        if across**2 > N:
            raise ValueError(
                f"{type(model).__name__} makes {N} items of {across} × {across} patches: expected at least as many"
            )
        self.grid = Grid(across, across, first=N - across**2)
        size, patch, before = self.size, self.patch, self.grid.first
        self.picture = {
            "size": size, "channels": 3, "patch": patch, "rows": across, "columns": across, "first": before,
        }  # fmt: skip
        self._layers = find_layers(model, pixel_values=self._blank())
        self._twin = twins_of(model, pixel_values=self._blank())
        self.gives_weights = self._twin(0) is not None
        classes = getattr(model.config, "id2label", None) if "Classification" in type(model).__name__ else None
        self.labels = [str(classes[n]) for n in sorted(classes)] if classes else ()
        self.predicts = "classes" if self.labels else None
        count = sum(p.numel() for p in model.parameters())
        self.about = f"{type(model).__name__}: {len(self._layers)} layers, {count:,} parameters."

    def _blank(self) -> Tensor:
        return self._normalised(torch.zeros(self.size, self.size, 3, dtype=torch.uint8))

    def _normalised(self, pixels: Tensor) -> Tensor:
        return (pixels.permute(2, 0, 1)[None] / 255 - self.mean) / self.std  # (1, 3, size, size)

    def layers(self) -> list[tuple[str, MultiHeadAttention | None, dict[str, int]]]:
        return self._layers

    def layer(self, number: int) -> tuple[str, MultiHeadAttention | None, dict[str, int]]:
        name, _, sizes = super().layer(number)
        return name, self._twin(number), sizes

    def examples(self) -> list[dict[str, Any]]:
        return [{"input": {"kind": "sample", "name": name}, "label": name} for name in samples()]

    def parts(self) -> list[nn.Module]:
        return [self.model.get_submodule(name) for name, _, _ in self._layers]

    def read(self, given: Any, need: int = 1) -> Items:
        if given["kind"] == "sample":
            if given["name"] not in samples():
                raise Refused(f"name={given['name'][:60]!r}: expected one of {', '.join(samples())}")
            pixels = self.read_picture(samples()[given["name"]].read_bytes())
        elif given["kind"] == "pixels":
            pixels = bytes_from(given["pixels"], (self.size, self.size, 3))
        else:
            raise wrong_input(self, given)
        assert self.grid is not None
        before = ["class", *(f"extra {n}" for n in range(1, self.grid.first))][: self.grid.first]
        names = [*before, *(f"patch {n}" for n in range(self.grid.rows * self.grid.columns))]
        return Items(self._normalised(pixels), named(names), pixels=pixels)

    def read_picture(self, data: bytes) -> Tensor:
        from PIL import Image, ImageOps

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit is ours
                with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
                    if picture.width * picture.height > MOST_PIXELS:
                        raise Refused(f"the picture has more than {MOST_PIXELS:,} pixels", "large", 413)
                    turned = ImageOps.exif_transpose(picture)
                    assert turned is not None
                    fitted = ImageOps.fit(turned.convert("RGB"), (self.size, self.size), Image.Resampling.BICUBIC)
        except (OSError, SyntaxError, EOFError, zlib.error, ValueError, Image.DecompressionBombError, Warning) as error:
            if isinstance(error, Refused):
                raise
            raise Refused(f"the picture cannot be read: {str(error)[:200]}") from error
        return torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8).view(self.size, self.size, 3)

    def trace(self, items: Items, layer: int, mask: Given) -> Trace:
        return hf.trace(self.model, layer, pixel_values=items.data)

    def look(self, items: Items, mask: Given) -> list[Lens]:
        with hf.watch(self.model) as seen:
            self.model(pixel_values=items.data)
        return [seen[layer] for layer in seen]

    def logits(self, items: Items, mask: Given) -> Tensor:
        if self.predicts is None:
            return super().logits(items, mask)
        return self.model(pixel_values=items.data).logits[0]

    @contextmanager
    def ablated(self, number: int, heads: list[int], with_: str) -> Iterator[None]:
        with hf.ablate(self.model, {number: heads}, with_):
            yield


def _side(settings: Any, name: str) -> int:
    """A size of a square, which a config may give as one number or as two."""
    given = getattr(settings, name, None)
    sides = list(given) if isinstance(given, list | tuple) else [given]
    if not sides or len(set(sides)) != 1 or not isinstance(sides[0], int):
        raise ValueError(f"{name}={given}: expected a vision transformer on square pictures of square patches")
    return sides[0]

"""A vision transformer on the layer: an image cut into patches, a class token in front, and no mask.

Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words". B batch · N items, the class token and the patches, row by
row · E model width.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from multihead.models.blocks import Given, Stack
from multihead.sizes import require_int

if TYPE_CHECKING:
    from multihead.models.images import Source


class VisionTransformer(Stack):
    """Patches of a grey image as items: every item sees every item, and the class token's output says what it is.

    Args:
        labels: the name of each class.
        width: E, the width of the model.
        heads: H, the heads of each layer.
        layers: how many blocks.
        size: height and width of an image, in pixels.
        patch: height and width of a patch.

    >>> vit = mh.models.VisionTransformer(["cat", "dog", "cow"], width=32, heads=4, layers=2)
    >>> vit(torch.rand(2, 28, 28)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        labels: Sequence[str],
        width: int = 64,
        heads: int = 4,
        layers: int = 4,
        size: int = 28,
        patch: int = 4,
    ) -> None:
        if isinstance(labels, str) or not labels:
            raise ValueError(f"labels={labels!r}: expected a list of names, one for each class")
        if require_int("size", size, 1) % require_int("patch", patch, 1):
            raise ValueError(f"patch={patch} does not divide size={size}: expected whole patches")
        super().__init__(width, heads, layers)
        self.settings = {
            "labels": list(labels), "width": width, "heads": heads, "layers": layers, "size": size, "patch": patch,
        }  # fmt: skip
        self.labels, self.size, self.patch = list(labels), size, patch
        self.grid = size // patch  # patches down and across
        self.patch_embedding = nn.Linear(patch * patch, width)
        self.class_token = nn.Parameter(torch.zeros(width))
        self.positions = nn.Parameter(torch.randn(1 + self.grid**2, width) * 0.5)  # as large as a patch
        self.classifier = nn.Linear(width, len(self.labels))

    def cut(self, pixels: Tensor) -> Tensor:
        """The patches of images (B, size, size): (B, grid², patch²)."""
        if pixels.dim() != 3 or pixels.shape[1:] != (self.size, self.size):
            raise ValueError(f"pixels has shape {tuple(pixels.shape)}: expected (B,{self.size},{self.size})")
        g, p = self.grid, self.patch
        return pixels.unflatten(1, (g, p)).unflatten(3, (g, p)).transpose(2, 3).flatten(3).flatten(1, 2)

    def embed(self, items: Tensor) -> Tensor:
        patches = self.patch_embedding(2 * self.cut(items) - 1)  # grey is 0
        return torch.cat([self.class_token.expand(len(items), 1, -1), patches], dim=1) + self.positions

    def forward(self, pixels: Tensor, mask: Given = "own") -> Tensor:
        """The logits of each class: (B, size, size), 0 black to 1 white → (B, classes)."""
        return self.classifier(self.contextualise(pixels, mask=mask)[:, 0])

    def loss(self, pixels: Tensor, classes: Tensor) -> Tensor:
        """The mean of −ln p of the true class."""
        return cross_entropy(self(pixels), classes)

    @torch.inference_mode()
    def classify(self, image: "Source") -> list[tuple[str, float]]:
        """Every label with its probability, the likeliest first.

        Args:
            image: a file, a Pillow image, or a tensor or array (height, width[, 3 or 4]): of any size and any mode.

        >>> vit = mh.models.load("vit")
        >>> vit.classify(mh.models.samples()["ankle boot"])[0][0]
        'ankle boot'
        """
        from multihead.models.images import read

        p = self(read(image, self.size)[None])[0].softmax(-1).tolist()
        return sorted(zip(self.labels, p), key=lambda pair: -pair[1])

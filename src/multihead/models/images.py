"""Images for the vision transformer: any picture as grey pixels, and labelled ones to train on.

Fashion-MNIST (Xiao et al. 2017, arXiv:1708.07747; MIT licence) is Debian's package `dataset-fashion-mnist`: 60,000
images to train on and 10,000 to test with, 28 × 28 pixels, a light thing on black.
"""

import gzip
import io
import os
import warnings
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

    Source = str | os.PathLike | bytes | Image.Image | Tensor | np.ndarray

FASHION = Path("/usr/share/datasets/fashion-mnist")
LABELS = (
    "T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
HELD_OUT = 5000  # of the images to train on, for validation
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # and no other: for EPS Pillow would start Ghostscript
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".pgm", ".ppm", ".pbm")
MOST_PIXELS = 100_000_000  # a small file can claim to be a huge picture


def read(image: "Source", size: int) -> Tensor:
    """Any picture (a file, its bytes, a Pillow image, a tensor or an array) as (size, size) grey pixels, 0 black to 1.

    Transparent parts are black. A picture on a light ground is turned into its negative, because the model was trained
    on light things on black. It is fitted into the middle of a square, not stretched.

    >>> from multihead.models.images import read
    >>> read(mh.models.samples()["ankle boot"], 28).shape
    torch.Size([28, 28])
    """
    from PIL import Image, ImageChops, ImageOps

    picture = ImageOps.exif_transpose(_open(image))
    assert picture is not None
    rgba = _eight_bits(picture).convert("RGBA")
    alpha = rgba.getchannel("A")
    grey = rgba.convert("L")
    seen = ImageChops.multiply(grey, alpha)  # what is transparent is black
    shades, (width, height) = seen.tobytes(), seen.size
    corners = [shades[y * width + x] for x in (0, width - 1) for y in (0, height - 1)]
    if sum(shade > 127 for shade in corners) >= 3:
        seen = ImageChops.multiply(ImageChops.invert(grey), alpha)
    square = ImageOps.pad(seen, (size, size), method=Image.Resampling.BOX, color=0)  # means of the pixels covered
    return torch.frombuffer(bytearray(square.tobytes()), dtype=torch.uint8).view(size, size) / 255


def _eight_bits(picture: "Image.Image") -> "Image.Image":
    """A grey picture of 16 bits or more in 8; Pillow itself would cut off all that is above 255."""
    if not picture.mode.startswith("I"):
        return picture
    import numpy as np
    from PIL import Image

    shades = np.asarray(picture).clip(0, 65535)
    return Image.fromarray((shades // 257 if shades.max() > 255 else shades).astype(np.uint8))


def _open(image: "Source") -> "Image.Image":
    """The picture in a file, a tensor or an array, whole and of a size that fits in memory."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(image, Image.Image):
        return image
    if isinstance(image, str | os.PathLike | bytes):
        path: Path | str = "the picture" if isinstance(image, bytes) else Path(image)
        if isinstance(path, Path) and not path.is_file():
            raise FileNotFoundError(f"{path}: there is no such file")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit is ours
                picture = Image.open(io.BytesIO(image) if isinstance(image, bytes) else path, formats=FORMATS)
            with picture:
                small = picture.width * picture.height <= MOST_PIXELS
                if small:
                    picture.draft("L", (512, 512))  # a JPEG is then read at a smaller scale
                    picture.load()
        except UnidentifiedImageError as error:
            raise ValueError(f"{path} is not an image of a kind that is read: expected {', '.join(FORMATS)}") from error
        except Image.DecompressionBombError as error:
            raise ValueError(f"{path} is too large: expected at most {MOST_PIXELS:,} pixels") from error
        except (OSError, SyntaxError, EOFError, ValueError, zlib.error) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        if not small:
            raise ValueError(f"{path} has {picture.width} × {picture.height} pixels: expected at most {MOST_PIXELS:,}")
        return picture
    return Image.fromarray(_pixels(image))


def _pixels(image: Any) -> "np.ndarray":
    """A tensor or array as bytes: (height, width), or with 3 or 4 colours last."""
    import numpy as np

    array = image.detach().cpu().numpy() if isinstance(image, Tensor) else image
    if not isinstance(array, np.ndarray):
        raise TypeError(f"image is a {type(image).__name__}: expected a file, a Pillow image, a tensor or an array")
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)) or 0 in array.shape:
        raise ValueError(f"image has shape {array.shape}: expected (height,width) or (height,width,3 or 4)")
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind != "f" or not (np.isfinite(array).all() and array.min() >= 0 and array.max() <= 1):
        raise ValueError(f"image holds {array.dtype} from {array.min()} to {array.max()}: expected uint8, or 0.0…1.0")
    return (array * 255).round().astype(np.uint8)


Labelled = tuple[Tensor, Tensor]  # pixels (images, size, size) uint8, classes (images,)


def read_labelled(folder: str | os.PathLike | None, size: int) -> tuple[Labelled, Labelled, list[str]]:
    """What to train on, what to validate on, and the labels.

    From Debian's Fashion-MNIST unless given: of its images to train on the last 5,000 are held out, and its test set is
    not read. Or from a folder that has a folder of images for each label, of which every tenth is held out.
    """
    if folder is None:
        pixels, true = read_fashion("train")
        return (pixels[:-HELD_OUT], true[:-HELD_OUT]), (pixels[-HELD_OUT:], true[-HELD_OUT:]), list(LABELS)
    root = Path(folder)
    if not root.is_dir():
        raise FileNotFoundError(f"{root}: there is no such folder")
    labels = sorted(place.name for place in root.iterdir() if place.is_dir() and not place.name.startswith("."))
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    classes: tuple[list[int], list[int]] = ([], [])
    for number, label in enumerate(labels):
        files = sorted(file for file in (root / label).iterdir() if file.suffix.lower() in SUFFIXES)
        for n, file in enumerate(files):
            part = 1 if n % 10 == 9 else 0
            found[part].append((read(file, size) * 255).round().to(torch.uint8))
            classes[part].append(number)
    if not found[0] or not found[1]:
        raise ValueError(f"{root}: expected a folder for each label, of at least ten images each")
    train, held_out = ((torch.stack(f), torch.tensor(c)) for f, c in zip(found, classes))
    return train, held_out, labels


def read_fashion(part: str) -> Labelled:
    """The images of Debian's Fashion-MNIST: "train", 60,000 of them, or "t10k", the test set."""
    files = [FASHION / f"{part}-{what}-ubyte.gz" for what in ("images-idx3", "labels-idx1")]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{file} is not there: run `apt-get install dataset-fashion-mnist`")
    pixels, classes = (gzip.decompress(file.read_bytes()) for file in files)
    images = torch.frombuffer(bytearray(pixels[16:]), dtype=torch.uint8).view(-1, 28, 28)  # after four numbers
    return images, torch.frombuffer(bytearray(classes[8:]), dtype=torch.uint8).long()


def augment(pixels: Tensor, shift: int, generator: torch.Generator) -> Tensor:
    """Half of the images mirrored, and each moved by up to `shift` pixels, by chance: (B, size, size) → 0.0…1.0."""
    B, size, _ = pixels.shape
    mirrored = torch.rand(B, generator=generator) < 0.5
    pixels = pixels.where(~mirrored[:, None, None], pixels.flip(2))
    if shift:
        padded = torch.nn.functional.pad(pixels, [shift] * 4)
        down, across = torch.randint(2 * shift + 1, (2, B, 1), generator=generator)
        rows, columns = down + torch.arange(size), across + torch.arange(size)  # (B, size) each
        pixels = padded[torch.arange(B)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return pixels / 255

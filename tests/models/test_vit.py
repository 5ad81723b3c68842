"""The vision transformer, and pictures of every kind that it is given."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import multihead as mh
from multihead.models import VisionTransformer, images


@pytest.fixture(scope="module")
def vit() -> VisionTransformer:
    return mh.models.load("vit")


@pytest.fixture
def boot() -> Image.Image:
    return Image.open(mh.models.samples()["ankle boot"])


def test_patches_are_cut_row_by_row() -> None:
    vit = VisionTransformer(["a", "b"], width=8, heads=2, layers=1, size=6, patch=3)
    pixels = torch.arange(36.0).view(1, 6, 6)
    patches = vit.cut(pixels)
    assert patches.shape == (1, 4, 9)
    assert patches[0, 1].tolist() == [3, 4, 5, 9, 10, 11, 15, 16, 17]
    assert torch.equal(patches[0, 2].view(3, 3), pixels[0, 3:, :3])


def test_class_token_sees_every_patch(vit: VisionTransformer) -> None:
    pixels = torch.rand(1, 28, 28)
    rows = torch.stack([lens.rows(0)[0, :, 0] for lens in vit.look(pixels)])  # (layers, H, N)
    assert rows.shape == (len(vit.blocks), 4, 50)
    assert (rows > 0).all()
    torch.testing.assert_close(rows.sum(-1), torch.ones(len(vit.blocks), 4))
    for n in range(49):  # each patch matters to the answer
        changed = pixels.clone()
        down, across = divmod(n, 7)
        changed[0, 4 * down : 4 * down + 4, 4 * across : 4 * across + 4] = 1 - changed[0, 4 * down, 4 * across]
        assert not torch.equal(vit(pixels), vit(changed)), n


def test_samples_are_classified(vit: VisionTransformer) -> None:
    samples = mh.models.samples()
    assert set(samples) == set(vit.labels)
    right = [name for name, file in samples.items() if vit.classify(file)[0][0] == name]
    assert len(right) >= 8, right


def test_classify_gives_every_label_once_the_likeliest_first(vit: VisionTransformer, boot: Image.Image) -> None:
    found = vit.classify(boot)
    assert sorted(label for label, _ in found) == sorted(vit.labels)
    assert [p for _, p in found] == sorted((p for _, p in found), reverse=True)
    assert sum(p for _, p in found) == pytest.approx(1)


def resaved(picture: Image.Image, folder: Path, name: str) -> Path:
    picture.save(folder / name)
    return folder / name


def transparent(picture: Image.Image) -> Image.Image:
    """The same thing on a ground that is transparent and, under that, white."""
    ground = Image.new("RGBA", picture.size, (255, 255, 255, 0))
    return Image.composite(picture.convert("RGBA"), ground, picture.point(lambda shade: 255 * (shade > 0)))


MODES = {
    "grey": lambda p: p,
    "RGB": lambda p: p.convert("RGB"),
    "RGBA": lambda p: p.convert("RGBA"),
    "RGBA on nothing": transparent,
    "palette": lambda p: p.convert("P"),
    "16 bit": lambda p: Image.fromarray(np.asarray(p).astype(np.uint16) * 257),
    "grey with alpha": lambda p: p.convert("LA"),
    "CMYK": lambda p: p.convert("RGB").convert("CMYK"),
    "float": lambda p: p.convert("F"),
    "on white": lambda p: Image.eval(p, lambda shade: 255 - shade),
    "larger": lambda p: p.resize((280, 280), Image.Resampling.NEAREST),
}


@pytest.mark.parametrize("mode", MODES)
def test_the_same_picture_in_any_mode(vit: VisionTransformer, boot: Image.Image, mode: str) -> None:
    pixels = images.read(MODES[mode](boot), 28)
    torch.testing.assert_close(pixels, images.read(boot, 28), atol=2 / 255, rtol=0)
    assert vit.classify(MODES[mode](boot))[0][0] == "ankle boot"


def test_files_arrays_and_tensors_are_the_same_picture(boot: Image.Image, tmp_path: Path) -> None:
    expected = images.read(boot, 28)
    bytes_ = np.asarray(boot)
    for given in (resaved(boot, tmp_path, "a.png"), str(resaved(boot, tmp_path, "b.bmp")), bytes_,
                  torch.tensor(bytes_), torch.tensor(bytes_) / 255, (bytes_ / 255), np.stack([bytes_] * 3, axis=-1)):  # fmt: skip
        torch.testing.assert_close(images.read(given, 28), expected, atol=1 / 255, rtol=0)


@pytest.mark.parametrize("size", [(1, 1), (1, 500), (2000, 3), (3000, 2000)], ids=str)
def test_any_size_is_taken(vit: VisionTransformer, size: tuple[int, int]) -> None:
    assert images.read(Image.new("L", size, 90), 28).shape == (28, 28)
    assert len(vit.classify(Image.new("L", size))) == 10


def test_a_wide_picture_is_fitted_not_stretched() -> None:
    pixels = images.read(Image.new("L", (100, 50), 100), 28)
    lit = pixels > 0.2
    assert lit.any(1).sum() == 14
    assert lit.any(0).sum() == 28


def test_huge_pictures_are_refused_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = resaved(Image.new("1", (3000, 3000)), tmp_path, "huge.png")
    monkeypatch.setattr(images, "MOST_PIXELS", 1_000_000)
    with pytest.raises(ValueError, match=r"huge.png has 3000 × 3000 pixels: expected at most 1,000,000"):
        images.read(file, 28)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 6_000_000)  # Pillow warns: the limit is ours alone
    with pytest.raises(ValueError, match=r"huge.png has 3000 × 3000 pixels: expected at most 1,000,000"):
        images.read(file, 28)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # Pillow refuses before it says the size
    with pytest.raises(ValueError, match=r"huge.png is too large: expected at most 1,000,000 pixels"):
        images.read(file, 28)


@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "gif", "webp"])
def test_truncated_files_are_refused(boot: Image.Image, tmp_path: Path, suffix: str) -> None:
    whole = resaved(boot.resize((200, 200)), tmp_path, f"whole.{suffix}").read_bytes()
    for part in (0, 5, len(whole) // 3, len(whole) * 2 // 3):
        (tmp_path / f"cut.{suffix}").write_bytes(whole[:part])
        with pytest.raises(ValueError, match=rf"cut\.{suffix} is (damaged|not an image)"):
            images.read(tmp_path / f"cut.{suffix}", 28)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("nowhere.png", FileNotFoundError, r"nowhere.png: there is no such file"),
        (Path(__file__), ValueError, r"test_vit.py is not an image of a kind that is read"),
        (7, TypeError, r"image is a int: expected a file"),
        (torch.zeros(2, 3, 4, 5), ValueError, r"image has shape \(2, 3, 4, 5\)"),
        (torch.zeros(0, 5), ValueError, r"image has shape \(0, 5\)"),
        (torch.zeros(5, 5, 2), ValueError, r"image has shape \(5, 5, 2\)"),
        (torch.full((4, 4), 255.0), ValueError, r"from 255.0 to 255.0: expected uint8, or 0.0…1.0"),
        (torch.full((4, 4), torch.nan), ValueError, r"from nan to nan"),
        (torch.zeros(4, 4, dtype=torch.int64), ValueError, r"image holds int64"),
    ],
)
def test_what_is_no_picture_is_refused(given: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        images.read(given, 28)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: VisionTransformer([]), "labels=\\[\\]: expected a list of names"),
        (lambda: VisionTransformer("cat"), "labels='cat'"),
        (lambda: VisionTransformer(["a"], size=28, patch=5), "patch=5 does not divide size=28"),
        (lambda: VisionTransformer(["a"], width=90), "heads=4 does not divide E=90"),
        (lambda: VisionTransformer(["a"])(torch.zeros(28, 28)), r"pixels has shape \(28, 28\): expected \(B,28,28\)"),
    ],
)
def test_refuses_in_words(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_half_of_the_images_are_mirrored() -> None:
    pixels = torch.randint(256, (400, 28, 28), dtype=torch.uint8)
    seen = images.augment(pixels, 0, torch.Generator().manual_seed(0))
    as_it_is = (seen == pixels / 255).flatten(1).all(1)
    mirrored = (seen == pixels.flip(2) / 255).flatten(1).all(1)
    assert (as_it_is ^ mirrored).all()
    assert 150 < mirrored.sum() < 250
    assert torch.equal(seen, images.augment(pixels, 0, torch.Generator().manual_seed(0)))


def test_images_are_moved_by_up_to_the_shift() -> None:
    pixels = torch.zeros(500, 28, 28, dtype=torch.uint8)
    pixels[:, 10, 8] = 255
    lit = images.augment(pixels, 2, torch.Generator().manual_seed(0)).flatten(1)
    assert (lit.sum(1) == 1).all()
    assert set((lit.argmax(1) // 28).tolist()) == {8, 9, 10, 11, 12}
    assert set((lit.argmax(1) % 28).tolist()) == {6, 7, 8, 9, 10, 17, 18, 19, 20, 21}, "8, and 19 in a mirror"


def test_the_bytes_of_a_file_are_read_as_the_file(vit: VisionTransformer) -> None:
    file = mh.models.samples()["bag"]
    assert torch.equal(mh.models.images.read(file.read_bytes(), 28), mh.models.images.read(file, 28))
    for data, message in ((b"", "not an image"), (file.read_bytes()[:200], "the picture is damaged")):
        with pytest.raises(ValueError, match=message):
            vit.classify(data)

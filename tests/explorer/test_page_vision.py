"""The page in a browser: a vision transformer of 224 pixels, made on the spot, with numbers of `mh.look` and numpy."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import multihead as mh
from multihead.explorer import serve
from multihead.explorer.session import Session
from multihead.explorer.subjects import of_model
from tests.explorer.browser import Explorer, chromium, needs_browser  # noqa: F401

pytestmark = needs_browser
N = 197  # the class token and 14 × 14 patches


@pytest.fixture(scope="module")
def vit() -> Any:
    transformers = pytest.importorskip("transformers", reason="no transformers: its vision transformers are not tested")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=3, image_size=224, patch_size=16,
        initializer_range=0.4,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config).eval()


@pytest.fixture(scope="module")
def site(vit: Any) -> Iterator[Any]:
    session = Session([of_model(vit, mh.models.samples()["bag"])[0]])
    session.prepare()
    with serve.start(session, port=0, browser=False) as running:
        yield running


def photograph() -> bytes:
    """A smooth picture with some detail, 300 × 260."""
    from PIL import Image

    down, across = np.mgrid[0:260, 0:300]
    channels = [np.sin(across / 19 + down / 31), np.cos(down / 13), np.sin((across - down) / 7) * np.cos(across / 41)]
    picture = Image.fromarray(np.uint8(np.stack(channels, axis=-1) * 127 + 128))
    data = io.BytesIO()
    picture.save(data, "png")
    return data.getvalue()


def seen_by(vit: Any, explorer: Explorer) -> list[np.ndarray]:
    """The weights of each layer on the picture that the page shows, (H,N,N) in float64."""
    pixels = explorer.tensor("pixels").permute(2, 0, 1)[None] / 255
    with torch.inference_mode(), mh.hf.watch(vit) as seen:
        vit(pixel_values=(pixels - 0.5) / 0.5)
    return [seen[layer].weights()[0].double().numpy() for layer in seen]


def most_said(explorer: Explorer) -> str:
    return explorer.page.locator("canvas[data-grid=overlay]").get_attribute("aria-label").split("The most is ")[1]


def test_any_patch_and_the_class_token_per_head_and_rolled_out(chromium: Any, site: Any, vit: Any) -> None:
    explorer = Explorer(chromium, site, viewport={"width": 1440, "height": 900}).open("model=model&layer=2&head=1")
    weights = seen_by(vit, explorer)
    np.testing.assert_allclose(explorer.tensor("weights").numpy(), weights[2], atol=1e-5)
    assert most_said(explorer) == f"{weights[2][1, 0, 1:].max():.3f}.", "the class token is where it begins"
    for item in (1, 100, N - 1):
        where = explorer.js("n => multihead.input.picture.centre(n)", item)
        explorer.page.mouse.click(where["x"], where["y"])
        assert explorer.settle().state["at"] == f"query.{item}"
        assert most_said(explorer) == f"{weights[2][1, item, 1:].max():.3f}."
    explorer.page.get_by_role("group", name="Direction over the picture").get_by_text("Who attends to it").click()
    assert explorer.settle().state["at"] == f"key.{N - 1}"
    assert most_said(explorer) == f"{weights[2][1, 1:, N - 1].max():.3f}."
    explorer.page.get_by_role("button", name="The class token").click()
    assert explorer.settle().state["at"] == "key.0"
    explorer.page.get_by_label("Roll out from the picture to this layer").check()
    rolled = np.eye(N)
    for layer in range(3):
        rolled = (0.5 * np.eye(N) + 0.5 * weights[layer].mean(0)) @ rolled
        explorer.page.get_by_role("combobox", name="Layer").select_option(str(layer))
        explorer.settle()
        explorer.page.locator("canvas[data-grid=picture]").focus()
        explorer.press("ArrowRight", "Enter")
        item = int(explorer.state["at"].split(".")[1])
        assert most_said(explorer) == f"{rolled[1:, item].max():.3f}."
    explorer.page.get_by_role("group", name="Direction over the picture").get_by_text("What it attends to").click()
    explorer.settle()
    assert most_said(explorer) == f"{rolled[item, 1:].max():.3f}."
    assert "layers 0 to 2, rolled out" in explorer.page.inner_text("#picture-says")
    explorer.page.get_by_role("button", name="Show what lies over the picture as a table").click()
    with explorer.page.expect_download() as saved:
        explorer.page.get_by_role("button", name="Save as npz").click()
    assert saved.value.suggested_filename == "rollout_14x14.npz"
    with np.load(saved.value.path()) as found:
        np.testing.assert_allclose(found["rollout"], rolled[item, 1:].reshape(14, 14), rtol=1e-4, atol=1e-6)
    explorer.close()


@pytest.mark.parametrize(("width", "side"), [(360, 224), (1440, 448)])
def test_the_picture_stands_at_full_size(chromium: Any, site: Any, width: int, side: int) -> None:
    explorer = Explorer(chromium, site, viewport={"width": width, "height": 900}).open("model=model")
    for name in ("picture", "overlay"):
        box = explorer.page.locator(f"canvas[data-grid={name}]").bounding_box()
        assert (box["width"], box["height"]) == (side, side), "whole times its 224 pixels"
    assert explorer.js("() => document.documentElement.scrollWidth <= innerWidth")
    drawn = explorer.js(
        """() => { const t = multihead.app.session.scene.get().tensors.pixels;
             const c = document.querySelector('canvas[data-grid=overlay]');
             return [t.shape, c.width]; }"""
    )
    assert drawn == [[224, 224, 3], side]
    explorer.close()


def test_a_large_picture_travels_packed_and_the_page_says_so(
    chromium: Any, site: Any, vit: Any, tmp_path: Path
) -> None:
    explorer = Explorer(chromium, site, permissions=["clipboard-read", "clipboard-write"], accept_downloads=True)
    explorer.open("model=model&layer=1")
    (tmp_path / "one.png").write_bytes(photograph())
    explorer.page.set_input_files("#picture-file", str(tmp_path / "one.png"))
    explorer.page.wait_for_function("() => multihead.app.store.get().packed !== ''")
    exact = explorer.settle().tensor("pixels")
    link = explorer.page.url
    assert len(link) < 15_000
    explorer.page.get_by_role("button", name="Share").click()
    explorer.page.get_by_role("button", name="Copy the link").click()
    explorer.page.wait_for_function("() => document.querySelector('#share-says').textContent.includes('packed into')")
    explorer.page.get_by_role("combobox", name="Examples").select_option(label="bag")
    explorer.settle()
    explorer.page.go_back()
    explorer.page.wait_for_function("() => multihead.app.store.get().pixels !== ''")
    assert torch.equal(explorer.settle().tensor("pixels"), exact), "going back brings the exact picture back"
    with explorer.page.expect_download() as started:
        explorer.page.get_by_role("button", name="Save as one file").click()
    started.value.save_as(tmp_path / "page.html")
    explorer.close()

    other = Explorer(chromium, site)
    other.page.goto(link)
    other.page.wait_for_function("() => multihead.app.session.scene.get()?.tensors.pixels")
    other.settle()
    assert "came packed in a link" in other.page.inner_text("#picture-says")
    away = (other.tensor("pixels") - exact).abs()
    assert 0 < float(away.mean()) < 6, "of 255"
    np.testing.assert_allclose(other.tensor("weights").numpy(), seen_by(vit, other)[1], atol=1e-5)
    other.close()

    class Disk:
        url = (tmp_path / "page.html").as_uri()

    saved = Explorer(chromium, Disk(), offline=True)
    saved.page.goto(Disk.url)
    saved.page.wait_for_selector(".strip button[aria-current]")
    assert torch.equal(saved.settle().tensor("pixels"), exact), "the single file keeps the picture exactly"
    saved.close()

"""The page in a browser: what goes in, masks, heads, predictions and sharing, with numbers of `mh.trace` and `mh.look`.

Longer than other files because the parts of one page share one browser and its fixtures.
"""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import multihead as mh
from tests.explorer.browser import Explorer, chromium, close_to, explorer, needs_browser, number, server  # noqa: F401

pytestmark = needs_browser
TEXT = "I love pepperoni pizza"


@pytest.fixture(scope="module")
def lm() -> Any:
    return mh.models.load("lm")


@pytest.fixture(scope="module")
def vit() -> Any:
    return mh.models.load("vit")


def tokens_of(lm: Any, text: str = TEXT) -> torch.Tensor:
    return torch.tensor([lm.tokenizer.begin(text)])


def under(lm: Any, mask: Any, items: torch.Tensor, layer: int) -> Any:
    """A trace of one layer with another mask in all of them."""
    own, lm.mask = lm.mask, mask
    try:
        return lm.trace(items, layer=layer)
    finally:
        lm.mask = own


# Input ----------------------------------------------------------------------------------------------------------------


def test_tokens_appear_as_typed(explorer: Explorer, lm: Any) -> None:
    explorer.open("model=lm")
    explorer.page.locator("#text").fill("")
    explorer.page.locator("#text").type("Call me Ishmael", delay=5)
    explorer.typed("Call me Ishmael")
    items = tokens_of(lm, "Call me Ishmael")
    assert explorer.page.locator(".token").count() == items.shape[1]
    torch.testing.assert_close(explorer.tensor("weights"), lm.trace(items, layer=0)["weights"], rtol=1e-5, atol=1e-6)
    assert "Call+me+Ishmael" in explorer.page.url
    explorer.page.get_by_role("combobox", name="Layer").select_option("1")
    explorer.settle()
    torch.testing.assert_close(explorer.tensor("weights"), lm.trace(items, layer=1)["weights"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "text", ["<img src=x onerror=alert(1)>", "\x1b[31mred\x1b[0m", "abc \u202e\u05d0\u05d1\u05d2", "☃🧀 half", ""]
)
def test_hostile_text_is_text(explorer: Explorer, text: str) -> None:
    explorer.open("model=lm&step=3")
    explorer.page.locator("#text").fill(text)
    explorer.typed(explorer.page.input_value("#text"))
    assert explorer.page.locator("img").count() == 0
    assert explorer.page.locator(".token").count() >= 1
    assert explorer.page.locator(".trouble").is_hidden()
    shown = "".join(explorer.page.locator(".token").all_inner_texts())
    assert "\u202e" not in shown
    assert "\x1b" not in shown


def test_a_picture_is_chosen_dropped_and_pasted(explorer: Explorer, vit: Any, tmp_path: Path) -> None:
    from PIL import Image

    explorer.open("model=vit&layer=1&head=2&step=3")
    assert explorer.tensor("weights").shape == (4, 50, 50)
    pixels = (torch.arange(28 * 28).view(28, 28) % 251).to(torch.uint8)
    pixels[:4] = 0
    file = tmp_path / "one.png"
    Image.fromarray(pixels.numpy()).save(file)
    explorer.page.set_input_files("#picture-file", str(file))
    explorer.page.wait_for_function("() => multihead.app.store.get().pixels !== ''")
    explorer.settle()
    seen = explorer.tensor("pixels") / 255
    trace = vit.trace(seen[None], layer=1)
    torch.testing.assert_close(explorer.tensor("weights"), trace["weights"], rtol=1e-4, atol=1e-5)
    first = explorer.state["pixels"]
    for kind in ("drop", "paste"):
        other = Image.new("L", (28, 28), 40 if kind == "drop" else 90)
        other.paste(255, (8, 8, 20, 20))
        data = io.BytesIO()
        other.save(data, "png")
        explorer.js(
            """([kind, bytes]) => {
              const all = new DataTransfer();
              all.items.add(new File([new Uint8Array(bytes)], 'a.png', {type: 'image/png'}));
              const event = kind === 'drop' ? new DragEvent('drop', {dataTransfer: all, bubbles: true, cancelable: true})
                                            : new ClipboardEvent('paste', {clipboardData: all, bubbles: true});
              document.body.dispatchEvent(event); }""",
            [kind, list(data.getvalue())],
        )
        explorer.page.wait_for_function("before => multihead.app.store.get().pixels !== before", arg=first)
        first = explorer.settle().state["pixels"]
    broken = tmp_path / "broken.png"
    broken.write_bytes(file.read_bytes()[:60])
    explorer.page.set_input_files("#picture-file", str(broken))
    explorer.page.wait_for_selector(".trouble:not([hidden])")
    assert len(explorer.page.inner_text(".trouble p")) > 20
    explorer.messages.clear()  # the browser notes the refused request itself
    explorer.page.get_by_role("button", name="Dismiss").click()
    explorer.page.get_by_role("combobox", name="Examples").select_option(label="ankle boot")
    explorer.settle()
    assert explorer.page.locator(".trouble").is_hidden()


def test_attention_lies_over_the_picture_per_head_and_rolled_out(explorer: Explorer, vit: Any) -> None:
    explorer.open("model=vit&sample=ankle+boot&layer=1&head=1&step=3")
    where = explorer.js("() => multihead.input.picture.centre(18)")
    explorer.page.mouse.click(where["x"], where["y"])
    assert explorer.settle().state["at"] == "query.18"
    overlay = "() => document.querySelector('canvas[data-grid=overlay]').toDataURL()"
    before = explorer.js(overlay)
    assert "patch" in explorer.page.inner_text("#picture-says")
    image = mh.models.samples()["ankle boot"]
    items = torch.as_tensor(explorer.tensor("pixels") / 255)[None]
    weights = vit.look(items)[1].weights()[0]
    torch.testing.assert_close(explorer.tensor("weights"), weights, rtol=1e-4, atol=1e-5)
    most = float(weights[1, 18, 1:].max())
    assert f"{most:.3f}" in explorer.page.locator("canvas[data-grid=overlay]").get_attribute("aria-label")
    explorer.page.get_by_role("button", name="Head 3 over the picture").click()
    assert explorer.settle().js(overlay) != before
    explorer.page.get_by_label("Roll out from the picture to this layer").check()
    rolled = mh.heads.rollout(vit.look(items)[:2])[0, 18]
    explorer.settle()
    assert f"{float(rolled[1:].max()):.3f}" in explorer.page.locator("canvas[data-grid=overlay]").get_attribute(
        "aria-label"
    )
    assert vit.classify(image)[0][0] == explorer.page.locator(".predictions .token-name").first.inner_text()


# Masks ----------------------------------------------------------------------------------------------------------------


def test_masks_flow_through_the_whole_model(explorer: Explorer, lm: Any) -> None:
    explorer.open("model=lm&layer=1&step=3")
    items = tokens_of(lm)
    N = items.shape[1]
    explorer.page.locator("#mask-button").click()
    masks = {
        "None": None, "Causal": mh.Causal(), "Window": mh.Window(1, 1), "Prefix": mh.Prefix(N // 2),
        "Padding": mh.Padding([N - 1]), "Documents": mh.Documents([N // 2, N - N // 2]) & mh.Causal(),
    }  # fmt: skip
    for name, mask in masks.items():
        explorer.page.locator("#mask-editor").get_by_role("button", name=name, exact=True).click()
        explorer.settle()
        trace = under(lm, mask, items, 1)
        torch.testing.assert_close(explorer.tensor("weights"), trace["weights"], rtol=1e-4, atol=1e-5, msg=name)
        torch.testing.assert_close(explorer.tensor("output"), trace["output"], rtol=1e-4, atol=1e-5, msg=name)
    explorer.page.locator("#mask-editor").get_by_role("button", name="Window", exact=True).click()
    explorer.page.get_by_label("items before").fill("3")
    explorer.settle()
    trace = under(lm, mh.Window(3, 1), items, 1)
    torch.testing.assert_close(explorer.tensor("weights"), trace["weights"], rtol=1e-4, atol=1e-5)


def test_a_mask_is_drawn_by_hand(explorer: Explorer, lm: Any) -> None:
    explorer.open("model=lm&step=3")
    items = tokens_of(lm)
    N = items.shape[1]
    explorer.page.locator("#mask-button").click()
    explorer.settle()
    cells = torch.ones(N, N, dtype=torch.bool).tril()
    centre = "([q, k]) => multihead.mask.centre(q, k)"
    start, end = (explorer.js(centre, at) for at in ([9, 0], [9, 3]))
    explorer.page.mouse.move(start["x"], start["y"])
    explorer.page.mouse.down()
    explorer.page.mouse.move(end["x"], end["y"])  # in one leap: the cells between are drawn too
    explorer.page.mouse.up()
    cells[9, :4] = False
    explorer.settle()
    assert explorer.state["mask"].startswith("drawn:")
    trace = under(lm, mh.Allowed(cells), items, 0)
    torch.testing.assert_close(explorer.tensor("weights"), trace["weights"], rtol=1e-4, atol=1e-5)
    explorer.page.locator("canvas[data-grid=mask]").focus()
    explorer.press("ArrowLeft", "ArrowUp", "Space")
    cells[8, 2] = False
    trace = under(lm, mh.Allowed(cells), items, 0)
    torch.testing.assert_close(explorer.tensor("weights"), trace["weights"], rtol=1e-4, atol=1e-5)
    assert "does not see" in explorer.page.inner_text("#live")


def test_a_language_model_without_its_mask_is_called_out(explorer: Explorer, lm: Any) -> None:
    explorer.open("model=lm&step=3&layer=1")
    assert explorer.page.locator(".cheat").is_hidden()
    explorer.page.locator("#mask-button").click()
    explorer.page.locator("#mask-editor").get_by_role("button", name="None", exact=True).click()
    explorer.settle()
    assert "Where is your mask?" in explorer.page.inner_text(".cheat")
    trace = under(lm, None, tokens_of(lm), 1)
    mean = trace["weights"].mean(0).triu(1)
    row = int(mean.sum(1).argmax())
    said = explorer.page.locator(".cheat li").first.inner_text()
    labels = explorer.page.locator(".token").all_inner_texts()
    assert said.startswith(f"{labels[row]} leans on {labels[int(mean[row].argmax())]}")
    assert close_to(number(said.split(": ")[1].split(" of its")[0]), float(mean[row].max()))
    explorer.page.get_by_role("button", name="Give it its mask back").click()
    explorer.settle()
    assert explorer.page.locator(".cheat").is_hidden()


# Heads ----------------------------------------------------------------------------------------------------------------


def test_the_wall_and_its_finder(explorer: Explorer, lm: Any) -> None:
    text = "the whale saw the ship and the whale saw the"
    explorer.open("model=lm&text=" + text.replace(" ", "+"))
    items = tokens_of(lm, text)
    lenses = lm.look(items)
    assert explorer.page.locator(".wall li").count() == 16
    explorer.page.get_by_role("combobox", name="Sort by").select_option("induction")
    explorer.settle()
    scores = torch.cat([mh.heads.induction(lens, items[0])[0] for lens in lenses])
    order = scores.argsort(descending=True, stable=True).tolist()
    shown = [li.get_attribute("data-head") for li in explorer.page.locator(".wall li").all()]
    assert shown[:5] == [f"{n // 8}.{n % 8}" for n in order[:5]]
    figures = [number(t) for t in explorer.page.locator(".wall .figure").all_inner_texts()]
    assert all(close_to(a, float(scores[n])) for a, n in zip(figures, order))
    for name, metric in {
        "previous": mh.heads.previous_token,
        "first": mh.heads.first_token,
        "distance": mh.heads.distance,
    }.items():
        explorer.page.get_by_role("combobox", name="Sort by").select_option(name)
        explorer.settle()
        scores = torch.cat([metric(lens)[0] for lens in lenses])
        assert close_to(number(explorer.page.locator(".wall .figure").first.inner_text()), float(scores.max())), name
    slider = explorer.page.get_by_role("slider", name="At least this much of the largest")
    slider.fill("60")
    explorer.settle()
    assert explorer.page.locator(".wall li").count() == int((scores >= 0.6 * scores.max()).sum())


def test_two_heads_side_by_side(explorer: Explorer, lm: Any) -> None:
    explorer.open("model=lm")
    explorer.page.get_by_role("button", name="Pin layer 0, head 0").click()
    explorer.page.get_by_role("button", name="Pin layer 1, head 3").click()
    explorer.page.wait_for_selector(".pins figure >> nth=1")
    explorer.settle()
    notes = explorer.page.locator(".pins .note").all_inner_texts()
    assert notes == ["layer 0, head 0", "layer 1, head 3"]
    canvas = explorer.page.locator(".pins canvas[data-grid=pin-1]")
    canvas.focus()
    explorer.press("ArrowDown", "ArrowDown", "ArrowRight")
    weights = lm.trace(tokens_of(lm), layer=1)["weights"]
    assert close_to(
        number(explorer.page.locator(".pins .said").nth(1).inner_text().split(" = ")[1]), float(weights[3, 2, 1])
    )
    assert explorer.state["pins"] == "0.0,1.3"


@pytest.mark.parametrize("how", ["zero", "mean"])
def test_a_head_switched_off_and_what_the_prediction_loses(explorer: Explorer, lm: Any, how: str) -> None:
    explorer.open("model=lm&layer=1&step=4")
    items = tokens_of(lm)
    with torch.no_grad():
        before = lm(items)[0, -1].softmax(-1)
    if how == "mean":
        explorer.page.get_by_role("button", name="its mean").click()
    explorer.page.get_by_role("button", name="Switch off layer 0, head 0").click()
    explorer.page.get_by_role("button", name="Switch off layer 1, head 2").click()
    explorer.settle()
    with torch.no_grad(), mh.ablate(lm.layers[0].attention, [0], how), mh.ablate(lm.layers[1].attention, [2], how):
        after = lm(items)[0, -1]
        trace = lm.trace(items, layer=1)
    torch.testing.assert_close(explorer.tensor("output"), trace["output"], rtol=1e-3, atol=1e-4)
    logits = torch.tensor(explorer.js("() => Array.from(multihead.app.session.after.get().logits)"))
    torch.testing.assert_close(logits, after, rtol=1e-3, atol=1e-3)
    explorer.page.get_by_label("Top k").fill("5")
    explorer.settle()
    best = int(before.argmax())
    p = after.softmax(-1).topk(5)
    share = dict(zip(p.indices.tolist(), (p.values / p.values.sum()).tolist()))
    said = explorer.page.locator(f".predictions li[data-id='{best}'] .figure").inner_text()
    assert abs(number(said.split(" → ")[1]) / 100 - share.get(best, 0.0)) < 1.5e-3
    explorer.page.get_by_role("button", name="All heads on").click()
    assert explorer.settle().state["off"] == ""


# Prediction -----------------------------------------------------------------------------------------------------------


def test_temperature_top_k_and_taking_a_token(explorer: Explorer, lm: Any) -> None:
    explorer.open("model=lm&layer=1&head=3")
    items = tokens_of(lm)
    with torch.no_grad():
        logits = lm(items)[0, -1]
    explorer.page.get_by_role("slider", name="Temperature").fill("0.5")
    explorer.page.get_by_label("Top k").fill("4")
    explorer.settle()
    top = logits.topk(4)
    shown = [number(t) / 100 for t in explorer.page.locator(".predictions .figure").all_inner_texts()]
    assert len(shown) == 4
    assert all(abs(a - b) < 1e-3 for a, b in zip(shown, (top.values / 0.5).softmax(-1).tolist()))
    cached = explorer.page.inner_text("#cache-count")
    assert f" {items.shape[1] - 1} tokens" in cached
    for n in range(2):
        with torch.no_grad():
            nxt = int(lm(items)[0, -1].argmax())
        items = torch.cat([items, torch.tensor([[nxt]])], dim=1)
        explorer.page.locator(f".predictions li[data-id='{nxt}'] button").click()
        explorer.settle()
        assert explorer.page.locator(".token").count() == items.shape[1]
        assert f" {items.shape[1] - 1} tokens" in explorer.page.inner_text("#cache-count"), "the cache has grown"
        trace = lm.trace(items, layer=1)
        torch.testing.assert_close(explorer.tensor("weights"), trace["weights"], rtol=1e-4, atol=1e-5)
        alone = explorer.js("() => Array.from(multihead.app.session.decoded.get().tensors.weights.data)")
        torch.testing.assert_close(torch.tensor(alone).view(8, -1), trace["weights"][:, -1], rtol=1e-4, atol=1e-5)
        most = number(explorer.page.inner_text("#cache-says").split(" is ")[1].rstrip("."))
        assert most < 1e-4, "one token at a time gives another row"
        assert n == 0 or explorer.page.input_value("#text").startswith(TEXT)
    explorer.page.get_by_role("button", name="Take it back").click()
    explorer.settle()
    assert explorer.page.locator(".token").count() == items.shape[1] - 1
    explorer.page.go_back()
    explorer.settle()
    assert explorer.page.locator(".token").count() == items.shape[1]


def test_classes_of_a_picture(explorer: Explorer, vit: Any) -> None:
    explorer.open("model=vit&sample=ankle+boot")
    wanted = vit.classify(mh.models.samples()["ankle boot"])
    names = explorer.page.locator(".predictions .token-name").all_inner_texts()
    figures = [number(t) / 100 for t in explorer.page.locator(".predictions .figure").all_inner_texts()]
    assert names[0] == wanted[0][0]
    assert abs(figures[0] - wanted[0][1]) < 2e-3
    explorer.page.get_by_role("button", name="Switch off layer 3, head 1").click()
    explorer.settle()
    assert "→" in explorer.page.locator(".predictions .figure").first.inner_text()


# Share ----------------------------------------------------------------------------------------------------------------


def test_the_whole_state_is_in_the_address(explorer: Explorer, chromium: Any, server: Any) -> None:
    fragment = "model=lm&layer=1&text=so+it+is&step=4&head=2&at=heads.2.1.5&mask=window%3A2%2C0&off=0.1&pins=1.0&temperature=0.7&theme=dark"
    explorer.open(fragment)
    link = explorer.page.url
    other = Explorer(chromium, server)
    other.page.goto(link)
    other.page.wait_for_selector(".strip button[aria-current]")
    other.settle()
    assert other.state == explorer.state
    assert other.title == explorer.title
    assert other.value == explorer.value
    torch.testing.assert_close(other.tensor("output"), explorer.tensor("output"))
    other.close()


def test_link_svg_png_csv_and_the_single_file(chromium: Any, server: Any, tmp_path: Path) -> None:
    explorer = Explorer(chromium, server, permissions=["clipboard-read", "clipboard-write"], accept_downloads=True)
    explorer.open("model=lm&step=3&head=1")
    explorer.page.get_by_role("button", name="Share").click()
    explorer.page.get_by_role("button", name="Copy the link").click()
    explorer.page.wait_for_function("() => document.querySelector('#share-says').textContent.includes('token')")
    assert explorer.js("() => navigator.clipboard.readText()") == explorer.page.url
    for name, start in (
        ("Stage as SVG", b"<svg"),
        ("Stage as PNG", b"\x89PNG"),
        ("Save as one file", b"<!doctype html>"),
    ):
        with explorer.page.expect_download() as started:
            explorer.page.get_by_role("button", name=name).click()
        path = tmp_path / started.value.suggested_filename
        started.value.save_as(path)
        assert path.read_bytes().lower().startswith(start.lower()), name
    assert b"weights" in (tmp_path / "multihead.svg").read_bytes()
    explorer.page.get_by_role("button", name="Show weights as a table").click()
    with explorer.page.expect_download() as started:
        explorer.page.get_by_role("button", name="Save as CSV").click()
    started.value.save_as(tmp_path / "weights.csv")
    rows = (tmp_path / "weights.csv").read_text().splitlines()
    last = [float(v) for v in rows[-1].split(",")[-12:]]
    torch.testing.assert_close(torch.tensor(last), explorer.tensor("weights")[1, -1], rtol=1e-5, atol=1e-7)
    explorer.press("Escape")
    assert explorer.page.locator("dialog[open]").count() == 0
    explorer.close()
    saved_page(chromium, tmp_path / "multihead.html")


def saved_page(chromium: Any, path: Path) -> None:
    """The single file from disk, with networking off."""
    assert path.stat().st_size < 3_000_000, f"{path.stat().st_size:,} bytes"

    class Disk:
        url = path.as_uri()

    explorer = Explorer(chromium, Disk(), offline=True)
    explorer.page.goto(f"{Disk.url}#model=lm&step=3&head=1")
    explorer.page.wait_for_selector(".strip button[aria-current]", timeout=20_000)
    explorer.settle()
    lm = mh.models.load("lm")
    items = tokens_of(lm)
    torch.testing.assert_close(explorer.tensor("weights"), lm.trace(items, layer=0)["weights"], rtol=1e-3, atol=1e-4)
    explorer.page.locator("#mask-button").click()
    explorer.page.locator("#mask-editor").get_by_role("button", name="Window", exact=True).click()
    explorer.settle()
    trace = under(lm, mh.Window(1, 1), items, 0)
    torch.testing.assert_close(explorer.tensor("output"), trace["output"], rtol=1e-3, atol=1e-3)
    assert "run multihead explore" in explorer.page.inner_text("#predict-says")
    explorer.page.get_by_role("button", name="The model's own").click()
    explorer.page.get_by_role("combobox", name="Layer").select_option("1")
    explorer.settle()
    torch.testing.assert_close(explorer.tensor("weights"), lm.trace(items, layer=1)["weights"], rtol=1e-3, atol=1e-4)
    explorer.page.locator("#text").fill("something else")
    explorer.page.wait_for_selector(".trouble:not([hidden])")
    assert "multihead explore" in explorer.page.inner_text(".trouble")
    assert json.loads(explorer.page.locator("#multihead-start").inner_text() or '{"mode":"file"}')["mode"] == "file"
    explorer.close()

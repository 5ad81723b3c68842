"""The map in a browser: from the whole pattern to single weights, by every gesture, with the numbers of `mh.look`."""

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

import multihead as mh
from multihead.explorer import serve
from multihead.explorer.session import Session
from multihead.explorer.subjects import of_model, of_package
from tests.explorer.browser import Explorer, chromium, close_to, explorer, needs_browser, number  # noqa: F401
from tests.explorer.test_page_look import CUT

pytestmark = needs_browser
N, HUGE = 3000, 100_000
WORDS = ["".join(chr(97 + (n * p) % 26) for p in (1, 3, 7)) for n in range(N)]
EXACT = "() => document.querySelector('.map').dataset.exact === 'true' && multihead.map.stats().running === 0"


def made(count: int, width: int, heads: int) -> tuple[mh.MultiHeadAttention, torch.Tensor]:
    torch.manual_seed(8)
    layer = mh.MultiHeadAttention(width, heads=heads).eval()
    torch.nn.init.normal_(layer.q_proj.weight, std=0.3)
    torch.nn.init.normal_(layer.k_proj.weight, std=0.3)
    x = torch.randn(count, width)
    with torch.no_grad():  # a key that every query of head 0 rests on
        layer.q_proj.bias[0] = 5.0
        x[0] = 8 * layer.w_k[:, 0, 0] / layer.w_k[:, 0, 0].norm()
    return layer, x


@pytest.fixture(scope="module")
def layer_and_x() -> tuple[mh.MultiHeadAttention, torch.Tensor]:
    return made(N, 32, 2)


@pytest.fixture(scope="module")
def weights(layer_and_x: Any) -> torch.Tensor:
    layer, x = layer_and_x
    with torch.no_grad():
        return layer.look(x, mask=mh.Causal()).weights()[0]


@pytest.fixture(scope="module")
def session(layer_and_x: Any) -> Session:
    layer, x = layer_and_x
    long, _ = of_model(layer, x, mask=mh.Causal(), labels=WORDS)
    layer, x = made(HUGE, 16, 1)
    huge, _ = of_model(layer, x, mask=mh.Causal())
    huge.id, huge.name = "huge", "Huge"
    return Session([long, huge, *of_package()])


@pytest.fixture(scope="module")
def server(session: Session) -> Iterator[Any]:
    session.prepare()
    with serve.start(session, port=0, browser=False) as running:
        yield running


class OnMap:
    """The map of an explorer."""

    def __init__(self, explorer: Explorer) -> None:
        self.explorer, self.page = explorer, explorer.page

    def open(self, fragment: str, exact: bool = True) -> "OnMap":
        if self.page.url.startswith("http"):
            self.page.goto("about:blank")
        self.page.goto(f"{self.explorer.server.url}#{fragment}")
        self.page.wait_for_selector(".map:not([hidden])", timeout=60_000)
        self.page.wait_for_function("() => multihead.map.stats().kept > 0")
        return self.ready() if exact else self

    def ready(self) -> "OnMap":
        self.explorer.settle()
        self.page.wait_for_function(EXACT, timeout=60_000)
        self.explorer.settle()
        return self

    def at(self, q: int, k: int) -> tuple[float, float]:
        self.page.locator("canvas[data-grid=map]").scroll_into_view_if_needed()
        where = self.explorer.js("([q, k]) => multihead.map.centre(q, k)", [q, k])
        return where["x"], where["y"]

    def hover(self, q: int, k: int) -> str:
        self.page.mouse.move(*self.at(q, k))
        self.explorer.settle()
        return self.page.inner_text("#map-said")

    @property
    def view(self) -> list[float]:
        return [float(part) for part in self.explorer.state["map"].split(",") if part]

    @property
    def stats(self) -> dict[str, Any]:
        return self.explorer.js("() => multihead.map.stats()")


@pytest.fixture
def on_map(explorer: Explorer) -> OnMap:
    return OnMap(explorer)


def test_from_the_whole_pattern_to_a_single_weight(on_map: OnMap, weights: torch.Tensor) -> None:
    on_map.open("model=given&head=1")
    said = on_map.hover(2700, 1500)
    found = re.fullmatch(r"queries ([\d,]+)–([\d,]+), keys ([\d,]+)–([\d,]+): the largest weight is (.*)", said)
    assert found is not None, said
    a, b, c, d = (int(part.replace(",", "")) for part in found.groups()[:4])
    assert a <= 2700 <= b
    assert c <= 1500 <= d
    assert b - a + 1 == d - c + 1 >= 4
    assert close_to(number(found[5]), float(weights[1, a : b + 1, c : d + 1].max()))
    on_map.page.get_by_role("button", name="its mean").click()
    on_map.ready()
    said = on_map.hover(2700, 1500)
    mean = number(said.rpartition(" ")[2])
    assert mean == pytest.approx(float(weights[1, a : b + 1, c : d + 1].mean()), rel=2e-2)
    on_map.page.get_by_role("button", name="its largest").click()
    for _ in range(12):  # the wheel, over one weight, which stays where it is
        on_map.page.mouse.move(*on_map.at(2700, 1500))
        on_map.page.mouse.wheel(0, -400)
        on_map.explorer.settle()
    on_map.ready()
    assert on_map.view[2] == 48
    said = on_map.hover(2700, 1500)
    assert said.startswith(f"weights[head 1, {WORDS[2700]} (2,700) → {WORDS[1500]} (1,500)] = ")
    assert close_to(number(said.rpartition("= ")[2]), float(weights[1, 2700, 1500]))
    for q, k in ((2701, 1499), (2698, 1502)):
        assert close_to(number(on_map.hover(q, k).rpartition("= ")[2]), float(weights[1, q, k]))
    tile = on_map.explorer.js("() => Array.from({length: 40}, (_, n) => multihead.map.known(2700, 1490 + n).value)")
    torch.testing.assert_close(torch.tensor(tile), weights[1, 2700, 1490:1530], rtol=1e-5, atol=1e-9)


def test_drag_pinch_keys_and_buttons(on_map: OnMap) -> None:
    on_map.open("model=given&map=1000,1000,10")
    page = on_map.page
    x, y = on_map.at(1020, 1020)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 100, y - 50, steps=4)
    page.mouse.up()
    on_map.explorer.settle()
    assert on_map.view == pytest.approx([1005, 1010, 10])
    assert on_map.explorer.state["at"] == ""  # a drag is no click
    touch = on_map.explorer.context.new_cdp_session(page)
    x, y = on_map.at(1030, 1030)
    for kind, far in (("touchStart", 40), ("touchMove", 60), ("touchMove", 80)):
        points = [{"x": x - far, "y": y, "id": 1}, {"x": x + far, "y": y, "id": 2}]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    on_map.explorer.settle()
    assert on_map.view[2] == pytest.approx(20, rel=0.05)
    assert on_map.at(1030, 1030) == pytest.approx((x, y), abs=3)
    page.get_by_role("button", name="Zoom out").click()
    on_map.explorer.settle()
    assert on_map.view[2] == pytest.approx(10, rel=0.05)
    page.get_by_role("button", name="The whole map").click()
    on_map.explorer.settle()
    assert on_map.view == []
    page.go_back()
    on_map.explorer.settle()
    assert on_map.view[2] == pytest.approx(10, rel=0.05)
    page.keyboard.press("Tab")
    page.locator("canvas[data-grid=map]").focus()
    page.keyboard.press("0")
    for key in "+" * 12:
        page.keyboard.press(key)
    on_map.ready()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    on_map.explorer.settle()
    spoken = page.inner_text("#live")
    assert re.match(r"weights\[head 0, \w{3} \([\d,]+\) → \w{3} \([\d,]+\)\] = ", spoken), spoken
    page.keyboard.press("Enter")
    on_map.explorer.settle()
    assert on_map.explorer.state["at"].startswith("weights.0.")
    before = on_map.view
    for _ in range(40):
        page.keyboard.press("PageDown")
    on_map.explorer.settle()
    assert on_map.view[0] > before[0]
    page.keyboard.press("Escape")
    assert on_map.explorer.settle().state["at"] == ""


def test_tiles_are_asked_for_when_seen_and_given_up_when_not(on_map: OnMap) -> None:
    page = on_map.page
    asked: list[dict[str, Any]] = []
    page.on("request", lambda r: asked.append(r.post_data_json) if r.url.endswith("/api/tile") else None)
    on_map.open("model=given")
    wanted = set(on_map.stats["wanted"])
    assert {f"{t['level']}.{t['row']}.{t['column']}" for t in asked} == wanted
    assert len(wanted) <= 26  # a screen of 1280 × 900, and one for all of it
    asked.clear()
    waiting: list[Any] = []
    page.route("**/api/tile", lambda route: waiting.append(route))  # Python is slow
    on_map.explorer.js("() => multihead.app.store.set({ map: '200,200,20' })")
    page.wait_for_function("() => multihead.map.stats().running > 0")
    assert on_map.explorer.js("() => multihead.map.known(210, 205).level") > 0  # a coarser tile stands in
    on_map.explorer.js("() => multihead.app.store.set({ map: '2500,2400,20' })")
    page.wait_for_function("() => multihead.map.stats().cancelled > 0")
    page.unroute("**/api/tile")
    for route in waiting:
        with suppress(Exception):  # it was given up
            route.continue_()
    on_map.ready()
    assert on_map.stats["cancelled"] >= 1
    assert on_map.explorer.js("() => multihead.map.known(2510, 2405).level") == 0
    assert {(t["level"], t["row"], t["column"]) for t in asked} <= {(0, r, c) for r in (0, 9) for c in (0, 9)}


def test_the_first_key_is_left_out_of_the_colours(on_map: OnMap, weights: torch.Tensor) -> None:
    on_map.open("model=given&map=1500,0,20&contrast=0")
    high = on_map.page.locator(".map .legend span").last
    rows, columns = slice(1280, 1792), slice(0, 256)  # the tiles on the screen
    shown = number(high.inner_text())
    assert close_to(shown, float(weights[0, rows, columns].max()))
    on_map.page.get_by_label("leave the first key out of the colours").check()
    on_map.explorer.settle()
    besides = float(weights[0, rows, 1:256].max())
    assert close_to(number(high.inner_text().removeprefix("≥ ")), besides)
    assert besides < 0.7 * shown
    assert on_map.explorer.state["sink"] is False
    on_map.page.get_by_label("Contrast").fill("1")
    on_map.explorer.settle()
    assert high.inner_text().startswith("≥ ")  # there are weights beyond the end, and the legend says so
    assert number(high.inner_text().removeprefix("≥ ")) == pytest.approx(besides / 10, rel=2e-2)


def test_the_map_finds_a_contrast_by_itself(on_map: OnMap, weights: torch.Tensor) -> None:
    on_map.open("model=given&map=1500,0,20")
    end = number(on_map.page.locator(".map .legend span").last.inner_text().removeprefix("≥ "))
    seen = weights[0, 1280:1792, 1:256]
    assert 0.01 * float(seen.max()) < end < float(weights[0, 1280:1792, :256].max())
    assert float((seen > end).float().mean()) <= 1 / 50


def test_links_lead_there_both_ways(on_map: OnMap, weights: torch.Tensor) -> None:
    on_map.open("model=given&head=1&map=2000,500,20")
    page = on_map.page
    page.mouse.click(*on_map.at(2010, 510))
    page.wait_for_function("() => document.querySelectorAll('.links button').length === 10")
    value, key = weights[1, 2010].topk(10)
    rows = page.locator(".links button")
    assert [rows.nth(n).get_attribute("data-link") for n in range(10)] == [f"2010.{k}" for k in key.tolist()]
    assert all(close_to(number(rows.nth(n).locator(".figure").last.inner_text()), float(value[n])) for n in range(10))
    rows.nth(3).click()
    on_map.ready()
    target = int(key[3])
    assert on_map.explorer.state["at"] == f"weights.1.2010.{target}"
    said = page.inner_text("#map-said")
    assert close_to(number(said.rpartition("= ")[2]), float(weights[1, 2010, target]))
    page.get_by_role("button", name="Who attends to it").click()
    page.wait_for_function(
        "t => document.querySelector('.links button')?.dataset.link.endsWith('.' + t)", arg=str(target)
    )
    page.get_by_role("combobox", name="How many links").select_option("5")
    page.wait_for_function(
        "() => document.querySelectorAll('.links button').length === 5 && !document.querySelector('#links-says').textContent"
    )
    query = weights[1, :, target].topk(5).indices.tolist()
    assert [rows.nth(n).get_attribute("data-link") for n in range(5)] == [f"{q}.{target}" for q in query]


def test_words_are_found_and_places_gone_to(on_map: OnMap) -> None:
    on_map.open("model=given")
    page = on_map.page
    word = WORDS[40]
    places = [n for n, other in enumerate(WORDS) if other == word]
    page.get_by_role("textbox", name="Text to look for").fill(word.upper())
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('#find-says').textContent.includes('of')")
    assert page.inner_text("#find-says") == f"1 of {len(places)}: token {places[0]}"
    assert on_map.explorer.state["at"] == f"weights.0.{places[0]}.{places[0]}"
    page.get_by_role("button", name="Next").click()
    assert page.inner_text("#find-says").endswith(f"token {places[1]}")
    page.get_by_role("button", name="Previous").click()
    page.get_by_role("button", name="Previous").click()
    assert page.inner_text("#find-says").endswith(f"token {places[-1]:,}")
    on_map.ready()
    assert page.inner_text("#map-said").startswith(f"weights[head 0, {word} ({places[-1]:,})")
    page.get_by_role("textbox", name="Text to look for").fill("<b>nowhere")
    page.get_by_role("button", name="Find").click()
    page.wait_for_function("() => document.querySelector('#find-says').textContent.includes('not in the text')")
    page.get_by_role("spinbutton", name="Query to go to").fill("2999")
    page.get_by_role("spinbutton", name="Key to go to").fill("7")
    page.get_by_role("button", name="Go", exact=True).click()
    assert on_map.ready().explorer.state["at"] == "weights.0.2999.7"


def test_a_hundred_thousand_tokens_panned_and_zoomed(on_map: OnMap, session: Session) -> None:
    """Memory of page and server, counted: tiles of at most 48 MB there, q, k and lse here."""
    on_map.open("model=huge", exact=False)
    page = on_map.page
    page.wait_for_function("() => multihead.map.known(99_000, 50_000) !== null")  # a sample, before all is exact
    lens = session.lenses
    most = 0
    for n in range(14):
        q, k, scale = 7000 * n % HUGE, 6900 * n % HUGE, (0.05, 1, 24)[n % 3]
        on_map.explorer.js("m => multihead.app.store.set({ map: m })", f"{q},{k},{scale}")
        page.wait_for_function("([q, k]) => multihead.map.known(q + 5, k + 3) !== null", arg=[q, k], timeout=60_000)
        most = max(most, on_map.stats["bytes"])
        assert len(on_map.stats["wanted"]) <= 26
    assert most <= 48 * 2**20
    assert lens.nbytes <= HUGE * (2 * 16 * 4 + 8) + N * (2 * 32 * 4 + 2 * 8)
    on_map.explorer.js("() => multihead.app.store.set({ map: '99970,99960,24' })")
    on_map.ready()
    layer, x = made(HUGE, 16, 1)
    with torch.no_grad():
        row = layer.look(x, mask=mh.Causal()).rows(99_980)[0, 0, 0]
    shown = on_map.explorer.js("() => Array.from({length: 10}, (_, n) => multihead.map.known(99980, 99965 + n).value)")
    torch.testing.assert_close(torch.tensor(shown), row[99_965:99_975], rtol=1e-4, atol=1e-9)
    assert page.get_by_role("textbox", name="Text to look for").is_hidden()  # items without names: no text to look in
    assert on_map.hover(99_980, 99_970).startswith("weights[head 0, 99980 (99,980) → 99970 (99,970)]")
    on_map.explorer.js("() => multihead.app.store.set({ model: 'lm', map: '', view: 'steps' })")
    page.wait_for_selector(".strip button[aria-current]")


def test_a_text_too_long_for_a_trace_becomes_a_map(explorer: Explorer) -> None:
    lm: Any = mh.models.load("lm")
    text = "Call me Ishmael. Some years ago, never mind how long precisely, I went to sea. " * 20
    explorer.open("model=lm")
    assert explorer.page.locator(".map").is_hidden()
    explorer.page.locator("#text").fill(text)
    explorer.page.wait_for_selector(".map:not([hidden])")
    on_map = OnMap(explorer).ready()
    assert explorer.page.locator(".strip").is_hidden()
    explorer.page.get_by_role("combobox", name="Layer").select_option("1")
    explorer.page.wait_for_function("() => multihead.app.session.long.get()?.where.layer === 1")
    explorer.js("() => multihead.app.store.set({ map: '300,290,24', head: 2 })")
    on_map.ready()
    ids = torch.tensor([lm.tokenizer.begin(text)])
    with torch.no_grad():
        row = lm.look(ids)[1].rows(310, heads=2)[0, 0, 0]
    shown = explorer.js("() => Array.from({length: 12}, (_, n) => multihead.map.known(310, 299 + n).value)")
    torch.testing.assert_close(torch.tensor(shown), row[299:311], rtol=1e-4, atol=1e-7)
    explorer.page.locator("#text").fill("Call me Ishmael")
    explorer.page.wait_for_selector(".strip", state="visible")
    explorer.page.wait_for_selector(".map", state="hidden")


def test_a_short_text_has_a_map_too_and_numbers_are_saved(explorer: Explorer) -> None:
    import numpy as np

    lm: Any = mh.models.load("lm")
    wanted = lm.trace(torch.tensor([lm.tokenizer.begin("I love pepperoni pizza")]), layer=0)["weights"]
    explorer.open("model=lm&head=3")
    explorer.page.get_by_role("button", name="Map of the weights").click()
    on_map = OnMap(explorer).ready()
    said = on_map.hover(8, 4)
    assert close_to(number(said.rpartition("= ")[2]), float(wanted[3, 8, 4]))
    explorer.page.get_by_role("button", name="Show the part on the screen as a table").click()
    with explorer.page.expect_download() as saved:
        explorer.page.get_by_role("button", name="Save as npz").click()
    assert saved.value.suggested_filename == "weights_12x12.npz"
    with np.load(saved.value.path()) as found:
        torch.testing.assert_close(torch.from_numpy(found["weights"]), wanted[3], rtol=1e-5, atol=1e-6)
    explorer.press("Escape")
    explorer.page.get_by_role("button", name="The seven steps").click()
    assert explorer.settle().page.locator(".strip").is_visible()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1440, 2560])
def test_nothing_is_cut_off_and_axe_is_content(chromium: Any, server: Any, width: int, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    explorer = Explorer(chromium, server, viewport={"width": width, "height": 900}, color_scheme=theme)
    on_map = OnMap(explorer).open("model=given&map=1500,1400,24&at=weights.0.1510.1405")
    explorer.page.wait_for_function("() => document.querySelectorAll('.links button').length > 0")
    assert explorer.js(CUT) == []
    assert explorer.js("() => document.querySelector('.map-host canvas').getBoundingClientRect().right <= innerWidth")
    if width < 2560:
        found = axe.run(explorer.page, options={"resultTypes": ["violations"]}).response["violations"]
        assert [(v["id"], [n["html"][:160] for n in v["nodes"][:3]]) for v in found] == []
    assert on_map.stats["kept"] > 0
    explorer.close()

"""A server and a headless Chromium for the tests of the page, and what they all check: silence, and nothing leaves."""

import base64
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from multihead.explorer import serve
from multihead.explorer.session import Session
from multihead.explorer.subjects import of_package

# The same engine without a window opens a page in half the time.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: the page is not tested in a browser")


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    session = Session(of_package())
    session.prepare()
    with serve.start(session, browser=False) as running:
        yield running


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: the page is not tested in a browser")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


# A tensor of the page on its way here, as bytes: as a list of numbers a large one would take a minute.
PACKED = """const packed = t => {
  const bytes = new Uint8Array(Float32Array.from(t.data).buffer);
  let text = '';
  for (let at = 0; at < bytes.length; at += 32768) text += String.fromCharCode(...bytes.subarray(at, at + 32768));
  return [t.shape, btoa(text)]; };"""


def unpacked(found: tuple[list[int], str]) -> Any:
    """A tensor that was packed in the page."""
    import torch

    return torch.frombuffer(bytearray(base64.b64decode(found[1])), dtype=torch.float32).view(found[0])


class Explorer:
    """The page as a person meets it. Every message of its console and every request is kept."""

    def __init__(self, chromium: Any, server: Any, **context: Any) -> None:
        settings = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce", **context}
        self.context = chromium.new_context(**settings)
        self.page = self.context.new_page()
        self.server, self.messages, self.requests = server, [], []
        self.page.on("console", lambda m: self.messages.append(f"{m.type}: {m.text}"))
        self.page.on("pageerror", lambda e: self.messages.append(f"error: {e}"))
        self.page.on("request", lambda r: self.requests.append(r.url))

    def open(self, fragment: str = "") -> "Explorer":
        address = f"{self.server.url}#{fragment}"
        if self.page.url.split("#")[0] == address.split("#")[0]:
            self.page.goto("about:blank")
        self.page.goto(address)
        self.page.wait_for_selector(".strip button[aria-current]", state="attached", timeout=30_000)
        return self.settle()

    def settle(self) -> "Explorer":
        """Until nothing is asked any more, and what came is drawn."""
        frames = (
            "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 20))))"
        )
        for _ in range(2):
            self.page.wait_for_selector("#app:not([aria-busy=true])")
            self.page.evaluate(frames)
        return self

    def typed(self, text: str) -> "Explorer":
        """Until what was typed is what the page shows: it waits for a pause in the typing."""
        self.page.wait_for_function("t => multihead.app.store.get().text === t", arg=text)
        return self.settle()

    def frames(self, count: int) -> "Explorer":
        """So many frames later."""
        self.js(
            "async n => { for (let i = 0; i < n; i++) await new Promise(done => requestAnimationFrame(done)); }", count
        )
        return self

    def js(self, script: str, arg: Any = None) -> Any:
        return self.page.evaluate(script, arg)

    def tensor(self, name: str) -> Any:
        """A tensor of the scene as the page holds it."""
        found = self.js(f"n => {{ {PACKED} return packed(multihead.app.session.scene.get().tensors[n]); }}", name)
        return unpacked(found)

    def at(self, grid: str, *index: int) -> tuple[float, float]:
        """Where a number is on the screen, scrolled into view."""
        self.page.locator(f".stage canvas[data-grid='{grid}']").scroll_into_view_if_needed()
        where = self.js("([g, i]) => multihead.stage.grid(g).centre(i)", [grid, list(index)])
        if where["y"] < 150 or where["y"] > 880:
            self.js("y => scrollBy(0, y - 500)", where["y"])
            where = self.js("([g, i]) => multihead.stage.grid(g).centre(i)", [grid, list(index)])
        return where["x"], where["y"]

    def hover(self, grid: str, *index: int) -> "Explorer":
        self.page.mouse.move(*self.at(grid, *index))
        return self.settle()

    def click(self, grid: str, *index: int) -> "Explorer":
        self.page.mouse.click(*self.at(grid, *index))
        return self.settle()

    def press(self, *keys: str) -> "Explorer":
        for key in keys:
            self.page.keyboard.press(key)
        return self.settle()

    @property
    def value(self) -> float:
        """The number in the panel."""
        return number(self.page.inner_text("#number-value"))

    @property
    def title(self) -> str:
        return self.page.inner_text("#number-title")

    @property
    def state(self) -> dict[str, Any]:
        return self.js("() => multihead.app.store.get()")

    def lit(self, name: str) -> list[list[int | None]]:
        """What lights up in a tensor."""
        return self.js("n => (multihead.app.lit().get(n) ?? []).map(p => p.index)", name)

    def close(self) -> None:
        self.context.close()
        assert self.messages == [], f"the console is not silent: {self.messages}"
        origin = self.server.url.split("/?")[0]
        left = [url for url in self.requests if not url.startswith((origin, "blob:", "data:", "about:"))]
        assert left == [], "a request left the machine"


def number(text: str) -> float:
    """A number as the page writes it."""
    text = text.strip().lstrip("= ").replace("−", "-").replace("∞", "inf").replace(" %", "")
    match = re.fullmatch(r"(-?[\d.]+)·10⁻([⁰¹²³⁴⁵⁶⁷⁸⁹]+)", text)
    if match:
        return float(match[1]) * 10 ** -int("".join(str("⁰¹²³⁴⁵⁶⁷⁸⁹".index(c)) for c in match[2]))
    return float(text)


def close_to(shown: float, true: float) -> bool:
    """Whether a number is shown as precisely as four figures, or three places, can."""
    return (
        shown == true or abs(shown - true) <= max(6e-4, 5e-3 * abs(true))
        if abs(true) >= 5e-4
        else abs(shown - true) < 6e-4
    )


@pytest.fixture
def explorer(chromium: Any, server: Any) -> Iterator[Explorer]:
    opened = Explorer(chromium, server)
    yield opened
    opened.close()

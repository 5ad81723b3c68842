"""The page in a browser: widths and themes, by keyboard alone, for assistive tools, and in trouble."""

from typing import Any

import pytest
import torch

import multihead as mh
from multihead.explorer import serve
from multihead.explorer.session import Session
from multihead.explorer.subjects import of_package
from tests.explorer.browser import Explorer, chromium, explorer, needs_browser, server  # noqa: F401

pytestmark = needs_browser

CUT = """() => {
  const seen = e => e.getClientRects().length && getComputedStyle(e).visibility !== 'hidden';
  const found = [];
  const wide = document.documentElement.scrollWidth - innerWidth;
  if (wide > 0) found.push('the page is ' + wide + ' px too wide');
  for (const e of document.querySelectorAll('#app *')) {
    if (!seen(e) || e.closest('.unseen, .skip, dialog')) continue;
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    const style = getComputedStyle(e);
    if (own && parseFloat(style.fontSize) < 12) found.push(e.className + ': ' + style.fontSize);
    if (own && e.scrollWidth > e.clientWidth + 1 && style.overflow === 'hidden' && !e.matches('.token')) found.push('cut: ' + e.textContent.slice(0, 40));
    const r = e.getBoundingClientRect();
    if (own && !e.closest('.strip, .tokens') && (r.right > innerWidth + 1 || r.left < -1)) found.push('beyond the edge: ' + e.textContent.slice(0, 40));
  }
  for (const e of document.querySelectorAll('.grid-host canvas')) {
    if (seen(e) && e.getBoundingClientRect().width > e.parentElement.clientWidth + 1) found.push('canvas cut: ' + e.dataset.grid);
  }
  return found; }"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1440, 2560])
def test_nothing_is_cut_off_and_axe_is_content(chromium: Any, server: Any, width: int, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    explorer = Explorer(chromium, server, viewport={"width": width, "height": 900}, color_scheme=theme)
    fragments = [f"model=lm&step={step}" for step in range(1, 8)]
    fragments += [
        "model=vit&step=3&layer=1&at=query.18",
        "model=lm&mask=none&off=0.1&pins=0.0,1.0&layer=1&step=3",
        "model=example&step=1",
    ]
    for n, fragment in enumerate(fragments):
        explorer.open(fragment) if n == 0 else explorer.js("f => { location.hash = f }", fragment)
        explorer.settle()
        if n == len(fragments) - 2:
            explorer.page.locator("#mask-button").click()
            explorer.page.get_by_role("button", name="Share").click()
            explorer.settle()
        assert explorer.js("() => document.documentElement.dataset.theme") == theme
        assert explorer.js(CUT) == [], f"{fragment} at {width}"
        assert explorer.js(
            """() => { const r = document.querySelector('.strip [aria-current]').getBoundingClientRect();
                 return r.left >= 0 && r.right <= innerWidth; }"""
        ), f"the chosen step is out of sight: {fragment} at {width}"
        if width < 2560 and n in (0, 2, 6, 7, 8):  # names and contrast do not change with more room
            found = axe.run(explorer.page, options={"resultTypes": ["violations"]}).response["violations"]
            said = [
                (
                    v["id"],
                    v["help"],
                    [node["html"][:160] + " " + node.get("failureSummary", "")[:200] for node in v["nodes"][:3]],
                )
                for v in found
            ]
            assert said == [], f"{fragment} at {width}, {theme}"
    explorer.close()


def test_a_walk_by_keyboard_alone(explorer: Explorer) -> None:
    explorer.open("model=lm&step=3")
    page = explorer.page

    def tab_to(condition: str) -> None:
        for _ in range(120):
            page.keyboard.press("Tab")
            if explorer.js(f"() => {{ const e = document.activeElement; return {condition}; }}"):
                return
        raise AssertionError(f"Tab never came to {condition}")

    tab_to("e.classList.contains('skip')")
    explorer.press("Enter")
    assert explorer.js("() => document.activeElement.dataset.grid") == "q_heads"
    page.locator("#text").focus()
    page.keyboard.press("End")
    page.keyboard.type(" now")
    explorer.typed("I love pepperoni pizza now")
    tab_to("e.classList.contains('token')")
    assert explorer.settle().lit("weights")
    explorer.press("Enter")
    assert explorer.state["at"].startswith("query.")
    explorer.press("Escape")
    assert explorer.state["at"] == ""
    tab_to("e.closest('.strip') && e.hasAttribute('aria-current')")
    explorer.press("ArrowRight")
    assert explorer.state["step"] == 4
    explorer.press("ArrowLeft")
    tab_to("e.dataset.grid === 'weights'")
    explorer.press("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight")
    assert explorer.title.startswith("weights[head 0")
    spoken = page.inner_text("#live")
    assert spoken.startswith("weights[head 0")
    assert "=" in spoken
    explorer.press("Enter")
    assert explorer.state["at"] == "weights.0.3.1"
    tab_to("e.closest('.terms')")
    explorer.press("Enter")
    assert explorer.state["at"].startswith("masked.0.3.")
    tab_to("e.textContent === 'Off' && e.dataset.do === 'off'")
    explorer.press("Space")
    assert explorer.state["off"] == "0.0"
    page.go_back()
    page.go_back()
    assert explorer.settle().state["at"] == "weights.0.3.1"
    explorer.js("() => document.activeElement.blur()")
    explorer.press("Escape", "ArrowRight")
    assert explorer.state["step"] == 4


def test_every_control_has_a_name_and_canvases_speak(explorer: Explorer) -> None:
    for fragment in ("model=lm&step=3&pins=0.0", "model=vit&step=7"):
        explorer.open(fragment)
        nameless = explorer.js(
            """() => [...document.querySelectorAll('button, select, input, canvas:not([aria-hidden])')]
                 .filter(e => e.getClientRects().length)
                 .filter(e => !(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length))
                 .map(e => e.outerHTML.slice(0, 120))"""
        )
        assert nameless == []
        silent = explorer.js(
            """() => [...document.querySelectorAll('canvas[tabindex]')].filter(e => e.getClientRects().length)
                 .filter(e => e.getAttribute('role') !== 'img' || e.getAttribute('aria-describedby') !== 'live').length"""
        )
        assert silent == 0


def test_a_real_table_stands_behind_each_picture(explorer: Explorer) -> None:
    explorer.open("model=lm&step=3&head=1")
    explorer.page.get_by_role("button", name="Show weights as a table").click()
    table = explorer.page.locator("dialog table")
    assert table.locator("tbody tr").count() == 12
    assert table.locator("tbody tr").nth(5).locator("td").count() == 12
    assert table.locator("thead th").nth(2).inner_text() == explorer.page.locator(".token").nth(2).inner_text()
    explorer.press("Escape")
    assert explorer.page.locator("dialog[open]").count() == 0


def test_errors_in_words_and_on_without_a_reload(explorer: Explorer) -> None:
    explorer.open("model=lm&step=3")
    explorer.js("() => { location.hash = 'model=lm&mask=nonsense' }")
    explorer.page.wait_for_selector(".trouble:not([hidden])")
    assert "expected one of none, causal" in explorer.page.inner_text(".trouble")
    explorer.js("() => { location.hash = 'model=lm&ids=0,999999' }")
    explorer.page.wait_for_function("() => document.querySelector('.trouble').textContent.includes('999999')")
    explorer.messages.clear()  # the browser notes refused requests itself
    explorer.page.get_by_role("combobox", name="Examples").select_option("0")
    explorer.settle()
    assert explorer.page.locator(".trouble").is_hidden()


def test_the_server_goes_and_comes_back(chromium: Any) -> None:
    session = Session(of_package())
    first = serve.start(session, port=0, browser=False, token="a" * 43)
    port = int(first.url.split(":")[2].split("/")[0])
    explorer = Explorer(chromium, first).open("model=lm&step=3")
    first.close()
    explorer.page.locator("#text").fill("still here")
    explorer.page.wait_for_selector(".trouble:not([hidden])")
    assert "Start multihead explore again" in explorer.page.inner_text(".trouble")
    second = serve.start(session, port=port, browser=False, token="a" * 43)
    explorer.page.wait_for_selector(".trouble[hidden]", state="attached", timeout=15_000)
    explorer.settle()
    assert explorer.tensor("weights").shape[1] == explorer.page.locator(".token").count()
    second.close()
    third = serve.start(session, port=port, browser=False, token="b" * 43)
    explorer.page.locator("#text").fill("a new token")
    explorer.page.wait_for_selector(".trouble:not([hidden]) input:not([hidden])", timeout=15_000)
    explorer.page.get_by_label("The address that multihead explore printed").fill(third.url)
    explorer.page.get_by_role("button", name="Go on").click()
    explorer.page.wait_for_selector(".trouble[hidden]", state="attached")
    explorer.settle()
    assert explorer.page.input_value("#text") == "a new token"
    assert explorer.state["text"] == "a new token"
    third.close()
    explorer.messages.clear()  # the browser notes requests that failed itself
    explorer.close()


def test_a_layer_of_ones_own(chromium: Any) -> None:
    torch.manual_seed(0)
    layer, x = mh.MultiHeadAttention(40, heads=4, kv_heads=2, rope=True), torch.randn(6, 40)
    labels = ["<b>one</b>", "two", "three", "four", "five", "\u202esix"]
    running = mh.explore(layer, x, mask=mh.Causal(), labels=labels, browser=False, wait=False, port=0)
    explorer = Explorer(chromium, running).open("step=3&head=3")
    trace = mh.trace(layer, x, mask=mh.Causal())
    for name in trace:
        torch.testing.assert_close(explorer.tensor(name), trace[name].detach(), rtol=1e-5, atol=1e-6, msg=name)
    assert explorer.page.locator(".token b").count() == 0
    explorer.page.locator("#mask-button").click()
    explorer.page.locator("#mask-editor").get_by_role("button", name="None", exact=True).click()
    explorer.settle()
    trace = mh.trace(layer, x)
    torch.testing.assert_close(explorer.tensor("output"), trace["output"].detach(), rtol=1e-4, atol=1e-5)
    assert explorer.page.inner_text("#mask-summary") == "none"
    explorer.close()
    running.close()


def test_on_a_narrow_screen_the_number_stays_in_sight(chromium: Any, server: Any) -> None:
    """The panel is below the stage there, out of sight of what was touched."""
    explorer = Explorer(chromium, server, viewport={"width": 360, "height": 800}).open("model=lm&step=3&head=2")
    brief = explorer.page.locator(".number-brief")
    assert brief.is_hidden()
    chosen = explorer.page.locator(".strip [aria-current]").bounding_box()
    assert chosen is not None
    assert 0 <= chosen["x"] <= 360 - chosen["width"], "the strip does not begin with the step on the stage"
    explorer.click("weights", 2, 7, 4)
    assert explorer.state["at"] == "weights.2.7.4"
    assert explorer.title in brief.inner_text()
    assert explorer.page.inner_text("#number-value") in brief.inner_text()
    brief.click()
    brief.wait_for(state="hidden")
    bounds = explorer.page.locator("#number-title").bounding_box()
    assert bounds is not None
    assert 0 <= bounds["y"] < 800, "the panel did not come into sight"
    explorer.page.set_viewport_size({"width": 1440, "height": 800})
    explorer.js("() => scrollTo(0, document.body.scrollHeight)")
    assert explorer.settle().page.locator(".number-brief").is_hidden()
    for elsewhere in ("view=map", "lesson=width"):  # where there is no panel
        explorer.page.set_viewport_size({"width": 360, "height": 800})
        explorer.open(f"model=lm&step=3&at=weights.2.7.4&{elsewhere}")
        assert brief.is_hidden(), elsewhere
    explorer.close()


IN_SIGHT = """() => {
  const below = document.querySelector('.strip').getBoundingClientRect().bottom;
  const title = document.querySelector('#stage-title').getBoundingClientRect();
  return title.top >= below - 1 && title.bottom < innerHeight; }"""


@pytest.mark.parametrize("width", [360, 1440])
def test_what_was_chosen_from_afar_comes_into_sight(chromium: Any, server: Any, width: int) -> None:
    """The strip stays at the upper edge, and the wall is below the stage."""
    explorer = Explorer(chromium, server, viewport={"width": width, "height": 900}).open("model=lm&step=3")
    down = "() => scrollTo(0, document.body.scrollHeight)"
    explorer.js(down)
    assert not explorer.settle().js(IN_SIGHT)
    explorer.page.locator(".strip button[data-step='5']").click()
    assert explorer.settle().js(IN_SIGHT)
    explorer.js(down)
    explorer.page.get_by_role("button", name="Show layer 1, head 2").click()
    assert explorer.settle().state["head"] == 2
    assert explorer.js(IN_SIGHT)
    explorer.js(down)
    explorer.page.get_by_role("button", name="Show layer 1, head 4").click()  # the step stays the same
    assert explorer.settle().js(IN_SIGHT)
    explorer.page.locator(".rail .head").nth(5).scroll_into_view_if_needed()
    before = explorer.js("() => scrollY")
    explorer.page.locator(".rail .head").nth(5).click()
    assert explorer.settle().js("() => scrollY") == before, "choosing a head scrolls the page"
    explorer.close()


def test_grids_in_a_row_stand_on_one_line(explorer: Explorer) -> None:
    for step, grids in ((1, ("x", "w", "part")), (7, ("merged", "w_o", "output"))):
        explorer.page.set_viewport_size({"width": 1440, "height": 900})
        explorer.open(f"model=lm&step={step}")
        first = {"x": [0, 0], "w": [0, 0, 0], "part": [0, 0, 0], "merged": [0, 0], "w_o": [0, 0, 0], "output": [0, 0]}
        tops = explorer.js(
            """given => given.map(([name, index]) => {
                 const canvas = document.querySelector(`.stage canvas[data-grid='${name}']`);
                 return [canvas.getBoundingClientRect().top, canvas.getBoundingClientRect().bottom]; })""",
            [[name, first[name]] for name in grids],
        )
        assert len({round(top) for top, _ in tops}) == 1, tops


SHIFTS = """globalThis.shifts = [];
new PerformanceObserver(list => shifts.push(...list.getEntries().map(entry => ({
  by: entry.value, what: entry.sources.map(s => s.node?.className ?? s.node?.nodeName ?? "gone") }))))
  .observe({ type: "layout-shift", buffered: true });"""


@pytest.mark.parametrize("width", [360, 1440])
def test_nothing_jumps(chromium: Any, server: Any, width: int) -> None:
    """Not while the page opens, not under the pointer, not while a step is played."""
    explorer = Explorer(chromium, server, viewport={"width": width, "height": 900}, reduced_motion="no-preference")
    explorer.page.add_init_script(SHIFTS)
    explorer.open("model=lm&step=3&layer=1&head=1")
    assert sum(shift["by"] for shift in explorer.js("() => shifts")) < 0.1, explorer.js("() => shifts")
    explorer.at("weights", 1, 5, 3)  # in sight: scrolling moves things, too
    explorer.frames(2).js("() => { shifts.length = 0; }")
    for index in ([1, 5, 3], [1, 11, 10], [1, 0, 0], [1, 8, 4]):
        explorer.hover("weights", *index)
    explorer.page.mouse.move(2, 2)
    explorer.page.locator(".play").dispatch_event("click")
    explorer.frames(40)
    assert explorer.js("() => shifts") == []
    explorer.close()

"""A layer so large that a change of the mask is shown in parts: the step on the stage first, the others after it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import multihead as mh
from tests.explorer.browser import Explorer, chromium, needs_browser  # noqa: F401

pytestmark = needs_browser
N, E = 128, 512  # N·E·E is above what session.js computes at once
WATCH = "() => { globalThis.parts = []; multihead.app.session.scene.subscribe(() => parts.push(multihead.app.session.scene.get().later)); }"
DONE = "() => multihead.app.session.scene.get().later === ''"


@pytest.fixture(scope="module")
def traced() -> Any:
    torch.manual_seed(0)
    layer, x = mh.MultiHeadAttention(E, heads=4).eval(), torch.randn(N, E)
    return lambda mask: mh.trace(layer, x, mask=mask)


@pytest.fixture
def from_disk(chromium: Any, traced: Any, tmp_path: Path) -> Iterator[Explorer]:
    """The single file: no Python is there that would answer in the page's stead."""
    traced(mh.Causal()).html(str(tmp_path / "page.html"))
    explorer = Explorer(chromium, type("Disk", (), {"url": (tmp_path / "page.html").as_uri()}), offline=True)
    explorer.open("step=3")
    explorer.js(WATCH)
    explorer.page.locator("#mask-button").click()
    yield explorer
    explorer.close()


def choose(explorer: Explorer, mask: str) -> None:
    explorer.page.locator("#mask-editor").get_by_role("button", name=mask, exact=True).click()


def agrees(explorer: Explorer, trace: Any, *names: str) -> None:
    for name in names:
        torch.testing.assert_close(explorer.tensor(name), trace[name], rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize(("step", "first"), [(3, "heads"), (7, "output")])
def test_the_step_on_the_stage_comes_first_and_all_are_right(
    from_disk: Explorer, traced: Any, step: int, first: str
) -> None:
    from_disk.js("n => multihead.app.store.set({ step: n })", step)
    choose(from_disk, "Window")
    from_disk.page.wait_for_function(DONE)
    assert from_disk.js("() => parts") == [first, ""]
    agrees(from_disk.settle(), traced(mh.Window(1, 1)), "weights", "heads", "merged", "output")


def test_a_change_in_the_middle_of_it_gives_up_the_first(from_disk: Explorer, traced: Any) -> None:
    from_disk.js(
        """() => { for (const name of ['Window', 'None'])
          [...document.querySelectorAll('#mask-editor button')].find(b => b.textContent === name).click(); }"""
    )
    from_disk.page.wait_for_function(DONE)
    assert from_disk.js("() => parts") == ["heads", "heads", ""]
    agrees(from_disk.settle(), traced(None), "weights", "heads", "output")


def test_a_head_switched_off_too(from_disk: Explorer, traced: Any) -> None:
    from_disk.page.get_by_role("button", name="Switch off layer 0, head 2").click()
    from_disk.page.wait_for_function(DONE)
    off = traced(mh.Causal())["heads"].clone()
    off[2] = 0
    torch.testing.assert_close(
        from_disk.settle().tensor("merged"), off.transpose(0, 1).reshape(N, E), rtol=1e-3, atol=1e-3
    )

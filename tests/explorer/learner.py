"""Somebody who learns: at the keyboard, and with the learner's layer in hand to compare it with `mh.trace`."""

from typing import Any

import torch

import multihead as mh
from tests.explorer.browser import PACKED, Explorer, unpacked


def layer_of(explorer: Explorer, sizes: dict[str, Any], made: str = "makeLayer") -> tuple[Any, torch.Tensor]:
    """The learner's layer in JavaScript, as one of ours, and what goes into it."""
    found = explorer.js(
        f"""async ([sizes, made]) => {{ {PACKED}
             const all = {{...await import('./lessons/layer.js'), ...await import('./lessons/patient.js')}};
             const layer = all[made](sizes);
             return Object.fromEntries(Object.entries(layer.known).map(([n, t]) => [n, packed(t)])); }}""",
        [sizes, made],
    )
    known = {name: unpacked(t) for name, t in found.items()}
    E, H, _ = known["w_q"].shape
    layer = mh.MultiHeadAttention(E, heads=H, bias=False)
    with torch.no_grad():
        for name in "qkvo":
            getattr(layer, f"w_{name}").copy_(known[f"w_{name}"])
    return layer, known["x"]


class Learner:
    """Somebody at the keyboard."""

    def __init__(self, explorer: Explorer) -> None:
        self.explorer, self.page = explorer, explorer.page

    def tab_to(self, condition: str) -> None:
        """Press Tab, or Shift and Tab where that is the way, until the focus is there."""
        ahead = self.explorer.js(
            f"""() => {{ const found = [...document.querySelectorAll('button, input, select')].find(e => {condition});
                 const now = document.activeElement;
                 return found === now ? 0 : now.compareDocumentPosition(found) & 2 ? -1 : 1; }}"""
        )
        for _ in range(80):
            if self.explorer.js(f"() => {{ const e = document.activeElement; return Boolean({condition}); }}"):
                return
            self.page.keyboard.press("Shift+Tab" if ahead < 0 else "Tab")
        raise AssertionError(f"Tab never came to {condition}")

    def field(self, label: str) -> None:
        self.tab_to(f"e.getAttribute('aria-label') === {label!r}")

    def answer(self, label: str, text: str) -> str:
        """Type an answer, press Enter, and read what is said to it."""
        self.field(label)
        self.page.keyboard.press("Control+a")
        self.page.keyboard.type(text)
        self.page.keyboard.press("Enter")
        return self.said(label)

    def said(self, label: str) -> str:
        return self.explorer.js(
            """l => [...document.querySelectorAll('[aria-label]')].find(e => e.getAttribute('aria-label') === l)
                 .closest('.question').querySelector('.answer').textContent""",
            label,
        )

    def order(self, wanted: list[str]) -> None:
        """Bring the pieces into this order with the arrow keys."""
        read = "() => [...document.querySelectorAll('.pieces li')].map(li => li.dataset.id)"
        for place, piece in enumerate(wanted):
            while self.explorer.js(read).index(piece) > place:
                if self.explorer.js("() => document.activeElement.dataset.piece") != piece:
                    self.tab_to(f"e.dataset.piece === '{piece}'")
                self.page.keyboard.press("ArrowUp")
        assert self.explorer.js(read) == wanted

    def check(self) -> str:
        own = (
            "(document.activeElement.closest('form') ?? e.form) === e.form"  # the question one is in, if one is in any
        )
        self.tab_to(f"e.textContent === 'Check' && {own}")
        self.page.keyboard.press("Enter")
        return self.explorer.js("() => document.activeElement.closest('form').querySelector('.answer').textContent")

    def next(self, lesson: str) -> None:
        assert self.explorer.js("() => document.querySelector('#lesson-next').classList.contains('ready')")
        self.tab_to("e.id === 'lesson-next'")
        self.page.keyboard.press("Enter")
        self.page.wait_for_function("l => multihead.app.store.get().lesson === l", arg=lesson)
        self.explorer.settle()

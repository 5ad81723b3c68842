"""The lessons in a browser: the whole walk by keyboard, checked against `mh.trace` and `mh.diagnose`; wrong answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import multihead as mh
from multihead.explorer import export
from multihead.explorer.packaged import Example
from multihead.explorer.session import Session
from tests.explorer.browser import PACKED, Explorer, chromium, explorer, needs_browser, server, unpacked  # noqa: F401
from tests.explorer.learner import Learner, layer_of
from tests.explorer.test_page_look import CUT

pytestmark = needs_browser
LESSONS = ["items", "width", "wide", "shapes", "split", "inside", "causal", "unmasked", "concatenate", "after", "own",
           "mixing", "patient"]  # fmt: skip
INSIDE = ["project", "score", "mask", "softmax", "mix"]
AFTER = ["mix", "transpose", "concatenate", "output"]


def test_the_whole_walk_by_keyboard(explorer: Explorer) -> None:
    explorer.open("model=lm")
    me = Learner(explorer)
    me.tab_to("e.id === 'learn-button'")
    explorer.press("Enter")
    assert explorer.state["lesson"] == "items"
    assert explorer.js("() => document.activeElement.id") == "lesson-title"
    assert explorer.page.locator("#explore").is_hidden()

    me.field("Your sentence")
    explorer.page.keyboard.press("Control+a")
    explorer.page.keyboard.type("three small words")
    assert "how many words" in me.answer("How many numbers go in", "3")
    assert "times, not plus" in me.answer("How many numbers go in", "67")
    assert me.answer("How many numbers go in", str(3 * 64)).startswith("Right.")
    me.next("width")

    layer, x = layer_of(explorer, {"E": 768, "H": 12, "words": ["I", "love", "pepperoni", "pizza"]})
    width = mh.trace(layer, x, mask=mh.Causal())["heads"].shape[-1]
    assert width == 64
    assert "12 heads share it" in me.answer("Width of one head's output", "768")
    assert "an integer" in me.answer("Width of one head's output", "about 64").lower()
    assert me.answer("Width of one head's output", str(width)).startswith("Right.")
    me.field("Number of heads")
    explorer.page.keyboard.press("ArrowUp")  # 8 heads
    assert me.said("Width of one head's output") == "", "another question is another answer"
    assert "(8, 4, 96)" in me.answer("Width of one head's output", "96")
    me.next("wide")

    me.field("Is a head's output as wide as the model")
    explorer.page.keyboard.press("y")
    assert "heads of 16 numbers" in me.check()
    me.field("Is a head's output as wide as the model")
    explorer.page.keyboard.press("n")
    assert me.check().startswith("Right.")
    me.field("Number of heads")
    explorer.page.keyboard.press("ArrowUp")
    assert "each is 32 wide" in me.said("Number of heads")
    explorer.page.keyboard.press("ArrowUp")
    assert me.said("Number of heads").startswith("Right.")
    me.next("shapes")

    shapes = {"W_q": (1024, 128, 8), "W_k": (1024, 8, 128), "W_v": (1024, 8, 128), "W_o": (1024, 8, 128)}

    def write(shapes: dict[str, tuple[int, ...]]) -> str:
        for name, shape in shapes.items():
            for n, size in enumerate(shape):
                me.field(f"{name}, number {n + 1}")
                explorer.page.keyboard.press("Control+a")
                explorer.page.keyboard.type(str(size))
        explorer.page.keyboard.press("Enter")
        return me.said("W_q, number 1")

    assert "heads first" in write(shapes)
    assert "goes the other way" in write({"W_q": (1024, 8, 128)})
    example = mh.MultiHeadAttention(1024, heads=8)
    right = {f"W_{name}": tuple(getattr(example, f"w_{name}").shape) for name in "qkvo"}
    assert write(right).startswith("Right.")
    me.next("split")

    layer, x = layer_of(explorer, {"E": 128, "H": 8, "words": ["I", "love", "pepperoni", "pizza"]})
    trace = mh.trace(layer, x)

    def put(shape: tuple[int, ...]) -> str:
        for n, size in enumerate(shape):
            me.field(f"With heads in front, number {n + 1}")
            explorer.page.keyboard.press("Control+a")
            explorer.page.keyboard.type(str(size))
        explorer.page.keyboard.press("Enter")
        return me.said("With heads in front, number 1")

    assert "words still come first" in put(tuple(trace["q"].shape))
    assert put(tuple(trace["q_heads"].shape)).startswith("Right.")
    cut = trace["q"].reshape(trace["q_heads"].shape)
    strange = int((cut[0] != trace["q_heads"][0]).any(-1).sum())
    me.field("The way that is right")
    explorer.page.keyboard.press("c")
    assert f"But {strange} of head 0's 4 rows hold numbers of other heads" in me.check()
    me.field("The way that is right")
    explorer.page.keyboard.press("m")
    assert me.check().startswith("Right.")
    me.next("inside")

    me.order(["project", "score", "softmax", "mask", "mix"])
    said = me.check()
    layer, x = layer_of(explorer, {"E": 64, "H": 4, "words": ["I", "love", "pepperoni", "pizza"]})
    trace = mh.trace(layer, x, mask=mh.Causal())
    shown = float(said.split("add up to ")[1].split(":")[0])
    assert shown == pytest.approx(float(mh.trace(layer, x)["weights"][0, 0, 0]), abs=6e-4), "what is left of row 0"
    me.order(INSIDE)
    assert me.check().startswith("Right.")
    me.field("Number of heads")
    explorer.page.keyboard.press("ArrowUp")  # another live layer: the order is checked on that one
    assert explorer.page.inner_text(".question .answer") == ""
    assert me.check().startswith("Right.")
    me.next("causal")

    allowed = mh.Causal().dense(4, 4)[2].tolist()
    for word, reason in ((3, "comes after"), (3, "sees itself too"), (2, "came before")):
        me.tab_to(f"e === document.querySelectorAll('.question .segmented button')[{word}]")
        explorer.page.keyboard.press("Space")
        assert reason in me.check()
    for word in (0, 1):
        me.tab_to(f"e === document.querySelectorAll('.question .segmented button')[{word}]")
        explorer.page.keyboard.press("Space")
    pressed = explorer.js(
        "() => [...document.querySelectorAll('.question .segmented button')].map(b => b.ariaPressed === 'true')"
    )
    assert pressed == allowed
    assert "I love pepperoni" in me.check()
    me.next("unmasked")

    other = x.clone()
    other[3] = layer_of(explorer, {"E": 64, "H": 4, "words": ["pasta"]})[1][0]
    moved = {
        mask: (mh.trace(layer, x, mask=mask)["output"] - mh.trace(layer, other, mask=mask)["output"]).abs().amax(-1)
        for mask in (mh.Causal(), None)
    }
    counts = [int((by > 1e-6).sum()) for by in moved.values()]
    assert counts == [1, 4]
    assert "sees itself" in me.answer("Rows that change with the mask", "0")
    assert me.answer("Rows that change with the mask", str(counts[0])).startswith("Right.")
    me.tab_to("e.type === 'checkbox'")
    explorer.page.keyboard.press("Space")
    figures = [float(t) for t in explorer.page.locator(".changes .figure").all_inner_texts()]
    torch.testing.assert_close(torch.tensor(figures), moved[None].detach(), rtol=1e-2, atol=6e-4)
    assert "with the mask" in me.answer("Rows that change without the mask", "1")
    assert me.answer("Rows that change without the mask", str(counts[1])).startswith("Right.")
    me.next("concatenate")

    assert "is one head" in me.answer("Width after concatenation", "64")
    assert me.answer("Width after concatenation", str(8 * 64)).startswith("Right.")
    me.next("after")

    me.order(["mix", "concatenate", "transpose", "output"])
    assert "Turn back before" in me.check()
    me.order(AFTER)
    assert me.check().startswith("Right.")
    me.next("own")

    for name, reason in (("w_q", "look at different words"), ("w_k", "come from W_v"), ("w_v", "become one head")):
        me.tab_to(f"e.dataset.share === '{name}'")
        explorer.page.keyboard.press("Space")
        assert reason in explorer.page.locator(".question .answer").first.inner_text()
    with torch.no_grad():
        for name in "qkv":
            getattr(layer, f"w_{name}")[:, 1] = getattr(layer, f"w_{name}")[:, 0]
    heads = mh.trace(layer, x, mask=mh.Causal())["heads"]
    different = len({tuple(head.flatten().tolist()) for head in heads})
    assert different == 3
    assert "say the same" in me.answer("How many different heads", "4")
    assert me.answer("How many different heads", str(different)).startswith("Right.")
    me.next("mixing")

    layer, x = layer_of(explorer, {"E": 64, "H": 4, "words": ["I", "love", "pepperoni", "pizza"]})
    with torch.no_grad(), mh.ablate(layer, [0]):
        off = mh.trace(layer, x, mask=mh.Causal())
    changed = [
        int(((off[name] - trace[name]).abs() > 1e-6).any(0).sum()) for name in ("output", "merged")
    ]  # with W_o, and without
    assert changed == [64, 16]
    assert "without W_o" in me.answer("Outputs that change with W_o", "16")
    assert me.answer("Outputs that change with W_o", str(changed[0])).startswith("Right.")
    assert "with W_o" in me.answer("Outputs that change without W_o", "64")
    assert me.answer("Outputs that change without W_o", str(changed[1])).startswith("Right.")
    me.next("patient")

    me.field("The step that is wrong")
    explorer.page.keyboard.press("1")
    assert "comes later" in me.check()
    me.field("The step that is wrong")
    explorer.page.keyboard.press("7")
    assert "look further up" in me.check()
    me.field("The step that is wrong")
    explorer.page.keyboard.press("3")
    assert "mask missing" in me.check()
    assert explorer.page.locator(".lesson-step.done").count() == 13
    me.next("")
    assert explorer.page.locator("#explore").is_visible()
    explorer.page.go_back()
    assert explorer.settle().state["lesson"] == "patient"
    explorer.press("Escape")
    assert explorer.state["lesson"] == ""


def test_every_broken_layer_is_what_the_doctor_says_it_is(explorer: Explorer) -> None:
    explorer.open("lesson=patient")
    layer, x = layer_of(explorer, {"E": 32, "H": 4}, "patientLayer")
    mistakes = explorer.js(
        """async () => {
             const { MISTAKES, runBroken } = await import('./lessons/mistakes.js');
             const { patientLayer } = await import('./lessons/patient.js');
             const { allowed } = await import('./mask.js');
             globalThis.broken = (name, rows) => {
               const [layer, N, E] = [patientLayer(), rows.length, rows[0].length];
               const x = { shape: [N, E], data: Float32Array.from(rows.flat()) };
               const given = { ...layer, words: rows.map(String), known: { ...layer.known, x },
                               allowed: allowed({ kind: 'causal', numbers: [] }, N, N) };
               return Array.from(runBroken(given, MISTAKES.find(m => m.name === name) ?? null).output.data);
             };
             return MISTAKES.map(m => [m.name, m.step]); }"""
    )

    def patient(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            each = x.reshape(-1, *x.shape[-2:])
            made = [explorer.js("([name, rows]) => broken(name, rows)", [name, rows.tolist()]) for rows in each]
            return torch.tensor(made, dtype=x.dtype).view(x.shape)

        return run

    assert mh.diagnose(patient("none of them"), layer, x, mask=mh.Causal()).verdict == "healthy"
    assert {step for _, step in mistakes} == set(range(1, 8)), "each step has its mistake"
    for name, step in mistakes:
        report = mh.diagnose(patient(name), layer, x, mask=mh.Causal())
        assert (report.verdict, report.step, report.cause) == ("diagnosed", step, name)
    for name, step in mistakes:  # and every one of them can be found on the page
        explorer.page.get_by_label("The step that is wrong").select_option(str(step))
        explorer.page.get_by_role("button", name="Check").click()
        assert f"Step {step}: {name}." in explorer.page.inner_text(".question .answer")
        explorer.page.get_by_role("button", name="Another patient").click()


def test_steps_are_dragged_into_order(explorer: Explorer) -> None:
    explorer.open("lesson=after")
    box = explorer.page.locator(".piece[data-piece=mix]").bounding_box()
    first = explorer.page.locator(".pieces li").first.bounding_box()
    explorer.page.mouse.move(box["x"] + 60, box["y"] + 12)
    explorer.page.mouse.down()
    explorer.page.mouse.move(box["x"] + 60, first["y"] + 4, steps=6)
    explorer.page.mouse.up()
    order = explorer.js("() => [...document.querySelectorAll('.pieces li')].map(li => li.dataset.id)")
    assert order == ["mix", "transpose", "output", "concatenate"]
    explorer.page.get_by_role("button", name="Check").click()
    assert "Lay them side by side first" in explorer.page.inner_text(".question .answer")
    explorer.page.get_by_role("button", name="Move output down").click()
    explorer.page.get_by_role("button", name="Check").click()
    assert explorer.page.inner_text(".question .answer").startswith("Right.")


@pytest.mark.parametrize(("E", "H"), [(16, 1), (96 * 8, 6), (32, 8)])
def test_the_live_layer_is_that_of_the_trace_at_any_size(explorer: Explorer, E: int, H: int) -> None:
    explorer.open("lesson=width")
    sizes = {"E": E, "H": H, "words": ["so", "it", "is", "so"]}
    layer, x = layer_of(explorer, sizes)
    for name, t in mh.trace(layer, x, mask=mh.Causal()).items():
        made = explorer.js(
            f"""async ([sizes, name]) => {{ {PACKED}
                 const {{ makeLayer, run }} = await import('./lessons/layer.js');
                 return packed(run(makeLayer(sizes))[name]); }}""",
            [sizes, name],
        )
        torch.testing.assert_close(unpacked(made), t.detach(), rtol=1e-4, atol=1e-5, msg=name)


def test_progress_is_kept_and_forgotten(explorer: Explorer) -> None:
    explorer.open("lesson=items")
    explorer.page.get_by_label("How many numbers go in").fill("256")
    explorer.page.get_by_label("How many numbers go in").press("Enter")
    explorer.page.reload()
    explorer.page.wait_for_selector(".lesson-step.done")
    assert explorer.page.get_by_role("button", name="Lesson 1, What goes in, done").count() == 1
    explorer.press("Escape")
    explorer.page.locator("#learn-button").click()
    assert explorer.settle().state["lesson"] == "width", "it goes on where one left off"
    explorer.page.get_by_role("button", name="Begin anew").click()
    explorer.settle()
    assert explorer.page.locator(".lesson-step.done").count() == 0
    assert explorer.state["lesson"] == "items"


def test_lessons_where_the_browser_keeps_nothing(chromium: Any, server: Any) -> None:
    explorer = Explorer(chromium, server)
    explorer.page.add_init_script(
        "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('blocked'); }})"
    )
    explorer.open("lesson=items")
    explorer.page.get_by_label("How many numbers go in").fill("256")
    explorer.page.get_by_label("How many numbers go in").press("Enter")
    assert explorer.page.locator(".lesson-step.done").count() == 1
    assert "forgotten when you close it" in explorer.page.inner_text(".learn")
    explorer.close()


def test_lessons_in_the_single_file(chromium: Any, tmp_path: Path) -> None:
    session = Session([Example()])
    (tmp_path / "page.html").write_text(export.single_file(session, session.first), encoding="utf-8")

    class Disk:
        url = (tmp_path / "page.html").as_uri()

    explorer = Explorer(chromium, Disk(), offline=True)
    explorer.page.goto(Disk.url)
    explorer.page.wait_for_selector(".strip button[aria-current]")
    explorer.page.locator("#learn-button").click()
    explorer.settle()
    explorer.page.get_by_label("How many numbers go in").fill("256")
    explorer.page.get_by_label("How many numbers go in").press("Enter")
    assert explorer.page.inner_text(".question .answer").startswith("Right.")
    explorer.page.get_by_role("button", name="Lesson 13, What is wrong with this layer?").click()
    explorer.settle()
    explorer.page.get_by_label("The step that is wrong").select_option("3")
    explorer.page.get_by_role("button", name="Check").click()
    assert "mask missing" in explorer.page.inner_text(".question .answer")
    explorer.close()


@pytest.mark.parametrize(("width", "theme"), [(360, "dark"), (1440, "light"), (2560, "dark")])
def test_nothing_is_cut_off_and_axe_is_content(chromium: Any, server: Any, width: int, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    explorer = Explorer(chromium, server, viewport={"width": width, "height": 900}, color_scheme=theme)
    for n, lesson in enumerate(LESSONS):
        explorer.open(f"lesson={lesson}") if n == 0 else explorer.js("f => { location.hash = f }", f"lesson={lesson}")
        explorer.settle()
        explorer.page.locator(".question button[type=submit]").first.click()  # a wrong answer is read as well
        assert explorer.js(CUT) == [], f"{lesson} at {width}"
        if width < 2560:
            found = axe.run(explorer.page, options={"resultTypes": ["violations"]}).response["violations"]
            said = [(v["id"], v["help"], [node["html"][:160] for node in v["nodes"][:3]]) for v in found]
            assert said == [], f"{lesson} at {width}, {theme}"
    explorer.close()

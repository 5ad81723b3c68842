"""The page in a browser: the seven steps, the number that is asked where it came from, light, locks, and what moves."""

import re
from typing import Any

import pytest
import torch

import multihead as mh
from tests.explorer.browser import Explorer, chromium, close_to, explorer, needs_browser, number, server  # noqa: F401

pytestmark = needs_browser
TEXT = "I love pepperoni pizza"
NAMES = ["x", "q", "k", "v", "q_heads", "k_heads", "v_heads", "scores", "masked", "weights", "heads", "transposed",
         "merged", "output"]  # fmt: skip


@pytest.fixture(scope="module")
def lm() -> Any:
    return mh.models.load("lm")


@pytest.fixture(scope="module")
def traced(lm: Any) -> list[Any]:
    tokens = torch.tensor([lm.tokenizer.begin(TEXT)])
    return [lm.trace(tokens, layer=n) for n in range(2)]


@pytest.mark.parametrize("layer", [0, 1])
def test_every_tensor_is_that_of_the_trace(explorer: Explorer, traced: Any, layer: int) -> None:
    explorer.open(f"model=lm&layer={layer}")
    for name in NAMES:
        torch.testing.assert_close(explorer.tensor(name), traced[layer][name], rtol=1e-5, atol=1e-6)


def test_the_strip_has_seven_true_miniatures_and_arrow_keys_walk(explorer: Explorer, traced: Any) -> None:
    explorer.open("model=lm")
    names = ("q", "q_heads", "weights", "heads", "transposed", "merged", "output")
    shapes = [f"({', '.join(map(str, traced[0][name].shape))})" for name in names]
    assert explorer.page.locator(".strip button code").all_inner_texts() == shapes
    explorer.page.locator(".strip button[data-step='1']").click()
    for step, title in enumerate(("split", "score", "mix", "transpose back", "concatenate", "output"), 2):
        explorer.press("ArrowRight")
        assert explorer.page.inner_text("#stage-title") == f"{step}. {title}"
        assert explorer.page.locator(".strip [aria-current=step]").get_attribute("data-step") == str(step)
    explorer.press("Home")
    assert explorer.page.inner_text("#stage-title") == "1. project"
    blank = explorer.js(
        """() => [...document.querySelectorAll('.strip canvas')].map(c => {
             const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
             return new Set(Array.from({length: d.length / 4}, (_, i) => d[4*i] + ',' + d[4*i+1])).size; })"""
    )
    assert min(blank) > 3, "a miniature is empty"


@pytest.mark.parametrize(
    ("step", "grid", "name", "index"),
    [
        (1, "part", "q", (5, 3, 17)),
        (1, "x", "x", (2, 100)),
        (3, "scores", "scores", (2, 7, 4)),
        (3, "weights", "weights", (2, 7, 4)),
        (4, "heads", "heads", (2, 7, 20)),
        (7, "output", "output", (11, 30)),
        (7, "merged", "merged", (11, 30)),
    ],
)
def test_hover_shows_the_number(explorer: Explorer, traced: Any, step: int, grid: str, name: str, index: Any) -> None:
    explorer.open(f"model=lm&step={step}&head={3 if name == 'q' else 2}").hover(grid, *index)
    pointed = explorer.js("() => multihead.app.hover.get()")
    assert pointed["name"] == name
    # a cell may be narrower than a pixel: what is said must be what is pointed at, and that within a cell or two
    assert all(abs(a - b) <= 2 for a, b in zip(pointed["index"], index))
    assert close_to(explorer.value, float(traced[0][name][tuple(pointed["index"])]))


def test_a_number_lights_the_row_and_column_that_made_it(explorer: Explorer) -> None:
    explorer.open("model=lm&step=3&head=2").hover("scores", 2, 7, 4)
    assert explorer.lit("q_heads") == [[2, 7, None]]
    assert explorer.lit("k_heads") == [[2, 4, None]]
    assert explorer.lit("q") == [[7, 2, None]]
    assert explorer.lit("x") == [[7, None], [4, None]]
    explorer.page.mouse.move(5, 5)
    explorer.settle()
    assert explorer.lit("q_heads") == []


def test_hover_works_both_ways(explorer: Explorer, traced: Any) -> None:
    explorer.open("model=lm&step=3&head=1")
    explorer.page.locator(".token").nth(7).hover()
    explorer.settle()
    weights = traced[0]["weights"][1]
    assert explorer.lit("weights") == [[None, 7, None]]
    shown = [number(t) for t in explorer.page.locator(".bars-panel .figure").all_inner_texts() if t != "hidden"]
    assert all(close_to(a, b) for a, b in zip(shown, sorted(weights[7, :8].tolist(), reverse=True)))
    explorer.page.get_by_role("button", name="Who attends to it").click()
    explorer.page.locator(".token").nth(3).hover()
    explorer.settle()
    assert explorer.lit("weights") == [[None, None, 3]]
    shown = [number(t) for t in explorer.page.locator(".bars-panel .figure").all_inner_texts() if t != "hidden"]
    assert all(close_to(a, b) for a, b in zip(shown, sorted(weights[3:, 3].tolist(), reverse=True)))


def test_arithmetic_with_the_real_numbers_followed_back_to_the_input(explorer: Explorer, traced: Any) -> None:
    explorer.open("model=lm&step=7").click("output", 11, 30)
    seen = [explorer.state["at"]]
    for _ in range(9):
        total = number(explorer.page.inner_text("#number-value"))
        if explorer.page.locator(".terms.signed").count():
            terms = [number(t) for t in explorer.page.locator(".terms .figure").all_inner_texts()]
            rest = explorer.page.locator(".number > .hint").inner_text()
            others = number(re.split(" adds? ", rest)[1].rstrip(".")) if rest else 0.0
            if not explorer.title.startswith("masked"):
                assert abs(sum(terms) + others - total) < 0.01 * max(1.0, abs(total)), (
                    f"{explorer.title}: {terms}, {others}"
                )
        if not explorer.page.locator(".terms button").count():
            break
        explorer.page.locator(".terms button").first.click()
        explorer.settle()
        seen.append(explorer.state["at"])
    names = [at.split(".")[0] for at in seen]
    assert names[:5] == ["output", "merged", "transposed", "heads", "weights"]
    assert names[-1] == "x", f"the path ends at {names[-1]}"
    assert explorer.state["step"] == 1
    for expected in reversed(seen[:-1]):
        explorer.page.get_by_role("button", name="← Back").click()
        assert explorer.settle().state["at"] == expected
    explorer.page.get_by_role("button", name="Forward →").click()
    assert explorer.settle().state["at"] == seen[1]


def test_click_locks_and_escape_frees_and_back_goes_back(explorer: Explorer) -> None:
    explorer.open("model=lm&step=3&head=2").click("weights", 2, 7, 4)
    assert explorer.state["at"] == "weights.2.7.4"
    explorer.page.mouse.move(5, 5)
    assert "Locked" in explorer.settle().page.inner_text(".number .lead")
    explorer.press("Escape")
    assert explorer.state["at"] == ""
    explorer.page.locator(".token").nth(4).click()
    assert explorer.settle().state["at"] == "query.4"
    explorer.page.locator(".rail .head").nth(5).click()
    assert explorer.settle().state["head"] == 5
    explorer.page.go_back()
    assert explorer.settle().state["head"] == 2
    explorer.page.go_back()
    assert explorer.settle().state["at"] == ""
    explorer.page.go_back()
    assert explorer.settle().state["at"] == "weights.2.7.4"


def test_steps_move_pause_and_go_on(chromium: Any, server: Any) -> None:
    explorer = Explorer(chromium, server, reduced_motion="no-preference").open("model=lm&step=7&speed=0.25")
    picture = "() => [...document.querySelectorAll('.floor canvas')].map(c => c.toDataURL()).join()"
    slider = explorer.page.get_by_role("slider", name="How far the step has gone")
    for step in range(1, 8):
        explorer.page.locator(f".strip button[data-step='{step}']").click()
        first = explorer.js(picture)
        explorer.page.wait_for_function(f"before => ({picture})() !== before", arg=first)
        explorer.page.get_by_role("button", name="Pause").click()
        paused = explorer.settle().js(picture)
        assert explorer.frames(12).js(picture) == paused, f"step {step} moves while paused"
        explorer.page.get_by_role("button", name="One beat on").click()
        assert explorer.settle().js(picture) != paused, f"no beat in step {step}"
        explorer.page.keyboard.press("Escape")
        assert explorer.settle().page.get_by_role("button", name="Play").is_visible()
        assert slider.get_attribute("aria-valuetext") == "all done"
    explorer.close()


def test_nothing_moves_by_itself_under_reduced_motion(explorer: Explorer) -> None:
    explorer.open("model=lm&step=1")
    picture = "() => [...document.querySelectorAll('.floor canvas')].map(c => c.toDataURL()).join()"
    explorer.page.locator(".strip button[data-step='2']").click()
    still = explorer.settle().js(picture)
    assert explorer.frames(24).js(picture) == still
    explorer.page.get_by_role("button", name="One beat on").click()
    assert explorer.settle().js(picture) != still


def test_why_w_o(explorer: Explorer, traced: Any, lm: Any) -> None:
    explorer.open("model=lm&step=7")
    mixing = mh.heads.mixing(lm.layers[0].attention)
    torch.testing.assert_close(explorer.tensor("mixing"), mixing, rtol=1e-3, atol=1e-4)
    explorer.page.get_by_label("Multiply by W_o").uncheck()
    explorer.settle()
    torch.testing.assert_close(explorer.tensor("output"), traced[0]["merged"], rtol=1e-5, atol=1e-6)
    assert "depends on one head only" in explorer.page.inner_text("#mixing-says")
    explorer.click("output", 11, 100)
    assert (
        f"head {explorer.js('() => Math.floor(multihead.app.focus().index[1] / 32)')}'s alone"
        in explorer.page.inner_text(".number .lines")
    )
    explorer.page.get_by_label("Multiply by W_o").check()
    explorer.settle()
    torch.testing.assert_close(explorer.tensor("output"), traced[0]["output"], rtol=1e-5, atol=1e-6)


def test_the_strip_shows_a_hue_for_each_head_until_w_o_mixes_them(explorer: Explorer) -> None:
    explorer.open("model=lm&step=7")

    def pictures(colour: str) -> list[str]:
        explorer.js(f"() => multihead.app.store.set({{ colour: '{colour}' }})")
        explorer.settle()
        return explorer.js("() => [...document.querySelectorAll('.strip canvas')].map((c) => c.toDataURL())")

    by_head, by_value = pictures("heads"), pictures("values")
    assert by_head[5] != by_value[5]
    assert by_head[6] == by_value[6], "output is painted in the hues of heads, though W_o has mixed them"
    explorer.page.get_by_label("Multiply by W_o").uncheck()
    explorer.settle()
    assert pictures("heads")[6] != pictures("values")[6]


def test_the_running_example_is_a_choice(explorer: Explorer) -> None:
    explorer.open()
    explorer.page.get_by_role("combobox", name="Model").select_option(label="Running example")
    explorer.settle()
    assert explorer.page.locator(".strip button code").all_inner_texts() == [
        "(4, 8, 128)", "(8, 4, 128)", "(8, 4, 4)", "(8, 4, 128)", "(4, 8, 128)", "(4, 1024)", "(4, 1024)",
    ]  # fmt: skip
    x, w = explorer.tensor("x"), explorer.tensor("w_q")
    q = torch.einsum("ne,ehd->nhd", x, w) + explorer.tensor("b_q")
    torch.testing.assert_close(explorer.tensor("q"), q, rtol=1e-4, atol=1e-4)


def test_the_panel_begins_with_a_number_of_the_step_on_the_stage(explorer: Explorer) -> None:
    for step, name in enumerate(["q", "q_heads", "weights", "heads", "transposed", "merged", "output"], 1):
        explorer.open(f"model=lm&step={step}&head=2")
        assert explorer.title.startswith(f"{name}["), explorer.title
        made = explorer.tensor(name)
        row = {"q_heads": made[2, -1:], "heads": made[2, -1:]}.get(name, made[-1])
        if step == 3:
            row = made[2, -1]
        elif step in (1, 5):
            row = made[-1, 2]
        elif step == 6:
            row = made[-1, 64:96]
        assert close_to(abs(explorer.value), float(row.abs().max()))


def test_an_address_that_sorts_shows_what_it_sorts_by(explorer: Explorer) -> None:
    explorer.open("model=lm&text=the+whale+saw+the+ship+and+the+whale+saw+the&sort=induction")
    explorer.page.wait_for_selector(".wall li")
    assert "Induction:" in explorer.page.inner_text(".heads .hint[role=status]")
    assert explorer.page.locator(".heads select").nth(1).input_value() == "induction"

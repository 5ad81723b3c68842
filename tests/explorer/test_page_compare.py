"""Two side by side: the doctor's verdict, the first tensor that differs, the same colours, and what is not exposed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import multihead as mh
from multihead.doctor import run
from multihead.explorer import _session, serve
from multihead.explorer.examined import examined
from tests.explorer.browser import Explorer, chromium, explorer, needs_browser  # noqa: F401

ASKED = {"model": "given", "layer": 0, "input": {"kind": "given"}}
SOURCE = """
import torch
from torch import nn

class Mine(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2) for p in (self.q_proj, self.k_proj, self.v_proj))
        weights = (q @ k.mT).softmax(-1)
        return self.o_proj((weights @ v).transpose(-3, -2).flatten(-2))
"""


@pytest.fixture(scope="module")
def layer_and_x() -> tuple[mh.MultiHeadAttention, torch.Tensor]:
    torch.manual_seed(6)
    return mh.MultiHeadAttention(24, heads=3).eval(), torch.randn(5, 24)


def broken(layer: mh.MultiHeadAttention) -> Any:
    def mine(x: torch.Tensor) -> torch.Tensor:
        t = mh.trace(layer, x)
        weights = (t["scores"] / layer.scale).softmax(-1)
        return layer.o_proj((weights @ t["v_heads"]).transpose(-3, -2).flatten(-2))

    return mine


def test_one_s_own_beside_the_specification(layer_and_x: Any) -> None:
    layer, x = layer_and_x
    session = _session(layer, (broken(layer),), x, {})
    answer = session.answer("compare", ASKED)
    report = mh.diagnose(broken(layer), layer, x)
    assert answer.meta["report"]["headline"] == report.headline
    assert answer.meta["report"]["step"] == report.step == 3
    assert answer.meta["first"] == "weights"
    rows = {row["name"]: row for row in answer.meta["rows"]}
    assert (rows["weights"]["how"], rows["output"]["how"]) == ("rebuilt", "given")
    assert rows["q"]["same"] is None
    assert "not exposed" in rows["q"]["says"]
    trace = mh.trace(layer, x)
    torch.testing.assert_close(answer.tensors["left.weights"], trace["weights"], rtol=1e-5, atol=1e-6)
    wrong = (trace["scores"] / layer.scale).softmax(-1)
    torch.testing.assert_close(answer.tensors["right.weights"], wrong, rtol=1e-4, atol=1e-6)


def test_two_layers_and_a_layer_with_itself(layer_and_x: Any) -> None:
    layer, x = layer_and_x
    same = _session(layer, (layer,), x, {}).answer("compare", ASKED)
    assert same.meta["first"] is None
    assert all(row["same"] for row in same.meta["rows"])
    torch.manual_seed(1)
    other = mh.MultiHeadAttention(24, heads=3).eval()
    other.load_state_dict(layer.state_dict())
    with torch.no_grad():
        other.v_proj.weight.mul_(1.5)
    answer = _session(layer, (other,), x, {}).answer("compare", ASKED)
    assert answer.meta["first"] == "v"
    assert {row["name"]: row["same"] for row in answer.meta["rows"]}["weights"] is True
    torch.testing.assert_close(answer.tensors["right.output"], mh.trace(other, x)["output"])
    for second in (mh.models.load("vit"), mh.models.load("lm")):
        with pytest.raises(ValueError, match=f"the same x, and {type(second).__name__} does not take it"):
            _session(layer, (second,), x, {})
    with pytest.raises(TypeError, match="expected a model"):
        _session(layer, (x, x), None, {})


def test_the_command_line_s_candidate(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    given: dict[str, Any] = dict.fromkeys(
        ["kv_heads", "head_dim", "rope", "softcap", "scale", "context", "weights", "layout"]
    )
    given |= {
        "target": f"{file}:Mine",
        "width": 24,
        "heads": 3,
        "mask": "none",
        "batch": 2,
        "tokens": 5,
        "dtype": "float32",
        "seed": 0,
    }
    report = run.examine(given, 120)
    assert report.step == 3
    answer = examined(given, report).answer("compare", ASKED)
    assert (answer.meta["right"], answer.meta["first"]) == ("Mine", "weights")
    rows = {row["name"]: row for row in answer.meta["rows"]}
    assert (rows["q"]["same"], rows["q"]["how"], rows["merged"]["how"]) == (True, "given", "given")


@needs_browser
def test_the_command_opens_it_and_ctrl_c_ends_it(chromium: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    command = [
        sys.executable,
        "-m",
        "multihead",
        "doctor",
        f"{file}:Mine",
        "--width",
        "24",
        "--heads",
        "3",
        "--explore",
    ]
    env = {**os.environ, "BROWSER": "true"}  # the browser that it opens does nothing: here it is opened in one of ours
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as served:
        try:
            assert served.stdout is not None
            told = ""
            while "Ctrl-C ends it." not in told:
                line = served.stdout.readline()
                assert line, f"it ended: {told}"
                told += line
            url = told.partition("side by side at ")[2].split()[0]
            explorer = Explorer(chromium, type("Told", (), {"url": url})).open("")
            explorer.page.wait_for_selector(".compare-list button[data-tensor=weights].first")
            assert explorer.page.inner_text("#compare-title") == "Side by side: the specification and Mine"
            assert "Scale missing (step 3)" in explorer.page.inner_text("#compare-verdict")
            explorer.close()
            served.send_signal(signal.SIGINT)
            assert served.wait(60) == 1, "what the doctor found ends the command"
        finally:
            served.kill()


@pytest.fixture(scope="module")
def server(layer_and_x: Any) -> Iterator[Any]:
    layer, x = layer_and_x
    with serve.start(_session(layer, (broken(layer),), x, {}), port=0, browser=False) as running:
        yield running


@needs_browser
def test_the_page_marks_the_first_that_differs(explorer: Explorer, layer_and_x: Any) -> None:
    layer, x = layer_and_x
    explorer.open("")
    page = explorer.page
    page.wait_for_selector(".compare-list button.first")
    assert page.locator(".compare-list button.first").get_attribute("data-tensor") == "weights"
    verdict = page.inner_text("#compare-verdict")
    assert mh.diagnose(broken(layer), layer, x).headline in verdict
    ends = [page.locator(f"[data-figure=compare-{side}] .legend").inner_text() for side in ("left", "right")]
    assert ends[0] == ends[1]
    page.get_by_role("button", name="Show difference as a table").click()
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save as npz").click()
    explorer.press("Escape")
    with np.load(saved.value.path()) as found:
        trace = mh.trace(layer, x)
        gap = (trace["scores"] / layer.scale).softmax(-1) - trace["weights"]
        torch.testing.assert_close(torch.from_numpy(found["difference"]), gap, rtol=1e-3, atol=1e-6)
    page.locator(".compare-list button[data-tensor=q]").click()
    explorer.settle()
    assert "not exposed" in page.inner_text("#compare-says")
    page.locator(".compare-list button[data-tensor=output]").click()
    explorer.settle()
    assert explorer.state["tensor"] == "output"
    ends = [page.locator(f"[data-figure=compare-{side}] .legend").inner_text() for side in ("left", "right")]
    assert ends[0] == ends[1]
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page, options={"resultTypes": ["violations"]}).response["violations"]
    assert [(v["id"], [n["html"][:160] for n in v["nodes"][:3]]) for v in found] == []


@pytest.fixture(scope="module")
def two_models() -> tuple[Any, Any]:
    """The language model, and the same with the values of its second layer scaled."""
    models = mh.models.load("lm"), mh.models.load("lm")
    with torch.no_grad():
        models[1].blocks[1].attention.v_proj.weight.mul_(1.25)
    return models


TEXT = {"kind": "text", "text": "I love pizza"}


def test_two_models_layer_by_layer(two_models: Any) -> None:
    session = _session(two_models[0], (two_models[1],), "I love pizza", {})
    both = session.answer("overview", {"model": "model", "input": TEXT}).meta
    assert [(layer["same"], layer["first"]) for layer in both["layers"]] == [(True, None), (False, "v")]
    assert both["first"] == 1
    ids = session.subjects["model"].read(TEXT).data
    traced = [model.trace(ids, 1)["output"] for model in two_models]
    assert both["layers"][1]["most"] == pytest.approx(float((traced[0] - traced[1]).abs().max()), rel=1e-3)
    with torch.no_grad():
        p, q = (model(ids)[0, -1].softmax(-1) for model in two_models)
    assert both["predictions"]["most"] == pytest.approx(float((p - q).abs().max()), rel=1e-3)
    rows = both["predictions"]["rows"]
    assert rows[0]["left"] == pytest.approx(float(p.max()), rel=1e-3)
    assert max(row["right"] for row in rows) == pytest.approx(float(q.max()), rel=1e-3)
    alone = _session(two_models[0], (two_models[0],), "I love pizza", {})
    assert alone.answer("overview", {"model": "model", "input": TEXT}).meta["first"] is None


def deeper(left: torch.nn.Module) -> mh.models.VisionTransformer:
    """The same model with another layer after those it has."""
    right = mh.models.VisionTransformer(list("abcdefghij"), 16, 2, 3)
    right.load_state_dict(left.state_dict(), strict=False)
    return right


@pytest.mark.parametrize("turned", [False, True], ids=["the deeper second", "the deeper first"])
def test_of_models_of_other_depths_the_layers_of_both_are_compared(turned: bool) -> None:
    torch.manual_seed(0)
    shallow = mh.models.VisionTransformer(list("abcdefghij"), 16, 2, 2)
    pair = (deeper(shallow), shallow) if turned else (shallow, deeper(shallow))
    session = _session(pair[0], (pair[1],), None, {})
    names = [session.pair.left, session.pair.right]  # type: ignore[union-attr]
    asked = {"model": "model", "input": session.first["input"]}
    both = session.answer("overview", asked).meta
    assert [(row["same"], row["only"]) for row in both["layers"]] == [(True, ""), (True, ""), (None, names[not turned])]
    assert both["first"] is None
    assert both["predictions"]["most"] > 0, "the third layer is in it"
    beyond = session.answer("compare", asked | {"model": "model" if turned else "model-2", "layer": 2}).meta
    assert beyond["first"] is None
    assert {row["says"] for row in beyond["rows"]} == {f"not in {names[turned]}: it has no such layer"}
    assert f"{names[not turned]} has 3 layers" in beyond["words"][0]


@needs_browser
def test_the_layer_that_one_of_two_models_has_alone_is_gone_to(chromium: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    left = mh.models.VisionTransformer(list("abcdefghij"), 16, 2, 2)
    with serve.start(_session(left, (deeper(left),), None, {}), port=0, browser=False) as running:
        explorer = Explorer(chromium, running).open("")
        explorer.page.wait_for_selector(".compare-layers button")
        assert explorer.page.inner_text("#compare-whole") == "Every layer that both have is the same in both."
        explorer.page.locator(".compare-layers button[data-layer='2']").click()
        explorer.page.wait_for_function(
            "() => document.querySelector('#compare-says').textContent.includes('no such layer')"
        )
        assert (explorer.settle().state["model"], explorer.state["layer"]) == ("model-2", 2)
        assert explorer.page.locator("[data-figure=compare-left]").is_hidden()
        assert explorer.page.locator("[data-figure=compare-right]").is_visible()
        explorer.close()
    mh.explore(left, deeper(left), save=tmp_path / "page.html")
    saved = Explorer(chromium, type("File", (), {"url": (tmp_path / "page.html").as_uri()})).open("")
    saved.page.wait_for_selector(".compare-layers button")
    assert saved.page.locator(".compare-layers button:disabled").get_attribute("data-layer") == "2", "the file has one"
    saved.close()


def test_models_of_other_predictions_are_told_apart_in_words(layer_and_x: Any) -> None:
    torch.manual_seed(0)
    made = [mh.models.VisionTransformer(list("abcdefghij")[:c], 16, 2, 2) for c in (10, 4)]
    session = _session(made[0], (made[1],), None, {})
    asked = {"model": "model", "input": session.first["input"]}
    assert "among 10 classes" in session.answer("overview", asked).meta["predictions"]["says"]
    layer, x = layer_and_x
    nothing = _session(layer, (broken(layer),), x, {}).answer(
        "overview", {"model": "given", "input": {"kind": "given"}}
    )
    assert nothing.meta == {"layers": [], "first": None, "predictions": None}


@needs_browser
@pytest.mark.parametrize("saved", [False, True], ids=["served", "in a file"])
def test_the_page_says_which_layer_of_two_models_differs_first(
    chromium: Any,
    two_models: Any,
    tmp_path: Path,
    saved: bool,
) -> None:
    left, right = two_models
    if saved:
        mh.explore(left, right, x="I love pizza", save=tmp_path / "page.html")
        session = _session(left, (right,), "I love pizza", {})
        served = type("File", (), {"url": (tmp_path / "page.html").as_uri()})
        both = session.answer("overview", {"model": "model", "input": TEXT}).meta
        walk_through_two(Explorer(chromium, served), both)
        return
    session = _session(left, (right,), "I love pizza", {})
    with serve.start(session, port=0, browser=False) as running:
        both = session.answer("overview", {"model": "model", "input": TEXT}).meta
        walk_through_two(Explorer(chromium, running), both)


def walk_through_two(explorer: Explorer, both: dict[str, Any]) -> None:
    explorer.open("")
    page = explorer.page
    page.wait_for_selector(".compare-layers button.first")
    assert "differs first, in v" in page.inner_text("#compare-whole")
    assert "same in both" in page.inner_text("#compare-says")  # layer 0 is on the stage
    first = page.locator(".compare-layers button.first")
    assert first.get_attribute("data-layer") == "1"
    first.click()
    explorer.settle()
    page.wait_for_selector(".compare-list button[data-tensor=v].first")
    assert explorer.state["layer"] == 1
    assert page.inner_text("#compare-says").startswith("v differs")
    shown = page.locator(".compare-predictions tbody tr").first
    assert shown.locator("td").all_inner_texts() == [
        f"{100 * both['predictions']['rows'][0][side]:.1f} %" for side in ("left", "right")
    ]
    page.locator(".compare-list button[data-tensor=weights]").click()
    explorer.settle()
    page.locator("canvas[data-grid=compare-left]").focus()
    explorer.press("ArrowDown")
    assert "→ ‹start›" in page.locator("[data-figure=compare-left] .said").inner_text()
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page, options={"resultTypes": ["violations"]}).response["violations"]
    assert [(v["id"], [n["html"][:160] for n in v["nodes"][:3]]) for v in found] == []
    explorer.close()

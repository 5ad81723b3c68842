"""Two side by side: the doctor's verdict, the first tensor that differs, the same colours, and what is not exposed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

"""The widget in real notebooks: run by nbclient, in JupyterLab in a browser, and what marimo is given."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.explorer.browser import chromium, needs_browser  # noqa: F401
from tests.test_notebooks import executed

pytest.importorskip("anywidget", reason="no anywidget: the widget is not tested")
nbformat = pytest.importorskip("nbformat", reason="no nbformat: notebooks are not tested")

CELLS = [
    "import torch, multihead as mh\ntorch.manual_seed(0)\n"
    "layer, x = mh.MultiHeadAttention(32, heads=4).eval(), torch.randn(6, 32)",
    "w = mh.explore(layer, x, mask=mh.Causal(), labels='I love pepperoni pizza so much'.split())\nw",
    "mh.trace(layer, x, mask=mh.Causal())",
    "layer.look(x, mask=mh.Causal())",
    "print(w.selection.get('query_token'))",
]
WIDGET = "application/vnd.jupyter.widget-view+json"


def written(folder: Path) -> Any:
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, folder / "try.ipynb")
    return notebook


def test_cells_end_in_widgets(tmp_path: Path) -> None:
    done = executed(written(tmp_path))
    for cell in done.cells[1:4]:
        [output] = [o for o in cell.outputs if o.output_type == "execute_result"]
        assert WIDGET in output.data
        assert "data:image/png" in output.data["text/html"]
    assert done.cells[4].outputs[0].text.strip() == "None"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_for_port(page: Any, port: int) -> None:
    for _ in range(600):
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        page.wait_for_timeout(100)


def run_cell(page: Any, number: int) -> None:
    """JupyterLab forgets what is run before its kernel has answered: so until it is done."""
    from playwright.sync_api import TimeoutError

    cell = page.locator(".jp-Notebook .jp-Cell").nth(number)
    for _ in range(12):
        cell.locator(".cm-content").click()
        page.keyboard.press("Control+Enter")
        try:
            cell.locator(".jp-InputPrompt", has_text=re.compile(r"\[\d+\]")).wait_for(timeout=10_000)
            return
        except TimeoutError:
            continue
    raise AssertionError(f"cell {number} was never run")


@needs_browser
def test_jupyterlab_shows_it_and_selections_come_back(chromium: Any, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip(
        "jupyterlab", reason="no jupyterlab: the widget is not tested in it; pip install multihead[notebook]"
    )
    written(tmp_path)
    port = free_port()
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}",
        "--IdentityProvider.token=abc", f"--ServerApp.root_dir={tmp_path}", "--LabApp.news_url=None",
        "--LabApp.extension_manager=readonly",
    ]  # fmt: skip
    env = {**os.environ, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        lab = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    page = chromium.new_page(viewport={"width": 1400, "height": 1000})
    left: list[str] = []
    page.on(
        "request",
        lambda r: (
            left.append(r.url) if not r.url.startswith(("http://127.0.0.1", "blob:", "data:", "about:")) else None
        ),
    )
    try:
        wait_for_port(page, port)
        page.goto(f"http://127.0.0.1:{port}/doc/tree/try.ipynb?token=abc")
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=120_000)
        for number in (0, 1):
            run_cell(page, number)
        frame = page.frame_locator("iframe[title='multihead explorer']").first
        frame.locator(".strip button[aria-current]").wait_for(timeout=120_000)
        assert frame.locator(".token").nth(3).inner_text() == "pizza"
        frame.locator(".token").nth(3).click()
        frame.locator(".token[aria-pressed=true]").wait_for()
        run_cell(page, 4)
        page.wait_for_selector(".jp-OutputArea-output pre:has-text('pizza')", timeout=60_000)
        for number, shown in ((2, ".strip button[aria-current]"), (3, ".map:not([hidden])")):  # a trace, a lens
            run_cell(page, number)
            bare = page.locator(".jp-Notebook .jp-Cell").nth(number).frame_locator("iframe[title='multihead explorer']")
            bare.locator(shown).wait_for(timeout=120_000)
        assert [url for url in left if "jupyter" not in url] == []
    finally:
        page.close()
        lab.terminate()
        lab.wait(30)


MARIMO = """import marimo

app = marimo.App()


@app.cell
def _():
    import pathlib
    import torch, multihead as mh

    layer, x = mh.MultiHeadAttention(32, heads=4).eval(), torch.randn(6, 32)
    w = mh.explore(layer, x, mask=mh.Causal(), labels="I love pepperoni pizza so much".split())
    w.observe(lambda change: pathlib.Path("chosen").write_text(str(change["new"].get("query_token"))), names="selection")
    w
    return layer, mh, x


@app.cell
def _(layer, mh, x):
    mh.trace(layer, x, mask=mh.Causal())
    return


@app.cell
def _(layer, mh, x):
    layer.look(x, mask=mh.Causal())
    return
"""


@needs_browser
def test_marimo_shows_it_and_selections_come_back(chromium: Any, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("marimo", reason="no marimo: the widget is not tested in it; pip install multihead[notebook]")
    (tmp_path / "try.py").write_text(MARIMO)
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "marimo",
        "run",
        "--headless",
        "--no-token",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "try.py",
    ]
    env = {**os.environ, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        served = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT)
    page = chromium.new_page(viewport={"width": 1300, "height": 1000})
    try:
        wait_for_port(page, port)
        page.goto(f"http://127.0.0.1:{port}/")
        frames = page.frame_locator("iframe[title='multihead explorer']")
        for number, shown in enumerate(
            (".strip button[aria-current]", ".strip button[aria-current]", ".map:not([hidden])")
        ):
            frames.nth(number).locator(shown).wait_for(timeout=120_000)
        frames.first.locator(".token").nth(3).click()
        frames.first.locator(".token[aria-pressed=true]").wait_for()
        assert frames.nth(1).locator(".token[aria-pressed=true]").count() == 0  # each widget is one of its own
        chosen = tmp_path / "chosen"
        for _ in range(600):
            if chosen.exists() and chosen.read_text() == "pizza":
                break
            page.wait_for_timeout(50)
        assert chosen.read_text() == "pizza"
    finally:
        page.close()
        served.terminate()
        served.wait(30)

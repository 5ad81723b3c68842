"""Numbers as files: CSV and npz of any tensor on the screen, read by Python and compared with `mh.trace`."""

import csv
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

import multihead as mh
from tests.explorer.browser import Explorer, chromium, explorer, needs_browser, server  # noqa: F401
from tests.explorer.test_page_modules import HERE, needs_node

TEXT = "I love pepperoni pizza"


@needs_node
def test_numpy_reads_what_the_page_writes(tmp_path: Path) -> None:
    file = tmp_path / "some.npz"
    env = {"MULTIHEAD_NPZ": str(file), "PATH": os.environ["PATH"]}
    command = [
        "node",
        "--experimental-default-type=module",
        "--no-warnings",
        "--test",
        str(HERE / "js/numbers.test.mjs"),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    with np.load(file) as found:
        assert set(found) == {"weights", "x.y", "allowed", "none", "exact"}
        wanted = np.array([1, 2, 3, -np.inf, np.nan, 1e-38], np.float32).reshape(2, 1, 3)
        np.testing.assert_array_equal(found["weights"], wanted)
        assert found["weights"].dtype == np.float32
        assert found["x.y"].tolist() == [-1, 7]
        assert found["allowed"].tolist() == [[0, 1]]
        assert found["none"].shape == (0, 4)
        assert found["exact"].shape == ()
        assert float(found["exact"]) == np.pi


@needs_browser
def test_any_tensor_is_saved_as_csv_and_as_npz(explorer: Explorer, tmp_path: Path) -> None:
    lm: Any = mh.models.load("lm")
    trace = lm.trace(torch.tensor([lm.tokenizer.begin(TEXT)]), layer=1)
    explorer.open("model=lm&layer=1&step=3&head=3")
    page = explorer.page
    page.get_by_role("button", name="Show masked as a table").click()
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save as CSV").click()
    assert saved.value.suggested_filename == "masked_8x12x12_head-3.csv"
    rows = list(csv.reader(Path(saved.value.path()).read_text(encoding="utf-8").splitlines()))
    numbers = torch.tensor([[float(cell) for cell in row[1:]] for row in rows[1:]])
    torch.testing.assert_close(numbers, trace["masked"][3], rtol=1e-5, atol=1e-6)
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save as npz").click()
    assert saved.value.suggested_filename == "masked_8x12x12.npz"
    with np.load(saved.value.path()) as found:
        torch.testing.assert_close(torch.from_numpy(found["masked"]), trace["masked"], rtol=1e-5, atol=1e-6)
    explorer.press("Escape")
    page.get_by_role("button", name="Share").click()
    with page.expect_download() as saved:
        page.get_by_role("button", name="All numbers as npz").click()
    assert saved.value.suggested_filename == "lm_8x12x12_layer-1.npz"
    with np.load(saved.value.path()) as found:
        for name in ("x", "q", "k_heads", "scores", "weights", "heads", "merged", "output"):
            torch.testing.assert_close(torch.from_numpy(found[name]), trace[name], rtol=1e-4, atol=1e-5)
        assert found["w_o"].shape == tuple(lm.layers[1].attention.w_o.shape)

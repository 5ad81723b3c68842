"""The notebooks of examples/ run from top to bottom, and are kept without what they put out."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def executed(notebook: Any, **options: Any) -> Any:
    """The notebook, run. Its kernel has ended then: on a busy machine nbclient does not wait for that to the last."""
    nbclient = pytest.importorskip("nbclient", reason="notebooks run with nbclient and ipykernel")
    pytest.importorskip("ipykernel")
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", **options)
    kernels: list[subprocess.Popen] = []
    client.on_notebook_start = lambda notebook: kernels.append(client.km.provisioner.process)
    done = client.execute()
    for kernel in kernels:
        kernel.wait(60)
    return done


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    notebook = executed(nbformat.read(path, as_version=4), resources={"metadata": {"path": EXAMPLES}})
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            assert output.get("name") != "stderr", output["text"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stripped(path: Path) -> None:
    for cell in json.loads(path.read_text())["cells"]:
        assert cell.get("execution_count") is None
        assert not cell.get("outputs")

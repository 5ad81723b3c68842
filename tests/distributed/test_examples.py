"""Every command of docs/distributed.md runs as it is written, and so do its first lines."""

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, get_args_parser

import multihead as mh
from tests.distributed import pool

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "distributed.md").read_text()


COMMANDS = [line for line in DOCS.splitlines() if line.startswith("torchrun ")]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command.split()[3:]))
def test_the_commands_run_as_they_are_written(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun reads and launches them, in ranks that come out of the pool's server, where torch is imported."""
    words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *shlex.split(command)[1:]]
    config, python, script = config_from_args(get_args_parser().parse_args(words))
    assert python == sys.executable
    config.start_method = pool.context.get_start_method()
    monkeypatch.chdir(ROOT)
    elastic_launch(config, run_script)(*script[script.index("-u") + 1 :])


@record
def run_script(path: str, *arguments: str) -> None:
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


def test_there_are_commands_in_the_docs() -> None:
    assert len(COMMANDS) == 4


def test_ten_lines_run_as_they_are_written(tmp_path: Path) -> None:
    ten = re.search(r"```python\n(.*?)```", DOCS, re.DOTALL)
    assert ten is not None
    (tmp_path / "ten.py").write_text(ten[1])
    assert len([line for line in ten[1].strip().splitlines() if line]) == 10
    words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--nproc-per-node", "2", "ten.py"]
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    off = [float(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines() if "off by" in line]
    assert len(off) == 2
    assert max(off) <= at_most()


def at_most() -> float:
    """How far two computations within the error bound may be from each other: plain's own error, and twice it."""
    torch.manual_seed(0)
    layer, x = mh.MultiHeadAttention(256, heads=8, rope=True), torch.randn(1, 1009, 256)
    with torch.no_grad(), mh.backend("reference"):
        plain = layer(x, mask=mh.Causal())
        exact = layer.double()(x.double(), mask=mh.Causal())
    eps = torch.finfo(torch.float32).eps
    return float(3 * (plain - exact).abs().max() + eps * exact.abs().max())

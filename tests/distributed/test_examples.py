"""Every command of docs/distributed.md runs as it is written, and so do its first lines."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import torch

import multihead as mh

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "distributed.md").read_text()


def test_the_docs_run_as_they_are_written(tmp_path: Path) -> None:
    ten = re.search(r"```python\n(.*?)```", DOCS, re.DOTALL)
    assert ten is not None
    (tmp_path / "ten.py").write_text(ten[1])
    assert len([line for line in ten[1].strip().splitlines() if line]) == 10
    commands = [line for line in DOCS.splitlines() if line.startswith("torchrun ")]
    assert len(commands) == 4
    commands.append(f"torchrun --nproc-per-node 2 {tmp_path}/ten.py")
    said = []
    for two in (commands[:2], commands[2:4], commands[4:]):  # two at a time: each is two processes
        running = [start(command) for command in two]
        said += [process.communicate(timeout=150) for process in running]
        for command, process in zip(two, running):
            assert process.returncode == 0, f"{command}\n{said[-1][1]}"
    *_, ten_said = (out for out, _ in said)
    off = [float(line.rsplit(" ", 1)[1]) for line in ten_said.splitlines() if "off by" in line]
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


def start(command: str) -> subprocess.Popen:
    arguments = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
    ]
    arguments += shlex.split(command)[1:]
    return subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

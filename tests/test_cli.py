"""The command line, as a user meets it: in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import multihead as mh
from multihead import kernel
from multihead.sizes import Sizes
from tests.forks import run


def afresh(*arguments: str) -> subprocess.CompletedProcess:
    """As a shell starts it; other commands are forks, of a process that has loaded torch."""
    return subprocess.run(
        [sys.executable, "-m", "multihead", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"COLUMNS": "100"},
    )


def test_show_prints_the_running_example() -> None:
    shown = afresh("show", "I love pepperoni pizza", "--example", "--mask", "causal")
    assert shown.returncode == 0, shown.stderr
    for part in (
        "4 items of width 1024, 8 heads of width 128",
        "(4, 1024) → (4, 8, 128)",
        "(4, 8, 128) → (8, 4, 128)",
        "(8, 4, 128) → (8, 4, 4)",
        "7 output",
        "“I love pepperoni”",
        "head 7",
    ):
        assert part in shown.stdout
    assert shown.stdout == run("show", "--example").stdout, "the same sentence gives the same numbers"


def test_show_takes_sizes_and_masks() -> None:
    shown = run(
        "show", "to be or not to be", "--example", "--tokens", "3", "--width", "32", "--heads", "2", "--mask", "none"
    )
    assert "3 items of width 32, 2 heads of width 16" in shown.stdout
    assert "no mask" in shown.stdout


def test_words_in_brackets_are_words() -> None:
    shown = run("show", "[bold] love [/nope]", "--example", "--width", "16", "--heads", "2")
    assert shown.returncode == 0
    assert "love  [/nope]" in shown.stdout  # the columns of the scores


def test_shapes_reproduces_the_running_example() -> None:
    shown = run("shapes", "1024", "8", "--tokens", "4").stdout
    lines = {line.split()[-1 if "(" not in line else 0]: line for line in shown.splitlines()}
    assert lines
    for name, shape in {
        "W_q": "(1024, 8, 128)", "q": "(4, 8, 128)", "q_heads": "(8, 4, 128)", "scores": "(8, 4, 4)",
        "heads": "(8, 4, 128)", "transposed": "(4, 8, 128)", "merged": "(4, 1024)", "W_o": "(8, 128, 1024)", "output": "(4, 1024)",
    }.items():  # fmt: skip
        assert any(f" {name} " in f" {line} " and shape in line for line in shown.splitlines()), name
    assert "4,198,400" in shown


@pytest.mark.parametrize("options", [{}, {"kv_heads": 3, "head_dim": 10, "value_dim": 7, "context_dim": 50}])
def test_shapes_are_those_of_a_real_layer(options: dict) -> None:
    sizes = Sizes.of(48, 6, **options)
    layer = mh.MultiHeadAttention(48, 6, **options)
    rows = list(sizes.shapes(5, 9))
    assert sum(row.parameters for row in rows) == sum(p.numel() for p in layer.parameters())
    trace = mh.trace(layer, torch.randn(5, 48), torch.randn(9, sizes.C))
    for row in rows:
        if not row.parameters:
            assert tuple(trace[row.name].shape) == row.shape, row.name
        elif row.name.startswith("W"):
            assert tuple(getattr(layer, row.name.lower()).shape) == row.shape
    with FlopCounterMode(display=False) as counter, mh.backend("reference"):
        layer(torch.randn(1, 5, 48), torch.randn(1, 9, sizes.C))
    assert counter.get_total_flops() == sum(row.flops for row in rows)


def test_info_says_what_is_there() -> None:
    told = run("info").stdout
    assert kernel.module is None or "whole layer" in told
    for part in (
        f"multihead      {mh.__version__}",
        "native module",
        "cpu",
        "native → sdpa → flex → reference",
        "softcap",
        "mh.explain",
    ):
        assert part in told


@pytest.mark.skipif(kernel.module is None, reason=f"the native module is {kernel.missing}")
@pytest.mark.parametrize("isa", [] if kernel.module is None else kernel.module.instruction_sets())
def test_info_says_how_half_precision_is_multiplied(isa: str) -> None:
    told = run("info", MULTIHEAD_ISA=isa, COLUMNS="200", NO_COLOR="1").stdout
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in told.splitlines() if line.split()}
    assert rows["bf16"] == f"{isa}, {'in pairs' if isa.endswith('_bf16') else 'as float32'}"
    assert rows["fp16"] == f"{isa}, as float32"


@pytest.mark.skipif(kernel.module is None, reason=f"the native module is {kernel.missing}")
def test_an_unknown_instruction_set_is_named_and_the_rest_is_told() -> None:
    told = run("info", MULTIHEAD_ISA="bogus", COLUMNS="200", NO_COLOR="1")
    message = "MULTIHEAD_ISA=bogus: instruction set 'bogus' is unknown: this machine has portable"
    assert told.returncode == 2
    assert message in told.stderr
    assert "Traceback" not in told.stderr
    for part in (message, "cpu features", "accelerator", "native → sdpa → flex → reference"):
        assert part in told.stdout
    shown = run("show", "--example", MULTIHEAD_ISA="bogus", COLUMNS="200", NO_COLOR="1")
    assert shown.returncode == 2
    assert message in shown.stderr


CALLS = {
    "attend": "mh.attend(q, q, q)",
    "attend with gradients": "mh.attend(q.requires_grad_(), q, q)",
    "explain": "mh.explain(q, q, q)",
    "layer": "mh.MultiHeadAttention(8, heads=2).requires_grad_(False)(torch.randn(3, 8))",
    "lens": "mh.look(q, q).entropy()",
    "nn": "mh.nn.MultiheadAttention(8, 2).eval()(x, x, x)",
}


@pytest.mark.skipif(kernel.module is None, reason=f"the native module is {kernel.missing}")
def test_an_unknown_instruction_set_is_an_error_of_every_call() -> None:
    script = f"""
import torch, multihead as mh, multihead.nn
for name, call in {CALLS!r}.items():
    q, x = torch.randn(1, 2, 3, 4), torch.randn(1, 3, 8)
    try:
        eval(call)
    except ValueError as error:
        assert "MULTIHEAD_ISA=bogus: instruction set 'bogus' is unknown: this machine has portable" in str(error), (name, error)
    else:
        raise AssertionError(name)
"""
    environment = os.environ | {"MULTIHEAD_ISA": "bogus"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr


def test_help_and_version() -> None:
    for arguments in (["--help"], ["show", "--help"], ["shapes", "-h"], ["train", "--help"], ["info", "--help"]):
        helped = afresh(*arguments)
        assert helped.returncode == 0
        assert "Usage" in helped.stdout
    assert afresh("--version").stdout == f"multihead {mh.__version__}\n"


BAD = [
    (["shapes", "1000", "7"], "H=7 does not divide E=1000: give --head-dim=, or"),
    (["shapes", "12", "6", "--kv-heads", "4"], "--kv-heads=4 does not divide H=6"),
    (["shapes", "0", "6"], "E=0: expected at least 1"),
    (["show", "--example", "--heads", "7"], "--heads=7 does not divide E=1024: give --head-dim=, or"),
    (["show", "--example", "--width", "100000000"], "Invalid value for '--width'"),
    (["show", "--example", "--seed", "99999999999999999999"], "Invalid value for '--seed'"),
    (["show", "--example", "  "], "the text is empty"),
    (["show", "two words", "--example", "--tokens", "3"], "--tokens=3: the text has only 2 words"),
    (["show", "--mask", "diagonal"], "'diagonal' is not one of"),
    (["doctor", "a.py:A", "--width", "8", "--heads", "2", "--seed", "-1"], "Invalid value for '--seed'"),
    (["shapes", "wide", "8"], "Invalid value for 'E'"),
    (["paint"], "No such command 'paint'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_a_mistake_gets_a_sentence_and_status_2(arguments: list[str], message: str) -> None:
    failed = run(*arguments, NO_COLOR="1", COLUMNS="200")
    assert failed.returncode == 2
    assert message in failed.stderr
    assert "Traceback" not in failed.stderr


def test_what_does_not_end_is_not_run_again_to_be_shown(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("def f(q, k, v, mask=None):\n    while True:\n        pass\n")
    target = f"{tmp_path / 'endless.py'}:f"
    told = run("doctor", target, "--width", "8", "--heads", "2", "--timeout", "3", "--explore")
    assert told.returncode == 2
    assert "--explore: there is nothing to show: It does not come to an end." in told.stderr

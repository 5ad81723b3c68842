"""The report, in the terminal, as a page and as JSON; and the command line around it."""

import json
import re
import sys
import textwrap

import pytest
import torch

import multihead as mh
from multihead.doctor import progress
from multihead.doctor.causes import KNOWN
from multihead.doctor.load import NotLoaded, load
from multihead.doctor.run import candidate_report
from tests.doctor.planted import Einsum
from tests.doctor.test_planted import layer_of
from tests.forks import run

BROKEN = """
    import math
    import torch
    from torch import nn


    class MyAttention(nn.Module):
        def __init__(self, d_model, num_heads, dropout):
            super().__init__()
            self.num_heads = num_heads
            self.qkv = nn.Linear(d_model, 3 * d_model)
            self.proj = nn.Linear(d_model, d_model)

        def divisor(self, E):
            return math.sqrt(E)

        def forward(self, x):
            B, N, E = x.shape
            q, k, v = self.qkv(x).view(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
            scores = q @ k.transpose(-2, -1) / self.divisor(E)
            scores = scores.masked_fill(torch.ones(N, N).triu(1).bool(), -1e9)
            return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, N, E))


    class Right(MyAttention):
        def divisor(self, E):
            return math.sqrt(E // self.num_heads)


    class Endless(Right):
        def forward(self, x):
            while True:
                x = x + 0


    class Deadly(Right):
        def forward(self, x):
            import os

            print("goodbye")
            os.abort()


    class Swapped(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(dim, dim) for _ in range(4))

        def forward(self, x):
            q, k, v = (p(x).unflatten(-1, (4, -1)).transpose(1, 2) for p in (self.a, self.b, self.c))
            return self.d(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


    def core(q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / q.shape[-1]
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        return scores.softmax(-1) @ v


    def whole(x, W_q, W_k, W_v, W_o, num_heads):
        B, N, E = x.shape
        q, k, v = ((x @ w).view(B, N, num_heads, -1).transpose(1, 2) for w in (W_q, W_k, W_v))
        weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
        return (weights @ v).reshape(B, N, E) @ W_o
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "attention.py"
    path.write_text(textwrap.dedent(BROKEN))
    return path


@pytest.fixture
def report():
    layer = layer_of(32, 4)
    return mh.diagnose(Einsum(layer, "scale missing"), layer, torch.randn(2, 5, 32))


def test_what_is_printed(report):
    text = str(report)
    for part in ("DIAGNOSED", "step 3, score: scale missing", "math.sqrt(D)", "with this mistake", "certain"):
        assert part in text
    assert "\x1b" not in text


def test_the_evidence_is_yours_right_and_the_hypothesis(report):
    assert len(report.evidence) == 4
    for row in report.evidence:
        assert abs(row.yours - row.hypothesis) < 1e-4 < abs(row.yours - row.right)


def test_json_comes_back_as_it_was(report):
    found = json.loads(report.json())
    assert (found["verdict"], found["step"], found["cause"]) == ("diagnosed", 3, "scale missing")
    assert mh.Report.from_json(report.json()) == report


def test_nan_survives_json():
    layer = layer_of(32, 4)
    candidate = Einsum(layer, "causal mask off by one, strict", "causal")
    report = mh.diagnose(candidate, layer, torch.randn(2, 5, 32), mask=mh.Causal())
    assert "NaN" not in report.json()
    assert repr(mh.Report.from_json(report.json())) == repr(report)


def test_the_page_stands_alone(report, tmp_path):
    page = report.html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page
    assert "<script" not in page
    assert "http" not in page
    assert "scale missing" in page


def test_every_cause_is_explained_and_mended():
    names = [cause.name for cause in KNOWN]
    assert len(set(names)) == len(names)
    for cause in KNOWN:
        assert 1 <= cause.step <= 7
        assert len(cause.explanation) > 60
        assert cause.fix


# The command line -----------------------------------------------------------------------------------------------------

SIZES = ("--width", "32", "--heads", "4")


def test_a_broken_file(file, tmp_path):
    page = tmp_path / "page.html"
    done = run("doctor", f"{file}:MyAttention", *SIZES, "--mask", "causal", "--html", str(page))
    assert done.returncode == 1, done.stderr
    assert "Scale by √E instead of √D (step 3)" in done.stdout
    assert "Scale by √E" in page.read_text(encoding="utf-8")


ASKED = {"width": 32, "heads": 4, "tokens": 6, "batch": 2, "context": None, "mask": "none", "kv_heads": None,
         "head_dim": None, "rope": None, "rope_base": 1e4, "softcap": None, "scale": None, "dtype": "float32", "seed": 0,
         "weights": None, "layout": None}  # fmt: skip


@pytest.fixture
def clean(monkeypatch, tmp_path):
    """What loading a file leaves in the interpreter goes away again.

    `sys.modules` itself stays: the interpreter imports into its own dictionary, whatever that name is set to.
    """
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_call_written_out(file, clean, dtype):
    target = f"{file}:Right(32, 4, dropout=0.0)"
    report = candidate_report(ASKED | {"target": target, "mask": "causal", "dtype": dtype})
    assert report.verdict == "healthy", report


def test_padding_and_cross_attention(file, clean):
    target = f"{file}:nn.MultiheadAttention(32, 4, batch_first=True)"
    assert candidate_report(ASKED | {"target": target, "mask": "padding"}).verdict == "healthy"
    assert candidate_report(ASKED | {"target": target, "context": 9}).verdict == "healthy"


def test_a_map_of_weights(file, clean, tmp_path):
    names = tmp_path / "map.toml"
    names.write_text('q = "b.weight"\nk = "a.weight"\nv = "c.weight"\n[o]\nweight = "d.weight"\nbias = "d.bias"\n')
    asked = ASKED | {"target": f"{file}:Swapped", "weights": str(names)}
    assert candidate_report(asked).cause == "q and k swapped"
    names.write_text('q = "nowhere"')
    with pytest.raises(ValueError, match="nowhere"):
        candidate_report(asked)


WRONG = [
    ("{file}:Nobody", "attention.py has no Nobody: it has MyAttention"),
    ("{file}", "expected FILE.py:NAME"),
    ("{file}.missing:X", "there is no such file"),
    ("{folder}:X", "is a folder: expected FILE.py"),
    ("{file}:nn.Linear(3)", "cannot be made"),
    ("{file}:nn", "expected a class, a module or a function"),
    ("{folder}/syntax.py:f", "syntax.py, line 1"),
    ("{folder}/import.py:f", "cannot be imported: ZeroDivisionError"),
    ("{folder}/needy.py:Needy", "needs config"),
]


@pytest.mark.parametrize(("target", "said"), WRONG)
def test_what_cannot_be_loaded(file, clean, target, said):
    (file.parent / "syntax.py").write_text("def f(x:\n")
    (file.parent / "import.py").write_text("1 / 0\n")
    (file.parent / "needy.py").write_text("class Needy:\n    def __init__(self, config): ...\n")
    with pytest.raises(NotLoaded, match=re.escape(said)):
        load(target.format(file=file, folder=file.parent), 32, 4, 6, None, None)


def test_functions_get_weights_or_projections_around_them(file, clean):
    core, whole = (load(f"{file}:{name}", 32, 4, 6, None, None) for name in ("core", "whole"))
    assert mh.diagnose(core, None, torch.randn(2, 5, 32), mask=mh.Causal(), heads=4).cause == "scale by D instead of √D"
    assert mh.diagnose(whole, None, torch.randn(2, 5, 32), heads=4).cause == "heads merged without transposing back"


def test_a_file_that_cannot_be_loaded_is_a_finding(tmp_path):
    done = run("doctor", f"{tmp_path}/nothing.py:X", *SIZES, "--json")
    assert done.returncode == 2
    found = json.loads(done.stdout)
    assert found["verdict"] == "unknown"
    assert "there is no such file" in found["where"][0]


def test_an_endless_loop_is_stopped_and_its_line_told(file):
    done = run("doctor", f"{file}:Endless", *SIZES, "--timeout", "3")
    assert done.returncode == 2
    said = " ".join(done.stdout.split())
    assert "It does not come to an end." in said
    assert "still running after 3 seconds" in said
    assert "in forward" in said


def test_a_crash_is_survived(file):
    done = run("doctor", f"{file}:Deadly", *SIZES)
    assert done.returncode == 2
    assert "It takes the whole process down." in done.stdout
    assert "SIGABRT" in done.stdout


def test_a_progress_bar_shows_itself_only_when_it_is_worth_it(monkeypatch):
    for patience, wanted, shown in ((-1, True, True), (-1, False, False), (1000, True, False)):
        monkeypatch.setattr(progress, "PATIENCE", patience)
        with progress.Bar(wanted) as bar:
            bar(1, 2)
            assert (bar.progress is not None) == shown

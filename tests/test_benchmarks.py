"""The benchmarks refuse what is wrong, ask every peer the same question, and report what they found.

Ours is played by the oracle in float32, so that these tests are about the harness alone.

Longer than other files because the harness is tried as a whole, with one stand-in for the kernel.
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from multihead.bench import cli, generating, generation, machine, measure, oracle, ours, report, runner
from multihead.bench.cases import (
    BY_HAND,
    CAUSAL,
    FLEX,
    FULL,
    HF_EAGER,
    HF_SDPA,
    HF_STATIC,
    LAYER_PEERS,
    OURS_FP32,
    PER_DOCUMENT,
    SDPA,
    ZENTORCH,
    Attend,
    Layer,
    Lens,
    Mask,
    Model,
    Train,
)
from multihead.bench.ceilings import Ceilings, working_set
from multihead.bench.generation import Step, Whole
from multihead.bench.neighbours import neighbours
from multihead.bench.peers import runtimes, sdpa
from multihead.bench.problems import problem_of
from multihead.bench.table import CASES, select

MASKS = [FULL, CAUSAL, Mask(causal=True, window=3), Mask(documents=(2, 5, 4)), Mask(causal=True, documents=(2, 5, 4))]
TINY = Attend(1, 2, 2, 5, 7, 3, CAUSAL, "all sizes distinct")
SLOW = (FLEX, ZENTORCH)  # to start: one compiles, the other loads a torch of its own
STEADY = [1.0] * 100


def run_tiny(**options):
    return runner.run_case(TINY, threads=1, seconds=0.01, skipped=SLOW, **options)


@pytest.fixture
def stand_in(monkeypatch):
    """The package's surface, as far as the benchmarks use it, on the oracle; `wrong` spoils what it computes."""

    class StandInLayer(torch.nn.Module):
        def __init__(self, E, heads):
            super().__init__()
            self.heads = heads
            for n in "qkvo":
                self.add_module(f"{n}_proj", torch.nn.Linear(E, E))

        def forward(self, x, mask=None):
            w = {f"{p[0]}_{n}": getattr(self.get_submodule(f"{n}_proj"), p) for n in "qkvo" for p in ("weight", "bias")}
            return oracle.layer(x, w, SimpleNamespace(H=self.heads, mask=mask or FULL), torch.float32)

    package = SimpleNamespace(
        wrong=lambda out: out,
        attend=lambda q, k, v, mask=None: package.wrong(oracle.attend(q, k, v, mask or FULL, torch.float32)),
        explain=lambda q, k, v, mask=None: SimpleNamespace(backend="oracle"),
        Causal=lambda window=None: Mask(causal=True, window=window),
        Documents=lambda lengths: Mask(documents=tuple(lengths)),
        MultiHeadAttention=StandInLayer,
    )
    monkeypatch.setattr(ours, "mh", package)
    return package


# Right results only


@pytest.mark.parametrize(
    "case",
    [
        TINY,
        Attend(2, 3, 3, 5, 5, 7, CAUSAL, "causal, as many queries as keys"),
        Attend(1, 2, 2, 11, 11, 3, Mask(causal=True, window=4), "window"),
        Attend(1, 2, 2, 11, 11, 3, Mask(documents=(2, 5, 4)), "documents"),
        Attend(1, 2, 2, 11, 11, 3, Mask(causal=True, documents=(2, 5, 4)), "causal documents"),
        Attend(2, 6, 2, 1, 13, 5, FULL, "decode, grouped"),
    ],
    ids=lambda case: case.why,
)
def test_every_way_of_asking_torch_gives_the_oracles_answer(case):
    check_peers(problem_of(case, threads=1), skipped=SLOW)


def check_peers(problem, skipped=()):
    for name in problem.case.peers:
        if name not in skipped:
            peer = problem.peer(name)
            try:
                oracle.check(name, peer.result(), problem.exact, problem.bound * oracle.PEER_ALLOWANCE)
                assert peer.seconds(1) > 0
            finally:
                peer.close()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "case",
    [
        Attend(2, 3, 3, 5, 5, 7, CAUSAL, "causal"),
        Attend(1, 2, 2, 11, 11, 3, Mask(causal=True, documents=(2, 5, 4)), "documents"),
        Attend(2, 6, 2, 1, 13, 5, FULL, "decode, grouped"),
        Train(2, 6, 3, 7, 7, 5, CAUSAL, "training, grouped"),
        Train(1, 2, 2, 11, 11, 3, FULL, "training"),
        Layer(2, 5, 24, 3, CAUSAL, "layer"),
        Lens("statistics", 2, 3, 37, 5, CAUSAL, "lens"),
    ],
    ids=lambda case: case.why,
)
def test_every_kind_of_case_is_right_in_every_dtype(case, dtype):
    problem = problem_of(replace(case, dtype=dtype), threads=1)
    assert problem.ours().result().dtype != torch.float64
    oracle.check("ours", problem.ours().result(), problem.exact, problem.bound)
    check_peers(problem, skipped=(*SLOW, *runtimes.MODULES))
    assert (OURS_FP32 in problem.case.peers) == (dtype != "fp32" and case.why != "lens")
    with pytest.raises(oracle.WrongResult):
        oracle.check("a wrong one", problem.ours().result() * 1.5, problem.exact, problem.bound)


def test_torchs_flex_attention_gives_the_oracles_answer():
    problem = problem_of(Attend(1, 2, 2, 40, 40, 16, Mask(causal=True, window=9), "", dtype="bf16"), threads=1)
    peer = problem.peer(FLEX)
    oracle.check(FLEX, peer.result(), problem.exact, problem.bound * oracle.PEER_ALLOWANCE)


@pytest.mark.parametrize(
    "case",
    [Attend(1, 4, 2, 7, 13, 8, CAUSAL, "", dtype="bf16"), Layer(2, 5, 24, 3, CAUSAL, "", dtype="bf16")],
    ids=["attend", "layer"],
)
def test_zentorch_gives_the_oracles_answer_in_a_process_of_its_own(case):
    if importlib.util.find_spec("zentorch") is None:
        pytest.skip("zentorch is not installed")
    problem = problem_of(case, threads=1)
    check_peers(problem, skipped=[name for name in case.peers if name != ZENTORCH])
    assert "zentorch" not in sys.modules


@pytest.mark.parametrize(
    ("flags", "code", "again"),
    [(["avx512f"], -4, False), (["amx_tile"], 0, False), (["amx_tile"], -4, True)],
    ids=["no AMX", "AMX that works", "AMX that dies"],
)
def test_onednn_is_limited_where_its_products_die_and_before_torch_is_loaded(monkeypatch, flags, code, again):
    started = []
    monkeypatch.delenv(machine.LIMIT, raising=False)
    monkeypatch.setattr(machine, "cpu", lambda: ("a CPU", flags))
    monkeypatch.setattr(machine.subprocess, "run", lambda *command, **options: SimpleNamespace(returncode=code))
    monkeypatch.setattr(machine.os, "execv", lambda path, command: started.append(machine.os.environ[machine.LIMIT]))
    machine.limit_onednn()
    assert started == (["AVX512_CORE_FP16"] if again else [])
    monkeypatch.delenv(machine.LIMIT, raising=False)


@pytest.mark.parametrize("mask", MASKS[:3], ids=lambda mask: mask.label)
@pytest.mark.parametrize("what", ["statistics", "rows", "map"])
def test_a_lens_and_a_peer_that_keeps_the_weights_give_the_oracles_answer(what, mask):
    problem = problem_of(Lens(what, 2, 3, 37, 5, mask, ""), threads=1)
    oracle.check("ours", problem.ours().result(), problem.exact, problem.bound)
    for name in problem.case.peers:  # held to what the runner holds them to: torch's rounding differs by CPU
        oracle.check(name, problem.peer(name).result(), problem.exact, problem.bound * oracle.PEER_ALLOWANCE)


def test_what_takes_minutes_runs_only_by_name():
    assert not any("lens" in case.name and "32768" in case.name for case in select())
    assert not any("360M" in case.name for case in select())
    assert len(select(["lens-map/1x8x32768"])) == 1


@pytest.mark.parametrize("attentions", [False, True])
@pytest.mark.parametrize(("kind", "N"), [("ViT", 197), ("BERT", 7), ("Llama", 7)])
def test_a_model_gives_the_same_on_every_attention(kind, N, attentions):
    pytest.importorskip("transformers")
    case = Model(kind, "test", 2, N, 24, 4, 2 if kind == "Llama" else 4, 40, 2, "", attentions)
    problem = problem_of(case, threads=1)
    for contender in (problem.ours(), *(problem.peer(name) for name in case.peers)):
        oracle.check(contender.name, contender.result(), problem.exact, problem.bound)
    shown = problem.ours().run().attentions
    assert (shown is not None and shown[1].shape == (2, 4, N, N)) == attentions
    matrices = [p for name, p in problem.model.named_parameters() if "layer" in name and p.dim() == 2]
    assert sum(p.numel() for p in matrices) == case.matrices
    with pytest.raises(oracle.WrongResult):
        oracle.check("a wrong one", problem.ours().result() * 1.001, problem.exact, problem.bound)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("cached", [0, 11])
def test_a_model_in_half_precision_and_with_a_cache_gives_the_same_in_every_call(cached, dtype):
    pytest.importorskip("transformers")
    problem = problem_of(Model("Llama", "test", 2, 1, 24, 4, 2, 40, 2, "", dtype=dtype, cached=cached), threads=1)
    contender = problem.ours()
    first, second = contender.result(), contender.result()
    oracle.check("ours", first, problem.exact, problem.bound)
    assert torch.equal(first, second)
    assert first.dtype == problem.case.type
    check_peers(problem)


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=lambda mask: mask.label)
@pytest.mark.parametrize("name", LAYER_PEERS[:-1])
def test_every_layer_peer_computes_the_same_layer(name, mask):
    for module in ("onnx", runtimes.MODULES[name]) if name in runtimes.MODULES else ():
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    problem = problem_of(Layer(2, 5, 24, 3, mask, ""), threads=1)
    peer = problem.peer(name)
    try:
        oracle.check(name, peer.result(), problem.exact, problem.bound)
        assert peer.seconds(2) > 0
        assert peer.name == name
    finally:
        peer.close()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda out: out + 1e-3, "off by 0.001"),
        (lambda out: out * torch.nan, "off by nan"),
        (lambda out: out[:, :1], "expected (1, 2, 5, 3)"),
    ],
    ids=["error", "NaN", "shape"],
)
def test_a_wrong_result_of_ours_is_refused_not_timed(stand_in, spoil, words):
    stand_in.wrong = spoil
    outcome = run_tiny()
    assert words in outcome.refused
    assert outcome.noise is None
    assert [peer.comparison for peer in outcome.peers] == [None] * 3


def test_a_wrong_result_of_a_peer_is_refused_not_timed(stand_in, monkeypatch):
    monkeypatch.setitem(sdpa.BUILDERS, SDPA, lambda case, q, k, v: measure.Local(SDPA, lambda: torch.zeros_like(q)))
    peer = run_tiny().peers[0]
    assert peer.comparison is None
    assert "is off by" in peer.reason


def test_a_hopelessly_slow_peer_is_named_with_its_time_not_timed(stand_in, monkeypatch):
    monkeypatch.setattr(runner, "TOO_SLOW", 0)
    monkeypatch.setattr(runner, "HOPELESS", 0)
    peer = run_tiny().peers[0]
    assert peer.comparison is None
    assert "its first call took" in peer.reason


def off_by(case, q, k, v, factor):
    """A peer whose largest error is `factor` times what ours may have."""
    problem = problem_of(case, threads=1)
    return measure.Local(SDPA, lambda: problem.exact + factor * problem.bound)


@pytest.mark.parametrize(("factor", "timed"), [(0.9, True), (2.0, True), (5.0, False)])
def test_a_peer_a_little_less_exact_is_timed_with_a_note(stand_in, monkeypatch, factor, timed):
    monkeypatch.setitem(sdpa.BUILDERS, SDPA, lambda *tensors: off_by(*tensors, factor))
    outcome = run_tiny()
    assert (outcome.peers[0].comparison is not None) == timed
    told = " ".join(report.notes(a_report(results=[outcome], planned=1)))
    assert ("its error is 2.0 times the bound" in told) == (factor == 2.0)


def test_ours_gets_no_such_allowance(stand_in):
    bound = problem_of(TINY, threads=1).bound
    stand_in.wrong = lambda out: out + 2 * bound
    assert "is off by" in run_tiny().refused


def test_an_error_of_ours_is_told_and_ends_nothing(stand_in):
    def refuse(out):
        raise ValueError("no softcap here")

    stand_in.wrong = refuse
    assert run_tiny().refused == "ValueError: no softcap here"


def test_a_peer_that_is_missing_or_left_out_is_listed_with_the_reason(stand_in, monkeypatch):
    monkeypatch.setitem(runtimes.MODULES, ZENTORCH, "no_such_runtime")
    case = Layer(1, 3, 8, 2, CAUSAL, "")
    outcome = runner.run_case(case, threads=1, seconds=0.01, skipped=LAYER_PEERS[:-1])
    assert [peer.name for peer in outcome.peers] == list(LAYER_PEERS)
    assert outcome.peers[0].reason == "left out by --no-peers"
    assert outcome.peers[-1].reason == "no_such_runtime is not installed"
    assert outcome.noise is not None


def test_a_runtime_that_refuses_or_dies_says_so():
    runtime = runtimes.Runtime("ONNX Runtime", threads=1)
    try:
        with pytest.raises(runtimes.Unavailable, match="Error"):
            runtime.ask("load", b"no model", torch.zeros(1).numpy(), "f32")
        runtime._process.kill()
        with pytest.raises(runtimes.Unavailable, match="its process ended with code -9"):
            runtime.ask("time", 1)
    finally:
        runtime.close()


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import multihead.bench.measure", "multihead.bench.peers"),
        (f"import runpy; runpy.run_path({runtimes.child.__file__!r})", "torch"),
    ],
)
def test_the_core_knows_no_peers_and_the_children_no_torch(code, absent):
    code += f"; import sys; sys.exit({absent!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# Reports


def a_report(**changes):
    fast = measure.summarise([([1.0, 1.0], [2.0, 2.0])] * 11, STEADY[:12])
    slow = measure.summarise([([1.0, 1.0], [0.5, 0.5])] * 11, [1.0 + 0.1 * i for i in range(12)])
    even = measure.summarise([([1.0, 1.0], [1.0, 1.0])] * 11, STEADY[:12])
    case = Attend(1, 2, 2, 11, 11, 3, Mask(documents=(2, 5, 4)), "a | b")
    peers = [runner.PeerResult(SDPA, "padded | to 5", fast), runner.PeerResult(PER_DOCUMENT, comparison=slow)]
    results = [
        runner.CaseResult(case, "native", 1e-7, 2e-7, even, peers=peers),
        runner.CaseResult(TINY, refused="off by 1", peers=[runner.PeerResult(SDPA, reason="not timed")]),
    ]
    ceilings = Ceilings({"fp32": 1e9}, {working_set(TINY): 1e9})
    return report.Report(
        **({"machine": {"CPU": "a CPU"}, "ceilings": ceilings, "results": results, "planned": 2} | changes)
    )


def test_markdown_is_one_whole_table_with_losses_refusals_and_notes():
    text = report.markdown(a_report())
    table = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in table} == {len(report.COLUMNS) + 1}
    assert len(table) == 2 + 3
    assert "| 2.00 | 2.00 – 2.00 | 2.00 | 1 | faster, goal met | 11/11 |" in text
    assert "slower, goal missed | 9/11 restless |" in text
    assert "refused" in text
    assert "off by 1" in text
    assert f"{PER_DOCUMENT}: restless clock" in text
    assert "a CPU" in text
    assert "Interrupted" not in text
    assert "Interrupted: 2 of 3 cases." in report.markdown(a_report(planned=3))


def test_json_holds_every_ratio():
    whole = json.loads(report.as_json(a_report()))
    first, second = whole["results"]
    assert first["peers"][0]["comparison"]["ratios"] == [2.0] * 11
    assert first["share_of_ceiling"] == pytest.approx(first["flops"] / 1e9, rel=0.5)
    assert second["share_of_ceiling"] is None


def test_a_goal_just_missed_is_told_from_one_within_the_noise():
    found = measure.summarise([([1.0, 1.0], [1.1, 1.1])] * 9, STEADY[:10])
    assert report.verdict(found, 0.02, 1.05) == "faster, goal met"
    assert report.verdict(found, 0.02, 1.11) == "faster, goal within noise"
    assert report.verdict(found, 0.02, 1.5) == "faster, goal missed"
    assert report.verdict(found, 0.2, 1.0) == "even, goal met"
    lost = measure.summarise([([1.0, 1.0], [0.1, 0.1])] * 9, STEADY[:10])
    assert report.verdict(lost, 1.5, 1.0) == "slower, goal missed"


# Command line


def test_a_quick_run_from_end_to_end(stand_in, tmp_path, capsys):
    files = tmp_path / "run.md", tmp_path / "run.json"
    arguments = ["--case", "1x8x17x120/causal", "--seconds-per-case", "0.1", "--no-peers", ZENTORCH]
    arguments += ["--threads", "1", "--markdown", str(files[0]), "--json", str(files[1])]
    threads = torch.get_num_threads()
    try:
        assert cli.main(arguments) == 0
    finally:
        torch.set_num_threads(threads)
    assert "GEMM" in capsys.readouterr().out
    assert "attend/1x8x17x120/causal" in files[0].read_text()
    [result] = json.loads(files[1].read_text())["results"]
    assert result["noise"]["blocks"] >= measure.FEWEST_BLOCKS
    assert result["peers"][0]["comparison"]["ratio"] > 0
    assert result["error"] <= result["bound"]


def test_the_package_itself_goes_through_by_a_named_backend(tmp_path):
    path = tmp_path / "run.json"
    arguments = ["--case", "1x8x63x40", "--seconds-per-case", "0.1", "--no-peers", ZENTORCH]
    assert cli.main([*arguments, "--backend", "reference", "--json", str(path)]) == 0
    run = json.loads(path.read_text())
    assert run["machine"]["backend"] == "reference"
    assert {result["backend"] for result in run["results"]} == {"reference"}


def test_the_layer_of_the_package_takes_the_weights_of_the_case():
    problem = problem_of(Layer(2, 5, 24, 3, CAUSAL, ""), threads=1)
    oracle.check("ours", problem.ours().result(), problem.exact, problem.bound)


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.label)
def test_the_package_means_by_its_masks_what_the_cases_mean(mask):
    problem = problem_of(Attend(1, 2, 2, 11, 11, 3, mask, ""), threads=1)
    oracle.check("ours", problem.ours().result(), problem.exact, problem.bound)


def test_the_list_names_every_case(capsys):
    assert cli.main(["--list"]) == 0
    told = capsys.readouterr().out
    assert all(case.name in told and case.why in told for case in CASES)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--no-peers", "nobody"], "no such peer; there are torch SDPA"),
        (["--threads", "0"], "0 is not above 0"),
        (["--dtype", "fp64"], "argument --dtype: invalid choice: 'fp64'"),
        (["--seconds-per-case", "x"], "invalid float value"),
        (["--json", "/no/such/folder/run.json"], "there is no folder /no/such/folder"),
    ],
)
def test_bad_arguments_are_refused_in_words(arguments, words, capsys):
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert words in capsys.readouterr().err


def test_a_pattern_that_matches_nothing_points_to_the_list():
    with pytest.raises(ValueError, match="no case matches nothing in fp32: --list names them all, --dtype chooses"):
        cli.main(["--case", "nothing"])


def test_a_run_in_half_precision_says_how_long_it_takes_and_names_its_ceiling(tmp_path, capsys):
    path = tmp_path / "run.json"
    arguments = ["--dtype", "bf16", "--case", "attend/1x8x17x120/causal", "--seconds-per-case", "0.1"]
    assert cli.main([*arguments, "--no-peers", ZENTORCH, "--json", str(path)]) == 0
    told = capsys.readouterr().out
    assert "1 cases, 0.1 s each: about 0 minutes" in told
    assert "bf16 GEMM" in told
    [result] = json.loads(path.read_text())["results"]
    assert result["name"] == "attend/1x8x17x120/causal/bf16"
    assert [peer["name"] for peer in result["peers"] if peer["comparison"]] == [SDPA, OURS_FP32]


# Generating


@pytest.mark.parametrize(("cached", "N", "ragged"), [(6, 1, False), (6, 1, True), (0, 5, False)])
def test_a_step_of_ours_and_by_hand_give_the_same(cached, N, ragged):
    problem = problem_of(Step(2, cached, 24, 6, 2, "", ragged=ragged, N=N), threads=1)
    for _ in range(2):  # each call finds what the one before found
        for contender in (problem.ours(), problem.peer(BY_HAND)):
            oracle.check(contender.name, contender.result(), problem.exact, problem.bound * oracle.PEER_ALLOWANCE)
    assert problem.case.lengths == ([6, 3] if ragged else [cached, cached])


@pytest.mark.parametrize("case", [c for c in select(["step/*"], quick=False) if c.cached <= 4096], ids=lambda c: c.name)
def test_our_steps_are_right_far_into_a_cache(case):
    """Plain rounds the angles of RoPE, too: at 1024 they are what is off most, and a run would refuse ours for them."""
    problem = problem_of(case, threads=1)
    oracle.check("ours", problem.ours().result(), problem.exact, problem.bound)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("kind", "N", "cached"), [("Llama", 1, 7), ("Qwen2", 5, 0), ("BERT", 5, 0), ("ViT", 197, 0), ("Whisper", 3, 0)]
)
def test_a_whole_model_gives_the_same_however_it_is_run(kind, N, cached, dtype, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setitem(generation.SIZES, "tiny", (kind, 61, 24, 40, 2, 6, 2 if kind in ("Llama", "Qwen2") else 6))
    case = Whole("tiny", N, cached, "", peers=(HF_SDPA, HF_EAGER, HF_STATIC), dtype=dtype)
    problem = problem_of(case, threads=1)
    ours = problem.ours()
    for name in case.peers if case.generates else case.peers[:1]:
        for contender in (ours, problem.peer(name)):
            for _ in range(2):
                oracle.check(contender.name, contender.result(), problem.exact, problem.bound)
    weights = [p for n, p in problem.model.named_parameters() if p.dim() == 2 and ("layer" in n or case.generates)]
    assert sum(p.numel() for p in weights) == case.matrices
    assert all(a is b for a, b in zip(problem.model.parameters(), generating.shared_copy(problem.model).parameters()))


def test_busy_neighbours_end_with_the_block():
    def alive(pid):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True

    def interrupt(pids):
        assert all(map(alive, pids))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), neighbours(2) as started:
        interrupt(started)
    assert not any(map(alive, started))


def test_neighbours_of_a_run_that_was_killed_end_by_themselves():
    code = (
        "import os, signal\nfrom multihead.bench.neighbours import neighbours\nwith neighbours(1) as pids:\n"
        "    print(pids[0], flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    pid = int(run.stdout)
    for _ in range(600):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("a busy neighbour goes on without the run it was started for")

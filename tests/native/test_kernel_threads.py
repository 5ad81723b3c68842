"""Threads: one OpenMP pool for torch and the kernel, safe calls from several Python threads, and after a fork."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from oracle import causal, random


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_there_is_one_openmp_pool():
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert len({line.split()[-1] for line in lines if "libgomp" in line or "libomp" in line}) == 1


def test_python_threads_overlap_and_agree():
    problem = random(1, 4, 4, 120, 500, 32, 32, **causal(120, 500))
    expected = problem.native(threads=1)[0]
    results: list = []
    calls = [threading.Thread(target=lambda: results.append(problem.native(threads=2)[0])) for _ in range(6)]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert len(results) == 6
    assert all(torch.equal(result, expected) for result in results)


def ticks_during(call: Callable[[], object]) -> int:
    """How often a Python thread that sleeps a millisecond at a time woke during a call.

    No thread is made to hand over the lock meanwhile, so that a tick is a moment at which the call had let go of it.
    """
    ticks, done, usual = 0, threading.Event(), sys.getswitchinterval()

    def tick() -> None:
        nonlocal ticks
        while not done.is_set():
            time.sleep(0.001)
            ticks += 1

    ticker = threading.Thread(target=tick)
    sys.setswitchinterval(1000)
    try:
        ticker.start()
        while not ticks:
            time.sleep(0.001)
        before = ticks
        call()
        return ticks - before
    finally:
        done.set()
        sys.setswitchinterval(usual)
        ticker.join()


def lets_others_run(made: Callable[[int], Callable[[], object]]) -> bool:
    """Whether a call that is made longer and longer, `made(1)`, `made(4)` …, is seen to let go of the lock.

    Around a call torch lets go of it a few times, however long it is; a busy machine delays ticks, but not for ever.
    """
    return any(ticks_during(made(size)) > 50 for size in (1, 4, 16, 64))


def test_the_interpreter_runs_during_a_call():
    assert lets_others_run(lambda size: partial(random(1, 2, 2, 500 * size, 4000, 64, 64).native, threads=1))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs usleep of the C library")
def test_a_call_that_holds_the_interpreter_is_noticed():
    """PyDLL keeps the lock during a call of C, CDLL lets go of it: so the test above is able to fail."""
    assert not lets_others_run(lambda size: lambda: ctypes.PyDLL(None).usleep(10_000 * size))
    assert lets_others_run(lambda size: lambda: ctypes.CDLL(None).usleep(100_000 * size))


FORK = """
import os, sys
sys.path.insert(0, {folder!r})
import torch
from oracle import random
problem = random(1, 4, 4, 200, 200, 16, 16)
expected = problem.native(threads=2)[0]          # the pool exists now
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(problem.native(threads=2)[0], expected) else 1)
_, status = os.waitpid(child, 0)
assert torch.equal(problem.native(threads=2)[0], expected)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_can_call():
    code = FORK.format(folder=str(Path(__file__).parent))
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=120, check=False).returncode == 0


@pytest.mark.parametrize("name", ["portable", "sse9", "avx512"])
def test_a_forced_instruction_set(name):
    """MULTIHEAD_ISA is obeyed, or refused in words; never passed over."""
    from multihead import _native

    code = "from multihead import _native; print(_native.instruction_set())"
    run = subprocess.run([sys.executable, "-c", code], env={**os.environ, "MULTIHEAD_ISA": name}, timeout=120,
                         capture_output=True, text=True, check=False)  # fmt: skip
    if name in _native.instruction_sets():
        assert run.stdout.strip() == name
    else:
        assert run.returncode != 0
        assert f"instruction set '{name}' is" in run.stderr

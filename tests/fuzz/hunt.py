"""The hunt: a child runs case after case and says so before and after each; the parent hears when one was its last."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KINDS = ("attend", "backward", "lens", "layer")
REDRAWS = 16  # a case beyond the bound is judged by the mean of so many draws: few numbers, and luck decides in one
SURELY = 128  # a mean narrowly beyond it, by less than NARROWLY times, may be one lucky draw of plain's: so many decide
NARROWLY = 4
LUCK = 0.01  # the part of all cases in which that may be needed
PATIENCE = 120.0  # seconds that a case may take
ROOT = Path(__file__).parents[2]


@dataclass
class Finding:
    seed: int
    case: int
    kind: str | None
    what: str

    def __str__(self) -> str:
        kind = f" --kind {self.kind}" if self.kind else ""
        return f"python -m tests.fuzz --seed {self.seed}{kind} --case {self.case}: {self.what}"


@dataclass
class Found:
    """What a hunt has found, and how many cases it has seen."""

    findings: list[Finding] = field(default_factory=list)
    outcomes: Counter = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def cases(self) -> int:
        return sum(self.outcomes.values())

    @property
    def luck_is_rare(self) -> bool:
        """Whether the mean of several draws was needed in at most 1 % of the cases; one in a short hunt says nothing."""
        return self.outcomes["redrawn"] <= max(1, LUCK * self.cases)

    @property
    def summary(self) -> str:
        return f"{self.cases} cases in {self.seconds:.0f} s: {dict(self.outcomes)}, {len(self.findings)} findings"


# In the child ---------------------------------------------------------------------------------------------------------


def make(seed: int, case: int, kind: str | None = None) -> Any:
    from tests.fuzz import backward, calls, layers, lenses

    rng = random.Random(f"{seed}/{case}")
    chosen = rng.choices(KINDS, weights=(4, 4, 2, 2))[0]
    makers: dict[str, Any] = {
        "attend": calls.Attend,
        "backward": backward.Backward,
        "lens": lenses.Lens,
        "layer": layers.Layer,
    }
    return makers[kind or chosen].draw(rng)


def mean_of(case: Any, first: int, draws: range) -> list[tuple[str, float, float]]:
    """What was judged, its error and the most that it may be, each the mean over so many draws."""
    several = zip(*(case.run(first + 3 * n) for n in draws), strict=True)  # by threes: a poison stays where it was
    return [
        (each[0].what, sum(j.found for j in each) / len(draws), sum(j.most for j in each) / len(draws))
        for each in several
    ]


def judge(case: Any, seed: int, number: int) -> str:
    """How it went: right, refused or redrawn. Raises Wrong."""
    from tests.fuzz.calls import Refused
    from tests.fuzz.plain import Wrong

    first = zlib.crc32(f"{seed}/{number}".encode())
    try:
        if all(judged.fine for judged in case.run(first)):
            return "right"
        verdict = mean_of(case, first, range(REDRAWS))
        if any(most < found <= NARROWLY * most for _, found, most in verdict):
            verdict = mean_of(case, first, range(SURELY))
    except Refused:
        return "refused"
    for what, found, most in verdict:
        if not found <= most:
            raise Wrong(f"{what}: error {found:.3g} on the mean of several draws, at most {most:.3g} is allowed")
    return "redrawn"


def work(seed: int, first: int, kind: str | None, spoil: str | None = None) -> None:
    """Case after case, until the parent has had enough."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if spoil is not None:
        from tests.fuzz import spoilt

        getattr(spoilt, spoil)()
    say = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints must not speak in our name
    case = first
    while True:
        print(json.dumps(["start", case]), file=say)
        try:
            made = make(seed, case, kind)
            outcome, what = judge(made, seed, case), ""
        except Exception as error:
            outcome, what = "wrong", f"{type(error).__name__}: {error}"[:400]
        print(json.dumps([outcome, what]), file=say)
        case += 1


# In the parent --------------------------------------------------------------------------------------------------------


class Child:
    """A process that works, and can be asked what it said last."""

    def __init__(self, seed: int, first: int, kind: str | None, spoil: str | None) -> None:
        command = [
            sys.executable,
            "-X",
            "faulthandler",
            "-m",
            "tests.fuzz",
            "--work",
            "--seed",
            str(seed),
            "--first",
            str(first),
        ]
        command += ["--kind", kind] if kind else []
        command += ["--spoil", spoil] if spoil else []
        environment = os.environ | {"OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
        self.heard = b""

    def hear(self, seconds: float) -> list[Any] | None:
        """Its next word; None where it says nothing any more.

        Waited for second by second, so that whoever pauses both of us for an hour finds no case that took one.
        """
        assert self.process.stdout is not None
        waited = 0
        while b"\n" not in self.heard:
            if not select.select([self.process.stdout], [], [], 1.0)[0]:
                waited += 1
                if waited >= seconds:
                    raise TimeoutError
                continue
            more = os.read(self.process.stdout.fileno(), 65536)
            if not more:
                return None
            self.heard += more
        line, self.heard = self.heard.split(b"\n", 1)
        return json.loads(line)

    def end(self) -> int:
        self.process.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait()


def hunt(seed: int, first: int = 0, cases: int | None = None, seconds: float | None = None, kind: str | None = None,
         spoil: str | None = None, tell: Callable[[Finding], None] = lambda finding: None) -> Found:  # fmt: skip
    """Run `cases` cases, or for so many `seconds`."""
    if cases is None and seconds is None:
        cases = 1000
    found, start, case = Found(), time.monotonic(), first

    def note(what: str) -> None:
        found.findings.append(Finding(seed, case, kind, what))
        found.outcomes["wrong"] += 1
        tell(found.findings[-1])

    child = Child(seed, case, kind, spoil)
    try:
        while (cases is None or case < first + cases) and (seconds is None or time.monotonic() - start < seconds):
            try:
                word = child.hear(PATIENCE)
                said = word if word is None or word[0] != "start" else child.hear(PATIENCE)
                if said is None:
                    code = child.process.wait()
                    note(f"the process ended with {signal.Signals(-code).name if code < 0 else code}")
            except TimeoutError:
                note(f"no answer in {PATIENCE:.0f} s")
                said = None
            if said is None:
                child.end()
                child = Child(seed, case + 1, kind, spoil)
            elif said[0] == "wrong":
                note(said[1])
            else:
                found.outcomes[said[0]] += 1
            case += 1
    finally:
        child.end()
        found.seconds = time.monotonic() - start
    return found

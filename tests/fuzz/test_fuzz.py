"""A short hunt for each kind of call, and proof that the fuzzer finds what it must and that its oracle stands alone."""

from __future__ import annotations

import ast
import itertools
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fuzz import hunt, oracle, plain

CASES = {"attend": 130, "backward": 90, "lens": 70, "layer": 70}  # about 25 s in all on one core; `make fuzz` goes on
SEED = 20


@pytest.mark.parametrize("kind", hunt.KINDS)
def test_a_short_hunt_finds_nothing(kind: str) -> None:
    found = hunt.hunt(SEED, cases=CASES[kind], kind=kind)
    assert not found.findings, "\n".join(map(str, found.findings))
    assert found.cases == CASES[kind]
    assert found.outcomes["right"] > 0.7 * found.cases, "most calls are to be judged, not refused"
    assert found.luck_is_rare, found.summary


class Drawn:
    """A case whose error is so many times the bound, by its draw."""

    def __init__(self, errors: Callable[[int], float]) -> None:
        self.errors, self.draws = errors, 0

    def run(self, seed: int) -> list[plain.Judged]:
        self.draws += 1
        return [plain.Judged("out", self.errors(self.draws - 2), 1.0)]  # the first of all comes before the mean


@pytest.mark.parametrize(
    ("errors", "draws"),
    [
        (lambda n: 1.01, 1 + 16 + 128),  # narrowly, and always: a mistake
        (lambda n: 0.0 if n % 16 == 3 else 1.5, 1 + 16 + 128),  # on the mean of all of them
        (lambda n: 4.01, 1 + 16),  # not narrowly: sixteen are enough
        (lambda n: math.nan, 1 + 16),
        (lambda n: math.inf, 1 + 16),
    ],
)
def test_more_draws_excuse_no_mistake(errors: Callable[[int], float], draws: int) -> None:
    case = Drawn(errors)
    with pytest.raises(plain.Wrong):
        hunt.judge(case, 0, 0)
    assert case.draws == draws


def test_more_draws_excuse_luck() -> None:
    assert hunt.judge(Drawn(lambda n: 1.5 if n < 0 else 0.9), 0, 0) == "redrawn"
    assert hunt.judge(Drawn(lambda n: 1.5 if n < 16 else 0.9), 0, 0) == "redrawn"
    assert hunt.judge(Drawn(lambda n: 1.0), 0, 0) == "right"


@pytest.mark.parametrize("spoil", ["last_key_hidden", "ten_roundings_off", "strange_exception"])
def test_a_mistake_is_found(spoil: str) -> None:
    found = hunt.hunt(5, cases=14, kind="attend", spoil=spoil)
    assert found.findings
    if spoil == "strange_exception":
        assert all("AttributeError" in finding.what for finding in found.findings)


def test_mistakes_of_a_layer_are_found() -> None:
    found = hunt.hunt(5, cases=80, kind="layer", spoil="layers_forget")
    wrong = [hunt.make(5, finding.case, "layer") for finding in found.findings]
    for what in ("own_values", "places", "stored"):
        assert any(getattr(case, what) for case in wrong), f"{what} is drawn, and not judged"
    assert found.outcomes["right"] > 0.3 * found.cases


def test_a_crash_is_reported_with_its_case_and_the_hunt_goes_on() -> None:
    told: list = []
    found = hunt.hunt(5, cases=7, kind="attend", spoil="crash", tell=told.append)  # it crashes once, in the fifth
    crashed = [finding for finding in found.findings if "SIGSEGV" in finding.what]
    assert crashed
    assert told == found.findings
    assert found.cases == 7
    assert found.outcomes["right"] + found.outcomes["refused"] >= 6
    assert str(crashed[0]).startswith(f"python -m tests.fuzz --seed 5 --kind attend --case {crashed[0].case}: ")


def test_a_pause_of_everything_is_no_case_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the machine sleeps: by the clock an hour goes by between any two looks at it."""
    hours = itertools.count(step=3600.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(hours))
    child, says = object.__new__(hunt.Child), [sys.executable, "-c", "print('[\"right\"]')"]
    child.heard = b""
    with subprocess.Popen(says, stdout=subprocess.PIPE) as child.process:
        assert child.hear(hunt.PATIENCE) == ["right"]
        assert child.hear(hunt.PATIENCE) is None


def test_a_case_is_the_same_for_the_same_seed() -> None:
    for kind in hunt.KINDS:
        assert str(hunt.make(3, 7, kind)) == str(hunt.make(3, 7, kind))
        assert str(hunt.make(3, 7, kind)) != str(hunt.make(4, 7, kind))


@pytest.mark.parametrize("name", ["oracle.py", "plain.py", "tensors.py"])
def test_the_oracle_shares_nothing_with_the_package(name: str) -> None:
    tree = ast.parse((Path(__file__).parent / name).read_text(encoding="utf-8"))
    imported = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    allowed = {"numpy", "math", "collections", "dataclasses", "typing", "__future__"}
    allowed |= {"torch", "random"} if name != "oracle.py" else set()
    assert {module.split(".")[0] for module in imported} <= allowed


def drawn(parts: list, Q: int, K: int, b: int = 0, B: int = 1) -> str:
    return "\n".join("".join("■" if x else "·" for x in row) for row in oracle.visible(parts, B, 1, Q, K)[b, 0])


@pytest.mark.parametrize(
    ("parts", "Q", "K", "picture"),
    [
        ([("causal", None)], 3, 5, "■■■··\n■■■■·\n■■■■■"),
        ([("causal", 2)], 4, 4, "■···\n■■··\n·■■·\n··■■"),
        ([("causal", None)], 3, 2, "··\n■·\n■■"),
        ([("window", 1, 1)], 4, 4, "■■··\n■■■·\n·■■■\n··■■"),
        ([("prefix", 2)], 4, 4, "■■··\n■■··\n■■■·\n■■■■"),
        ([("padding", [2], "right")], 2, 4, "■■··\n■■··"),
        ([("padding", [2], "left")], 2, 4, "··■■\n··■■"),
        ([("documents", [2, 3], None), ("causal", None)], 5, 5, "■····\n■■···\n··■··\n··■■·\n··■■■"),
        ([("documents", [1, 2], [2, 2]), ("causal", None)], 3, 4, "■■··\n··■·\n··■■"),
        ([("documents", [2, 2], None), ("prefix", 1)], 4, 4, "■···\n■■··\n··■·\n··■■"),
        ([("allowed", np.eye(2, 3, dtype=bool))], 2, 3, "■··\n·■·"),
    ],
    ids=str,
)
def test_the_masks_of_the_oracle_are_those_of_the_design(parts: list, Q: int, K: int, picture: str) -> None:
    assert drawn(parts, Q, K) == picture


def test_the_gradients_of_the_oracle_are_slopes() -> None:
    """Written by hand, so they are checked by differences: of q, k, v, sinks and bias, all at once."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=shape) for shape in ((2, 4, 3, 5), (2, 2, 6, 5), (2, 2, 6, 3)))
    sinks, bias, d_out, d_lse = (
        rng.normal(size=4),
        rng.normal(size=(4, 1, 6)),
        rng.normal(size=(2, 4, 3, 3)),
        rng.normal(size=(2, 4, 3)),
    )
    seen = oracle.visible([("causal", 4)], 2, 4, 3, 6)

    def total(q, k, v, sinks, bias) -> np.longdouble:
        a = oracle.attend(q, k, v, seen, 0.7, 2.0, sinks, bias)
        return (a.out * d_out).sum() + (a.lse * d_lse).sum()

    given = [oracle.wide(t) for t in (q, k, v, sinks, bias)]
    by_hand = oracle.gradients(oracle.attend(*given[:3], seen, 0.7, 2.0, *given[3:]), d_out, d_lse)
    by_hand["bias"] = oracle.summed_to(by_hand["bias"], bias.shape)
    for n, name in enumerate(("q", "k", "v", "sinks", "bias")):
        turn, h = oracle.wide(rng.normal(size=given[n].shape)), oracle.wide(1e-6)
        ahead, behind = (total(*given[:n], given[n] + step * turn, *given[n + 1 :]) for step in (h, -h))
        assert float((ahead - behind) / (2 * h)) == pytest.approx(float((by_hand[name] * turn).sum()), rel=1e-9)


def test_a_query_that_sees_nothing_is_zero_to_the_oracle() -> None:
    one = np.ones((1, 1, 2, 1))
    a = oracle.attend(
        one, one, one, oracle.visible([("allowed", np.array([[True, True], [False, False]]))], 1, 1, 2, 2), 1.0
    )
    assert a.out[0, 0, :, 0].tolist() == [1.0, 0.0]
    assert a.lse[0, 0, 1] == -math.inf


def test_the_bound_can_fail() -> None:
    q, k, v = torch.randn(3, 1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    seen = oracle.visible([], 1, 2, 9, 9)
    exact = oracle.attend(q.numpy(), k.numpy(), v.numpy(), seen, 0.3).out

    def by_plain(order: plain.Product) -> torch.Tensor:
        return plain.attend(q, k, v, torch.from_numpy(seen), 0.3, product=order)[0]

    assert plain.judge("out", by_plain(torch.matmul), exact, by_plain, torch.float32).fine
    assert not plain.judge("out", by_plain(torch.matmul) + 2e-6, exact, by_plain, torch.float32).fine
    assert not plain.judge("out", by_plain(torch.matmul) * math.nan, exact, by_plain, torch.float32).fine

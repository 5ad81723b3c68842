"""Runs cases: check first, time second, and say what could not be timed."""

import time
from dataclasses import dataclass, field

from multihead.bench.measure import Comparison, compare
from multihead.bench.oracle import PEER_ALLOWANCE, WrongResult, check
from multihead.bench.peers.runtimes import Unavailable
from multihead.bench.problems import problem_of

TOO_SLOW = 10.0  # seconds of a peer's first call; one that takes this long, and HOPELESS times ours, is only named
HOPELESS = 20


@dataclass
class PeerResult:
    name: str
    detail: str = ""  # how the peer was asked
    comparison: Comparison | None = None  # a is ours, b the peer: above 1, ours is faster
    reason: str = ""  # why there is no comparison
    error: float | None = None  # largest, against the oracle


@dataclass
class CaseResult:
    case: object
    backend: str = ""  # the one that ran, where the package says so
    error: float | None = None  # largest, against the oracle
    bound: float | None = None
    noise: Comparison | None = None  # ours against itself
    refused: str = ""  # why ours was not timed
    peers: list[PeerResult] = field(default_factory=list)

    @property
    def seconds(self):
        """Ours, per call."""
        return self.noise.a_seconds


def run_case(case, *, threads, seconds, skipped=(), step=lambda part, done, total: None):
    """Everyone in turn against ours, then ours against itself; `seconds` are shared out equally.

    `skipped`: names of peers left out on request. `step` hears which comparison has reached which block.
    """
    outcome = CaseResult(case)
    step("inputs", 0, 1)
    try:
        problem = problem_of(case, threads)
        outcome.bound = problem.bound
        ours = problem.ours()
        outcome.backend = ours.detail
        outcome.error = check(ours.name, ours.result(), problem.exact, problem.bound)
    except Exception as error:  # a refusal in words, or a bug: neither may end the other cases
        outcome.refused = _in_words(error)
        outcome.peers = [PeerResult(name, reason="not timed: ours was refused") for name in case.peers]
        return outcome
    each = seconds / (len(case.peers) + 1)
    rest = 0.0
    for name in case.peers:
        if name in skipped:
            outcome.peers.append(PeerResult(name, reason="left out by --no-peers"))
            continue
        result, rested = _run_peer(name, problem, ours, each, step)
        outcome.peers.append(result)
        rest = max(rest, rested)
    outcome.noise = compare(ours, problem.ours(), seconds=each, rest=rest, tick=lambda *at: step("A/A", *at))
    return outcome


def _run_peer(name, problem, ours, seconds, step):
    """The result, and the rest its comparison needed."""
    step(name, 0, 1)
    result, peer = PeerResult(name), None
    try:
        peer = problem.peer(name)
        result.detail = peer.detail
        start = time.perf_counter()
        answer = peer.result()
        took = time.perf_counter() - start
        result.error = check(name, answer, problem.exact, problem.bound * PEER_ALLOWANCE)
        if took > TOO_SLOW and took > HOPELESS * (own := ours.seconds(1)):
            raise Unavailable(f"not timed: its first call took {took:.0f} s, one of ours {own:.2g} s")
        result.comparison = compare(ours, peer, seconds=seconds, tick=lambda *at: step(name, *at))
    except (Unavailable, WrongResult) as error:
        result.reason = str(error)
    except Exception as error:
        result.reason = _in_words(error)
    finally:
        if peer is not None:
            peer.close()
    return result, peer.rest if result.comparison else 0.0


def _in_words(error):
    return str(error) if isinstance(error, WrongResult) else f"{type(error).__name__}: {error}"

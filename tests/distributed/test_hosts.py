"""Several hosts: ranks in network namespaces joined by a bridge, so that what crosses a network really does."""

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import network
from tests.distributed.network import Hosts
from tests.distributed.test_attention import CASES, judge
from tests.distributed.test_layer import judge_decoded

RANKS = 3
METHODS = ("ring", "ulysses", "gather")
SLOW = "tbf rate 200mbit burst 64kb latency 400ms"
WANTED = (  # of all cases, those in which what crosses the network differs most
    "causal, balanced inside",
    "a window: most blocks do not travel",
    "prefix-LM, one kv head",
    "padding, one row with no key",
    "packed documents",
    "a dense mask for each head",
    "sinks",
    "a bias for each head",
    "ranks whose slice is empty",
    "blocks long enough to travel in halves",
)
NUMBERS = [n for n, case in enumerate(CASES) if case.why in WANTED]


def need_namespaces() -> None:
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux and iproute2's ip")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    need_namespaces()
    made = Hosts(RANKS)
    try:
        try:
            made.build()
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture
def shaped(hosts: Hosts) -> Iterator[Any]:
    """Shape what the hosts send, for one test."""
    undo = []

    def shape(how: str) -> None:
        try:
            hosts.shape(how)
        except OSError as error:
            pytest.skip(f"this kernel has no {how.split()[0]}: {error}")
        undo.append(how)

    yield shape
    if undo:
        hosts.shape(None)


def check(hosts: Hosts, path: Path, method: str, numbers: list[int] = NUMBERS) -> None:
    hosts.tell(f"cases {path} {method} {','.join(map(str, numbers))}")
    wrong = judge(answers(hosts, path), numbers)
    assert not wrong, "\n".join(wrong)


def answers(hosts: Hosts, path: Path) -> list[Any]:
    assert hosts.hear_all() == [["done"]] * RANKS
    return [torch.load(path / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.mark.parametrize("method", METHODS)
def test_hosts_compute_what_one_process_computes(hosts: Hosts, method: str, tmp_path: Path) -> None:
    assert len(NUMBERS) == len(WANTED)
    check(hosts, tmp_path, method)


def test_hosts_decode_with_a_spread_cache(hosts: Hosts, tmp_path: Path) -> None:
    hosts.tell(f"decode {tmp_path}")
    judge_decoded(answers(hosts, tmp_path))


@pytest.mark.parametrize("method", METHODS)
def test_across_a_slow_link(hosts: Hosts, shaped: Any, method: str, tmp_path: Path) -> None:
    shaped(SLOW)
    check(hosts, tmp_path, method, NUMBERS[:3])


def test_across_a_link_that_delays_and_loses(hosts: Hosts, shaped: Any, tmp_path: Path) -> None:
    shaped("netem delay 3ms 2ms loss 1%")
    check(hosts, tmp_path, "ring", NUMBERS[:3])


@pytest.mark.parametrize("method", METHODS)
def test_a_link_that_stalls_is_waited_for(hosts: Hosts, method: str, tmp_path: Path) -> None:
    """Down while the ranks attend, and up again within the timeout: late, and right."""
    numbers = NUMBERS[:1]
    hosts.link(1, "down")
    try:
        hosts.tell(f"cases {tmp_path} {method} {numbers[0]}")
        time.sleep(1)
        assert all(said.empty() for said in hosts.said)  # nobody can have finished without rank 1
    finally:
        hosts.link(1, "up")
    assert not judge(answers(hosts, tmp_path), numbers)


def test_a_host_that_is_cut_off_is_named(hosts: Hosts) -> None:
    """The last test of these hosts: nothing tells the others but that no answer comes."""
    hosts.tell("until-cut")
    assert hosts.hear_all() == [["ready"]] * RANKS
    hosts.link(2, "down")
    assert [hosts.hear(rank) for rank in (0, 1)] == [["2"], ["2"]]


def test_namespaces_are_removed_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    need_namespaces()
    made = Hosts(RANKS)
    made.name += "x"  # beside the hosts of the other tests
    monkeypatch.setattr(made, "start", lambda: pytest.fail("a rank does not start"))
    try:
        try:
            made.build()
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        assert len(network.spaces(made.name)) == RANKS + 1
        with pytest.raises(pytest.fail.Exception):
            made.start()
    finally:
        made.close()
    assert network.spaces(made.name) == []

"""Several hosts: ranks in network namespaces joined by a bridge, so that what crosses a network really does."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.hosts import TIMEOUT

RANKS = 3
ROOT = Path(__file__).parents[2]


def sh(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{command}: {done.stderr.strip()}")


class Hosts:
    """Namespaces with an address each, on one bridge in a namespace of its own, and a rank in each."""

    def __init__(self) -> None:
        self.name, self.spaces, self.ranks = f"mh{os.getpid()}", [], []  # type: ignore[var-annotated]

    def build(self) -> None:
        switch = self._space("s")
        sh(f"ip -n {switch} link add br0 type bridge")
        sh(f"ip -n {switch} link set br0 up")
        for rank in range(RANKS):
            space = self._space(str(rank))
            sh(f"ip -n {switch} link add port{rank} type veth peer name eth0 netns {space}")
            sh(f"ip -n {switch} link set port{rank} master br0 up")
            sh(f"ip -n {space} addr add 10.77.0.{rank + 1}/24 dev eth0")
            sh(f"ip -n {space} link set eth0 up")
            sh(f"ip -n {space} link set lo up")

    def _space(self, which: str) -> str:
        space = f"{self.name}-{which}"
        sh(f"ip netns add {space}")
        self.spaces.append(space)
        return space

    def start(self) -> None:
        for rank in range(RANKS):
            words = ["ip", "netns", "exec", f"{self.name}-{rank}", sys.executable, "-m", "tests.distributed.hosts"]
            words += [str(rank), str(RANKS), "10.77.0.1", "29555", "eth0"]
            self.ranks.append(
                subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
        for rank in range(RANKS):
            assert self.hear(rank) == ["joined"]

    def tell(self, words: str) -> None:
        for process in self.ranks:
            process.stdin.write(words + "\n")
            process.stdin.flush()

    def hear(self, rank: int) -> list[str]:
        for line in self.ranks[rank].stdout:
            if line.startswith("SAY "):
                return line.split()[1:]
        raise AssertionError(f"rank {rank} has ended")

    def rate(self, bits: str | None) -> None:
        """Bound what each host sends, or no longer."""
        for rank in range(RANKS):
            command = f"tc -n {self.name}-{rank} qdisc"
            if bits is None:
                sh(f"{command} del dev eth0 root")
            else:
                sh(f"{command} add dev eth0 root tbf rate {bits} burst 64kb latency 400ms")

    def cut(self, rank: int) -> None:
        sh(f"ip -n {self.name}-s link set port{rank} down")

    def close(self) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux and iproute2's ip")
    made = Hosts()
    try:
        try:
            made.build()
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        made.start()
        yield made
    finally:
        made.close()


def test_hosts_compute_overlap_and_notice_a_cut(hosts: Hosts) -> None:
    hosts.tell("check")
    assert max(float(hosts.hear(rank)[0]) for rank in range(RANKS)) < 1e-12  # float64 beside one process

    try:
        hosts.rate("200mbit")
    except OSError as error:
        print(f"not tested: a slowed link, for tc cannot make one here: {error}")
    else:
        hosts.tell("check")
        assert max(float(hosts.hear(rank)[0]) for rank in range(RANKS)) < 1e-12
        hosts.tell("time 2048")
        for rank in (0, 1):
            together, waited, transfer = (float(t) for t in hosts.hear(rank))
            compute = together - waited
            print(
                f"ring {together:.2f} s; computation {compute:.2f} s and transfer {transfer:.2f} s, one after another"
            )
        hosts.rate(None)

    hosts.tell("until-cut")
    for rank in range(RANKS):
        assert hosts.hear(rank) == ["ready"]
    hosts.cut(2)
    for rank in (0, 1):
        lost, seconds = hosts.hear(rank)
        assert int(lost) == 2
        assert float(seconds) < TIMEOUT + 8

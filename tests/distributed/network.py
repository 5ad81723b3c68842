"""Hosts on a network of their own: namespaces joined by a bridge, whose links can be slowed, stalled and cut."""

import os
import queue
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATIENCE = 150.0  # seconds without an answer are a hang


def sh(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{command}: {done.stderr.strip()}")
    return done.stdout


def spaces(prefix: str = "mh") -> list[str]:
    """The namespaces that are there now."""
    return [name for name in re.findall(r"^(\S+)", sh("ip netns list"), re.MULTILINE) if name.startswith(prefix)]


def sweep() -> None:
    """Remove what a run that was killed has left."""
    for space in spaces():
        owner = re.fullmatch(r"mh(\d+)x?-\w+", space)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


class Hosts:
    """Namespaces with an address each, on one bridge in a namespace of its own, and a rank in each."""

    def __init__(self, ranks: int) -> None:
        self.name, self.count = f"mh{os.getpid()}", ranks
        self.spaces: list[str] = []
        self.ranks: list[subprocess.Popen[str]] = []
        self.said: list[queue.Queue[list[str] | None]] = []

    def build(self) -> None:
        sweep()
        switch = self._space("s")
        sh(f"ip -n {switch} link add br0 type bridge")
        sh(f"ip -n {switch} link set br0 up")
        for rank in range(self.count):
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
        for rank in range(self.count):
            words = ["ip", "netns", "exec", f"{self.name}-{rank}", sys.executable, "-m", "tests.distributed.hosts"]
            words += [str(rank), str(self.count), "10.77.0.1", "29555", "eth0"]
            process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.ranks.append(process)
            self.said.append(queue.Queue())
            threading.Thread(target=_listen, args=(process.stdout, self.said[-1]), daemon=True).start()
        for rank in range(self.count):
            assert self.hear(rank) == ["joined"]

    def tell(self, words: str) -> None:
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.write(words + "\n")
            process.stdin.flush()

    def hear(self, rank: int) -> list[str]:
        said = self.said[rank].get(timeout=PATIENCE)
        assert said is not None, f"rank {rank} has ended"
        return said

    def hear_all(self) -> list[list[str]]:
        return [self.hear(rank) for rank in range(self.count)]

    def shape(self, how: str | None) -> None:
        """Put a queueing discipline on what each host sends (`tbf rate 200mbit …`), or take it away."""
        for rank in range(self.count):
            command = f"tc -n {self.name}-{rank} qdisc"
            sh(f"{command} del dev eth0 root" if how is None else f"{command} add dev eth0 root {how}")

    def link(self, rank: int, state: str) -> None:
        """The cable of a host is pulled ("down"), or put back ("up")."""
        sh(f"ip -n {self.name}-s link set port{rank} {state}")

    def close(self) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
        self.ranks, self.spaces = [], []


def _listen(stream: Any, said: queue.Queue[list[str] | None]) -> None:
    try:
        for line in stream:
            if line.startswith("SAY "):
                said.put(line.split()[1:])
    except ValueError:  # closed while it was read
        pass
    said.put(None)

"""A child process that runs somebody's code: its whole group ends with it, its output is bounded and made harmless."""

import os
import signal
import subprocess
import threading
import time
import unicodedata
from dataclasses import dataclass, field
from typing import IO, Any

KEPT = 64 * 1024  # bytes of what it prints, the newest; the rest is counted and let go
HARMLESS = {"\n", "\t"}


def clean(text: str) -> str:
    r"""Text without characters that steer a terminal or turn what is written around: they are shown as escapes.

    >>> clean("red \x1b[31m, and \u202eback")
    'red \\x1b[31m, and \\u202eback'
    """
    return "".join(
        c if c in HARMLESS or unicodedata.category(c) not in ("Cc", "Cf", "Cs") else ascii(c)[1:-1] for c in text
    )


def clean_all(value: Any) -> Any:
    """The same for every text in what JSON can hold."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [clean_all(part) for part in value]
    if isinstance(value, dict):
        return {clean(name): clean_all(part) for name, part in value.items()}
    return value


@dataclass
class Said:
    """What a process printed: how many lines, and the newest of it."""

    lines: int = 0
    newest: bytes = b""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def listen(self, stream: IO[bytes]) -> None:
        """Read until it is closed."""
        try:
            while part := os.read(stream.fileno(), 1 << 16):
                with self.lock:
                    self.lines += part.count(b"\n")
                    self.newest = (self.newest + part)[-KEPT:]
        except (OSError, ValueError):  # closed here: who holds the other end is not waited for
            pass

    def last_line(self) -> str | None:
        with self.lock:
            text = self.newest.decode(errors="replace").strip()
        return clean(text.splitlines()[-1]) if text else None


def run(command: list[str], given: bytes, timeout: float, keep: tuple[int, ...] = ()) -> tuple[int | None, Said]:
    """The exit status, None where the time ran out, and what was printed; nothing of its group is left running.

    `keep`: file descriptors that it may use besides.
    """
    posix = os.name == "posix"
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=posix, pass_fds=keep if posix else (),
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    said = Said()
    listener = threading.Thread(target=said.listen, args=(child.stdout,), daemon=True)
    listener.start()
    try:
        with child.stdin as stdin:
            stdin.write(given)
    except BrokenPipeError:
        pass
    try:
        in_time = _wait(child, timeout)
    finally:
        _end(child)
        listener.join(5)  # a process that left the group may hold the other end
        child.stdout.close()
    return (child.returncode if in_time else None), said


def _wait(child: subprocess.Popen, timeout: float) -> bool:
    """Whether it ends in time. On POSIX it is not reaped yet: its number still names its group, and no other."""
    if os.name != "posix":
        try:
            child.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True
    end = time.monotonic() + timeout
    while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _end(child: subprocess.Popen) -> None:
    if os.name == "posix":
        os.killpg(child.pid, signal.SIGKILL)  # the session of this child, and what it started
    else:
        child.kill()
    child.wait()

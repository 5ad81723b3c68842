"""Somebody's code in a process of its own: nothing of it stays, floods or steers the terminal."""

import sys
import time
from pathlib import Path

import pytest

from multihead.doctor import child
from tests.doctor.test_report import SIZES, run

PATIENT = 60.0  # seconds: a hang is longer
posix = pytest.mark.skipif(sys.platform == "win32", reason="process groups are POSIX's")


def python(code: str, timeout: float = PATIENT) -> tuple[int | None, child.Said]:
    return child.run([sys.executable, "-c", code], b"", timeout)


def ends(pid: int) -> bool:
    """Whether a process is gone, or dead and not yet collected, before long."""
    end = time.monotonic() + PATIENT
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


@posix
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in Linux's /proc")
@pytest.mark.parametrize("then", ["pass", "import os; os.abort()", "import time; time.sleep(600)"])
def test_what_it_started_ends_with_it(then: str) -> None:
    start = "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=-3).pid, flush=True)"
    status, said = python(f"{start}; {then}", timeout=3.0 if "sleep(" in then else PATIENT)
    assert (status is None) == ("sleep(" in then)
    pid = said.last_line()
    assert pid is not None
    assert ends(int(pid))


def test_a_flood_is_counted_and_let_go() -> None:
    status, said = python("import sys\nfor n in range(200_000): print('x' * 50, n)\nsys.stderr.write('the end')")
    assert status == 0
    assert said.lines == 200_000
    assert len(said.newest) == child.KEPT
    assert said.last_line() == "the end"


def test_the_last_line_does_not_steer_the_terminal() -> None:
    _, said = python(r"print('a\x1b[2J\x07b\u202ec\x9bd')")
    last = said.last_line()
    assert last is not None
    assert last.isprintable()
    assert last == r"a\x1b[2J\x07b\u202ec\x9bd"


def test_the_doctor_shows_no_control_characters_of_a_candidate(tmp_path: Path) -> None:
    """In what it prints, in its exceptions and in its names."""
    file = tmp_path / "hostile.py"
    file.write_text(
        "import sys\n"
        "from torch import nn\n"
        "class Hostile(nn.Module):\n"
        "    def __init__(self, d_model, num_heads):\n"
        "        super().__init__()\n"
        "        self.qkv, self.proj = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)\n"
        "    def forward(self, x):\n"
        "        print('\\x1b]0;title\\x07', flush=True)\n"
        "        sys.stderr.write('\\x1b[31mred\\n')\n"
        "        raise RuntimeError('no \\x1b[2Jway\\u202e')\n"
    )
    for more in ((), ("--json",)):
        done = run("doctor", f"{file}:Hostile", *SIZES, *more)
        for text in (done.stdout, done.stderr):
            assert not {"\x1b", "\x07", "\u202e"} & set(text), text
        assert r"\x1b" in done.stdout  # shown, as what it is

"""A wheel as a stranger has it: size and tags, every command, every code block of the README. Run by `make wheel`."""

import doctest
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MOST = 5_000_000  # bytes
ROOT = Path(__file__).parents[1]
COMMAND = Path(sys.executable).with_name("multihead")


def run(*arguments: str, status: int = 0) -> str:
    done = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=300, cwd=tempfile.gettempdir())
    assert done.returncode == status, f"multihead {' '.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def main() -> None:
    wheel = Path(sys.argv[1])
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes")
    assert wheel.stat().st_size <= MOST, f"more than {MOST:,} bytes"
    assert "manylinux" in wheel.name or sys.platform != "linux", "auditwheel has not repaired it"

    import multihead

    assert not Path(multihead.__file__).is_relative_to(ROOT / "src"), "the source, not the wheel, was imported"
    assert multihead.kernel.module is not None or sys.platform == "win32", multihead.kernel.missing
    _one_pool()

    folder = Path(tempfile.mkdtemp())
    (folder / "wrong.py").write_text("import multihead as mh\nlayer = lambda x: x\n")
    assert multihead.__version__ in run("--version")
    for command in ("show", "explore", "shapes", "doctor", "bench", "train", "info"):
        assert run(command, "--help"), command
    run("show", "I love pepperoni pizza")
    run("show", "--sample", "ankle boot")
    run("shapes", "768", "12")
    run("info")
    run("explore", "--save", str(folder / "page.html"))
    run("doctor", f"{folder / 'wrong.py'}:layer", "--width", "8", "--heads", "2", status=2)
    run(
        "train",
        "lm",
        "--size",
        "tiny",
        "--steps",
        "2",
        "--data",
        str(ROOT / "README.md"),
        "--out",
        str(folder / "trained"),
    )

    os.chdir(folder)
    found = doctest.testfile(
        str(ROOT / "README.md"),
        module_relative=False,
        optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS,
        encoding="utf-8",
    )
    assert not found.failed, f"{found.failed} of {found.attempted} examples of the README"
    print(f"every command, and {found.attempted} lines of the README, work")


def _one_pool() -> None:
    """Torch and the kernel share one OpenMP library: a second one would be a second pool of threads."""
    maps = Path("/proc/self/maps")
    if maps.exists():
        pools = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line or "libomp" in line}
        assert len(pools) == 1, f"expected one OpenMP library, found {sorted(pools)}"


if __name__ == "__main__":
    main()

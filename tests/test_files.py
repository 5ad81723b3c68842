"""Files written whole: what a crash, a full disk or a folder without permission leaves, and what is said about it."""

import errno
import os
import resource
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import multihead as mh
from multihead import files
from multihead.files import replacing, write_text
from multihead.models import store, training


def model() -> mh.models.VisionTransformer:
    settings = {"size": 28, "patch": 7, "width": 64, "heads": 2, "layers": 1, "labels": ["a", "b"]}
    return mh.models.VisionTransformer(**settings)


def checkpoint(path: Path) -> None:
    made = model()
    training.save(path, made, torch.optim.AdamW(made.parameters()), training.Recipe(steps=1, rows=1), 1)


def weights(path: Path) -> None:
    mh.save_weights(mh.MultiHeadAttention(64, heads=4), path, layout="llama")


def page(path: Path) -> None:
    mh.explore(mh.MultiHeadAttention(16, heads=2), torch.randn(4, 16), save=path)


WRITERS: dict[str, Callable[[Path], None]] = {
    "report.md": lambda path: write_text(path, "words " * 10000),
    "weights.safetensors": weights,
    "weights.pt": weights,
    "model.safetensors": lambda path: store.save(model(), path),
    "training.pt": checkpoint,
    "page.html": page,
}
EACH = pytest.mark.parametrize(("name", "write"), WRITERS.items(), ids=WRITERS)


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


@EACH
def test_one_mode_for_all_files(name: str, write: Callable, tmp_path: Path, umask: None) -> None:
    write(tmp_path / name)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640
    (tmp_path / name).chmod(0o600)
    write(tmp_path / name)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600, "one that was private stays so"
    assert os.listdir(tmp_path) == [name]


@EACH
def test_a_disk_that_takes_no_more_is_named_and_the_old_file_stays(name: str, write: Callable, tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: each library meets it in the middle of its writing."""
    path = tmp_path / name
    write(path)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="larger than allowed") as refused:
            write(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert refused.value.errno == errno.EFBIG
    assert str(path) in str(refused.value)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize(
    ("number", "words", "kind"),
    [
        (errno.ENOSPC, "the disk is full", OSError),
        (errno.EDQUOT, "quota", OSError),
        (errno.EROFS, "read-only", OSError),
        (errno.EACCES, "may not be written to", PermissionError),
    ],
)
def test_each_reason_in_words(number: int, words: str, kind: type, tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, "fsync", refuse)
    with pytest.raises(kind, match=f"cannot write {tmp_path}/note.txt: .*{words}"):
        write_text(tmp_path / "note.txt", "text")
    assert os.listdir(tmp_path) == []


def test_it_is_on_the_disk_before_it_is_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(files.os, "fsync", lambda fd: order.append("fsync") or fsync(fd))
    monkeypatch.setattr(files.os, "replace", lambda a, b: order.append("replace") or replace(a, b))
    write_text(tmp_path / "note.txt", "text")
    assert order == ["fsync", "replace", "fsync"]  # the file, the move, the folder


def test_what_a_killed_writer_left_is_removed_and_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    script = (
        "import os, signal, sys\nfrom multihead.files import replacing\n"
        "with replacing(sys.argv[1]) as beside:\n    beside.write_text('half')\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], timeout=120)
    (left,) = tmp_path.iterdir()
    (tmp_path / ".other.txt").touch()
    elsewhere = [tmp_path / f".note.elsewhere-1-{n:08x}.part.txt" for n in range(2)]
    for file in elsewhere:
        file.touch()
    os.utime(elsewhere[0], times=(time.time() - 2 * files.ABANDONED,) * 2)
    with replacing(path) as beside:  # of a process that runs: another writer leaves it alone
        write_text(path, "theirs")
        assert beside.exists()
        beside.write_text("ours")
    assert path.read_text() == "ours"
    assert set(tmp_path.iterdir()) == {path, tmp_path / ".other.txt", elsewhere[1]}
    assert left.name.startswith(".note.")


def test_a_link_stays_a_link_and_a_long_name_is_no_trouble(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link.txt").symlink_to(tmp_path / "there" / "real.txt")
    write_text(tmp_path / "link.txt", "text")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "there" / "real.txt").read_text() == "text"
    write_text(tmp_path / ("n" * 250 + ".txt"), "text")


def test_a_block_that_fails_changes_nothing_and_its_error_is_its_own(tmp_path: Path) -> None:
    write_text(tmp_path / "note.txt", "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "note.txt", "\ud800")

    def breaks_off() -> None:
        with replacing(tmp_path / "note.txt") as beside:
            beside.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        breaks_off()
    assert (tmp_path / "note.txt").read_text() == "old"
    assert os.listdir(tmp_path) == ["note.txt"]


def test_a_training_that_could_not_be_saved_does_not_begin(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    layer, steps = torch.nn.Linear(1, 1), []

    def loss(generator: torch.Generator) -> torch.Tensor:
        steps.append(1)
        return layer(torch.ones(1, 1)).sum()

    recipe = training.Recipe(steps=1, rows=1)
    with pytest.raises(OSError, match=r"cannot write .*model.checkpoint: its path leads through a file"):
        training.train(layer, loss, recipe, tmp_path / "file" / "model.checkpoint")
    assert not steps
    training.train(layer, loss, recipe, tmp_path / "there" / "model.checkpoint")
    assert steps == [1]
    assert os.listdir(tmp_path / "there") == ["model.checkpoint"]


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="is a folder"):
        write_text(tmp_path, "text")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        write_text(tmp_path / "no" / "note.txt", "text")
    with replacing(tmp_path / "no" / "note.txt", make_folder=True) as beside:
        beside.write_text("text")
    assert (tmp_path / "no" / "note.txt").read_text() == "text"


def test_the_command_line_says_it_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "multihead", "explore", "--save", str(tmp_path / "file" / "page.html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "page.html" in done.stderr
    assert "Traceback" not in done.stderr

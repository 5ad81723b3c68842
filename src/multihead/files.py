"""Files written whole or not at all: beside their place, down to the disk, then moved there in one step."""

import errno
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ABANDONED = 24 * 3600  # seconds without a write after which what another machine began is taken for left behind
WORDS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file is larger than allowed here",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "its folder may not be written to",
    errno.EPERM: "its folder may not be written to",
    errno.ENOTDIR: "its path leads through a file",
    errno.EEXIST: "its path leads through a file",  # where a folder is to be made
}


@contextmanager
def replacing(path: str | os.PathLike, *, make_folder: bool = False) -> Iterator[Path]:
    """A path to write to, which takes the place of `path` at the end of the block; if that fails, nothing changes.

    What is at `path` is whole at every moment, also after a crash or a loss of power. It keeps its mode, and a new file
    has the one that the umask gives; a link stays a link. What a writer that was killed has left is removed.

    Args:
        path: the file; one that is there is replaced.
        make_folder: make the folders that lead to it, instead of an error.

    >>> import tempfile
    >>> from multihead.files import replacing
    >>> note = Path(tempfile.mkdtemp()) / "note.txt"
    >>> with replacing(note) as beside:
    ...     _ = beside.write_text("whole")
    >>> note.read_text()
    'whole'
    """
    given, path = path, Path(os.path.realpath(path))
    if path.is_dir():
        raise IsADirectoryError(f"{given} is a folder: expected the name of a file")
    with _in_words(given):
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        elif not path.parent.is_dir():
            raise FileNotFoundError(f"{given}: there is no folder {path.parent} to write it to")
        _clean(path)
        beside = path.with_name(f".{path.stem[:80]}.{_host()}-{os.getpid()}-{secrets.token_hex(4)}.part{path.suffix}")
        try:
            os.close(os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            mode = (path if path.exists() else beside).stat().st_mode & 0o777
            yield beside
            _to_disk(beside, os.O_RDWR)
            beside.chmod(mode)
            os.replace(beside, path)
            with suppress(OSError):  # some systems do not open folders; then the old file may be what a crash leaves
                _to_disk(path.parent, os.O_RDONLY)
        finally:
            with suppress(OSError):
                beside.unlink(missing_ok=True)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Replace a file by this text, in UTF-8."""
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8", newline="\n")


def require_writable(path: str | os.PathLike) -> None:
    """Say what would keep a file from being written before hours are spent on what goes into it; nothing changes."""
    with suppress(_Enough), replacing(path, make_folder=True):
        raise _Enough


class _Enough(Exception):
    pass


@contextmanager
def _in_words(path: str | os.PathLike) -> Iterator[None]:
    """Say what the disk did not like, whichever library met it."""
    try:
        yield
    except Exception as error:
        number = _number(error)
        if number not in WORDS:
            raise
        raise OSError(number, f"cannot write {path}: {WORDS[number]}") from error


def _number(error: BaseException | None) -> int | None:
    """The errno behind an error: its own, in the message of a library in Rust, or of what it was raised upon."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        if said := re.search(r"\(os error (\d+)\)", str(error)):
            return int(said[1])
        error = error.__cause__ or error.__context__
    return None


def _clean(path: Path) -> None:
    """Remove what writers of `path` that are gone have left beside it."""
    name = re.compile(rf"\.{re.escape(path.stem[:80])}\.(.+)-(\d+)-[0-9a-f]{{8}}\.part{re.escape(path.suffix)}")
    for other in path.parent.iterdir():
        if made := name.fullmatch(other.name):
            with suppress(OSError):
                gone = not _runs(int(made[2])) if made[1] == _host() else False
                if gone or time.time() - other.stat().st_mtime > ABANDONED:
                    other.unlink()


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9]", "", socket.gethostname())[:40] or "here"


def _runs(process: int) -> bool:
    if os.name == "nt":  # where the question would end it
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


def _to_disk(path: Path, flags: int) -> None:
    opened = os.open(path, flags)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)

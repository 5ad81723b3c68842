"""A progress bar that shows itself only when there is something to wait for."""

import sys
import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import Progress

PATIENCE = 1.0  # seconds
stream: TextIO | None = None  # where it is drawn, if not on stderr


class Bar:
    """Called with (done, of); after `PATIENCE` it draws on stderr, if wanted, or if that is a terminal."""

    def __init__(self, wanted: bool | None) -> None:
        self.stream = stream or sys.stderr
        self.wanted = self.stream.isatty() if wanted is None else wanted
        self.started = time.monotonic()
        self.progress: Progress | None = None

    def __enter__(self) -> "Bar":
        return self

    def __call__(self, done: int, of: int) -> None:
        if not self.wanted:
            return
        if self.progress is None and time.monotonic() - self.started > PATIENCE:
            self.progress = Progress(console=Console(file=self.stream), transient=True)
            self.progress.start()
            self.task = self.progress.add_task("pairs of mistakes", total=of)
        if self.progress is not None:
            self.progress.update(self.task, completed=done, total=of)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.progress is not None:
            self.progress.stop()

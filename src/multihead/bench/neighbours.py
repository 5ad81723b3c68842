"""Processes that keep cores busy while something is measured, and that end with it however it ends."""

import os
import subprocess
import sys
from contextlib import contextmanager

# Ends by itself where its parent is gone, even where that was killed: it asks a few times a second.
LOOP = """
import os, sys
parent = int(sys.argv[1])
while os.getppid() == parent:
    sum(range(2_000_000))
"""


@contextmanager
def neighbours(count):
    """`count` busy processes for as long as the block lasts."""
    started = []
    try:
        for _ in range(count):
            started.append(subprocess.Popen([sys.executable, "-c", LOOP, str(os.getpid())]))
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()

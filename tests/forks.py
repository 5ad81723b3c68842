"""`python -m multihead …` in processes of their own that need not load torch again: forks of one that has.

Nothing of the package is loaded before the fork, so that each reads its environment and imports itself anew.
"""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SERVER = """
import json, os, runpy, sys
import torch

for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(asked["out"], os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(os.open(asked["err"], os.O_WRONLY | os.O_CREAT), 2)
        os.environ.clear()
        os.environ.update(asked["environment"])
        os.chdir(asked["folder"])
        sys.argv = ["multihead", *asked["arguments"]]
        runpy.run_module("multihead", run_name="__main__", alter_sys=True)
        sys.exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def server() -> subprocess.Popen:
    started = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    atexit.register(started.communicate)  # its input ends, and so does it
    return started


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """What a command prints and how it ends, with these variables in its environment."""
    running = server()
    assert running.stdin is not None
    assert running.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        asked = {"arguments": arguments, "folder": os.getcwd(), "out": str(out), "err": str(err)}
        given = os.environ | {"COLUMNS": "100"} | environment
        running.stdin.write(json.dumps(asked | {"environment": given}) + "\n")
        running.stdin.flush()
        status = int(running.stdout.readline())
        return subprocess.CompletedProcess(
            arguments, status, out.read_text(encoding="utf-8"), err.read_text(encoding="utf-8")
        )

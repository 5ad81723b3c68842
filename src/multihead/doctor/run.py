"""The command line's examination, in a child process with a time limit: safe to point at hopeless code.

The child imports the file, builds the candidate and diagnoses it; its report comes back as JSON in a file of its own,
so that whatever the candidate prints cannot spoil it. If the time runs out the child says where it was, and is killed.
What it started in its group is ended with it, and nothing that it says reaches the terminal as it is.
"""

import faulthandler
import json
import os
import signal
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import torch

from multihead.doctor import child, progress
from multihead.doctor.examine import diagnose
from multihead.doctor.findings import could_not
from multihead.doctor.load import NotLoaded, load
from multihead.doctor.report import Report
from multihead.masks import Causal, Mask, Padding
from multihead.positions import RoPE

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
LARGEST_REPORT = 1 << 22  # bytes


def examine(arguments: dict[str, Any], timeout: float) -> Report:
    """Run the examination in a child; a crash or an endless loop is a finding like any other."""
    with tempfile.TemporaryDirectory() as folder:
        answer, stack = (Path(folder) / name for name in ("report.json", "stack.txt"))
        terminal = sys.stderr.fileno() if sys.stderr.isatty() else -1
        shown = os.dup(terminal) if terminal >= 0 else -1  # for the progress bar alone
        command = [sys.executable, "-m", "multihead.doctor.run", str(answer), str(stack), str(timeout), str(shown)]
        try:
            status, said = child.run(
                command, json.dumps(arguments).encode(), timeout + 30, (shown,) if shown >= 0 else ()
            )  # it ends itself before that
        finally:
            if shown >= 0:
                os.close(shown)
        written = _read(answer)
        if written:
            report = Report.from_json(json.dumps(child.clean_all(json.loads(written))))
            last = said.last_line()
            if last is not None:
                report = _with_note(report, f"while it ran it printed {said.lines} lines; the last: {last[:80]}")
            return report
        where = child.clean(_read(stack))
        if "Timeout" in where or status is None:
            return _endless(where, timeout, Path(arguments["target"].partition(":")[0]).name)
        return _crashed(status, where)


def _read(path: Path) -> str:
    """The text of a file that the child wrote; nothing where it is not there, or larger than any report."""
    if not path.is_file() or path.stat().st_size > LARGEST_REPORT:
        return ""
    return path.read_text(encoding="utf-8", errors="replace")


def _with_note(report: Report, note: str) -> Report:
    from dataclasses import replace

    return replace(report, notes=(*report.notes, note))


def _endless(stack: str, timeout: float, file: str) -> Report:
    lines = [line.strip() for line in stack.splitlines() if f'{file}"' in line]
    where = [f"it was still running after {timeout:g} seconds: an endless loop, or work that needs a larger --timeout"]
    if lines:
        where.append(f"it was in {lines[0].removeprefix('File ')}")
    return Report("unknown", "It does not come to an end.", where=tuple(where))


def _crashed(status: int, stack: str) -> Report:
    name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    lines = [line.strip() for line in stack.splitlines() if line.strip().startswith("File")]
    where = [f"the process that ran it ended with {name}"] + ([f"it was in {lines[0]}"] if lines else [])
    return Report("unknown", "It takes the whole process down.", where=tuple(where))


def prepared(arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Load the candidate and build its input: what `diagnose` takes."""
    torch.manual_seed(arguments["seed"])
    width, heads, tokens = arguments["width"], arguments["heads"], arguments["tokens"]
    dtype = DTYPES[arguments["dtype"]]
    kv_heads, head_dim = arguments["kv_heads"], arguments["head_dim"]
    candidate = load(arguments["target"], width, heads, tokens, kv_heads, head_dim)
    if isinstance(candidate, torch.nn.Module):
        candidate = candidate.to(dtype)
    B = arguments["batch"]
    x = torch.randn(B, tokens, width).to(dtype)
    context = None if arguments["context"] is None else torch.randn(B, arguments["context"], width).to(dtype)
    keys = tokens if context is None else context.shape[1]
    mask: Mask | None = None
    if arguments["mask"] == "causal":
        mask = Causal()
    elif arguments["mask"] == "padding":
        mask = Padding([max(1, keys - 1 - 2 * b) for b in range(B)])
    rope = None if arguments["rope"] is None else RoPE(base=arguments["rope_base"], pairing=arguments["rope"])
    options = {
        "kv_heads": kv_heads,
        "rope": rope,
        "softcap": arguments["softcap"],
        "scale": arguments["scale"],
        "head_dim": head_dim,
    }
    names = tomllib.loads(Path(arguments["weights"]).read_text()) if arguments["weights"] else None
    options = {name: value for name, value in options.items() if value is not None}
    said = {"heads": heads, "weights": names, "layout": arguments["layout"]}
    return [candidate, None, x, context, mask], said | options


def candidate_report(arguments: dict[str, Any]) -> Report:
    """What the child does: load, build the input, diagnose."""
    try:
        given, options = prepared(arguments)
    except NotLoaded as problem:
        return could_not(str(problem))
    return diagnose(*given, **options)


def main() -> None:
    """The child: arguments as JSON on stdin, the report into the file that is named first."""
    answer, stack, timeout, shown = sys.argv[1:5]
    if int(shown) >= 0:
        progress.stream = os.fdopen(int(shown), "w")
    arguments = json.loads(sys.stdin.read())
    with open(stack, "w") as where:
        faulthandler.enable(where)
        faulthandler.dump_traceback_later(float(timeout), exit=True, file=where)
        try:
            report = candidate_report(arguments)
        except (ValueError, TypeError, OSError) as problem:
            report = could_not(str(problem))
        faulthandler.cancel_dump_traceback_later()
    Path(answer).write_text(report.json(), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Two side by side: the tensors of two layers, two models, or of one's own implementation and the specification."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from multihead.doctor.exhibit import Exhibit
from multihead.doctor.report import Report
from multihead.explorer.request import Request
from multihead.explorer.subject import Subject
from multihead.explorer.wire import Answer
from multihead.layer.trace import STEPS

CLOSE = 1e-4  # of the largest number of a tensor: what float32 may do to it in seven steps
NAMES = ["x", *(name for step in STEPS for name in step.names)]


@dataclass
class Pair:
    """What is compared: `tensors` gives those of both sides for a request, and what is not as it seems."""

    left: str
    right: str
    tensors: Callable[[Request], tuple[dict[str, Tensor], dict[str, Tensor], dict[str, str]]]
    report: Report | None = None
    words: list[str] = field(default_factory=list)


def of_subjects(left: Subject, right: Subject) -> Pair:
    """Two subjects on the same input, layer by layer."""

    def tensors(request: Request) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, str]]:
        found = []
        for subject in (left, right):
            number = min(request.layer, len(subject.layers()) - 1)
            given = subject.examples()[0]["input"] if request.input["kind"] == "given" else request.input
            found.append({name: t.float() for name, t in subject.trace(subject.read(given), number, "own").items()})
        return found[0], found[1], {}

    names = (left.name, right.name) if left.name != right.name else (f"{left.name}, first", f"{right.name}, second")
    return Pair(*names, tensors)


def of_exhibit(shown: Exhibit, report: Report, name: str) -> Pair:
    """One's own implementation beside the specification; what it does not show is rebuilt, or said."""
    yours = shown.rebuilt | shown.yours
    how = {n: "rebuilt" for n in shown.rebuilt if n not in shown.yours}
    words = []
    if shown.rebuilt:
        words.append(
            "What your code does not show is rebuilt: the seven steps with the mistake that was found give your output."
        )
    elif shown.yours:
        seen = ", ".join(shown.yours)
        words.append(f"Of your code only {seen} can be seen from outside: what lies between is not exposed.")
    else:
        words.append("Your code could not be called, so there is nothing of it to show.")
    return Pair("the specification", name, lambda request: (shown.right, yours, how), report, words)


def compare(pair: Pair, request: Request) -> Answer:
    """Every tensor of both sides, how far they are apart, and the first that differs."""
    left, right, how = pair.tensors(request)
    rows: list[dict[str, Any]] = []
    first = None
    for name in (n for n in NAMES if n in left or n in right):
        a, b = left.get(name), right.get(name)
        row: dict[str, Any] = {"name": name, "how": how.get(name, "given")}
        if a is None or b is None:
            row |= {"same": None, "says": f"not exposed by {pair.left if a is None else pair.right}"}
        elif a.shape != b.shape:
            row |= {"same": False, "says": f"{tuple(a.shape)} beside {tuple(b.shape)}"}
        else:
            row |= _apart(a, b)
        if row["same"] is False and first is None:
            first = name
        rows.append(row)
    tensors = {f"left.{name}": t for name, t in left.items() if name in NAMES}
    tensors |= {f"right.{name}": t for name, t in right.items() if name in NAMES}
    report = None
    if pair.report is not None:
        said = asdict(pair.report)
        report = {n: said[n] for n in ("verdict", "headline", "sure", "where", "notes", "subject", "indistinguishable")}
        report |= {"causes": said["causes"], "step": pair.report.step, "evidence": []}
        report["evidence"] = [{**v, **{n: str(v[n]) for n in v if n != "place"}} for v in said["evidence"]]
    meta = {"left": pair.left, "right": pair.right, "rows": rows, "first": first, "report": report, "words": pair.words}
    return Answer(meta, tensors)


def _apart(a: Tensor, b: Tensor) -> dict[str, Any]:
    """How far two tensors are apart, and where most; equal infinities are equal."""
    gap = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf)
    finite = a[a.isfinite()]
    bound = CLOSE * float(finite.abs().max()) if finite.numel() else 0.0
    most = float(gap.max()) if gap.numel() else 0.0
    at = [int(i) for i in torch.unravel_index(gap.argmax(), gap.shape)] if gap.numel() else []
    return {"same": most <= bound, "most": most if most < torch.inf else None, "at": at, "says": ""}

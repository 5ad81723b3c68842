"""Two side by side: the tensors of two layers, two models, or of one's own implementation and the specification."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from multihead.doctor.exhibit import Exhibit
from multihead.doctor.report import Report
from multihead.explorer.request import Request
from multihead.explorer.subject import Items, Subject
from multihead.explorer.wire import Answer
from multihead.layer.trace import STEPS

CLOSE = 1e-4  # of the largest number of a tensor: what float32 may do to it in seven steps
LIKELIEST = 5  # of each side
NAMES = ["x", *(name for step in STEPS for name in step.names)]


@dataclass
class Pair:
    """What is compared: `tensors` gives those of both sides for a request, and what is not as it seems."""

    left: str
    right: str
    tensors: Callable[[Request], tuple[dict[str, Tensor], dict[str, Tensor], dict[str, str]]]
    report: Report | None = None
    words: list[str] = field(default_factory=list)
    subjects: tuple[Subject, Subject] | None = None  # where both sides are whole models


def of_subjects(left: Subject, right: Subject) -> Pair:
    """Two subjects on the same input, layer by layer, as far as both go; what lies beyond has nothing beside it."""
    counts = [len(subject.layers()) for subject in (left, right)]
    names = (left.name, right.name) if left.name != right.name else (f"{left.name}, first", f"{right.name}, second")

    def tensors(request: Request) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, str]]:
        found: list[dict[str, Tensor]] = []
        for subject, count in zip((left, right), counts):
            there = request.layer < count
            traced = subject.trace(_items(subject, request), request.layer, "own") if there else {}
            found.append({name: t.float() for name, t in traced.items()})
        return found[0], found[1], {}

    words = []
    if counts[0] != counts[1]:
        each = [f"{name} has {count} layer{'' if count == 1 else 's'}" for name, count in zip(names, counts)]
        words.append(f"{each[0]}, {each[1]}: each stands beside its like, and those beyond have nothing beside them.")
    return Pair(*names, tensors, words=words, subjects=(left, right))


def _items(subject: Subject, request: Request) -> Items:
    """What a request gives to a subject; of what was handed to `explore` each has its own reading."""
    return subject.read(subject.examples()[0]["input"] if request.input["kind"] == "given" else request.input)


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
    rows, first = _rows(pair, left, right, how)
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


def overview(pair: Pair, request: Request, stop: Callable[[], None]) -> Answer:
    """Two models as wholes: of each layer the first tensor that differs and by how much, and both predictions."""
    layers: list[dict[str, Any]] = []
    deeper = max(pair.subjects or (), key=lambda subject: len(subject.layers()), default=None)
    for number, (name, _, _) in enumerate(deeper.layers() if deeper else []):
        stop()
        left, right, how = pair.tensors(replace(request, layer=number))
        row: dict[str, Any] = {"name": name, "same": None, "first": None, "most": None, "only": ""}
        if left and right:
            rows, first = _rows(pair, left, right, how)
            gaps = {row["name"]: row.get("most") for row in rows}
            row |= {"same": first is None, "first": first, "most": gaps.get("output", gaps.get("heads"))}
        elif deeper is not None:
            row |= {"only": pair.left if left else pair.right, "model": deeper.id}
        layers.append(row)
    apart = next((number for number, layer in enumerate(layers) if layer["same"] is False), None)
    return Answer({"layers": layers, "first": apart, "predictions": _predictions(pair, request)})


def _predictions(pair: Pair, request: Request) -> dict[str, Any] | None:
    """The likeliest of both sides, with what each gives them."""
    if pair.subjects is None or None in (kinds := [subject.predicts for subject in pair.subjects]):
        return None
    found = [subject.logits(_items(subject, request), "own").float() for subject in pair.subjects]
    left, right = (t[-1] if t.dim() == 2 else t for t in found)
    if kinds[0] != kinds[1] or left.shape != right.shape:
        return {
            "says": f"{pair.left} chooses among {len(left):,} {kinds[0]}, {pair.right} among {len(right):,} {kinds[1]}"
        }
    p, q = left.softmax(-1), right.softmax(-1)
    likeliest = dict.fromkeys(n for t in (p, q) for n in t.topk(min(LIKELIEST, len(t))).indices.tolist())
    subject = pair.subjects[0]
    name = (lambda n: subject.labels[n]) if kinds[0] == "classes" else (lambda n: subject.token(n)["text"])
    rows = [{"text": name(n), "left": float(p[n]), "right": float(q[n])} for n in likeliest]
    return {"says": "", "rows": rows, "most": float((p - q).abs().max())}


def _rows(
    pair: Pair, left: dict[str, Tensor], right: dict[str, Tensor], how: dict[str, str]
) -> tuple[list[dict[str, Any]], str | None]:
    """How far each tensor of both sides is apart, and the first that differs."""
    rows: list[dict[str, Any]] = []
    first = None
    for name in (n for n in NAMES if n in left or n in right):
        a, b = left.get(name), right.get(name)
        row: dict[str, Any] = {"name": name, "how": how.get(name, "given")}
        if a is None or b is None:
            side, found = (pair.left, left) if a is None else (pair.right, right)
            row |= {"same": None, "says": f"not exposed by {side}" if found else f"not in {side}: it has no such layer"}
        elif a.shape != b.shape:
            row |= {"same": False, "says": f"{tuple(a.shape)} beside {tuple(b.shape)}"}
        else:
            row |= _apart(a, b)
        if row["same"] is False and first is None:
            first = name
        rows.append(row)
    return rows, first


def _apart(a: Tensor, b: Tensor) -> dict[str, Any]:
    """How far two tensors are apart, and where most; equal infinities are equal."""
    gap = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf)
    finite = a[a.isfinite()]
    bound = CLOSE * float(finite.abs().max()) if finite.numel() else 0.0
    most = float(gap.max()) if gap.numel() else 0.0
    at = [int(i) for i in torch.unravel_index(gap.argmax(), gap.shape)] if gap.numel() else []
    return {"same": most <= bound, "most": most if most < torch.inf else None, "at": at, "says": ""}

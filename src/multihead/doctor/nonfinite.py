"""NaN and inf in an output: where they first appear, and what made them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from multihead.doctor.candidate import Candidate, Failure
from multihead.doctor.causes.precision import CORES
from multihead.doctor.measure import Observation, same_odd_places
from multihead.doctor.parameters import role
from multihead.doctor.patient import Patient
from multihead.doctor.report import Named, Report
from multihead.doctor.variant import HALVES, RIGHT, Call, Specification, Variant
from multihead.doctor.weights import Weights

LOUDEST = 2**12  # times x, to bring the scores beyond what e can be raised to
SCORES = (
    "The scores leave the range of {dtype}, which ends at {limit:,.0f}: they become inf, and inf − inf in the softmax "
    "is NaN. q and k grow in training, and their product with them; before the scale it is √D times larger."
)
EXP = (
    "e is raised to the scores as they are. In {dtype} that is inf from a score of {log:.4g} on, and inf/inf is NaN; "
    "where all scores of a row are far below 0 it is 0/0. A softmax takes the row's largest score away first, which "
    "changes nothing else."
)
MADE = {
    "scores": (
        "scores overflow before the scale",
        SCORES,
        "scores = (q * scale) @ k.transpose(-2, -1)       # the scale first; or in float32: q.float() @ k.float()…",
    ),
    "scaled": (
        "scores overflow",
        SCORES,
        "scores = q.float() @ k.float().transpose(-2, -1) * scale",
    ),
    "exp": (
        "softmax without subtracting the maximum",
        EXP,
        "weights = scores.softmax(dim=-1)                 # or (scores - scores.amax(-1, keepdim=True)).exp()",
    ),
}


def odd(seen: Observation) -> Tensor:
    """(B, Q): rows that count and hold NaN or inf where the right ones are finite."""
    rows = (~seen.output.isfinite() & seen.right().isfinite()).any(-1)
    return rows if seen.rows is None else rows & seen.rows


def is_odd(patient: Patient, weights: Weights) -> bool:
    return any(bool(odd(seen).any()) for seen in patient.own(weights))


def explain(patient: Patient, weights: Weights, notes: Sequence[str], subject: str) -> Report | None:
    """A report, if leaving the range of a dtype somewhere gives these NaN and all the other numbers."""
    own = patient.own(weights)
    if not is_odd(patient, weights):
        return None
    for what, dtype, variant in _overflows(own[0].dtype):
        if not all(seen.explains(variant) if variant.lower else seen.equals(variant) for seen in own):
            continue
        name, why, fix = MADE[what]
        limit = torch.finfo(getattr(torch, dtype)).max
        cause = Named(name, 3, why.format(dtype=dtype, limit=limit, log=math.log(limit)), fix)
        seen = next(one for one in own if bool(odd(one).any()))
        compared = sum(one.output.numel() for one in own)
        but = f" as far as {dtype} is exact" if variant.lower else ""
        return Report(
            "diagnosed",
            f"{name[0].upper()}{name[1:]} (step 3): its output holds {_kinds(seen.output)}.",
            (cause,),
            where=(_first(seen, variant, what, dtype),),
            sure=f"certain: the seven steps in the range of {dtype} give {_kinds(seen.output)} in the same places, and "
            f"the other numbers of {compared:,} in {len(own)} calls agree{but}",
            notes=tuple(notes),
            subject=subject,
        )
    return None


def unknown(patient: Patient, weights: Weights, notes: Sequence[str], subject: str) -> Report:
    """No overflow explains it: say where it shows."""
    own = patient.own(weights)
    seen = next(one for one in own if bool(odd(one).any()))
    rows = odd(seen)
    b, q = (int(n) for n in rows.nonzero()[0])
    sentences = [
        f"{int(rows.sum())} of {rows.numel()} rows hold {_kinds(seen.output)} where the right numbers are finite; the "
        f"first is row {q}" + (f" of sequence {b}" if rows.shape[0] > 1 else "")
    ]
    if seen is not own[0]:
        sentences[0] += f"; not with your x, but with random items of up to {float(seen.call.x.max()):.3g}"
    limit = torch.finfo(seen.dtype).max
    for name, step in (("q_heads", 1), ("k_heads", 1), ("v_heads", 1), ("output", 7)):
        largest = float(seen.exact.trace()[name].abs().max())
        if largest > limit:
            sentences.append(
                f"in step {step} `{name}` reaches {largest:,.0f}, and {_name(seen.dtype)} ends at {limit:,.0f}"
            )
    sentences += _inside(patient.candidate, seen)
    return Report(
        "unknown",
        f"Its output holds {_kinds(seen.output)}.",
        where=tuple(sentences),
        notes=tuple(notes),
        subject=subject,
    )


def unguarded(candidate: Candidate, weights: Weights, call: Call) -> str | None:
    """A note, if louder items show that the softmax of a healthy candidate does not take the maximum away."""
    variant = replace(RIGHT, overflow=f"exp:{_name(call.x.dtype)}")
    limit = math.log(torch.finfo(call.x.dtype).max)
    loud = _loud(weights, call, limit)
    if loud is None:
        return None
    try:
        out = candidate.answer(loud).double()
    except Failure:
        return None
    spec = Specification(weights, loud)
    right, without = spec.run(), spec.run(variant)
    if out.shape != right.shape or bool(out.isfinite().all()) or not bool(right.isfinite().all()):
        return None
    if not same_odd_places(out, without):
        return None
    return (
        f"its softmax does not subtract the row's largest score first: here that changes nothing, but from a score of "
        f"{limit:.3g} on (in {_name(call.x.dtype)}) it gives NaN"
    )


def _overflows(own: torch.dtype) -> Iterator[tuple[str, str, Variant]]:
    """What leaves the range of which dtype; where it is not the candidate's own, what is finite is rounded as well."""
    for dtype in dict.fromkeys((_name(own), "float16", "float32")):
        for what in ("scores", "scaled", "exp"):
            yield what, dtype, replace(RIGHT, overflow=f"{what}:{dtype}")
    if own in HALVES.values():
        return
    for changes in [{"product": "float16"}, *CORES["float16"]]:
        yield "scores", "float16", replace(RIGHT, **changes)
    yield "scaled", "float16", replace(RIGHT, product="scores: float16")


def _loud(weights: Weights, call: Call, limit: float) -> Call | None:
    """The call with x, and context, so much larger that some scores are half as large again as `limit`."""
    if weights.softcap is not None and weights.softcap <= limit:
        return None
    factor = 1.0
    while factor <= LOUDEST:
        context = None if call.context is None else call.context * factor
        loud = replace(call, x=call.x * factor, context=context)
        spec = Specification(weights, loud)
        trace = spec.trace()
        k = spec.heads_of(trace["k_heads"], RIGHT)
        if float((trace["q_heads"] @ k.mT).max()) * weights.scale > 1.5 * limit:
            return loud
        factor *= 2
    return None


def _first(seen: Observation, variant: Variant, what: str, dtype: str) -> str:
    """Where the first NaN is made: step, head and query, and by which score."""
    trace = seen.exact.trace(variant)
    b, h, q, _ = (int(n) for n in (~trace["weights"].isfinite()).nonzero()[0])
    k_heads = seen.exact.heads_of(trace["k_heads"], RIGHT)
    scores = trace["q_heads"][b, h, q] @ k_heads[b, h].T * seen.weights.scale
    key = int(scores.argmax())
    place = f"{_kinds(seen.output)} first appears in step 3, head {h}, query {q}, sequence {b}: "
    limit = torch.finfo(getattr(torch, dtype)).max
    if what == "exp":
        return f"{place}its score with key {key} is {float(scores[key]):.4g}, and e to it is beyond {limit:.3g}"
    reached = float(scores[key]) / (seen.weights.scale if what == "scores" else 1)
    return f"{place}its product with key {key} is {reached:,.0f}, and {dtype} ends at {limit:,.0f}"


def _inside(candidate: Candidate, seen: Observation) -> list[str]:
    """Which of a module's projections NaN first passes through."""
    module, said = candidate.module, []
    if module is None:
        return []
    hooks = []

    def hook(name: str, letter: str) -> Any:
        def look(child: nn.Module, given: tuple, out: Any) -> None:
            taken = given[0] if given and isinstance(given[0], Tensor) else None
            if letter == "o" and taken is not None and not bool(taken.isfinite().all()):
                *_, q, column = (int(n) for n in (~taken.isfinite()).nonzero()[0])
                head = column // seen.weights.sizes.V
                said.append(
                    f"{_kinds(taken)} goes into {name}, first in head {head}, query {q}: so look in steps 2 to 6"
                )
            elif isinstance(out, Tensor) and not bool(out.isfinite().all()):
                step = 7 if letter == "o" else 1
                said.append(f"{_kinds(out)} comes out of {name}: so look in step {step}")

        return look

    for name, child in module.named_modules():
        letter = role(f"{name}.weight") if isinstance(child, nn.Linear) else None
        if name and letter is not None:
            hooks.append(child.register_forward_hook(hook(name, letter)))
    try:
        candidate.answer(seen.call)
    except Failure:
        return []
    finally:
        for handle in hooks:
            handle.remove()
    return said[:1]


def _kinds(t: Tensor) -> str:
    return " and ".join(word for word, there in (("NaN", t.isnan().any()), ("inf", t.isinf().any())) if bool(there))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

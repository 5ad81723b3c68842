"""What was found, put into words: each function makes one kind of report."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from multihead.doctor.candidate import Candidate, Failure
from multihead.doctor.localise import Findings
from multihead.doctor.measure import Observation, gap
from multihead.doctor.report import Named, Report, Value
from multihead.doctor.search import Match
from multihead.doctor.variant import Call
from multihead.doctor.weights import Weights
from multihead.layer.trace import STEPS

MOST_VALUES = 4
IN_PLACE = Named(
    "changes its input in place",
    None,
    "After the call x (or the context) holds other numbers than before: the caller's tensor was overwritten, and "
    "whoever uses it next, the residual connection first of all, gets the wrong one.",
    "x = x * gain                     # not x *= gain, x.add_(…), out=x",
)


def another_dtype(mine: torch.dtype, wanted: torch.dtype) -> Named:
    mine_name, wanted_name = (str(d).removeprefix("torch.") for d in (mine, wanted))
    return Named(
        f"the output is {mine_name} for an input of {wanted_name}",
        None,
        "The output has another dtype than the input: somewhere a tensor of another dtype was made (a constant, a "
        "mask, a float64 array), and it carried the rest with it.",
        f"return output.to(x.dtype)        # better: make every new tensor with dtype=x.dtype ({wanted_name})",
    )


# Reports that need no numbers


def could_not(problem: str) -> Report:
    return Report("unknown", "It could not be examined.", where=(problem,))


def failed(failure: Failure, call: Call, notes: Sequence[str]) -> Report:
    """The candidate did not answer."""
    given = f"called with x {tuple(call.x.shape)}" + (
        "" if call.context is None else f", context {tuple(call.context.shape)}"
    )
    where = [f"{given}: {failure.message}"] + ([f"it was in {failure.where}"] if failure.where else [])
    headline = "It raises an exception." if failure.what == "exception" else "It returns nothing that can be compared."
    return Report("unknown", headline, where=tuple(where), notes=tuple(notes))


def odd_shape(out: Tensor, wanted: tuple[int, ...], seen: Observation, notes: Sequence[str]) -> Report:
    """The output has another shape: an intermediate of the seven steps, perhaps."""
    if not out.dtype.is_floating_point and tuple(out.shape) == wanted:
        return Report("unknown", f"It returns {out.dtype} numbers: expected floating ones.", notes=tuple(notes))
    trace = seen.exact.trace() | {"transposed": seen.exact.trace()["heads"].transpose(1, 2)}
    after = {name: step.number for step in STEPS for name in step.names}
    headline = f"It returns the shape {tuple(out.shape)}: expected {wanted}."
    for name in ("heads", "transposed", "merged", "weights", "q_heads", "k_heads", "v_heads"):
        t = trace[name]
        for mine in (out, out[None]):
            if mine.shape == t.shape and out.dtype.is_floating_point and gap(mine.double(), t) <= 10 * seen.bound():
                step = after[name]
                cause = Named(
                    f"it stops after step {step}",
                    min(step + 1, 7),
                    f"What it returns is `{name}`, the result of step {step} ({STEPS[step - 1].title}): what comes "
                    "after it is missing.",
                    "\n".join(later.formula for later in STEPS[step:]),
                )
                return Report(
                    "diagnosed",
                    headline,
                    (cause,),
                    sure="the numbers are those of the intermediate",
                    notes=tuple(notes),
                )
    hints = []
    if sorted(out.shape) == sorted(wanted):
        hints.append("the axes are there in another order: look at the last transpose (step 5)")
    if out.dim() == 4:
        hints.append("it has four axes: the heads were not merged (steps 5 and 6)")
    if out.dim() == 3 and out.shape[:2] == wanted[:2]:
        hints.append(
            f"its width is {out.shape[2]}, not E={wanted[2]}: look at what the heads are merged to, and at W_o"
        )
    return Report("unknown", headline, where=tuple(hints), notes=tuple(notes))


def random(named: Named | None, out: Tensor, again: Tensor, notes: Sequence[str]) -> Report:
    """Two calls, two answers."""
    if named is None:
        return Report(
            "unknown",
            "It answers differently every time.",
            where=(
                "two calls with the same input give different outputs, in eval mode: random numbers, or a state that "
                "is kept from call to call (a cache, a counter, a running mean)",
                f"the largest difference between the two is {gap(out, again):.3g}",
            ),
            notes=tuple(notes),
        )
    return Report(
        "diagnosed",
        f"{_capital(named.cause)}.",
        (named,),
        sure=f"certain: two calls with the same input differ by up to {gap(out, again):.3g}, and with a single item "
        "the pattern is that of dropout in this place",
        notes=tuple(notes),
    )


# Reports that compare numbers


def healthy(seen: Sequence[Observation], extra: tuple[Named, ...], notes: Sequence[str], subject: str) -> Report:
    """Right on every probe; what else was found makes it ill all the same."""
    compared = sum(one.output.numel() for one in seen)
    sure = (
        f"{compared:,} numbers in {len(seen)} calls, largest difference {max(one.differs() for one in seen):.2g}, "
        f"where rounding allows {max(one.bound() for one in seen):.2g}"
    )
    if extra:
        headline = f"The numbers are right, but: {extra[0].cause}."
        return Report(
            "diagnosed", headline, extra, sure=f"the output is right: {sure}", notes=tuple(notes), subject=subject
        )
    return Report(
        "healthy", "It computes what the seven steps compute.", sure=sure, notes=tuple(notes), subject=subject
    )


def diagnosed(
    matches: Sequence[Match], seen: Sequence[Observation], extra: tuple[Named, ...], notes: Sequence[str], subject: str
) -> Report:
    """Proven by reproduction."""
    first = matches[0]
    mistakes = sorted(first.mistakes, key=lambda m: m.cause.step)
    causes = tuple(Named(m.name, m.cause.step, m.cause.explanation, m.cause.fix) for m in mistakes)
    name = " + ".join(cause.cause for cause in causes)
    others = dict.fromkeys(" + ".join(m.name for m in match.mistakes) for match in matches[1:])
    others.pop(name, None)
    worst = next((one for one in seen if one.differs() > 10 * one.bound()), seen[0])  # the user's own call comes first
    compared = sum(one.output.numel() for one in seen)
    left, wrong = max(one.differs(first.variant) for one in seen), max(one.differs() for one in seen)
    if rounded := first.variant.lower:
        v = first.variant
        what = "attention" if v.core else "the softmax" if v.precision else "the scores"
        what = "every step" if v.core.startswith("layer") else what
        beside = max(one.differs(v.unrounded) for one in seen)
        those = "the right numbers" if len(causes) == 1 else "the numbers that the other mistake gives"
        sure = (
            f"likely: rounding {what} to {rounded} explains nearly all of the departure from {those} (up to "
            f"{beside:.2g} from those, {left:.2g} from those rounded)"
        )
    else:
        what = "this mistake" if len(causes) == 1 else "these two mistakes together"
        sure = (
            f"certain: the seven steps with {what} give your output, {compared:,} numbers in {len(seen)} calls, to "
            f"within {left:.1g}; the right ones are up to {wrong:.2g} away"
        )
        sure += "" if not others else ", and so do the explanations above that cannot be told apart"
    steps = " and ".join(dict.fromkeys(f"step {cause.step}" for cause in causes))
    headline = f"{_capital(name)} ({steps})."
    return Report(
        "diagnosed",
        headline,
        causes + extra,
        tuple(list(others)[:8]),
        _values(worst.output, worst.right(), worst.right(first.variant)),
        sure,
        notes=tuple(notes),
        subject=subject,
    )


def other_weights(
    mine: Weights, wanted: Weights, seen: Sequence[Observation], notes: Sequence[str], subject: str
) -> Report:
    """The formula is right; the numbers it works with are not the reference's."""
    differ = [
        f"W_{m}"
        for m in "qkvo"
        if mine.w[m].shape != wanted.w[m].shape or gap(mine.w[m].double(), wanted.w[m].double())
    ]
    for m in "qkvo":
        a, b = mine.b[m], wanted.b[m]
        if a is not None and b is not None and gap(a.double(), b.double()):
            differ.append(f"b_{m}")
    cause = Named(
        "its weights are not the reference's",
        7 if differ in (["W_o"], ["b_o"], ["W_o", "b_o"]) else 1,
        f"On its own weights it computes exactly what the seven steps compute. But {', '.join(differ) or 'they'} "
        "differ from the reference's: they were never copied, or another checkpoint was loaded.",
        "candidate.q_proj.weight.data.copy_(reference.q_proj.weight)      # and so on; or reference=None",
    )
    worst = max(seen, key=lambda one: one.differs())
    evidence = _values(worst.output, worst.right(), None)
    sure = "certain: with its own weights read by name, every number agrees"
    return Report(
        "diagnosed",
        "The formula is right, the weights are others.",
        (cause,),
        (),
        evidence,
        sure,
        (),
        tuple(notes),
        subject,
    )


def rounding(seen: Sequence[Observation], notes: Sequence[str], subject: str) -> Report:
    worst = max(seen, key=lambda one: one.differs() / one.bound())
    times = worst.differs() / worst.bound()
    return Report(
        "unknown",
        "The formula is right, but it rounds more than it should.",
        evidence=_values(worst.output, worst.right(), None),
        where=(
            "in float64 it gives the right numbers: no step is wrong",
            f"in {str(worst.dtype).removeprefix('torch.')} its error is {times:.2g} times what rounding every "
            "operation would explain: some part of it runs in a lower precision",
        ),
        notes=tuple(notes),
        subject=subject,
    )


def unknown(
    where: Findings, seen: Observation, sharp: bool, extra: tuple[Named, ...], notes: Sequence[str], subject: str
) -> Report:
    """No known mistake, and no two, reproduce the output: say so, and say what is known."""
    low, high = where.steps
    steps = f"step {low}" if low == high else f"steps {low} to {high}" if (low, high) != (1, 7) else ""
    sentences = list(where.sentences)
    far = "far more" if seen.differs() > 100 * seen.bound() else "more"
    kind = "in float64 it differs as well, so it is not rounding" if sharp else f"it is {far} than rounding explains"
    sentences.insert(
        0, f"the largest difference is {seen.differs():.3g}, where rounding allows {seen.bound():.2g}: {kind}"
    )
    if steps and low <= high:
        sentences.append(f"so look in {steps}")
    sentences += [f"besides: {one.cause}" for one in extra]
    return Report(
        "unknown",
        "It is wrong, and no mistake known to the doctor, nor any two, explains it.",
        evidence=_values(seen.output, seen.right(), None),
        sure="that it is wrong: certain; that it is none of the known mistakes: as certain as the search is complete",
        where=tuple(sentences),
        notes=tuple(notes),
        subject=subject,
    )


# Notes


def harmless(candidate: Candidate, weights: Weights, call: Call, function: Callable[..., Any]) -> list[str]:
    """What would change nothing, and therefore could not be seen."""
    notes = []
    biases = {m: weights.b[m] for m in "qkvo"}
    plain = weights.rope is None and weights.norm is None
    if plain and _lacks_k_bias(function, biases):
        notes.append(
            "k has no bias and the others do: without RoPE and QK-norm that changes nothing, for a bias on k "
            "adds the same number to a whole row of scores"
        )
    zero = [f"b_{m}" for m, b in biases.items() if b is not None and not bool(b.any())]
    if zero:
        notes.append(f"{', '.join(zero)} of the reference is all zero: a missing bias there would not show")
    if weights.rope is not None:
        notes.append("RoPE sees differences of positions only: an offset common to q and k would change nothing")
    if call.mask is not None:
        notes.append(
            "hiding with a large finite number, or after the softmax and renormalising, would give the same "
            "numbers as −inf, except in a row that sees nothing"
        )
    return notes


def _lacks_k_bias(function: Callable[..., Any], biases: dict[str, Tensor | None]) -> bool:
    if biases["k"] is None:
        return biases["q"] is not None and biases["v"] is not None
    if not isinstance(function, nn.Module):
        return False
    from multihead.doctor.parameters import role

    named = [name for name, p in function.named_parameters() if p.dim() == 1]
    roles = {role(name) for name in named}
    return {"q", "v"} <= roles and "k" not in roles


def rows_that_do_not_count(seen: Sequence[Observation]) -> list[str]:
    """Rows that see nothing, or stand on padding, and are not as the specification has them."""
    notes = []
    for one in seen:
        if one.rows is None:
            continue
        mine, right = one.output[~one.rows], one.right()[~one.rows]
        if bool(mine.isnan().any()):
            notes.append(
                "rows that see nothing, or stand on padding, are NaN in it (here they are b_o, attention 0): keep "
                "them from the loss, for a NaN spreads through every gradient"
            )
        elif gap(mine, right) > one.bound():
            notes.append(
                "rows that see nothing, or stand on padding, hold other numbers than here; they are to be ignored "
                "anyway"
            )
    return list(dict.fromkeys(notes))


def _values(mine: Tensor, right: Tensor, hypothesis: Tensor | None) -> tuple[Value, ...]:
    """The numbers that differ most, one for each row of the output."""
    off = (mine - right).abs().nan_to_num(nan=torch.inf)
    B, Q, _ = off.shape
    per_row, column = off.max(-1)  # (B, Q)
    rows = []
    for n in per_row.flatten().argsort(descending=True, stable=True)[:MOST_VALUES].sort().values.tolist():
        b, q = divmod(n, Q)
        e = int(column[b, q])
        place = (f"sequence {b}, " if B > 1 else "") + f"row {q}, number {e}"
        told = None if hypothesis is None else float(hypothesis[b, q, e])
        rows.append(Value(place, float(mine[b, q, e]), float(right[b, q, e]), told))
    return tuple(rows)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]

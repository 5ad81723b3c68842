"""`diagnose`: from a candidate to a report."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from multihead.doctor import chance, core, findings, fit, masking, nonfinite, parameters, probes, search, unsaid
from multihead.doctor.candidate import Candidate, Failure, forms, layouts
from multihead.doctor.cause import Setting
from multihead.doctor.localise import localise
from multihead.doctor.measure import Observation
from multihead.doctor.parameters import Reading, Unreadable
from multihead.doctor.patient import Patient, twin_of
from multihead.doctor.progress import Bar
from multihead.doctor.report import Named, Report
from multihead.doctor.variant import Call
from multihead.doctor.watch import watch
from multihead.doctor.weights import Weights
from multihead.layer import MultiHeadAttention
from multihead.masks import Mask

MOST_READINGS = 64


def diagnose(
    candidate: Callable[..., Any],
    reference: MultiHeadAttention | None,
    x: Tensor,
    context: Tensor | None = None,
    mask: Mask | Tensor | None = None,
    *,
    positions: Tensor | None = None,
    heads: int | None = None,
    weights: Mapping[str, Any] | None = None,
    layout: str | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Report:
    """Compare an implementation of attention with the seven steps, and name the step it gets wrong, and why.

    Args:
        candidate: anything callable, as `candidate(x)` or `candidate(x, context)`; `mask=` is passed only if its
            signature names one. A function `f(q, k, v)` of the heads, (B,H,N,D) each, is put between the other steps.
        reference: a layer with the same weights. None: it is built from the candidate's parameters.
        x: (N,E) or (B,N,E).
        context: what keys and values are made of, in cross-attention.
        mask: what each query may see.
        positions: where the items of x stand, for RoPE, if not at 0, 1, 2 ….
        heads: H, where there is no reference.
        weights: without a reference, which parameters are which: {"q": "to_q.weight", …}; see the guide.
        layout: or the name of the layout they are in, one of `mh.weights.LAYOUTS`.
        progress: whether to show a bar when it takes longer than a second; None: in a terminal.
        options: `kv_heads=`, `head_dim=`, `context_dim=`, `rope=`, `softcap=`, `scale=`, where there is no reference.

    >>> layer = mh.MultiHeadAttention(32, heads=4)
    >>> def broken(x):
    ...     t = mh.trace(layer, x)
    ...     weights = (1.25 * t["scores"]).softmax(-1)
    ...     return layer.o_proj((weights @ t["v_heads"]).transpose(1, 2).flatten(2))
    >>> mh.diagnose(layer, layer, torch.randn(2, 5, 32)).verdict
    'healthy'
    >>> mh.diagnose(broken, layer, torch.randn(2, 5, 32)).cause
    'scale by another number (0.4419, 1.25 times the right one)'
    """
    if not callable(candidate):
        raise TypeError(f"candidate is a {type(candidate).__name__}: expected something callable")
    if not isinstance(x, Tensor) or x.dim() not in (2, 3) or not x.dtype.is_floating_point:
        what = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x is {what}: expected a floating tensor (N,E) or (B,N,E)")
    if reference is None and heads is None:
        raise ValueError("without a reference the number of heads is unknown: give heads=")
    if unknown := options.keys() - {"kv_heads", "head_dim", "context_dim", "rope", "softcap", "scale"}:
        raise TypeError(f"{sorted(unknown)}: expected kv_heads, head_dim, context_dim, rope, softcap or scale")
    unbatched = x.dim() == 2
    x = (x[None] if unbatched else x).detach()
    if context is not None:
        context = (context[None] if context.dim() == 2 else context).detach()
    call = Call(x, context, None, positions)
    call = replace(call, mask=masking.tidy(mask, *call.sizes[1:]))
    started = time.monotonic()
    with Bar(progress) as bar, ExitStack() as stack:
        module = candidate if isinstance(candidate, torch.nn.Module) else None
        trained = stack.enter_context(probes.at_rest(module))
        shaken = stack.enter_context(probes.shaken(module if reference is None else None))
        function = core.surrounded(candidate, reference, x, heads, options)
        examination = Examination(function, reference, call, unbatched, heads, weights, layout, options, bar)
        if trained and module is not None and any(getattr(child, "p", 0) for child in module.modules()):
            examination.notes.append("it was in training mode; it was examined in eval mode")
        if shaken:
            examination.notes.append(
                f"{', '.join(shaken)} held one number throughout and got random ones for the examination, so that a "
                "missing one would show"
            )
        report = examination.report()
    return replace(report, seconds=time.monotonic() - started)


@dataclass
class Examination:
    """Everything that is asked of one candidate."""

    function: Callable[..., Any]
    reference: MultiHeadAttention | None
    call: Call
    unbatched: bool
    heads: int | None
    names: Mapping[str, Any] | None
    layout: str | None
    options: dict[str, Any]
    bar: Bar
    notes: list[str] = field(default_factory=list)
    extra: list[Named] = field(default_factory=list)  # findings besides the numbers

    def report(self) -> Report:
        try:
            readings = self.readings()
        except Unreadable as problem:
            return findings.could_not(str(problem))
        self.shape = (*self.call.sizes[:2], readings[0].weights.sizes.E)
        try:
            contacts = self.first_contact(readings[0].weights)
        except Failure as failure:
            return findings.failed(failure, self.call, self.notes)
        if isinstance(contacts, Report):
            return contacts
        if chancy := self.randomness(contacts[0], readings[0].weights):
            return chancy
        patients = [self.examined(contact, readings[0].weights) for contact in contacts]
        return self.judged(patients, readings)

    def readings(self) -> list[Reading]:
        """The weights to compare with: the reference's, or those the candidate's parameters can be taken for."""
        if self.reference is not None:
            return [Reading(Weights.of(self.reference).with_norms_of(self.function), [])]
        assert self.heads is not None
        if not isinstance(self.function, torch.nn.Module):
            raise Unreadable(
                "it is a function, whose weights cannot be read: give reference=, a layer with the same weights; or "
                "name them as arguments, f(x, W_q, W_k, W_v, W_o), on the command line"
            )
        width = self.call.x.shape[-1]
        if self.layout is not None:
            return [parameters.in_layout(self.function, self.layout, width, self.heads, **self.options)]
        every = parameters.readings(self.function, width, self.heads, self.names, **self.options)
        found = []
        for reading, _ in zip(every, range(MOST_READINGS)):
            found.append(replace(reading, weights=reading.weights.with_norms_of(self.function)))
        return found

    def first_contact(self, weights: Weights) -> "list[tuple[Candidate, Tensor]] | Report":
        """Every way of calling that gives an output of the right shape; a report, or a failure, if none does."""
        self.call = self.reduced(probes.smaller(self.call))
        self.shape = (*self.call.sizes[:2], weights.sizes.E)
        first: Failure | None = None
        odd: tuple[Candidate, Tensor] | None = None
        for candidate in layouts(self.function, self.call, self.unbatched):
            found: list[tuple[Candidate, Tensor]] = []
            for form in forms(self.function, self.call, candidate.unbatched):
                tried = replace(candidate, form=form)
                try:
                    out, changed, later = tried.examine(self.call)
                except Failure as failure:
                    first = first or failure
                    continue
                if tuple(out.shape) != self.shape or not out.dtype.is_floating_point:
                    odd = odd or (tried, out)
                    continue
                if changed and not any(cause.cause == findings.IN_PLACE.cause for cause in self.extra):
                    self.extra.append(findings.IN_PLACE)
                if later:
                    self.note("it returns several things: the one with the shape of x was taken for the output")
                found.append((tried, out))
            if found:
                out = found[0][1]
                if out.dtype != self.call.x.dtype:
                    self.extra.append(findings.another_dtype(out.dtype, self.call.x.dtype))
                return found
        if odd is not None:
            seen = Observation(self.call, torch.zeros(self.shape, dtype=torch.float64), self.call.x.dtype, weights)
            return findings.odd_shape(odd[1], self.shape, seen, self.notes)
        assert first is not None
        raise first

    def reduced(self, smaller: Call) -> Call:
        """The smaller call, if the candidate takes it."""
        if smaller is self.call:
            return self.call
        for candidate in layouts(self.function, smaller, self.unbatched):
            for form in forms(self.function, smaller, candidate.unbatched):
                try:
                    replace(candidate, form=form).answer(smaller)
                except Failure:
                    continue
                B, Q, _ = smaller.sizes
                self.notes.append(f"x is large: it was examined on {B} sequences of {Q} items")
                return smaller
        return self.call

    def randomness(self, contact: tuple[Candidate, Tensor], weights: Weights) -> Report | None:
        """A report, if the candidate does not answer the same question twice alike."""
        candidate, out = contact
        again = candidate.answer(self.call)
        if torch.equal(out.nan_to_num(), again.nan_to_num()) and torch.equal(out.isnan(), again.isnan()):
            return None
        seen = Observation(self.call, out.double(), self.call.x.dtype, weights)
        if float((out - again).abs().max()) <= seen.bound():
            self.notes.append("two calls differ in their last digits: a parallel sum, not a mistake")
            return None
        named = chance.explain(candidate, weights, self.call.x.dtype)
        return findings.random(named, out.double(), again.double(), self.notes)

    def examined(self, contact: tuple[Candidate, Tensor], weights: Weights) -> Patient:
        """The candidate's answers to every probe it takes, and those of its float64 twin, if one can be made."""
        candidate, out = contact
        native = [(self.call, out)]
        refused = ""
        for probe in probes.probes(self.call, weights, not candidate.unbatched):
            try:
                answer = candidate.answer(probe)
            except Failure as failure:
                refused = refused or f"{tuple(probe.x.shape)}: {failure.message}"
                continue
            if answer.shape == (*probe.x.shape[:2], weights.sizes.E):
                native.append((probe, answer))
            else:
                refused = refused or f"{tuple(probe.x.shape)}: it gives {tuple(answer.shape)}"
        if refused:
            self.note(f"it does not take an input of shape {refused}; what only shows there was not seen")
        patient = Patient(candidate, native)
        if self.call.x.dtype != torch.float64:
            patient.twin, patient.sharp = twin_of(candidate, native)
        return patient

    def note(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)

    # The verdict

    def judged(self, patients: Sequence[Patient], readings: Sequence[Reading]) -> Report:
        for patient in patients:
            for number, reading in enumerate(readings):
                if self.is_healthy(patient, reading.weights):
                    return self.healthy(patient, reading, number)
        for patient in patients:
            for reading, mask, said in unsaid.unsaid(readings, self.call, self.reference, self.options):
                if self.is_healthy(patient, reading.weights, mask):
                    note = f"it is attention with {said}, which was not said: say so, and it is checked for it"
                    return self.healthy(patient, reading, 0, note, mask)
        for patient in patients:
            for reading in readings[:4]:
                if odd := nonfinite.explain(patient, reading.weights, self.notes, self.subject(reading)):
                    return odd
        for patient in patients:
            for reading in readings:
                if patient.sharp and all(seen.equals() for seen in patient.observations(reading.weights, True)):
                    return self.rounding(patient, reading)
        uncounted = any(seen.rows is not None for seen in patients[0].own(readings[0].weights))
        for rows in (False, True) if uncounted else (False,):
            for patient in patients:
                for reading in readings:
                    if found := self.found(patient, reading, rows, search.singles):
                        return found
        for patient in patients[:3]:
            for reading in readings[:4]:
                if found := self.found(patient, reading, True, fit.fitted):
                    return found
        if other := self.other_weights(patients):
            return other
        for patient in patients:
            for reading, mask, said in unsaid.unsaid(readings, self.call, self.reference, self.options, bases=False):
                if found := self.found(patient, reading, True, search.singles, mask=mask):
                    return replace(found, notes=(f"it was taken to have {said}, which was not said", *found.notes))
        for patient in patients[:3]:
            for reading in readings[:2]:
                if found := self.found(patient, reading, True, search.pairs, self.bar):
                    return found
        return self.unknown(patients[0], readings[0])

    def is_healthy(self, patient: Patient, weights: Weights, mask: Mask | None = None) -> bool:
        own = patient.own(weights, mask)
        if self.call.x.dtype == torch.float64 and not all(seen.equals() for seen in own):
            single = [replace(seen, dtype=torch.float32) for seen in own]
            if all(seen.equals() for seen in single):
                self.note("parts of it compute in float32: its float64 result is good to about seven digits")
                return True
        if not all(seen.equals() for seen in own):
            return False
        sharp = patient.observations(weights, True, mask) if patient.sharp else []
        if all(seen.equals() for seen in sharp):
            return True
        setting = Setting(weights, sharp[0].call)
        found = [match.variant for match in search.singles(setting, sharp)]
        return any(variant.lower for variant in found)  # no worse than its own dtype

    def healthy(
        self, patient: Patient, reading: Reading, number: int, assumed: str = "", mask: Mask | None = None
    ) -> Report:
        self.call = self.call if mask is None else replace(self.call, mask=mask)
        seen = patient.own(reading.weights, mask)
        notes = [*self.notes, *findings.harmless(patient.candidate, reading.weights, self.call, self.function)]
        if patient.candidate.form is not None and self.call.mask is not None:
            notes.insert(0, f"its {patient.candidate.form.argument} means {patient.candidate.form.meaning}")
        if assumed:
            notes.insert(0, assumed)
        elif number or len(reading.how) > 1:
            notes += reading.how if ":" in reading.how[0] else reading.how[1:]
        notes += findings.rows_that_do_not_count(seen)
        if unguarded := nonfinite.unguarded(patient.candidate, reading.weights, self.call):
            notes.append(unguarded)
        if patient.candidate.first == "sequence":
            notes.append("it was made with batch_first=False, and x was transposed for it: as it is, (B,N,E), it would "
                         "be taken for (N,B,E), and attention would run over the batch")  # fmt: skip
        return findings.healthy(seen, tuple(self.extra), notes, self.subject(reading))

    def found(
        self,
        patient: Patient,
        reading: Reading,
        rows: bool,
        look: Callable[..., list[search.Match]],
        *more: Any,
        mask: Mask | None = None,
    ) -> Report | None:
        seen = patient.observations(reading.weights, rows, mask)
        matches = look(Setting(reading.weights, seen[0].call), seen, *more)
        if not matches:
            return None
        notes = list(self.notes)
        if patient.candidate.form is not None and self.call.mask is not None:
            notes.append(f"its {patient.candidate.form.argument} was taken to mean {patient.candidate.form.meaning}")
        notes += reading.how[1:]
        return findings.diagnosed(matches, seen, tuple(self.extra), notes, self.subject(reading))

    def rounding(self, patient: Patient, reading: Reading) -> Report:
        """Right in float64, and not in its own dtype, as under autocast: what shows is in its own dtype alone."""
        own = replace(patient, sharp=[])
        return self.found(own, reading, True, search.singles) or self.unknown(patient, reading)

    def other_weights(self, patients: Sequence[Patient]) -> Report | None:
        """Whether the code is right and the weights are not the reference's."""
        if self.reference is None or not isinstance(self.function, torch.nn.Module):
            return None
        r = self.reference
        options = {"rope": r.rope, "softcap": r.softcap, "scale": r.scale, "head_dim": r.sizes.D}
        try:
            every = parameters.readings(self.function, r.sizes.E, r.sizes.H, None, **options)
            readings = [reading for reading, _ in zip(every, range(4))]
        except (Unreadable, RuntimeError):
            return None
        for patient in patients:
            for reading in readings:
                if self.is_healthy(patient, reading.weights):
                    return findings.other_weights(
                        reading.weights, Weights.of(r), patient.own(Weights.of(r)), self.notes, self.subject(reading)
                    )
        return None

    def unknown(self, patient: Patient, reading: Reading) -> Report:
        if nonfinite.is_odd(patient, reading.weights):
            return nonfinite.unknown(patient, reading.weights, self.notes, self.subject(reading))
        seen = patient.observations(reading.weights, False)
        worst = next((one for one in seen if not one.equals()), seen[0])
        probing = patient.twin or patient.candidate
        dtype = torch.float64 if patient.twin is not None else self.call.x.dtype
        if patient.sharp and all(one.equals() for one in seen):  # right in float64, wrong in its own dtype
            own = patient.own(reading.weights)
            return findings.rounding(own, self.notes, self.subject(reading))
        where = localise(patient.candidate, worst, probing, dtype)
        inside, steps = watch(probing, worst, dtype)
        where.sentences += inside
        where.steps = (max(where.steps[0], steps[0]), min(where.steps[1], steps[1]))
        notes = [*self.notes, *reading.how[1:]]
        return findings.unknown(where, worst, bool(patient.sharp), tuple(self.extra), notes, self.subject(reading))

    def subject(self, reading: Reading) -> str:
        s = reading.weights.sizes
        B, Q, K = self.call.sizes
        heads = f"H={s.H}" + (f" G={s.G}" if s.G != s.H else "") + f" D={s.D}"
        kind = "self-attention" if self.call.context is None else f"cross-attention over {K} keys"
        names = [type(part).__name__ for part in masking.parts(self.call.mask)]
        mask = f", mask {' & '.join(names)}" if names else ", no mask"
        source = (
            "the reference's weights"
            if self.reference is not None
            else f"its own weights, {reading.how[0].partition(':')[0]}"
        )
        dtype = str(self.call.x.dtype).removeprefix("torch.")
        return f"{kind}, E={s.E} {heads}, {B} × {Q} items, {dtype}{mask}; compared with the seven steps on {source}"

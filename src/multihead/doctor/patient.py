"""A candidate and what it answered: natively, and as its float64 twin, which shows the formula without the rounding."""

import copy
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from multihead.doctor import masking
from multihead.doctor.candidate import Candidate, Failure
from multihead.doctor.measure import Observation
from multihead.doctor.variant import Call
from multihead.doctor.weights import Weights
from multihead.masks import Mask


@dataclass
class Patient:
    """The candidate with one way to pass the mask, and what it answered: natively, and as a float64 twin."""

    candidate: Candidate
    native: list[tuple[Call, Tensor]]
    twin: Candidate | None = None
    sharp: list[tuple[Call, Tensor]] = field(default_factory=list)

    def observations(self, weights: Weights, rows: bool, mask: Mask | None = None) -> list[Observation]:
        """As sharply as can be: what is right of the formula shows without the candidate's rounding."""
        seen = self.sharp or self.native
        return [_observe(call, out, weights, rows, mask, out.dtype == torch.float64) for call, out in seen]

    def own(self, weights: Weights, mask: Mask | None = None) -> list[Observation]:
        return [_observe(call, out, weights, True, mask, False) for call, out in self.native]


def _observe(call: Call, out: Tensor, weights: Weights, rows: bool, mask: Mask | None, sharp: bool) -> Observation:
    call = call if mask is None else replace(call, mask=mask)
    counted = None
    if rows and call.mask is not None:
        B, Q, K = call.sizes
        nothing = ~masking.dense(call.mask, B, Q, K, call.x.device).any(-1).any(1)
        ignored = nothing | (masking.padded_queries(call.mask, B, Q, K, call.x.device) & (call.context is None))
        counted = ~ignored if bool(ignored.any()) else None
    # A twin may compute parts in float32 on purpose (RoPE's angles, the softmax): that is no mistake.
    low = torch.float32 if sharp else min(out.dtype, call.x.dtype, key=lambda d: -torch.finfo(d).eps)
    return Observation(call, out.double(), low, weights, counted)


def _doubled(module: nn.Module) -> nn.Module:
    """A copy in float64; an RMSNorm whose eps is that of its dtype keeps the one it had."""
    copied = copy.deepcopy(module)
    for child in copied.modules():
        if isinstance(child, nn.RMSNorm) and child.eps is None and child.weight is not None:
            child.eps = torch.finfo(child.weight.dtype).eps
    return copied.double()


def twin_of(
    candidate: Candidate, native: list[tuple[Call, Tensor]]
) -> tuple[Candidate | None, list[tuple[Call, Tensor]]]:
    """The candidate in float64, and its answers; (None, []) if there is no such thing."""
    twin = candidate
    if candidate.module is not None:
        try:
            twin = replace(candidate, function=_doubled(candidate.module))
        except Exception:
            return None, []
    sharp = []
    for call, out in native:
        wide = replace(call, x=call.x.double(), context=None if call.context is None else call.context.double())
        try:
            answer = twin.answer(wide)
        except Failure:
            return None, []
        if answer.dtype != torch.float64 or answer.shape != out.shape:
            return None, []
        sharp.append((wide, answer))
    return twin, sharp

"""What a candidate and the specification hold at each step, as far as the candidate shows it or the doctor can tell."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from multihead.doctor import masking, probes, search
from multihead.doctor.candidate import Failure
from multihead.doctor.cause import Setting
from multihead.doctor.examine import Examination
from multihead.doctor.parameters import Unreadable, role
from multihead.doctor.progress import Bar
from multihead.doctor.variant import RIGHT, Call, Variant
from multihead.doctor.weights import Weights
from multihead.layer import MultiHeadAttention
from multihead.masks import Mask

ORDER = ("q", "k", "v", "q_heads", "k_heads", "v_heads", "weights", "heads", "merged", "output")


@dataclass
class Exhibit:
    """The first row of the batch of each tensor: right, yours where it was seen, and rebuilt from the diagnosis."""

    right: dict[str, Tensor] = field(default_factory=dict)
    yours: dict[str, Tensor] = field(default_factory=dict)
    rebuilt: dict[str, Tensor] = field(default_factory=dict)
    weights: Weights | None = None  # that it was compared with

    def layer(self) -> MultiHeadAttention | None:
        """A layer of ours with these weights, norms apart: the specification, to be explored."""
        w = self.weights
        if w is None or w.norm is not None or w.inner:
            return None
        s = w.sizes
        made = MultiHeadAttention(
            s.E, s.H, kv_heads=s.G, head_dim=s.D, value_dim=s.V, context_dim=s.C, rope=w.rope or False,
            softcap=w.softcap, scale=w.scale,
        )  # fmt: skip
        with torch.no_grad():
            for letter in "qkvo":
                getattr(made, f"w_{letter}").copy_(w.w[letter])
                bias, mine = w.b[letter], getattr(made, f"{letter}_proj").bias
                mine.zero_() if bias is None else mine.copy_(bias.flatten())
        return made.eval()


def exhibit(
    candidate: Callable[..., Any],
    reference: MultiHeadAttention | None,
    x: Tensor,
    context: Tensor | None = None,
    mask: Mask | Tensor | None = None,
    *,
    heads: int | None = None,
    weights: Any = None,
    layout: str | None = None,
    **options: Any,
) -> Exhibit:
    """As `diagnose` takes them; empty where the candidate could not be called."""
    unbatched = x.dim() == 2
    x = (x[None] if unbatched else x).detach()
    context = None if context is None else (context[None] if context.dim() == 2 else context).detach()
    call = Call(x, context, None, None)
    call = replace(call, mask=masking.tidy(mask, *call.sizes[1:]))
    module = candidate if isinstance(candidate, nn.Module) else None
    with Bar(False) as bar, ExitStack() as stack:
        stack.enter_context(probes.at_rest(module))
        stack.enter_context(probes.shaken(module if reference is None else None))
        asked = Examination(candidate, reference, call, unbatched, heads, weights, layout, options, bar)
        try:
            return _shown(asked, module)
        except (Failure, Unreadable):
            return Exhibit()


def _shown(asked: Examination, module: nn.Module | None) -> Exhibit:
    readings = asked.readings()
    asked.shape = (*asked.call.sizes[:2], readings[0].weights.sizes.E)
    contacts = asked.first_contact(readings[0].weights)
    if not isinstance(contacts, list):
        return Exhibit()
    patient = asked.examined(contacts[0], readings[0].weights)
    fitting = next((r for r in readings if asked.is_healthy(patient, r.weights)), None)
    variant: Variant | None = None if fitting is None else RIGHT
    reading = fitting or readings[0]
    for tried in readings if fitting is None else ():
        seen = patient.observations(tried.weights, False)
        matches = search.singles(Setting(tried.weights, seen[0].call), seen)
        if matches:
            reading, variant = tried, matches[0].variant
            break
    exact = patient.observations(reading.weights, False)[0].exact
    passed: dict[str, Tensor] = {}
    hooks = _hooks(module, passed)
    try:
        passed["output"] = patient.candidate.answer(asked.call)
    finally:
        for hook in hooks:
            hook.remove()

    def tensors(chosen: Variant) -> dict[str, Tensor]:
        found = {name: exact.projected(n, chosen) for n, name in enumerate("qkv")} if chosen is RIGHT else {}
        return {name: t[0].float() for name, t in (found | exact.trace(chosen)).items()}

    right = tensors(RIGHT)
    yours = {}
    for name in (n for n in ORDER if n in passed and n in right):
        t = passed[name].detach().float()
        t = t[0] if t.dim() > 2 else t  # the first row of the batch
        if t.numel() == right[name].numel():
            yours[name] = t.reshape(right[name].shape)
    return Exhibit(right, yours, {} if variant is None or variant is RIGHT else tensors(variant), reading.weights)


def _hooks(module: nn.Module | None, passed: dict[str, Tensor]) -> list[Any]:
    """Keep what comes out of the projections that can be told by their names, and what goes into the last one."""
    hooks = []
    for name, child in () if module is None else module.named_modules():
        letter = role(f"{name}.weight") if name and isinstance(child, nn.Linear) else None
        if letter in ("q", "k", "v", "o"):

            def keep(_: nn.Module, given: Any, out: Any, letter: str = letter) -> None:
                passed["merged" if letter == "o" else letter] = given[0] if letter == "o" else out

            hooks.append(child.register_forward_hook(keep))
    return hooks

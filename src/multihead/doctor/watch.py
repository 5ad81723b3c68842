"""Watching a module's submodules: which intermediates of the seven steps pass through them as they should."""

from typing import Any

import torch
from torch import Tensor, nn

from multihead.doctor.candidate import Candidate, Failure
from multihead.doctor.measure import Observation
from multihead.doctor.parameters import role
from multihead.doctor.variant import RIGHT


def watch(candidate: Candidate, seen: Observation, dtype: torch.dtype) -> tuple[list[str], tuple[int, int]]:
    """Sentences about q, k, v and the merged heads inside the candidate, and the steps that are left for a mistake."""
    module = candidate.module
    if module is None:
        return [], (1, 7)
    passed: dict[str, Tensor] = {}
    hooks = []
    for name, child in module.named_modules():
        letters = role(f"{name}.weight") if isinstance(child, nn.Linear) else None
        if name and letters in ("q", "k", "v", "o"):

            def hook(child: nn.Module, given: Any, out: Any, name: str = name, letters: str = letters) -> None:
                kept = given[0] if letters == "o" else out
                if isinstance(kept, Tensor):
                    passed[f"{letters} {name}"] = kept.detach().double()

            hooks.append(child.register_forward_hook(hook))
    try:
        candidate.answer(seen.call, dtype)
    except Failure:
        return [], (1, 7)
    finally:
        for handle in hooks:
            handle.remove()
    sentences, low, high = [], 1, 7
    right_so_far = 0
    for key, t in passed.items():
        letters, name = key.split(" ", 1)
        if letters == "o":
            wanted = seen.exact.trace()["merged"]
        else:
            wanted = seen.exact.projected("qkv".index(letters), RIGHT).flatten(2)
        if t.shape != wanted.shape:
            continue
        equal = float((t - wanted).abs().nan_to_num(nan=torch.inf).max()) <= 10 * seen.bound()
        what = "goes into" if letters == "o" else "comes out of"
        trace_name = "merged" if letters == "o" else letters
        verdict = "is right" if equal else f"is not `{trace_name}` of the seven steps"
        sentences.append(f"what {what} {name} {verdict}")
        if letters == "o":
            low, high = (7, 7) if equal else (low, 6)
        elif not equal:
            low, high = 1, 1
        else:
            right_so_far += 1
    if right_so_far >= 3 and high > 1 and low == 1:
        low = 2
    return sentences, (low, high)

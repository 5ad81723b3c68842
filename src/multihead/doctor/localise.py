"""When no known mistake fits: where the output differs, and what that says about the step."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from multihead.doctor import masking
from multihead.doctor.candidate import Candidate, Failure
from multihead.doctor.measure import Observation
from multihead.doctor.variant import RIGHT, Call
from multihead.masks import Padding

MOST = 6  # numbers in a list


@dataclass
class Findings:
    """Sentences about where a mistake shows, and the steps it can be in."""

    sentences: list[str]
    steps: tuple[int, int] = (1, 7)


def localise(candidate: Candidate, seen: Observation, probing: Candidate, dtype: torch.dtype) -> Findings:
    """What the output tells: rows, output groups, heads, keys; and what it depends on that it should not."""
    found = Findings([])
    bound = seen.bound()
    off = (seen.output - seen.right()).abs().nan_to_num(nan=torch.inf) > bound  # (B, Q, E)
    _rows(found, off)
    _groups(found, off, seen.weights.sizes.H)
    heads = _heads(found, seen, bound)
    if heads is not None:
        _keys(found, seen, heads, bound)
    _dependencies(found, probing, seen, dtype)
    return found


def listed(numbers: list[int]) -> str:
    shown = ", ".join(str(n) for n in numbers[:MOST])
    return shown + (f", … ({len(numbers)} in all)" if len(numbers) > MOST else "")


def _some(what: str, wrong: list[int], count: int) -> str | None:
    if not wrong:
        return None
    if len(wrong) == count:
        return f"all {count} {what} differ" if count > 1 else None
    right = [n for n in range(count) if n not in wrong]
    return f"of {count} {what}, these differ: {listed(wrong)}; these are right: {listed(right)}"


def _rows(found: Findings, off: Tensor) -> None:
    rows = off.any(2).any(0)
    sentence = _some("rows", [int(n) for n in rows.nonzero()], rows.numel())
    found.sentences += [sentence] if sentence else []
    batch = off.any(2).any(1)
    if off.shape[0] > 1 and not bool(batch.all()):
        found.sentences.append(f"only batch rows {listed([int(n) for n in batch.nonzero()])} differ")


def _groups(found: Findings, off: Tensor, H: int) -> None:
    if off.shape[2] % H or H == 1:
        return
    groups = off.unflatten(2, (H, -1)).any(3).any(1).any(0)
    if not bool(groups.all()):
        sentence = _some(f"groups of {off.shape[2] // H} outputs", [int(n) for n in groups.nonzero()], H)
        found.sentences += [sentence] if sentence else []


def _heads(found: Findings, seen: Observation, bound: float) -> Tensor | None:
    """The candidate's heads, (B, H, Q, V), as far as W_o can be undone; None where it cannot."""
    s, w = seen.weights.sizes, seen.weights
    if s.H * s.V > s.E or not bool(seen.output.isfinite().all()):
        return None
    matrix = w.w["o"].double().flatten(0, 1)  # (H·V, E)
    strength = torch.linalg.svdvals(matrix)
    if float(strength[-1]) < 1e-6 * float(strength[0]):
        return None
    bias = 0 if w.b["o"] is None else w.b["o"].double()
    flat = (seen.output - bias).flatten(0, 1)
    merged = torch.linalg.lstsq(matrix.T, flat.T).solution.T  # (B·Q, H·V)
    if float((merged @ matrix - flat).abs().max()) > 10 * bound:
        found.sentences.append(
            "the output is not merged·W_o + b_o for any merged heads: step 7 is wrong, or comes twice"
        )
        found.steps = (7, 7)
        return None
    heads = merged.view(*seen.output.shape[:2], s.H, s.V).transpose(1, 2)
    right = seen.exact.trace()["heads"]
    limit = 10 * bound / float(strength[-1])
    wrong = ((heads - right).abs() > limit).flatten(2).any(2).any(0)
    sentence = _some("heads", [int(n) for n in wrong.nonzero()], s.H)
    if sentence:
        found.sentences.append(f"with W_o undone, {sentence}")
    return heads


def _keys(found: Findings, seen: Observation, heads: Tensor, bound: float) -> None:
    """The candidate's own weights, (B, H, Q, K), where each head has at least as many numbers as there are keys."""
    trace = seen.exact.trace()
    v = seen.exact.heads_of(trace["v_heads"], RIGHT)  # (B, H, K, V)
    K = v.shape[2]
    if v.shape[3] < K:
        return
    weights = torch.linalg.lstsq(v.mT, heads.mT).solution.mT
    left = float((weights @ v - heads).abs().max())
    if left > 1e-3 * float(heads.abs().max()):
        found.sentences.append(
            "its heads are no mixture of the values they should read: these are wrong (steps 1, 2), another head's, or "
            "spoilt after step 3"
        )
        return
    found.sentences.append(
        "its heads are mixtures of the right values, by other weights (or of the right values in another order): steps "
        "5 to 7 are right"
    )
    found.steps = (1, 4)
    limit = max(1e-4, 100 * bound)
    right = trace["weights"]
    sums = weights.sum(-1)
    if float((sums - 1).abs().max()) > limit and float((right.sum(-1) - 1).abs().max()) < limit:
        low, high = float(sums.min()), float(sums.max())
        sums = f"{low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} … {high:.3g}"
        found.sentences.append(f"the weights of a row add up to {sums} instead of 1: step 3")
        found.steps = (3, 3)
    if float(weights.min()) < -limit:
        found.sentences.append(f"some weights are negative (down to {float(weights.min()):.3g}): step 3")
        found.steps = (3, 3)
    B, Q = weights.shape[0], weights.shape[2]
    hidden = ~masking.dense(seen.call.mask, B, Q, K, weights.device)
    leaked = (weights.abs() > limit) & hidden
    if bool(leaked.any()):
        _, _, q, k = (int(n) for n in leaked.nonzero()[0])
        found.sentences.append(f"hidden keys have weight: query {q} gives key {k} {float(weights[leaked][0]):.3g}")
        found.steps = (3, 3)
    keys = ((weights - right).abs() > limit).flatten(0, 2).any(0)
    sentence = _some("keys", [int(n) for n in keys.nonzero()], K)
    if sentence and not bool(keys.all()):
        found.sentences.append(f"by their weights, {sentence}")
    _ratio(found, weights, right, hidden, limit)


def _ratio(found: Findings, weights: Tensor, right: Tensor, hidden: Tensor, limit: float) -> None:
    """Whether the scores are the right ones times a number: the logarithms of weights say so, up to each row's sum."""
    usable = (weights > limit) & (right > limit) & ~hidden
    if int(usable.sum()) < 8:
        return
    mine, wanted = weights.clamp(min=1e-30).log(), right.clamp(min=1e-30).log()
    count = usable.sum(-1, keepdim=True).clamp(min=1)
    mine, wanted = ((t - (t * usable).sum(-1, keepdim=True) / count) * usable for t in (mine, wanted))
    factor = float((mine * wanted).sum() / wanted.square().sum().clamp(min=1e-30))
    left = float((mine - factor * wanted).square().sum() / mine.square().sum().clamp(min=1e-30))
    if left < 1e-4 and abs(factor - 1) > 1e-3:
        found.sentences.append(f"the scores are {factor:.4g} times the right ones: look at the scale (step 3)")
        found.steps = (3, 3)


def _dependencies(found: Findings, candidate: Candidate, seen: Observation, dtype: torch.dtype) -> None:
    """What changes that should not: rows before a changed item, rows that cannot see it, other sequences."""
    call = seen.call
    B, Q, K = call.sizes
    allowed = masking.dense(call.mask, B, Q, K, call.x.device).any(1)  # (B, Q, K)

    def moved(changed: Call) -> Tensor | None:
        try:
            before, after = candidate.answer(call, dtype).double(), candidate.answer(changed, dtype).double()
        except Failure:
            return None
        return (after - before).abs().nan_to_num(nan=torch.inf).amax(-1) > 100 * seen.bound()  # (B, Q)

    if call.context is None and not bool(allowed.all()):
        for key in (K - 1, 0):
            blind = ~allowed[..., key]
            blind[:, key] = False  # a row always depends on its own query
            if not bool(blind.any()):
                continue
            x = call.x.clone()
            x[:, key] += 1
            shifted = moved(replace(call, x=x))
            if shifted is not None and bool((shifted & blind).any()):
                q = int((shifted & blind).nonzero()[0, 1])
                padded = any(isinstance(part, Padding) for part in masking.parts(call.mask))
                kind = "padding, or another hidden item" if padded else "the future" if key > q else "a hidden item"
                found.sentences.append(
                    f"it depends on {kind}: changing item {key} changes row {q}, which may not see it"
                )
                break
    if B > 1:
        x = call.x.clone()
        x[-1] += 1
        shifted = moved(replace(call, x=x))
        if shifted is not None and bool(shifted[:-1].any()):
            found.sentences.append("it depends on the batch neighbour: changing the last sequence changes the others")
    if call.mask is None and seen.weights.rope is None and call.context is None and Q > 2:
        order = torch.tensor([1, 0, *range(2, Q)])
        try:
            turned = candidate.answer(replace(call, x=call.x[:, order]), dtype).double()
            plain = candidate.answer(call, dtype).double()[:, order]
        except Failure:
            return
        if float((turned - plain).abs().nan_to_num(nan=torch.inf).max()) > 100 * seen.bound():
            found.sentences.append(
                "it depends on the order of the items, which attention without positions and mask does not: positions "
                "are mixed up (steps 2, 5) or enter where they should not"
            )

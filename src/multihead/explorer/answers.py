"""The answers of the explorer, route by route: a checked request and a subject in, words and tensors out."""

import base64
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from multihead import heads as finder
from multihead.explorer.request import Refused, Request, as_mask, said_of, said_of_seen
from multihead.explorer.subject import Items, Subject, allowed_by
from multihead.explorer.tokens import Token, named
from multihead.explorer.wire import Answer, narrow
from multihead.layer import MultiHeadAttention
from multihead.layer.trace import STEPS, Trace
from multihead.lens import Lens
from multihead.masks import Mask

THUMBNAIL = 32  # bins of a thumbnail, down and across
MOST_ROLLOUT = 16 * 2**20  # bytes: it takes the square of the items, once for each layer
LIKELIEST = 200  # tokens whose text goes with a prediction
SINGLE = ("x", "q", "q_heads", "k_heads", "v_heads", "weights", "heads", "output")  # of one token after a cache

METRICS = (
    ("induction", "Induction", "the weight on what came after earlier occurrences of the same token", "share"),
    ("previous", "Previous", "the weight on the item before", "share"),
    ("first", "First", "the weight on the first item, where heads rest that have nothing to do", "share"),
    ("self", "Self", "the weight on the item itself", "share"),
    ("entropy", "Entropy", "how spread the weights are, on the mean over queries; 0: all on one key", "nats"),
    ("distance", "Distance", "how far the head looks, on the mean over queries, weighted by attention", "items"),
)


def tokens(subject: Subject, request: Request) -> Answer:
    found, count = subject.cut(request.text)
    return Answer({"tokens": found, "count": count, "cut": count > len(found)})


def trace(subject: Subject, request: Request) -> Answer:
    name, layer, sizes = subject.layer(request.layer)
    items = subject.read(request.input)
    mask = as_mask(request.mask, items.count)
    with subject.without(request):
        traced = subject.trace(items, request.layer, allowed_by(subject, request, mask))
    return of_trace(traced, subject, items, request, name, layer, sizes)


def of_trace(
    traced: Trace,
    subject: Subject,
    items: Items,
    request: Request,
    name: str,
    layer: MultiHeadAttention | None,
    sizes: dict[str, int],
) -> Answer:
    """A trace that is there already."""
    tensors = {name: t.float() for name, t in traced.items()}
    hidden = tensors["masked"] == -torch.inf  # (H, Q, K)
    alike = bool((hidden == hidden[:1]).all())
    tensors["allowed"] = ~hidden[0] if alike else ~hidden
    own = said_of(subject.mask) or (said_of_seen(tensors["allowed"]) if alike else None)
    tokens, keys = _names_of_items(traced, items)
    meta: dict[str, Any] = {
        "model": subject.id,
        "layer": request.layer,
        "layer_name": name,
        "sizes": sizes,
        "tokens": tokens,
        "steps": [vars(step) | {"names": list(step.names)} for step in STEPS],
        "mask": own if request.mask is None else dict(request.mask),
        "mask_text": _in_words(traced.mask, bool(hidden.any())),
        "grid": None if subject.grid is None else vars(subject.grid),
        "missing": [name for step in STEPS for name in step.names if name not in tensors],
    } | ({} if keys is None else {"key_tokens": keys})
    of_layer = traced.layer if layer is None else layer
    meta |= _settings(of_layer, traced, tensors)
    if items.pixels is not None:
        tensors["pixels"] = items.pixels
    return Answer(meta, tensors)


def _names_of_items(traced: Trace, items: Items) -> tuple[list[Token], list[Token] | None]:
    """A name for each query, and for each key where they are others; numbers where a layer has other items."""
    Q, K = traced["weights"].shape[-2:]
    tokens = items.tokens if items.count == Q else named([str(n) for n in range(Q)])
    if "context" not in traced and Q == K and "key_tokens" not in items.extra:
        return tokens, None
    keys = items.extra.get("key_tokens")
    return tokens, keys if keys is not None and len(keys) == K else named([str(n) for n in range(K)])


def _settings(layer: MultiHeadAttention | None, traced: Trace, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What else the layer does between the steps; its tensors join the others."""
    told, turn = traced.options, traced.options.get("rope")
    if layer is not None and layer.rope is not None:
        angles = torch.arange(tensors["x"].shape[0])[:, None] * layer.rope.frequencies(layer.sizes.D).cpu()
        turn = angles.cos(), angles.sin(), layer.rope.pairing  # (N, dim/2) each
    if turn is not None:
        tensors["rope_cos"], tensors["rope_sin"] = turn[0].float(), turn[1].float()
    if layer is not None and layer.sinks is not None:
        tensors["sinks"] = layer.sinks.detach().float()
    rope = None if turn is None else {"dim": 2 * turn[0].shape[-1], "interleaved": turn[2] == "interleaved"}
    return {
        "scale": told.get("scale", traced.sizes.D**-0.5) if layer is None else layer.scale,
        "softcap": told.get("softcap") if layer is None else layer.softcap,
        "rope": rope,
        "qk_norm": layer is not None and layer.q_norm is not None,
        "dropout": 0.0 if layer is None else layer.dropout,
    }


def weights(subject: Subject, request: Request) -> Answer:
    _, layer, _ = subject.layer(request.layer)
    if layer is None:
        raise Refused(f"the matrices of {subject.name} lie in a way that is not known here: expected another model")
    return Answer({"model": subject.id, "layer": request.layer}, matrices(layer))


def matrices(layer: MultiHeadAttention) -> dict[str, Tensor]:
    """W_q, W_k, W_v and W_o in the shapes of the seven steps, their biases, and how W_o mixes heads."""
    s, found = layer.sizes, {}
    for name in "qkvo":
        found[f"w_{name}"] = getattr(layer, f"w_{name}")
        bias = getattr(layer, f"{name}_proj").bias
        if bias is not None:
            width = {"v": s.V, "o": s.E}.get(name, s.D)
            found[f"b_{name}"] = bias if name == "o" else bias.unflatten(0, (-1, width))
    if layer.q_norm is not None and layer.k_norm is not None:
        found["norm_q"], found["norm_k"] = layer.q_norm.weight, layer.k_norm.weight
    tensors = {name: narrow(t.detach().float()) for name, t in found.items()}
    tensors["mixing"] = finder.mixing(layer).float()
    return tensors


def heads(subject: Subject, request: Request) -> Answer:
    items = subject.read(request.input)
    with subject.without(request):
        lenses = subject.look(items, allowed_by(subject, request, as_mask(request.mask, items.count)))
    places = None if subject.grid is None else subject.grid.places()
    rows, maps = [], []
    height, width = (min(THUMBNAIL, max(lens.shape[axis] for lens in lenses)) for axis in (2, 3))
    for number, lens in enumerate(lenses):
        found = _metrics(lens, items.ids, places)
        for head in range(lens.shape[1]):
            rows.append({"layer": number, "head": head} | {name: _number(t, head) for name, t in found.items()})
        maps.append(lens.map(height, width, pool="max")[0])
    metrics = [dict(zip(("name", "title", "does", "unit"), metric)) for metric in METRICS]
    if places is not None:
        metrics[-1]["unit"] = "patches"
    tensors = {"maps": torch.cat(maps).to(torch.float16)}
    rolled = rolled_out(lenses)
    if rolled is not None:
        tensors["rollout"] = rolled
    return Answer({"heads": rows, "metrics": metrics, "tokens": items.tokens}, tensors)


def rolled_out(lenses: Sequence[Lens]) -> Tensor | None:
    """The rollout up to each layer, (L,N,N), or (1,N,N) up to the last where there is no room for all of them.

    None where layers have other items than each other, or too many. Weights come out of the lenses tile by tile.
    """
    N, L = lenses[0].shape[2], len(lenses)
    if any(lens.shape[2:] != (N, N) for lens in lenses) or 4 * N * N > MOST_ROLLOUT:
        return None
    each = L * 4 * N * N <= MOST_ROLLOUT
    found: list[Tensor] = []
    for lens in lenses:
        alone = finder.rollout([lens])[0].float()  # what the rows of this layer are made of
        through = alone @ found[-1] if found else alone
        found = [*found, through] if each else [through]
    return torch.stack(found)


def _metrics(lens: Lens, ids: Tensor | None, places: Tensor | None) -> dict[str, Tensor | None]:
    """Each metric of the finder, (H,), or None where it means nothing."""
    in_order = lens.shape[2] <= lens.shape[3]
    return {
        "induction": finder.induction(lens, ids)[0] if ids is not None and in_order else None,
        "previous": finder.previous_token(lens)[0] if in_order and places is None else None,
        "first": finder.first_token(lens)[0],
        "self": finder.own_token(lens)[0] if in_order else None,
        "entropy": lens.entropy()[0].mean(-1),
        "distance": finder.distance(lens, places)[0] if in_order else None,
    }


def predict(subject: Subject, request: Request) -> Answer:
    items = subject.read(request.input)
    with subject.without(request):
        logits = subject.logits(items, allowed_by(subject, request, as_mask(request.mask, items.count))).float()
    if subject.predicts == "classes":
        labels = [{"id": n, "text": label, "bytes": ""} for n, label in enumerate(subject.labels)]
        order = logits.argsort(descending=True, stable=True).tolist()
        meta = {"kind": "classes", "labels": labels, "candidates": order, "tokens": items.tokens}
        return Answer(meta, {"logits": logits})
    assert items.ids is not None
    following = logits[:-1].softmax(-1).gather(1, items.ids[1:, None])[:, 0]  # (N − 1,)
    likeliest = logits[-1].topk(min(LIKELIEST, logits.shape[-1])).indices.tolist()
    labels = [subject.token(number) for number in likeliest]
    meta = {"kind": "tokens", "labels": labels, "candidates": likeliest, "tokens": items.tokens}
    return Answer(meta, {"logits": logits[-1], "following": following})


def decode(subject: Subject, request: Request) -> Answer:
    subject.layer(request.layer)
    items = subject.read(request.input, need=2)
    alone = subject.decode(items, request.layer)
    whole = subject.trace(items, request.layer, "own")
    tensors = {name: _unbatched(alone, name) for name in SINGLE if name in alone}
    last = {"weights": whole["weights"][:, -1:], "heads": whole["heads"][:, -1:], "output": whole["output"][-1:]}
    difference = {name: _number((tensors[name] - t.float()).abs().max()) for name, t in last.items()}
    tensors |= {f"whole_{name}": t.float() for name, t in last.items()}
    meta = {"layer": request.layer, "cached": items.count - 1, "tokens": items.tokens, "difference": difference}
    return Answer(meta, tensors)


def picture(subject: Subject, data: bytes) -> Answer:
    """What a model sees of a picture file."""
    pixels = subject.read_picture(data)
    rows, columns = pixels.shape[:2]
    channels = pixels.shape[2] if pixels.dim() == 3 else 1
    said = base64.b64encode(pixels.contiguous().numpy().tobytes()).decode()
    return Answer({"pixels": said, "rows": rows, "columns": columns, "channels": channels}, {"pixels": pixels})


ROUTES = {"tokens": tokens, "trace": trace, "weights": weights, "heads": heads, "predict": predict, "decode": decode}


def _in_words(mask: Mask | Tensor | None, hides: bool) -> str:
    if mask is None:
        return "drawn by the model" if hides else "no mask: every item sees every item"
    return "drawn by hand" if isinstance(mask, Tensor) or type(mask).__name__ == "Allowed" else str(mask)


def _unbatched(traced: Trace, name: str) -> Tensor:
    t = traced[name].float()
    return t[0] if traced["x"].dim() == 3 else t


def _number(t: Tensor | None, at: int | None = None) -> float | None:
    """A number for JSON, which has neither NaN nor inf."""
    if t is None:
        return None
    value = float(t if at is None else t[at])
    return value if math.isfinite(value) else None

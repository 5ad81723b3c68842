"""Any checkpoint's attention weights into a layer, and a layer's weights into any checkpoint.

`LAYOUTS` lists the layouts by name, each with a picture: `print(mh.weights.LAYOUTS["gpt2"])`. What weights do not say
is the layer's to know: RoPE's base and width, the scale (T5's is 1), a softcap, the mask.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from multihead.layer import MultiHeadAttention
from multihead.positions import PAIRINGS
from multihead.weights.arrange import part_shape, repair
from multihead.weights.files import Checkpoint, open_checkpoint, write
from multihead.weights.layout import Entry, Layout
from multihead.weights.layouts import LAYOUTS
from multihead.weights.recognise import (
    candidates,
    dotted,
    entries_of,
    hint,
    misfits,
    named,
    other_names,
    under,
    wrong_names,
)

__all__ = ["LAYOUTS", "Entry", "Layout", "Loaded", "load_weights", "save_weights"]

TURNED = ("q", "k", "q_bias", "k_bias", "q_norm", "k_norm")  # what RoPE's pairing orders
FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Loaded:
    """What `load_weights` did."""

    layout: str
    read: list[str]  # names in the checkpoint, after the prefix
    zeroed: list[str]  # biases of the layer that the checkpoint does not have
    ignored: list[str]  # names that stand beside the weights and are none of the layer's


def load_weights(
    layer: MultiHeadAttention,
    source: Mapping[str, Any] | str | os.PathLike,
    layout: str = "auto",
    *,
    prefix: str = "",
    pairing: str | None = None,
) -> Loaded:
    """Copy a checkpoint's weights into `layer`. Everything is checked first: an error leaves the layer as it was.

    Args:
        layer: made with the sizes, biases, norms and sinks of the checkpoint. A bias that only the layer has becomes 0.
        source: a state dict (tensors or arrays, nested or flat); or a .safetensors, .pt, .pth or .bin file, an
            .index.json of such, or a folder with one of these, of which nothing beyond the prefix is read.
        layout: one of `mh.weights.LAYOUTS`, or "auto": the one that names and shapes fit. Where two fit that mean
            different things, such as q, k and v packed per head or per matrix, it has to be said.
        prefix: what stands before the names, such as "model.layers.0.self_attn".
        pairing: which numbers RoPE pairs in the checkpoint, "halves" or "interleaved", where it is not the layout's
            own. If the layer's `RoPE` pairs differently, q and k are reordered so that nothing changes.

    >>> theirs = torch.nn.MultiheadAttention(64, 8, batch_first=True)
    >>> layer = mh.MultiHeadAttention(64, heads=8)
    >>> mh.load_weights(layer, theirs.state_dict()).layout
    'torch'
    >>> x = torch.randn(2, 5, 64)
    >>> torch.allclose(layer(x), theirs(x, x, x)[0], atol=1e-6)
    True
    """
    _check_pairing(pairing)
    targets = _parts_of(layer)
    checkpoint = open_checkpoint(source)
    if layout == "auto":
        tensors = under(checkpoint, prefix)
        meanings: list[tuple[Layout, dict[str, Tensor]]] = []  # the first layout of each
        for choice in candidates(tensors, layer, checkpoint, prefix):
            read = _read(choice, tensors, layer, pairing)
            if all(any(not torch.equal(read[part], other[part]) for part in targets) for _, other in meanings):
                meanings.append((choice, read))
        if len(meanings) > 1:
            names = " and ".join(repr(choice.name) for choice, _ in meanings)
            raise ValueError(f"names and shapes fit {names}, which mean different things: give layout=")
        chosen, parts = meanings[0]
    else:
        chosen = named(layout)
        tensors = under(checkpoint, prefix)
        problems = wrong_names(chosen, tensors)
        if problems:
            problems[-1] += other_names(tensors, layer) or hint(checkpoint, prefix)
        else:
            problems = misfits(chosen, tensors, layer)
        if problems:
            raise ValueError(f"layout={layout!r}, prefix={prefix!r}: {'; '.join(problems)}")
        parts = _read(chosen, tensors, layer, pairing)
    with torch.no_grad():
        for part, target in targets.items():
            target.copy_(parts[part])
    present = entries_of(chosen, tensors)
    covered = {part for entry in present for part in entry.parts}
    return Loaded(
        layout if layout != "auto" else chosen.name,
        [entry.key for entry in present],
        [part for part in targets if part not in covered],
        [name for name in tensors if chosen.ignored(name)],
    )


def save_weights(
    layer: MultiHeadAttention,
    path: str | os.PathLike | None = None,
    *,
    layout: str,
    prefix: str = "",
    pairing: str | None = None,
) -> dict[str, Tensor]:
    """The layer's weights as a state dict in `layout`, written to `path` if one is given.

    Args:
        layer: the layer. What the layout has no room for, such as a bias that is not 0, is refused.
        path: a .safetensors, .pt, .pth or .bin file. It is written beside, then put in place in one move.
        layout: one of `mh.weights.LAYOUTS`.
        prefix: goes before the names as it is, with its dot.
        pairing: as in `load_weights`.

    >>> layer = mh.MultiHeadAttention(64, heads=8)
    >>> {name: tuple(t.shape) for name, t in mh.save_weights(layer, layout="gpt2", prefix="h.0.attn.").items()}
    {'h.0.attn.c_attn.weight': (64, 192), 'h.0.attn.c_proj.weight': (64, 64), 'h.0.attn.c_attn.bias': (192,),
    'h.0.attn.c_proj.bias': (64,)}
    """
    _check_pairing(pairing)
    chosen, s = named(layout), layer.sizes
    parts: dict[str, Tensor] = {part: target.detach() for part, target in _parts_of(layer).items()}
    biased = layer.q_proj.bias is not None
    entries = [entry for entry in chosen.entries if biased or not (chosen.either and entry.is_bias)]
    wanted = {part for entry in entries for part in entry.parts}
    problems = chosen.no_room(s)
    problems += [f"the layer has {part}" for part in parts if part not in wanted and bool(parts[part].any())]
    problems += [f"the layer has no {part}" for part in sorted(wanted) if part not in parts]
    if problems:
        raise ValueError(f"layout={layout!r} has no room for this layer: {'; '.join(problems)}")
    have, want = layer.rope.pairing if layer.rope else None, pairing or chosen.pairing
    if layer.rope is not None and have is not None and want is not None:
        dim = layer.rope.dim or s.D
        parts = {part: repair(t, part, s, have, want, dim) if part in TURNED else t for part, t in parts.items()}
    tensors = {}
    for entry in entries:
        joined = entry.lie.join([parts[part] for part in entry.parts], entry.parts, s)
        tensors[prefix + entry.key] = joined.clone(memory_format=torch.contiguous_format)
    if path is not None:
        write(path, tensors)
    return tensors


def _read(chosen: Layout, tensors: Checkpoint, layer: MultiHeadAttention, pairing: str | None) -> dict[str, Tensor]:
    """Every part of the layer from tensors that are known to fit, numbers checked, in its pairing and dtype."""
    s = layer.sizes
    parts: dict[str, Tensor] = {}
    for entry in entries_of(chosen, tensors):
        t = tensors[dotted(entry.key)].read()
        if t.dtype not in FLOATING or t.layout != torch.strided:
            what = t.dtype if t.layout == torch.strided else t.layout
            raise ValueError(f"{entry.key} is {what}: expected dense float64, float32, bfloat16 or float16")
        if not bool(t.isfinite().all()):
            raise ValueError(f"{entry.key} holds {int((~t.isfinite()).sum())} numbers that are NaN or inf")
        parts |= dict(zip(entry.parts, entry.lie.split(t, entry.parts, s)))
    have = pairing or chosen.pairing
    if layer.rope is not None and have is not None:
        want, dim = layer.rope.pairing, layer.rope.dim or s.D
        parts = {part: repair(t, part, s, have, want, dim) if part in TURNED else t for part, t in parts.items()}
    found = {}
    for part, target in _parts_of(layer).items():
        found[part] = parts.get(part, torch.zeros(part_shape(part, s))).to(target.dtype)
        if not bool(found[part].isfinite().all()):
            raise ValueError(f"{part} holds numbers that are too large for the layer's {target.dtype}")
    return found


def _parts_of(layer: MultiHeadAttention) -> dict[str, Tensor]:
    """The layer's own parameters by part, if copying into them is all there is to it."""
    if not isinstance(layer, MultiHeadAttention):
        raise TypeError(f"layer is a {type(layer).__name__}: expected a multihead.MultiHeadAttention")
    parts: dict[str, Tensor | None] = {}
    for part in ("q", "k", "v", "o"):
        projection = getattr(layer, f"{part}_proj")
        if not isinstance(projection, nn.Linear) or parametrize.is_parametrized(projection):
            raise TypeError(f"{part}_proj is a {type(projection).__name__}: expected a plain nn.Linear")
        parts |= {part: projection.weight, f"{part}_bias": projection.bias}
    parts |= {f"{part}_norm": getattr(layer, f"{part}_norm").weight for part in "qk" if layer.q_norm is not None}
    parts |= {"sinks": layer.sinks}
    there = {part: target for part, target in parts.items() if target is not None}
    for part, target in there.items():
        if target.shape != part_shape(part, layer.sizes):
            expected = part_shape(part, layer.sizes)
            raise ValueError(f"the layer's {part} has shape {tuple(target.shape)}: expected {expected}, unsharded")
        if target.is_meta:
            raise ValueError(f"the layer's {part} is on meta and holds nothing: call layer.to_empty(device=…) first")
    return there


def _check_pairing(pairing: str | None) -> None:
    if pairing is not None and pairing not in PAIRINGS:
        raise ValueError(f"pairing={pairing!r}: expected one of {', '.join(PAIRINGS)}")

"""Which layout a checkpoint is in, from names and shapes, and what is wrong where it is in none."""

from collections.abc import Iterable
from difflib import get_close_matches

import torch

from multihead.layer import MultiHeadAttention
from multihead.weights.arrange import LessOne, part_shape
from multihead.weights.files import Checkpoint
from multihead.weights.layout import Layout
from multihead.weights.layouts import LAYOUTS, REGISTERED

SHOWN = 6  # names in a message, at most


def dotted(name: str) -> str:
    """Keras separates names by slashes, torch by dots; here they are all dots."""
    return name.replace("/", ".")


def under(checkpoint: Checkpoint, prefix: str) -> Checkpoint:
    """What stands under the prefix, by dotted name after it. A prefix that stops at a name stands for what is in it."""
    prefix = dotted(prefix)
    if prefix and not prefix.endswith("."):
        prefix += "."
    found = {dotted(name)[len(prefix) :]: t for name, t in checkpoint.items() if dotted(name).startswith(prefix)}
    if not found:
        some = listed(checkpoint) if checkpoint else "nothing"
        raise ValueError(f"prefix={prefix!r}: no name in the checkpoint starts so; it has {some}{hint(checkpoint)}")
    return found


def listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:SHOWN]) + (f" … ({len(names)} in all)" if len(names) > SHOWN else "")


def hint(checkpoint: Checkpoint, refused: str = "") -> str:
    """Where in the checkpoint there are attention layers, but for the prefix that was just refused, or nothing."""
    names, found = {dotted(name) for name in checkpoint}, []
    refused = f"{dotted(refused).removesuffix('.')}."
    for layout in REGISTERED:
        keys = [dotted(key) for key in layout.required()]
        starts = [name[: -len(keys[0])] for name in sorted(names) if name.endswith(f".{keys[0]}")]
        starts = [start for start in starts if start != refused and start not in found]
        found += [start for start in starts if all(start + key in names for key in keys)]
    return f"; there is attention at prefix={' or '.join(repr(p) for p in found[:3])}" if found else ""


def other_names(tensors: Checkpoint, layer: MultiHeadAttention) -> str:
    """Which layouts have these names, and fit the layer, or nothing."""
    fit = [one.name for one in REGISTERED if not wrong_names(one, tensors) and not misfits(one, tensors, layer)]
    return f"; these are the names of {' and '.join(map(repr, fit))}" if fit else ""


def entries_of(layout: Layout, tensors: Checkpoint) -> list:
    """The entries of a layout that this checkpoint has."""
    return [entry for entry in layout.entries if dotted(entry.key) in tensors]


def wrong_names(layout: Layout, tensors: Checkpoint) -> list[str]:
    """What is missing, and what is there that the layout does not know."""
    present = entries_of(layout, tensors)
    needed = set(layout.required())
    if any(entry.is_bias for entry in present):
        needed |= {entry.key for entry in layout.entries if entry.is_bias}
    missing = [entry.key for entry in layout.entries if entry.key in needed and entry not in present]
    known = {dotted(entry.key) for entry in layout.entries}
    unknown = [name for name in tensors if name not in known and not layout.ignored(name)]
    problems = [f"missing: {listed(missing)}"] if missing else []
    return problems + ([f"not part of this layout: {listed(unknown)}"] if unknown else [])


def misfits(layout: Layout, tensors: Checkpoint, layer: MultiHeadAttention) -> list[str]:
    """Why these tensors, whose names are right, cannot become this layer's."""
    s = layer.sizes
    problems = layout.no_room(s)
    if problems:
        return problems
    present = entries_of(layout, tensors)
    for entry in present:
        parts = [torch.empty(part_shape(part, s), device="meta") for part in entry.parts]
        want, have = tuple(entry.lie.join(parts, entry.parts, s).shape), tensors[dotted(entry.key)].shape()
        if want != have:
            problems.append(f"{entry.key} has shape {have}: expected {want}")
    covered = {part for entry in present for part in entry.parts}
    for part, argument, there in (
        ("q_norm", "qk_norm=True", layer.q_norm is not None),
        ("sinks", "sinks=True", layer.sinks is not None),
    ):
        if part in covered and not there:
            problems.append(f"the checkpoint has {part}: expected a layer made with {argument}")
        if part not in covered and there:
            problems.append(f"the layer has {argument}, and the checkpoint has no {part}")
    if any(part.endswith("_bias") for part in covered) and layer.q_proj.bias is None:
        problems.append("the checkpoint has biases: expected a layer made with bias=True")
    if any(isinstance(entry.lie, LessOne) for entry in present) and layer.q_proj.weight.dtype.itemsize < 4:
        problems.append(f"1 + w of a norm is not exact in {layer.q_proj.weight.dtype}: expected a float32 layer")
    return problems


def named(name: str) -> Layout:
    """The layout of this name; Hugging Face writes `gpt_neox` where we write `gpt-neox`."""
    name = name.replace("_", "-")
    if name not in LAYOUTS:
        like = get_close_matches(name, LAYOUTS, 1)
        meant = f"; did you mean {like[0]!r}?" if like else ""
        raise ValueError(f"layout={name!r}: expected one of {', '.join(LAYOUTS)}, or 'auto' to load{meant}")
    return LAYOUTS[name]


def candidates(tensors: Checkpoint, layer: MultiHeadAttention, checkpoint: Checkpoint, prefix: str) -> list[Layout]:
    """Every layout that these names and shapes fit; at least one."""
    by_name = [layout for layout in REGISTERED if not wrong_names(layout, tensors)]
    if not by_name:
        raise ValueError(f"no layout has these names: {listed(tensors)}{closest(tensors)}{hint(checkpoint, prefix)}")
    problems = {layout.name: misfits(layout, tensors, layer) for layout in by_name}
    fitting = [layout for layout in by_name if not problems[layout.name]]
    if not fitting:
        nearest = min(problems, key=lambda name: len(problems[name]))
        others = [name for name in problems if name != nearest]
        told = f"{nearest}: {', '.join(problems[nearest])}" + (f"; nor as {', '.join(others)}" if others else "")
        raise ValueError(f"the checkpoint does not fit the layer, which has {layer.sizes}. As {told}")
    return fitting


def closest(tensors: Checkpoint) -> str:
    """The layout with the fewest names missing and unknown, if half of its own are there, and which, in words."""

    def close(layout: Layout) -> bool:
        needed = [dotted(key) for key in layout.required()]
        return 2 * sum(key in tensors for key in needed) >= len(needed)

    similar = [layout for layout in REGISTERED if close(layout)]
    if not similar:
        return ""

    def distance(layout: Layout) -> int:
        known = {dotted(entry.key) for entry in layout.entries}
        return len({dotted(key) for key in layout.required()} - set(tensors)) + len(set(tensors) - known)

    best = min(similar, key=distance)
    return f"; closest is {best.name}: {', '.join(wrong_names(best, tensors))}"

"""A trace as text: each step with its sentence, its formula, its shapes and its numbers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text
from torch import Tensor

from multihead.draw import MOST_ITEMS, PERCENT_UP_TO, as_text, draw_mask, draw_weights, padded, table_of

if TYPE_CHECKING:
    from multihead.layer.trace import Trace


def to_text(trace: "Trace") -> str:
    """The trace for `print`: coloured where that goes to a terminal that shows colours."""
    return as_text(render(trace))


def render(trace: "Trace", pictures: bool = True) -> RenderableType:
    """The trace as something rich can print; without pictures, sentences, formulas and shapes only."""
    parts: list[RenderableType] = [_headline(trace)]
    for step in trace.steps:
        parts += [Text(), Rule(Text(f"{step.number} {step.title}", "bold"), align="left", characters="─")]
        parts.append(_wrapped(step.does))
        parts.append(Padding(Text(step.formula, "cyan"), (0, 2)))
        parts += [Padding(part, (0, 2)) for part in _shapes(trace, step.names)]
        if pictures:
            parts += [Padding(part, (1, 2, 0, 2)) for part in _pictures(trace, step.number)]
    return Group(*parts)


def _wrapped(sentence: str) -> Padding:
    return Padding(Text(sentence), (0, 2))


def _headline(trace: "Trace") -> Text:
    s, N = trace.sizes, len(trace.labels)
    heads = f"{s.H} heads of width {s.D}" + (f" on {s.G} key/value heads" if s.G != s.H else "")
    return Text(f"Multi-head attention: {N} items of width {s.E}, {heads}", "bold")


def _shapes(trace: "Trace", names: Sequence[str]) -> list[Text]:
    """`q (4, 1024) → (4, 8, 128)`: what goes in and what comes out, for each name of a step."""
    before = {
        "q": "x", "k": "context", "v": "context", "q_heads": "q", "k_heads": "k", "v_heads": "v", "scores": "q_heads",
        "masked": "scores", "weights": "masked", "heads": "weights", "transposed": "heads", "merged": "transposed",
        "output": "merged",
    }  # fmt: skip
    lines = []
    for name in names:
        if name not in trace:
            continue
        source = before[name] if before[name] in trace else "x"
        line = Text(f"{name:<11}", "bold green")
        if source in trace:
            line.append(f"{tuple(trace[source].shape)} → ", "dim")
        lines.append(line.append(f"{tuple(trace[name].shape)}", "not bold default"))
    return lines


def _pictures(trace: "Trace", number: int) -> list[RenderableType]:
    """The numbers of a step that fit on a screen."""
    if number == 1:
        q = _one(trace, "q")
        return [table_of(f"q, head 0 (first numbers of {q.shape[-1]})", trace.labels, q[:, 0])]
    if number == 3:
        hidden = _one(trace, "masked") == -torch.inf
        pictures = [draw_mask(trace.labels, hidden[0])]
        scores = _one(trace, "scores")
        if scores.shape[-1] <= PERCENT_UP_TO:
            pictures.append(
                table_of("scores, head 0: query down, key across", trace.labels, scores[0], trace.key_labels)
            )
        return [*pictures, *draw_weights(trace.labels, trace.key_labels, _one(trace, "weights"), hidden)]
    if number == 4:
        heads = _one(trace, "heads")
        return [table_of(f"heads, head 0 (first numbers of {heads.shape[-1]})", trace.labels, heads[0])]
    if number == 7:
        out = _one(trace, "output")
        return [table_of(f"output (first numbers of {out.shape[-1]})", trace.labels, out), *_meanings(trace)]
    return []


def _one(trace: "Trace", name: str) -> Tensor:
    """The intermediate without its batch axis: the first row of the batch."""
    t = trace[name]
    return (t[0] if trace["x"].dim() == 3 else t).float()


def _meanings(trace: "Trace") -> list[RenderableType]:
    """What each output row now stands for: the items it could see."""
    if trace.labels != trace.key_labels or len(trace.labels) > MOST_ITEMS:
        return []
    seen = _one(trace, "masked")[0] != -torch.inf
    between = "" if any(name[:1].isspace() for name in trace.labels) else " "  # pieces of text bring their spaces
    lines: list[RenderableType] = [Text("each row now carries what it learnt from the rows it may see:", "italic")]
    for name, row in zip(trace.labels, seen.tolist()):
        words = between.join(item for item, may_see in zip(trace.key_labels, row) if may_see)
        lines.append(Text(padded(name, 12) + " ", "yellow").append(f"“{words}”", "default"))
    return [Group(*lines)]

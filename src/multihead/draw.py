"""Traces and lenses as text: each step with its formula, its shapes and its numbers, and the weights as heat maps.

Colour helps and is never needed: a heat map has its percentages, or shades, in its characters.
"""

import io
import os
import re
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from rich.cells import cell_len, set_cell_size
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from torch import Tensor

from multihead.selections import Selection, choose
from multihead.sizes import require_int

if TYPE_CHECKING:
    from multihead.lens import Lens
    from multihead.trace import Trace

MOST_ITEMS = 16  # rows and columns of a heat map, and rows of a table
MOST_HEADS = 16
MOST_NUMBERS = 5
SHADES = "·░▒▓█"
MOST_LETTERS = 5  # of a key's name above a heat map
PERCENT_UP_TO = 8  # keys: above that, a cell is a shade instead of a percentage


def to_text(trace: "Trace") -> str:
    """The trace for `print`: coloured where that goes to a terminal that shows colours."""
    return _as_text(render(trace))


def _as_text(picture: RenderableType) -> str:
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    width = shutil.get_terminal_size((100, 24)).columns
    console = Console(file=io.StringIO(), force_terminal=coloured, width=width, legacy_windows=False, highlight=False)
    console.print(picture)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip("\n")


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
        return [_table(f"q, head 0 (first numbers of {q.shape[-1]})", trace.labels, q[:, 0])]
    if number == 3:
        hidden = _one(trace, "masked") == -torch.inf
        pictures = [draw_mask(trace.labels, hidden[0])]
        scores = _one(trace, "scores")
        if scores.shape[-1] <= PERCENT_UP_TO:
            pictures.append(_table("scores, head 0: query down, key across", trace.labels, scores[0], trace.key_labels))
        return [*pictures, *draw_weights(trace.labels, trace.key_labels, _one(trace, "weights"), hidden)]
    if number == 4:
        heads = _one(trace, "heads")
        return [_table(f"heads, head 0 (first numbers of {heads.shape[-1]})", trace.labels, heads[0])]
    if number == 7:
        out = _one(trace, "output")
        return [_table(f"output (first numbers of {out.shape[-1]})", trace.labels, out), *_meanings(trace)]
    return []


def _one(trace: "Trace", name: str) -> Tensor:
    """The intermediate without its batch axis: the first row of the batch."""
    t = trace[name]
    return (t[0] if trace["x"].dim() == 3 else t).float()


def visible(name: str) -> str:
    """A piece of text in one line, with its spaces to be seen."""
    return "".join(
        "␣" if c == " " else "⏎" if c == "\n" else c if c.isprintable() or c in "\u200d\ufe0f" else "�" for c in name
    )


def _short(name: str, width: int) -> str:
    """A name in at most `width` columns of the terminal, of which an ideogram takes two."""
    shown = visible(name)
    return shown if cell_len(shown) <= width else set_cell_size(shown, width - 1).rstrip() + "…"


def _padded(name: str, width: int) -> str:
    return set_cell_size(_short(name, width), width)


def _table(title: str, rows: Sequence[str], numbers: Tensor, columns: Sequence[str] | None = None) -> Table:
    table = Table(title=title, title_justify="left", title_style="italic", box=None, pad_edge=False, padding=(0, 1))
    shown = numbers[:MOST_ITEMS, : MOST_NUMBERS if columns is None else PERCENT_UP_TO]
    table.add_column("")
    for n in range(shown.shape[1]):
        heading = Text("" if columns is None else _short(columns[n], 9))  # a Text: brackets in a word are no markup
        table.add_column(heading, justify="right", style="default")
    table.show_header = columns is not None
    for name, row in zip(rows, shown.tolist()):
        more = ["…"] if columns is None and numbers.shape[1] > MOST_NUMBERS else []
        table.add_row(Text(_short(name, 12), "yellow"), *[f"{value:.3f}" for value in row], *more)
    if len(rows) > MOST_ITEMS:
        table.caption = f"the first {MOST_ITEMS} of {len(rows)} items"
        table.caption_justify = "left"
    return table


def draw_mask(labels: Sequence[str], hidden: Tensor) -> RenderableType:
    """What a head may not see, hidden (Q,K), as a picture."""
    if not bool(hidden.any()):
        return Text("no mask: every item sees every item", "italic")
    lines = [Text("mask, head 0: ■ may attend, · hidden; query down, key across", "italic")]
    for name, row in zip(labels[:MOST_ITEMS], hidden[:MOST_ITEMS, : 2 * MOST_ITEMS].tolist()):
        squares = " ".join("·" if h else "■" for h in row)
        lines.append(Text(_padded(name, 12) + " ", "yellow").append(squares, "default"))
    return Group(*lines)


def draw_weights(
    labels: Sequence[str], key_labels: Sequence[str], weights: Tensor, hidden: Tensor
) -> list[RenderableType]:
    """The weights of every head, (H,Q,K), as heat maps side by side."""
    H, Q, K = weights.shape
    percent = K <= PERCENT_UP_TO
    unit = "in percent" if percent else f"as shades, {SHADES[0]} least to {SHADES[-1]} most"
    title = f"weights of every head, {unit}; query down, key across"
    names = labels, key_labels
    maps = [_heat_map(f"head {h}", *names, weights[h], hidden[h], percent) for h in range(min(H, MOST_HEADS))]
    parts: list[RenderableType] = [Group(Text(title, "italic"), Columns(maps, padding=(0, 3)))]
    left = [f"the first {MOST_HEADS} of {H} heads"] if H > MOST_HEADS else []
    left += [f"the first {MOST_ITEMS} of {max(Q, K)} items"] if max(Q, K) > MOST_ITEMS else []
    return [*parts, Text(f"({', '.join(left)})", "dim")] if left else parts


def _heat_map(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    weights: Tensor,
    hidden: Tensor,
    percent: bool,
    most: int = MOST_ITEMS,
) -> Text:
    """A head's weights; hidden ones are dots (or blanks), which a small weight is not. `columns` may be none."""
    names = [_short(name, 9) for name in rows[:most]]
    width = max(map(cell_len, names), default=0)
    keys = [_short(name, MOST_LETTERS) for name in columns[:most]]
    wide = max([4, *(cell_len(key) + 1 for key in keys)]) if percent else 2  # of a cell
    picture = Text(title, "bold")
    for line in _headings(keys, wide, percent):
        picture.append("\n" + " " * (width + 1) + line, "not bold yellow")
    shown = (t[:most, :most].tolist() for t in (weights, hidden))
    for name, row, unseen in zip(names, *shown):
        picture.append(f"\n{set_cell_size(name, width)} ", "not bold yellow")
        for weight, out_of_sight in zip(row, unseen):
            if out_of_sight:
                picture.append(("·" if percent else "").rjust(wide), "not bold dim")
                continue
            level = min(max(weight, 0.0), 1.0) if weight == weight else 0.0
            cell = f"{100 * weight:{wide}.0f}" if percent else SHADES[round(level * (len(SHADES) - 1))] * wide
            heat = round(255 * level**0.5)  # the root brings out small weights
            ink = "black" if heat > 140 else "white"
            picture.append(cell, f"not bold {ink} on rgb({heat},{round(heat * 0.55)},{60 - round(heat * 0.2)})")
    return picture.append("\n")


def _headings(keys: Sequence[str], wide: int, across: bool) -> list[str]:
    """Names above columns that are `wide`: across, or a letter below the other where that is too narrow."""
    if across or not keys:
        return ["".join(" " * (wide - cell_len(key)) + key for key in keys)] if keys else []
    letters = [re.findall(r".[\u0300-\u036f\u200d\ufe0f]*", key) for key in keys]  # an accent stays with its letter
    tall = max(map(len, letters))
    letters = [[""] * (tall - len(key)) + key for key in letters]  # each ends at its column
    return ["".join(set_cell_size(key[line], wide) for key in letters).rstrip() for line in range(tall)]


def _meanings(trace: "Trace") -> list[RenderableType]:
    """What each output row now stands for: the items it could see."""
    if trace.labels != trace.key_labels or len(trace.labels) > MOST_ITEMS:
        return []
    seen = _one(trace, "masked")[0] != -torch.inf
    between = "" if any(name[:1].isspace() for name in trace.labels) else " "  # pieces of text bring their spaces
    lines: list[RenderableType] = [Text("each row now carries what it learnt from the rows it may see:", "italic")]
    for name, row in zip(trace.labels, seen.tolist()):
        words = between.join(item for item, may_see in zip(trace.key_labels, row) if may_see)
        lines.append(Text(_padded(name, 12) + " ", "yellow").append(f"“{words}”", "default"))
    return [Group(*lines)]


def draw_lens(lens: "Lens", height: int, width: int, pool: str, heads: Selection, batch: int) -> str:
    """The weights of each head, pooled to height × width; shades go from nothing to the largest of the head."""
    B, H, Q, K = lens.shape
    height, width = min(require_int("height", height, 1), Q), min(require_int("width", width, 1), K)
    require_int("batch", batch, 0)
    if batch >= B:
        raise ValueError(f"batch={batch}: expected 0…{B - 1}, a row of the batch")
    if not height or not width:
        return f"no weights: Q={Q}, K={K}"
    chosen = choose("heads", heads, H)
    with torch.no_grad():
        maps = lens.map(height, width, pool=pool, heads=chosen)[batch].float().cpu()  # (h, height, width)
    numbers = torch.arange(H)[chosen].tolist()
    rows = [str(n * Q // height) for n in range(height)]  # the first query of each bin
    percent = K <= PERCENT_UP_TO and (height, width) == (Q, K)
    if percent:
        pictures = [_heat_map(f"head {h}", rows, (), w, w == 0, True, max(Q, K)) for h, w in zip(numbers, maps)]
        title = "weights, in percent; query down, key across"
    else:
        tops = [float(w.nan_to_num().max()) for w in maps]
        titles = [f"head {h}, {SHADES[-1]} = {top:.2g}" for h, top in zip(numbers, tops)]
        pictures = [
            _heat_map(title, rows, (), w / (top or 1.0), w == 0, False, max(height, width))
            for title, w, top in zip(titles, maps, tops)
        ]
        bins = f", {pool} of each bin: {Q} queries and {K} keys as {height} × {width}"
        title = f"weights{'' if (height, width) == (Q, K) else bins}; query down, key across"
    return _as_text(Group(Text(title), Columns(pictures, padding=(0, 3))))

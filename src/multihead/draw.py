"""How numbers become characters and colours: tables, masks and heat maps of tensors, for a terminal.

Colour helps and is never needed: a heat map has its percentages, or shades, in its characters.
"""

import io
import os
import re
import shutil
import sys
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

MOST_ITEMS = 16  # rows and columns of a heat map, and rows of a table
MOST_HEADS = 16
MOST_NUMBERS = 5
SHADES = "·░▒▓█"
MOST_LETTERS = 5  # of a key's name above a heat map
PERCENT_UP_TO = 8  # keys: above that, a cell is a shade instead of a percentage


def as_text(picture: RenderableType) -> str:
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    width = shutil.get_terminal_size((100, 24)).columns
    console = Console(file=io.StringIO(), force_terminal=coloured, width=width, legacy_windows=False, highlight=False)
    console.print(picture)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip("\n")


def visible(name: str) -> str:
    """A piece of text in one line, with its spaces to be seen."""
    return "".join(
        "␣" if c == " " else "⏎" if c == "\n" else c if c.isprintable() or c in "\u200d\ufe0f" else "�" for c in name
    )


def short(name: str, width: int) -> str:
    """A name in at most `width` columns of the terminal, of which an ideogram takes two."""
    shown = visible(name)
    return shown if cell_len(shown) <= width else set_cell_size(shown, width - 1).rstrip() + "…"


def padded(name: str, width: int) -> str:
    return set_cell_size(short(name, width), width)


def table_of(title: str, rows: Sequence[str], numbers: Tensor, columns: Sequence[str] | None = None) -> Table:
    table = Table(title=title, title_justify="left", title_style="italic", box=None, pad_edge=False, padding=(0, 1))
    shown = numbers[:MOST_ITEMS, : MOST_NUMBERS if columns is None else PERCENT_UP_TO]
    table.add_column("")
    for n in range(shown.shape[1]):
        heading = Text("" if columns is None else short(columns[n], 9))  # a Text: brackets in a word are no markup
        table.add_column(heading, justify="right", style="default")
    table.show_header = columns is not None
    for name, row in zip(rows, shown.tolist()):
        more = ["…"] if columns is None and numbers.shape[1] > MOST_NUMBERS else []
        table.add_row(Text(short(name, 12), "yellow"), *[f"{value:.3f}" for value in row], *more)
    if len(rows) > MOST_ITEMS:
        table.caption = f"the first {MOST_ITEMS} of {len(rows)} items"
        table.caption_justify = "left"
    return table


def squares(allowed: Tensor) -> list[str]:
    """What may be seen, (Q,K), a line for each query: ■ may attend, · hidden."""
    return [" ".join("■" if seen else "·" for seen in row) for row in allowed.tolist()]


def draw_mask(labels: Sequence[str], hidden: Tensor) -> RenderableType:
    """What a head may not see, hidden (Q,K), as a picture."""
    if not bool(hidden.any()):
        return Text("no mask: every item sees every item", "italic")
    lines = [Text("mask, head 0: ■ may attend, · hidden; query down, key across", "italic")]
    for name, row in zip(labels[:MOST_ITEMS], squares(~hidden[:MOST_ITEMS, : 2 * MOST_ITEMS])):
        lines.append(Text(padded(name, 12) + " ", "yellow").append(row, "default"))
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
    maps = [heat_map(f"head {h}", *names, weights[h], hidden[h], percent) for h in range(min(H, MOST_HEADS))]
    parts: list[RenderableType] = [Group(Text(title, "italic"), Columns(maps, padding=(0, 3)))]
    left = [f"the first {MOST_HEADS} of {H} heads"] if H > MOST_HEADS else []
    left += [f"the first {MOST_ITEMS} of {max(Q, K)} items"] if max(Q, K) > MOST_ITEMS else []
    return [*parts, Text(f"({', '.join(left)})", "dim")] if left else parts


def heat_map(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    weights: Tensor,
    hidden: Tensor,
    percent: bool,
    most: int = MOST_ITEMS,
) -> Text:
    """A head's weights; hidden ones are dots (or blanks), which a small weight is not. `columns` may be none."""
    names = [short(name, 9) for name in rows[:most]]
    width = max(map(cell_len, names), default=0)
    keys = [short(name, MOST_LETTERS) for name in columns[:most]]
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

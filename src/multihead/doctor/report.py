"""The report: what a good colleague would say about an implementation, as an object, text, a page and JSON."""

import html
import io
import json
import os
import re
import shutil
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from multihead.files import write_text
from multihead.layer.trace import STEPS

STATUS = {"healthy": 0, "diagnosed": 1, "unknown": 2}
COLOURS = {"healthy": "green", "diagnosed": "red", "unknown": "yellow"}


@dataclass(frozen=True)
class Value:
    """A number of the output: where it stands, yours, the right one, and what the hypothesis gives there."""

    place: str
    yours: float
    right: float
    hypothesis: float | None = None


@dataclass(frozen=True)
class Named:
    """One cause of a diagnosis: its step, why it happens and how to mend it."""

    cause: str
    step: int | None
    explanation: str
    fix: str


@dataclass(frozen=True)
class Report:
    """What the doctor found. `verdict` is "healthy", "diagnosed" or "unknown"; print it to read it.

    `step` (1 to 7) and `cause` are those of the first mistake; `causes` holds all that act together, and
    `indistinguishable` the other explanations that would give the same output.

    >>> layer, x = mh.MultiHeadAttention(16, heads=2), torch.randn(1, 5, 16)
    >>> report = mh.diagnose(lambda x: layer(x), layer, x, mask=mh.Causal())
    >>> report.verdict, report.step, report.cause
    ('diagnosed', 3, 'mask missing')
    """

    verdict: str
    headline: str
    causes: tuple[Named, ...] = ()
    indistinguishable: tuple[str, ...] = ()
    evidence: tuple[Value, ...] = ()
    sure: str = ""
    where: tuple[str, ...] = ()  # what is known about the place of a mistake that has no name
    notes: tuple[str, ...] = ()
    subject: str = ""  # what was examined, and how
    seconds: float = field(default=0.0, compare=False)

    @property
    def step(self) -> int | None:
        return self.causes[0].step if self.causes else None

    @property
    def cause(self) -> str | None:
        return " + ".join(cause.cause for cause in self.causes) if self.causes else None

    @property
    def explanation(self) -> str:
        return "\n".join(cause.explanation for cause in self.causes)

    @property
    def fix(self) -> str:
        return "\n".join(cause.fix for cause in self.causes)

    @property
    def exit_status(self) -> int:
        """0 healthy, 1 diagnosed, 2 not understood or could not run."""
        return STATUS[self.verdict]

    def json(self) -> str:
        """The report as JSON; `Report.from_json` reads it back."""
        found = {"verdict": self.verdict, "step": self.step, "cause": self.cause} | asdict(self)
        return json.dumps(_plain(found), indent=2, ensure_ascii=False)

    @staticmethod
    def from_json(text: str) -> "Report":
        found = json.loads(text)
        for derived in ("step", "cause"):
            found.pop(derived, None)
        found["causes"] = tuple(Named(**cause) for cause in found["causes"])
        found["evidence"] = tuple(
            Value(row["place"], *(_number(row[name]) for name in ("yours", "right", "hypothesis")))  # type: ignore[arg-type]
            for row in found["evidence"]
        )
        for name in ("indistinguishable", "where", "notes"):
            found[name] = tuple(found[name])
        return Report(**found)

    def html(self, path: str | Path | None = None) -> str:
        """The report as a page of its own, written to `path` if one is given."""
        page = _page(self)
        if path is not None:
            write_text(path, page)
        return page

    def __str__(self) -> str:
        coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        width = min(shutil.get_terminal_size((100, 24)).columns, 110)
        console = Console(
            file=io.StringIO(), force_terminal=coloured, width=width, legacy_windows=False, highlight=False
        )
        console.print(self)
        assert isinstance(console.file, io.StringIO)
        return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip("\n").splitlines())

    def __rich__(self) -> RenderableType:
        return _render(self)


def step_title(step: int | None) -> str:
    return "no single step" if step is None else f"step {step}, {STEPS[step - 1].title}"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def _plain(value: Any) -> Any:
    """JSON knows no NaN and no inf: they become words."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and value - value != 0:
        return str(value)
    return value


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _render(report: Report) -> RenderableType:
    colour = COLOURS[report.verdict]
    parts: list[RenderableType] = [
        Text(report.verdict.upper(), f"bold {colour}").append(f"  {report.headline}", "bold")
    ]
    if report.subject:
        parts.append(Padding(Text(report.subject, "dim"), (0, 2)))
    for cause in report.causes:
        parts += [Text(), Rule(Text(f"{step_title(cause.step)}: {cause.cause}", "bold"), align="left", characters="─")]
        parts.append(Padding(Text(cause.explanation), (0, 2)))
        if cause.fix:
            parts += [Text(), Padding(Text("the fix", "italic"), (0, 2)), Padding(_Code(cause.fix), (0, 4))]
    if report.indistinguishable:
        parts += [Text(), Text("It cannot be told apart, by its output, from:", "italic")]
        parts += [Padding(Text(f"· {other}"), (0, 2)) for other in report.indistinguishable]
    if report.where:
        parts += [Text(), Text("what is known about it", "italic")]
        parts += [_point(sentence) for sentence in report.where]
    if report.evidence:
        parts += [Text(), Padding(_evidence(report), (0, 2))]
    if report.sure:
        parts += [Text(), Text("how sure  ", "italic").append(report.sure, "not italic")]
    if report.notes:
        parts += [Text(), Text("notes", "italic"), *(_point(note) for note in report.notes)]
    return Group(*parts)


class _Code:
    """Lines of code; where they do not fit, comments move closer."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        fits = all(len(line) <= options.max_width for line in self.code.splitlines())
        yield Text(self.code if fits else re.sub(r" {2,}#", "  #", self.code), "cyan")


def _point(sentence: str) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_row("  ·", Text(sentence))
    return table


def _evidence(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, title="the evidence", title_justify="left", title_style="italic")
    table.add_column("output")
    table.add_column("yours", justify="right")
    table.add_column("right", justify="right")
    told = any(row.hypothesis is not None for row in report.evidence)
    if told:
        table.add_column("with this mistake", justify="right")
    for row in report.evidence:
        cells = [row.place, number(row.yours), number(row.right)]
        table.add_row(*cells, *([number(row.hypothesis)] if told else []))
    return table


def _page(report: Report) -> str:
    def text(value: str) -> str:
        return html.escape(value).replace("\n", "<br>")

    def points(title: str, lines: tuple[str, ...]) -> str:
        items = "".join(f"<li>{text(line)}</li>" for line in lines)
        return f"<h2>{title}</h2><ul>{items}</ul>" if lines else ""

    body = [f"<h1><span class={report.verdict}>{report.verdict}</span> {text(report.headline)}</h1>"]
    body.append(f"<p class=subject>{text(report.subject)}</p>" if report.subject else "")
    for cause in report.causes:
        body.append(f"<h2>{text(step_title(cause.step))}: {text(cause.cause)}</h2><p>{text(cause.explanation)}</p>")
        body.append(f"<h3>the fix</h3><pre>{html.escape(cause.fix)}</pre>" if cause.fix else "")
    body.append(points("It cannot be told apart, by its output, from", report.indistinguishable))
    body.append(points("What is known about it", report.where))
    if report.evidence:
        told = any(row.hypothesis is not None for row in report.evidence)
        head = "".join(f"<th>{name}</th>" for name in ("output", "yours", "right") + ("with this mistake",) * told)
        rows = "".join(
            f"<tr><td>{text(row.place)}</td><td>{number(row.yours)}</td><td>{number(row.right)}</td>"
            + (f"<td>{number(row.hypothesis)}</td>" if told else "")
            + "</tr>"
            for row in report.evidence
        )
        body.append(f"<h2>The evidence</h2><table><tr>{head}</tr>{rows}</table>")
    body.append(f"<h2>How sure</h2><p>{text(report.sure)}</p>" if report.sure else "")
    body.append(points("Notes", report.notes))
    return _FRAME.replace("{title}", text(report.headline)).replace("{body}", "\n".join(part for part in body if part))


_FRAME = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.35rem } h2 { font-size: 1.1rem; margin-top: 1.6rem } h3 { font-size: 1rem; margin-bottom: .2rem }
h1 span { padding: .1em .5em; border-radius: .3em; color: #fff }
.healthy { background: #1a7f37 } .diagnosed { background: #b42318 } .unknown { background: #8a6100 }
.subject { opacity: .75 }
pre { padding: .7em 1em; border: 1px solid #8886; border-radius: .3em; overflow-x: auto }
td, th { padding: .15em .9em .15em 0; text-align: right; font-variant-numeric: tabular-nums }
td:first-child, th:first-child { text-align: left }
</style></head><body>
{body}
</body></html>
"""

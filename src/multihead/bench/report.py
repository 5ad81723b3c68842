"""A run told three ways: a table on the terminal, Markdown to publish, JSON to compute with. Losses included."""

import json
from dataclasses import asdict, dataclass

from rich.console import Group
from rich.table import Table
from rich.text import Text

from multihead.bench.cases import goal
from multihead.bench.ceilings import Ceilings
from multihead.bench.runner import CaseResult

COLUMNS = (
    "case", "ours", "of ceiling", "A/A", "peer", "ratio", "95 % interval", "min/min", "goal", "verdict", "blocks",
)  # fmt: skip
TOO_NOISY = 0.05
READING = (
    "Ratio: the peer's time over ours, median of paired blocks; above 1 ours is faster. A/A: ours against itself, the "
    "smallest difference that means anything. Of ceiling: the least time this machine could need for the useful work "
    "(visible pairs only) over ours. Goal: the ratio aimed at, 1 where nothing is said."
)
BLOCKS = (
    "Blocks: counted / run; the rest were left out because the clock moved; restless: too few were "
    "steady, so the steadiest were kept."
)


@dataclass
class Report:
    machine: dict[str, str]
    ceilings: Ceilings
    results: list[CaseResult]
    planned: int  # cases, so that an interrupted run says so

    @property
    def complete(self):
        return len(self.results) == self.planned


def verdict(comparison, noise, wanted):
    """Faster, slower or even, beyond the noise; then what became of the goal."""
    if comparison.low > 1 + noise:
        word = "faster"
    elif comparison.high < 1 / (1 + noise):
        word = "slower"
    else:
        word = "even"
    if comparison.ratio >= wanted:
        return f"{word}, goal met"
    return f"{word}, goal {'within noise' if comparison.ratio * (1 + noise) >= wanted else 'missed'}"


def rows(report):
    """One row of strings for each case and peer, as in COLUMNS: both tables show these."""
    for result in report.results:
        name = result.case.name
        if result.refused:
            yield (name, "refused", "", "", "", "", "", "", "", result.refused, "")
            continue
        least, which = report.ceilings.seconds(result.case)
        noise = result.noise
        took = duration(result.seconds) + (f" ({result.backend})" if result.backend else "")
        if getattr(result.case, "tokens", None):
            took += f", {result.case.tokens / result.seconds:.0f} tokens/s"
        ours = (name, took, f"{least / result.seconds:.0%} {which}", f"±{noise.noise:.1%}")
        for peer in result.peers:
            label = f"{peer.name} ({peer.detail})" if peer.detail else peer.name
            wanted = goal(result.case, peer.name)
            if peer.comparison is None:
                yield (*ours, label, "–", "", "", f"{wanted:g}", peer.reason, "")
                continue
            c = peer.comparison
            yield (
                *ours,
                label,
                f"{c.ratio:.2f}",
                f"{c.low:.2f} – {c.high:.2f}",
                f"{c.min_ratio:.2f}",
                f"{wanted:g}",
                verdict(c, noise.noise, wanted),
                f"{c.blocks - c.rejected}/{c.blocks}{' restless' if c.note else ''}",
            )


def notes(report):
    """Everything a reader should know before believing the table."""
    if not report.complete:
        yield f"Interrupted: {len(report.results)} of {report.planned} cases."
    noisy = [result.case.name for result in report.results if result.noise and result.noise.noise > TOO_NOISY]
    if noisy:
        yield f"A/A noise above {TOO_NOISY:.0%}, so run these again on an idle machine: {', '.join(noisy)}."
    for result in report.results:
        for peer in result.peers:
            if peer.error is not None and peer.error > result.bound:
                times = f"{peer.error / result.bound:.1f} times"
                yield f"{result.case.name}, {peer.name}: timed although its error is {times} the bound for ours."
        named = [(peer.name, peer.comparison) for peer in result.peers] + [("A/A", result.noise)]
        for name, comparison in named:
            if comparison is not None and comparison.note:
                yield f"{result.case.name}, {name}: {comparison.note}."


def ceiling_lines(ceilings):
    for dtype, rate in ceilings.gemm.items():
        yield f"{dtype} GEMM: {rate / 1e9:.0f} GF/s"
    for size, rate in ceilings.read.items():
        yield f"read, {size / 2**20:.0f} MiB: {rate / 1e9:.1f} GB/s"


def table(report):
    """For the terminal, in 80 columns: a line for each case, and below it one for each peer."""
    parts = [_peers(("against", "ratio", "95 % interval", "goal", "verdict"), "bold")]
    last = None
    for name, took, share, noise, peer, ratio, interval, _, wanted, word, _ in rows(report):
        if name != last:
            figures = f"  {took}, {share}, A/A {noise}" if share else f"  {took}"
            parts.append(Text.assemble(("\n" + name, "bold"), (figures, "dim")))
        last = name
        style = {"faster": "green", "slower": "red"}.get(word.partition(",")[0], "yellow")
        parts.append(_peers((f"  {peer.partition(' (')[0]}", ratio, interval, wanted, word), style))
    return Group(*parts, Text(f"\n{READING}", "dim"))


def _peers(cells, style):
    """A line of the table, in columns of the same widths as all others."""
    line = Table.grid(padding=(0, 1), expand=False)
    for width, justify in ((30, "left"), (5, "right"), (13, "right"), (4, "right"), (24, "left")):
        line.add_column(width=width, justify=justify)
    line.add_row(*(Text(cell) for cell in cells[:-1]), Text(cells[-1], style), style="bold" if style == "bold" else "")
    return line


def markdown(report):
    lines = ["# Benchmark", "", *(f"- {key}: {value}" for key, value in report.machine.items())]
    lines += [f"- {line}" for line in ceiling_lines(report.ceilings)]
    lines += ["", _row(COLUMNS), _row(["---"] * len(COLUMNS)), *(_row(row) for row in rows(report))]
    lines += ["", f"{READING} {BLOCKS}"]
    remarks = list(notes(report))
    if remarks:
        lines += ["", "## To bear in mind", "", *(f"- {remark}" for remark in remarks)]
    lines += ["", "## Why these cases", "", *(f"- `{r.case.name}`: {r.case.why}" for r in report.results)]
    return "\n".join(lines) + "\n"


def as_json(report):
    results = []
    for result in report.results:
        least, which = report.ceilings.seconds(result.case)
        entry = asdict(result) | {"name": result.case.name, "flops": result.case.flops, "bytes": result.case.bytes}
        entry |= {"ceiling": which, "ceiling_seconds": least}
        entry["share_of_ceiling"] = least / result.seconds if result.noise else None
        results.append(entry)
    whole = {
        "machine": report.machine,
        "ceilings": asdict(report.ceilings),
        "complete": report.complete,
        "results": results,
    }
    return json.dumps(whole, indent=2) + "\n"


def duration(seconds):
    """Three digits and a unit.

    >>> duration(0.0123), duration(2.5e-5), duration(1.5)
    ('12.3 ms', '25 µs', '1.5 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _row(cells):
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

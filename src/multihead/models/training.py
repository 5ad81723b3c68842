"""Training that can be stopped, killed and taken up again, with the same result to the last bit.

What happens in step n depends on the weights, the optimiser's state, the seed and n, and on nothing else: each step
starts the generator anew. So a checkpoint is the first two, with the number. Results are the same for the same
number of threads; another number sums in another order.
"""

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multihead.files import replacing, require_writable
from multihead.sizes import require_int


@dataclass(frozen=True)
class Recipe:
    """How to train: AdamW, with a warm-up and then half a cosine down to a twentieth of the rate."""

    steps: int
    rows: int  # of each batch
    rate: float = 1e-3
    warmup: int = 100
    decay: float = 0.1  # of matrices only
    clip: float = 1.0  # the largest norm of a step's gradient
    seed: int = 0
    batches: str = ""  # what else decides what is drawn, such as "shift=1"

    def __post_init__(self) -> None:
        for name in ("steps", "rows"):
            require_int(name, getattr(self, name), 1)
        if not 0 < self.rate < math.inf:
            raise ValueError(f"rate={self.rate}: expected a number above 0")

    def rate_at(self, step: int) -> float:
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.rate * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)


@dataclass(frozen=True)
class Progress:
    """Where a training stands: `loss` is the mean since the last report, `figures` are what was validated."""

    step: int
    steps: int
    loss: float
    figures: dict[str, float]


Loss = Callable[[torch.Generator], Tensor]


def train(
    model: nn.Module,
    loss: Loss,
    recipe: Recipe,
    checkpoint: str | os.PathLike | None = None,
    *,
    validate: Callable[[], dict[str, float]] = dict,
    report: Callable[[Progress], None] = lambda progress: None,
    report_every: int = 50,
    validate_every: int = 500,
    save_every: int = 200,
) -> int:
    """Train from scratch, or from the checkpoint where there is one; how many steps are done when it returns.

    Ctrl-C and SIGTERM let the step under way finish, save, and return.

    Args:
        model: what to train, in place.
        loss: the loss of one batch, which is drawn by the generator it is given.
        recipe: how.
        checkpoint: the file to go on from and to save to; none unless given.
        validate: what to measure now and then.
        report: is called with the progress.
        report_every: steps between reports.
        validate_every: steps between validations; there is one at the end too.
        save_every: steps between checkpoints; there is one at the end too.

    >>> model = torch.nn.Linear(1, 1)
    >>> fit = lambda generator: (model(torch.rand(8, 1, generator=generator)) - 1).square().mean()
    >>> mh.models.training.train(model, fit, mh.models.training.Recipe(steps=200, rows=8, rate=0.1, decay=0.0))
    200
    >>> bool(fit(torch.Generator()) < 1e-3)
    True
    """
    optimiser = _optimiser(model, recipe)
    path = None if checkpoint is None else Path(checkpoint)
    first = 0 if path is None or not path.exists() else _resume(path, model, optimiser, recipe)
    if path is not None and first < recipe.steps:
        require_writable(path)
    step, total, counted = first, 0.0, 0
    with _stop_requests() as stop:
        model.train()
        for step in range(first, recipe.steps):
            for group in optimiser.param_groups:
                group["lr"] = recipe.rate_at(step)
            here = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
            batch_loss = loss(here)
            value = batch_loss.item()
            if not math.isfinite(value):
                raise FloatingPointError(f"the loss of step {step} is {value}: try a lower rate than {recipe.rate}")
            optimiser.zero_grad()
            batch_loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimiser.step()
            total, counted, done = total + value, counted + 1, step + 1
            last = done == recipe.steps or stop.is_set()
            figures = {}
            if done == recipe.steps or (done % validate_every == 0 and not last):
                model.eval()
                figures = validate()
                model.train()
            if figures or done % report_every == 0 or last:
                report(Progress(done, recipe.steps, total / counted, figures))
                total, counted = 0.0, 0
            if path is not None and (last or done % save_every == 0):
                save(path, model, optimiser, recipe, done)
            if stop.is_set():
                break
        model.eval()
    return step + 1 if recipe.steps > first else first


def _optimiser(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": recipe.decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.98))


def save(path: Path, model: nn.Module, optimiser: torch.optim.Optimizer, recipe: Recipe, step: int) -> None:
    """Write a checkpoint beside its place, then move it there: what is there is whole at every moment."""
    state = {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "recipe": asdict(recipe), "step": step}
    with replacing(path, make_folder=True) as beside, beside.open("wb") as file:
        torch.save(state, file)


def _resume(path: Path, model: nn.Module, optimiser: torch.optim.Optimizer, recipe: Recipe) -> int:
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        was, step = state["recipe"], state["step"]
    except Exception as error:  # torch says in a dozen ways that a file is damaged
        raise ValueError(f"{path} is not a checkpoint of a training: {error}") from error
    for name, value in asdict(recipe).items():
        if was.get(name) != value:
            raise ValueError(f"{path} was trained with {name}={was.get(name)}, not {value}: expected the same recipe")
    try:
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise ValueError(f"{path} is the checkpoint of another model: {error}") from error
    return step


@contextmanager
def _stop_requests() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set; only the main thread can listen to them."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.signal(number, lambda *_: asked.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

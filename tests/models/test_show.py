"""`multihead show` and `multihead train`, as a user meets them: in a process of their own."""

import json
import re
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console, RenderableType

import multihead as mh
from multihead import cli
from multihead.explorer import subjects
from multihead.show import screens
from tests.forks import run


def printed(what: RenderableType, width: int = 80) -> str:
    console = Console(width=width, file=StringIO(), highlight=False)
    console.print(what)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_text_goes_through_the_language_model() -> None:
    shown = run("show", "I love pepperoni pizza", "--all")
    assert shown.returncode == 0, shown.stderr
    lm = mh.models.load("lm")
    pieces = lm.tokenizer.pieces("I love pepperoni pizza")
    N, layers = len(pieces) + 1, len(lm.blocks)
    for part in (
        f"Layer 0 (--layer 0…{layers - 1}) of a language model",
        " ".join(piece.replace(" ", "␣") for piece in pieces),
        f"{N} items of width 256, 8 heads of width 32",
        f"({N}, 256) → ({N}, 8, 32)",
        "■ may attend, · hidden",
        "head 7",
        "“‹start›I love pepperoni”",
        "“‹start›I love pepperoni pizza”",
        "what comes next",
    ):
        assert part in shown.stdout, part
    assert len(re.findall(r"^  \S+ +■( [■·])+ *$", shown.stdout, re.MULTILINE)) == N, (
        "the mask has a row for each token"
    )
    assert run("show", "--all").stdout == shown.stdout


@pytest.mark.parametrize("what", ["I love pepperoni pizza", str(mh.models.samples()["bag"]), "a " * 300, "a"])
def test_the_brief_form_fits_on_one_screen(what: str) -> None:
    shown = printed(screens.show(what, brief=True)).splitlines()
    assert len(shown) <= 42
    assert max(map(len, shown)) <= 80
    joined = "\n".join(shown)
    for part in ("1 project", "3 score", "softmax", "7 output", "%"):
        assert part in joined


def test_every_layer_can_be_shown() -> None:
    layers = [printed(screens.show("one two three", layer)) for layer in (0, 1, -1)]
    assert layers[0] != layers[1] == layers[2]


def test_the_weights_shown_are_those_of_the_layer() -> None:
    lm = mh.models.load("lm")
    tokens = torch.tensor([lm.tokenizer.begin("to be or")])
    shown = printed(screens.show("to be or", 1))
    expected = lm.look(tokens)[1].weights()[0, 0, -1]
    row = re.search(r"head 0 .*?\n(?:.*\n){4} *␣or +(\d+) +(\d+) +(\d+) +(\d+)", shown)
    assert row is not None
    assert [int(n) for n in row.groups()] == [round(100 * w) for w in expected.tolist()]


def test_a_picture_goes_through_the_vision_transformer(tmp_path: Path) -> None:
    shown = run("show", "--sample", "ankle boot", "--all", COLUMNS="80")
    assert shown.returncode == 0, shown.stderr
    for part in (
        "cut into 7 × 7 patches of 4 × 4",
        "50 items",
        "4 heads of width 16",
        "where the class token looks",
        "no mask: every item sees every item",
        "head 3",
        "ankle boot",
    ):
        assert part in shown.stdout, part
    assert "■" not in shown.stdout
    rows = [line for line in shown.stdout.splitlines() if re.fullmatch(r" *([·░▒▓█]{4} ){6}[·░▒▓█]{4} *", line)]
    assert len(rows) == 14, "two rows of characters for each of seven rows of patches"
    copy = tmp_path / "Boot.PNG"
    copy.write_bytes(mh.models.samples()["ankle boot"].read_bytes())
    assert run("show", str(copy), "--all", COLUMNS="80").stdout == shown.stdout


@pytest.mark.parametrize("width", [80, 120])
def test_screens_fit_the_terminal(width: int) -> None:
    for what in ("I love pepperoni pizza", str(mh.models.samples()["bag"])):
        lines = printed(screens.show(what), width).splitlines()
        assert max(map(len, lines)) <= width


def test_text_beyond_the_context_is_shown_in_part() -> None:
    said = "all the king's horses " * 10_000
    shown = printed(screens.show(said))
    whole = len(mh.models.load("lm").tokenizer.begin(said))
    assert f"The first 256 of {whole} tokens" in shown
    assert "(the first 16 of 256 items)" in shown


def test_colour_only_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    coloured = run("show", "hello there", FORCE_COLOR="1", TERM="xterm-256color").stdout
    plain = run("show", "hello there", NO_COLOR="1").stdout
    strip = re.compile(r"\x1b\[[0-9;]*m")
    assert "\x1b[" in coloured
    assert "\x1b[" not in plain
    assert [line.rstrip() for line in strip.sub("", coloured).splitlines()] == [
        line.rstrip() for line in plain.splitlines()
    ]


@pytest.mark.parametrize(
    ("what", "options", "error", "message"),
    [
        ("  ", {}, ValueError, "text='  ' is empty: expected at least one word"),
        ("a.png", {}, FileNotFoundError, "a.png: there is no such file"),
        (__file__, {}, ValueError, "test_show.py is a file of text: expected the text itself"),
        ("hello", {"layer": 7}, ValueError, "layer=7: the model has layers 0…1"),
        ("hello", {"model": "vit"}, ValueError, "'hello' is a text: expected the path of a picture with --model=vit"),
        ("a.png", {"model": "lm"}, ValueError, "a.png is a picture: expected a text with --model=lm"),
        ("a.png", {"model": "some/folder"}, ValueError, "a.png is a picture: expected a text with --model=some/folder"),
        ("hello", {"model": "x.safetensors"}, FileNotFoundError, "x.safetensors: there is no such file"),
        ("hello", {"model": "x.gguf"}, FileNotFoundError, "x.gguf: there is no such file"),
        (
            "hello",
            {"model": "./no/such/folder"},
            FileNotFoundError,
            "model='./no/such/folder': there is no such folder",
        ),
    ],
)
def test_refuses_in_words(what: str, options: dict, error: type[Exception], message: str) -> None:
    if "such folder" in message or "gguf" in message:
        pytest.importorskip("transformers")
    with pytest.raises(error, match=re.escape(message)):
        screens.show(what, **options)


def test_a_name_that_is_nowhere_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from huggingface_hub import constants

    from multihead.explorer.subjects import of_name

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for load in (lambda: screens.show("hello", 0, "nowhere"), lambda: of_name("nowhere")):
        with pytest.raises(ValueError, match=r"model='nowhere': there is no such folder here, .* no network") as caught:
            load()
        assert "huggingface.co" not in str(caught.value)


def test_a_name_that_the_hub_does_not_have() -> None:
    pytest.importorskip("transformers")
    from huggingface_hub.errors import RepositoryNotFoundError

    from multihead.hf.place import refusal

    error = OSError("nowhere is not a local folder")
    error.__cause__ = RepositoryNotFoundError.__new__(RepositoryNotFoundError)  # the hub's answer is no part of it
    assert "no model of that name on the hub" in str(refusal("nowhere", error))
    assert "transformers cannot load it: config" in str(refusal("nowhere", ValueError("config")))


OPENED = {"show": lambda: screens.show("hello", 0, "gpt2"), "explore": lambda: subjects.of_name("gpt2")}


def imported_afresh(monkeypatch: pytest.MonkeyPatch, transformers: ModuleType | None) -> None:
    for name in [name for name in sys.modules if name.startswith(("multihead.hf", "multihead.explorer.hugging"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", transformers)  # type: ignore[arg-type]


@pytest.mark.parametrize("command", OPENED)
def test_without_transformers_its_extra_is_named(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    imported_afresh(monkeypatch, None)
    needs = "model='gpt2': a Hugging Face model needs `pip install \"multihead[hf]\"`"
    with pytest.raises(ValueError, match=re.escape(needs)):
        OPENED[command]()


class Unfit(ModuleType):
    """What transformers does where torchvision was built for another torch: its own error hides the first."""

    def __getattr__(self, name: str) -> Any:
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:
            raise ModuleNotFoundError(f"Could not import module '{name}'.") from error


@pytest.mark.parametrize("command", OPENED)
def test_what_keeps_transformers_from_loading_is_said(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    imported_afresh(monkeypatch, Unfit("transformers"))
    why = "model='gpt2': transformers cannot be used: RuntimeError: operator torchvision::nms does not exist"
    with pytest.raises(ValueError, match=re.escape(why)) as refused:
        OPENED[command]()
    assert "pip install" not in str(refused.value)


def test_the_command_line_refuses_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    broken = tmp_path / "broken.png"
    Image.effect_noise((64, 64), 90).save(broken)
    broken.write_bytes(broken.read_bytes()[:300])
    words = tmp_path / "words.txt"
    words.write_text("I love pepperoni pizza")
    for arguments, message in (
        (["show", str(broken)], "is damaged"),
        (["show", "hello", "--width", "64"], "--width=64 is for the running example: give --example too"),
        (["show", "--sample", "cat"], "--sample='cat': expected one of T-shirt, ankle boot, bag"),
        (["show", str(tmp_path)], "is a folder: expected a text, or the path of a picture"),
        (["show", str(words)], f'is a file of text: expected the text itself, "$(cat {words})", or a picture'),
        (["bench", "--case", "nothing"], "no case matches nothing"),
        (["train", "lm", "--data", "nowhere"], "nowhere: there is no such file or folder"),
        (["train", "lm", "--shift", "1"], "--shift=1 is for images: expected it with vit"),
        (["train", "vit", "--repeats", "0"], "--repeats=0.0 is for text: expected it with lm"),
    ):
        monkeypatch.setattr(sys, "argv", ["multihead", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2
        told = capsys.readouterr()
        assert message in told.err
        assert "Traceback" not in told.err + told.out


def test_a_hugging_face_folder_is_shown(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = mh.models.load("lm").tokenizer
    (tmp_path / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaModel(config)
    model.save_pretrained(tmp_path)
    fast.save_pretrained(tmp_path)
    shown = [printed(screens.show("I love pizza", layer, str(tmp_path)), 100) for layer in (0, 1, -1)]
    assert shown[1] == shown[2] != shown[0]
    assert "with layers 0…1" in shown[0]
    assert "layers.1.self_attn" in shown[1]
    assert "I ␣love ␣p" in shown[0]
    assert "■ may attend, · hidden" in shown[0]
    assert "head 3" in shown[0]
    with pytest.raises(ValueError, match="layer=2: expected 0…1"):
        screens.show("I love pizza", 2, str(tmp_path))
    with pytest.raises(ValueError, match="is empty"):
        screens.show(" ", 0, str(tmp_path))


def write_gguf(file: Path) -> None:
    """A llama with random weights and two layers, and the tokenizer of our language model."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate")
    bpe = json.loads(mh.models.load("lm").tokenizer.json)["model"]
    width, heads, inner = 32, 4, 48
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(bpe["vocab"]))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(bpe["vocab"], key=bpe["vocab"].get))
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    shapes = {"token_embd": (len(bpe["vocab"]), width), "output": (len(bpe["vocab"]), width), "output_norm": (width,)}
    for n in range(2):
        shapes |= {
            f"blk.{n}.attn_q": (width, width), f"blk.{n}.attn_k": (16, width), f"blk.{n}.attn_v": (16, width),
            f"blk.{n}.attn_output": (width, width), f"blk.{n}.ffn_gate": (inner, width), f"blk.{n}.ffn_up": (inner, width),
            f"blk.{n}.ffn_down": (width, inner), f"blk.{n}.attn_norm": (width,), f"blk.{n}.ffn_norm": (width,),
        }  # fmt: skip
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_shown(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    write_gguf(tmp_path / "tiny.gguf")
    shown = printed(screens.show("I love pizza", 1, str(tmp_path / "tiny.gguf")), 100)
    assert "Layer 1 of" in shown
    assert "with layers 0…1" in " ".join(shown.split())  # a long path breaks the line
    assert "␣love" in shown
    assert "head 3" in shown


def test_training_stops_on_ctrl_c_and_goes_on(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("she sells sea shells by the sea shore. " * 300)
    command = ["train", "lm", "--data", str(text), "--out", str(tmp_path / "out"), "--size", "tiny", "--steps", "100"]
    running = subprocess.Popen(
        [sys.executable, "-m", "multihead", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    deadline = time.monotonic() + 200
    assert running.stdout.readline().startswith("step 50 of 100: loss "), running.stderr
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=deadline - time.monotonic())
    assert running.returncode == 0, err
    stopped = re.search(r"stopped after step (\d+), saved; the same command goes on from there", out)
    assert stopped is not None, out
    assert 50 <= int(stopped[1]) < 100
    assert not (tmp_path / "out" / "lm.safetensors").exists()
    again = run(*command)
    assert again.returncode == 0, again.stderr
    assert "step 100 of 100" in again.stdout
    assert "bits per byte" in again.stdout
    shown = run("show", "she sells", "--model", str(tmp_path / "out" / "lm.safetensors"))
    assert "Layer 0 (--layer 0…1) of a language model" in shown.stdout


@pytest.mark.parametrize("where", ["the import", "the model"])
def test_a_torchvision_that_does_not_fit_is_what_is_reported(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers hides the reason behind "Could not import module"; nothing says that transformers is missing."""
    screen = pytest.importorskip("multihead.hf.screen")

    def fails(*given: object, **options: object) -> None:
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as reason:
            raise ModuleNotFoundError("Could not import module 'BeitModel'") from reason

    if where == "the import":
        monkeypatch.setattr(screen, "show", fails)
    else:
        import transformers

        monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fails)
    with pytest.raises(ValueError, match="RuntimeError: operator torchvision::nms does not exist") as refused:
        screens.show("a text", model="gpt2")
    assert "pip install" not in str(refused.value)

"""The server as a running thing: its port, its token, its end; in a process of its own, as a user meets it."""

import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from rich.console import Console

import multihead as mh
from multihead.explorer import serve
from multihead.explorer.launch import launch
from tests.explorer.client import TRACE, Client


@contextmanager
def explorer(*arguments: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """`multihead explore`, and the address it prints."""
    command = [sys.executable, "-m", "multihead", "explore", "--no-browser", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        said = ""
        while "Ctrl-C" not in said:
            line = process.stdout.readline()
            assert line, f"it ended: {said}"
            said += line
        yield process, said
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_it_prints_its_address_once_it_answers_and_ctrl_c_ends_it() -> None:
    with explorer("--port", "0") as (process, said):
        url = re.search(r"http://\S+", said)
        assert url is not None
        client = Client(url[0])
        status, answer = client.post("trace", TRACE)
        assert status == 200
        lm = mh.models.load("lm")
        tokens = torch.tensor([lm.tokenizer.begin("I love pepperoni pizza")])
        assert torch.equal(answer.tensors["weights"], lm.trace(tokens, 0)["weights"])
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=20)
        assert process.returncode == 0
        assert "ended" in rest
        assert "Traceback" not in rest


def test_killed_and_started_again_the_page_that_is_open_goes_on() -> None:
    with explorer("--port", "0") as (process, said):
        client = Client(re.search(r"http://\S+", said)[0])  # type: ignore[index]
        process.kill()
        process.wait()
    with explorer("--port", str(client.port)):
        assert client.post("models", {})[0] == 200


def test_beyond_loopback_it_warns() -> None:
    with explorer("--port", "0", "--host", "0.0.0.0") as (_, said):
        assert "others on the network can reach this server" in said
        port = int(re.search(r":(\d+)/", said)[1])  # type: ignore[index]
        client = Client(f"http://127.0.0.1:{port}/?token=x")
        assert client.raw("GET", "/", None, Host="192.168.7.9:80")[0] == 200, (
            "an address is no name: it cannot be rebound"
        )
        assert client.raw("GET", "/", None, Host="evil.example")[0] == 403
        assert client.raw("POST", "/api/models", b"{}")[0] == 401


def launch_with(**given: object) -> None:
    options = {"model": None, "text": None, "sample": None, "layer": None, "save": None, "port": 0, "host": "127.0.0.1"}
    launch(Console(), **options | {"browser": False} | given)  # type: ignore[arg-type]


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match="expected one that is free"):
            launch_with(port=taken.getsockname()[1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"port": 70000}, "expected 0…65535"),
        ({"host": "no.such.host.invalid"}, "expected an address of this machine"),
        ({"host": "192.0.2.1"}, "host='192.0.2.1': expected an address of this machine"),
        ({"model": "no/such/model.safetensors"}, "there is no such file"),
        ({"model": "x.gguf"}, "there is no such file"),
        ({"sample": "unicorn"}, "expected one of"),
        ({"text": "a", "sample": "bag"}, "expected one of them"),
        ({"model": "vit", "text": "a"}, "text='a' is nothing that model='vit' takes: leave one of them out"),
        ({"model": "lm", "sample": "bag"}, "sample='bag' is nothing that model='lm' takes: leave one of them out"),
        ({"layer": 9}, "has layers 0…1"),
    ],
)
def test_a_mistake_gets_a_sentence(given: dict, message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        launch_with(**given)


def test_without_a_port_the_first_free_one_is_taken() -> None:
    first = serve.listen("127.0.0.1", None)
    second = serve.listen("127.0.0.1", None)
    with first, second:
        ports = first.getsockname()[1], second.getsockname()[1]
        assert ports[0] != ports[1]
        assert all(port >= 1024 for port in ports)


# The token ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "multihead" / "token"


def test_the_token_is_kept_where_only_the_user_reads_it(state: Path) -> None:
    token = serve.kept_token()
    assert len(token) == 43
    assert stat.S_IMODE(state.stat().st_mode) == 0o600
    assert serve.kept_token() == token


@pytest.mark.parametrize("damage", ["readable", "a link", "short", "binary"])
def test_a_token_that_others_may_know_is_not_used(state: Path, damage: str, tmp_path: Path) -> None:
    token = serve.kept_token()
    if damage == "readable":
        state.chmod(0o644)
    elif damage == "a link":
        state.rename(tmp_path / "elsewhere")
        state.symlink_to(tmp_path / "elsewhere")
    else:
        state.write_bytes(b"short" if damage == "short" else b"\xff" * 43)
    again = serve.kept_token()
    assert again != token
    assert len(again) == 43
    assert serve.kept_token() == again


def test_where_it_cannot_be_kept_there_is_a_new_one_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert serve.kept_token() != serve.kept_token()


# From Python ----------------------------------------------------------------------------------------------------------


def test_explore_serves_a_layer_and_closes() -> None:
    layer, x = mh.MultiHeadAttention(24, heads=3), torch.randn(5, 24)
    running = mh.explore(layer, x, mask=mh.Causal(), labels=list("abcde"), browser=False, wait=False, port=0)
    assert running is not None
    client = Client(running.url)
    status, answer = client.post("trace", {"model": "given", "layer": 0, "input": {"kind": "given"}})
    assert status == 200
    assert torch.allclose(answer.tensors["output"], layer(x, mask=mh.Causal()), atol=1e-6)
    assert [t["text"] for t in answer.meta["tokens"]] == list("abcde")
    assert running.url in repr(running)
    began = time.monotonic()
    running.close()
    assert time.monotonic() - began < 60  # it does not hang
    assert "closed" in repr(running)

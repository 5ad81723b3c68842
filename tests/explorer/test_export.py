"""The single file holds everything it shows, nothing that runs but its own script, and stays small."""

import base64
import gzip
import hashlib
import html
import json
import re
from pathlib import Path

import pytest
import torch

import multihead as mh
from multihead.explorer import export
from multihead.explorer.export import single_file
from multihead.explorer.request import Refused
from multihead.explorer.session import Session
from multihead.explorer.wire import Answer
from tests.explorer.client import SENTENCE, TRACE, Client

ANSWER = re.compile(
    r'<script type="application/octet-stream" class="multihead-answer" data-key="([^"]*)">([^<]*)</script>'
)


def answers(text: str) -> dict[str, Answer]:
    found = {html.unescape(name): gzip.decompress(base64.b64decode(data)) for name, data in ANSWER.findall(text)}
    return {name: Answer.from_bytes(data) for name, data in found.items()}


@pytest.fixture(scope="module")
def text(session: Session) -> str:
    return single_file(session, TRACE)


def test_it_is_small(text: str) -> None:
    assert len(text.encode()) < 3_000_000


def test_it_holds_the_answers_the_page_asks_for(text: str, session: Session) -> None:
    found = answers(text)
    for layer in (0, 1):
        name = f'trace {{"input":{{"kind":"text","text":"I love pepperoni pizza"}},"layer":{layer},"model":"lm"}}'
        wanted = session.answer("trace", TRACE | {"layer": layer})
        assert found[name].meta == wanted.meta
        assert torch.equal(found[name].tensors["weights"], wanted.tensors["weights"])
        exact = session.answer("weights", {"model": "lm", "layer": layer}).tensors
        for matrix, t in found[f'weights {{"layer":{layer},"model":"lm"}}'].tensors.items():
            assert ((t - exact[matrix]).abs() <= exact[matrix].abs() * 2**-16).all(), matrix
    kinds = {name.split(" ")[0] for name in found}
    assert kinds == {"models", "tokens", "trace", "weights", "heads", "predict", "decode"}
    assert [m["id"] for m in found["models {}"].meta["models"]] == ["lm"]


def test_its_policy_names_its_script_and_style_and_nothing_else(text: str) -> None:
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', text)
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    assert "http" not in policy
    for tag, pattern in (("script", r'<script type="module">(.*?)</script>'), ("style", r"<style>(.*?)</style>")):
        (body,) = re.findall(pattern, text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert text.index("Content-Security-Policy") < text.index("<style>") < text.index('<script type="module">')


def test_nothing_in_it_comes_from_elsewhere(text: str) -> None:
    assert not re.findall(r'(?:src|href)="(?!data:,|#)[^"]*"', ANSWER.sub("", text))
    start = json.loads(re.findall(r'id="multihead-start">([^<]*)<', text)[0])
    assert start["mode"] == "file"
    assert start["state"] == "model=lm&layer=0&text=I+love+pepperoni+pizza"


def test_what_was_changed_is_in_it_too(session: Session) -> None:
    request = {
        "model": "lm",
        "layer": 1,
        "input": SENTENCE,
        "mask": {"kind": "none"},
        "off": [[0, 1]],
        "state": "step=3",
    }
    found = answers(single_file(session, request))
    assert any('"off":[[0,1]]' in name and name.startswith("predict") for name in found)
    assert any('"mask":{"kind":"none"}' in name and name.startswith("trace") for name in found)


@pytest.mark.parametrize(
    "hostile", ["</script><script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "<!-- -->", "\u2028"]
)
def test_hostile_text_stays_inside_its_attribute(session: Session, hostile: str) -> None:
    text = single_file(session, TRACE | {"input": {"kind": "text", "text": hostile}, "state": hostile})
    assert text.count("<script") == len(ANSWER.findall(text)) + 2
    assert "<img" not in text
    assert any(json.dumps(hostile, ensure_ascii=False) in name for name in answers(text))
    start = re.findall(r'id="multihead-start">([^<]*)</script>', text)[0]
    assert json.loads(start)["state"] == hostile


def test_the_server_gives_it_as_a_file_to_keep(server: Client) -> None:
    body = json.dumps(TRACE | {"state": "step=3"}).encode()
    status, headers, data = server.raw("POST", "/api/save", body, X_Multihead_Token=server.token)
    assert status == 200
    assert headers["content-disposition"].startswith("attachment")
    assert b'"state": "step=3"' in data
    assert server.post("save", {"model": "lm"})[0] == 400


def test_a_picture_and_the_running_example(session: Session) -> None:
    found = answers(single_file(session, {"model": "vit", "layer": 3, "input": {"kind": "sample", "name": "bag"}}))
    assert sum(name.startswith("trace") for name in found) == 4
    text = single_file(session, {"model": "example", "layer": 0, "input": SENTENCE})
    assert 3e6 < len(text) < 12e6, "8 MB of weights at width 1024"


def test_of_a_large_model_only_the_chosen_layer_is_in_it(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "MOST_NUMBERS", 1000)
    found = answers(single_file(session, TRACE | {"layer": 1}))
    assert [name for name in found if name.startswith("weights")] == ['weights {"layer":1,"model":"lm"}']


def test_trace_html(tmp_path: Path) -> None:
    layer = mh.MultiHeadAttention(32, heads=4)
    traced = mh.trace(layer, torch.randn(5, 32), mask=mh.Causal(), labels=["<b>", "a", "b", "c", "d"])
    traced.html(tmp_path / "page.html")
    found = answers((tmp_path / "page.html").read_text(encoding="utf-8"))
    kept = found['trace {"input":{"kind":"given"},"layer":0,"model":"given"}']
    for name in traced:
        assert torch.equal(kept.tensors[name], traced[name]), name
    assert 'weights {"layer":0,"model":"given"}' in found
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_explore_saves_a_page(tmp_path: Path) -> None:
    assert mh.explore(mh.MultiHeadAttention(16, heads=2), torch.randn(4, 16), save=tmp_path / "own.html") is None
    assert "multihead-answer" in (tmp_path / "own.html").read_text(encoding="utf-8")


def test_a_place_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="there is no folder"):
        mh.explore(mh.MultiHeadAttention(16, heads=2), torch.randn(4, 16), save=tmp_path / "no" / "page.html")
    with pytest.raises(Refused):
        single_file(Session([mh_example()]), {"model": "example"})


def mh_example():
    from multihead.explorer.packaged import Example

    return Example()

"""The notebook widget: the page in a frame that asks Python through messages; what a cell shows; what comes back."""

import base64
import io
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import multihead as mh
from multihead.explorer import notebook
from multihead.explorer.session import Session
from multihead.explorer.subjects import of_model
from multihead.explorer.wire import Answer
from tests.explorer.browser import chromium, needs_browser  # noqa: F401

anywidget = pytest.importorskip("anywidget", reason="no anywidget: the widget is not tested")

LABELS = ["I", "love", "pepperoni", "pizza", "so", "much"]


@pytest.fixture(scope="module")
def layer_and_x() -> tuple[mh.MultiHeadAttention, torch.Tensor]:
    torch.manual_seed(2)
    return mh.MultiHeadAttention(24, heads=3).eval(), torch.randn(6, 24)


@pytest.fixture
def widget(layer_and_x: Any) -> Any:
    layer, x = layer_and_x
    return mh.explore(layer, x, mask=mh.Causal(), labels=LABELS, widget=True)


class Sent(list):
    """What a widget sends, instead of sending it."""

    def __call__(self, content: Any, buffers: Any = None) -> None:
        self.append((content, buffers))


def test_a_message_is_answered_by_bytes_or_by_a_sentence(
    widget: Any, layer_and_x: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = layer_and_x
    sent = Sent()
    monkeypatch.setattr(type(widget), "send", lambda self, content, buffers=None: sent(content, buffers))
    asked = {"model": "given", "layer": 0, "input": {"kind": "given"}}
    widget._receive(None, {"id": 7, "path": "api/trace", "body": json.dumps(asked)}, [])
    (content, [data]) = sent.pop()
    assert content == {"id": 7}
    assert torch.equal(Answer.from_bytes(data).tensors["weights"], mh.trace(layer, x, mask=mh.Causal())["weights"])
    for path, body, said in (
        ("api/trace", json.dumps(asked | {"layer": 4}), "layer=4"),
        ("api/nothing", "{}", "there is no 'nothing'"),
        ("api/trace", "{", "not JSON"),
    ):
        widget._receive(None, {"id": 8, "path": path, "body": body}, [])
        content, buffers = sent.pop()
        assert said in content["error"]
        assert buffers is None
    widget._receive(None, {"id": 9, "path": "api/save", "body": json.dumps(asked)}, [])
    assert sent.pop()[1][0].startswith(b"<!doctype html>")


def test_explore_says_what_it_needs(layer_and_x: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_and_x
    monkeypatch.setattr(notebook, "widget_of", lambda session, state="": None)
    with pytest.raises(ImportError, match=r"multihead\[widget\]"):
        mh.explore(layer, x, widget=True)


def test_outside_a_notebook_a_trace_and_a_lens_are_still_pictures(layer_and_x: Any) -> None:
    layer, x = layer_and_x
    trace, lens = mh.trace(layer, x, mask=mh.Causal(), labels=["<b>"] * 6), layer.look(x, mask=mh.Causal())
    for shown in (trace, lens):
        bundle = shown._repr_mimebundle_()
        assert set(bundle) == {"text/plain", "text/html"}
        assert bundle["text/plain"] == repr(shown)
        assert bundle["text/html"] == shown._repr_html_(), "for what knows HTML and nothing else"
        assert bundle["text/html"].count("data:image/png;base64,") == 3
        assert "<script" not in bundle["text/html"]
        assert "<b>" not in bundle["text/html"]
    assert "weights (3, 6, 6)" in trace._repr_mimebundle_()["text/html"]
    png = trace._repr_mimebundle_()["text/html"].split("base64,")[1].split('"')[0]
    assert base64.b64decode(png).startswith(b"\x89PNG")
    empty = mh.look(torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, 3, 4))
    assert "img" not in empty._repr_mimebundle_()["text/html"]


def pictures(html: str) -> list[torch.Tensor]:
    """The pictures in it, from 0, all ink, to 255."""
    found = [base64.b64decode(part) for part in re.findall(r"data:image/png;base64,([^\"]*)", html)]
    return [torch.from_numpy(np.array(Image.open(io.BytesIO(png)))) for png in found]


def test_where_widgets_cannot_load_there_is_a_still_picture(widget: Any, layer_and_x: Any) -> None:
    layer, x = layer_and_x
    html = widget._repr_html_()
    assert "<script" not in html
    shown = pictures(html)
    for head, weights in zip(shown, mh.trace(layer, x, mask=mh.Causal())["weights"], strict=True):
        assert head.shape == (6, 6)
        assert bool((head[0, 1:] == 255).all()), "what is hidden has no ink"
        assert int(head[weights.argmax() // 6, weights.argmax() % 6]) == 0, "the largest has the most"
    exact = pictures(mh.trace(layer, x, mask=mh.Causal())._repr_html_())
    assert int((torch.stack(shown).int() - torch.stack(exact).int()).abs().max()) <= 1, "thumbnails travel as float16"
    many = mh.explore(mh.MultiHeadAttention(40, heads=20), torch.randn(700, 40), widget=True)
    assert len(pictures(many._repr_html_())) == 16
    assert "and 4 more heads" in many._repr_html_()
    assert len(pictures(mh.explore(mh.models.load("lm"), "I love <b>", widget=True)._repr_html_())) == 8


def test_a_still_picture_that_cannot_be_made_says_why(layer_and_x: Any) -> None:
    layer, x = layer_and_x
    widget = mh.explore(layer, x, mask=mh.Causal(), widget=True)
    widget.session.start_with(None, layer=3)
    assert "layer=3" in widget._repr_html_()


def test_in_a_notebook_they_are_the_widget(layer_and_x: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_and_x
    monkeypatch.setattr(notebook, "in_notebook", lambda: True)
    shown = mh.explore(layer, x, mask=mh.Causal())
    assert type(shown).__name__ == "Explorer"
    for one in (mh.trace(layer, x, mask=mh.Causal()), layer.look(x, mask=mh.Causal())):
        assert notebook.WIDGET in one._repr_mimebundle_()
    long = mh.trace(layer, torch.randn(700, 24))  # too long for a page: a still picture
    assert notebook.WIDGET not in long._repr_mimebundle_()
    assert "text/html" in long._repr_mimebundle_()


# In a browser, with Python at the other end ------------------------------------------------------------------------------

SITE = "http://notebook.test/"
HEAD = '<!doctype html><html lang="en"><title>a notebook</title>'
CELL = '<main id="cell"></main>'
# What VS Code shows a notebook's outputs in: a sandboxed frame, whose body says the theme. The policy is its own too,
# where `notebook.experimental.enableCsp` is set (vs/workbench/contrib/notebook: backLayerWebView.ts); 'self' stands for
# the places that its own scripts come from.
SANDBOX = "allow-scripts allow-same-origin allow-forms allow-pointer-lock allow-downloads"
VSCODE = f'<body class="vscode-dark" data-vscode-theme-kind="vscode-dark" style="overflow: hidden">{CELL}'
POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' https: http: data:; font-src 'self' https:; connect-src https:; child-src https: data:"
)
HOSTS = {
    "a page": f"{HEAD}<body>{CELL}",
    "VS Code": f"{HEAD}{VSCODE}",
    "VS Code with a policy": f'{HEAD}<meta http-equiv="Content-Security-Policy" content="{POLICY}">{VSCODE}',
}
STUB = """async ([source, place]) => {  // anywidget imports a blob, which that policy would not allow
  const module = await import(place ?? URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
  const traits = { state: "", height: 820, selection: {} };
  const handlers = {};
  const model = {
    get: (name) => traits[name],
    set: (name, value) => { traits[name] = value; },
    save_changes: () => { window.saved = structuredClone(traits); },
    on: (name, handler) => { (handlers[name] ??= []).push(handler); },
    off: (name, handler) => { handlers[name] = (handlers[name] ?? []).filter((h) => h !== handler); },
    async send(message) {
      const answer = await window.python(message);
      const bytes = answer.data && Uint8Array.from(atob(answer.data), (c) => c.charCodeAt(0));
      const shifted = bytes && new Uint8Array(bytes.length + 3);  // buffers of a message are not aligned
      shifted?.set(bytes, 3);
      for (const handler of handlers["msg:custom"] ?? []) handler(answer.content, bytes ? [new DataView(shifted.buffer, 3)] : []);
    },
  };
  window.setTrait = (name, value) => { traits[name] = value; for (const h of handlers[`change:${name}`] ?? []) h(); };
  window.end = module.default.render({ model, el: document.getElementById("cell") });
}"""


@pytest.fixture(params=HOSTS)
def cell(request: Any, chromium: Any, widget: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A frame with the widget in it, as a notebook would have it."""
    from multihead.explorer.widget import module

    sent = Sent()
    monkeypatch.setattr(type(widget), "send", lambda self, content, buffers=None: sent(content, buffers))

    def python(message: Any) -> Any:
        widget._receive(None, message, [])
        content, buffers = sent.pop()
        return {"content": content, "data": base64.b64encode(buffers[0]).decode() if buffers else None}

    page = chromium.new_page(viewport={"width": 1100, "height": 900})
    messages: list[str] = []
    page.on(
        "console", lambda m: "sandboxing" in m.text or messages.append(f"{m.type}: {m.text}")
    )  # of the host's frame
    page.on("pageerror", lambda e: messages.append(f"error: {e}"))
    page.expose_function("python", python)
    framed = request.param != "a page"
    pages = {
        "": f'{HEAD}<body><iframe sandbox="{SANDBOX}" src="{SITE}outputs" style="width: 100%; height: 860px"></iframe>',
        "outputs": HOSTS[request.param],
    }
    for path, body in pages.items():
        page.route(SITE + path, lambda route, _, body=body: route.fulfill(body=body, content_type="text/html"))
    page.route(f"{SITE}widget.mjs", lambda route: route.fulfill(body=module(), content_type="text/javascript"))
    page.goto(SITE if framed else f"{SITE}outputs")
    frame = page.frame(url=f"{SITE}outputs")
    frame.wait_for_selector("#cell", state="attached")
    frame.evaluate(STUB, [module(), f"{SITE}widget.mjs" if POLICY in pages["outputs"] else None])
    yield frame
    assert messages == []
    page.close()


@needs_browser
def test_the_page_lives_in_the_cell_and_selections_come_back(cell: Any, layer_and_x: Any) -> None:
    layer, x = layer_and_x
    weights = mh.trace(layer, x, mask=mh.Causal())["weights"]
    frame = cell.frame_locator("iframe[title='multihead explorer']")
    frame.locator(".strip button[aria-current]").wait_for()
    frame.locator(".token").nth(5).wait_for()
    assert frame.locator(".token").all_inner_texts() == LABELS
    frame.locator(".token").nth(4).click()
    cell.wait_for_function("() => window.saved?.selection.query === 4")
    assert cell.evaluate("() => window.saved.selection.query_token") == "so"
    assert cell.evaluate("() => window.saved.selection.model") == "given", (
        "its name, where the address leaves it out, too"
    )
    cell.evaluate("() => window.setTrait('state', 'model=given&step=3&head=2&at=weights.2.5.1')")
    cell.wait_for_function("() => window.saved?.selection.name === 'weights'")
    selection = cell.evaluate("() => window.saved.selection")
    assert (selection["head"], selection["index"], selection["query"], selection["key"]) == (2, [2, 5, 1], 5, 1)
    assert selection["value"] == pytest.approx(float(weights[2, 5, 1]), rel=1e-5)
    assert (selection["query_token"], selection["key_token"]) == ("much", "love")
    assert "at=weights.2.5.1" in cell.evaluate("() => window.saved.state")
    dark = cell.evaluate("() => document.body.dataset.vscodeThemeKind === 'vscode-dark'")
    assert frame.locator(":root").get_attribute("data-theme") == ("dark" if dark else "light")
    cell.evaluate("() => window.setTrait('height', 500)")
    assert cell.locator("iframe").bounding_box()["height"] == 500
    assert (
        cell.evaluate("() => getComputedStyle(document.body).maxWidth") == "none"
    )  # the page's styles stay in its frame
    cell.evaluate("() => window.end()")
    assert cell.locator("iframe").count() == 0


@needs_browser
def test_a_refusal_is_said_in_the_cell(cell: Any) -> None:
    frame = cell.frame_locator("iframe[title='multihead explorer']")
    frame.locator(".strip button[aria-current]").wait_for()
    cell.evaluate("() => window.setTrait('state', 'model=given&layer=9')")
    frame.locator(".trouble:not([hidden])").wait_for()
    assert "layer=9" in frame.locator(".trouble p").inner_text()


def test_a_lens_is_a_map_and_nothing_else(layer_and_x: Any) -> None:
    layer, x = layer_and_x
    lens = layer.look(x, mask=mh.Causal())
    session = notebook.session_of(lens)
    assert session is not None
    model = session.answer("models", {}).meta["models"][0]
    assert (model["given"], model["most"]) == (6, 0)
    asked = {"model": "given", "layer": 0, "input": {"kind": "given"}}
    tile = session.answer("tile", asked | {"head": 1, "level": 0, "row": 0, "column": 0}).tensors["tile"]
    torch.testing.assert_close(tile, lens.weights()[0, 1].detach())
    assert notebook.session_of(mh.look(torch.zeros(1, 1, 0, 4), torch.zeros(1, 1, 3, 4))) is None


def test_the_package_needs_no_widget(monkeypatch: pytest.MonkeyPatch, layer_and_x: Any) -> None:
    layer, x = layer_and_x
    monkeypatch.setitem(__import__("sys").modules, "multihead.explorer.widget", None)
    assert notebook.widget_of(Session([of_model(layer, x)[0]])) is None


CONTRACT = """
const { default: widget } = await import(process.argv[2]);
const element = () => ({ style: {}, remove() { this.removed = true; } });
globalThis.document = { body: { dataset: { vscodeThemeKind: "vscode-dark" }, classList: { contains: () => false } }, createElement: element };
globalThis.document.documentElement = { classList: { contains: () => false } };
const before = new Set(Object.getOwnPropertyNames(globalThis));
const made = [0, 1].map((n) => {
  const heard = new Map();
  const values = { state: `step=${n + 1}`, height: 500 + n };
  const sent = [];
  const model = { get: (name) => values[name], set: (name, value) => { values[name] = value; }, save_changes: () => sent.push("saved"),
    on: (name, f) => heard.set(name, f), off: (name, f) => heard.get(name) === f && heard.delete(name), send: (message) => sent.push(message) };
  const el = { replaceChildren(frame) { this.frame = frame; } };
  return { model, values, sent, heard, el, end: widget.render({ model, el }) };
});
const answers = made.map(({ el }) => el.frame.multihead.ask("api/models", "{}"));
made[1].heard.get("msg:custom")({ id: 1 }, [new DataView(Uint8Array.of(7, 8, 9).buffer, 1)]);
const second = await answers[1];
made[0].el.frame.multihead.changed("step=5", { head: 2 });
const waits = await Promise.race([answers[0].then(() => false), new Promise((done) => setTimeout(() => done(true), 20))]);
made.forEach(({ end }) => end());
console.log(JSON.stringify({
  keys: Object.keys(widget), states: made.map(({ el }) => el.frame.multihead.state), heights: made.map(({ el }) => el.frame.style.height),
  bytes: [...second.bytes], waits, sent: made.map(({ sent }) => sent), values: made.map(({ values }) => values), left: made.map(({ heard }) => heard.size),
  globals: Object.getOwnPropertyNames(globalThis).filter((name) => !before.has(name)) }));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no node: the widget's module is not run")
def test_the_module_keeps_to_what_every_notebook_gives_a_widget(widget: Any, tmp_path: Path) -> None:
    """JupyterLab, VS Code and marimo give a module `render({model, el})`; nothing else is asked of them, and two
    widgets in one notebook are two.
    """
    text = widget._esm
    around, _, _ = text.partition("\nconst PAGE = ")
    code = re.sub(r"/\*.*?\*/", "", around, flags=re.DOTALL)
    assert not re.search(r"^\s*import\b|\bimport\s*\(", code, re.MULTILINE)
    assert re.findall(r"^export\b.*", text, re.MULTILINE)[0].startswith("export default { render")
    (tmp_path / "widget.mjs").write_text(text)
    (tmp_path / "contract.mjs").write_text(CONTRACT)
    command = ["node", tmp_path / "contract.mjs", (tmp_path / "widget.mjs").as_uri()]
    said = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)
    assert said == {
        "keys": ["render"],
        "states": ["step=1&theme=dark", "step=2&theme=dark"],
        "heights": ["500px", "501px"],
        "bytes": [8, 9],
        "waits": True,  # what came for the second was not taken for an answer to the first
        "sent": [
            [{"id": 1, "path": "api/models", "body": "{}"}, "saved"],
            [{"id": 1, "path": "api/models", "body": "{}"}],
        ],
        "values": [{"state": "step=5", "height": 500, "selection": {"head": 2}}, {"state": "step=2", "height": 501}],
        "left": [0, 0],
        "globals": [],
    }

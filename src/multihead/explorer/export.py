"""The single file: the page, its modules and its answers in one piece of HTML that works from disk, without a network.

Answers lie in script elements that no browser runs (their type is not JavaScript): base64 of gzip of the wire format.
The policy in its head allows the one script and the one style by their hashes, and nothing from anywhere else.
"""

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import version
from importlib.resources import files
from typing import Any
from urllib.parse import urlencode

from multihead.explorer.bundle import bundle, import_order
from multihead.explorer.request import key, parse
from multihead.explorer.session import Session, Stop
from multihead.explorer.wire import Answer, shortened

MOST_NUMBERS = 2**22  # of all matrices in a file: about 16 MB of it
STYLE = '<link rel="stylesheet" href="style.css">'
SCRIPT = '<script type="module" src="main.js"></script>'
ICON = '<link rel="icon" href="icon.svg">'
START = re.compile(r'<script type="application/json" id="multihead-start">[^<]*</script>')


def single_file(session: Session, given: Any, stop: Stop | None = None) -> str:
    """The page with what it needs to show one input: the layers of the model, its heads and its prediction.

    Of a large model only the chosen layer is in it.

    Args:
        session: what can be explored.
        given: a request of the route `save`.
        stop: see `session`.
    """
    request = parse("save", given)
    subject = session.subject(request)
    subject.layer(request.layer)
    shown = {name: given[name] for name in ("model", "input")}
    changed = {name: given[name] for name in ("mask", "off", "with") if name in given}
    asked: list[tuple[str, dict[str, Any]]] = []
    numbers = range(len(subject.layers()))
    if sum(_matrix_size(sizes) for _, _, sizes in subject.layers()) > MOST_NUMBERS:
        numbers = range(request.layer, request.layer + 1)
    for number in numbers:
        one = {"layer": number}
        asked += [("trace", shown | one), *([("trace", shown | one | changed)] if changed else [])]
        if subject.gives_weights:
            asked.append(("weights", {"model": request.model} | one))
        if subject.decodes and len(session.answer("trace", shown | one, stop).meta["tokens"]) > 1:
            asked.append(("decode", shown | one))
        if session.pair is not None:
            asked.append(("compare", shown | one))
    for route in (
        "heads",
        *(["overview"] if session.pair is not None else []),
        *(["predict"] if subject.predicts else []),
    ):
        asked += [(route, shown), *([(route, shown | changed)] if changed and route != "overview" else [])]
    if given["input"]["kind"] == "text":
        asked.append(("tokens", {"model": request.model, "text": given["input"]["text"]}))
    answers = {"models {}": _models(session, request.model, given)}
    for route, question in asked:
        answers[key(route, question)] = _short(session.respond(route, question, stop))
    return page(answers, request.state or state_of(request.model, request.layer, given["input"]))


def _matrix_size(sizes: Mapping[str, int]) -> int:
    """How many numbers the four matrices of a layer hold."""
    E, H, G, D, V, C = (sizes[name] for name in "EHGDVC")
    return H * (E * D + V * E) + G * C * (D + V)


def state_of(model: str, layer: int, input: Mapping[str, Any]) -> str:
    """The part of the address after # that opens the page on this."""
    named = {name: input[name] for name in ("text", "name") if name in input}
    named = {"sample" if name == "name" else name: value for name, value in named.items()}
    return urlencode({"model": model, "layer": layer} | named)


def page(answers: Mapping[str, bytes], state: str, mode: str = "file") -> str:
    """The page with answers, each the bytes of the wire format by its key."""
    text, script, style = _parts()
    elements = [
        f'<script type="application/octet-stream" class="multihead-answer" data-key="{html.escape(name)}">'
        f"{base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()}</script>"
        for name, data in answers.items()
    ]
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    text = start_element(text, mode, state)
    text = text.replace(
        STYLE, f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    )
    text = text.replace(ICON, '<link rel="icon" href="data:,">')
    return text.replace(SCRIPT, "\n".join([*elements, f'<script type="module">{script}</script>']))


def served_page(text: str) -> str:
    """The page's HTML as the server gives it: its modules are preloaded together, not one after another's import."""
    ahead = "\n".join(f'<link rel="modulepreload" href="{path}">' for path in import_order(modules(), "main.js"))
    return start_element(text.replace(STYLE, f"{STYLE}\n{ahead}"), "server", "")


def start_element(text: str, mode: str, state: str) -> str:
    """The page's HTML with what it starts from: where answers come from, and what to show."""
    start = json.dumps({"mode": mode, "version": version("multihead"), "state": state}).replace("<", "\\u003c")
    return START.sub(lambda _: f'<script type="application/json" id="multihead-start">{start}</script>', text, count=1)


@lru_cache(maxsize=1)
def _parts() -> tuple[str, str, str]:
    """The HTML, the script and the style of the page."""
    folder = files("multihead.explorer") / "page"
    text, style = ((folder / name).read_text(encoding="utf-8") for name in ("index.html", "style.css"))
    for line in (STYLE, SCRIPT, ICON):
        if text.count(line) != 1:
            raise ValueError(f"index.html has {text.count(line)} of {line}: expected one")
    if len(START.findall(text)) != 1:
        raise ValueError("index.html has no element multihead-start: expected one")
    script = bundle(modules())
    for name, body, end in (("the script", script, "</script"), ("the style", style, "</style")):
        if end in body.lower() or (name == "the script" and "<!--" in body):
            raise ValueError(f"{name} of the page holds {end!r}, which would end it: expected it written otherwise")
    return text, script, style


def modules() -> dict[str, str]:
    """The page's modules by their path in its folder."""
    return {path: data.decode() for path, data in page_files(".js").items()}


def page_files(*suffixes: str) -> dict[str, bytes]:
    """The page's own files by their path in its folder."""
    found: dict[str, bytes] = {}

    def collect(folder: Any, before: str) -> None:
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
            if entry.is_dir():
                collect(entry, f"{before}{entry.name}/")
            elif entry.name.endswith(suffixes):
                found[before + entry.name] = entry.read_bytes()

    collect(files("multihead.explorer") / "page", "")
    return found


def _models(session: Session, model: str, given: Mapping[str, Any]) -> bytes:
    """The answer to `models` with the one that the file holds."""
    subject = session.subjects[model]
    said = subject.describe()
    label = next((e["label"] for e in said["examples"] if e["input"] == given["input"]), given["input"].get("text", ""))
    said["examples"] = [{"input": given["input"], "label": label or "what was given"}]
    first = {"model": model, "layer": given["layer"], "input": given["input"]}
    return Answer({"first": first, "models": [said], "pair": session.said_of_pair()}).to_bytes()


def _short(data: bytes) -> bytes:
    """An answer whose matrices are rounded to what a screen can show, and so take less room."""
    answer = Answer.from_bytes(data)
    if "w_q" not in answer.tensors:
        return data
    return Answer(answer.meta, {name: shortened(t) for name, t in answer.tensors.items()}).to_bytes()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

"""The documentation site: every public name has an entry with an example, and the pages need nothing from elsewhere."""

import html
import importlib
import inspect
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
ROOMS = ("multihead", "multihead.heads", "multihead.models", "multihead.hf", "multihead.distributed", "multihead.nn")


def entries() -> set[str]:
    """The names that the reference has an entry for."""
    return {name for page in REFERENCE.glob("*.md") for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)}


def public(room: str) -> list[str]:
    module = importlib.import_module(room)
    named = getattr(module, "__all__", None) or [
        name for name, of in vars(module).items() if getattr(of, "__module__", None) == room and name[0] != "_"
    ]
    return [f"{room}.{name}" for name in named if not inspect.ismodule(getattr(module, name))]


NAMES = [name for room in ROOMS for name in public(room)]


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_an_entry_with_an_example(name: str) -> None:
    assert name in entries(), f"write ::: {name} into a page of docs/reference"
    room, _, last = name.rpartition(".")
    thing = getattr(importlib.import_module(room), last)
    texts = [inspect.getdoc(thing) or ""]
    if inspect.isclass(thing):
        texts += [inspect.getdoc(of) or "" for of in vars(thing).values() if callable(of)]
    shown = any(">>>" in text or "```" in text for text in texts)
    assert shown, f"{name} has no example in its docstring"


def test_every_entry_is_there() -> None:
    for name in entries():
        room, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(room), last), name


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    for page in [*ROOT.glob("docs/*.md"), *REFERENCE.glob("*.md"), *ROOT.glob("examples/*.md")]:
        assert page.relative_to(ROOT).as_posix() in nav, page


def test_what_the_readme_ticks_off_links_to_tests_that_are_there() -> None:
    table = (ROOT / "README.md").read_text().split("## What is there, beside its peers")[1].split("\n\n")[2]
    for row in table.splitlines()[2:]:
        links = re.findall(r"\[[^]]+\]\((tests/\S+\.py) \"(test_\w+)\"\)", row.split(" | ")[1])
        assert links, row
        for file, test in links:
            assert re.search(rf"^ *def {test}\(", (ROOT / file).read_text(), re.M), (file, test)


# What pages show of the inside: nothing that is promised to stay.
INSIDE = {"multihead.masks.see", "multihead.explorer.session.Session", "multihead.explorer.subjects.of_package"}
IMPORTED = re.compile(r"from (multihead[\w.]*) import ([\w, ]+)")


def test_what_a_page_imports_has_an_entry() -> None:
    for page in [
        ROOT / "README.md",
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("examples/*.md"),
        *ROOT.glob("examples/*.ipynb"),
    ]:
        for room, names in IMPORTED.findall(page.read_text()):
            for name in names.split(", "):
                whole = f"{room}.{name.strip()}"
                there = whole in entries() | INSIDE or any(entry.startswith(f"{whole}.") for entry in entries())
                assert there, f"{page.name} imports {whole}: write ::: {whole} into a page of docs/reference"


class Links(HTMLParser):
    """What a page links to or loads, and what in it can be linked to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            if name in ("id", "name") and value:
                self.anchors.add(value)


def dead_links(site: Path) -> list[tuple[str, str]]:
    pages = {page: Links(page) for page in site.rglob("*.html") if page.name not in ("live.html", "404.html")}
    dead = []
    for page, found in pages.items():
        for link in found.links:
            to = urlsplit(link)
            target = (page.parent / unquote(to.path)).resolve() if to.path else page
            target = target / "index.html" if target.is_dir() else target
            anchors = pages[target].anchors if target in pages else {to.fragment}
            if not to.scheme and (not target.is_file() or (to.fragment and unquote(to.fragment) not in anchors)):
                dead.append((page.relative_to(site).as_posix(), link))
    return dead


def test_the_site_is_whole_and_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason='the site needs pip install ".[docs]"')
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?(https?:[^\">\s]+)", page.read_text())
        assert not loaded, (page.name, loaded)
    assert not dead_links(tmp_path)
    commands = (tmp_path / "docs" / "reference" / "command-line.html").read_text()
    assert "<code>TEXT|IMAGE</code>" in html.unescape(commands)
    assert (tmp_path / "docs" / "live.html").stat().st_size > 1e6

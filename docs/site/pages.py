"""Brings the pages of the repository into the site, where they stand, and whatever they link to.

A page that another links to is a page of the site too; any other file (a picture, a test, a script) is copied
beside it. So a link that leads nowhere in the repository leads nowhere on the site, and a strict build says so.
"""

import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
EXPLORER = "docs/live.html"  # the explorer in a file, which the page of the seven steps has inside
COMMANDS = "docs/reference/command-line.md"
LINK = re.compile(r"\]\(([^)\s#:]+)(?:#[^)\s]*)?(?: \"[^\"]*\")?\)|src=\"([^\":]+)\"")  # with a title, or without


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Every page of the navigation, and all that can be reached from them."""
    from mkdocs.structure.files import File

    wanted, seen = _pages(config.nav), set()
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        path = ROOT / name
        if not path.is_file():
            continue  # mkdocs says which page links to it
        files.append(File.generated(config, name, abs_src_path=str(path)))
        if path.suffix == ".md":
            wanted += _linked(name, path.read_text(encoding="utf-8"))
    return files


def on_page_markdown(markdown: str, page: "Page", **more: Any) -> str:
    """What every command takes, read off the commands themselves."""
    return markdown + _commands() if page.file.src_uri == COMMANDS else markdown


def on_post_build(config: "MkDocsConfig") -> None:
    """The single file on the sentence of the package, beside the page that shows it."""
    import multihead as mh

    mh.explore(mh.models.load("lm"), "I love pepperoni pizza", save=Path(config.site_dir) / EXPLORER)


def _pages(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in _pages(part)]


def _linked(name: str, text: str) -> list[str]:
    """The files of the repository that a page links to, by their paths from its root."""
    found = []
    for match in LINK.finditer(text):
        target = PurePosixPath(name).parent / unquote(match[1] or match[2])
        inside = (ROOT / target).resolve()
        if inside.is_relative_to(ROOT) and inside.is_file():
            found.append(inside.relative_to(ROOT).as_posix())
    return found


def _commands() -> str:
    import typer

    from multihead.cli import app

    text = ""
    for name, command in typer.main.get_group(app).commands.items():
        text += f"\n## multihead {name}\n\n{_plain(command.help or '')}\n\n"
        rows = [(_names(parameter), parameter.help, parameter.default) for parameter in command.params]
        if rows:
            text += "| | | unless given |\n|---|---|---|\n"
        for names, help, default in rows:
            shown = "" if default in (None, False, ...) else f"`{getattr(default, 'value', default)}`"
            text += f"| {names} | {_plain(help or '').replace('|', chr(92) + '|')} | {shown} |\n"
    return text


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = (parameter.metavar or parameter.name.upper()).replace("|", "&#124;")  # a cell of a table would end there
        return f"<code>{name}</code>"
    return " ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))


def _plain(help: str) -> str:
    """Help as Markdown: its line breaks are the terminal's, and options are code."""
    text = re.sub(r"\[default:[^]]*\]", "", help.replace("\f", "")).strip()
    return re.sub(r"(?<![\w`-])--[a-z][\w-]*", r"`\g<0>`", text)

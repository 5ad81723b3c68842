"""Shows the examples in docstrings as code: Markdown would take `>>>` for a quotation."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?m)^([ ]*)>>> (?:.*\n?)(?:^(?!\s*$).*\n?)*")  # up to the next empty line


class Examples(griffe.Extension):
    """Puts a fence around every example."""

    def on_object(self, *, obj: griffe.Object, **more: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(example: re.Match[str]) -> str:
    indent = example[1]
    return f"{indent}```pycon\n{example[0].rstrip()}\n{indent}```\n"

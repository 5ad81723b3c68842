"""The explorer in a notebook: the page in a frame of its own, which asks the session through the widget's messages.

It needs `pip install "multihead[widget]"`. One message holds a path and a body as the server's routes take them, and is
answered by one message with the bytes, or with a sentence. A kernel does one thing at a time, so a request that is
given up is computed all the same; what the page asks for is bounded.
"""

import json
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qs, urlsplit

import anywidget
import traitlets

from multihead.explorer.bundle import bundle, import_order
from multihead.explorer.export import modules, page, single_file
from multihead.explorer.request import Refused
from multihead.explorer.session import Session, Stopped
from multihead.explorer.still import still_of

ENTRY = "widget.js"


@lru_cache(maxsize=1)
def module() -> str:
    """The widget as one ES module: what makes the frame, and the page that goes into it."""
    found = modules()
    last = len(import_order(found, ENTRY)) - 1
    return (
        f"{bundle(found, ENTRY)}\nconst PAGE = {json.dumps(page({}, '', 'widget'))};\n"
        f"export default {{ render: (given) => module_{last}.render(given, PAGE) }};\n"
    )


class Explorer(anywidget.AnyWidget):
    """The explorer as a widget: the last line of a cell shows it.

    `selection` is what is chosen on the page: model, layer, head and step, and where something is locked its name,
    index, value, query and key. `state` is what an address would hold after its #; setting it moves the page.
    """

    _esm = traitlets.Unicode().tag(sync=True)
    selection = traitlets.Dict().tag(sync=True)
    state = traitlets.Unicode("").tag(sync=True)
    height = traitlets.Int(820).tag(sync=True)

    def __init__(self, session: Session, state: str = "", height: int = 820) -> None:
        super().__init__(_esm=module(), state=state, height=height)
        self.session = session
        self.on_msg(self._receive)

    def _receive(self, _: Any, content: Any, buffers: Any) -> None:
        try:
            data = self._answer(content["path"], content.get("body"), buffers)
        except Refused as error:
            self.send({"id": content["id"], "error": str(error), "kind": error.kind})
        except Stopped:
            pass
        except Exception as error:  # of a model of the user's own, perhaps: the page says it, and goes on
            self.send({"id": content["id"], "error": f"{type(error).__name__}: {error}"[:500], "kind": "bug"})
        else:
            self.send({"id": content["id"]}, buffers=[data])

    def _answer(self, path: str, body: str | None, buffers: Any) -> bytes:
        parts = urlsplit(path)
        route = parts.path.removeprefix("api/")
        if route == "picture":
            return self.session.picture(parse_qs(parts.query).get("model", [""])[0], bytes(buffers[0]))
        try:
            given = json.loads(body or "")
        except ValueError as error:
            raise Refused(f"the request is not JSON: {str(error)[:100]}") from error
        if route == "save":
            return single_file(self.session, given).encode()
        return self.session.respond(route, given)

    def _repr_html_(self) -> str:
        """A still picture, for where widgets cannot load."""
        return still_of(self.session)

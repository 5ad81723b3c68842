"""The explorer: the seven steps in a browser, on a model, a text, a picture or a layer of one's own.

`multihead explore` serves it, `mh.explore(layer_or_model, x)` opens it from Python, and `trace.html(path)` writes it
to one file. It reads traces and lenses, and nothing deeper.
"""

import os
from typing import TYPE_CHECKING, Any

from torch import nn

from multihead.explorer import notebook
from multihead.explorer.export import single_file, state_of
from multihead.explorer.session import Session
from multihead.explorer.subjects import of_model
from multihead.files import write_text
from multihead.layer.trace import Trace

if TYPE_CHECKING:
    from multihead.explorer.serve import Running
    from multihead.explorer.widget import Explorer

__all__ = ["explore"]


def explore(
    model: nn.Module,
    x: Any = None,
    *,
    save: str | os.PathLike | None = None,
    widget: bool | None = None,
    port: int | None = None,
    browser: bool = True,
    wait: bool | None = None,
    **options: Any,
) -> "Running | Explorer | None":
    """Open the explorer on a layer or a model.

    Args:
        model: a `MultiHeadAttention`, ours or torch's; any module that has some; a model of `mh.models`; or a Hugging
            Face model.
        x: what goes in. For a layer or a module of your own, its input. For a language model a text, or token numbers;
            for a vision transformer a picture.
        save: write the single file there instead of serving the page.
        widget: whether to make a widget for a notebook instead of serving the page; in a notebook, with anywidget
            installed and no `port` given, unless said otherwise.
        port: to listen at; the first free one from 8421 on unless given.
        browser: whether to open a browser.
        wait: whether to stay until Ctrl-C; in a script, and not at a prompt or in a notebook, unless given.
        options: `labels=`, a name for each item; `grid=(rows, columns)`, where the last items are patches of a
            picture; `tokenizer=` of a Hugging Face model; and what else the layer takes: `mask=`, `context=`, …

    Returns:
        the running server, whose `url` is the page's and which `close()` ends; in a notebook the widget, whose
        `selection` is what is chosen on the page; None with `save`.

    >>> layer, x = mh.MultiHeadAttention(32, heads=4), torch.randn(5, 32)
    >>> server = mh.explore(layer, x, mask=mh.Causal(), browser=False, wait=False)  # doctest: +SKIP
    """
    subject, first = of_model(model, x, **options)
    session = Session([subject])
    session.start_with(first)
    if save is not None:
        write_text(save, single_file(session, session.first))
        return None
    if widget or (widget is None and port is None and notebook.in_notebook()):
        shown = notebook.widget_of(session, state_of(**session.first))
        if shown is not None:
            return shown
        if widget:
            raise ImportError('widget=True needs `pip install "multihead[widget]"`')
    try:
        from multihead.explorer import serve
    except ImportError as error:
        raise ImportError(f'the explorer needs `pip install "multihead[explore]"`: {error}') from error
    session.prepare()
    running = serve.start(session, port=port, browser=browser)
    if wait if wait is not None else not serve.is_interactive():
        print(f"the explorer is at {running.url} (Ctrl-C ends it)")
        running.wait()
    return running


def write_trace(traced: Trace, path: str | os.PathLike) -> None:
    """What `Trace.html` does."""
    from multihead.explorer.given import Recorded

    session = Session([Recorded(traced)])
    write_text(path, single_file(session, session.first))

"""The explorer: the seven steps in a browser, on a model, a text, a picture or a layer of one's own.

`multihead explore` serves it, `mh.explore(layer_or_model, x)` opens it from Python, and `trace.html(path)` writes it
to one file. It reads traces and lenses, and nothing deeper.
"""

import os
from typing import TYPE_CHECKING, Any

from torch import nn

from multihead.doctor import diagnose
from multihead.doctor.exhibit import exhibit
from multihead.explorer import notebook
from multihead.explorer.compare import of_exhibit, of_subjects
from multihead.explorer.export import single_file, state_of
from multihead.explorer.given import Layer
from multihead.explorer.session import Session
from multihead.explorer.subjects import of_model
from multihead.files import write_text
from multihead.layer import MultiHeadAttention
from multihead.layer.trace import Trace

if TYPE_CHECKING:
    from multihead.explorer.serve import Running
    from multihead.explorer.widget import Explorer

__all__ = ["explore"]


def explore(
    model: Any,
    *more: Any,
    x: Any = None,
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
        more: a second layer or model, to be shown beside the first; or x. A second one that has no layer we know, any
            callable, is examined by the doctor: its verdict, and the first tensor that differs, stand beside it.
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
    session = _session(model, more, x, options)
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


def _session(model: Any, more: tuple[Any, ...], x: Any, options: dict[str, Any]) -> Session:
    """What is explored: one model, or two side by side."""
    models = [model, *(one for one in more if callable(one))]
    given = [one for one in more if not callable(one)]
    if len(models) > 2 or len(given) > 1 or (given and x is not None):
        raise TypeError(f"explore was given {len(more) + 1} things: expected a model, perhaps a second one, and x")
    x = given[0] if given else x
    if len(models) == 1:
        subject, first = of_model(model, x, **options)
        session = Session([subject])
        session.start_with(first)
        return session
    known = [isinstance(one, nn.Module) and any(isinstance(m, Layer) for m in one.modules()) for one in models]
    known = [k or hasattr(one, "config") for k, one in zip(known, models)]
    if all(known):
        left, first = of_model(models[0], x, **options)
        try:
            right, _ = of_model(models[1], x, **options)
        except (TypeError, ValueError, OSError) as error:
            name = type(models[1]).__name__
            raise ValueError(f"both are given the same x, and {name} does not take it: {error}") from error
        right.id = f"{right.id}-2"
        session = Session([left, right])
        session.start_with(first)
        session.pair = of_subjects(left, right)
        return session
    layers = [one for one, k in zip(models, known) if k]
    if len(layers) != 1 or not isinstance(layers[0], MultiHeadAttention):
        raise TypeError("neither has a layer that is known here: expected a MultiHeadAttention to compare with")
    other = next(one for one, k in zip(models, known) if not k)
    mask, context = options.get("mask"), options.get("context")
    report = diagnose(other, layers[0], x, context, mask, progress=False)
    session = Session([of_model(layers[0], x, **options)[0]])
    name = getattr(other, "__name__", type(other).__name__)
    session.pair = of_exhibit(exhibit(other, layers[0], x, context, mask), report, name)
    return session


def write_trace(traced: Trace, path: str | os.PathLike) -> None:
    """What `Trace.html` does."""
    from multihead.explorer.given import Recorded

    session = Session([Recorded(traced)])
    write_text(path, single_file(session, session.first))

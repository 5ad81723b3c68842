"""A trace or a lens as the last line of a cell: the widget, and a still picture for where widgets cannot load."""

import sys
from typing import Any

from multihead.explorer.given import Looked, Recorded
from multihead.explorer.session import Session
from multihead.explorer.still import still
from multihead.layer.trace import Trace
from multihead.lens import Lens

WIDGET = "application/vnd.jupyter.widget-view+json"


def in_notebook() -> bool:
    """Whether what a cell ends with is shown by a notebook: of Jupyter, VS Code or marimo."""
    marimo = sys.modules.get("marimo")
    if marimo is not None and marimo.running_in_notebook():
        return True
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def widget_of(session: Session, state: str = "") -> Any:
    """The widget, or None where anywidget is not installed."""
    try:
        from multihead.explorer.widget import Explorer
    except ImportError:
        return None
    return Explorer(session, state)


def session_of(shown: Trace | Lens) -> Session | None:
    """What a trace or a lens becomes on the page; None where it is too large for it."""
    try:
        return Session([Recorded(shown) if isinstance(shown, Trace) else Looked(shown)])
    except ValueError:
        return None


def mimebundle(shown: Trace | Lens) -> dict[str, Any]:
    """All ways to show it; a notebook takes the best it can."""
    found: dict[str, Any] = {"text/plain": repr(shown), "text/html": still(shown)}
    session = session_of(shown) if in_notebook() else None
    widget = None if session is None else widget_of(session)
    if widget is not None:
        made = widget._repr_mimebundle_()
        data = made[0] if isinstance(made, tuple) else made
        found |= {name: value for name, value in (data or {}).items() if name == WIDGET}
    return found


def display(shown: Trace | Lens) -> Any:
    """What marimo shows instead of a trace or a lens: the widget, or a still picture."""
    import marimo

    session = session_of(shown)
    widget = None if session is None else widget_of(session)
    return marimo.Html(still(shown)) if widget is None else widget

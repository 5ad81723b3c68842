"""A trace or a lens as the last line of a cell: the widget, and a still picture for where widgets cannot load."""

import base64
import html
import io
import sys
from typing import Any

import torch

from multihead.explorer.given import Looked, Recorded, first_row, lens_of
from multihead.explorer.session import Session
from multihead.layer.trace import STEPS, Trace
from multihead.lens import Lens

WIDGET = "application/vnd.jupyter.widget-view+json"
MOST_HEADS = 16  # on a still picture
BINS = 64
SIDE = 112  # pixels


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


def still(shown: Trace | Lens) -> str:
    """The weights of each head as a picture, with shapes: HTML that needs no script."""
    lens = shown if isinstance(shown, Lens) else lens_of(first_row(shown))
    _, H, Q, K = lens.shape
    rows = []
    if isinstance(shown, Trace):
        rows = [
            f"<tr><td>{step.number} {html.escape(step.title)}</td><td><code>"
            + ", ".join(f"{name} {tuple(shown[name].shape)}" for name in step.names if name in shown)
            + "</code></td></tr>"
            for step in STEPS
        ]
    if not (Q and K):
        return f"<table>{''.join(rows)}</table>"
    with torch.no_grad():
        maps = lens.map(min(BINS, Q), min(BINS, K), pool="max", heads=range(min(H, MOST_HEADS)))[0].float().cpu()
    pictures = "".join(
        f'<figure style="display:inline-block"><img alt="weights of head {h}" width="{SIDE}" height="{SIDE}" '
        f'style="image-rendering:pixelated" src="data:image/png;base64,{_png(one)}">'
        f"<figcaption>head {h}</figcaption></figure>"
        for h, one in enumerate(maps)
    )
    more = f"<p>and {H - MOST_HEADS} more heads</p>" if H > MOST_HEADS else ""
    hint = 'pip install "multihead[widget]" shows this as the explorer'
    return f"<div><table>{''.join(rows)}</table>{pictures}{more}<p><small>{html.escape(hint)}</small></p></div>"


def _png(weights: torch.Tensor) -> str:
    """Dark where there is much, up to the largest of the head."""
    from PIL import Image

    shade = 255 * (1 - (weights / weights.max().clamp(min=1e-30)).nan_to_num().sqrt())
    png = io.BytesIO()
    Image.fromarray(shade.round().to(torch.uint8).numpy()).save(png, "PNG")
    return base64.b64encode(png.getvalue()).decode()

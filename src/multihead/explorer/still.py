"""A still picture of the heads' weights, for where the widget cannot load: HTML that needs no script."""

import base64
import html
import io

import torch

from multihead.explorer.given import first_row, lens_of
from multihead.explorer.request import Refused
from multihead.explorer.session import Session
from multihead.layer.trace import STEPS, Trace
from multihead.lens import Lens

MOST_HEADS = 16  # on a still picture
BINS = 64
SIDE = 112  # pixels


def still(shown: Trace | Lens) -> str:
    """Of a trace or a lens, with shapes."""
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
    return _told(
        f"<table>{''.join(rows)}</table>", maps, H, 'pip install "multihead[widget]" shows this as the explorer'
    )


def still_of(session: Session) -> str:
    """The same of what a session opens with."""
    first = session.first
    name = f"{session.subjects[first['model']].name}, layer {first['layer']}"
    hint = "The explorer is a widget: run this cell where widgets load, or write a page with explore(…, save=…)"
    try:
        maps = session.answer("thumbnails", first).tensors["maps"].float()
    except Refused as error:
        return f"<p>{html.escape(f'{name}: {error}')}</p><p><small>{html.escape(hint)}</small></p>"
    return _told(f"<p>{html.escape(name)}</p>", maps[:MOST_HEADS], len(maps), hint)


def _told(before: str, maps: torch.Tensor, heads: int, hint: str) -> str:
    """Pictures of heads, (H,height,width), with what stands above and below them."""
    pictures = "".join(
        f'<figure style="display:inline-block"><img alt="weights of head {h}" width="{SIDE}" height="{SIDE}" '
        f'style="image-rendering:pixelated" src="data:image/png;base64,{_png(one)}">'
        f"<figcaption>head {h}</figcaption></figure>"
        for h, one in enumerate(maps)
    )
    more = f"<p>and {heads - len(maps)} more heads</p>" if heads > len(maps) else ""
    return f"<div>{before}{pictures}{more}<p><small>{html.escape(hint)}</small></p></div>"


def _png(weights: torch.Tensor) -> str:
    """Dark where there is much, up to the largest of the head."""
    from PIL import Image

    shade = 255 * (1 - (weights / weights.max().clamp(min=1e-30)).nan_to_num().sqrt())
    png = io.BytesIO()
    Image.fromarray(shade.round().to(torch.uint8).numpy()).save(png, "PNG")
    return base64.b64encode(png.getvalue()).decode()

"""A lens as text, for a terminal."""

from typing import TYPE_CHECKING

import torch
from rich.columns import Columns
from rich.console import Group
from rich.text import Text

from multihead.draw import PERCENT_UP_TO, SHADES, as_text, heat_map
from multihead.lens.selections import Selection, check_row, choose
from multihead.sizes import require_int

if TYPE_CHECKING:
    from multihead.lens import Lens


def draw_lens(lens: "Lens", height: int, width: int, pool: str, heads: Selection, batch: int) -> str:
    """The weights of each head, pooled to height × width; shades go from nothing to the largest of the head."""
    B, H, Q, K = lens.shape
    height, width = min(require_int("height", height, 1), Q), min(require_int("width", width, 1), K)
    check_row(batch, B)
    if not height or not width:
        return f"no weights: Q={Q}, K={K}"
    chosen = choose("heads", heads, H)
    with torch.no_grad():
        maps = lens.map(height, width, pool=pool, heads=chosen)[batch].float().cpu()  # (h, height, width)
    numbers = torch.arange(H)[chosen].tolist()
    rows = [str(n * Q // height) for n in range(height)]  # the first query of each bin
    percent = K <= PERCENT_UP_TO and (height, width) == (Q, K)
    if percent:
        pictures = [heat_map(f"head {h}", rows, (), w, w == 0, True, max(Q, K)) for h, w in zip(numbers, maps)]
        title = "weights, in percent; query down, key across"
    else:
        tops = [float(w.nan_to_num().max()) for w in maps]
        titles = [f"head {h}, {SHADES[-1]} = {top:.2g}" for h, top in zip(numbers, tops)]
        pictures = [
            heat_map(title, rows, (), w / (top or 1.0), w == 0, False, max(height, width))
            for title, w, top in zip(titles, maps, tops)
        ]
        bins = f", {pool} of each bin: {Q} queries and {K} keys as {height} × {width}"
        title = f"weights{'' if (height, width) == (Q, K) else bins}; query down, key across"
    return as_text(Group(Text(title), Columns(pictures, padding=(0, 3))))

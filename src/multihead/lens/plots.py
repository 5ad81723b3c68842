"""Pictures of a lens with matplotlib, which is imported when one is asked for: `pip install "multihead[plot]"`.

A `Figure` is given back that no window or global state knows of: save it with `.savefig("weights.png")`, or let a
notebook show it.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multihead.lens.selections import Chosen, Selection, check_row, choose, count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from multihead.lens import Lens

WHAT = ("map", "weights", "entropy")
MOST_BINS = 256  # of a map, along a side: more than a screen shows of one head among others
PER_ROW = 4  # heads

Extent = tuple[float, float, float, float]  # left, right, bottom, top


def plot(
    lens: "Lens",
    what: str,
    *,
    heads: Selection = None,
    queries: Selection = None,
    keys: Selection = None,
    batch: int = 0,
    **pooling: Any,
) -> "Figure":
    """The figure that `lens.plot` gives."""
    if what not in WHAT:
        raise ValueError(f"what={what!r}: expected one of {', '.join(WHAT)}")
    if what != "map" and pooling:
        raise TypeError(f"{', '.join(sorted(pooling))}: only for a map, and this is of {what}")
    B, H, Q, K = lens.shape
    check_row(batch, B)
    chosen, rows, columns = choose("heads", heads, H), choose("queries", queries, Q), choose("keys", keys, K)
    with torch.no_grad():
        if what == "entropy":
            return _curves(_numbers(chosen, H), _numbers(rows, Q), lens.entropy()[batch].cpu()[chosen][:, rows])
        sides = (count(rows), count(columns))
        if what == "map":
            height, width = (pooling.pop(name, min(MOST_BINS, n)) for name, n in zip(("height", "width"), sides))
        else:
            height, width = sides
        pictures = lens.map(height, width, queries=rows, keys=columns, heads=chosen, **pooling)[batch].cpu()
    return _pictures(_numbers(chosen, H), pictures, _extent(rows, columns), (height, width) != sides)


def _numbers(chosen: Chosen, n: int) -> list[int]:
    return torch.arange(n)[chosen].tolist()


def _extent(rows: Chosen, columns: Chosen) -> Extent | None:
    """In numbers of keys and queries; None where they are not in a row."""
    if not isinstance(rows, slice) or not isinstance(columns, slice):
        return None
    return columns.start - 0.5, columns.stop - 0.5, rows.stop - 0.5, rows.start - 0.5


def _figure(width: float, height: float) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('lens.plot() needs matplotlib: pip install "multihead[plot]"') from error
    return Figure(figsize=(width, height), layout="constrained")


def _pictures(heads: list[int], pictures: Tensor, extent: Extent | None, pooled: bool) -> "Figure":
    columns = min(PER_ROW, max(1, len(heads)))
    rows = max(1, -(-len(heads) // columns))
    figure = _figure(0.6 + 2.6 * columns, 0.4 + 2.6 * rows)
    from matplotlib.colors import PowerNorm

    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for axis, head, picture in zip(axes, heads, pictures):
        norm = PowerNorm(0.5, vmin=0.0, vmax=float(picture.nan_to_num().max()) or 1.0)  # the root brings out small ones
        shown: dict[str, Any] = {"cmap": "inferno", "aspect": "auto", "interpolation": "nearest", "extent": extent}
        image = axis.imshow(picture.tolist(), norm=norm, **shown)
        axis.set_title(f"head {head}", fontsize=9)
        figure.colorbar(image, ax=axis, fraction=0.05).ax.tick_params(labelsize=6)
        axis.tick_params(labelsize=7)
    for axis in axes[len(heads) :]:
        axis.set_axis_off()
    unit = "" if extent is not None else ", in the order selected"
    figure.supxlabel(f"key{unit}", fontsize=9)
    figure.supylabel(f"query{unit}", fontsize=9)
    figure.suptitle("attention weights, pooled" if pooled else "attention weights", fontsize=10)
    return figure


def _curves(heads: list[int], queries: list[int], entropy: Tensor) -> "Figure":
    figure = _figure(7.0, 3.5)
    axis = figure.subplots()
    for head, curve in zip(heads, entropy.tolist()):
        axis.plot(queries, curve, linewidth=0.8, label=f"head {head}")
    axis.set_xlabel("query")
    axis.set_ylabel("entropy of its weights, nats")
    axis.set_ylim(bottom=0)
    if heads:
        axis.legend(fontsize=7, ncols=2)
    return figure

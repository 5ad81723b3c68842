"""A part of what a mask lowers to: some queries, some keys, some heads, each a range of the whole."""

from dataclasses import replace

import torch
from torch import Tensor

from multihead.masks import Allowed, Joined, Mask
from multihead.masks.intervals import Bound, Ramp, Visible

Range = tuple[int, int]  # first, and one past the last


def cut(visible: Visible, queries: Range, keys: Range, heads: Range | None = None) -> Visible:
    """What the queries of a range see of the keys of a range, both counted from the range's first.

    >>> from multihead.masks.intervals import Frame
    >>> whole = mh.Causal().lower(Frame.of(6, 6))
    >>> cut(whole, (4, 6), (3, 6)).allowed().int()
    tensor([[1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    Q, K = queries[1] - queries[0], keys[1] - keys[0]

    def bound(b: Bound) -> Bound:
        if isinstance(b, Ramp):
            low, high = (min(max(n - keys[0], 0), K) for n in (b.low, b.high))
            return Ramp(b.offset + queries[0] - keys[0], low, high)
        b = narrow(b, -1, queries)
        return (narrow(b, -2, heads) - keys[0]).clamp(0, K)

    return Visible(Q, K, bound(visible.start), bound(visible.stop), cut_scores(visible.dense, queries, keys, heads))


def narrow(t: Tensor, axis: int, part: Range | None) -> Tensor:
    """A range of an axis, where the tensor has it and does not broadcast along it."""
    if part is None or t.dim() < -axis or t.shape[axis] == 1:
        return t
    return t.narrow(axis, part[0], part[1] - part[0])


def cut_scores(
    t: Tensor | None, queries: Range | None, keys: Range | None, heads: Range | None = None
) -> Tensor | None:
    """The same part of a tensor that broadcasts to (B, H, Q, K)."""
    return None if t is None else narrow(narrow(narrow(t, -1, keys), -2, queries), -3, heads)


def cut_heads(mask: Mask | None, heads: Range, H: int) -> Mask | None:
    """A mask for some of the heads."""
    if isinstance(mask, Joined):
        parts = tuple(part for part in (cut_heads(p, heads, H) for p in mask.parts) if part is not None)
        return mask if all(new is old for new, old in zip(parts, mask.parts)) else Joined(parts)
    if isinstance(mask, Allowed) and mask.tensor.dim() >= 3 and mask.tensor.shape[-3] == H > 1:
        return replace(mask, tensor=mask.tensor.narrow(-3, heads[0], heads[1] - heads[0]))
    return mask


def reach(visible: Visible, queries: Range) -> Range:
    """The keys that some query of a range sees lie in this range; (0, 0) where there are none."""
    first, last = queries
    if first >= last:
        return 0, 0
    start, stop = visible.start, visible.stop
    if isinstance(start, Ramp) and isinstance(stop, Ramp):  # both only ever rise
        low, high = start.at(first), stop.at(last - 1)
        return (low, high) if low < high else (0, 0)
    starts, stops = _bounds(visible, queries)
    seen = starts < stops
    if not bool(seen.any()):
        return 0, 0
    return int(starts[seen].min()), int(stops[seen].max())


def _bounds(visible: Visible, queries: Range) -> tuple[Tensor, ...]:
    """Start and stop for a range of the queries, as tensors of one shape."""
    count = queries[1] - queries[0]
    bounds = [
        replace(b, offset=b.offset + queries[0]).tensor(count, None) if isinstance(b, Ramp) else narrow(b, -1, queries)
        for b in (visible.start, visible.stop)
    ]
    return torch.broadcast_tensors(*bounds)


def work(visible: Visible, queries: Range) -> float:
    """How many (query, key) pairs a range of queries has to score, for one head and the mean row of the batch."""
    if queries[0] >= queries[1]:
        return 0.0
    starts, stops = _bounds(visible, queries)
    pairs = (stops - starts).clamp(min=0)
    rows = pairs.numel() // pairs.shape[-1]
    total = float(pairs.sum()) / rows
    return total * (queries[1] - queries[0]) if pairs.shape[-1] == 1 else total

"""Which heads a rank has: whole groups, or some of the query heads of one group."""

from multihead.distributed.blocks import Range
from multihead.distributed.schedule import slices


def even(count: int, parts: int) -> list[int]:
    """`count` things in `parts` runs, as `torch.tensor_split` cuts them."""
    return [count // parts + (n < count % parts) for n in range(parts)]


def split_heads(H: int, G: int, ranks: int) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    """For each rank its query heads, and the key/value heads these read.

    With fewer key/value heads than ranks, several ranks have the same one, and share its query heads.

    >>> split_heads(6, 3, 2)
    (((0, 4), (4, 6)), ((0, 2), (2, 3)))
    >>> split_heads(4, 2, 3)
    (((0, 1), (1, 2), (2, 4)), ((0, 1), (0, 1), (1, 2)))
    """
    if ranks > H:
        raise ValueError(f"H={H} heads cannot be split over {ranks} ranks: expected at most one rank for each head")
    group = H // G
    if ranks <= G:
        kv = slices(even(G, ranks))
        return tuple((first * group, last * group) for first, last in kv), kv
    queries: list[Range] = []
    keys: list[Range] = []
    for g, sharers in enumerate(even(ranks, G)):
        for first, last in slices(even(group, sharers)):
            queries.append((g * group + first, g * group + last))
            keys.append((g, g + 1))
    return tuple(queries), tuple(keys)

"""The log-sum-exp of a part of a call, kept block by block: who looks at one part after another pays for each once."""

import torch
from torch import Tensor

from multihead.lens import statistics
from multihead.lens.region import Region

BLOCK = 256  # queries of one head that are computed together: enough to keep every thread at work


class Blocks:
    """What is known of the log-sum-exp of each query, (B,H,Q), and which blocks of it."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._lse: Tensor | None = None
        _, H, Q, _ = region.shape
        self._known = torch.zeros(H, -(-Q // BLOCK), dtype=torch.bool)

    @property
    def nbytes(self) -> int:
        return 0 if self._lse is None else self._lse.nbytes

    def lse(self, heads: slice, queries: slice) -> Tensor:
        """Of these heads and queries, at least one of each: (B,h,q)."""
        Q = self._region.shape[2]
        blocks = slice(queries.start // BLOCK, (queries.stop - 1) // BLOCK + 1)
        missing = (~self._known[heads, blocks]).any(0).nonzero().flatten() + blocks.start
        for run in _runs(missing.tolist()):
            part = slice(run.start * BLOCK, min(run.stop * BLOCK, Q))
            found = statistics.scan(self._region.select(heads, part), entropy_and_peak=False).lse
            if self._lse is None:
                self._lse = found.new_empty(self._region.shape[:3])
            self._lse[:, heads, part] = found
            self._known[heads, run] = True
        assert self._lse is not None
        return self._lse[:, heads, queries]


def _runs(numbers: list[int]) -> list[slice]:
    """Ascending numbers as runs of neighbours.

    >>> _runs([1, 2, 5])
    [slice(1, 3, None), slice(5, 6, None)]
    """
    runs: list[slice] = []
    for number in numbers:
        if runs and runs[-1].stop == number:
            runs[-1] = slice(runs[-1].start, number + 1)
        else:
            runs.append(slice(number, number + 1))
    return runs

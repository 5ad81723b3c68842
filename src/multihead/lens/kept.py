"""The state of a part of a call, kept block by block: who looks at one part after another pays for each once."""

from types import ModuleType

import torch
from torch import Tensor

from multihead.lens import statistics
from multihead.lens.region import Region

BLOCK = 256  # queries of one head that are computed together: enough to keep every thread at work


class Blocks:
    """What is known of the state of each query, and of which blocks; `by`: who computes it."""

    def __init__(self, region: Region, by: ModuleType) -> None:
        self._region = region
        self._by = by
        self._numbers: Tensor | None = None  # (B,H,Q,2)
        _, H, Q, _ = region.shape
        self._known = torch.zeros(H, -(-Q // BLOCK), dtype=torch.bool)

    @property
    def nbytes(self) -> int:
        return 0 if self._numbers is None else self._numbers.nbytes

    def state(self, heads: slice, queries: slice) -> statistics.State:
        """Of these heads and queries, at least one of each."""
        Q = self._region.shape[2]
        blocks = slice(queries.start // BLOCK, (queries.stop - 1) // BLOCK + 1)
        missing = (~self._known[heads, blocks]).any(0).nonzero().flatten() + blocks.start
        for run in _runs(missing.tolist()):
            part = slice(run.start * BLOCK, min(run.stop * BLOCK, Q))
            found = statistics.scan(self._region.select(heads, part), self._by, entropy_and_peak=False).state
            if self._numbers is None:
                self._numbers = found.new_empty(*self._region.shape[:3], 2)
            self._numbers[:, heads, part] = found
            self._known[heads, run] = True
        assert self._numbers is not None
        return statistics.State(self._by, self._numbers[:, heads, queries])


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

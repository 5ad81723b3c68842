"""A lens that is looked at part by part: the state of a query is computed once for each block, and the numbers stay exact."""

import pytest
import torch

import multihead as mh
from multihead.lens import kept, statistics

N = 1100  # four blocks of 256 and a part


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many heads and queries each pass that looks for a state takes."""
    seen: list[tuple[int, int]] = []
    true = statistics.scan

    def counted(region, by, state=None, entropy_and_peak=True):  # type: ignore[no-untyped-def]
        seen.append((region.shape[1], region.shape[2]))
        return true(region, by, state, entropy_and_peak)

    monkeypatch.setattr(kept.statistics, "scan", counted)
    return seen


def qk(heads: int = 3, kv_heads: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, heads, N, 16), torch.randn(2, kv_heads, N, 16)


def exact_weights(q: torch.Tensor, k: torch.Tensor, window: int) -> torch.Tensor:
    scores = q.double() @ k.double().expand(-1, q.shape[1], -1, -1).mT / q.shape[-1] ** 0.5
    far = torch.arange(N)[:, None] - torch.arange(N)
    return scores.masked_fill((far < 0) | (far >= window), -torch.inf).softmax(-1)


def test_each_block_is_computed_once(scans: list[tuple[int, int]]) -> None:
    q, k = qk()
    lens = mh.look(q, k, mask=mh.Causal())
    lens.map(8, 8, queries=range(512), heads=1)
    assert scans == [(1, 512)]
    lens.map(8, 8, queries=range(256, 512), keys=range(100), heads=1)
    assert len(scans) == 1
    lens.map(8, 8, queries=range(300, 900), heads=1)  # blocks 1, 2 and 3: the first of them is known
    assert scans[1:] == [(1, 512)]
    lens.map(8, 8, queries=range(1024), heads=slice(0, 2))  # head 0 knows nothing
    assert scans[2:] == [(2, 1024)]
    lens.rows(5, heads=0)  # a single row is no block
    assert scans[3:] == [(1, 1)]


@pytest.mark.parametrize("heads", [0, 2, slice(0, 2), slice(0, 3)])
def test_parts_are_parts_of_the_whole(heads: int | slice) -> None:
    q, k = qk()
    exact = exact_weights(q, k, 300)
    parted = mh.look(q, k, mask=mh.Causal(window=300))
    chosen = exact[:, heads if isinstance(heads, slice) else slice(heads, heads + 1)]
    for first in (0, 256, 700):
        found = parted.map(400, 1, queries=range(first, first + 400), keys=range(650, 651), heads=heads)
        torch.testing.assert_close(found.double(), chosen[:, :, first : first + 400, 650:651], rtol=1e-5, atol=1e-7)


def test_top_of_some_queries_and_heads_is_that_of_all() -> None:
    q, k = qk()
    lens = mh.look(q, k, mask=mh.Causal(), sinks=torch.tensor([0.5, -torch.inf, 3.0]))
    weights, keys = lens.top(7)
    some, at = lens.top(7, queries=[3, 1099, 500], heads=[2, 0])
    torch.testing.assert_close(some, weights[:, [2, 0]][:, :, [3, 1099, 500]], rtol=1e-5, atol=1e-8)
    assert torch.equal(at, keys[:, [2, 0]][:, :, [3, 1099, 500]])
    assert at[0, 0, 0].tolist()[4:] == [-1, -1, -1]  # query 3 sees four keys
    assert lens.top(2, queries=-1, heads=1)[0].shape == (2, 1, 1, 2)
    with pytest.raises(IndexError, match="queries=1100"):
        lens.top(1, queries=N)


def test_nbytes_is_what_is_kept() -> None:
    q, k = qk()
    lens = mh.look(q, k)
    assert lens.nbytes == q.nbytes + k.nbytes
    lens.map(4, 4, queries=range(256), heads=0)
    blocks = lens.nbytes - q.nbytes - k.nbytes
    assert 0 < blocks <= 2 * 3 * N * 2 * 8  # two numbers for each query, float64 at the widest
    lens.entropy()
    assert lens.nbytes > q.nbytes + k.nbytes + blocks

"""Selections of heads, queries and keys: what they mean, and what is refused in words."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import multihead as mh
from multihead.lens.selections import choose, count, take

N = 7
GOOD = [
    (None, [0, 1, 2, 3, 4, 5, 6], "all"),
    (2, [2], "an int keeps its axis"),
    (-1, [6], "from the end"),
    (np.int64(3), [3], "an int of NumPy's"),
    (torch.tensor(4), [4], "a tensor that is one number"),
    (slice(2, 5), [2, 3, 4], "a slice"),
    (slice(-2, 99), [5, 6], "a slice is cut to what there is"),
    (slice(5, 2), [], "a slice of nothing"),
    (slice(None, None, -2), [6, 4, 2, 0], "a negative step"),
    (range(1, 6, 2), [1, 3, 5], "a range"),
    (range(-2, 0), [5, 6], "a range from the end"),
    (range(-1, 2), [6, 0, 1], "a range across the end"),
    (range(3, 3), [], "a range of nothing"),
    ([3, -1, 3], [3, 6, 3], "a list, in its order, with what is in it twice"),
    ((0, 2), [0, 2], "a tuple"),
    ([], [], "a list of nothing"),
    (torch.tensor([5, 0], dtype=torch.int32), [5, 0], "a tensor"),
    (torch.tensor([], dtype=torch.long), [], "a tensor of nothing"),
]
BAD: list[tuple[Any, type[Exception], str]] = [
    (7, IndexError, "keys=7: expected -7…6, there are 7"),
    (-8, IndexError, "keys=-8: expected -7…6"),
    (range(5, 9), IndexError, r"keys=range\(5, 9\): expected -7…6"),
    ([1, 7], IndexError, "keys has 7 in it: expected -7…6"),
    (torch.tensor([0, -8]), IndexError, "keys has -8 in it"),
    (1.0, TypeError, "keys is a float: expected an int, a slice"),
    ("1", TypeError, "keys is a str"),
    (True, TypeError, "keys is a bool"),
    ([1, True], TypeError, "keys has True in it: expected integers"),
    ([0.5], TypeError, "keys has 0.5 in it"),
    (torch.ones(N), TypeError, "keys has dtype torch.float32: expected integers"),
    (
        torch.ones(N, dtype=torch.bool),
        TypeError,
        r"bool: expected integers; of a bool tensor take .nonzero\(\).flatten\(\)",
    ),
    (torch.zeros(2, 2, dtype=torch.long), ValueError, r"keys is \(2, 2\) int64 on cpu: expected one axis"),
    (slice(0, 5, 0), ValueError, "expected a step other than 0"),
    (slice(0.5, 2), TypeError, "expected integers in the slice"),
    ({1, 2}, TypeError, "keys is a set"),
]


@pytest.mark.parametrize(("given_", "wanted"), [(g, w) for g, w, _ in GOOD], ids=[why for _, _, why in GOOD])
def test_what_is_selected(given_: Any, wanted: list[int]) -> None:
    chosen = choose("keys", given_, N)
    assert take(torch.arange(N), 0, chosen).tolist() == wanted
    assert count(chosen) == len(wanted)


@pytest.mark.parametrize(("given_", "error", "message"), BAD, ids=[m for _, _, m in BAD])
def test_what_is_refused(given_: Any, error: type[Exception], message: str) -> None:
    lens = mh.look(torch.ones(1, 2, 3, 4), torch.ones(1, 2, N, 4))
    for ask in (lens.columns, lens.mass, lambda keys: lens.map(2, 2, keys=keys)):
        with pytest.raises(error, match=message):
            ask(given_)


def test_nothing_can_be_selected_and_gives_nothing() -> None:
    lens = mh.look(torch.ones(2, 3, 5, 4), torch.ones(2, 3, N, 4))
    assert lens.rows([]).shape == (2, 3, 0, N)
    assert lens.rows(0, heads=[]).shape == (2, 0, 1, N)
    assert lens.columns(slice(3, 3)).shape == (2, 3, 5, 0)
    assert torch.equal(lens.mass([]), torch.zeros(2, 3, 5))
    for empty in ({"queries": []}, {"keys": slice(0, 0)}):
        with pytest.raises(ValueError, match=f"there are no {next(iter(empty))} to map"):
            lens.map(2, 2, **empty)
    with pytest.raises(IndexError, match="keys=0: there are none"):
        mh.look(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 0, 4)).columns(0)


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda lens: lens.map(0, 2), ValueError, "height=0: expected at least 1"),
        (lambda lens: lens.map(2, 2.5), TypeError, "width=2.5 is a float"),
        (lambda lens: lens.map(2, 2, pool="sum"), ValueError, "pool='sum': expected 'mean' or 'max'"),
        (lambda lens: lens.top(0), ValueError, "n=0: expected at least 1"),
        (lambda lens: lens.top("2"), TypeError, "n='2' is a str"),
        (lambda lens: lens.rows(5), IndexError, "queries=5: expected -5…4"),
        (lambda lens: lens.rows(0, heads=3), IndexError, "heads=3: expected -3…2"),
        (lambda lens: lens.plot("weigths"), ValueError, "what='weigths': expected one of map, weights, entropy"),
        (lambda lens: lens.plot(batch=2), ValueError, "batch=2: expected 0…1"),
        (lambda lens: lens.draw(batch=2), ValueError, "batch=2: expected 0…1"),
    ],
)
def test_other_bad_arguments_are_named(ask: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ask(mh.look(torch.ones(2, 3, 5, 4), torch.ones(2, 3, N, 4)))


@pytest.mark.parametrize(
    ("lse", "error", "message"),
    [
        (torch.ones(2, 3, 6), ValueError, r"lse is \(2, 3, 6\) float32 on cpu: expected \(B,H,Q\)=\(2, 3, 5\)"),
        (torch.ones(2, 3, 5).long(), TypeError, "lse is .*int64.*: expected a floating tensor"),
        (1.0, TypeError, "lse is float"),
    ],
)
def test_a_bad_lse_is_named(lse: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mh.look(torch.ones(2, 3, 5, 4), torch.ones(2, 3, N, 4), lse=lse)


def selections(n: int) -> st.SearchStrategy:
    numbers = st.integers(-n, n - 1)
    bounds = st.none() | st.integers(-2 * n, 2 * n)
    return st.one_of(
        numbers,
        st.lists(numbers, max_size=5),
        st.lists(numbers, max_size=5).map(lambda given: torch.tensor(given, dtype=torch.long)),
        st.builds(slice, bounds, bounds, st.none() | st.sampled_from([-3, -1, 1, 2])),
    )


def index(given_: Any, n: int) -> list[int]:
    """What NumPy makes of a selection."""
    if isinstance(given_, torch.Tensor):
        given_ = given_.numpy()
    return np.atleast_1d(np.arange(n)[given_ if not isinstance(given_, list) else np.array(given_, dtype=int)]).tolist()


@settings(max_examples=60, deadline=None)
@given(queries=selections(11), keys=selections(13), heads=selections(4))
def test_any_selection_is_that_part_of_all_weights(queries: Any, keys: Any, heads: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, 11, 8, generator=generator), torch.randn(2, 2, 13, 8, generator=generator)
    lens = mh.look(q, k, mh.Causal(window=6), bias=torch.randn(4, 11, 13, generator=generator))
    w, (i, j, h) = lens.weights(), (index(queries, 11), index(keys, 13), index(heads, 4))
    for found, wanted in (
        (lens.rows(queries, heads), w[:, h][:, :, i]),
        (lens.columns(keys, heads), w[:, h][..., j]),
        (lens.mass(keys), w[..., j].sum(-1)),
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    if i and j and h:
        picture = lens.map(3, 4, queries=queries, keys=keys, heads=heads)
        wanted = torch.nn.functional.adaptive_avg_pool2d(w[:, h][:, :, i][..., j], (3, 4))
        torch.testing.assert_close(picture, wanted, rtol=1e-5, atol=1e-7)

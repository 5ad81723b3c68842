"""Masks: each against its definition, pair by pair; joins; lowering without tensors; drawing; bad arguments."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

import multihead as mh
from multihead.masks import lower
from multihead.masks.intervals import Frame, Ramp, Visible, higher_of, lower_of

sizes = st.integers(0, 9)


def seen(mask: mh.Mask, Q: int, K: int, b: int = 0, h: int = 0) -> list[list[bool]]:
    dense = mask.dense(Q, K)
    while dense.dim() < 4:
        dense = dense[None]
    dense = dense.expand(max(dense.shape[0], b + 1), max(dense.shape[1], h + 1), Q, K)
    return dense[b, h].tolist()


def by_definition(Q: int, K: int, sees) -> list[list[bool]]:
    """sees(i, key), where query q stands at position i = q + (K − Q)."""
    return [[sees(q + K - Q, key) for key in range(K)] for q in range(Q)]


@given(sizes, sizes)
def test_causal_sees_keys_up_to_its_own(Q: int, K: int) -> None:
    assert seen(mh.Causal(), Q, K) == by_definition(Q, K, lambda i, key: key <= i)


@given(sizes, sizes, st.integers(1, 12))
def test_a_causal_window_keeps_the_newest(Q: int, K: int, w: int) -> None:
    assert seen(mh.Causal(window=w), Q, K) == by_definition(Q, K, lambda i, key: i - w < key <= i)
    assert seen(mh.Causal(window=w), Q, K) == seen(mh.Window(w - 1, 0), Q, K)


@given(sizes, sizes, st.none() | st.integers(0, 12), st.none() | st.integers(0, 12))
def test_a_window_reaches_both_ways(Q: int, K: int, left: int | None, right: int | None) -> None:
    def sees(i: int, key: int) -> bool:
        return (left is None or key >= i - left) and (right is None or key <= i + right)

    assert seen(mh.Window(left, right), Q, K) == by_definition(Q, K, sees)


@given(sizes, sizes, sizes)
def test_a_prefix_is_seen_by_all(Q: int, K: int, n: int) -> None:
    assert seen(mh.Prefix(n), Q, K) == by_definition(Q, K, lambda i, key: key < n or key <= i)
    assert seen(mh.Prefix([0, n]), Q, K, b=1) == seen(mh.Prefix(n), Q, K)


@given(sizes, st.lists(st.integers(0, 7), min_size=1, max_size=3), st.sampled_from(["left", "right"]))
def test_padding_hides_keys_of_each_row(Q: int, lengths: list[int], side: str) -> None:
    K = 7
    for b, n in enumerate(lengths):
        wanted = by_definition(Q, K, lambda i, key, n=n: key < n if side == "right" else key >= K - n)
        assert seen(mh.Padding(lengths, side), Q, K, b) == wanted


documents = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4)


@given(documents, st.sampled_from([None, mh.Causal(), mh.Causal(window=2), mh.Window(1, 1), mh.Prefix(2)]))
def test_documents_are_blocks_and_other_masks_count_within_each(cuts: list, inner: mh.Mask | None) -> None:
    lengths, key_lengths = [q for q, _ in cuts], [k for _, k in cuts]
    mask = mh.Documents(lengths, key_lengths)
    blocks = [inner.dense(q, k) if inner is not None else torch.ones(q, k, dtype=torch.bool) for q, k in cuts]
    joined = mask if inner is None else mask & inner
    assert torch.equal(joined.dense(sum(lengths), sum(key_lengths)), torch.block_diag(*blocks).bool())
    per_row = mh.Documents(torch.tensor([lengths, lengths]), torch.tensor([key_lengths, key_lengths]))
    again = (per_row if inner is None else inner & per_row).dense(sum(lengths), sum(key_lengths))
    assert torch.equal(again[1, 0], torch.block_diag(*blocks).bool())


def every_kind() -> list[mh.Mask]:
    """One of each mask, for 5 queries, 7 keys and a batch of 2."""
    generator = torch.Generator().manual_seed(0)
    return [
        mh.Causal(),
        mh.Causal(window=3),
        mh.Window(1, 2),
        mh.Window(None, 1),
        mh.Prefix(2),
        mh.Prefix([1, 4]),
        mh.Padding([3, 6]),
        mh.Padding([3, 6], side="left"),
        mh.Allowed(torch.rand(2, 3, 5, 7, generator=generator) < 0.5),
        mh.Allowed(torch.rand(7, generator=generator) < 0.5),
    ]


def test_a_join_is_what_both_allow() -> None:
    for a, b in itertools.product(every_kind(), every_kind()):
        assert torch.equal((a & b).dense(5, 7), a.dense(5, 7) & b.dense(5, 7)), f"{a} & {b}"


def test_a_join_of_many_is_flat_and_takes_a_bare_tensor() -> None:
    mask = mh.Causal() & (mh.Window(3, 0) & mh.Padding([2])) & torch.ones(2, 2, dtype=torch.bool)
    assert [type(part).__name__ for part in mask.parts] == ["Causal", "Window", "Padding", "Allowed"]


@given(st.tuples(*[st.integers(-6, 6)] * 3), st.tuples(*[st.integers(-6, 6)] * 3))
def test_bounds_meet_query_by_query(a: tuple, b: tuple) -> None:
    frame = Frame.of(13, 13)
    ramps = [Ramp(offset, min(low, high), max(low, high)) for offset, low, high in (a, b)]
    values = [ramp.tensor(13, None) for ramp in ramps]
    for pick, wanted in ((lower_of, torch.minimum(*values)), (higher_of, torch.maximum(*values))):
        found = pick(*ramps, frame)
        assert torch.equal(found.tensor(13, None) if isinstance(found, Ramp) else found, wanted)


@pytest.mark.parametrize(
    "mask",
    [None, mh.Causal(), mh.Causal(window=4), mh.Window(2, 3), mh.Prefix(5), mh.Causal(window=4) & mh.Window(2, 0)],
    ids=str,
)
def test_masks_without_tensors_lower_without_making_any(mask: mh.Mask | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for maker in ("arange", "tensor", "full", "zeros", "ones", "empty", "minimum", "maximum", "where"):
        monkeypatch.setattr(torch, maker, lambda *_, **__: pytest.fail("lowering made a tensor"))
    visible = lower(mask, Frame.of(6, 9), B=2, H=3)
    assert isinstance(visible.start, Ramp)
    assert isinstance(visible.stop, Ramp)
    assert visible.dense is None


def test_padding_and_documents_lower_to_intervals_without_a_dense_matrix() -> None:
    for mask in (mh.Padding([3, 6]), mh.Padding([3, 6], side="left"), mh.Documents([2, 3], [3, 4]) & mh.Causal()):
        assert lower(mask, Frame.of(5, 7), B=2, H=3).dense is None


def test_a_ragged_batch_stands_row_by_row() -> None:
    """Rows use 3 and 6 of 7 keys; 2 and 1 of 2 queries are real: row 0 ends at key 2, row 1 at key 5."""
    frame = Frame.of(2, 7, used=torch.tensor([3, 6]), real=torch.tensor([2, 1]))
    allowed = lower(mh.Causal(), frame, B=2, H=1).allowed()
    assert allowed[0, 0].int().tolist() == [[1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0]]
    assert allowed[1, 0].int().tolist() == [[1, 1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0]]


def test_a_block_of_what_is_allowed_is_cut_from_the_whole() -> None:
    for mask in every_kind():
        visible = lower(mask, Frame.of(5, 7), B=2, H=3)
        whole = visible.allowed().expand(2, 3, 5, 7)
        block = visible.allowed(None, slice(1, 4), slice(2, 6)).expand(2, 3, 3, 4)
        assert torch.equal(block, whole[:, :, 1:4, 2:6]), mask


def test_documents_may_differ_by_row_on_either_side() -> None:
    rows = mh.Documents([2, 3], [[1, 4], [2, 3]]).dense(5, 5)
    for b, key_lengths in enumerate(([1, 4], [2, 3])):
        assert torch.equal(rows[b, 0], mh.Documents([2, 3], key_lengths).dense(5, 5))
    assert torch.equal(mh.Documents([[2, 3], [1, 4]]).dense(5, 5)[1, 0], mh.Documents([1, 4]).dense(5, 5))


def test_a_decode_step_sees_everything() -> None:
    assert lower(mh.Causal(), Frame.of(1, 9), B=1, H=1).is_everything
    assert lower(mh.Causal(window=9), Frame.of(1, 9), B=1, H=1).is_everything
    assert not lower(mh.Causal(window=8), Frame.of(1, 9), B=1, H=1).is_everything
    assert not lower(mh.Causal(), Frame.of(2, 9), B=1, H=1).is_everything


def test_masks_draw_themselves() -> None:
    assert mh.Causal().draw(2, 3) == "■ ■ ·\n■ ■ ■"
    per_head = mh.Allowed(torch.tensor([[[True]], [[False]]]))
    assert (per_head.draw(1, 1, head=0), per_head.draw(1, 1, head=1)) == ("■", "·")
    assert mh.Padding([1, 2]).draw(1, 2, batch=1) == "■ ■"
    assert mh.Causal().draw(2, 2, batch=7, head=3) == "■ ·\n■ ■", "one mask for all rows and heads"


def test_masks_are_pytrees_with_tensors_for_leaves() -> None:
    mask = mh.Causal(window=3) & mh.Padding([3, 6]) & mh.Allowed(torch.ones(5, 7, dtype=torch.bool))
    leaves, structure = pytree.tree_flatten(mask)
    assert [leaf.shape for leaf in leaves] == [(2,), (5, 7)]
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    again = pytree.tree_unflatten(leaves, structure)
    assert torch.equal(again.dense(5, 7), mask.dense(5, 7))


def test_equal_masks_without_tensors_compare_equal() -> None:
    assert mh.Causal(window=3) == mh.Causal(window=3) != mh.Causal()
    assert hash(mh.Window(1, 2)) == hash(mh.Window(1, 2))


BAD = [
    (lambda: mh.Causal(window=0), ValueError, "window=0: expected at least 1"),
    (lambda: mh.Causal(window=-2), ValueError, "window=-2: expected at least 1"),
    (lambda: mh.Causal(window=1.5), TypeError, "window=1.5 is a float: expected an int"),
    (lambda: mh.Window(-1, 0), ValueError, "left=-1: expected at least 0"),
    (lambda: mh.Window(0, True), TypeError, "right=True is a bool"),
    (lambda: mh.Prefix(-1), ValueError, "n=-1: expected at least 0"),
    (lambda: mh.Prefix(torch.tensor([-1])), ValueError, r"n=\[-1\]: expected at least 0"),
    (lambda: mh.Prefix(torch.tensor([1.0])), TypeError, "n has dtype torch.float32: expected integers"),
    (lambda: mh.Padding([3, -1]), ValueError, r"lengths\[1\]=-1: expected at least 0"),
    (lambda: mh.Padding(3), TypeError, "lengths=3: expected a tensor or a list of integers"),
    (lambda: mh.Padding(torch.ones(2, 2).long()), ValueError, r"lengths has shape \(2, 2\): expected one axis"),
    (lambda: mh.Padding([3], side="top"), ValueError, "side='top': expected 'left' or 'right'"),
    (lambda: mh.Documents([]), ValueError, r"lengths has shape \(0,\): expected \(documents,\)"),
    (lambda: mh.Documents([1, 2], [3]), ValueError, "lengths has 2 documents and key_lengths 1"),
    (lambda: mh.Documents([1, 2]) & mh.Documents([1, 2]), None, "cannot be joined with other Documents"),
    (lambda: mh.Allowed(torch.zeros(2, 2)), TypeError, "give scores to add as bias="),
    (lambda: mh.Allowed([[True]]), TypeError, "tensor is a list: expected a bool tensor"),
    (lambda: mh.Causal() & torch.zeros(2, 2), TypeError, "give scores to add as bias="),
    (
        lambda: mh.Allowed(torch.ones(3, 3, dtype=torch.bool)).draw(4, 4),
        ValueError,
        r"shape \(3, 3\): expected .*\(Q,K\)=\(4, 4\)",
    ),
    (lambda: mh.Causal() & "padding", TypeError, "mask is a str"),
    (lambda: mh.Padding([1, 2]).draw(1, 2, batch=7), ValueError, "batch=7: the mask is for 2, expected 0…1"),
    (lambda: mh.Padding([1, 2]).draw(1, 2, batch=-1), ValueError, "batch=-1: expected at least 0"),
    (
        lambda: mh.Allowed(torch.ones(3, 2, 2, dtype=torch.bool)).draw(2, 2, head=3),
        ValueError,
        "head=3: the mask is for 3, expected 0…2",
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), BAD, ids=[m for _, _, m in BAD])
def test_bad_arguments_are_named(make, error: type[Exception] | None, message: str) -> None:
    if error is None:  # what only shows when the mask is used
        with pytest.raises(ValueError, match=message):
            make().dense(3, 3)
        return
    with pytest.raises(error, match=message):
        make()


@settings(max_examples=25)
@given(st.integers(1, 6), st.integers(1, 6))
def test_square_causal_is_recognised_and_nothing_else(Q: int, K: int) -> None:
    def lowered(mask: mh.Mask) -> Visible:
        return lower(mask, Frame.of(Q, K), B=1, H=1)

    assert lowered(mh.Causal()).is_square_causal == (Q == K)
    assert lowered(mh.Window(None, 0)).is_square_causal == (Q == K)
    for other in (mh.Causal(window=2), mh.Window(None, 1), mh.Prefix(2), mh.Padding([1])):
        visible = lowered(other)
        if visible.is_square_causal or visible.is_everything:
            wanted = mh.Causal().dense(Q, K) if visible.is_square_causal else torch.ones(Q, K, dtype=torch.bool)
            assert torch.equal(visible.allowed(), wanted)

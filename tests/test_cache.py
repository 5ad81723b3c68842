"""Caches: growing, fixed, sliding, ragged, of a context; crop, reorder, reset; what does not fit is refused."""

import pytest
import torch

import multihead as mh

E, N = 24, 13


def a_layer(**more) -> mh.MultiHeadAttention:
    return mh.MultiHeadAttention(E, **{"heads": 6, "kv_heads": 2, "rope": True, "dtype": torch.float64, **more}).eval()


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


KINDS = {"growing": {}, "fixed": {"capacity": N}, "roomy": {"capacity": 100}}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("pieces", [[1] * N, [N], [5, 1, 1, 6], [3, 0, 10]], ids=str)
def test_piece_by_piece_is_the_whole_sequence(kind: dict, pieces: list[int]) -> None:
    layer, x = a_layer(), drawn(2, N, E)
    cache = layer.new_cache(batch=2, **kind)
    parts = [layer(piece, mask=mh.Causal(), cache=cache) for piece in x.split(pieces, dim=1)]
    close(torch.cat(parts, dim=1), layer(x, mask=mh.Causal()))
    assert cache.length == N
    assert cache.k.shape == (2, 2, N, 4)


@pytest.mark.parametrize("window", [1, 2, 5, 40])
@pytest.mark.parametrize("pieces", [[1] * N, [N], [5, 1, 1, 6], [2] * 6 + [1]], ids=str)
def test_a_sliding_cache_is_the_whole_sequence_under_a_window(window: int, pieces: list[int]) -> None:
    layer, x = a_layer(), drawn(2, N, E)
    cache = layer.new_cache(batch=2, window=window)
    parts = [layer(piece, mask=mh.Causal(), cache=cache) for piece in x.split(pieces, dim=1)]
    close(torch.cat(parts, dim=1), layer(x, mask=mh.Causal(window=window)))


def test_a_sliding_cache_keeps_no_more_than_it_must() -> None:
    layer = a_layer()
    cache = layer.new_cache(window=8)
    before = cache.nbytes
    for _ in range(200):
        layer(drawn(1, 1, E), mask=mh.Causal(), cache=cache)
    assert cache.nbytes == before
    assert cache.length == 200


def test_a_growing_cache_doubles() -> None:
    layer = a_layer()
    cache, rooms = layer.new_cache(), set()
    for _ in range(100):
        layer(drawn(1, 1, E), mask=mh.Causal(), cache=cache)
        rooms.add(cache.nbytes)
    assert len(rooms) == 4  # 16, 32, 64, 128 tokens


@pytest.mark.parametrize("kind", [{}, {"capacity": 16}, {"window": 4}], ids=str)
def test_rows_of_different_lengths_are_each_their_own_sequence(kind: dict) -> None:
    """Three rows take 4, 1 and 0 tokens, then 2, 2 and 3, then one each, then a token each without lengths=."""
    layer = a_layer()
    cache = layer.new_cache(batch=3, **kind)
    rows: list[list[torch.Tensor]] = [[], [], []]
    outs: list[list[torch.Tensor]] = [[], [], []]
    for lengths in ([4, 1, 0], [2, 2, 3], [1, 1, 1], None):
        x = drawn(3, 4 if lengths else 1, E)
        y = layer(x, mask=mh.Causal(), cache=cache, lengths=lengths)
        for b, n in enumerate(lengths or [1, 1, 1]):
            rows[b].append(x[b, :n])
            outs[b].append(y[b, :n])
    mask = mh.Causal(window=kind.get("window"))
    for b in range(3):
        close(torch.cat(outs[b]), layer(torch.cat(rows[b]), mask=mask))
    assert cache.length.tolist() == [8, 5, 5]


def test_tokens_that_are_not_real_see_nothing() -> None:
    layer, x = a_layer(), drawn(2, 5, E)
    y = layer(x, mask=mh.Causal(), lengths=[5, 2])
    close(y[1, :2], layer(x[1, :2], mask=mh.Causal()))
    close(y[1, 2:], layer.o_proj.bias.expand(3, E))
    x[1, 2:] = torch.nan
    assert layer(x, lengths=[5, 2])[1, :2].isfinite().all()


def test_left_padding_works_with_a_cache() -> None:
    layer, x = a_layer(), drawn(1, 6, E)
    padded = torch.cat([drawn(1, 2, E), x], dim=1)
    cache = layer.new_cache()
    layer(padded[:, :5], mask=mh.Causal() & mh.Padding([3], side="left"), cache=cache)
    y = layer(padded[:, 5:], mask=mh.Causal() & mh.Padding([6], side="left"), cache=cache)
    close(y, layer(x, mask=mh.Causal())[:, 3:])  # RoPE knows only distances


def test_a_prefix_counts_from_the_first_token_however_far_a_cache_has_slid() -> None:
    layer, x = a_layer(), drawn(1, N, E)
    cache = layer.new_cache(window=3)
    mask = mh.Prefix(7)
    parts = [layer(piece, mask=mask, cache=cache) for piece in x.split([7, 1, 1, 1, 1, 1, 1], dim=1)]
    whole = layer(x, mask=mh.Prefix(7) & mh.Window(2, None))
    close(torch.cat(parts, dim=1)[:, 7:], whole[:, 7:])


def test_a_context_is_projected_once() -> None:
    layer = a_layer(context_dim=11)
    x, context = drawn(2, 4, E), drawn(2, 5, 11)
    cache = layer.new_cache(context=context)
    calls = []
    layer.k_proj.register_forward_hook(lambda *_: calls.append(1))
    parts = [layer(piece, cache=cache, positions=torch.tensor([t])) for t, piece in enumerate(x.split(1, dim=1))]
    assert calls == []
    close(torch.cat(parts, dim=1), layer(x, context))
    cache.reorder(torch.tensor([1, 1]))
    close(layer(x, cache=cache)[0], layer(x[0], context[1]))


def test_crop_forgets_the_newest() -> None:
    layer, x = a_layer(), drawn(2, N, E)
    cache = layer.new_cache(batch=2)
    layer(x[:, :9], mask=mh.Causal(), cache=cache)
    cache.crop(4)
    y = layer(x[:, 9:], mask=mh.Causal(), cache=cache)
    close(y, layer(torch.cat([x[:, :4], x[:, 9:]], dim=1), mask=mh.Causal())[:, 4:])
    cache.crop(torch.tensor([2, 50]))
    assert cache.length.tolist() == [2, 8]
    y = layer(x[:, :1], mask=mh.Causal(), cache=cache)
    close(y[0], layer(torch.cat([x[0, :2], x[0, :1]]), mask=mh.Causal())[2:])


def test_crop_of_a_sliding_cache_refuses_what_it_has_let_go() -> None:
    layer = a_layer()
    cache = layer.new_cache(window=4)
    layer(drawn(1, 6, E), mask=mh.Causal(), cache=cache)
    cache.crop(5)
    assert cache.length == 5
    layer(drawn(1, 9, E), mask=mh.Causal(), cache=cache)
    with pytest.raises(ValueError, match="has let go of tokens that would be visible again"):
        cache.crop(3)


def test_reorder_moves_rows_and_may_repeat_them() -> None:
    layer, x = a_layer(), drawn(3, 5, E)
    cache = layer.new_cache(batch=3)
    layer(x[:, :4], mask=mh.Causal(), cache=cache, lengths=[4, 3, 2])
    cache.reorder([2, 0, 2])
    assert cache.length.tolist() == [2, 4, 2]
    y = layer(x[:, 4:], mask=mh.Causal(), cache=cache)
    close(y[1], layer(torch.cat([x[0, :4], x[1, 4:]]), mask=mh.Causal())[4:])


def test_reset_forgets_everything_and_keeps_the_memory() -> None:
    layer, x = a_layer(), drawn(1, N, E)
    cache = layer.new_cache(batch=1, capacity=N)
    for _ in range(3):
        close(layer(x, mask=mh.Causal(), cache=cache), layer(x, mask=mh.Causal()))
        cache.reset()
        assert cache.length == 0


def test_gradients_flow_through_a_cache() -> None:
    layer, x = a_layer(), drawn(1, 5, E).requires_grad_()
    for kind in ({}, {"capacity": 8}, {"window": 8}):
        cache = layer.new_cache(**kind)
        parts = [layer(piece, mask=mh.Causal(), cache=cache) for piece in x.split(1, dim=1)]
        (found,) = torch.autograd.grad(torch.cat(parts, dim=1).pow(2).sum(), x)
        (wanted,) = torch.autograd.grad(layer(x, mask=mh.Causal()).pow(2).sum(), x)
        close(found, wanted)


def test_a_nan_that_was_cropped_away_does_not_come_back() -> None:
    layer, x = a_layer(), drawn(2, 3, E)
    cache = layer.new_cache(batch=2)
    layer(torch.full_like(x, torch.nan), mask=mh.Causal(), cache=cache, lengths=[3, 3])
    cache.crop(0)
    assert layer(x, mask=mh.Causal(), cache=cache, lengths=[1, 3])[0, 0].isfinite().all()


@pytest.mark.parametrize("kind", [{}, {"capacity": 40}, {"window": 3}], ids=str)
def test_a_call_that_fails_leaves_the_cache_as_it_was(kind: dict) -> None:
    layer, x = a_layer(), drawn(2, 9, E)
    cache = layer.new_cache(batch=2, **kind)
    layer(x[:, :4], mask=mh.Causal(), cache=cache)
    for wrong in ({"mask": torch.ones(3, 3, dtype=torch.bool)}, {"bias": torch.ones(9, 9, 9)}, {"backend": "fast"}):
        with pytest.raises(ValueError, match="expected"):
            layer(x[:, 4:], **({"mask": mh.Causal()} | wrong), cache=cache)
    assert cache.length == 4
    y = layer(x[:, 4:], mask=mh.Causal(), cache=cache)
    close(y, layer(x, mask=mh.Causal(window=kind.get("window")))[:, 4:])


def test_overflow_says_so_and_changes_nothing() -> None:
    layer, x = a_layer(), drawn(1, 5, E)
    cache = layer.new_cache(batch=1, capacity=4)
    layer(x[:, :3], mask=mh.Causal(), cache=cache)
    with pytest.raises(mh.CacheOverflow, match=r"cache is full: 3 tokens and 2 more do not fit capacity=4"):
        layer(x[:, 3:], mask=mh.Causal(), cache=cache)
    with pytest.raises(mh.CacheOverflow):
        layer(x[:, 3:], mask=mh.Causal(), cache=cache, lengths=[2])
    y = layer(x[:, 3:4], mask=mh.Causal(), cache=cache)
    close(y, layer(x[:, :4], mask=mh.Causal())[:, 3:])


@pytest.mark.parametrize("kind", [{"capacity": 5}, {}, {"window": 2}], ids=str)
def test_a_short_row_takes_what_fits_beside_a_long_one(kind: dict) -> None:
    layer, x, more = a_layer(), drawn(2, 5, E), drawn(2, 40, E)
    cache, mask = layer.new_cache(batch=2, **kind), mh.Causal(window=kind.get("window"))
    layer(x, mask=mask, cache=cache, lengths=[5, 1])
    many = 4 if "capacity" in kind else 40
    y = layer(more[:, :many], mask=mask, cache=cache, lengths=[0, many])
    close(y[1], layer(torch.cat((x[1, :1], more[1, :many])), mask=mask)[1:])
    assert cache.length.tolist() == [5, 1 + many]


@pytest.mark.parametrize("lengths", [None, [4, 2]])
def test_a_cache_filled_in_inference_mode_is_read_and_written_outside_it(lengths: list[int] | None) -> None:
    layer, x = a_layer(), drawn(2, 4, E)
    with torch.inference_mode():
        cache = layer.new_cache(batch=2, capacity=8)
        layer(x, mask=mh.Causal(), cache=cache, lengths=lengths)
    with torch.no_grad():
        y = layer(x, mask=mh.Causal(), cache=cache)
    close(y[0], layer(torch.cat((x[0], x[0])), mask=mh.Causal())[4:])


class Adapter(torch.nn.Module):
    """A projection as adapters replace it: neither `weight` nor `out_features` of its own."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base, self.extra = base, torch.nn.Linear(E, base.out_features, bias=False, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.extra(x)


def test_a_layer_with_replaced_projections_makes_its_caches() -> None:
    layer, x = a_layer(), drawn(2, 5, E)
    layer.k_proj, layer.v_proj = Adapter(layer.k_proj), Adapter(layer.v_proj)
    cache = layer.new_cache(batch=2)
    close(layer(x, mask=mh.Causal(), cache=cache), layer(x, mask=mh.Causal()))


def test_a_layer_without_parameters_makes_its_caches() -> None:
    layer, x = a_layer().float(), torch.randn(2, 5, E)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):  # buffers only, as quantised replacements have
        projection = getattr(layer, name)
        weight, bias = projection.weight.detach(), projection.bias.detach()
        del projection.weight, projection.bias
        projection.register_buffer("weight", weight)
        projection.register_buffer("bias", bias)
    cache = layer.new_cache(batch=2)
    torch.testing.assert_close(layer(x, mask=mh.Causal(), cache=cache), layer(x, mask=mh.Causal()))


def test_a_cache_may_be_wider_than_the_layer() -> None:
    layer, x = a_layer().bfloat16(), torch.randn(2, 5, E).bfloat16()
    y = layer(x, mask=mh.Causal(), cache=layer.new_cache(batch=2, dtype=torch.float32))
    torch.testing.assert_close(y, layer(x, mask=mh.Causal()))


def test_a_context_cache_moves_its_rows() -> None:
    layer, x, context = a_layer(), drawn(2, 2, E), drawn(3, 4, E)
    for rows in ([2, 0], torch.tensor([2, 0])):
        cache = layer.new_cache(context=context)
        cache.reorder(rows)
        close(layer(x, cache=cache), layer(x, context[[2, 0]]))


def test_ragged_rows_of_a_cache_need_numbers() -> None:
    layer = a_layer().to("meta")
    x, cache = torch.empty(2, 3, E, device="meta", dtype=torch.float64), layer.new_cache(2)
    with pytest.raises(ValueError, match="a cache has to know where each of its rows ends"):
        layer(x, cache=cache, lengths=torch.empty(2, dtype=torch.long, device="meta"))


BAD = [
    (lambda a: a.new_cache(dtype=torch.int8), TypeError, "dtype=torch.int8: expected a floating dtype"),
    (lambda a: a.new_cache(batch=0), ValueError, "batch=0: expected at least 1"),
    (lambda a: a.new_cache(capacity=0), ValueError, "capacity=0: expected at least 1"),
    (lambda a: a.new_cache(window=-3), ValueError, "window=-3: expected at least 1"),
    (lambda a: a.new_cache(capacity=4, window=4), ValueError, "give one of them"),
    (lambda a: a.new_cache(capacity=4, context=drawn(2, E)), ValueError, "never grows"),
    (lambda a: a(drawn(1, 2, E), cache=a.new_cache(batch=2)), ValueError, "the cache was made for B=2"),
    (lambda a: a(drawn(1, 2, E), cache=a_layer(head_dim=6).new_cache()), ValueError, "head width 6"),
    (lambda a: a(drawn(1, 2, E), cache=a.new_cache(device="meta")), ValueError, "holds torch.float64 on meta"),
    (lambda a: a(drawn(1, 2, E), drawn(1, 3, E), cache=a.new_cache()), ValueError, r"new_cache\(context=…\)"),
    (
        lambda a: a(drawn(1, 2, E), drawn(1, 3, E), cache=a.new_cache(context=drawn(3, E))),
        ValueError,
        "leave out context=",
    ),
    (lambda a: a(drawn(2, 2, E), cache=a.new_cache(context=drawn(3, E))), ValueError, "this call has B=2"),
    (
        lambda a: a(drawn(2, 3, E), cache=a.new_cache(2), lengths=[1, 4]),
        ValueError,
        "expected 0…3, the number of tokens",
    ),
    (lambda a: a(drawn(2, 3, E), cache=a.new_cache(2), lengths=[-1, 2]), ValueError, "expected 0…3"),
    (lambda a: a(drawn(2, 3, E), cache=a.new_cache(2), lengths=[1]), ValueError, "for each of the B=2 rows"),
    (lambda a: a(drawn(2, 3, E), drawn(2, 3, E), lengths=[1, 1]), ValueError, "lengths= counts the tokens of x"),
    (
        lambda a: a(drawn(1, 2, E), cache=a_layer(kv_heads=1).new_cache(context=drawn(3, E))),
        ValueError,
        "by a layer of .*G=1.* but this one is .*G=",
    ),
    (
        lambda a: a(drawn(1, 2, E), cache=a.new_cache(context=drawn(3, E)), context_positions=torch.arange(3)),
        ValueError,
        r"context_positions= to new_cache\(context=…\)",
    ),
    (lambda a: a.new_cache(context=[1, 2]), TypeError, "context is a list: expected a tensor"),
    (
        lambda a: a.new_cache(dtype=torch.float8_e4m3fn),
        TypeError,
        "dtype=torch.float8_e4m3fn: expected a floating dtype of 16",
    ),
    (lambda a: a.new_cache(2).reorder([1, 2]), ValueError, r"rows=\[1, 2\]: expected row numbers 0…1"),
    (lambda a: a.new_cache(2).reorder([0.5, 1]), TypeError, r"rows\[0\]=0.5 is a float"),
    (lambda a: a.new_cache(2).reorder(3), TypeError, "rows is a int: expected row numbers"),
    (
        lambda a: a.new_cache(context=drawn(2, 3, E)).reorder(torch.tensor([0, 2])),
        ValueError,
        r"rows=\[0, 2\]: expected row numbers 0…1",
    ),
    (
        lambda a: a.new_cache(context=drawn(2, 3, E)).reorder(torch.ones(2)),
        ValueError,
        "expected one axis of row numbers",
    ),
    (lambda a: a.new_cache().crop(-1), ValueError, "length=-1: expected at least 0"),
    (lambda a: a.new_cache().reorder(torch.tensor([1])), ValueError, r"rows=\[1\]: expected row numbers 0…0"),
    (
        lambda a: a.new_cache(2).crop(torch.tensor([-2, 3])),
        ValueError,
        "expected integers, one for each of B=2",
    ),
    (
        lambda a: a.new_cache(2).crop(torch.tensor([2.0, 3.0])),
        ValueError,
        "expected integers, one for each of B=2",
    ),
    (lambda a: a(drawn(1, 2, E), cache=True), TypeError, r"cache is a bool: expected one from new_cache\(\)"),
    (lambda a: a.new_cache().reorder(torch.tensor([0.5])), ValueError, "expected one axis of row numbers"),
]


@pytest.mark.parametrize(("use", "error", "message"), BAD, ids=[m for _, _, m in BAD])
def test_bad_use_is_named(use, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        use(a_layer())

"""Long inputs: tiles, links and words are those of `mh.look`, what is kept is bounded, and nothing of size Q×K is made."""

import string
import tracemalloc
from typing import Any

import pytest
import torch

import multihead as mh
from multihead.explorer import long
from multihead.explorer.request import Refused
from multihead.explorer.session import Session
from multihead.explorer.subjects import of_model

N = 1500
WORDS = [string.ascii_lowercase[n % 26] * (1 + n % 3) for n in range(N)]
GIVEN = {"model": "given", "input": {"kind": "given"}}
LAYER = GIVEN | {"layer": 0}


@pytest.fixture(scope="module")
def layer() -> mh.MultiHeadAttention:
    torch.manual_seed(4)
    made = mh.MultiHeadAttention(48, heads=3, kv_heads=1, rope=True).eval()
    torch.nn.init.normal_(made.q_proj.weight, std=0.6)
    return made


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    torch.manual_seed(5)
    return torch.randn(N, 48)


@pytest.fixture
def session(layer: mh.MultiHeadAttention, x: torch.Tensor) -> Session:
    return Session([of_model(layer, x, mask=mh.Causal(), labels=WORDS)[0]])


@pytest.fixture(scope="module")
def weights(layer: mh.MultiHeadAttention, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return layer.look(x, mask=mh.Causal()).weights()[0]


def whole_tile(session: Session, **place: Any) -> torch.Tensor:
    """A tile, asked for until all its rows are there."""
    rows: list[torch.Tensor] = []
    while True:
        answer = session.answer(
            "tile", LAYER | {"level": 0, "row": 0, "column": 0, "head": 0} | place | {"first": sum(map(len, rows))}
        )
        meta = answer.meta
        rows.append(answer.tensors.get("tile", torch.zeros(meta["to"] - meta["first"], meta["columns"])))
        if meta["to"] == meta["rows"]:
            return torch.cat(rows)


@pytest.mark.parametrize("pool", ["max", "mean"])
@pytest.mark.parametrize(
    ("level", "row", "column", "head"),
    [(0, 0, 0, 0), (0, 5, 3, 2), (1, 2, 2, 1), (2, 1, 0, 0), (3, 0, 0, 2)],
    ids=["the first", "at the lower edge, not whole", "not whole both ways", "half", "all, with a last bin of 4"],
)  # fmt: skip
def test_a_tile_is_the_weights_in_bins(
    session: Session, weights: torch.Tensor, level: int, row: int, column: int, head: int, pool: str
) -> None:
    found = whole_tile(session, level=level, row=row, column=column, head=head, pool=pool)
    step, side = 2**level, 256 * 2**level
    part = weights[head, row * side : (row + 1) * side, column * side : (column + 1) * side]
    bins = [
        torch.stack([(c.amax() if pool == "max" else c.mean()) for c in r.split(step, 1)]) for r in part.split(step)
    ]
    torch.testing.assert_close(found, torch.stack(bins), rtol=1e-5, atol=1e-7)


def test_a_large_tile_comes_some_rows_at_a_time(
    session: Session, weights: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long, "BUDGET", 8 * (N + N) * 50)
    answer = session.answer("tile", LAYER | {"head": 1, "level": 3, "row": 0, "column": 0})
    assert (answer.meta["first"], answer.meta["to"], answer.meta["rows"]) == (0, 50, 188)
    torch.testing.assert_close(
        whole_tile(session, head=1, level=3)[5, 2], weights[1, 40:48, 16:24].amax(), rtol=1e-5, atol=1e-7
    )


def test_a_sample_is_exact_for_the_query_in_the_middle(session: Session, weights: torch.Tensor) -> None:
    answer = session.answer("tile", LAYER | {"head": 0, "level": 2, "row": 0, "column": 0, "sample": 1})
    assert answer.meta["sample"]
    wanted = weights[0, 2:1024:4, :1024].unflatten(1, (256, 4)).amax(-1)
    torch.testing.assert_close(answer.tensors["tile"], wanted, rtol=1e-5, atol=1e-7)


def test_what_is_hidden_is_not_sent(session: Session) -> None:
    answer = session.answer("tile", LAYER | {"head": 0, "level": 0, "row": 0, "column": 2})
    assert answer.tensors == {}
    assert (answer.meta["rows"], answer.meta["columns"]) == (256, 256)


def test_links_are_those_of_the_lens(session: Session, weights: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    found = session.answer("links", LAYER | {"head": 2, "query": 1234, "n": 5}).meta["links"]
    value, key = weights[2, 1234].topk(5)
    assert [link["item"] for link in found] == key.tolist()
    assert [link["weight"] for link in found] == pytest.approx(value.tolist(), rel=1e-5)
    assert [link["text"] for link in found] == [WORDS[k] for k in key]
    monkeypatch.setattr(long, "BUDGET", 512 * N)
    links, first = [], 0
    while first < N:
        meta = session.answer("links", LAYER | {"head": 2, "key": 77, "n": 4, "first": first}).meta
        assert meta["to"] - first <= 512
        links, first = [*links, *meta["links"]], meta["to"]
    links.sort(key=lambda link: -link["weight"])
    value, query = weights[2, :, 77].topk(4)
    assert [link["item"] for link in links[:4]] == query.tolist()
    first_row = session.answer("links", LAYER | {"head": 0, "query": 0, "n": 9}).meta["links"]
    assert [link["item"] for link in first_row] == [0]  # it sees itself alone


def test_names_and_words(session: Session) -> None:
    meta = session.answer("items", GIVEN | {"start": 700, "stop": 703}).meta
    assert (meta["count"], [t["text"] for t in meta["tokens"]]) == (N, WORDS[700:703])
    found = session.answer("find", GIVEN | {"text": "ZZ a"}).meta
    places = [n for n in range(N - 1) if WORDS[n].endswith("zz") and WORDS[n + 1].startswith("a")]
    assert (found["count"], found["places"]) == (len(places), places)
    later = session.answer("find", GIVEN | {"text": "zz a", "start": places[3] + 1}).meta
    assert later["places"] == places[4:]
    assert session.answer("find", GIVEN | {"text": "nowhere"}).meta == {"count": 0, "places": []}


def test_a_word_may_be_cut_into_tokens_and_characters_into_bytes() -> None:
    subject, given = of_model(mh.models.load("lm"), "The snowman ☃ of Nantucket. " * 400)
    assert given == {"kind": "text", "text": "The snowman ☃ of Nantucket. " * 400}
    session = Session([subject])
    asked = {"model": "model", "input": given}
    found = session.answer("find", asked | {"text": "nantucket. the ☃"}).meta
    assert found["count"] == 0
    found = session.answer("find", asked | {"text": "☃ of nan"}).meta
    assert found["count"] == 400
    first = found["places"][0]
    tokens = session.answer("items", asked | {"start": first, "stop": first + 2}).meta["tokens"]
    assert bytes.fromhex("".join(t["bytes"] for t in tokens)).strip().startswith("☃".encode()[:2])


def test_thumbnails_have_every_head(session: Session, weights: torch.Tensor) -> None:
    answer = session.answer("thumbnails", LAYER)
    assert answer.tensors["maps"].shape == (3, 48, 48)
    assert (answer.meta["count"], answer.meta["keys"], answer.meta["heads"]) == (N, N, 3)
    row = weights[1, 3 * N // 96]
    torch.testing.assert_close(answer.tensors["maps"][1, 1, 0].float(), row[:32].amax(), rtol=2e-3, atol=1e-6)


BAD = [
    ("tile", {"head": 3, "level": 0, "row": 0, "column": 0}, "head=3: expected 0…2"),
    ("tile", {"head": 0, "level": 0, "row": 6, "column": 0}, "the map has 1500 × 1500 items"),
    ("tile", {"head": 0, "level": 0, "row": 0, "column": 0, "first": 256}, "first=256"),
    ("tile", {"head": 0, "level": 0, "row": 0, "column": 0, "pool": "sum"}, "expected 'max' or 'mean'"),
    ("tile", {"head": 0, "level": -1, "row": 0, "column": 0}, "level=-1: expected an integer of at least 0"),
    ("tile", {"head": 0, "level": 2**30, "row": 1, "column": 0}, "the map has"),
    ("links", {"head": 0, "n": 3}, "one of 1500 queries or 1500 keys"),
    ("links", {"head": 0, "n": 3, "query": 1, "key": 1}, "one of 1500 queries"),
    ("links", {"head": 0, "n": 0, "query": 1}, "n=0: expected an integer of at least 1"),
    ("links", {"head": 0, "n": 3, "query": 1500}, "one of 1500 queries"),
]


@pytest.mark.parametrize(("route", "place", "message"), BAD, ids=[b[2] for b in BAD])
def test_what_is_not_on_the_map_is_refused_in_words(session: Session, route: str, place: Any, message: str) -> None:
    with pytest.raises(Refused) as refused:
        session.respond(route, LAYER | place)
    assert message in str(refused.value)


def test_other_limits_are_said(session: Session, layer: mh.MultiHeadAttention) -> None:
    with pytest.raises(Refused, match="at most 4096 items at once"):
        session.respond("items", GIVEN | {"start": 0, "stop": 5000})
    with pytest.raises(Refused, match="text is empty"):
        session.respond("find", GIVEN | {"text": ""})
    with pytest.raises(Refused, match="x has 1500 items: expected at most 512"):
        session.respond("trace", LAYER)
    with pytest.raises(ValueError, match="x has 100,001 items: expected at most 100,000"):
        of_model(layer, torch.zeros(1, 48).expand(100_001, 48))


def test_lenses_are_few_and_follow_the_layer(layer: mh.MultiHeadAttention, x: torch.Tensor) -> None:
    session = Session([of_model(layer, x.clone(), mask=mh.Causal())[0]])
    place = {"head": 0, "level": 0, "row": 1, "column": 0}
    before = session.answer("tile", LAYER | place).tensors["tile"]
    for window in (3, 5, 7, 9):
        session.answer("tile", LAYER | place | {"mask": {"kind": "causal", "window": window}, "row": 0})
    assert len(session.lenses._seen) == long.KEPT_LENSES
    with torch.no_grad():
        layer.q_proj.weight.mul_(0.5)
    try:
        after = session.answer("tile", LAYER | place).tensors["tile"]
        wanted = layer.look(x, mask=mh.Causal()).rows(range(256, 512), heads=0)[0, 0, :, :256]
    finally:
        with torch.no_grad():
            layer.q_proj.weight.mul_(2)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, wanted.detach(), rtol=1e-5, atol=1e-7)


def test_a_hundred_thousand_tokens_take_what_q_and_k_take() -> None:
    """Panned and zoomed: the lens keeps q, k and one number for each query and head; an answer is a tile."""
    count = 100_000
    layer = mh.MultiHeadAttention(32, heads=2).eval()
    x = torch.randn(count, 32)
    session = Session([of_model(layer, x, mask=mh.Causal())[0]])
    asked = [{"level": 9, "row": 0, "column": 0, "sample": 1}]
    asked += [{"level": level, "row": 3, "column": 2} for level in (6, 3, 0)]
    asked += [{"level": 0, "row": 390 - n, "column": 388 - n} for n in range(12)]
    largest = 0
    tracemalloc.start()
    for place in asked:
        largest = max(largest, len(session.respond("tile", LAYER | place | {"head": 1})))
    session.respond("links", LAYER | {"head": 1, "query": count - 1, "n": 20})
    python = tracemalloc.get_traced_memory()[1]  # tensors apart: torch's are not Python's
    tracemalloc.stop()
    kept = session.lenses.nbytes
    assert kept <= count * (2 * 32 * 4 + 2 * 8)  # q and k of two heads of 16, and the log-sum-exp: 27 MB
    assert largest <= 256 * 256 * 4 + 4096
    assert python < 200e6


def test_nothing_of_size_q_by_k_is_made(monkeypatch: pytest.MonkeyPatch, session: Session) -> None:
    """The largest tensor that any answer makes has as many numbers as the input, not its square."""
    made: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            made.extend(
                t.numel() for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, torch.Tensor)
            )
            return out

    with Watch():  # a mode that watches sends the lens through plain torch, a tile at a time
        for place in (
            {"level": 3, "row": 0, "column": 0},
            {"level": 0, "row": 4, "column": 1},
            {"level": 3, "row": 0, "column": 0, "sample": 1},
        ):
            session.respond("tile", LAYER | place | {"head": 0})
        session.respond("links", LAYER | {"head": 0, "key": 3, "n": 5})
        session.respond("thumbnails", LAYER)
    assert max(made) < N * N / 2

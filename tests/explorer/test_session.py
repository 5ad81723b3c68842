"""What the explorer answers is what traces and lenses say, to the last bit; what it cannot answer it refuses in words."""

import threading
from typing import Any

import numpy as np
import pytest
import torch

import multihead as mh
from multihead import heads as finder
from multihead.explorer import answers
from multihead.explorer import session as module
from multihead.explorer.request import FIELDS, Refused, as_mask, key, parse, said_of_seen
from multihead.explorer.session import Session, Stop, Stopped
from multihead.explorer.tokens import bytes_of, visible
from tests.explorer.client import SENTENCE, TRACE

TEXT = "I love pepperoni pizza"
BAG = {"kind": "sample", "name": "bag"}


@pytest.fixture(scope="module")
def lm() -> Any:
    return mh.models.load("lm")


@pytest.fixture(scope="module")
def vit() -> Any:
    return mh.models.load("vit")


@pytest.fixture(scope="module")
def tokens(lm: Any) -> torch.Tensor:
    return torch.tensor([lm.tokenizer.begin(TEXT)])


def test_models_lists_what_can_be_explored(session: Session) -> None:
    meta = session.answer("models", {}).meta
    assert [m["id"] for m in meta["models"]] == ["lm", "vit", "example"]
    lm, vit, example = meta["models"]
    assert (lm["kind"], lm["predicts"], lm["decodes"], lm["mask"]) == (
        "text",
        "tokens",
        True,
        {"kind": "causal", "window": 256},
    )
    assert (vit["kind"], vit["predicts"], vit["mask"]) == ("picture", "classes", None)
    assert vit["picture"] == {"size": 28, "channels": 1, "patch": 4, "rows": 7, "columns": 7, "first": 1}
    assert example["layers"][0]["sizes"] == {"E": 1024, "H": 8, "G": 8, "D": 128, "V": 128, "C": 1024}
    assert meta["first"] == {"model": "lm", "layer": 0, "input": SENTENCE}


@pytest.mark.parametrize("layer", [0, 1])
def test_a_trace_is_mh_trace(session: Session, lm: Any, tokens: torch.Tensor, layer: int) -> None:
    answer = session.answer("trace", TRACE | {"layer": layer})
    wanted = lm.trace(tokens, layer)
    for name in wanted:
        assert torch.equal(answer.tensors[name], wanted[name]), name
    assert torch.equal(answer.tensors["allowed"], torch.ones(12, 12).tril().bool())
    assert answer.meta["missing"] == []
    assert answer.meta["scale"] == pytest.approx(32**-0.5)
    assert [step["number"] for step in answer.meta["steps"]] == list(range(1, 8))


def test_rope_is_what_turns_q(session: Session) -> None:
    t = session.answer("trace", TRACE).tensors
    rope = session.answer("trace", TRACE).meta["rope"]
    half = rope["dim"] // 2
    split = t["q"].transpose(0, 1)
    a, b = split[..., :half], split[..., half : 2 * half]
    turned = torch.cat(
        [a * t["rope_cos"] - b * t["rope_sin"], a * t["rope_sin"] + b * t["rope_cos"], split[..., 2 * half :]], -1
    )
    assert torch.allclose(turned, t["q_heads"], atol=1e-6)


def test_the_matrices_make_the_trace(session: Session) -> None:
    for model in ("lm", "example"):
        request = TRACE | {"model": model}
        t = session.answer("trace", request).tensors
        w = session.answer("weights", {"model": model, "layer": 0}).tensors
        q = torch.einsum("ne,ehd->nhd", t["x"], w["w_q"].float()) + w["b_q"].float()
        assert torch.allclose(q, t["q"], atol=1e-4)
        out = torch.einsum("nhv,hve->ne", t["transposed"], w["w_o"].float()) + w["b_o"].float()
        assert torch.allclose(out, t["output"], atol=1e-4)


MASKS = [
    ({"kind": "none"}, None),
    ({"kind": "causal"}, mh.Causal()),
    ({"kind": "causal", "window": 3}, mh.Causal(window=3)),
    ({"kind": "window", "left": 2, "right": 1}, mh.Window(2, 1)),
    ({"kind": "prefix", "n": 4}, mh.Prefix(4)),
    ({"kind": "padding", "length": 5}, mh.Padding([5])),
    ({"kind": "documents", "lengths": [5, 7]}, mh.Documents([5, 7])),
    ({"kind": "documents", "lengths": [5, 7], "causal": True}, mh.Documents([5, 7]) & mh.Causal()),
    ({"kind": "drawn", "rows": ["10" * 6] * 12}, mh.Allowed(torch.tensor([[True, False] * 6] * 12))),
]


@pytest.mark.parametrize(("said", "mask"), MASKS, ids=lambda v: str(v)[:40])
def test_every_mask_goes_through_the_whole_model(
    session: Session, lm: Any, tokens: torch.Tensor, said: dict, mask: Any
) -> None:
    answer = session.answer("trace", TRACE | {"layer": 1, "mask": said})
    wanted = lm.trace(tokens, 1, mask=mask)
    assert torch.equal(answer.tensors["weights"], wanted["weights"])
    assert answer.meta["mask"] == said
    predicted = session.answer("predict", {"model": "lm", "input": SENTENCE, "mask": said}).tensors["logits"]
    with torch.inference_mode():
        assert torch.allclose(predicted, lm(tokens, mask=mask)[0, -1], atol=1e-5)


def test_heads_are_what_the_finder_finds(session: Session, lm: Any, tokens: torch.Tensor) -> None:
    answer = session.answer("heads", {"model": "lm", "input": SENTENCE})
    lenses = lm.look(tokens)
    for row in answer.meta["heads"]:
        lens, h = lenses[row["layer"]], row["head"]
        assert row["induction"] == pytest.approx(float(finder.induction(lens, tokens[0])[0, h]), abs=1e-6)
        assert row["previous"] == pytest.approx(float(finder.previous_token(lens)[0, h]), abs=1e-6)
        assert row["first"] == pytest.approx(float(finder.first_token(lens)[0, h]), abs=1e-6)
        assert row["self"] == pytest.approx(float(lens.weights()[0, h].diagonal().mean()), abs=1e-6)
        assert row["entropy"] == pytest.approx(float(lens.entropy()[0, h].mean()), abs=1e-5)
        assert row["distance"] == pytest.approx(float(finder.distance(lens)[0, h]), abs=1e-5)
    maps = answer.tensors["maps"]
    assert maps.shape == (16, 12, 12)
    assert torch.allclose(maps[8 + 3].float(), lenses[1].weights()[0, 3], atol=1e-3)
    for layer, through in enumerate(answer.tensors["rollout"]):
        assert torch.allclose(through, finder.rollout(lenses[: layer + 1])[0], atol=1e-6)


def test_heads_of_a_picture(session: Session, vit: Any) -> None:
    answer = session.answer("heads", {"model": "vit", "input": BAG})
    assert len(answer.meta["heads"]) == 16
    assert {row["induction"] for row in answer.meta["heads"]} == {None}
    assert answer.meta["metrics"][-1]["unit"] == "patches"
    pixels = torch.as_tensor(session.answer("trace", {"model": "vit", "layer": 0, "input": BAG}).tensors["pixels"])
    wanted = np.eye(50)
    for layer, lens in enumerate(
        vit.look(pixels[None].float() / 255)
    ):  # plain: half stays, half moves by the mean head
        wanted = (0.5 * np.eye(50) + 0.5 * lens.weights()[0].double().numpy().mean(0)) @ wanted
        np.testing.assert_allclose(answer.tensors["rollout"][layer].numpy(), wanted, atol=1e-5)


def test_rollout_keeps_within_its_room(vit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lenses = vit.look(torch.rand(1, 28, 28))
    every = answers.rolled_out(lenses)
    assert every is not None
    assert every.shape == (4, 50, 50)
    monkeypatch.setattr(answers, "MOST_ROLLOUT", 3 * 4 * 50 * 50)
    last = answers.rolled_out(lenses)
    assert last is not None
    assert torch.equal(last, every[-1:])
    monkeypatch.setattr(answers, "MOST_ROLLOUT", 4 * 50 * 50 - 1)
    assert answers.rolled_out(lenses) is None


@pytest.mark.parametrize("with_", ["zero", "mean"])
def test_heads_switched_off_change_the_prediction_as_ablate_does(
    session: Session, lm: Any, tokens: torch.Tensor, with_: str
) -> None:
    off = {"off": [[0, 1], [0, 4], [1, 2]]} | ({} if with_ == "zero" else {"with": "mean"})
    request = {"model": "lm", "input": SENTENCE}
    before, after = (session.answer("predict", request | more).tensors["logits"] for more in ({}, off))
    with (
        torch.inference_mode(),
        mh.ablate(lm.layers[0].attention, [1, 4], with_),
        mh.ablate(lm.layers[1].attention, 2, with_),
    ):
        wanted = lm(tokens)[0, -1]
    assert torch.allclose(after, wanted, atol=1e-5)
    assert not torch.allclose(after, before, atol=1e-3)
    traced = session.answer("trace", TRACE | off | {"layer": 1})
    if with_ == "zero":
        assert not traced.tensors["heads"][2].any()
    assert torch.equal(session.answer("predict", request).tensors["logits"], before), "and nothing stays switched off"


def test_predictions_of_tokens_and_of_classes(session: Session, lm: Any, vit: Any, tokens: torch.Tensor) -> None:
    answer = session.answer("predict", {"model": "lm", "input": SENTENCE})
    with torch.inference_mode():
        logits = lm(tokens)[0]
    assert torch.allclose(answer.tensors["logits"], logits[-1], atol=1e-5)
    assert answer.meta["candidates"][0] == int(logits[-1].argmax())
    p = logits[:-1].softmax(-1)[torch.arange(11), tokens[0, 1:]]
    assert torch.allclose(answer.tensors["following"], p, atol=1e-6)
    classes = session.answer("predict", {"model": "vit", "input": BAG})
    best = classes.meta["labels"][classes.meta["candidates"][0]]["text"]
    assert best == vit.classify(mh.models.samples()["bag"])[0][0] == "bag"


@pytest.mark.parametrize("layer", [0, 1])
def test_one_token_after_a_cache_gives_the_row_of_the_whole(session: Session, layer: int) -> None:
    answer = session.answer("decode", TRACE | {"layer": layer})
    whole = session.answer("trace", TRACE | {"layer": layer}).tensors
    assert answer.meta["cached"] == 11
    assert torch.allclose(answer.tensors["weights"][:, 0], whole["weights"][:, -1], atol=1e-5)
    assert torch.allclose(answer.tensors["output"][0], whole["output"][-1], atol=1e-4)
    assert answer.tensors["k_heads"].shape == (8, 12, 32)
    assert max(answer.meta["difference"].values()) < 1e-4


def test_tokens_as_typed(session: Session) -> None:
    meta = session.answer("tokens", {"model": "lm", "text": TEXT}).meta
    assert [t["text"] for t in meta["tokens"]][:3] == ["‹start›", "I", "␣love"]
    assert session.answer("tokens", {"model": "lm", "text": ""}).meta["count"] == 1
    long = session.answer("tokens", {"model": "lm", "text": "word " * 500}).meta
    assert (long["cut"], len(long["tokens"])) == (True, 256)
    assert [t["text"] for t in session.answer("tokens", {"model": "example", "text": "two words"}).meta["tokens"]] == [
        "two",
        "words",
    ]


def test_a_token_taken_goes_on(session: Session) -> None:
    predicted = session.answer("predict", {"model": "lm", "input": SENTENCE}).meta
    ids = [t["id"] for t in predicted["tokens"]] + [predicted["candidates"][0]]
    longer = session.answer("trace", TRACE | {"input": {"kind": "tokens", "ids": ids}})
    assert longer.meta["tokens"][-1] == predicted["labels"][0]


def test_visible_text() -> None:
    assert visible(b"a b\n\t") == "a␣b⏎⇥"
    assert visible(b"\xe2\x98") == "⟨E2 98⟩"
    assert visible(b"a\xffb\x1b[0m") == "a⟨FF⟩b⟨U+001B⟩[0m"
    assert visible("\u00a0".encode()) == "⟨U+00A0⟩"
    assert bytes_of("<0xE2>", lambda: "?", False) == b"\xe2"
    assert bytes_of("Ġlove", lambda: "?", True) == b" love"


# Refusals --------------------------------------------------------------------------------------------------------------

BAD: list[tuple[str, Any, str]] = [
    ("paint", {}, "there is no 'paint'"),
    ("trace", {"model": "lm"}, "without 'layer'"),
    ("trace", TRACE | {"color": 1}, 'asked with "color"'),
    ("trace", TRACE | {"layer": 2}, "has layers 0…1"),
    ("trace", TRACE | {"layer": -1}, "layer=-1"),
    ("trace", TRACE | {"layer": 1.5}, "layer=1.5"),
    ("trace", TRACE | {"layer": True}, "layer=true"),
    ("trace", TRACE | {"layer": 10**30}, "expected an integer"),
    ("trace", TRACE | {"model": "gpt"}, "expected one of lm, vit, example"),
    ("trace", TRACE | {"model": 5}, "model is a number"),
    ("trace", TRACE | {"input": "text"}, "expected an object whose kind"),
    ("trace", TRACE | {"input": {"kind": "text"}}, "expected kind and text"),
    ("trace", TRACE | {"input": {"kind": "text", "text": 3}}, "text is a number"),
    ("trace", TRACE | {"input": BAG}, "Language model takes text or tokens"),
    ("trace", TRACE | {"input": {"kind": "given"}}, "takes text or tokens"),
    ("trace", TRACE | {"input": {"kind": "tokens", "ids": []}}, "expected a list of integers"),
    ("trace", TRACE | {"input": {"kind": "tokens", "ids": [4096]}}, "expected 0…4095"),
    ("trace", TRACE | {"mask": {"kind": "stripes"}}, "expected an object whose kind"),
    ("trace", TRACE | {"mask": {"kind": "window", "left": 1}}, "expected kind, left, right"),
    ("trace", TRACE | {"mask": {"kind": "causal", "window": 0}}, "window=0"),
    ("trace", TRACE | {"mask": {"kind": "padding", "length": 99}}, "at most 12"),
    ("trace", TRACE | {"mask": {"kind": "documents", "lengths": [3, 4]}}, "add up to 7: expected 12"),
    ("trace", TRACE | {"mask": {"kind": "drawn", "rows": ["1"]}}, "expected 12 of 12"),
    ("trace", TRACE | {"mask": {"kind": "drawn", "rows": ["1x"]}}, "texts of 0 and 1"),
    ("trace", TRACE | {"off": [[0]]}, "expected [layer, head]"),
    ("trace", TRACE | {"off": [[0, 8]]}, "it has heads 0…7"),
    ("trace", TRACE | {"off": [[7, 0]]}, "has layers 0…1"),
    ("trace", TRACE | {"off": [[0, 1], [0, 1]]}, "each once"),
    ("trace", TRACE | {"off": [[0, 1]], "with": "noise"}, "expected 'zero' or 'mean'"),
    ("decode", {"model": "vit", "layer": 0, "input": BAG}, "keeps no cache"),
    ("decode", TRACE | {"input": {"kind": "text", "text": ""}}, "at least two"),
    ("predict", {"model": "example", "input": SENTENCE}, "predicts nothing"),
    ("trace", {"model": "example", "layer": 0, "input": {"kind": "text", "text": " "}}, "expected 1 to 64"),
]  # fmt: skip


@pytest.mark.parametrize(("route", "given", "message"), BAD, ids=[b[2] for b in BAD])
def test_what_cannot_be_answered_is_refused_in_words(session: Session, route: str, given: Any, message: str) -> None:
    with pytest.raises(Refused) as refused:
        session.respond(route, given)
    assert message in str(refused.value)


@pytest.mark.parametrize("mask", [None, mh.Causal(), mh.Causal(window=3), mh.Window(1, 2), mh.Documents([2, 5])])
def test_a_mask_that_was_only_seen_is_said_again(mask: Any) -> None:
    allowed = torch.ones(7, 7, dtype=torch.bool) if mask is None else mask.dense(7, 7).expand(7, 7)
    said = said_of_seen(allowed)
    assert (said is None) == (mask is None)
    if said is not None:
        again = as_mask(said, 7)
        assert torch.equal(again.dense(7, 7).expand(7, 7), allowed)  # type: ignore[union-attr]
        assert (said["kind"] == "causal") == isinstance(mask, mh.Causal)


def test_every_route_is_known() -> None:
    for route in FIELDS:
        with pytest.raises(Refused):
            parse(route, [])
    assert as_mask(None, 4) == "own"


# Keeping and stopping --------------------------------------------------------------------------------------------------


def test_answers_are_kept_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    from multihead.explorer.packaged import Example

    session = Session([Example()])
    ask = [{"model": "example", "layer": 0, "input": {"kind": "text", "text": f"word {n}"}} for n in range(5)]
    size = len(session.respond("trace", ask[0]))
    assert session.kept("trace", ask[0]) is not None
    assert session.kept("trace", dict(reversed(ask[0].items()))) is not None, "the order of keys does not matter"
    monkeypatch.setattr(module, "KEPT_BYTES", int(2.5 * size))
    for request in ask:
        session.respond("trace", request)
    assert [session.kept("trace", request) is not None for request in ask] == [False, False, False, True, True]
    assert key("a", {"b": "é", "a": [1]}) == 'a {"a":[1],"b":"é"}'


def test_work_that_nobody_waits_for_stops(session: Session) -> None:
    stop = Stop()
    stop.set()
    with pytest.raises(Stopped):
        session.respond("trace", TRACE | {"input": {"kind": "text", "text": "nobody waits"}}, stop)
    with pytest.raises(Refused, match="more than 0 s"):
        session.respond("trace", TRACE | {"input": {"kind": "text", "text": "nobody waits"}}, Stop(0.0))
    assert session.respond("trace", TRACE | {"input": {"kind": "text", "text": "nobody waits"}})


def test_work_stops_between_layers(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, subject, began = Stop(), session.subjects["lm"], []
    first, second = subject.parts()
    hook = first.register_forward_hook(lambda *_: (began.append(1), stop.set())[0])
    try:
        with pytest.raises(Stopped):
            session.respond("predict", {"model": "lm", "input": {"kind": "text", "text": "left in the middle"}}, stop)
    finally:
        hook.remove()
    assert began == [1]
    assert not first._forward_pre_hooks
    assert not second._forward_pre_hooks


def test_many_threads_get_each_their_own_answer(session: Session) -> None:
    found: dict[int, int] = {}

    def ask(n: int) -> None:
        request = {"model": "lm", "input": {"kind": "text", "text": f"{n}"}, "off": [[0, n % 8]]}
        found[n] = len(session.answer("heads", request).meta["heads"])

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(16), 16)

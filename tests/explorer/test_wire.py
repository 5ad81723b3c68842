"""The wire format: what is sent arrives, aligned, to the last bit; what is damaged is refused."""

import json
import struct

import pytest
import torch

from multihead.explorer.wire import Answer, narrow, shortened

TENSORS = {
    "odd": torch.arange(3, dtype=torch.uint8),  # 3 bytes: the next one must be moved to a multiple of 8
    "q": torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)),
    "masked": torch.tensor([1.0, -torch.inf, torch.inf, torch.nan]),
    "half": torch.randn(7, generator=torch.Generator().manual_seed(1)).half(),
    "allowed": torch.tensor([[True, False], [True, True]]),
    "ids": torch.tensor([1, -2, 3], dtype=torch.int32),
    "none": torch.empty(0, 4),
    "single": torch.tensor(2.5),
}


def test_every_dtype_arrives_to_the_last_bit() -> None:
    again = Answer.from_bytes(Answer({"words": "½ “é” \u2028"}, TENSORS).to_bytes())
    assert again.meta == {"words": "½ “é” \u2028"}
    assert list(again.tensors) == list(TENSORS)
    for name, t in TENSORS.items():
        assert again.tensors[name].dtype == t.dtype, name
        assert again.tensors[name].shape == t.shape, name
        assert torch.equal(again.tensors[name].nan_to_num(7), t.nan_to_num(7)), name


def test_the_layout_is_the_documented_one() -> None:
    data = Answer({"a": 1}, TENSORS).to_bytes()
    assert data[:4] == b"MHT1"
    (length,) = struct.unpack("<I", data[4:8])
    assert (8 + length) % 8 == 0
    header = json.loads(data[8 : 8 + length])
    assert header["meta"] == {"a": 1}
    for name, place in header["tensors"].items():
        assert place["offset"] % 8 == 0, name
    at = 8 + length + header["tensors"]["q"]["offset"]
    assert struct.unpack("<f", data[at : at + 4])[0] == float(TENSORS["q"].flatten()[0])
    assert len(data) % 8 == 0


def test_other_dtypes_and_strides_become_those_of_the_page() -> None:
    sent = {
        "a": torch.arange(6, dtype=torch.float64).view(2, 3).T,
        "b": torch.tensor([5]),
        "c": torch.ones(2).bfloat16(),
    }
    got = Answer.from_bytes(Answer({}, sent).to_bytes()).tensors
    assert got["a"].dtype == torch.float32
    assert torch.equal(got["a"], sent["a"].float())
    assert got["b"].dtype == torch.int32
    assert got["c"].dtype == torch.float32


def test_json_without_nan_and_text_without_half_characters() -> None:
    with pytest.raises(ValueError, match="JSON"):
        Answer({"p": float("nan")}).to_bytes()
    assert Answer.from_bytes(Answer({"text": "a\ud83d"}).to_bytes()).meta == {"text": "a?"}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: b"GIF8" + d[4:], "starts with"),
        (lambda d: d[:6], "starts with"),
        (lambda d: d[:20], "the header ends at"),
        (lambda d: d[:-16], "ends beyond the data"),
    ],
)
def test_what_is_damaged_is_refused(damage, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Answer.from_bytes(damage(Answer({}, {"q": torch.ones(4, 4)}).to_bytes()))


def test_narrow_only_where_nothing_is_lost() -> None:
    exact, other = torch.tensor([0.5, -2.0, 1024.0]), torch.tensor([0.1])
    assert narrow(exact).dtype == torch.float16
    assert narrow(other).dtype == torch.float32
    assert narrow(torch.tensor([1e6])).dtype == torch.float32


def test_shortened_keeps_what_is_not_finite() -> None:
    t = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, torch.finfo(torch.float32).max, 1.0])
    again = shortened(t)
    assert torch.equal(again.isnan(), t.isnan())
    assert torch.equal(again.nan_to_num(), t.nan_to_num())

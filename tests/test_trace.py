"""Traces: the names and shapes of the design, what they print, and what they refuse."""

import io
import re

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

import multihead as mh
from multihead import draw, steps
from multihead.layer.call import Inside

WORDS = ["I", "love", "pepperoni", "pizza"]


@pytest.fixture(scope="module")
def running_example() -> mh.Trace:
    torch.manual_seed(0)
    layer = mh.MultiHeadAttention(1024, heads=8)
    return mh.trace(layer, torch.randn(4, 1024), mask=mh.Causal(), labels=WORDS)


def test_the_running_example_has_the_shapes_of_the_design(running_example: mh.Trace) -> None:
    assert {name: tuple(t.shape) for name, t in running_example.items()} == {
        "x": (4, 1024), "q": (4, 8, 128), "k": (4, 8, 128), "v": (4, 8, 128),
        "q_heads": (8, 4, 128), "k_heads": (8, 4, 128), "v_heads": (8, 4, 128),
        "scores": (8, 4, 4), "masked": (8, 4, 4), "weights": (8, 4, 4),
        "heads": (8, 4, 128), "transposed": (4, 8, 128), "merged": (4, 1024), "output": (4, 1024),
    }  # fmt: skip


def test_the_seven_steps_name_everything_once(running_example: mh.Trace) -> None:
    assert [step.number for step in running_example.steps] == [1, 2, 3, 4, 5, 6, 7]
    assert [name for step in running_example.steps for name in step.names] == [n for n in running_example if n != "x"]


def test_each_intermediate_follows_from_the_one_before() -> None:
    layer = mh.MultiHeadAttention(16, heads=4, kv_heads=2, rope=True, qk_norm=True, softcap=3.0, dtype=torch.float64)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    t = mh.trace(layer, x, mask=mh.Causal())

    def same(name: str, wanted: torch.Tensor) -> None:
        torch.testing.assert_close(t[name], wanted, msg=lambda m: f"{name}: {m}")

    same("q", torch.einsum("bne,ehd->bnhd", x, layer.w_q) + layer.q_proj.bias.view(4, 4))
    same("q_heads", layer.rope.rotate(layer.q_norm(t["q"].transpose(1, 2)), torch.arange(5)))  # after norm and RoPE
    same("v_heads", t["v"].transpose(1, 2))
    same("scores", torch.einsum("bhqd,bhkd->bhqk", t["q_heads"], steps.repeat_heads(t["k_heads"], 4)) * 4**-0.5)
    same("masked", (3 * torch.tanh(t["scores"] / 3)).masked_fill(~mh.Causal().dense(5, 5), -torch.inf))
    same("weights", t["masked"].softmax(-1))
    same("heads", t["weights"] @ steps.repeat_heads(t["v_heads"], 4))
    same("transposed", t["heads"].transpose(1, 2))
    same("merged", t["transposed"].flatten(2))
    same("output", layer.o_proj(t["merged"]))


def test_a_trace_is_detached_and_leaves_nothing_behind() -> None:
    layer = mh.MultiHeadAttention(12, heads=4)
    t = mh.trace(layer, torch.randn(5, 12, requires_grad=True))
    assert not any(tensor.requires_grad for tensor in t.values())
    assert layer.taps == ()
    assert layer.inside is Inside.NOTHING
    with pytest.raises(ValueError, match="E=12"):
        mh.trace(layer, torch.randn(5, 13))
    assert layer.taps == ()


def test_cross_attention_and_caches_are_traced() -> None:
    layer = mh.MultiHeadAttention(12, heads=4)
    cross = mh.trace(layer, torch.randn(3, 12), torch.randn(5, 12), key_labels=list("abcde"))
    assert cross["weights"].shape == (4, 3, 5)
    assert "context" in cross
    cache = layer.new_cache()
    layer(torch.randn(1, 4, 12), cache=cache)
    step = mh.trace(layer, torch.randn(1, 1, 12), mask=mh.Causal(), cache=cache)
    assert step["weights"].shape == (1, 4, 1, 5)
    assert (step["k"].shape, step["k_heads"].shape) == ((1, 1, 4, 3), (1, 4, 5, 3))
    once = mh.trace(layer, torch.randn(1, 2, 12), cache=layer.new_cache(context=torch.randn(1, 6, 12)))
    assert "k" not in once
    assert "2 items" in str(once)


def test_printing_shows_every_step(running_example: mh.Trace) -> None:
    text = str(running_example)
    for step in running_example.steps:
        assert f"{step.number} {step.title}" in text
        assert step.formula in text
    assert "q          (4, 1024) → (4, 8, 128)" in text
    assert re.search(r"pepperoni +■ ■ ■ ·", text)
    assert all(f"head {h}" in text for h in range(8))
    assert "“I love pepperoni”" in text


def test_the_heat_maps_are_readable_without_colour(running_example: mh.Trace) -> None:
    """Each row's percentages stand in the text, and add up to 100 but for rounding."""
    rows = re.findall(r"pizza +(\d+) +(\d+) +(\d+) +(\d+)", str(running_example))
    assert len(rows) == 8
    assert len(re.findall(r"love +\d+ +\d+ +· +·", str(running_example))) == 8, "what is hidden is no percentage"
    for h, row in enumerate(rows):
        wanted = (running_example["weights"][h, 3] * 100).round().int().tolist()
        assert sorted([list(map(int, r)) for r in rows]).count(wanted) >= 1, f"head {h}"
        assert abs(sum(map(int, row)) - 100) <= 2


def test_the_columns_of_a_heat_map_say_which_key_they_are(running_example: mh.Trace) -> None:
    text = str(running_example)
    heading = next(line for line in text.splitlines() if "pepp…" in line)
    row = next(line for line in text[text.index(heading) :].splitlines() if line.strip().startswith("pizza"))
    ends = [match.end() for match in re.finditer(r"\d+", row)]
    assert [match.end() for match in re.finditer(r"\S+", heading)] == ends, "a name ends where its numbers end"
    many = str(mh.trace(mh.MultiHeadAttention(8, heads=1), torch.randn(9, 8), labels=[f"ab{n}" for n in range(9)]))
    lines = many.splitlines()
    first = lines.index(next(line for line in lines if line.strip() == "head 0"))
    columns = [line.split() for line in lines[first + 1 : first + 4]]
    assert columns == [["a"] * 9, ["b"] * 9, [str(n) for n in range(9)]]


WIDE = ["漢字", "👍", "a\nb", "日本語の長い単語です", "e\u0301tude", "plain", "7", "8", "9"]


def test_wide_characters_and_line_breaks_keep_their_columns() -> None:
    text = str(mh.trace(mh.MultiHeadAttention(8, heads=1), torch.randn(9, 8), mask=mh.Causal(), labels=WIDE))
    squares = [line for line in text.splitlines() if "■" in line and "may attend" not in line]
    assert len({cell_len(line[: line.index("■")]) for line in squares}) == 1
    assert len(squares) == 9
    assert "a⏎b" in text
    for percent, headings in ((True, 1), (False, 5)):
        seen = torch.zeros(9, 9, dtype=torch.bool)
        lines = draw.heat_map("head 0", WIDE, WIDE, torch.rand(9, 9), seen, percent).plain.splitlines()
        assert len({cell_len(line) for line in lines[1 + headings :]}) == 1
        assert len(lines) == 1 + headings + 9
        assert cell_len(lines[headings]) <= cell_len(lines[-1])


def test_a_terminal_gets_colour(running_example: mh.Trace) -> None:
    console = Console(force_terminal=True, color_system="truecolor", width=120, file=io.StringIO())
    console.print(running_example)
    assert "48;2;" in console.file.getvalue()  # a background in 24-bit colour


@pytest.mark.parametrize("N", [1, 9, 40])
def test_any_number_of_items_prints(N: int) -> None:
    text = str(mh.trace(mh.MultiHeadAttention(40, heads=20), torch.randn(N, 40)))
    assert "no mask: every item sees every item" in text
    if N > 16:
        assert "the first 16 of 20 heads, the first 16 of 40 items" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_row_that_sees_nothing_prints() -> None:
    text = str(mh.trace(mh.MultiHeadAttention(8, heads=2), torch.randn(3, 8), mask=torch.zeros(3, 3, dtype=torch.bool)))
    assert "· · ·" in text


def test_wrong_labels_and_names_are_refused(running_example: mh.Trace) -> None:
    layer = mh.MultiHeadAttention(8, heads=2)
    with pytest.raises(ValueError, match="labels has 2 names: expected 3, one for each row"):
        mh.trace(layer, torch.randn(3, 8), labels=["a", "b"])
    with pytest.raises(KeyError, match="'attention': this trace has x, q, k, v"):
        running_example["attention"]
    assert "weights (8, 4, 4)" in repr(running_example)

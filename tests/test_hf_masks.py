"""Masks of Hugging Face models are intervals, and those of transformers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import masking_utils

import multihead as mh
import multihead.hf
from multihead.hf.interface import attention
from multihead.hf.masks import IntervalMask, mask
from multihead.masks.intervals import Visible
from tests.hf_architectures import ARCHITECTURES, tokens
from tests.hf_running import generate, llama, padding

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # transformers', in GPT-BigCode
    pytest.mark.usefixtures("quiet_and_on_one_thread"),
]


def left_padding() -> Tensor:
    return torch.tensor([0, 3])


FUNCTIONS = {
    "causal": masking_utils.causal_mask_function,
    "bidirectional": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(3),
    "window both ways": masking_utils.sliding_window_bidirectional_mask_function(2),
    "chunks": masking_utils.chunked_causal_mask_function(4, left_padding()),
    "packed": masking_utils.and_masks(
        masking_utils.causal_mask_function,
        masking_utils.packed_sequence_mask_function(torch.tensor([[0] * 4 + [1] * 6 + [2] * 3, [0] * 13])),
    ),
    "blocks": masking_utils.or_masks(
        masking_utils.sliding_window_causal_mask_function(3),
        masking_utils.blockwise_overlay(torch.tensor([[-1, 0, 0, 0, 0, -1, -1, 1, 1, 1, 1, 1, -1], [-1] * 13])),
    ),
}
PADDINGS = {
    "none": None,
    "full": torch.ones(2, 13, dtype=torch.bool),
    "left": torch.arange(13) >= torch.tensor([[0], [3]]),
    "right": torch.arange(13) < torch.tensor([[13], [7]]),
    "all of a row": torch.arange(13) < torch.tensor([[13], [0]]),
    "shorter than the cache": torch.ones(2, 8, dtype=torch.bool),
}


@pytest.mark.parametrize("real", PADDINGS.values(), ids=PADDINGS)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize(
    ("Q", "q_offset", "K", "kv_offset"), [(13, 0, 13, 0), (5, 8, 13, 0), (1, 12, 13, 0), (3, 7, 6, 4), (5, 0, 13, 0)]
)
def test_masks_are_intervals_and_those_of_transformers(
    function: Any, real: Any, Q: int, q_offset: int, K: int, kv_offset: int
) -> None:
    given = {"batch_size": 2, "q_length": Q, "kv_length": K, "q_offset": q_offset, "kv_offset": kv_offset}
    ours = mask(**given, mask_function=function, attention_mask=real)
    theirs = masking_utils.sdpa_mask(
        **given,
        mask_function=function,
        attention_mask=real,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
    )
    assert isinstance(ours, IntervalMask)
    assert ours.visible.dense is None
    assert torch.equal(ours.clone(), theirs)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize(("Q", "q_offset"), [(13, 0), (3, 7), (1, 9), (5, 0)])
def test_intervals_give_what_their_dense_mask_gives(function: Any, Q: int, q_offset: int) -> None:
    """Keys that no query sees, at either end, are left out before the kernel: the bounds and the bias move along."""
    q, k, v = torch.randn(2, 4, Q, 8), torch.randn(2, 2, 13, 8), torch.randn(2, 2, 13, 6)
    intervals = mask(2, Q, 13, q_offset=q_offset, mask_function=function)
    for bias in (None, torch.randn(1, 4, Q, 13)):
        found, expected = (
            attention(nn.Module(), q, k, v, given, position_bias=bias, output_attentions=True)
            for given in (intervals, intervals.clone())
        )
        torch.testing.assert_close(found, expected)


def test_holes_in_the_padding_cost_one_row() -> None:
    real = torch.tensor([[True, False, True, True], [True] * 4])
    ours = mask(2, 4, 4, attention_mask=real)
    assert isinstance(ours, IntervalMask)
    assert ours.visible.dense.shape == (2, 1, 1, 4)
    theirs = masking_utils.sdpa_mask(2, 4, 4, attention_mask=real, allow_is_causal_skip=False)
    assert torch.equal(ours.clone(), theirs)


def test_a_function_that_is_not_known_is_evaluated() -> None:
    same_parity = masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: (q + k) % 2 == 0)
    scattered = masking_utils.and_masks(
        masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(torch.tensor([[0, 1, 0, 1, 0]]))
    )
    for function in (same_parity, scattered):
        ours = mask(1, 5, 5, mask_function=function)
        assert type(ours) is Tensor
        assert torch.equal(ours, masking_utils.sdpa_mask(1, 5, 5, mask_function=function, allow_is_causal_skip=False))


def test_an_interval_mask_passes_for_its_tensor() -> None:
    ours, dense = mask(2, 3, 5, q_offset=2), torch.ones(3, 5, dtype=torch.bool).tril(2).expand(2, 1, 3, 5)
    assert ours.shape == (2, 1, 3, 5)
    assert ours.dtype == torch.bool
    assert torch.equal(ours[:, :, :, :4], dense[..., :4])
    assert torch.equal(torch.where(ours, 0.0, -1.0), torch.where(dense, 0.0, -1.0))
    assert torch.equal(~ours, ~dense)
    assert isinstance(ours.detach(), IntervalMask)
    with pytest.raises(NotImplementedError, match="clone"):
        ours.fill_(True)


@pytest.mark.parametrize(
    "model",
    [
        "MistralForCausalLM",
        "BertModel",
        "T5ForConditionalGeneration",
        "PaliGemmaForConditionalGeneration",
        "Gemma3ForConditionalGeneration",
        "Llama4ForCausalLM",
        "GPT2LMHeadModel",
    ],
)
def test_no_dense_mask_reaches_the_kernel(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: IntervalMask) -> Tensor:
        raise AssertionError("a mask was made dense")

    monkeypatch.setattr(IntervalMask, "dense", refuse)
    architecture = next(a for a in ARCHITECTURES if a.model == model)
    built, inputs = architecture.build(), architecture.inputs()
    with torch.no_grad(), mh.hf.watch(built) as seen:
        built(**inputs, attention_mask=padding(inputs["input_ids"].shape[1], "left"))
    assert all(lens._call.visible.dense is None for lens in seen.values())


def test_no_dense_mask_in_a_static_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither prefill nor decode sees the empty part of the cache, so both need no mask but a causal one."""
    notes = []

    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Visible, **given: Any) -> Any:
        notes.append("causal" if seen.is_square_causal else "everything" if seen.is_everything else str(seen))
        return mh.attend(q, k, v, seen, **given)

    monkeypatch.setattr("multihead.hf.interface.attend", attend)
    generate(llama(), {"input_ids": tokens(1, 5)}, cache_implementation="static")
    assert notes == ["causal"] * 2 + ["everything"] * 12

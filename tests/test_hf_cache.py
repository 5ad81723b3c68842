"""The cache that grows in place holds what transformers' DynamicCache holds, whatever is done to it, and does not copy."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig, MistralConfig

import multihead as mh
import multihead.hf
from multihead.hf.cache import GrowingCache, GrowingLayer, GrowingSlidingLayer, grow, kept
from tests.hf_architectures import ARCHITECTURES, GROUPED

FULL = LlamaConfig(**GROUPED)
SLIDING = MistralConfig(**{**GROUPED, "sliding_window": 5})
LAYERS = 2


def states(batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 2, tokens, 8), torch.randn(batch, 2, tokens, 6)


def assert_same(ours: DynamicCache, theirs: DynamicCache) -> None:
    for number, (mine, other) in enumerate(zip(ours.layers, theirs.layers, strict=True)):
        assert ours.get_seq_length(number) == theirs.get_seq_length(number)
        assert ours.get_mask_sizes(3, number) == theirs.get_mask_sizes(3, number)
        if other.get_seq_length():
            assert torch.equal(mine.keys, other.keys)
            assert torch.equal(mine.values, other.values)


class Both:
    """Every deed is done to our cache and to transformers'."""

    def __init__(self, config: Any) -> None:
        self.ours, self.theirs = GrowingCache(config=config), DynamicCache(config=config)
        self.batch = 3

    def update(self, tokens: int) -> None:
        for layer in range(LAYERS):
            new = states(self.batch, tokens)
            for mine, other in zip(self.ours.update(*new, layer), self.theirs.update(*new, layer), strict=True):
                assert torch.equal(mine, other)

    def each(self, deed: Callable[[DynamicCache], Any]) -> None:
        deed(self.ours)
        deed(self.theirs)


@pytest.mark.parametrize("config", [FULL, SLIDING], ids=["full", "sliding"])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_done_to_it(config: Any, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    with torch.no_grad():
        both = Both(config)
        both.update(number(1, 9))
        for _ in range(60):
            beams = torch.randint(both.batch, (both.batch,), generator=draw)
            match number(0, 12):
                case 0 | 1 | 2 | 3 | 4 | 5 | 6:
                    both.update(number(1, 4))
                case 7:
                    both.update(number(5, 140))
                case 8:
                    both.each(lambda cache, beams=beams: cache.reorder_cache(beams))
                case 9 if both.batch < 5:
                    both.each(lambda cache: cache.batch_repeat_interleave(2))
                    both.batch *= 2
                case 10:
                    both.batch = min(both.batch, 3)
                    both.each(lambda cache: cache.batch_select_indices(torch.arange(both.batch)))
                case 11 if config is FULL:
                    some = -number(0, both.ours.get_seq_length())
                    both.each(lambda cache, some=some: cache.crop(some))
            assert_same(both.ours, both.theirs)
        both.ours, both.theirs = copy.deepcopy((both.ours, both.theirs))
        both.update(3)
        assert_same(both.ours, both.theirs)
        both.each(lambda cache: cache.reset())
        both.update(2)
        assert_same(both.ours, both.theirs)


def test_a_past_that_is_recorded_can_be_rolled_back() -> None:
    with torch.no_grad():
        both = Both(SLIDING)
        both.update(7)
        both.each(lambda cache: cache.activate_past_recording())
        for tokens, removed in ((4, -2), (1, 0), (6, -5), (1, -1)):
            both.update(tokens)
            both.each(lambda cache, removed=removed: cache.crop(removed))
            assert_same(both.ours, both.theirs)


def places(cache: DynamicCache, steps: int) -> list[int]:
    """Where the keys of layer 0 lie, one entry for each time they moved."""
    found: list[int] = []
    for _ in range(steps):
        for layer in range(LAYERS):
            cache.update(*states(1, 1), layer)
        at = cache.layers[0].keys.untyped_storage().data_ptr()
        if not found or at != found[-1]:
            found.append(at)
    return found


@torch.no_grad()
def test_tokens_are_not_copied_one_by_one() -> None:
    assert len(places(GrowingCache(config=FULL), 2000)) <= 10  # 64 tokens, and half as many again each time
    window = MistralConfig(**{**GROUPED, "sliding_window": 100})
    assert len(places(GrowingCache(config=window), 2000)) <= 2 + 2000 // 99
    assert len(places(DynamicCache(config=FULL), 50)) > 40  # what this looks for


@torch.no_grad()
def test_the_room_is_at_most_half_as_much_again() -> None:
    cache = GrowingCache(config=FULL)
    for _ in range(500):
        cache.update(*states(2, 1), 0)
        layer = cache.layers[0]
        assert layer.room[0].shape[2] <= max(64, 1.5 * layer.get_seq_length() + 1)


def test_with_gradients_it_copies() -> None:
    """A backward pass needs the keys as they were."""
    grown = []
    for cache in (GrowingCache(config=FULL), DynamicCache(config=FULL)):
        torch.manual_seed(1)
        first, second = (tuple(t.requires_grad_() for t in states(1, 3)) for _ in range(2))
        q = torch.randn(1, 2, 3, 8, requires_grad=True)
        total = torch.tensor(0.0)
        for new in (first, second):
            keys, values = cache.update(*new, 0)
            total = total + ((q @ keys.mT).softmax(-1) @ values).square().sum()
        grown.append(torch.autograd.grad(total, (q, *first, *second)))
    for mine, other in zip(*grown, strict=True):
        torch.testing.assert_close(mine, other)


def test_inference_mode_may_end() -> None:
    both = Both(FULL)
    with torch.inference_mode():
        both.update(3)
    with torch.no_grad():
        both.update(2)
        both.each(lambda cache: cache.reorder_cache(torch.tensor([2, 1, 1])))
    assert_same(both.ours, both.theirs)


@torch.no_grad()
def test_tensors_that_others_put_in_place_are_taken_over() -> None:
    both = Both(FULL)
    both.update(4)

    def halve(cache: DynamicCache) -> None:
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, ::2] * 2, layer.values[:, :, ::2]

    both.each(halve)
    both.update(1)
    assert_same(both.ours, both.theirs)


@torch.no_grad()
def test_a_shallow_copy_grows_by_itself() -> None:
    layer = GrowingLayer()
    layer.update(*states(1, 3))
    other = copy.copy(layer)
    a, b = states(1, 1), states(1, 1)
    layer.update(*a)
    other.update(*b)
    assert torch.equal(layer.keys[:, :, 3:], a[0])
    assert torch.equal(other.keys[:, :, 3:], b[0])
    assert torch.equal(layer.keys[:, :, :3], other.keys[:, :, :3])


def update_and_fail(cache: DynamicCache, tokens: int) -> None:
    cache.update(*states(3, tokens), 0)
    raise KeyboardInterrupt


@torch.no_grad()
@pytest.mark.parametrize("config", [FULL, SLIDING], ids=["full", "sliding"])
def test_what_fails_leaves_it_as_it_was(config: Any) -> None:
    both = Both(config)
    both.update(7)
    for tokens in (1, 100, 3):
        with pytest.raises(KeyboardInterrupt), kept(both.ours):
            update_and_fail(both.ours, tokens)
        assert_same(both.ours, both.theirs)
        both.update(tokens)
        assert_same(both.ours, both.theirs)


@torch.no_grad()
def test_what_does_not_fit_is_an_error_and_nothing_is_lost() -> None:
    both = Both(FULL)
    both.update(7)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        both.ours.update(*states(4, 1), 0)
    assert_same(both.ours, both.theirs)
    both.update(1)
    assert_same(both.ours, both.theirs)


def test_one_for_each_model() -> None:
    llama = mh.hf.cache(FULL)
    assert isinstance(llama, DynamicCache)
    assert {type(layer) for layer in llama.layers} == {GrowingLayer}
    mixed = next(a for a in ARCHITECTURES if a.model == "Gemma3ForCausalLM").build()
    assert [type(layer) for layer in mh.hf.cache(mixed).layers] == [GrowingSlidingLayer, GrowingLayer]
    speech = next(a for a in ARCHITECTURES if a.model.startswith("Whisper")).build()
    both = mh.hf.cache(speech)
    assert isinstance(both, EncoderDecoderCache)
    assert isinstance(both.self_attention_cache, GrowingCache)
    with pytest.raises(TypeError, match="model=int: expected a Hugging Face model"):
        mh.hf.cache(3)  # type: ignore[arg-type]


@torch.no_grad()
def test_a_cache_that_is_there_grows_from_now_on() -> None:
    lazily, theirs = DynamicCache(), DynamicCache()
    for cache in (lazily, theirs):
        torch.manual_seed(2)
        cache.update(*states(1, 4), 0)
    grow(lazily)
    for cache in (lazily, theirs):
        torch.manual_seed(3)
        cache.update(*states(1, 1), 0)
        cache.update(*states(1, 5), 1)
    assert {type(layer) for layer in lazily.layers} == {GrowingLayer}
    assert_same(lazily, theirs)

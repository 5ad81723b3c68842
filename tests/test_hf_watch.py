"""Hugging Face models are watched and changed while they run."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
import multihead.hf
from tests.hf_architectures import tokens
from tests.hf_running import generate, gpt2, llama, logits

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # transformers', in GPT-BigCode
    pytest.mark.usefixtures("quiet_and_on_one_thread"),
]


def test_watch_chosen_layers_and_heads() -> None:
    model, ids = llama(kind="GptOss", num_local_experts=4, num_experts_per_tok=2), tokens(2, 9)
    with torch.no_grad(), mh.hf.watch(model) as every:
        output = model(ids, output_attentions=True)
    with torch.no_grad(), mh.hf.watch(model, layers=-1, heads=[3, 1]) as seen:
        model(ids)
    assert list(seen) == [1]
    torch.testing.assert_close(seen[1].weights(), output.attentions[1][:, [3, 1]])
    torch.testing.assert_close(every[0].weights(), output.attentions[0])
    assert seen["model.layers.1.self_attn"] is seen[1]
    with pytest.raises(KeyError, match="layer 0 was not called"):
        seen[0]
    with pytest.raises(ValueError, match="heads=\\[4\\]: expected head numbers 0…3"), mh.hf.watch(model, heads=4):
        model(ids)


def test_watch_does_not_change_the_output_and_ends_with_the_block() -> None:
    model, ids = gpt2(), tokens(2, 9)
    plain = logits(model, ids)
    with mh.hf.watch(model) as seen:
        assert torch.equal(logits(model, ids), plain)
    before = seen[0]
    logits(model, ids[:, :3])
    assert seen[0] is before
    assert not any("multihead" in name for m in model.modules() for name in vars(m))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_watch_generate(cache: str) -> None:
    """The latest call is the newest token's, and a cache that is used again does not change what was seen."""
    model, ids = gpt2(), tokens(1, 5)
    with mh.hf.watch(model) as seen:
        written = generate(model, {"input_ids": ids}, cache_implementation=cache)
    kept = seen[1].rows(-1)
    with torch.no_grad(), mh.hf.watch(model) as again:
        model(written[:, :-1])
    torch.testing.assert_close(kept[..., : written.shape[1] - 1], again[1].rows(-1))
    assert kept[..., written.shape[1] - 1 :].abs().sum() == 0
    generate(model, {"input_ids": tokens(1, 6)}, cache_implementation=cache)
    assert torch.equal(seen[1].rows(-1), kept)


def by_hand(model: nn.Module, ids: Tensor, layer: int, heads: list[int]) -> Tensor:
    """The heads' part of the input of the output projection put to zero by a hook."""

    def hook(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        merged = args[0].unflatten(-1, (4, -1)).clone()
        merged[..., heads, :] = 0
        return (merged.flatten(-2),)

    handle = model.transformer.h[layer].attn.c_proj.register_forward_pre_hook(hook)
    out = logits(model, ids)
    handle.remove()
    return out


def test_ablate_heads() -> None:
    model, ids = gpt2(), tokens(2, 9)
    plain, expected = logits(model, ids), by_hand(model, ids, 1, [0, 2])
    with mh.hf.ablate(model, {1: [0, 2]}):
        torch.testing.assert_close(logits(model, ids), expected)
    with mh.hf.ablate(model, {"transformer.h.1.attn": [0, 2]}, with_=torch.zeros(())):
        torch.testing.assert_close(logits(model, ids), expected)
    with mh.hf.ablate(model, {0: 1, 1: [3]}, with_="mean"):
        assert not torch.allclose(logits(model, ids), plain)
    assert torch.equal(logits(model, ids), plain)


def test_heads_without_their_layer_are_refused_in_words() -> None:
    with (
        pytest.raises(TypeError, match=r"heads is a list: expected the heads of each layer, \{layer: \[head, …\]\}"),
        mh.hf.ablate(torch.nn.Identity(), [0, 1]),
    ):
        pass
    with pytest.raises(TypeError, match="model=int: expected a Hugging Face model"), mh.hf.watch(3):  # type: ignore[arg-type]
        pass


def test_ablate_in_generate() -> None:
    """Token by token with a cache, as all at once."""
    model, ids = gpt2(), tokens(1, 5)
    plain = logits(model, generate(model, {"input_ids": ids})[:, :-1])
    for cache in ("dynamic", "static"):
        with mh.hf.ablate(model, {0: range(4), 1: range(3)}):
            written = generate(model, {"input_ids": ids}, cache_implementation=cache)
            at_once = logits(model, written[:, :-1])
        assert torch.equal(written[:, 5:], at_once[:, 4:, 1:].argmax(-1) + 1)  # padding is never written
        assert not torch.allclose(at_once, plain)


def test_patch_what_heads_put_out() -> None:
    model, ids = gpt2(), tokens(2, 9)
    seen = []
    with mh.hf.patch(model, 1, lambda heads: seen.append(heads) or heads * 0):
        found = logits(model, ids)
    assert seen[0].shape == (2, 4, 9, 8)
    torch.testing.assert_close(found, by_hand(model, ids, 1, [0, 1, 2, 3]))
    with pytest.raises(ValueError, match="the patch of layer 1 gave"), mh.hf.patch(model, 1, lambda heads: heads[0]):
        model(ids)


def test_errors_name_the_layer_and_the_implementation() -> None:
    model = gpt2()
    with pytest.raises(ValueError, match="layer=2: expected 0…1"), mh.hf.ablate(model, {2: 0}):
        pass
    with pytest.raises(ValueError, match="heads=\\[7\\]: expected head numbers 0…3"), mh.hf.ablate(model, {0: 7}):
        model(tokens(1, 3))
    model.set_attn_implementation("eager")
    with (
        pytest.raises(ValueError, match=r"transformer.h.0.attn runs on 'eager' attention: call model.set_attn_impl"),
        mh.hf.watch(model),
    ):
        pass


def test_a_long_input_costs_little_to_watch() -> None:
    """No (Q, K) matrix is made unless it is asked for: 2 GB here."""
    model = llama(max_position_embeddings=8192, num_hidden_layers=1)
    largest = [0]

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest[0] = max(largest[0], result.numel())
            return result

    with torch.no_grad(), Watch(), mh.hf.watch(model) as seen:
        model.model(tokens(1, 4096))
    assert seen[0].rows(-1).shape == (1, 4, 1, 4096)
    assert largest[0] <= 4096 * 64

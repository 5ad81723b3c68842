"""A key/value cache for transformers that grows in place: room for tokens to come, where `DynamicCache` copies.

A layer keeps its tokens at the front of two tensors (B, G, room, D) with room for more; what it hands out are views of
them. A token is written behind the others, and only when the room is used up all are copied, into half as much again.
What is behind a view is never changed by a later token but after `crop`, so that going back to how a layer was before
a call, as `kept` does, is a matter of taking the views that it had.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

LEAST_ROOM = 64  # tokens


class _InPlace:
    """What both layers share: tensors with room, and the part of them that is handed out."""

    keys: Tensor | None
    values: Tensor | None
    room: tuple[Tensor, Tensor] | None = None  # (B, G, room, D) and (B, G, room, V)
    first = 0  # where in the room the layer's own tokens start
    kept: tuple[Tensor | None, Tensor | None] = (None, None)  # the very views that `keys` and `values` are

    def __copy__(self) -> Any:
        """A copy has the same tokens and no room: two layers must not write behind the same tokens."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, room=None, kept=(None, None))
        return made

    def own(self) -> bool:
        """Whether `keys` and `values` are what lies in the room: others may have put tensors of theirs in place."""
        return self.room is not None and self.keys is self.kept[0] and self.values is self.kept[1]

    def fits(self, key_states: Tensor, value_states: Tensor) -> bool:
        """Whether tokens can be written in place: torch must not record it, and they must be like those before."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        if type(key_states) is not Tensor or type(value_states) is not Tensor:
            return False
        for old, new in ((self.keys, key_states), (self.values, value_states)):
            if new.dim() != 4 or new.layout is not torch.strided:
                return False
            if old is None or old.numel() == 0:
                continue
            alike = type(old) is Tensor and old.dtype is new.dtype and old.device == new.device
            if not alike or old.shape[:2] != new.shape[:2] or old.shape[3] != new.shape[3]:
                return False
        return True

    def append(self, key_states: Tensor, value_states: Tensor, held: int, room: int) -> tuple[Tensor, Tensor]:
        """Write tokens behind the `held` newest and return both; `room`: for how many, where new tensors are made."""
        new = key_states.shape[2]
        if not self.writable(held, new):
            self.move(key_states, value_states, held, room)
        assert self.room is not None
        end = self.first + held
        for t, states in zip(self.room, (key_states, value_states)):
            t[:, :, end : end + new] = states
        keys, values = (t[:, :, self.first : end + new] for t in self.room)
        return keys, values

    def writable(self, held: int, new: int) -> bool:
        if not self.own():
            return False
        assert self.room is not None
        frozen = self.room[0].is_inference() and not torch.is_inference_mode_enabled()
        return not frozen and self.first + held + new <= self.room[0].shape[2]

    def move(self, key_states: Tensor, value_states: Tensor, held: int, room: int) -> None:
        """Copy the `held` newest tokens to the front of new tensors."""
        made = []
        for old, states in ((self.keys, key_states), (self.values, value_states)):
            B, G, _, width = states.shape
            t = states.new_empty((B, G, max(room, LEAST_ROOM), width))
            if held:
                assert old is not None
                t[:, :, :held] = old[:, :, old.shape[2] - held :].detach()
            made.append(t)
        self.room, self.first = (made[0], made[1]), 0

    def hold(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = self.kept = keys, values


class GrowingLayer(_InPlace, DynamicLayer):
    """`DynamicLayer`, with room for tokens to come."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.fits(key_states, value_states):
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held = self.get_seq_length()
        needed = held + key_states.shape[2]
        self.hold(*self.append(key_states, value_states, held, needed + needed // 2))
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        own = self.own()
        super().crop(tokens_to_remove)
        if own and self.keys is not None and self.values is not None:
            self.hold(self.keys, self.values)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Beams that stay where they are are not copied."""
        if not self.own() or not self.get_seq_length() or not self.writable(self.get_seq_length(), 0):
            return super().reorder_cache(beam_idx)
        assert self.keys is not None
        assert self.values is not None
        if beam_idx.shape != self.keys.shape[:1]:
            return super().reorder_cache(beam_idx)
        beams = beam_idx.to(self.keys.device)
        to = (beams != torch.arange(len(beams), device=beams.device)).nonzero().flatten()
        for t in (self.keys, self.values) if len(to) else ():
            t[to] = t[beams[to]]

    def reset(self) -> None:
        super().reset()
        self.room, self.kept = None, (None, None)


class GrowingSlidingLayer(_InPlace, DynamicSlidingWindowLayer):
    """`DynamicSlidingWindowLayer`, which moves its window to new tensors once for as many tokens as it is wide."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.record_past or not self.fits(key_states, value_states):
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held = 0 if self.keys is None or self.keys.numel() == 0 else self.keys.shape[2]
        new = key_states.shape[2]
        needed = held + new
        keys, values = self.append(key_states, value_states, held, needed + min(needed, self.sliding_window))
        self.cumulative_length += new
        over = max(needed - (self.sliding_window - 1), 0)
        self.first += over
        self.hold(keys[:, :, over:], values[:, :, over:])
        return keys, values

    def reset(self) -> None:
        super().reset()
        self.room, self.kept, self.first = None, (None, None), 0


_GROWING: dict[type, Any] = {DynamicLayer: GrowingLayer, DynamicSlidingWindowLayer: GrowingSlidingLayer}


class GrowingCache(DynamicCache):
    """`DynamicCache` with layers that grow in place; layers of other kinds (recurrent, say) are transformers' own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        grow(self)


def grow(given: Cache) -> None:
    """Let the layers of a dynamic cache grow in place from now on; they keep what they hold."""
    if type(given) is EncoderDecoderCache:
        grow(given.self_attention_cache)
        return
    if not isinstance(given, DynamicCache) or given.offloading:
        return
    for number, layer in enumerate(given.layers):
        growing = _GROWING.get(type(layer))
        if growing is not None:
            made = object.__new__(growing)
            made.__dict__.update(layer.__dict__)
            given.layers[number] = made
    if given.layer_class_to_replicate is DynamicLayer:
        given.layer_class_to_replicate = GrowingLayer


def cache(model: nn.Module | PreTrainedConfig) -> Cache:
    """A cache for `past_key_values=` that grows in place, where `DynamicCache` copies all it holds for every token.

    It is a `DynamicCache` to transformers: `generate`, beam search, assisted decoding, `crop`, a chat that goes on.
    For a model with an encoder, the cache of its decoder is.

    Args:
        model: a Hugging Face model, or its configuration.

    >>> import multihead.hf
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    >>> model = LlamaForCausalLM(config).eval()
    >>> past, tokens = mh.hf.cache(model), torch.randint(61, (1, 9))
    >>> with torch.no_grad():
    ...     out = model(tokens[:, :5], past_key_values=past)
    ...     out = model(tokens[:, 5:], past_key_values=past)
    >>> past.get_seq_length()
    9
    """
    config = model if isinstance(model, PreTrainedConfig) else getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"model={type(model).__name__}: expected a Hugging Face model, or its configuration")
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        return EncoderDecoderCache(GrowingCache(config=text), DynamicCache(config=text))
    return GrowingCache(config=text)


@contextmanager
def kept(given: object) -> Iterator[None]:
    """Where the block fails, the dynamic layers of the cache are as they were before it."""
    if isinstance(given, EncoderDecoderCache):
        with kept(given.self_attention_cache), kept(given.cross_attention_cache):
            updated = copy.copy(given.is_updated)
            try:
                yield
            except BaseException:
                given.is_updated = updated
                raise
        return
    layers = list(given.layers) if isinstance(given, DynamicCache) else []
    before = [layer.__dict__.copy() for layer in layers]
    try:
        yield
    except BaseException:
        assert not layers or isinstance(given, DynamicCache)
        if isinstance(given, DynamicCache):
            given.layers[:] = layers
        for layer, state in zip(layers, before):
            if isinstance(layer, DynamicLayer):
                layer.__dict__.clear()
                layer.__dict__.update(state)
        raise

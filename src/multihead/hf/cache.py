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
Shape = tuple[int, int, int]  # B, G, and the width of a head


class _InPlace:
    """What both layers share: tensors with room, and the part of them that is handed out."""

    keys: Tensor | None
    values: Tensor | None
    is_initialized: bool
    room: tuple[Tensor, Tensor] | None = None  # (B, G, room, D) and (B, G, room, V)
    first = 0  # where in the room the layer's own tokens start
    kept: tuple[Tensor | None, Tensor | None] = (None, None)  # the very views that `keys` and `values` are
    record_past = False  # of a sliding layer: whether it keeps what leaves the window

    def __copy__(self) -> Any:
        """A copy has the same tokens and no room: two layers must not write behind the same tokens."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, room=None, kept=(None, None))
        return made

    @property
    def used(self) -> int:
        """How many tokens are there."""
        return 0 if self.keys is None or self.keys.numel() == 0 else self.keys.shape[2]

    def own(self) -> bool:
        """Whether `keys` and `values` are what lies in the room: others may have put tensors of theirs in place."""
        return self.room is not None and self.keys is self.kept[0] and self.values is self.kept[1]

    def reserve(self, new: int, shapes: tuple[Shape, Shape], like: Tensor) -> tuple[Tensor, Tensor] | None:
        """The layer's keys and values with room for `new` tokens of these shapes behind them, who are there when
        `commit` is told so; None where they cannot be written in place, for torch records it or they are unlike those
        before.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or self.record_past or type(like) is not Tensor:
            return None
        used = self.used
        for old, (B, G, width) in zip((self.keys, self.values), shapes) if used else ():
            assert old is not None
            if type(old) is not Tensor or old.shape != (B, G, used, width):
                return None
            if old.dtype is not like.dtype or old.device != like.device:
                return None
        if not self.is_initialized:
            self.lazy_initialization(like, like)  # type: ignore[attr-defined]
        if not self.writable(new):
            self.move(used + new + self.more(used + new), shapes, like)
        assert self.room is not None
        k, v = self.room
        return (k[:, :, self.first :], v[:, :, self.first :]) if self.first else (k, v)

    def writable(self, new: int) -> bool:
        if not self.own():
            return False
        assert self.room is not None
        frozen = self.room[0].is_inference() and not torch.is_inference_mode_enabled()
        return not frozen and self.first + self.used + new <= self.room[0].shape[2]

    def more(self, needed: int) -> int:
        """For how many tokens more to make room where there must be new tensors anyway."""
        return needed // 2

    def move(self, room: int, shapes: tuple[Shape, Shape], like: Tensor) -> None:
        """Copy what is there to the front of new tensors."""
        made = []
        for old, (B, G, width) in zip((self.keys, self.values), shapes):
            t = like.new_empty((B, G, max(room, LEAST_ROOM), width))
            if self.used:
                assert old is not None
                t[:, :, : self.used] = old.detach()
            made.append(t)
        self.room, self.first = (made[0], made[1]), 0

    def commit(self, new: int) -> tuple[Tensor, Tensor]:
        """The tokens for whom there was room are there now: all keys and values."""
        assert self.room is not None
        k, v = self.room
        end = self.first + self.used + new
        keys, values = k[:, :, self.first : end], v[:, :, self.first : end]
        self.hold(keys, values)
        return keys, values

    def hold(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = self.kept = keys, values

    def write(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor] | None:
        """Tokens behind those that are there: all of them, or None as `reserve`."""
        for t in (key_states, value_states):
            if (
                type(t) is not Tensor
                or t.dim() != 4
                or t.layout is not torch.strided
                or t.dtype is not key_states.dtype
            ):
                return None
        B, G, new, D = key_states.shape
        if value_states.shape[:3] != (B, G, new) or value_states.device != key_states.device:
            return None
        used = self.used
        room = self.reserve(new, ((B, G, D), (B, G, value_states.shape[3])), key_states)
        if room is None:
            return None
        for t, states in zip(room, (key_states, value_states)):
            t[:, :, used : used + new] = states
        return self.commit(new)


class GrowingLayer(_InPlace, DynamicLayer):
    """`DynamicLayer`, with room for tokens to come."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        written = self.write(key_states, value_states)
        return super().update(key_states, value_states, *args, **kwargs) if written is None else written

    def crop(self, tokens_to_remove: int) -> None:
        own = self.own()
        super().crop(tokens_to_remove)
        if own and self.keys is not None and self.values is not None:
            self.hold(self.keys, self.values)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Beams that stay where they are are not copied."""
        if not self.used or not self.writable(0):
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
        written = self.write(key_states, value_states)
        return super().update(key_states, value_states, *args, **kwargs) if written is None else written

    def more(self, needed: int) -> int:
        return min(needed, self.sliding_window)

    def commit(self, new: int) -> tuple[Tensor, Tensor]:
        keys, values = super().commit(new)
        self.cumulative_length += new
        over = max(keys.shape[2] - (self.sliding_window - 1), 0)
        if over:
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

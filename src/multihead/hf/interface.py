"""transformers' attention interface: what a model passes, in our words.

The order of operations is that of `eager`: q·kᵀ·scaling, softcap, + position bias, + mask, softmax with the sink,
dropout, ·v. What a model passes that is not known here, and might change the result, is refused by name.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import output_capturing

from multihead.attention import attend
from multihead.hf.masks import IntervalMask
from multihead.lens import Lens, attend_with_weights, look
from multihead.masks import Allowed, Causal, Documents, Mask, Window, check_broadcast, lower
from multihead.masks.intervals import Frame, Ramp, Visible
from multihead.tensors import require_storage

NAME = "multihead"
NEUTRAL = {  # says nothing about attention, or what the mask and the other arguments say too
    "cache_position",
    "deterministic",
    "inputs_embeds",
    "labels",
    "logits_to_keep",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}

# Attributes of a module, while `with` blocks last: functions that a call is shown to, see the end of `attention`.
EDITS, WATCHERS, TRACERS = "_multihead_edits", "_multihead_watchers", "_multihead_tracers"


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    output_attentions: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers' models call it: query (B,H,Q,D), key (B,G,K,D), value (B,G,K,V).

    Returns:
        what the heads put out, (B,Q,H,V), and the weights (B,H,Q,K) where they are asked for.
    """
    unknown = sorted(name for name, given in kwargs.items() if given is not None and name not in NEUTRAL)
    if unknown:
        raise ValueError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention: 'multihead' does not know what "
            "that does, and the result might be wrong; expected attn_implementation='eager' for this call"
        )
    read_by_torch = {
        "attention_mask": attention_mask,
        "position_bias": position_bias,
        "s_aux": s_aux,
        "cu_seq_lens_q": cu_seq_lens_q,
        "cu_seq_lens_k": cu_seq_lens_k,
    }
    for name, given in read_by_torch.items():
        require_storage(name, given)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    visible, bias = _visible(query, key, attention_mask, causal, sliding_window, cu_seq_lens_q, cu_seq_lens_k)
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + bias
    sinks = None if s_aux is None else s_aux.reshape(-1)
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": sinks, "bias": bias}

    for watcher in getattr(module, WATCHERS, ()):
        watcher(query, key, visible, options)
    k, v, seen, cut_bias = _cut(key, value, visible, bias)
    dropped = dropout if module.training else 0.0
    cut_options, weights = {**options, "bias": cut_bias}, None
    if not weights_are_wanted(output_attentions):
        heads: Any = attend(query, k, v, seen, dropout=dropped, **cut_options)  # (B, H, Q, V)
    elif torch.is_grad_enabled():  # a gradient may be wanted: the weights do without what the kernel knows
        heads = attend(query, k, v, seen, dropout=dropped, **cut_options)
        weights = look(query, key, visible, **options).weights()
    else:
        heads, weights = attend_with_weights(query, k, v, seen, dropout=dropped, **cut_options)
        if k.shape[2] != key.shape[2]:
            weights = _among_all(weights, visible)
    for edit in getattr(module, EDITS, ()):
        heads = edit(heads, visible)
    for tracer in getattr(module, TRACERS, ()):
        tracer(query, key, value, visible, options, heads)
    return heads.transpose(1, 2).contiguous(), None if weights is None else weights.to(query.dtype)


def weights_are_wanted(output_attentions: bool | None) -> bool:
    """Whether weights are wanted: the argument says so, or what transformers collects where a model drops it."""
    collected = output_capturing._active_collector.get()
    return bool(output_attentions) or any(name.endswith("attentions") for name in collected or ())


def _visible(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    causal: bool,
    window: int | None,
    query_ends: Tensor | None,
    key_ends: Tensor | None,
) -> tuple[Visible, Tensor | None]:
    """What each query may see, and what a float mask adds to the scores."""
    (B, H, Q, _), K, bias = query.shape, key.shape[2], None
    frame = Frame.of(Q, K, query.device)
    packed: Mask | None = None
    if query_ends is not None:
        packed = Documents(query_ends.diff(), None if key_ends is None else key_ends.diff())
    if mask is None:  # as in `sdpa`: query q is then the q-th of the sequence, and later keys are still empty
        if Q > 1 and causal and packed is None:
            frame = replace(frame, position=0)
        inside: Mask | None = None
        if Q > 1 and causal:
            inside = Causal(window)
        elif window is not None:
            inside = Window(window - 1, window - 1)
        joined = inside if packed is None else packed if inside is None else packed & inside
        return lower(joined, frame, B, H), None

    check_broadcast("attention_mask", mask, (B, H, Q, K), "(B,H,Q,K)")
    if isinstance(mask, IntervalMask):
        visible = mask.visible
    elif mask.dtype.is_floating_point:
        hidden = mask <= torch.finfo(mask.dtype).min / 2  # transformers' stand-in for −inf, perhaps with a bias on it
        visible, bias = frame.everything, mask.masked_fill(hidden, -torch.inf)
    else:
        visible = Allowed(mask).within(frame)
    return (visible if packed is None else visible.intersect(lower(packed, frame, B, H), frame)), bias


def _cut(k: Tensor, v: Tensor, visible: Visible, bias: Tensor | None) -> tuple[Tensor, Tensor, Visible, Tensor | None]:
    """Leave out the keys at both ends that no query sees, such as the empty part of a static cache."""
    Q, K, start, stop = visible.Q, visible.K, visible.start, visible.stop
    if not isinstance(start, Ramp) or not isinstance(stop, Ramp) or visible.dense is not None or Q == 0:
        return k, v, visible, bias
    first, last = start.at(0), max(stop.at(Q - 1), start.at(0))
    start, stop = _shift(start, first, last, Q), _shift(stop, first, last, Q)
    keys = slice(first, last)
    if bias is not None and bias.shape[-1] == K:
        bias = bias[..., keys]
    return k[:, :, keys], v[:, :, keys], Visible(Q, last - first, start, stop), bias


def _among_all(weights: Tensor, visible: Visible) -> Tensor:
    """The weights of the keys that `_cut` left, with zeros for the others."""
    assert isinstance(visible.start, Ramp)
    first = visible.start.at(0)
    return torch.nn.functional.pad(weights, (first, visible.K - weights.shape[3] - first))


def _shift(ramp: Ramp, first: int, last: int, Q: int) -> Ramp:
    """The same bound among the keys first…last, constant where it is the same for all queries."""
    low, high = (min(max(bound, first), last) - first for bound in (ramp.low, ramp.high))
    shifted = Ramp(ramp.offset - first, low, high)
    return Ramp.constant(shifted.at(0)) if shifted.at(0) == shifted.at(Q - 1) else shifted


def lens_of(
    query: Tensor, key: Tensor, visible: Visible, options: dict[str, Any], heads: list[int] | None = None
) -> Lens:
    """A lens on a call of `attention`, on some of its heads; the keys are copied, for a static cache changes them."""
    if heads is None:
        return look(query, key.clone(), visible, **options)
    group = query.shape[1] // key.shape[1]
    bias, sinks, dense = options["bias"], options["sinks"], visible.dense

    def chosen(t: Tensor | None) -> Tensor | None:  # of a tensor that broadcasts to (B, H, Q, K)
        return t if t is None or t.dim() < 3 or t.shape[-3] == 1 else t[..., heads, :, :]

    options = {**options, "bias": chosen(bias), "sinks": None if sinks is None else sinks[heads]}
    key = key[:, [head // group for head in heads]]
    return look(query[:, heads], key, replace(visible, dense=chosen(dense)), **options)

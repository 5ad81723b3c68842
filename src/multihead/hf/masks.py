"""Masks of Hugging Face models as intervals: what transformers describes by a function, read instead of evaluated.

transformers hands a mask over as a function of (batch, head, query, key), put together from a few known ones: causal,
windows, chunks, packed sequences, blocks of image tokens, padding. Each of these is one interval of keys per query, and
is found in the function's closure. A function that is not known is evaluated, into a dense bool tensor.
"""

import sys
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import masking_utils

from multihead.masks import Causal, Window
from multihead.masks.intervals import Frame, Visible, higher_of, lower_of

aten = torch.ops.aten


class IntervalMask(Tensor):
    """Intervals that pass for the bool tensor (B, 1, Q, K) they stand for, True = may attend.

    Models hand it on as they would a tensor. An operation on it gives what it would give for that tensor, which is made
    for it then and there.
    """

    visible: Visible

    @staticmethod
    def __new__(cls, visible: Visible, batch: int, device: torch.device) -> "IntervalMask":
        shape = (batch, 1, visible.Q, visible.K)
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        made.visible = visible
        return made

    def dense(self) -> Tensor:
        allowed = self.visible.allowed(self.device)
        return allowed[(None,) * (4 - allowed.dim())].expand(self.shape).contiguous()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"IntervalMask({self.visible})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in (aten.detach.default, aten.alias.default):
            return IntervalMask(args[0].visible, args[0].shape[0], args[0].device)
        if func._schema.is_mutable:
            raise NotImplementedError(f"{func} would change an attention mask in place: clone() it first")
        args, kwargs = pytree.tree_map_only(IntervalMask, IntervalMask.dense, (args, kwargs or {}))
        return func(*args, **kwargs)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    config: Any = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor:
    """The mask interface of transformers: what (B, 1, Q, K) may see, as an `IntervalMask` or else a bool tensor.

    Query q stands at `q + q_offset` of the sequence, key k at `k + kv_offset`. `attention_mask` (B, length) is False
    where a token is padding. What else transformers passes only says when no mask is needed.
    """
    _refuse_unused(config)
    if not torch.compiler.is_compiling():
        q_offset, kv_offset = int(q_offset), int(kv_offset)
        frame = Frame(q_length, kv_length, torch.device(device), q_offset - kv_offset)
        visible = _read(mask_function, frame, kv_offset)
        if visible is not None:
            if attention_mask is not None:
                visible = visible.intersect(_padding(attention_mask, frame, kv_offset), frame)
            return IntervalMask(visible, batch_size, torch.device(device))
    evaluate: Callable[..., Any] = masking_utils.sdpa_mask
    return evaluate(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=device,
    )


def _refuse_unused(config: Any) -> None:
    """Refuse a model that would take our mask but computes its attention itself."""
    if config is None:
        return
    classes = [type(config), *(type(getattr(config, name, None)) for name in getattr(config, "sub_configs", ()))]
    modelling = [sys.modules.get(cls.__module__.replace(".configuration_", ".modeling_")) for cls in classes]
    if modelling[0] is not None and not any(hasattr(module, "ALL_ATTENTION_FUNCTIONS") for module in modelling):
        raise ValueError(
            f"attn_implementation='multihead': models of type {config.model_type!r} do not use transformers' attention "
            "interface, they compute attention themselves; expected 'eager', or a model that uses the interface"
        )


def _read(function: Callable, frame: Frame, first: int) -> Visible | None:
    """The intervals of a mask function of transformers, or None if it is not known; key 0 is the `first` token."""
    if function is masking_utils.causal_mask_function:
        return Causal().within(frame)
    if function is masking_utils.bidirectional_mask_function:
        return frame.everything
    if getattr(function, "__module__", None) != masking_utils.__name__ or not hasattr(function, "__closure__"):
        return None
    inside = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ())))
    match function.__qualname__.split(".")[0], inside:
        case "and_masks", {"mask_functions": parts}:
            seen = [_read(part, frame, first) for part in parts]
            return None if None in seen else reduce(lambda a, b: a.intersect(b, frame), seen)  # type: ignore
        case "or_masks", {"mask_functions": (causal, blocks)} if _names(blocks) == "blockwise_overlay":
            a, b = _read(causal, frame, first), _read(blocks, frame, first)
            return None if a is None or b is None else _hull(a, b, frame)
        case "sliding_window_overlay", {"sliding_window": int(window)} if window > 0:
            return Window(window - 1, None).within(frame)
        case "sliding_window_bidirectional_overlay", {"sliding_window": int(window)}:
            return Window(window, window).within(frame)
        case "chunked_overlay", {"chunk_size": size, "left_padding": left}:
            left = left.to(frame.device)[:, None, None] - first  # (B, 1, 1), as a key
            start = (_position(frame) - left) // size * size + left
            return Visible(frame.Q, frame.K, frame.fixed(start), frame.fixed(start + size))
        case "packed_sequence_mask_function", {"packed_sequence_mask": ids}:
            return _runs(ids.to(frame.device), frame, first)
        case "blockwise_overlay", {"block_sequence_ids": ids}:
            ids = ids.to(frame.device)
            seen_runs = _runs(ids, frame, first)
            if seen_runs is None:
                return None
            own, (start, stop) = _position(frame), seen_runs.bounds(frame.device)
            outside = ids[:, None, _position(frame) + first] < 0  # these see nothing: an empty interval where they are
            return Visible(frame.Q, frame.K, torch.where(outside, own, start), torch.where(outside, own, stop))
    return None


def _names(function: Any) -> str:
    return getattr(function, "__qualname__", "").split(".")[0]


def _position(frame: Frame) -> Tensor:
    return torch.arange(frame.Q, device=frame.device) + frame.position  # (Q,)


def _hull(a: Visible, b: Visible, frame: Frame) -> Visible:
    """What either allows, where both intervals hold the query's own position or end at it."""
    return Visible(frame.Q, frame.K, lower_of(a.start, b.start, frame), higher_of(a.stop, b.stop, frame))


def _runs(ids: Tensor, frame: Frame, first: int) -> Visible | None:
    """Each query sees the keys with its own number in `ids` (B, length): one run, or None if some number has two."""
    new = torch.ones_like(ids, dtype=torch.bool)
    new[:, 1:] = ids[:, 1:] != ids[:, :-1]
    run = new.cumsum(-1)  # (B, length), rising
    starts = torch.where(new & (ids >= 0), ids, -1 - torch.arange(ids.shape[1], device=ids.device))
    ordered = starts.sort(-1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        return None
    at = (_position(frame) + first).clamp(0, ids.shape[1] - 1).expand(ids.shape[0], -1)
    mine = run.gather(1, at)
    start, stop = (torch.searchsorted(run, mine, right=right)[:, None] - first for right in (False, True))
    return Visible(frame.Q, frame.K, frame.fixed(start), frame.fixed(stop))  # (B, 1, Q)


def _padding(real: Tensor, frame: Frame, first: int) -> Visible:
    """What is no padding: an interval for each row, or where there are holes (B, 1, 1, K) bool."""
    missing = first + frame.K - real.shape[-1]
    real = torch.nn.functional.pad(real, (0, max(missing, 0)))[:, first : first + frame.K].bool()  # (B, K)
    if bool(real.all()):
        return frame.everything
    count, key = real.sum(-1), torch.arange(frame.K, device=real.device)
    start = torch.where(real, key, frame.K).amin(-1)
    stop = torch.where(real, key + 1, 0).amax(-1)
    if bool(((stop - start).clamp(min=0) == count).all()):
        return Visible(frame.Q, frame.K, frame.fixed(start[:, None, None]), frame.fixed(stop[:, None, None]))
    everything = frame.everything
    return Visible(frame.Q, frame.K, everything.start, everything.stop, real[:, None, None])

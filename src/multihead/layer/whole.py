"""A call of the layer as one native call: what of it the kernel is told."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from multihead.cache import Cache, CacheOverflow, ContextCache
from multihead.call import Reason
from multihead.kernel import eligible
from multihead.kernel.eligible import CPU
from multihead.kernel.layer import Store, Turn, prepare, run
from multihead.layer.call import LayerCall
from multihead.layer.checks import check_lengths
from multihead.masks.intervals import Frame
from multihead.positions import RoPE
from multihead.tensors import require_storage

if TYPE_CHECKING:
    from multihead.layer import MultiHeadAttention


NOT_THIS = Reason("the call is not one that goes to the kernel as a whole", True)


def in_one_call(of: "MultiHeadAttention", call: LayerCall) -> Tensor | Reason:
    """What the layer puts out, or why this is not for us; then nothing has happened.

    Whatever is wrong with the arguments is such a reason, too: it is found and named where they are taken one by one.
    """
    x, context, cache = call.x, call.context, call.cache
    recalls = type(cache) is ContextCache
    if call.bias is not None or call.values is not None or (cache is not None and context is not None):
        return NOT_THIS
    read = eligible.layer(of, x, context, recalls)
    if isinstance(read, Reason):
        return read
    if cache is None and call.lengths is None and of.rope is None:
        return run(read, x, call.mask)
    B, _, N, _ = read.sizes
    if (recalls and call.lengths is not None) or (call.context_positions is not None and context is None):
        return NOT_THIS

    mask, frame, room = call.mask, None, None
    first: int | Tensor = 0  # the position of the first new token
    if type(cache) is Cache:
        if cache.batch != B:
            return NOT_THIS
        real = None if call.lengths is None else check_lengths(call.lengths, _batched(x), None, cache)
        try:
            room = cache.reserve(N, real)
        except CacheOverflow:
            return NOT_THIS
        if room.k.requires_grad:  # what somebody will differentiate is not written over unseen
            return NOT_THIS
        mask, frame, first = cache.through_window(mask), room.frame, cache.length
    elif isinstance(cache, ContextCache):
        cache.check(B, of.sizes)
    elif cache is not None:
        return NOT_THIS
    elif call.lengths is not None:
        if context is not None:
            return NOT_THIS
        real = check_lengths(call.lengths, _batched(x), None, None)
        frame = Frame.of(N, N, CPU, used=real, real=real)

    turn, context_turn = None, None
    if of.rope is not None:
        turn = _turn(of.rope, of.sizes.D, call.positions, first, N)
        if context is not None:
            context_turn = _turn(of.rope, of.sizes.D, call.context_positions, 0, context.shape[-2])
        if turn is None or (context is not None and context_turn is None):
            return NOT_THIS
    reason = prepare(
        read,
        turn=turn,
        context_turn=context_turn,
        store=None if room is None else Store(room.k, room.v, room.first, room.frame.K, room.real, room.scales),
        recalled=(cache.k, cache.v) if isinstance(cache, ContextCache) else None,
    )
    y = run(read, x, mask, frame) if reason is None else reason
    if room is not None and isinstance(y, Tensor):
        assert isinstance(cache, Cache)
        cache.commit(room)
    return y


def _batched(x: Tensor) -> Tensor:
    return x if x.dim() == 3 else x[None]


def _turn(rope: RoPE, D: int, given: Tensor | None, first: int | Tensor, N: int) -> Turn | None:
    """The angles of N tokens, at the positions given or counted on from `first`; None where nobody can tell here."""
    interleaved = rope.pairing == "interleaved"
    if given is None:
        last = (int(first.max()) if isinstance(first, Tensor) else first) + N
        table = rope.table(D, last, CPU)
        if table is not None:
            return Turn(*table, first, isinstance(first, Tensor), interleaved)
        positions = torch.arange(N, device=CPU) + (first[:, None] if isinstance(first, Tensor) else first)
    else:
        require_storage("positions", given)
        plain = type(given) is Tensor and given.dtype in (torch.int64, torch.int32) and given.device == CPU
        if not plain or given.shape[-1:] != (N,) or int(given.min()) < 0:
            return None
        table = rope.table(D, int(given.max()) + 1, CPU)
        if table is not None:
            return Turn(*table, given, False, interleaved)
        positions = given
    return Turn(*rope.cos_sin(D, positions), interleaved=interleaved)

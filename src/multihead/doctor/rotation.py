"""RoPE, turned rightly or not."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from multihead.positions import LinearScaling, Llama3Scaling, NTKScaling, RoPE

OTHER_TURNS = ("other pairing", "base", "linear", "ntk", "llama3", "unscaled")


def other_rope(rope: RoPE, how: str) -> RoPE:
    """The rotation that a mistake makes of `rope`; itself where it changes only who turns, or how far."""
    name, _, number = how.partition(":")
    if name == "other pairing":
        return replace(rope, pairing="interleaved" if rope.pairing == "halves" else "halves")
    if name == "base":
        return replace(rope, base=float(number))
    if name == "unscaled":
        return replace(rope, scaling=None)
    kinds: dict[str, Any] = {"linear": LinearScaling, "ntk": NTKScaling, "llama3": Llama3Scaling}
    return replace(rope, scaling=kinds[name](float(number))) if name in kinds else rope


def turned(rope: RoPE, t: Tensor, n: int, how: str, positions: Tensor | None) -> Tensor:
    """Q (n=0), k (1) or v (2) after RoPE, done rightly or not: (B, heads, N, D)."""
    N = t.shape[2]
    where = torch.arange(N, device=t.device) if positions is None else positions
    if "|" in how:  # two at once: what changes the way of turning first
        first, second = sorted(how.split("|"), key=lambda one: not one.startswith(OTHER_TURNS))
        return turned(other_rope(rope, first), t, n, second, positions)
    rope = other_rope(rope, how)
    name, _, number = how.partition(":")
    if n == 2 and name != "on v":
        return t
    if name == "none" or (name, n) in (("q only", 1), ("k only", 0)):
        return t
    if name == "along heads":
        return rope.rotate(t.transpose(1, 2), torch.arange(t.shape[1], device=t.device)).transpose(1, 2)
    if name in ("crossed", "no minus"):
        return _written_out(rope, t, where, "" if name == "no minus" else number)
    if name == "backwards" and (not number or int(number) == n):
        where = -where
    elif name == "shift" and int(number[0]) == n:
        where = where + int(number[1:])
    elif name == "restart" and (not number.startswith("q") or n == 0):
        chunk = int(number.lstrip("q"))
        where = where % chunk
    elif name == "stand still" and (not number.startswith("q") or n == 0):
        chunk = int(number.lstrip("q"))
        where = torch.where(torch.arange(N, device=t.device) < chunk, where, 0)
    elif name == "twice" and n == 1:
        where = where * 2
    elif name == "every step" and n == 1:  # the whole cache is turned again whenever a token joins it
        query = torch.arange(N, device=t.device)[:, None]
        times = (query - torch.arange(N, device=t.device) + int(number)).clamp(min=1)  # (Q, K)
        return torch.stack([rope.rotate(t, where * row) for row in times], 2)  # (B, G, Q, K, D)
    return rope.rotate(t, where)


def _written_out(rope: RoPE, t: Tensor, where: Tensor, crossed: str) -> Tensor:
    """As most write it, t · cos + partner · sin; `crossed`: whether "angles" or "pairs" are of the other pairing.

    Where nothing is crossed, the half whose partner should come with a minus has it without.
    """
    other = other_rope(rope, "other pairing").pairing
    pairs, angles = (other if crossed == what else rope.pairing for what in ("pairs", "angles"))
    dim = t.shape[-1] if rope.dim is None else rope.dim
    cos, sin = rope.cos_sin(t.shape[-1], where, dtype=t.dtype)  # (N, dim/2) or (B, N, dim/2)
    if cos.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    cos, sin = (a.repeat_interleave(2, -1) if angles == "interleaved" else torch.cat((a, a), -1) for a in (cos, sin))
    turning, still = t[..., :dim], t[..., dim:]
    shape, axis = ((2, dim // 2), -2) if pairs == "halves" else ((dim // 2, 2), -1)
    a, b = turning.unflatten(-1, shape).unbind(axis)
    partner = torch.stack((-b if crossed else b, a), axis).flatten(-2)
    return torch.cat((turning * cos + partner * sin, still), -1)

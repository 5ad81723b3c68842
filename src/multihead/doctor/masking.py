"""Which pairs a mistaken mask shows: each function turns the right mask into the wrong one, as a dense bool tensor."""

import torch
from torch import Tensor

from multihead.masks import Allowed, Causal, Joined, Mask, Padding, Window, as_mask
from multihead.masks.intervals import Frame

MOST_WINDOW = 32  # keys


def tidy(mask: Mask | Tensor | None, Q: int, K: int) -> Mask | None:
    """The mask as its parts say it; a dense tensor that is the causal mask becomes `Causal()`."""
    mask = as_mask(mask)
    if isinstance(mask, Allowed) and mask.tensor.shape[-2:] == (Q, K):
        causal = Causal().dense(Q, K, mask.tensor.device)
        if bool((mask.tensor == causal).all()):
            return Causal()
    return mask


def parts(mask: Mask | None) -> tuple[Mask, ...]:
    return () if mask is None else mask.parts if isinstance(mask, Joined) else (mask,)


def joined(found: tuple[Mask, ...]) -> Mask | None:
    return None if not found else found[0] if len(found) == 1 else Joined(found)


def dense(mask: Mask | None, B: int, Q: int, K: int, device: torch.device) -> Tensor:
    """(B, H|1, Q, K), True = may attend."""
    if mask is None:
        return torch.ones(B, 1, Q, K, dtype=torch.bool, device=device)
    allowed = mask.lower(Frame.of(Q, K, device)).allowed(device)
    allowed = allowed[(None,) * (4 - allowed.dim())]
    return allowed.expand(B, allowed.shape[1], Q, K)


def kinds(mask: Mask | None, B: int, Q: int, K: int) -> list[str]:
    """The wrong masks that can be made of this one. `name@n` changes part n of a joined mask only."""
    found = parts(mask)
    if not found:
        return ["causal"] if Q > 1 and Q == K else []
    kinds = ["missing", "inverted"]
    if len(found) > 1:
        kinds += [f"{name}@{n}" for n in range(len(found)) for name in ("missing", "inverted")]
    if Q == K:
        kinds += ["transposed"]
    if any(isinstance(part, Causal) for part in found):
        kinds += ["strict", "ahead"] + (["top-left"] if Q != K else [])
        if any(isinstance(part, Causal) and part.window is not None for part in found):
            kinds += ["window+1", "window-1", "no window"]
        kinds += _windows(found, K)
    if any(isinstance(part, Padding) for part in found) and Q == K:
        kinds += ["on queries", "on queries too"]
    if B > 1 and any(isinstance(part, Padding) for part in found):
        kinds += ["shared"]
    return kinds


def _windows(found: tuple[Mask, ...], K: int) -> list[str]:
    """Windows of other sizes than the causal parts have, but for those that are off by one."""
    own = [part.window for part in found if isinstance(part, Causal) and part.window is not None]
    return [f"window:{w}" for w in range(1, min(K, MOST_WINDOW) + 1) if all(abs(w - size) > 1 for size in own)]


def mistaken(kind: str, mask: Mask | None, B: int, Q: int, K: int, device: torch.device) -> Tensor:
    """What a mask of this `kind` lets be seen, (B, H|1, Q, K)."""
    right = dense(mask, B, Q, K, device)
    if kind == "right":
        return right
    if "|" in kind:  # two at once: what turns a whole mask about comes last
        first, second = sorted(kind.split("|"), key=lambda one: one in ("inverted", "transposed"))
        made = mistaken(first, mask, B, Q, K, device)
        return {"inverted": lambda: ~made, "transposed": lambda: made.mT}[second]()
    name, _, number = kind.partition("@")
    found = parts(mask)
    if number:
        others = dense(joined(found[: int(number)] + found[int(number) + 1 :]), B, Q, K, device)
        return others if name == "missing" else others & ~dense(found[int(number)], B, Q, K, device)
    query = torch.arange(Q, device=device)[:, None] + (K - Q)
    key = torch.arange(K, device=device)
    if name == "causal":
        return right & (key <= query)
    if name == "missing":
        return torch.ones_like(right)
    if name == "inverted":
        return ~right
    if name == "transposed":
        return right.mT
    if name == "strict":
        return right & (key != query)
    if name in ("ahead", "window+1", "window-1", "no window", "top-left") or name.startswith("window:"):
        return dense(joined(tuple(_moved(part, name, Q, K) for part in found)), B, Q, K, device)
    if name == "shared":
        return right[:1].expand_as(right)
    if name.startswith("on queries"):
        rest = tuple(part for part in found if not isinstance(part, Padding))
        padding = dense(joined(tuple(part for part in found if isinstance(part, Padding))), B, Q, K, device)
        shown = padding.mT if name == "on queries" else padding & padding.mT
        return dense(joined(rest), B, Q, K, device) & shown
    raise ValueError(f"kind={kind!r} is unknown")


def _moved(part: Mask, name: str, Q: int, K: int) -> Mask:
    """A causal part, one ahead, one wider, one narrower, or aligned at the top left; others stay."""
    if not isinstance(part, Causal):
        return part
    left = None if part.window is None else part.window - 1
    if name == "top-left":
        return Allowed(torch.arange(K) <= torch.arange(Q)[:, None])
    if name == "ahead":
        return Window(left, 1)
    if name == "no window":
        return Causal()
    if name.startswith("window:"):
        return Causal(window=int(name[7:]))
    if left is None:
        return part
    return Window(left + 1 if name == "window+1" else max(left - 1, 0), 0)


def padded_queries(mask: Mask | None, B: int, Q: int, K: int, device: torch.device) -> Tensor:
    """(B, Q): the queries that stand on padding, in self-attention; what they put out is to be ignored."""
    found = tuple(part for part in parts(mask) if isinstance(part, Padding))
    if not found or Q != K:
        return torch.zeros(B, Q, dtype=torch.bool, device=device)
    return ~dense(joined(found), B, Q, K, device)[:, 0, 0]

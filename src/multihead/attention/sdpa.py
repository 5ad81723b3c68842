"""torch's fused kernels as a backend, used only where they can give our semantics exactly.

They have no softcap, no sinks, no dropout of ours and no second derivative, align causal masks top-left, may give NaN
for a query that sees nothing or hides a score too large for its dtype, let a NaN under the mask through, and over a few
keys give 0 for a query of NaN. What they do not have, and scores that may overflow, is refused; the rest is made good
here.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from multihead.call import Call
from multihead.steps import known_finite, only_finite, repeat_heads
from multihead.tensors import inside_torch_func, readable

FEW_KEYS = 64  # more than any CPU's vector has lanes: below that torch's CPU kernel may lose a NaN
BLOCK = 512  # queries, and keys, in a tile of the log-sum-exp pass


class SDPA:
    name = "sdpa"

    def refuse(self, call: Call) -> str | None:
        if call.softcap is not None:
            return "torch's fused kernels have no softcap"
        if call.sinks is not None:
            return "torch's fused kernels have no sinks"
        if call.dropout:
            return "torch's fused kernels drop weights by a generator of their own, not by (seed, b, h, q, k)"
        if call.want_lse and call.needs_grad:
            return "the log-sum-exp is a pass of its own here, without a gradient"
        if inside_torch_func():
            return "torch's fused kernels have no rule for torch.func or forward-mode derivatives"
        if 0 in call.q.shape or 0 in call.k.shape or 0 in call.v.shape:
            return "torch's fused kernels are not defined for empty sequences"
        if not (call.visible.is_everything and call.bias is None) and may_overflow(call):
            return "a score may overflow, and torch's fused kernels make NaN of one that is hidden"
        return None

    @staticmethod
    def needs_mask(call: Call) -> bool:
        """Whether a dense (Q, K) mask has to be made for it."""
        return call.bias is not None or not (call.visible.is_everything or call.visible.is_square_causal)

    def note(self, call: Call) -> str:
        if not self.needs_mask(call):
            return "torch's fused kernel" + ("" if call.visible.is_everything else ", causal")
        return "torch's fused kernel with a dense (Q, K) mask"

    def run(self, call: Call, seed: Tensor | None) -> tuple[Tensor, Tensor | None]:
        lse = logsumexp(call) if call.want_lse else None
        if call.visible.is_everything and call.bias is None:
            return carry_nan(fused(call, call.q, call.k, call.v), call), lse
        finite = all(known_finite(t) for t in (call.q, call.k, call.v))
        q, k, v = (call.q, call.k, call.v) if finite else (only_finite(t) for t in (call.q, call.k, call.v))
        if call.visible.is_square_causal and call.bias is None:
            out = fused(call, q, k, v, is_causal=True)
            return out if finite else poison(out, call, None), lse
        allowed = call.visible.allowed(call.q.device)
        if call.bias is not None:
            allowed = allowed & (call.bias != -torch.inf)
        alive = allowed.any(-1, keepdim=True)
        mask = allowed | ~alive  # a query that sees nothing is shown everything, and its output is then put to zero
        if call.bias is not None:
            # On a CPU the kernel adds a float32 bias as it is; in float16, one beyond 65504 would become infinite.
            dtype = torch.promote_types(q.dtype, torch.float32) if q.device.type == "cpu" else q.dtype
            mask = call.bias.masked_fill(call.bias == -torch.inf, 0).masked_fill(~mask, -torch.inf).to(dtype)
        out = fused(call, q, k, v, attn_mask=mask).masked_fill(~alive, 0)
        return out if finite else poison(out, call, allowed), lse


def may_overflow(call: Call) -> bool:
    """Whether some q·k of finite numbers may be too large for what the kernels compute in, as far as is known."""
    largest = float(call.q.shape[-1]) * max(1.0, abs(call.scale))
    for t in (call.q.detach(), call.k.detach()):
        if not readable(t):
            return False
        low, high = torch.aminmax(t)
        if not (low.isfinite() and high.isfinite()):
            low, high = torch.aminmax(only_finite(t))
        largest *= max(-float(low), float(high))
    return largest >= torch.finfo(torch.promote_types(call.q.dtype, torch.float32)).max


def once(t: Tensor, backend: str) -> Tensor:
    """The same tensor, whose gradient has no gradient of its own, and says so when asked for one."""
    return _Once.apply(t, backend) if t.requires_grad else t


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, backend: str) -> Tensor:
        ctx.backend = backend
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Last.apply(*gradients, ctx.backend), None


class _Last(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, backend: str) -> Tensor:
        ctx.backend = backend
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        why = "torch's fused kernels have none; name 'reference'"
        raise RuntimeError(f"backend={ctx.backend!r} has no second derivative: {why}")


def fused(call: Call, q: Tensor, k: Tensor, v: Tensor, **mask: object) -> Tensor:
    grouped = k.shape[1] != q.shape[1]
    if not torch.compiler.is_compiling():  # torch's kernels would read what an efficient zero has no memory for
        q, k, v = (torch.zeros_like(t) if t._is_zerotensor() else t for t in (q, k, v))
    if call.needs_grad and not torch.compiler.is_compiling():
        q, k, v = (once(t, SDPA.name) for t in (q, k, v))
        mask = {name: once(t, SDPA.name) if isinstance(t, Tensor) else t for name, t in mask.items()}
    scale = call.scale
    if scale < 0:  # on a CPU a causal kernel scales what it has hidden: −inf becomes inf
        q, scale = -q, -scale
    return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=grouped, **mask)  # type: ignore[arg-type]


def carry_nan(out: Tensor, call: Call) -> Tensor:
    """`out` of queries that see every key, with NaN for each that is not finite or, of a few keys, sees a NaN."""
    few = call.k.shape[2] <= FEW_KEYS
    if known_finite(call.q) and (not few or known_finite(call.k)):
        return out
    bad = ~call.q.isfinite().all(-1, keepdim=True)  # (B, H, Q, 1)
    if few:
        bad = bad | repeat_heads(call.k.isnan().any(-1, keepdim=True).any(-2, keepdim=True), out.shape[1])
    return out.masked_fill(bad, torch.nan)


def poison(out: Tensor, call: Call, allowed: Tensor | None) -> Tensor:
    """`out`, made from finite numbers only, with NaN for each query that is not finite or could see what is not.

    `allowed` None: what may be seen is an interval of keys, and running counts settle it without a (Q, K) matrix.
    """
    B, H, Q, V = out.shape
    bad_key = (~call.k.isfinite()).any(-1, keepdim=True)  # (B, G, K, 1)
    bad = repeat_heads((bad_key | ~call.v.isfinite()).to(torch.float32), H)  # (B, H, K, V)
    if allowed is not None:
        met = allowed.to(bad.dtype).expand(B, H, Q, -1) @ bad > 0
        alive = allowed.any(-1, keepdim=True)
    else:
        counts = F.pad(bad.cumsum(2), (0, 0, 1, 0))  # (B, H, K+1, V): how many before each key
        start, stop = (t.expand(B, H, Q)[..., None].expand(B, H, Q, V) for t in call.visible.bounds(out.device))
        met = counts.gather(2, torch.maximum(start, stop)) > counts.gather(2, start)
        alive = stop > start
    met = met | (alive & ~call.q.isfinite().all(-1, keepdim=True))
    return out.masked_fill(met, torch.nan)


def logsumexp(call: Call) -> Tensor:
    """The log-sum-exp of each query's visible scores, (B, H, Q), tile by tile: O(Q) memory beside one tile."""
    exact = torch.promote_types(call.q.dtype, torch.float32)
    (B, H, Q, _), K = call.q.shape, call.k.shape[2]
    found = []
    for first_query in range(0, Q, BLOCK):
        queries = slice(first_query, first_query + BLOCK)
        q = call.q[:, :, queries].to(exact) * call.scale
        lse = q.new_full(q.shape[:-1], -torch.inf)  # (B, H, BLOCK)
        for first_key in range(0, K, BLOCK):
            keys = slice(first_key, first_key + BLOCK)
            scores = q @ repeat_heads(call.k[:, :, keys].to(exact), H).transpose(-1, -2)
            if call.bias is not None:
                bias = call.bias.expand(B, H, Q, K)[:, :, queries, keys]
                scores = (scores + bias).masked_fill(bias == -torch.inf, -torch.inf)
            if not call.visible.is_everything:
                scores = scores.masked_fill(~call.visible.allowed(q.device, queries, keys), -torch.inf)
            lse = torch.logaddexp(lse, scores.logsumexp(-1))
        found.append(lse)
    return torch.cat(found, dim=2)

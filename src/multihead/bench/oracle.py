"""What the right answer is, and how wrong a contender may be before it is not worth timing.

The oracle is the plain implementation in float64; the same in the case's dtype shows what rounding alone costs. A
contender may be twice as far from the oracle as that, and one rounding of the largest value more.
"""

import torch

SCORES = 2**22  # scores held at once: a chunk of queries is chosen to stay below

# How many times the bound for ours a peer's error may reach. OpenVINO's float32 layers were seen at 1.2; refusing them
# would remove a peer in our favour. Inputs rounded to bfloat16 were seen at 3,000.
PEER_ALLOWANCE = 4


def product(a, b):
    """`a @ b`, rounded once.

    Of float16 by way of float32: where the CPU has no float16 arithmetic torch sums in float32 as well, but a number at
    a time, which takes minutes for a long case.
    """
    return (a.float() @ b.float()).to(a.dtype) if a.dtype is torch.float16 else a @ b


class WrongResult(Exception):
    """What a contender computes is not attention."""


def attend(q, k, v, mask, dtype):
    """Plain attention in `dtype`: q (B,H,Q,D), k and v (B,G,K,D) -> (B,H,Q,D), a few queries of one head at a time."""
    (B, H, Q, D), (G, K) = q.shape, k.shape[1:3]
    start, stop = mask.intervals(Q, K)
    out = torch.empty(B, H, Q, D, dtype=dtype)
    step = max(1, SCORES // K)
    for first in range(0, Q, step):
        rows = slice(first, min(first + step, Q))
        begin, end = int(start[rows].min()), int(stop[rows].max())  # keys nobody here sees cost nothing
        keys = torch.arange(begin, end)
        allowed = (keys >= start[rows, None]) & (keys < stop[rows, None])  # (q, k)
        for b in range(B):
            for h in range(H):
                g = h // (H // G)
                scores = product(q[b, h, rows].to(dtype), k[b, g, begin:end].to(dtype).T) * D**-0.5
                weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
                out[b, h, rows] = product(weights, v[b, g, begin:end].to(dtype))
    return out


def gradients(q, k, v, d_out, mask, dtype):
    """Of q, k and v, one number after another, through plain attention in `dtype`, one query head at a time."""
    (B, H, Q, D), (G, K) = q.shape, k.shape[1:3]
    start, stop = mask.intervals(Q, K)
    keys = torch.arange(K)
    allowed = (keys >= start[:, None]) & (keys < stop[:, None])
    found = [torch.zeros(t.shape, dtype=dtype) for t in (q, k, v)]
    for b in range(B):
        for h in range(H):
            at = (b, h), (b, h // (H // G)), (b, h // (H // G))
            head = [t[i].detach().to(dtype).requires_grad_() for t, i in zip((q, k, v), at)]
            with torch.enable_grad():
                scores = product(head[0], head[1].T) * D**-0.5
                out = product(scores.masked_fill(~allowed, -torch.inf).softmax(-1), head[2])
            for total, i, part in zip(found, at, torch.autograd.grad(out, head, d_out[b, h].to(dtype))):
                total[i] += part
    return torch.cat([t.flatten() for t in found])


def lens(q, k, case, dtype):
    """What a lens case asks about, one number after another, in `dtype`: a few queries of one head at a time."""
    B, H, N, D = q.shape
    start, stop = case.mask.intervals(N, N)
    entropy, peak, received = (torch.zeros(B, H, N, dtype=dtype) for _ in range(3))
    picture = torch.zeros(B, H, 512, 512, dtype=dtype)
    rows = torch.zeros(B, H, len(case.queries), N, dtype=dtype)
    step = max(1, SCORES // N)
    bins = torch.arange(512)
    first, last = bins * N // 512, ((bins + 1) * N + 511) // 512  # as torch's adaptive pooling cuts them
    parts = [torch.tensor(case.queries)] if case.what == "rows" else torch.arange(N).split(step)
    for part in parts:
        keys = torch.arange(N)
        allowed = (keys >= start[part, None]) & (keys < stop[part, None])
        for b in range(B):
            for h in range(H):
                scores = product(q[b, h, part].to(dtype), k[b, h].to(dtype).T) * D**-0.5
                w = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
                if case.what == "rows":
                    rows[b, h] = w
                elif case.what == "map":
                    sums = torch.nn.functional.pad(w.double().cumsum(-1), (1, 0))
                    pooled = ((sums[:, last] - sums[:, first]) / (last - first)).to(dtype)  # (part, 512)
                    inside = (part >= first[:, None]) & (part < last[:, None])
                    picture[b, h] += product(inside.to(dtype) / (last - first)[:, None].to(dtype), pooled)
                else:
                    entropy[b, h, part] = torch.special.entr(w).sum(-1)
                    peak[b, h, part] = w.amax(-1)
                    received[b, h] += w.sum(0)
    found = {"rows": (rows,), "map": (picture,), "statistics": (entropy, peak, received)}[case.what]
    return torch.cat([t.flatten() for t in found])


def layer(x, weights, case, dtype):
    """The seven steps in `dtype`: x (B,N,E) -> (B,N,E)."""
    B, N, E = x.shape
    x = x.to(dtype)
    w = {name: weight.to(dtype) for name, weight in weights.items()}
    q, k, v = ((product(x, w[f"w_{n}"].T) + w[f"b_{n}"]).view(B, N, case.H, E // case.H).transpose(1, 2) for n in "qkv")
    merged = attend(q, k, v, case.mask, dtype).transpose(1, 2).reshape(B, N, E)
    return product(merged, w["w_o"].T) + w["b_o"]


def bound_of(exact, plain):
    """Largest error allowed, given the float64 result and the plain one in the dtype of the case."""
    rounding = torch.finfo(plain.dtype).eps * exact.abs().max().item()
    return 2 * (plain.double() - exact).abs().max().item() + rounding


def check(name, result, exact, bound):
    """The largest error of `result`; WrongResult where it is beyond the bound, or no number at all."""
    if result.shape != exact.shape:
        raise WrongResult(f"{name} gives {tuple(result.shape)}, expected {tuple(exact.shape)}")
    error = (result.double() - exact).abs().max().item()
    if not error <= bound:  # also where it is NaN
        raise WrongResult(f"{name} is off by {error:.2g}, allowed {bound:.2g}")
    return error

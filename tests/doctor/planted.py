"""Four implementations of attention, written independently of `multihead.steps`, each with every mistake on a flag.

`Einsum` works on plain weights (E,H,D) and names its axes. `Views` is the textbook module: nn.Linear, view, transpose.
`Modern` is what language models use: grouped key/value heads, RoPE, QK-norm, softcap, sinks; `Grouped` the same in einsum.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multihead as mh


def causal(Q: int, K: int, mistake: str) -> Tensor:
    """(Q, K), True = may attend."""
    offset = K - Q
    if mistake == "causal mask off by one, strict":
        offset -= 1
    elif mistake == "causal mask off by one, one ahead":
        offset += 1
    elif mistake == "causal mask aligned top-left instead of bottom-right":
        offset = 0
    allowed = torch.tril(torch.ones(Q, K, dtype=torch.bool), offset)
    if mistake == "mask transposed":
        allowed = allowed.T
    return allowed


def allowed_pairs(mask: str | None, lengths: Tensor | None, Q: int, K: int, mistake: str) -> Tensor | None:
    """What an implementation that makes its own mask lets be seen; broadcasts to (B, H, Q, K)."""
    if mask is None or mistake == "mask missing":
        return None
    if mask == "causal":
        allowed = causal(Q, K, mistake)
    else:
        assert lengths is not None
        real = torch.arange(K) < lengths[:, None]  # (B, K)
        if mistake == "padding mask shared across the batch":
            real = real[:1].expand_as(real)
        if mistake == "padding mask on queries instead of keys":
            allowed = real[:, None, :, None].expand(-1, 1, Q, K)
        else:
            allowed = real[:, None, None, :]
    return ~allowed if mistake == "mask polarity inverted" else allowed


def hide(scores: Tensor, allowed: Tensor | None, mistake: str, fill: float = -math.inf) -> Tensor:
    if allowed is None or mistake == "mask applied after softmax without renormalising":
        return scores
    if mistake == "mask added as 0/1":
        return scores + allowed.to(scores.dtype)
    if mistake == "mask filled with 0":
        return scores * allowed
    if mistake == "mask filled with a finite value too small":
        return torch.where(allowed, scores, torch.full_like(scores, -10.0))
    return torch.where(allowed, scores, torch.full_like(scores, fill))


class Einsum:
    """Plain tensors and einsum."""

    def __init__(self, layer: mh.MultiHeadAttention, mistake: str = "", mask: str | None = None, lengths=None) -> None:
        self.w = [t.detach() for t in (layer.w_q, layer.w_k, layer.w_v)]  # (E, H, D)
        s = layer.sizes
        self.b = [p.bias.detach().view(-1, s.D) for p in (layer.q_proj, layer.k_proj, layer.v_proj)]
        self.w_o, self.b_o = layer.w_o.detach(), layer.o_proj.bias.detach()
        self.mistake, self.mask, self.lengths = mistake, mask, lengths
        self.H, self.D = s.H, s.D

    def to(self, dtype: torch.dtype) -> "Einsum":
        self.w, self.b = [t.to(dtype) for t in self.w], [t.to(dtype) for t in self.b]
        self.w_o, self.b_o = self.w_o.to(dtype), self.b_o.to(dtype)
        return self

    def __call__(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        m, H, D = self.mistake, self.H, self.D
        context = x if context is None else context
        (wq, wk, wv), (bq, bk, bv), wo, bo = self.w, self.b, self.w_o, self.b_o
        E = x.shape[-1]
        if m == "q and k swapped":
            wq, wk, bq, bk = wk, wq, bk, bq
        if m == "k and v swapped":
            wk, wv, bk, bv = wv, wk, bv, bk
        if m == "weight used transposed":
            wq, wk, wv = (w.reshape(E, H * D).T.reshape(E, H, D) for w in (wq, wk, wv))
        if m == "QKV packing: per head against per matrix":
            packed = torch.cat([w.reshape(E, H * D) for w in (wq, wk, wv)], 1).reshape(E, H, 3, D)
            wq, wk, wv = packed[:, :, 0], packed[:, :, 1], packed[:, :, 2]
            bias = torch.cat([b.flatten() for b in (bq, bk, bv)]).reshape(H, 3, D)
            bq, bk, bv = bias[:, 0], bias[:, 1], bias[:, 2]
        if m == "bias missing on v":
            bv = torch.zeros_like(bv)
        if m == "bias missing on q":
            bq = torch.zeros_like(bq)
        if m == "bias missing on q, k and v":
            bq = bk = bv = torch.zeros_like(bq)
        q = torch.einsum("bne,ehd->bnhd", x, wq) + bq
        k = torch.einsum("bme,ehd->bmhd", context, wk) + bk
        v = torch.einsum("bme,ehd->bmhd", x if m == "v made from x instead of the context" else context, wv) + bv
        if m == "k used as v":
            v = k
        if m == "heads split by view without transpose":
            q, k, v = (t.reshape(t.shape[0], H, t.shape[1], D).permute(0, 2, 1, 3) for t in (q, k, v))
        if m == "heads interleaved (D, H) instead of (H, D)":
            q, k, v = (t.reshape(*t.shape[:2], D, H).transpose(-1, -2) for t in (q, k, v))
        divisor = {"scale missing": 1, "scale by √E instead of √D": E**0.5, "scale by D instead of √D": D}
        scores = torch.einsum("bnhd,bmhd->bhnm", q, k) / divisor.get(m, D**0.5)
        allowed = allowed_pairs(self.mask, self.lengths, x.shape[1], context.shape[1], m)
        masked = hide(scores, allowed, m)
        if m == "dropout applied to scores":
            masked = F.dropout(masked, 0.2)
        axis = {"softmax over queries": 2, "softmax over heads": 1, "softmax over the batch": 0}.get(m, 3)
        if m == "half-precision softmax":
            weights = masked.half().softmax(axis).to(x.dtype)
        else:
            weights = masked.softmax(axis)
        if m == "mask applied after softmax without renormalising":
            weights = weights * allowed
        if m == "dropout active in eval":
            weights = F.dropout(weights, 0.2)
        heads = torch.einsum("bhnm,bmhd->bnhd", weights, v)
        if m == "heads merged without transposing back":
            heads = heads.permute(0, 2, 1, 3).reshape(heads.shape)
        if m == "heads merged in reverse order":
            heads = heads.flip(2)
        if m == "W_o missing":
            return heads.flatten(2)
        if m == "W_o per head instead of across heads":
            blocks = torch.stack([wo[h, :, h * D : (h + 1) * D] for h in range(H)])
            return torch.einsum("bnhd,hdf->bnhf", heads, blocks).flatten(2) + bo
        if m == "W_o used transposed":
            wo = wo.reshape(E, E).T.reshape(H, D, E)
        out = torch.einsum("bnhd,hde->bne", heads, wo)
        return out if m == "bias missing on the output" else out + bo


class Views(nn.Module):
    """nn.Linear, view, transpose."""

    def __init__(self, layer: mh.MultiHeadAttention, mistake: str = "", mask: str | None = None, lengths=None) -> None:
        super().__init__()
        s = layer.sizes
        self.heads, self.mistake, self.mask, self.lengths = s.H, mistake, mask, lengths
        self.query, self.key, self.value, self.out = (nn.Linear(s.E, s.E) for _ in range(4))
        mine = (self.query, self.key, self.value, self.out)
        for a, b in zip(mine, (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj)):
            a.load_state_dict(b.state_dict())

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        m, H = self.mistake, self.heads
        B, N, E = x.shape
        D = E // H
        source = x if context is None else context
        M = source.shape[1]

        def project(layer: nn.Linear, t: Tensor) -> Tensor:
            weight = layer.weight.T if m == "weight used transposed" and layer is not self.out else layer.weight
            if m == "W_o used transposed" and layer is self.out:
                weight = layer.weight.T
            letter = {self.query: "q", self.key: "k", self.value: "v", self.out: "output"}[layer]
            missing = (
                m.startswith("bias missing on")
                and letter in m.removeprefix("bias missing on ").replace(",", "").split()
            )
            return F.linear(
                t, weight, None if missing or (m == "bias missing on the output" and letter == "output") else layer.bias
            )

        q, k = project(self.query, x), project(self.key, source)
        v = project(self.value, x if m == "v made from x instead of the context" else source)
        if m == "q and k swapped":
            q, k = project(self.key, x), project(self.query, source)
        if m == "k and v swapped":
            k, v = v, k
        if m == "k used as v":
            v = k
        if m == "QKV packing: per head against per matrix":
            q, k, v = torch.cat([q, k, v], -1).view(B, N, H, 3, D).unbind(3)
            q, k, v = (t.reshape(B, N, E) for t in (q, k, v))

        def split(t: Tensor, n: int) -> Tensor:
            if m == "heads split by view without transpose":
                return t.view(B, H, n, D)
            if m == "heads interleaved (D, H) instead of (H, D)":
                return t.view(B, n, D, H).permute(0, 3, 1, 2)
            return t.view(B, n, H, D).transpose(1, 2)

        q, k, v = split(q, N), split(k, M), split(v, M)
        scale = 1 / math.sqrt(D)
        if m == "scale by D instead of √D":
            q = q * scale
        if m == "scale by √E instead of √D":
            scale = 1 / math.sqrt(E)
        if m == "scale missing":
            scale = 1.0
        scores = (q @ k.transpose(-2, -1)) * scale
        allowed = allowed_pairs(self.mask, self.lengths, N, M, m)
        scores = hide(scores, allowed, m, fill=-1e30)
        if m == "dropout applied to scores":
            scores = F.dropout(scores, 0.1)
        axis = {"softmax over queries": -2, "softmax over heads": 1, "softmax over the batch": 0}.get(m, -1)
        precision = torch.bfloat16 if m == "half-precision softmax" else scores.dtype
        attention = F.softmax(scores.to(precision), dim=axis).to(x.dtype)
        if m == "mask applied after softmax without renormalising":
            attention = attention.masked_fill(~allowed, 0)
        if m == "dropout active in eval":
            attention = F.dropout(attention, 0.1)
        heads = attention @ v
        if m == "heads merged without transposing back":
            merged = heads.contiguous().view(B, N, E)
        elif m == "heads merged in reverse order":
            merged = torch.cat([heads[:, h] for h in reversed(range(H))], -1)
        else:
            merged = heads.transpose(1, 2).contiguous().view(B, N, E)
        if m == "W_o missing":
            return merged
        if m == "W_o per head instead of across heads":
            groups = [
                merged[..., h * D : (h + 1) * D] @ self.out.weight[h * D : (h + 1) * D, h * D : (h + 1) * D].T
                for h in range(H)
            ]
            return torch.cat(groups, -1) + self.out.bias
        return project(self.out, merged)


class Modern(nn.Module):
    """Grouped heads, RoPE (`style` halves by rotate_half, interleaved by complex numbers), QK-norm, softcap, sinks."""

    def __init__(
        self, layer: mh.MultiHeadAttention, mistake: str = "", style: str = "rotate_half", mask="causal"
    ) -> None:
        super().__init__()
        s = layer.sizes
        self.H, self.G, self.D, self.mistake, self.style, self.mask = s.H, s.G, s.D, mistake, style, mask
        self.softcap = layer.softcap
        self.wq, self.wk = nn.Linear(s.E, s.H * s.D), nn.Linear(s.E, s.G * s.D)
        self.wv, self.wo = nn.Linear(s.E, s.G * s.D), nn.Linear(s.H * s.D, s.E)
        for a, b in zip((self.wq, self.wk, self.wv, self.wo), (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj)):
            a.load_state_dict(b.state_dict())
        self.gains = None if layer.q_norm is None else [layer.q_norm.weight.detach(), layer.k_norm.weight.detach()]
        self.sinks = None if layer.sinks is None else nn.Parameter(layer.sinks.detach().clone())

    def turn(self, t: Tensor, positions: Tensor) -> Tensor:
        """T (B, N, heads, D)."""
        frequencies = 10000.0 ** (-torch.arange(0, self.D, 2, dtype=torch.float64) / self.D)
        angles = positions.double()[:, None] * frequencies  # (N, D/2)
        style = self.style
        if self.mistake == "RoPE pairs halves against interleaved":
            style = "complex" if style == "rotate_half" else "rotate_half"
        if style == "complex":
            pairs = torch.view_as_complex(t.double().reshape(*t.shape[:-1], -1, 2).contiguous())
            turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
            return torch.view_as_real(turned).flatten(-2).to(t.dtype)
        cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None].to(t.dtype) for f in (torch.cos, torch.sin))
        a, b = t.chunk(2, -1)
        return t * cos + torch.cat([-b, a], -1) * sin

    def norm(self, t: Tensor, gain: Tensor, axes: tuple[int, ...] = (-1,)) -> Tensor:
        return t / torch.sqrt(t.pow(2).mean(axes, keepdim=True) + 1e-6) * gain.to(t.dtype)

    def forward(self, x: Tensor) -> Tensor:
        m = self.mistake
        B, N, _ = x.shape
        q = self.wq(x).view(B, N, self.H, self.D)
        k = self.wk(x).view(B, N, self.G, self.D)
        v = self.wv(x).view(B, N, self.G, self.D)
        if self.gains is not None and m != "QK-norm missing":
            axes = {"QK-norm over the wrong axis": (-2, -1), "QK-norm over the wrong axis (positions)": (1,)}.get(
                m, (-1,)
            )
            q, k = self.norm(q, self.gains[0], axes), self.norm(k, self.gains[1], axes)
        where = torch.arange(N)
        q_where = where + (m == "RoPE positions off by one for q")
        k_where = where + (m == "RoPE positions off by one for k")
        if m == "same offset":
            q_where, k_where = where + 11, where + 11
        if m == "RoPE positions restarted":
            q_where = where * 0
        if m == "RoPE positions restarted in chunks":
            q_where = k_where = where % 4
        q, k = self.turn(q, q_where), self.turn(k, k_where)
        if m == "RoPE applied after the cache":
            k = self.turn(k, k_where)
        if m == "RoPE applied to v":
            v = self.turn(v, where)
        if m == "GQA: repeat for repeat_interleave":
            k, v = (t.repeat(1, 1, self.H // self.G, 1) for t in (k, v))
        else:
            k, v = (t.repeat_interleave(self.H // self.G, 2) for t in (k, v))
        scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * (1.0 if m == "scale missing" else self.D**-0.5)
        allowed = allowed_pairs(self.mask, None, N, N, m)
        cap = None if m == "softcap missing" else self.softcap
        if cap is not None and m != "softcap after the mask":
            scores = cap * torch.tanh(scores / cap)
        scores = hide(scores, allowed, m)
        if cap is not None and m == "softcap after the mask":
            scores = cap * torch.tanh(scores / cap)
        if self.sinks is not None and m != "sinks missing":
            sinks = self.sinks.to(x.dtype).view(1, -1, 1, 1).expand(B, -1, N, 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        if m == "mask applied after softmax without renormalising" and allowed is not None:
            weights = weights * allowed
        if m == "dropout active in eval":
            weights = F.dropout(weights, 0.15)
        if m == "dropout applied to scores":
            weights = F.dropout(scores, 0.15).softmax(-1)
        heads = torch.einsum("bhnm,bmhd->bnhd", weights, v)
        return self.wo(heads.flip(2).flatten(2) if m == "heads merged in reverse order" else heads.flatten(2))


class Grouped:
    """The same as `Modern` once more, on plain tensors: RoPE by matrices, kv heads by index, the softmax written out."""

    def __init__(self, layer: mh.MultiHeadAttention, mistake: str = "", style: str = "rotate_half") -> None:
        self.layer, self.mistake, self.s = layer, mistake, layer.sizes
        paired = style == "rotate_half"
        self.halves = not paired if mistake == "RoPE pairs halves against interleaved" else paired

    def matrices(self, positions: Tensor, like: Tensor) -> Tensor:
        """(N, D, D), one rotation for each position."""
        D = self.s.D
        first = torch.arange(D // 2) if self.halves else torch.arange(0, D, 2)
        second = first + (D // 2 if self.halves else 1)
        angles = positions.double()[:, None] / 10000.0 ** (2 * torch.arange(D // 2).double() / D)
        turn = torch.zeros(len(positions), D, D, dtype=torch.float64)
        turn[:, first, first], turn[:, second, second] = angles.cos(), angles.cos()
        turn[:, first, second], turn[:, second, first] = -angles.sin(), angles.sin()
        return turn.to(like.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        m, s, layer = self.mistake, self.s, self.layer
        N = x.shape[1]
        q, k, v = (
            torch.einsum("bne,ehd->bnhd", x, w) + p.bias.view(-1, s.D)
            for w, p in ((layer.w_q, layer.q_proj), (layer.w_k, layer.k_proj), (layer.w_v, layer.v_proj))
        )
        if m != "QK-norm missing":
            axes = {"QK-norm over the wrong axis": [2, 3], "QK-norm over the wrong axis (positions)": [1]}.get(m, [3])
            q, k = (
                t * torch.rsqrt((t * t).mean(axes, keepdim=True) + 1e-6) * norm.weight
                for t, norm in ((q, layer.q_norm), (k, layer.k_norm))
            )
        at = torch.arange(N)
        q_at = {"RoPE positions off by one for q": at + 1, "RoPE positions restarted": at * 0}.get(m, at)
        k_at = {"RoPE positions off by one for k": at + 1, "RoPE applied after the cache": 2 * at}.get(m, at)
        if m == "RoPE positions restarted in chunks":
            q_at = k_at = at % 4
        q = torch.einsum("nij,bnhj->bnhi", self.matrices(q_at, x), q)
        k = torch.einsum("nij,bnhj->bnhi", self.matrices(k_at, x), k)
        if m == "RoPE applied to v":
            v = torch.einsum("nij,bnhj->bnhi", self.matrices(at, x), v)
        head = torch.arange(s.H)
        reads = head % s.G if m == "GQA: repeat for repeat_interleave" else head // (s.H // s.G)
        scores = torch.einsum("bnhd,bmhd->bhnm", q, k[:, :, reads])
        scores = scores if m == "scale missing" else scores / s.D**0.5
        hidden = at[:, None] < at + (m == "causal mask off by one, strict")
        cap = layer.softcap
        if m == "softcap after the mask":
            scores = torch.tanh(scores.masked_fill(hidden, -math.inf) / cap) * cap
        else:
            scores = scores if m == "softcap missing" else torch.tanh(scores / cap) * cap
            if m == "mask filled with a finite value too small":
                scores = scores.masked_fill(hidden, -5.0)
            elif m != "mask applied after softmax without renormalising":
                scores = scores.masked_fill(hidden, -math.inf)
        if m == "dropout applied to scores":
            scores = F.dropout(scores, 0.25)
        powers = scores.exp()
        sinks = 0 if m == "sinks missing" else layer.sinks.exp()[:, None, None]
        weights = powers / (powers.sum(-1, keepdim=True) + sinks)
        if m == "mask applied after softmax without renormalising":
            weights = weights.masked_fill(hidden, 0)
        if m == "dropout active in eval":
            weights = F.dropout(weights, 0.25)
        heads = torch.einsum("bhnm,bmhd->bnhd", weights, v[:, :, reads])
        if m == "heads merged in reverse order":
            heads = heads[:, :, torch.arange(s.H - 1, -1, -1)]
        return torch.einsum("bnhd,hde->bne", heads, layer.w_o) + layer.o_proj.bias

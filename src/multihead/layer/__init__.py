"""The layer: multi-head attention with its projections, from the sizes to the seventh step.

`forward` is the seven steps in order. `q_proj`, `k_proj`, `v_proj` and `o_proj` are real `nn.Linear` children. They are
called wherever something could tell (see `eligible`), so hooks, adapters, quantised replacements and parametrizations
work; elsewhere the kernel multiplies by their weights. The number of heads at run time comes from what they put out, so
a layer sharded by heads works as it is.

Longer than other files because its arguments are explained where they are given.
"""

from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor, nn

from multihead import steps
from multihead.attention import attend, modules_watched, prepare
from multihead.cache import Cache, ContextCache, keeping
from multihead.call import Arguments, without_autocast
from multihead.kernel import eligible
from multihead.kernel.linear import project
from multihead.layer.call import Inside, LayerCall
from multihead.layer.checks import (
    brings_its_weights,
    check_call,
    check_input,
    check_lengths,
    check_positions,
    check_values,
)
from multihead.layer.whole import in_one_call
from multihead.lens import Lens, look
from multihead.lens.why import Origin, in_terms_of_x
from multihead.masks import Mask, as_mask, lower
from multihead.masks.intervals import Frame, Visible
from multihead.positions import RoPE
from multihead.sizes import Sizes, check_floating, check_numbers
from multihead.tensors import require_storage

Where = Tensor | tuple[Tensor, Tensor] | None  # positions, or the cosines and sines of their angles


class MultiHeadAttention(nn.Module):
    """Multi-head attention over a sequence of vectors of width E.

    Args:
        width: E, the width of the model.
        heads: H, the number of query heads.
        kv_heads: G, the number of key/value heads; each serves H/G query heads (GQA; 1: MQA). H unless given.
        head_dim: D, the width of a head's q and k; E/H unless given.
        value_dim: V, the width of a head's v; D unless given.
        context_dim: C, the width of the context in cross-attention; E unless given.
        bias: whether all four projections have a bias.
        rope: True, or a `RoPE`, to turn q and k by their positions.
        qk_norm: normalise each head's q and k (RMS), before RoPE.
        softcap: scores become softcap · tanh(scores / softcap).
        sinks: give each head a learned logit that joins the softmax's denominator.
        dropout: the probability with which a weight is dropped in training.
        scale: factor of the scores; 1/√D unless given.
        device: where the parameters are made.
        dtype: what the parameters are made of. In inference on the CPU a layer of bfloat16 or float16 also takes x of
            float32, and gives float32: half the memory, and the weights are the only thing that is rounded.

    >>> layer = mh.MultiHeadAttention(1024, heads=8)
    >>> layer
    MultiHeadAttention(
      E=1024, H=8, D=128
      (q_proj): Linear(in_features=1024, out_features=1024, bias=True)
      (k_proj): Linear(in_features=1024, out_features=1024, bias=True)
      (v_proj): Linear(in_features=1024, out_features=1024, bias=True)
      (o_proj): Linear(in_features=1024, out_features=1024, bias=True)
    )
    >>> layer(torch.randn(4, 1024), mask=mh.Causal()).shape
    torch.Size([4, 1024])
    """

    attend = staticmethod(attend)  # who computes steps 3 and 4, and who looks at them: others where q and k are spread
    lens = staticmethod(look)  # over processes

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        context_dim: int | None = None,
        bias: bool = True,
        rope: bool | RoPE = False,
        qk_norm: bool = False,
        softcap: float | None = None,
        sinks: bool = False,
        dropout: float = 0.0,
        scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dtype is not None:
            check_floating("dtype=", dtype)
        check_numbers(scale, softcap, dropout)
        self.sizes = s = Sizes.of(width, heads, kv_heads, head_dim, value_dim, context_dim)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(s.E, s.H * s.D, bias=bias, **made)
        self.k_proj = nn.Linear(s.C, s.G * s.D, bias=bias, **made)
        self.v_proj = nn.Linear(s.C, s.G * s.V, bias=bias, **made)
        self.o_proj = nn.Linear(s.H * s.V, s.E, bias=bias, **made)
        self.q_norm = nn.RMSNorm(s.D, eps=1e-6, **made) if qk_norm else None
        self.k_norm = nn.RMSNorm(s.D, eps=1e-6, **made) if qk_norm else None
        self.sinks = nn.Parameter(torch.empty(s.H, **made)) if sinks else None
        self.rope = RoPE() if rope is True else rope or None
        if self.rope is not None:
            self.rope.frequencies(s.D)  # refuses a width that it cannot turn
        self.softcap, self.dropout = softcap, dropout
        self.scale = s.D**-0.5 if scale is None else scale
        self.taps: tuple[tuple[steps.Tap, Inside], ...] = ()  # of `edit` and `trace`
        self._visibility: tuple[Visible, Mask | Tensor | None] | None = None  # for taps: what is seen, by which mask
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier uniform for the four matrices, zero for biases and sinks, one for the norms."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            nn.init.xavier_uniform_(projection.weight)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.reset_parameters()
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def extra_repr(self) -> str:
        s = self.sizes
        shown = [f"E={s.E}", f"H={s.H}"]
        shown += [f"G={s.G}"] if s.G != s.H else []
        shown += [f"D={s.D}"]
        shown += [f"V={s.V}"] if s.V != s.D else []
        shown += [f"C={s.C}"] if s.C != s.E else []
        shown += [f"rope={self.rope}"] if self.rope is not None else []
        shown += ["qk_norm=True"] if self.q_norm is not None else []
        shown += [f"softcap={self.softcap}"] if self.softcap is not None else []
        shown += ["sinks=True"] if self.sinks is not None else []
        shown += [f"dropout={self.dropout}"] if self.dropout else []
        shown += [f"scale={self.scale}"] if self.scale != s.D**-0.5 else []
        return ", ".join(shown)

    @property
    def w_q(self) -> Tensor:
        """(E, H, D), a view of `q_proj.weight`."""
        return self.q_proj.weight.unflatten(0, (-1, self.sizes.D)).permute(2, 0, 1)

    @property
    def w_k(self) -> Tensor:
        """(C, G, D), a view of `k_proj.weight`."""
        return self.k_proj.weight.unflatten(0, (-1, self.sizes.D)).permute(2, 0, 1)

    @property
    def w_v(self) -> Tensor:
        """(C, G, V), a view of `v_proj.weight`."""
        return self.v_proj.weight.unflatten(0, (-1, self.sizes.V)).permute(2, 0, 1)

    @property
    def w_o(self) -> Tensor:
        """(H, V, E), a view of `o_proj.weight`."""
        return self.o_proj.weight.unflatten(1, (-1, self.sizes.V)).permute(1, 2, 0)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        *,
        positions: Tensor | None = None,
        context_positions: Tensor | None = None,
        cache: Cache | ContextCache | None = None,
        lengths: Tensor | list[int] | None = None,
        bias: Tensor | None = None,
        values: Tensor | None = None,
        backend: str | None = None,
    ) -> Tensor:
        """The seven steps.

        Args:
            x: (N,E) or (B,N,E).
            context: what keys and values are made of, (K,C) or (B,K,C); `x` unless given.
            mask: what each query may see, such as `Causal()`; everything unless given.
            positions: where the tokens of `x` stand, for RoPE: (N,) or (B,N) integers. After those in the cache,
                from 0, unless given.
            context_positions: the same for `context`.
            cache: from `new_cache`: the tokens of `x` join it, and all of it is attended to.
            lengths: how many tokens of each row of `x` are real, (B,); the others join no cache and see nothing.
            bias: added to the scores; broadcasts right-aligned to (B,H,Q,K).
            values: what values are made of, where that is not what keys are made of, and of its shape.
            backend: see `mh.attend`.

        Returns:
            the shape of `x`.
        """
        watched = modules_watched(backend)
        if watched is None and torch.is_grad_enabled() and self._wants_gradient(x, context, values):
            watched = eligible.GRADIENT
        given = (x, context, mask, positions, context_positions, cache, lengths, bias, values, backend, watched)
        call = LayerCall(*given)
        if watched is None and self.attend is attend:
            output = in_one_call(self, call) if cache is None else keeping(cache, in_one_call, self, call)
            if isinstance(output, Tensor):
                return output
        return self.run(call)

    def run(self, call: LayerCall) -> Tensor:
        """`forward`, of a call that was not answered in one go."""
        return keeping(call.cache, self._seven_steps, call)

    def _seven_steps(self, call: LayerCall) -> Tensor:
        q_heads, k_heads, v_heads, visible = self._project_and_split(call)  # steps 1 and 2
        heads = self._score_and_mix(q_heads, k_heads, v_heads, visible, call.bias, call.backend)  # steps 3 and 4
        heads = self._tap("heads", heads)
        transposed = self._tap("transposed", steps.transpose_back(heads))  # step 5: (B, N, H, V)
        merged = self._tap("merged", steps.concatenate(transposed))  # step 6: (B, N, H·V)
        output = self._tap("output", project(self.o_proj, merged, call.watched))  # step 7: (B, N, E)
        return output if call.x.dim() == 3 else output[0]

    def _wants_gradient(self, *given: Tensor | None) -> bool:
        wanted = any(isinstance(t, Tensor) and t.requires_grad for t in given)
        return wanted or any(p.requires_grad for p in self.parameters())

    def look(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        *,
        positions: Tensor | None = None,
        context_positions: Tensor | None = None,
        cache: Cache | ContextCache | None = None,
        lengths: Tensor | list[int] | None = None,
        bias: Tensor | None = None,
    ) -> Lens:
        """A lens on the weights of the same call of `forward`, but for dropout; always with a batch axis.

        A cache is read as if the tokens of `x` joined it, and stays as it was; the lens has a copy of the keys.
        """
        given = (x, context, mask, positions, context_positions, cache, lengths, bias)
        return self.look_at(LayerCall(*given, watched=modules_watched()))

    def look_at(self, call: LayerCall) -> Lens:
        """`look`, of a call."""
        if self.inside is Inside.CHANGE:
            raise ValueError("scores, masked or weights are patched: a lens knows only what q and k make of them")
        if isinstance(call.cache, Cache):
            call = replace(call, cache=call.cache.fork())
        q, k, _, visible = self._project_and_split(call)
        lens = self.lens(q, k, visible, scale=self.scale, softcap=self.softcap, sinks=self.sinks, bias=call.bias)
        if call.cache is None and self.lens is look:  # all that q and k were made of is at hand
            lens.origin = in_terms_of_x(self, call.x, call.context, call.positions, call.context_positions)
        else:
            lens.origin = Origin(self.rope)
        return lens

    def _project_and_split(self, call: LayerCall) -> tuple[Tensor, Tensor, Tensor, Visible]:
        """Steps 1 and 2: queries, keys and values, head by head, and which keys each query may see."""
        x, context, values, cache, mask = call.x, call.context, call.values, call.cache, call.mask
        check_call(x, context, cache, call.context_positions, self.sizes, self.q_proj)
        check_values(values, x, context, cache, self.sizes, self.v_proj)
        if x.dim() == 2:
            x = x[None]
            context, values = (t[None] if t is not None and t.dim() == 2 else t for t in (context, values))
        real = check_lengths(call.lengths, x, context, cache)
        q = project(self.q_proj, x, call.watched)  # step 1
        q = self._tap("q", q.unflatten(-1, (-1, self.sizes.D)))  # (B, N, H, D)
        where = self._where("positions", call.positions, x, cache.length if isinstance(cache, Cache) else 0)
        q_heads = self._tap("q_heads", self._turn(q, self.q_norm, where))  # step 2: (B, H, N, D)

        if isinstance(cache, ContextCache):
            k_heads, v_heads = cache.k, cache.v
            cache.check(x.shape[0], self.sizes)
            frame = Frame.of(x.shape[1], k_heads.shape[2], x.device)
        else:
            k_heads, v_heads = self._keys_and_values(x, context, values, where, call)
            if cache is not None:
                k_heads, v_heads, frame = cache.append(k_heads, v_heads, real)
                k_heads, v_heads = k_heads.to(q_heads.dtype), v_heads.to(q_heads.dtype)  # a cache may hold wider ones
                mask = cache.through_window(mask)
            else:
                frame = Frame.of(x.shape[1], k_heads.shape[2], x.device, used=real, real=real)
        k_heads, v_heads = self._tap("k_heads", k_heads), self._tap("v_heads", v_heads)

        visible = lower(as_mask(mask), frame, x.shape[0], q_heads.shape[1])
        if self.taps:
            self._visibility = visible, mask if context is None and not isinstance(cache, ContextCache) else None
        return q_heads, k_heads, v_heads, visible

    def _keys_and_values(
        self,
        x: Tensor,
        context: Tensor | None,
        values: Tensor | None,
        where: Where,
        call: LayerCall,
    ) -> tuple[Tensor, Tensor]:
        """Steps 1 and 2 for k and v; `where` the tokens of x stand."""
        source = x if context is None else context
        if context is not None:
            check_input("context", context, self.sizes.C, self.k_proj)
            if context.dim() != 3 or context.shape[0] != x.shape[0]:
                raise ValueError(
                    f"context has shape {tuple(context.shape)}: expected (B,K,C) with B={x.shape[0]}, as x"
                )
            where = self._where("context_positions", call.context_positions, context, 0)
        k = project(self.k_proj, source, call.watched)  # step 1
        v = project(self.v_proj, source if values is None else values, call.watched)
        k = self._tap("k", k.unflatten(-1, (-1, self.sizes.D)))  # (B, K, G, D)
        v = self._tap("v", v.unflatten(-1, (-1, self.sizes.V)))  # (B, K, G, V)
        return self._turn(k, self.k_norm, where), steps.split(v)  # (B, G, K, D), (B, G, K, V)

    def _turn(self, t: Tensor, norm: nn.RMSNorm | None, where: Where) -> Tensor:
        """Step 2, and what makes q and k ready to meet: QK-norm, then RoPE."""
        heads = steps.split(t)
        if norm is not None:
            if not norm._forward_pre_hooks:  # which might bring its weight back
                require_storage("a norm's weight", norm.weight)
            heads = norm(heads.to(norm.weight.dtype)).to(t.dtype)  # under autocast the weight stays float32
        if self.rope is None or where is None:
            return heads
        return self.rope.turn(heads, *where) if isinstance(where, tuple) else self.rope.rotate(heads, where)

    def _score_and_mix(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, bias: Tensor | None, backend: str | None
    ) -> Tensor:
        """Steps 3 and 4, in one kernel unless a tap wants to change what is inside."""
        options: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks, "bias": bias}
        dropout = self.dropout if self.training else 0.0
        if self.inside is Inside.CHANGE:
            if backend not in (None, "reference"):
                raise ValueError(
                    f"backend={backend!r}: scores, masked and weights are patched, which only reference takes"
                )
            return self._written_out(q, k, v, visible, options, dropout)
        if self.inside is Inside.WATCH:  # the kernel that runs is the one that would have run unwatched
            self._written_out(q, k, v, visible, options, 0.0)
        return self.attend(q, k, v, visible, dropout=dropout, backend=backend, **options)  # type: ignore[return-value]

    def _written_out(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, options: dict[str, Any], dropout: float
    ) -> Tensor:
        """Steps 3 and 4 as the specification has them, shown to the taps."""
        call = prepare(Arguments(q, k, v, visible, dropout=dropout, **options))
        seed = torch.randint(2**63 - 1, (), device=q.device) if dropout else None
        drops: dict[str, Any] = {"dropout": dropout, "seed": seed, "tap": self._tap}
        with without_autocast(call.q.device):
            return steps.attend(call.q, call.k, call.v, allowed=call.allowed(), **options, **drops)[0]

    @overload
    def new_cache(self, *, context: Tensor, context_positions: Tensor | None = None) -> ContextCache: ...

    @overload
    def new_cache(
        self,
        batch: int = 1,
        capacity: int | None = None,
        *,
        window: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> Cache: ...

    def new_cache(
        self,
        batch: int = 1,
        capacity: int | None = None,
        *,
        window: int | None = None,
        context: Tensor | None = None,
        context_positions: Tensor | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> Cache | ContextCache:
        """A cache for this layer: of fixed `capacity`, sliding over the newest `window` tokens, or else growing.

        With `context`, (K,C) or (B,K,C): its keys and values, projected now, for cross-attention later. `dtype` may be
        narrower than the layer: torch.bfloat16, or "int8", a byte for each number and a scale for each row of k and v
        (a quarter of float32's memory; see docs/generation.md for what that costs).

        >>> layer = mh.MultiHeadAttention(256, heads=4)
        >>> layer.new_cache(capacity=100, dtype="int8").nbytes / layer.new_cache(capacity=100).nbytes
        0.265625
        """
        if context is not None:
            if capacity is not None or window is not None:
                raise ValueError("context= is projected once and never grows: give no capacity= or window= with it")
            check_input("context", context, self.sizes.C, self.k_proj)
            context = context[None] if context.dim() == 2 else context
            where = self._where("context_positions", context_positions, context, 0)
            watched = modules_watched()
            k = project(self.k_proj, context, watched).unflatten(-1, (-1, self.sizes.D))
            v = project(self.v_proj, context, watched).unflatten(-1, (-1, self.sizes.V))
            return ContextCache(self._turn(k, self.k_norm, where), steps.split(v), self.sizes)
        if isinstance(dtype, torch.dtype):
            check_floating("dtype=", dtype)
        made = next((p for p in (*self.k_proj.parameters(), *self.parameters()) if p.dtype.is_floating_point), None)
        if made is not None:  # a quantised layer may have none: then torch's defaults
            device = made.device if device is None and not brings_its_weights(self.k_proj) else device
            dtype = made.dtype if dtype is None else dtype
        width = getattr(self.k_proj, "out_features", self.sizes.G * self.sizes.D)  # a replacement need not say
        return Cache(
            batch,
            width // self.sizes.D,
            self.sizes.D,
            self.sizes.V,
            capacity=capacity,
            window=window,
            device=device,
            dtype=dtype,
        )

    @property
    def inside(self) -> Inside:
        """What taps do to scores, masked and weights."""
        wanted = [inside for _, inside in self.taps if inside is not Inside.NOTHING]
        return Inside.NOTHING if not wanted else Inside.CHANGE if Inside.CHANGE in wanted else Inside.WATCH

    def _tap(self, name: str, t: Tensor) -> Tensor:
        for tap, _ in self.taps:
            t = tap(name, t)
        return t

    def _where(self, name: str, given: Tensor | None, x: Tensor, first: int | Tensor) -> Where:
        """Where the tokens of `x` stand, as given or counted on from `first`; None without RoPE.

        As the cosines and sines of their angles, once for q and k, and where they are counted once for all layers with
        the same RoPE; as positions, (N,) or (B, N), for a RoPE of somebody else's.
        """
        check_positions(name, given, x)
        rope, N = self.rope, x.shape[1]
        if rope is None:
            return given
        own = type(rope) is RoPE and not eligible.followed()
        dtype = torch.promote_types(x.dtype, torch.float32)
        if own and given is None and isinstance(first, int):
            table = rope.table(self.sizes.D, first + N, x.device, dtype)
            if table is not None:
                return table[0][first : first + N], table[1][first : first + N]
        if given is None:
            given = torch.arange(N, device=x.device) + (first[:, None] if isinstance(first, Tensor) else first)
        fits = given.shape[-1:] == (N,)  # what does not is refused where it is used
        return rope.cos_sin(self.sizes.D, given, dtype=dtype) if own and fits else given

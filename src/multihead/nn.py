"""A drop-in for `torch.nn.MultiheadAttention`: its signature, its meanings, its state_dict, computed by `mh.attend`.

Everything here keeps torch's meanings: True in a bool mask hides, `is_causal` counts from the left, batches come
second unless `batch_first`. What is different on purpose is listed, with a test for each line, in docs/nn.md.

Longer than other files because torch's class has two ways in, each with all of its arguments.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from multihead import steps
from multihead.attention import attend, modules_watched
from multihead.call import Reason
from multihead.kernel.linear import linear, project
from multihead.lens import attend_with_weights, look
from multihead.masks import Allowed, Causal, Mask, Padding, check_broadcast, lower
from multihead.masks.intervals import Frame, Visible
from multihead.sizes import describe
from multihead.tensors import inside_torch_func, readable, require_storage

AT_ONCE = 2**22  # weights held at once where their mean over heads is wanted

__all__ = ["MultiheadAttention", "Report", "replace"]


class ShapeError(ValueError, AssertionError):
    """A shape that does not fit: a ValueError, as everywhere in this package, and an AssertionError, as in torch."""


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with our attention inside. Arguments, attributes and state_dict are torch's.

    >>> from multihead.nn import MultiheadAttention
    >>> attention = MultiheadAttention(64, num_heads=8, batch_first=True)
    >>> x = torch.randn(2, 5, 64)
    >>> output, weights = attention(x, x, x, is_causal=True, average_attn_weights=False)
    >>> output.shape, weights.shape
    (torch.Size([2, 5, 64]), torch.Size([2, 8, 5, 5]))
    """

    def _reset_parameters(self) -> None:
        super()._reset_parameters()
        _be_called(self)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As torch's, with N the batch, L the queries and S the keys.

        Args:
            query: (L,E) without a batch, (L,N,E), or (N,L,E) if `batch_first`.
            key: (S,kdim), (S,N,kdim) or (N,S,kdim).
            value: (S,vdim), (S,N,vdim) or (N,S,vdim).
            key_padding_mask: (S,) without a batch, or (N,S). bool: True hides the key; floating: added to its scores.
            need_weights: give the weights as well. It never changes the output, nor which kernel computes it.
            attn_mask: (L,S), (N·H,L,S), or four axes that broadcast to (N,H,L,S). bool: True hides; floating: added.
            average_attn_weights: give the mean of the weights over the heads.
            is_causal: without `attn_mask`, query i sees keys 0…i; with one, the mask says it all.

        Returns:
            the output, of the shape of `query`, and the weights, (N,L,S) or (N,H,L,S), or None.
        """
        if query.is_nested or key.is_nested or value.is_nested:
            if attn_mask is not None or key_padding_mask is not None:
                raise ValueError("nested tensors: expected no attn_mask and no key_padding_mask; their lengths say it")
            return self._forward_nested(query, key, value, need_weights, average_attn_weights, is_causal)
        self._check(query, key, value)
        batched = query.dim() == 3
        axis = 1 if batched and not self.batch_first else 0  # of the batch

        watched = modules_watched()
        q, k, v = self._project(query, key, value, watched)  # step 1
        k, v, extra = self._extend(k, v, position_axis=1 if batched and axis == 0 else 0)
        q_heads, k_heads, v_heads = (self._split(t if batched else t[None], axis) for t in (q, k, v))  # step 2
        B, H, L, _ = q_heads.shape
        visible, bias = read_masks(key_padding_mask, attn_mask, is_causal, (B, H, L, k_heads.shape[2]), extra, q)
        dropout = self.dropout if self.training else 0.0
        looked, lse, weights = need_weights and _can_be_looked_at(q_heads, k_heads, bias), None, None
        if looked and (not average_attn_weights or B * H * L * k_heads.shape[2] <= AT_ONCE):
            heads, weights = attend_with_weights(q_heads, k_heads, v_heads, visible, bias=bias, dropout=dropout)
        else:
            given: Any = attend(q_heads, k_heads, v_heads, visible, bias=bias, dropout=dropout, return_lse=looked)
            heads, lse = given if looked else (given, None)  # steps 3 and 4

        transposed = steps.transpose_back(heads)  # step 5: (N, L, H, D)
        merged = steps.concatenate(transposed.transpose(0, axis))  # step 6, in the layout of `query`
        output = project(self.out_proj, merged if batched else merged[0], watched)  # step 7
        if not need_weights:
            return output, None
        if weights is None:
            weights = weights_of(q_heads, k_heads, visible, bias, lse, average_attn_weights)
        elif average_attn_weights:
            weights = weights.mean(1)
        weights = weights.to(q_heads.dtype)
        return output, weights if batched else weights[0]

    def _project(self, query: Tensor, key: Tensor, value: Tensor, watched: Reason | None) -> tuple[Tensor, ...]:
        """Step 1: in one product where query, key and value are one tensor, as in self-attention."""
        packed = self.in_proj_weight
        bias: Tensor | None = self.in_proj_bias
        if bias is not None:
            bias = bias.to((self.q_proj_weight if packed is None else packed).dtype)  # torch adds one of any dtype
        if packed is not None and query is key and key is value:
            return linear(query, packed, bias, watched).chunk(3, dim=-1)
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if packed is None else packed.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        return tuple(linear(x, w, b, watched) for x, w, b in zip((query, key, value), weights, biases))

    def _extend(self, k: Tensor, v: Tensor, position_axis: int) -> tuple[Tensor, Tensor, int]:
        """The keys and values that every query sees: learned ones (`add_bias_kv`) and zeros (`add_zero_attn`)."""
        if self.bias_k is None and not self.add_zero_attn:
            return k, v, 0
        extended = []
        for t, learned in ((k, self.bias_k), (v, self.bias_v)):
            one = [1 if n == position_axis else size for n, size in enumerate(t.shape)]
            more = [] if learned is None else [learned.view(-1).to(t.dtype).expand(one)]
            more += [t.new_zeros(one)] if self.add_zero_attn else []
            extended.append(torch.cat([t, *more], dim=position_axis))
        return extended[0], extended[1], len(more)

    def _split(self, t: Tensor, batch_axis: int) -> Tensor:
        """Step 2: (N, S, E) or (S, N, E) -> (N, H, S, D)."""
        return steps.split(t.unflatten(-1, (self.num_heads, self.head_dim)).transpose(0, batch_axis))

    def _forward_nested(
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool, average: bool, is_causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Rows of different lengths, such as `nn.TransformerEncoder` makes of a padded batch; weights come padded."""
        for name, t in (("query", query), ("key", key), ("value", value)):
            if t is query and t.dim() != 3:
                raise ShapeError(f"{_not_a_query(t)}: expected a nested tensor of rows, (N,*,E)")
            if not t.is_nested or t.dim() != 3:
                raise ShapeError(f"{name} is {'nested' if t.is_nested else 'not nested'} and {t.dim()}-D: expected "
                                 "query, key and value to be nested, (N,*,E) each")  # fmt: skip
        padded = {id(t): t.to_padded_tensor(0.0) for t in (query, key, value)}
        queries, keys, values = (_lengths(t) for t in (query, key, value))
        if not torch.equal(keys, values) or len(queries) != len(keys):
            given = f"query {queries.tolist()}, key {keys.tolist()}, value {values.tolist()}"
            raise ShapeError(f"nested tensors have rows of {given}: expected as many rows, and values as long as keys")
        q, k, v = (padded[id(t)] for t in (query, key, value))
        real, seen = (torch.arange(t.shape[1], device=t.device) < n[:, None] for t, n in ((q, queries), (k, keys)))
        if not self.batch_first:
            turned = {id(t): t.transpose(0, 1) for t in (q, k, v)}  # what is one tensor stays one
            q, k, v = (turned[id(t)] for t in (q, k, v))
        output, weights = self.forward(q, k, v, ~seen, need_weights, None, average, is_causal)
        output = output if self.batch_first else output.transpose(0, 1)
        if query.layout == torch.jagged:
            offsets = query.offsets()  # type: ignore[attr-defined]
            return torch.nested.nested_tensor_from_jagged(output[real], offsets), weights
        return torch._nested_tensor_from_mask(output, real, mask_check=False), weights

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        batch, row = ("(N,L,E)", "(N,S,") if self.batch_first else ("(L,N,E)", "(S,N,")
        if query.dim() not in (2, 3):
            raise ShapeError(f"{_not_a_query(query)}: expected (L,E), or {batch} with a batch")
        position, second = (0, None) if query.dim() == 2 else (1, 0) if self.batch_first else (0, 1)
        batch, row = ("(L,E)", "(S,") if second is None else (batch, row)
        weight = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight
        plain = type(weight) in (Tensor, nn.Parameter) and not torch.is_autocast_enabled(query.device.type)
        for name, t, width in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            axes = f"{row}{'kdim' if name == 'key' else 'vdim'})" if t is not query else batch
            if t.dim() != query.dim():
                axes_found = f"{key.dim()}-D and {value.dim()}-D"
                found = f"expected `key` and `value` to be {query.dim()}-D but found {axes_found} tensors"
                raise ShapeError(
                    f"{found} respectively: {name} has shape {tuple(t.shape)}, and query's asks for {axes}"
                )
            if t.shape[-1] != width:
                raise ShapeError(f"{name} has shape {tuple(t.shape)}: expected a last axis of {width}, as {axes}")
            if second is not None and t.shape[second] != query.shape[second]:
                raise ShapeError(f"{name} has shape {tuple(t.shape)}: expected a batch of N={query.shape[second]}")
            if plain and (t.dtype, t.device) != (weight.dtype, weight.device):
                raise ValueError(f"{name} is {describe(t)}, but the weights are {weight.dtype} on {weight.device}")
        if key.shape[position] != value.shape[position]:
            raise ShapeError(
                f"key has S={key.shape[position]} positions but value has {value.shape[position]}: expected as many"
            )


def _not_a_query(t: Tensor) -> str:
    """In torch's words, which are all an empty nested tensor lets one say: it has no shape."""
    given = "" if t.is_nested else f", of shape {tuple(t.shape)}"
    return f"query should be unbatched 2D or batched 3D tensor but received {t.dim()}-D query tensor{given}"


def _lengths(nested: Any) -> Tensor:
    """How long each row of a nested tensor is, (N,)."""
    if nested.layout != torch.jagged:
        return nested._nested_tensor_size()[:, 0].to(nested.device)
    lengths = nested.lengths()  # None where the rows lie without gaps
    return nested.offsets().diff() if lengths is None else lengths


def _be_called(attention: nn.MultiheadAttention) -> None:
    """Make `nn.TransformerEncoderLayer` call it: in inference that computes attention itself unless there are hooks."""
    if _do_nothing not in attention._forward_pre_hooks.values():
        attention.register_forward_pre_hook(_do_nothing)


def _do_nothing(module: nn.Module, given: tuple) -> None:
    """The hook that is there to be seen."""


# Weights --------------------------------------------------------------------------------------------------------------


def weights_of(
    q: Tensor, k: Tensor, visible: Visible, bias: Tensor | None, lse: Tensor | None, average: bool
) -> Tensor:
    """The weights before dropout in the dtype of q, beside the kernel: (N, H, L, S), or their mean (N, L, S).

    With the kernel's lse their mean comes from a lens, a head at a time. Without it (a gradient is wanted, or
    there are no numbers to read) from step 3 as written, for the mean a few heads at a time, which a gradient computes
    again.
    """
    B, H, L, S = (*q.shape[:3], k.shape[2])
    if lse is not None:
        lens = look(q, k, visible, bias=bias, lse=lse)
        total = q.new_zeros((B, L, S), dtype=lens.dtype)
        for h in range(H):
            total += lens.weights(heads=h)[:, 0]
        return total.div_(H).to(q.dtype)
    if not average:
        return _step_3(q, k, visible, bias, slice(0, H)).to(q.dtype)
    count = max(1, AT_ONCE // max(1, B * L * S))  # heads
    parts = [slice(h, min(h + count, H)) for h in range(0, H, count)]
    if len(parts) == 1 or torch.compiler.is_compiling():
        return _step_3(q, k, visible, bias, slice(0, H)).mean(1).to(q.dtype)

    def sum_of(heads: slice) -> Tensor:
        return _step_3(q, k, visible, bias, heads).sum(1)

    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    total = checkpoint(sum_of, parts[0], **options)
    for heads in parts[1:]:
        total = total + checkpoint(sum_of, heads, **options)
    return (total / H).to(q.dtype)


def _step_3(q: Tensor, k: Tensor, visible: Visible, bias: Tensor | None, heads: slice) -> Tensor:
    """The weights of some heads, (N, h, L, S), float32 or wider."""
    exact = torch.promote_types(q.dtype, torch.float32)
    allowed = None if visible.is_everything else visible.allowed(q.device)
    allowed, bias = (t[:, heads] if t is not None and t.dim() == 4 and t.shape[1] > 1 else t for t in (allowed, bias))
    with torch.autocast(q.device.type, enabled=False):
        scores = steps.score(q[:, heads].to(exact), k[:, heads].to(exact), q.shape[-1] ** -0.5)
        masked = steps.hide(scores, allowed=allowed, bias=None if bias is None else bias.to(exact))
        return steps.weigh(masked)[0]


def _can_be_looked_at(q: Tensor, k: Tensor, bias: Tensor | None) -> bool:
    """Whether a lens can give the weights: there are numbers to read, and nobody wants a gradient of them."""
    if torch.compiler.is_compiling() or inside_torch_func() or q.is_meta or type(q) is not Tensor:
        return False
    wanted = any(t is not None and t.requires_grad for t in (q, k, bias))
    return not (wanted and torch.is_grad_enabled())


# Masks in torch's meaning ---------------------------------------------------------------------------------------------


def read_masks(
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    shape: tuple[int, int, int, int],
    extra: int,
    q: Tensor,
) -> tuple[Visible, Tensor | None]:
    """What torch's three mask arguments let each query see, and what they add to the scores.

    `shape` is (N, H, L, S + extra): of the keys, the last `extra` are seen by every query.
    """
    B, H, L, S = shape
    S -= extra
    frame = Frame(L, S, q.device, position=0)  # torch counts from the left: query i stands at key i
    mask: Mask | None = Causal() if is_causal and attn_mask is None else None
    bias: Tensor | None = None
    for name, given in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
        if given is None:
            continue
        require_storage(name, given)
        t = _four_axes(name, given, (B, H, L, S), batched=q.dim() == 3).to(q.device)
        hidden = _as_hidden(t)
        if hidden is None:
            bias = t if bias is None else bias + t
        else:
            part = _as_mask(hidden, S)
            mask = part if mask is None else mask & part
    visible = lower(mask, frame, B, H)
    if not extra:
        return visible, bias
    if not visible.is_everything:
        allowed = F.pad(visible.allowed(q.device), (0, extra), value=True)
        visible = Allowed(allowed).lower(Frame(L, S + extra, q.device, position=0))
    else:
        visible = Frame(L, S + extra, q.device, position=0).everything
    return visible, None if bias is None else F.pad(bias.expand(*bias.shape[:-1], S), (0, extra))


def _four_axes(name: str, t: Tensor, sizes: tuple[int, int, int, int], batched: bool) -> Tensor:
    """`t` so that it broadcasts to (N, H, L, S), the `sizes`."""
    if not isinstance(t, Tensor) or not (t.dtype == torch.bool or t.dtype.is_floating_point):
        what = describe(t) if isinstance(t, Tensor) else type(t).__name__
        raise TypeError(f"{name} is {what}: expected a bool tensor, True = hidden, or a floating one to be added")
    (B, H, L, S), shape, found = sizes, tuple(t.shape), f"but found {t.dim()}-D tensor instead"
    if name == "key_padding_mask":
        if shape == (B, S) or (B == 1 and shape == (S,)):
            return t.view(B, 1, 1, S)
        axes, right = (2, f"(N,S)={(B, S)}") if batched else (1, f"(S,)={(S,)}")
        wrong = "" if t.dim() == axes else f"expected `key_padding_mask` to be `None` or {axes}-D {found}: "
        raise ShapeError(f"{wrong}key_padding_mask has shape {shape}: expected {right}")
    if t.dim() == 4:
        try:
            check_broadcast(name, t, (B, H, L, S), "(N,H,L,S)")
        except ValueError as error:
            raise ShapeError(error) from None
        return t
    if shape == (L, S):
        return t.view(1, 1, L, S)
    if shape == (B * H, L, S):
        return t.view(B, H, L, S)
    if t.dim() == 3:
        wrong = f"Expected `attn_mask` shape to be {(B * H, L, S)}: "
    else:
        wrong = "" if t.dim() == 2 else f"expected `attn_mask` to be `None`, 2-D or 3-D {found}: "
    raise ShapeError(
        f"{wrong}attn_mask has shape {shape}: expected (L,S)={(L, S)}, (N·H,L,S)={(B * H, L, S)}, "
        f"or four axes that broadcast to (N,H,L,S)={(B, H, L, S)}"
    )


def _as_hidden(t: Tensor) -> Tensor | None:
    """A bool mask, as it is or from a floating one of 0 and −inf only (as `nn.Transformer` makes them); else None."""
    if t.dtype == torch.bool:
        return t
    if t.requires_grad or not readable(t):
        return None
    hidden = t == -torch.inf
    return hidden if bool((hidden | (t == 0)).all()) else None


def _as_mask(hidden: Tensor, S: int) -> Mask:
    """What `hidden` leaves to be seen: as intervals where it is padding at the right or causal, else as it is."""
    seen = ~hidden
    if readable(seen):
        B, H, L, keys = seen.shape
        if L == H == 1 and keys == S > 0 and torch.equal(seen, seen.cummin(-1).values):
            return Padding(seen.sum(-1).view(B))
        if B == H == 1 and L == keys == S and torch.equal(seen[0, 0], torch.ones_like(seen[0, 0]).tril()):
            return Causal()
    return Allowed(seen)


# Swapping -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What `replace` did, by the names of the modules.

    >>> report = mh.nn.replace(torch.nn.TransformerEncoderLayer(8, 2, batch_first=True))
    >>> report.replaced
    ['self_attn']
    """

    replaced: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)  # why not
    nested_off: list[str] = field(default_factory=list)  # encoders that no longer make nested tensors

    def __str__(self) -> str:
        lines = [f"replaced {len(self.replaced)} of {len(self.replaced) + len(self.left)} nn.MultiheadAttention"]
        lines += [f"  {name or '(the model)'}" for name in self.replaced]
        lines += [f"left {name or '(the model)'}: {why}" for name, why in self.left.items()]
        lines += [f"{name or '(the model)'}: nested tensors turned off" for name in self.nested_off]
        return "\n".join(lines)


def replace(model: nn.Module) -> Report:
    """Swap every `nn.MultiheadAttention` in `model` for ours, in place, the model itself included.

    Each module stays the object it was, with its parameters, hooks, device, dtype and mode; only what it computes with
    changes. Subclasses, and modules whose `forward` was replaced, are left as they are and reported.

    >>> from multihead.nn import replace
    >>> model = torch.nn.Transformer(32, nhead=4, num_encoder_layers=1, num_decoder_layers=1, batch_first=True)
    >>> print(replace(model))
    replaced 3 of 3 nn.MultiheadAttention
      encoder.layers.0.self_attn
      decoder.layers.0.self_attn
      decoder.layers.0.multihead_attn
    encoder: nested tensors turned off
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: expected an nn.Module")
    report = Report()
    for name, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention) or isinstance(module, MultiheadAttention):
            continue
        if type(module) is not nn.MultiheadAttention:
            report.left[name] = f"a subclass, {type(module).__name__}, with a forward of its own"
        elif "forward" in vars(module):
            report.left[name] = "its forward was replaced on the object"
        else:
            module.__class__ = MultiheadAttention
            _be_called(module)
            report.replaced.append(name)
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoder) and _nests_ours(module):
            module.use_nested_tensor = False
            report.nested_off.append(name)
    return report


def _nests_ours(encoder: nn.TransformerEncoder) -> bool:
    layers: list[Any] = list(encoder.layers)
    ours = any(isinstance(getattr(layer, "self_attn", None), MultiheadAttention) for layer in layers)
    return ours and getattr(encoder, "use_nested_tensor", False)

"""Hugging Face models over several ranks: `shard_sequence` and `shard_heads` of a model on "multihead" attention.

A model is called with its slice of the tokens on each rank. Position ids count from the slice's first token, and masks
are made for the whole sequence, as intervals. What a slice cannot know (labels that shift, caches, packed position ids)
is refused by name.
"""

import inspect
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from multihead.distributed.agree import Agreed, agree
from multihead.distributed.attention import Sharding, attend_slices, draw_seed
from multihead.distributed.exchange import ToHeads
from multihead.distributed.schedule import slices
from multihead.distributed.split import split_heads
from multihead.distributed.styles import HeadColumns, HeadRows, Shard, keep_part
from multihead.distributed.wire import Wire
from multihead.hf import attentions
from multihead.hf.interface import NAME, NEUTRAL
from multihead.hf.masks import IntervalMask
from multihead.hf.masks import mask as mask_of_one_process
from multihead.masks import Allowed, Causal, Mask, Window, lower
from multihead.masks.intervals import Frame, Visible

SLICES = "multihead_slices"  # the name that transformers knows this attention by
STATE = "_multihead_slices"  # attribute of an attention module
LENGTH_AWARE = ("dynamic", "longrope")  # ways to scale RoPE that look at how long the sequence is


@dataclass
class State:
    """The ranks that a model's sequence is cut over, and the lengths of the call under way."""

    sharding: Sharding
    agreed: Agreed | None = None


class _Active(threading.local):
    state: State | None = None


_active = _Active()


def shard_model(model: nn.Module, sharding: Sharding) -> nn.Module:
    """Cut the sequence of a Hugging Face model: see `shard_sequence`."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"{type(model).__name__} has no MultiHeadAttention and is no model of transformers: expected one of these"
        )
    used = model.config._attn_implementation
    if used != NAME:
        raise ValueError(f"the model runs on {used!r} attention: call model.set_attn_implementation({NAME!r}) first")
    kind = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type")
    if kind in LENGTH_AWARE:
        raise ValueError(f"rope_type={kind!r} turns keys by the length of the slice, not of the whole sequence")
    state = State(sharding)
    for module in attentions(model).values():
        setattr(module, STATE, state)
    model.set_attn_implementation(SLICES)
    names = list(inspect.signature(model.forward).parameters)

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        given = {**dict(zip(names, args)), **kwargs}
        _active.state = state
        return (), _in_whole_terms(state, model, given, names)

    def after(*_: object) -> None:
        _active.state = None

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, always_call=True)
    return model


def _in_whole_terms(state: State, model: PreTrainedModel, given: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Agree on the lengths, and say where the slice stands in the whole."""
    for name, why in (
        ("labels", "they are shifted within the slice; compute the loss from the logits"),
        ("past_key_values", "a slice has no cache"),
        ("decoder_input_ids", "a model with an encoder and a decoder is not offered"),
    ):
        if given.get(name) is not None:
            raise ValueError(f"{name} is given to a model that is sharded by sequence: {why}")
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if not isinstance(tokens, Tensor):
        raise ValueError("input_ids and inputs_embeds are missing: expected this rank's slice of the tokens")
    B, n = tokens.shape[:2]
    mask, positions, wire = given.get("attention_mask"), given.get("position_ids"), state.sharding.wire
    if mask is not None and mask.shape != (B, n):
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}: expected this rank's slice of it, {(B, n)}")
    if positions is not None and bool((positions.diff(dim=-1) != 1).any()):
        raise ValueError("position_ids jump within the slice (packed sequences): expected ids that rise by 1")
    dropout = getattr(model.config, "attention_dropout", 0.0) if model.training else 0.0
    same = {"attention_mask": mask is None, "training": model.training, "gradient": torch.is_grad_enabled()}
    dtype = next(p.dtype for p in model.parameters() if p.dtype.is_floating_point)
    method = f"{state.sharding.method}, {type(model).__name__}"
    state.agreed = agree(wire, method, n, n, {"B": B}, same, dtype=dtype, device=tokens.device, seed=draw_seed(dropout))
    if 0 in state.agreed.queries:
        empty = wire.name(state.agreed.queries.index(0))
        raise ValueError(f"{empty} has no tokens: a model of transformers expects at least one on each rank")
    first, parts = slices(state.agreed.queries)[wire.rank][0], slices(state.agreed.queries)
    if positions is None and "position_ids" in names:
        given["position_ids"] = torch.arange(first, first + n, device=tokens.device)[None]
    if mask is not None:
        column = mask.to(torch.uint8)[:, None, :, None]
        given["attention_mask"] = ToHeads.apply(column, wire, parts, ((0, 1),) * wire.size)[:, 0, :, 0]
    if "use_cache" in names or any(name == "kwargs" for name in names):
        given["use_cache"] = False
    return given


def mask(batch_size: int, q_length: int, kv_length: int, **more: Any) -> Tensor:
    """The mask interface of transformers, for the whole sequence whatever the slice: (B, 1, N, N)."""
    state = _active.state
    if state is None or state.agreed is None:
        raise ValueError(f"attn_implementation={SLICES!r} is what shard_sequence gives a model: call that on it")
    N = sum(state.agreed.queries)
    more |= {"q_offset": 0, "kv_offset": 0}
    return mask_of_one_process(batch_size, N, N, **more)


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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' models call it, for this rank's slices: query (B,H,n,D), key and value (B,G,n,·)."""
    passed = {name for name, given in kwargs.items() if given is not None and given is not False}
    unknown = sorted(passed - NEUTRAL)
    if unknown:
        raise ValueError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention: a model that is sharded by "
            "sequence cannot honour that"
        )
    state: State = getattr(module, STATE)
    assert state.agreed is not None
    (B, H, _, _), N = query.shape, sum(state.agreed.queries)
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        window = None if sliding_window is None else Window(sliding_window - 1, sliding_window - 1)
        whole: Mask | Visible | None = Causal(sliding_window) if causal else window
    elif isinstance(attention_mask, IntervalMask):
        whole = attention_mask.visible
    elif attention_mask.dtype == torch.bool:
        whole = lower(Allowed(attention_mask), Frame.of(N, N, query.device), B, H)
    else:
        raise ValueError(f"attention_mask is {attention_mask.dtype}: expected a bool mask of the whole sequence")
    heads = attend_slices(
        state.sharding,
        state.agreed,
        query,
        key,
        value,
        whole,
        scale=scaling,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.reshape(-1),
        bias=None,
        dropout=dropout if module.training else 0.0,
        backend=None,
    )
    return heads.transpose(1, 2).contiguous(), None


AttentionInterface.register(SLICES, attention)
AttentionMaskInterface.register(SLICES, mask)


PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"))
OUTPUTS = ("o_proj", "out_proj", "dense")


def shard_attentions(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Cut the heads of a Hugging Face model's attention modules: see `shard_heads`.

    Attention that a `tp_plan` has cut already is left as it is.
    """
    found = attentions(model)
    if not found:
        raise ValueError(f"{type(model).__name__} has no MultiHeadAttention, and no attention of transformers")
    wire = Wire(mesh)
    for name, module in found.items():
        parent = model.get_submodule(name.rpartition(".")[0])
        names = next((three for three in PROJECTIONS if all(hasattr(module, one) for one in three)), None)
        holder, last = _output(module, parent)
        if names is None or holder is None or last is None:
            raise ValueError(
                f"{name} has no projections by these names: expected {' or '.join('/'.join(p) for p in PROJECTIONS)}, "
                f"and one of {', '.join(OUTPUTS)}; cut it by a plan of your own, of HeadColumns and HeadRows"
            )
        width = int(getattr(module, "head_dim", None) or module.attention_head_size)  # type: ignore[arg-type]
        weights = {one: getattr(module, one).weight for one in names}
        if any(isinstance(weight, DTensor) for weight in weights.values()):
            _check_whole_heads(name, weights, width)
            continue
        H, G = (getattr(module, one).out_features // width for one in names[:2])
        plan: dict[str, ParallelStyle] = {
            names[0]: HeadColumns(H, G, "queries"),
            names[1]: HeadColumns(H, G, "keys"),
            names[2]: HeadColumns(H, G, "keys"),
        }
        parallelize_module(module, mesh, plan)
        parallelize_module(holder, mesh, {last: HeadRows(H, G)})
        if isinstance(getattr(module, "sinks", None), nn.Parameter):
            keep_part(module, "sinks", Shard(wire, 0, H, split_heads(H, G, wire.size)[0]))
        for norm in ("q_norm", "k_norm"):
            for p in getattr(module, norm, nn.Identity()).parameters():
                p.register_hook(wire.add_up)  # all heads share it, and each rank has some of them
    return model


def _check_whole_heads(name: str, weights: dict[str, Tensor], width: int) -> None:
    """Refuse what a `tp_plan` has cut through the middle of a head, which it does with fewer kv heads than ranks."""
    for one, weight in weights.items():
        rows = weight.to_local().shape[0] if isinstance(weight, DTensor) else weight.shape[0]
        if rows % width:
            raise ValueError(
                f"tp_plan has left {name}.{one} {rows} rows on this rank, and a head has {width}: leave the attention "
                "out of the plan (config.base_model_tp_plan), and shard_heads cuts it by whole heads"
            )


def _output(module: nn.Module, parent: nn.Module) -> tuple[nn.Module | None, str | None]:
    """Which module has the output projection, and by what name."""
    for holder in (module, getattr(parent, "output", None)):
        for name in OUTPUTS:
            if isinstance(getattr(holder, name, None), nn.Linear):
                return holder, name
    return None, None

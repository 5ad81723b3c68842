"""The seven steps of one layer of a Hugging Face model.

A model hands over q, k and v when they are ready to meet. What is before and after, the projections and W_o, is read
from its weights, by the layouts of `mh.weights`, and believed only where it makes the q, k, v and output that were
seen.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from multihead import steps
from multihead.hf.interface import TRACERS
from multihead.hf.watch import Layer, attached, attentions, find
from multihead.layer import MultiHeadAttention
from multihead.layer.trace import STEPS, Trace
from multihead.masks.intervals import Visible
from multihead.sizes import Sizes
from multihead.weights import load_weights

CONTEXTS = ("key_value_states", "encoder_hidden_states")  # how models call what the keys are made of
CLOSE = 1e-4  # of the largest number: float32 sums in another order


@torch.no_grad()
def trace(model: nn.Module, layer: Layer, *, labels: Sequence[str] | None = None, **inputs: Any) -> Trace:
    """Run the model and keep every intermediate of the seven steps of one layer, of the first row of the batch.

    `q`, `k`, `output` and the trace's `layer`, a copy with the same weights, are there where the model's weights lie in
    a layout that is known, and make the numbers that were seen; `v` wherever all keys are of this call.

    Args:
        model: a model whose attention is "multihead".
        layer: which, by number or by name as in `attentions(model)`.
        labels: a name for each item.
        inputs: what the model takes: `input_ids=`, …

    >>> import multihead.hf
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> llama = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4))
    >>> llama.set_attn_implementation("multihead")
    >>> t = mh.hf.trace(llama, 1, input_ids=torch.tensor([[5, 6, 7]]))
    >>> t["q"].shape, t["weights"].shape, t["output"].shape
    (torch.Size([3, 4, 8]), torch.Size([4, 3, 3]), torch.Size([3, 32]))
    """
    number, module = find(model, layer)
    caught: dict[str, Any] = {}

    def before(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        caught["x"] = args[0] if args else options["hidden_states"]
        caught["context"] = next((options[name] for name in CONTEXTS if options.get(name) is not None), None)
        caught["turn"] = options.get("position_embeddings")

    def after(_: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        caught["output"] = result[0] if isinstance(result, tuple) else result

    def within(q: Tensor, k: Tensor, v: Tensor, visible: Visible, options: dict[str, Any], heads: Tensor) -> None:
        caught["attention"] = (q, k, v, visible, dict(options), heads)

    hooks = [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
    try:
        with attached(module, TRACERS, within):
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if "attention" not in caught:
        raise ValueError(f"layer={layer!r} was not called on these inputs: expected inputs that reach it")
    return _put_together(model, list(attentions(model))[number], caught, labels)


def _put_together(model: nn.Module, name: str, caught: dict[str, Any], labels: Sequence[str] | None) -> Trace:
    q, k, v, visible, options, heads = caught["attention"]
    x, context = caught["x"][0].float(), caught["context"]
    found = {"q_heads": q[0].float(), "k_heads": k[0].float(), "v_heads": v[0].float()}

    def record(step: str, t: Tensor) -> Tensor:
        found[step] = t[0]
        return t

    allowed = visible.allowed(q.device)
    steps.attend(q.float(), k.float(), v.float(), allowed=allowed, tap=record, **options)
    found["heads"] = heads[0].float()
    found["transposed"] = found["heads"].transpose(0, 1)
    found["merged"] = found["transposed"].flatten(1)
    source, seen = x if context is None else context[0].float(), caught["output"][0].float()
    if seen.shape == x.shape and not _close(seen, found["merged"]):  # a module may leave W_o to another
        found["output"] = seen
    (H, N, D), (G, K, V) = found["q_heads"].shape, found["v_heads"].shape
    sizes = Sizes.of(x.shape[-1], H, G, D, V, source.shape[-1])
    if source.shape[0] == K:
        found["v"] = found["v_heads"].transpose(0, 1)
    twin = _twin(model, name, sizes, options)
    turn = None
    if twin is not None:
        turn, made = _check(twin, x, source, found, caught)
        twin = twin if made else None
        found |= made
    tensors = {"x": x} | ({} if context is None else {"context": source})
    tensors |= {step: found[step].detach() for each in STEPS for step in each.names if step in found}
    told = [labels, labels if context is None and N == K else None]
    names = [[str(n) for n in range(count)] if given is None else list(given) for given, count in zip(told, (N, K))]
    traced = Trace(tensors, sizes, names[0], names[1], None, twin)
    scale = options["scale"]
    traced.options = {"scale": D**-0.5 if scale is None else scale, "softcap": options["softcap"], "rope": turn}
    return traced


def _twin(model: nn.Module, name: str, sizes: Sizes, options: dict[str, Any]) -> MultiHeadAttention | None:
    """A layer of ours with this module's weights, if they lie in a known layout: here, or with W_o one level above."""
    for prefix in (name, name.rpartition(".")[0]):
        state = model.get_submodule(prefix).state_dict() if prefix else {}
        if not state or any(not isinstance(t, Tensor) for t in state.values()):
            continue
        made = MultiHeadAttention(
            sizes.E,
            sizes.H,
            kv_heads=sizes.G,
            head_dim=sizes.D,
            value_dim=sizes.V,
            context_dim=sizes.C,
            bias=any(key.endswith("bias") for key in state),
            qk_norm=any("q_norm" in key for key in state),
            sinks=any("sinks" in key for key in state),
            scale=options["scale"],
            softcap=options["softcap"],
        )
        try:
            load_weights(made, {key: t.float() for key, t in state.items()})
        except ValueError:
            continue
        return made.eval()
    return None


def _check(
    twin: MultiHeadAttention, x: Tensor, source: Tensor, found: dict[str, Tensor], caught: dict[str, Any]
) -> tuple[tuple[Tensor, Tensor, str] | None, dict[str, Tensor]]:
    """How q and k are turned, and what the twin makes of x where that is what was seen; nothing where it is not."""
    D, V = twin.sizes.D, twin.sizes.V
    whole = source.shape[0] == found["v_heads"].shape[1]
    q = twin.q_proj(x).unflatten(-1, (-1, D))
    k, v = twin.k_proj(source).unflatten(-1, (-1, D)), twin.v_proj(source).unflatten(-1, (-1, V))
    output = twin.o_proj(found["merged"])
    if "output" in found and not _close(output, found["output"]):
        return None, {}
    made = {"output": found.get("output", output)}
    turns: list[tuple[Tensor, Tensor, str] | None] = [None]
    if isinstance(caught["turn"], tuple) and len(caught["turn"]) == 2:
        cos, sin = (t[0].float()[..., : t.shape[-1] // 2] for t in caught["turn"])
        turns += [(cos, sin, "halves")]
    for turn in turns:
        fits = _close(_turned(q, twin.q_norm, turn), found["q_heads"])
        if whole:
            fits = fits and _close(_turned(k, twin.k_norm, turn), found["k_heads"])
            fits = fits and _close(v.transpose(0, 1), found["v_heads"])
        if fits:
            return turn, made | {"q": q} | ({"k": k} if whole else {})
    return None, {}


def _turned(t: Tensor, norm: nn.Module | None, turn: tuple[Tensor, Tensor, str] | None) -> Tensor:
    heads = t.transpose(0, 1) if norm is None else norm(t.transpose(0, 1))  # (H, N, D)
    if turn is None:
        return heads
    cos, sin, _ = turn
    half = cos.shape[-1]
    a, b, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= CLOSE * b.abs().max().clamp(min=1e-6))

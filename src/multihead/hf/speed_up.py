"""Make a Hugging Face model faster in place: what of it may run on the kernel does, until it is undone."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from multihead import kernel
from multihead.hf.cache import grow, kept
from multihead.hf.forwards import unwatched
from multihead.hf.interface import NAME
from multihead.hf.watch import attentions
from multihead.hf.whole import KINDS, rotary_width
from multihead.kernel import eligible
from multihead.kernel.forward import Forward, LinearForward


class Report:
    """What `speed_up` has replaced and what not, by the names of modules; `undo()`, or the end of its `with` block,
    puts the model back.

    Attributes:
        replaced: for each module that runs on the kernel where it can, how.
        left: for each that might have, why it stays as it is.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.replaced: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self._undo: list[Callable[[], None]] = []

    def undo(self) -> None:
        """Put the model back as it was. Again: does nothing."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> "Report":
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __str__(self) -> str:
        lines = [f"{type(self.model).__name__}, {'sped up' if self._undo else 'as it was'}"]
        for title, found in (("replaced", self.replaced), ("left", self.left)):
            lines += [f"  {title}:"] if found else []
            kinds = Counter(found.values())
            for how, count in kinds.most_common():
                names = [name or "(the model)" for name in found if found[name] == how]
                shown = ", ".join(names[:3]) + (", …" if count > 3 else "")
                lines.append(f"  {count:5} {how}: {shown}")
        return "\n".join(lines)

    __repr__ = __str__


def speed_up(model: nn.Module) -> Report:
    """Run what can on the kernel: a report of it, whose `undo()` puts the model back; or for the length of a `with`.

    Attention becomes `multihead`, and one native call from projection to projection in modules that are proven to be
    what they look like: before one is replaced, random input must give what the module gives. So do RMS norms and gated
    feed-forward parts. Every `nn.Linear` multiplies by the kernel's product where that is faster. Dynamic caches grow
    in place from their first token on (`mh.hf.cache`), whoever has made them, `generate` for one, and a call that fails
    leaves its cache as it was.
    Modules, parameters and state_dict stay as they are. Whatever could see the difference in a call (a gradient, a
    hook on all modules, autocast, a compiler, an adapter in a linear's place) has that call run as before.

    >>> import multihead.hf
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    ... )
    >>> model = LlamaForCausalLM(config).eval()
    >>> report = mh.hf.speed_up(model)
    >>> print(report)
    LlamaForCausalLM, sped up
      replaced:
         15 product of the kernel: model.layers.0.self_attn.q_proj, model.layers.0.self_attn.k_proj, ...
          5 RMS norm of the kernel: model.layers.0.input_layernorm, ...
          2 attention in one call: model.layers.0.self_attn, model.layers.1.self_attn
          2 feed-forward part in one call: model.layers.0.mlp, model.layers.1.mlp
          1 caches grow in place: (the model)
    >>> written = model.generate(torch.randint(61, (1, 9)), max_new_tokens=5, do_sample=False)
    >>> report.undo()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: expected a Hugging Face model")
    report = Report(model)
    try:
        if kernel.module is None:
            report.left[""] = f"the native module is {kernel.missing}"
            return report
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                _note(report, name, module, LinearForward, _why_not_linear(module))
            elif isinstance(module, Conv1D):
                report.left[name] = "is a Conv1D: its weight lies the other way round"
        _replace_attention(report)
        _replace_modules(report)
        _replace_cache(report)
    except BaseException:
        report.undo()
        raise
    return report


def _note(report: Report, name: str, module: nn.Module, by: type[Forward], why_not: str | None) -> None:
    why_not = why_not or _why_not_any(module, by)
    if why_not is not None:
        report.left[name] = why_not
        return
    _put(report, name, by(module))


def _put(report: Report, name: str, forward: Forward) -> None:
    forward.put()
    report.replaced[name] = forward.what
    report._undo.append(forward.undo)


def _why_not_any(module: nn.Module, by: type[Forward]) -> str | None:
    own = module.__dict__.get(by.method)
    if isinstance(own, Forward):
        return "is sped up already"
    if own is not None:
        return f"has a {by.method} of its own"
    return None


def _why_not_linear(module: nn.Linear) -> str | None:
    if type(module) is not nn.Linear:
        return f"is a {type(module).__name__}"
    weight = module._parameters.get("weight")
    if weight is None or type(weight) is not nn.Parameter:
        return "has no plain weight"
    if weight.device.type != "cpu":
        return f"its weight is on {weight.device}"
    slower = eligible.slower_in(weight.dtype)
    return None if slower is None else slower.says


def _roots(model: nn.Module) -> list[PreTrainedModel]:
    """The models of transformers in it that are not part of another: the model itself, or what an adapter wraps."""
    if isinstance(model, PreTrainedModel):
        return [model]
    return [root for child in model.children() for root in _roots(child)]


def _replace_attention(report: Report) -> None:
    for root in _roots(report.model):
        configs = {id(m.config): m.config for m in root.modules() if isinstance(m, PreTrainedModel)}
        for config in list(configs.values()):
            configs |= {id(part): part for part in _parts(config)}
        before = [(config, config._attn_implementation) for config in configs.values()]

        def restore(before: list = before) -> None:
            for config, name in before:
                config._attn_implementation_internal = name

        report._undo.append(restore)
        try:
            if attentions(root):
                root.set_attn_implementation(NAME)
        except (ValueError, ImportError):  # a part of it has no interface, say: it stays as it is
            restore()
    found = attentions(report.model)
    if not found:
        report.left["attention"] = "the model does not use transformers' attention interface"
    for name, module in found.items():
        used = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if used == NAME:
            report.replaced[name] = "attention of the kernel"
        else:
            report.left[name] = f"its attention stays {used!r}"


def _replace_modules(report: Report) -> None:
    """Norms, feed-forward parts and attentions that can be proven to be what they look like."""
    rotary = rotary_width(report.model)
    for name, module in report.model.named_modules():
        kind = next((kind for kind in KINDS if kind.looks_like(module)), None)
        if kind is None:
            continue
        forward = kind(module)
        why_not = _why_not_any(module, kind)
        within = (part for part in module.modules() if part is not module)  # its own hooks are called as they were
        if why_not is None and (eligible.modules_watched() or not all(map(unwatched, within))):
            why_not = "a hook watches a part of it"  # and would see what is tried
        if why_not is None:
            with torch.no_grad():
                why_not = forward.why_not(rotary)
        if why_not is None:
            _put(report, name, forward)
            report.left = {part: why for part, why in report.left.items() if not part.startswith(f"{name}.")}
        elif name in report.replaced:
            report.replaced[name] += f", not in one call ({why_not})"
        else:
            report.left[name] = why_not


def _parts(config: Any) -> Iterator[Any]:
    for name in getattr(config, "sub_configs", ()):
        part = getattr(config, name, None)
        if part is not None:
            yield part
            yield from _parts(part)


class ModelForward(Forward):
    """A cache that comes empty, as `generate` makes one, or that the model makes itself, grows in place; a call that
    fails leaves its cache as it was.
    """

    what = "caches grow in place"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.on or torch.compiler.is_compiling():
            return self.plain(*args, **kwargs)
        given = kwargs.get("past_key_values")
        if isinstance(given, DynamicCache | EncoderDecoderCache) and not given.get_seq_length():
            grow(given)
        with kept(given):
            out = self.plain(*args, **kwargs)
        made = getattr(out, "past_key_values", None)
        if given is None and isinstance(made, Cache):
            grow(made)
        return out


def _replace_cache(report: Report) -> None:
    names = {id(module): name for name, module in report.model.named_modules()}
    for root in _roots(report.model):
        if root.can_generate():
            _note(report, names[id(root)], root, ModelForward, None)

"""Attention as other libraries have it, from tiny random configurations: its state dict, and what it computes."""

import importlib
import importlib.abc
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

B, N, E, H, G = 2, 5, 24, 6, 2
CAUSAL = torch.full((1, 1, N, N), torch.finfo(torch.float32).min).triu(1)
MODEL = {"hidden_size": E, "num_attention_heads": H}
GROUPED = MODEL | {"num_key_value_heads": G}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


class Anything(type):
    """A class of which every name is one too, which takes any arguments and, called, gives the first of them back."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {"__init__": lambda self, *_, **__: None, "__call__": lambda self, given: given})


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """For what a library imports and the attention in it does not use.

    torchvision fits one build of torch only and, where it does not, keeps transformers from being imported; numba comes
    with a compiler.
    """

    def __init__(self, *names: str) -> None:
        self.names = names

    def __enter__(self) -> None:
        self.before = set(sys.modules)
        sys.meta_path.append(self)

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)
        for name in set(sys.modules) - self.before:
            if name.partition(".")[0] in self.names and isinstance(sys.modules[name].__loader__, StandIn):
                del sys.modules[name]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.names else None

    def exec_module(self, module: ModuleType) -> None:
        module.__version__ = "0"  # type: ignore[attr-defined]
        module.__getattr__ = lambda name: getattr(Anything("stand-in", (), {}), name)  # type: ignore[method-assign]


@dataclass
class Real:
    """A class of another library: its state dict, and what it computes."""

    state: dict[str, Any]
    run: Callable[[Tensor], Tensor]
    call: dict[str, Any] = field(default_factory=dict)  # what our layer has to be called with for the same
    before: Callable[[Tensor], Tensor] = lambda x: x  # what theirs does to x first


def randomised(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    module.eval()  # returns nothing in timm's TinyViT
    return module


def hf(family: str, name: str, config: str, *args: Any, **options: Any) -> tuple[Any, Any]:
    """A module of transformers and its configuration."""
    made = getattr(importlib.import_module(f"transformers.models.{family}.configuration_{family}"), config)(**options)
    made._attn_implementation = "eager"
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return randomised(getattr(modeling, name)(made, *args)), (made, modeling)


def plain(*made: Any, **options: Any) -> Callable[[], Real]:
    """A module whose forward takes x and a mask."""

    def build() -> Real:
        module, _ = hf(*made, **options)
        return Real(module.state_dict(), lambda x: module(x)[0])

    return build


def by_hand(family: str, name: str) -> Callable[[], Real]:
    """BART and Whisper: made from sizes, with a configuration for the implementation's name only."""

    def build() -> Real:
        modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        configuration = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
        config = getattr(configuration, f"{family.capitalize()}Config")()
        config._attn_implementation = "eager"
        module = randomised(getattr(modeling, name)(E, H, config=config))
        return Real(module.state_dict(), lambda x: module(x)[0])

    return build


def rotary(family: str, prefix: str, config: str, **options: Any) -> Callable[[], Real]:
    """A causal module that is given RoPE's cosines and sines."""

    def build() -> Real:
        module, (made, modeling) = hf(family, f"{prefix}Attention", config, 0, **options)
        turn = getattr(modeling, f"{prefix}RotaryEmbedding")(made)
        kinds = {"layer_type": made.layer_types[0]} if family == "gemma3" else {}

        def run(x: Tensor) -> Tensor:
            embeddings = turn(x, torch.arange(N)[None], **kinds)
            names = {"falcon": {"alibi": None}}.get(family, {})
            return module(x, attention_mask=CAUSAL, position_embeddings=embeddings, **names)[0]

        return Real(module.state_dict(), run)

    return build


def torch_packed() -> Real:
    module = randomised(nn.MultiheadAttention(E, H, batch_first=True))
    return Real(module.state_dict(), lambda x: module(x, x, x)[0])


def torch_without_bias() -> Real:
    module = randomised(nn.MultiheadAttention(E, H, batch_first=True, bias=False))
    return Real(module.state_dict(), lambda x: module(x, x, x)[0])


CONTEXT = torch.linspace(-1, 1, B * 7 * 10).sin().view(B, 7, 10)


def torch_split() -> Real:
    module = randomised(nn.MultiheadAttention(E, H, batch_first=True, kdim=10, vdim=10))
    return Real(module.state_dict(), lambda x: module(x, CONTEXT, CONTEXT)[0])


def gpt2() -> Real:
    module, _ = hf("gpt2", "GPT2Attention", "GPT2Config", False, 0, n_embd=E, n_head=H)
    return Real(module.state_dict(), lambda x: module(x, attention_mask=CAUSAL)[0])


def nanogpt() -> Real:
    attend, output = nn.Linear(E, 3 * E), nn.Linear(E, E)

    def run(x: Tensor) -> Tensor:
        q, k, v = (t.view(B, N, H, E // H).transpose(1, 2) for t in attend(x).split(E, dim=2))
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return output(heads.transpose(1, 2).reshape(B, N, E))

    module = randomised(nn.ModuleDict({"c_attn": attend, "c_proj": output}))
    return Real(module.state_dict() | {"bias": torch.ones(1, 1, N, N).tril()}, run)


def bloom() -> Real:
    module, (_, modeling) = hf("bloom", "BloomAttention", "BloomConfig", 0, hidden_size=E, n_head=H)
    slopes = modeling.build_alibi_tensor(torch.ones(B, N), H, torch.float32)
    return Real(module.state_dict(), lambda x: module(x, torch.zeros_like(x), slopes, CAUSAL)[0])


def bert() -> Real:
    module, _ = hf("bert", "BertAttention", "BertConfig", **MODEL)
    return Real(module.state_dict(), lambda x: module.output.dense(module.self(x)[0]))


def t5() -> Real:
    module, _ = hf("t5", "T5Attention", "T5Config", True, 0, d_model=E, d_kv=7, num_heads=H)
    return Real(module.state_dict(), lambda x: module(x, position_bias=torch.zeros(1, H, N, N))[0])


def gptj() -> Real:
    module, _ = hf("gptj", "GPTJAttention", "GPTJConfig", 0, n_embd=E, n_head=3, rotary_dim=4)
    return Real(module.state_dict(), lambda x: module(x, attention_mask=CAUSAL, position_ids=torch.arange(N)[None])[0])


def meta_llama() -> Real:
    """Llama's weights as Meta has them: what Hugging Face's conversion undoes, row by row."""
    real = rotary("llama", "Llama", "LlamaConfig", **GROUPED, head_dim=8)()

    def interleave(w: Tensor, heads: int) -> Tensor:
        return w.view(heads, 2, 4, E).transpose(1, 2).reshape(-1, E)

    state = {f"w{part}.weight": real.state[f"{part}_proj.weight"] for part in "qkvo"}
    state |= {f"w{part}.weight": interleave(state[f"w{part}.weight"], n) for part, n in (("q", H), ("k", G))}
    return Real(state, real.run)


def timm(qkv_bias: bool) -> Callable[[], Real]:
    def build() -> Real:
        module = randomised(timm_module("layers.attention").Attention(E, num_heads=H, qkv_bias=qkv_bias))
        return Real(module.state_dict(), module)

    return build


def timm_module(name: str) -> Any:
    """A module of timm."""
    with StandIn("torchvision"):
        return pytest.importorskip(f"timm.{name}", reason="timm is optional", exc_type=ImportError)


def keras(grouped: bool) -> Callable[[], Real]:
    def build() -> Real:
        os.environ["KERAS_BACKEND"] = "torch"
        pytest.importorskip("keras", reason="keras is optional")
        layers = importlib.import_module("keras.layers")
        if grouped:
            layer = layers.GroupQueryAttention(head_dim=5, num_query_heads=H, num_key_value_heads=G)
        else:
            layer = layers.MultiHeadAttention(H, 5, value_dim=7)
        one = np.zeros((1, 2, E), "float32")
        layer(one, one)
        rng = np.random.default_rng(0)
        layer.set_weights([rng.normal(0, 0.3, w.shape) for w in layer.weights])
        state = {w.path.split("/", 1)[1]: w.value.detach() for w in layer.weights}
        return Real(state, lambda x: layer(x, x))

    return build


def linen() -> Real:
    pytest.importorskip("flax", reason="flax is optional")
    jax, flax = importlib.import_module("jax"), importlib.import_module("flax.linen")
    module = flax.MultiHeadDotProductAttention(num_heads=H, qkv_features=H * 5, out_features=E)
    drawn = module.init(jax.random.key(0), np.zeros((1, 2, E), "float32"))
    drawn = jax.tree.map(lambda t: t + 0.1 * jax.random.normal(jax.random.key(t.size), t.shape), drawn)
    return Real(drawn["params"], lambda x: torch.as_tensor(np.array(module.apply(drawn, x.numpy()))))


def nnx() -> Real:
    pytest.importorskip("flax", reason="flax is optional")
    flax = importlib.import_module("flax.nnx")
    module = flax.MultiHeadAttention(H, E, H * 5, out_features=E, rngs=flax.Rngs(0), decode=False)
    state = flax.to_pure_dict(flax.state(module, flax.Param))
    return Real(state, lambda x: torch.as_tensor(np.array(module(x.numpy()))))

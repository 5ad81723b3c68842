"""Whoever could notice that a model was sped up has its call run as before: gradients, hooks, adapters, watchers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
import multihead.hf
from tests.hf_architectures import tokens
from tests.hf_running import find, run, small_llama, tensors

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # transformers', in GPT-BigCode
    pytest.mark.usefixtures("quiet_and_on_one_thread"),
]


def test_gradients(products: list[bool]) -> None:
    model = small_llama()
    ids = tokens(2, 7)
    model(ids, labels=ids).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with mh.hf.speed_up(model):
        products.clear()  # those of the proofs
        model(ids, labels=ids).loss.backward()
    assert not any(products)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-6)


def test_hooks_see_every_module() -> None:
    model = small_llama()
    seen: list[str] = []
    names = [name for name, module in model.named_modules() if not list(module.children())]

    def note(name: str) -> Callable:
        return lambda *_: seen.append(name)

    for name in names:
        model.get_submodule(name).register_forward_hook(note(name))
    with torch.no_grad():
        plain = model(tokens(1, 3)).logits
        expected = list(seen)
        seen.clear()
        with mh.hf.speed_up(model):
            ours = model(tokens(1, 3)).logits
    assert seen == expected
    torch.testing.assert_close(ours, plain)


def test_a_hook_that_changes_what_passes() -> None:
    model = small_llama()
    for name in ("mlp.up_proj", "self_attn.k_proj", "input_layernorm", "mlp", "self_attn.o_proj"):
        model.get_submodule(f"model.layers.1.{name}").register_forward_hook(lambda m, i, out: out * 1.5)
    with torch.no_grad():
        plain = model(tokens(1, 3)).logits
        with mh.hf.speed_up(model):
            torch.testing.assert_close(model(tokens(1, 3)).logits, plain)


class Lora(nn.Module):
    """As adapters do it: in the linear's place, calling it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters(when: str) -> None:
    model = small_llama()

    def adapt() -> None:
        torch.manual_seed(5)
        for layer in model.model.layers:
            layer.self_attn.q_proj, layer.mlp.down_proj = Lora(layer.self_attn.q_proj), Lora(layer.mlp.down_proj)

    if when == "before":
        adapt()
    with mh.hf.speed_up(model), torch.no_grad():
        if when == "after":
            model(tokens(1, 3))
            adapt()
        ours = model(tokens(1, 3)).logits
    with torch.no_grad():
        torch.testing.assert_close(ours, model(tokens(1, 3)).logits)


@pytest.mark.parametrize("when", ["before", "after"])
def test_pefts_adapters_fall_back_module_by_module(when: str, products: list[bool]) -> None:
    """Of each block only the products that have an adapter, and what they stand in, leave the kernel."""
    peft = pytest.importorskip("peft", reason="peft is optional")
    model = small_llama()

    def adapt() -> Any:
        torch.manual_seed(5)
        config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2, init_lora_weights=False)
        return peft.get_peft_model(model, config).eval()

    adapted = adapt() if when == "before" else model
    with mh.hf.speed_up(adapted) as report, torch.no_grad():
        if when == "after":
            adapted = adapt()
        else:
            of_linears = {name for name, how in report.replaced.items() if how == "product of the kernel"}
            assert any(name.endswith("k_proj") for name in of_linears)
        products.clear()
        ours = adapted(tokens(1, 3)).logits
    assert sum(products) >= 2 * 5  # k, v, o, gate and up of both blocks
    with torch.no_grad():
        plain = adapted(tokens(1, 3)).logits
        with adapted.disable_adapter():
            assert not torch.allclose(adapted(tokens(1, 3)).logits, plain)
    torch.testing.assert_close(ours, plain)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor:UserWarning")
def test_quantised_linears_are_left_and_work() -> None:
    model = small_llama(tie_word_embeddings=False)
    small = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    with torch.no_grad():
        plain = small(tokens(1, 3)).logits
        with mh.hf.speed_up(small) as report:
            assert not any("product" in how for how in report.replaced.values())
            torch.testing.assert_close(small(tokens(1, 3)).logits, plain)


def test_weights_that_come_when_they_are_called_for() -> None:
    accelerate = pytest.importorskip("accelerate", reason="pip install accelerate: its offloading is the test")
    model = small_llama()
    with torch.no_grad():
        plain = model(tokens(1, 3)).logits
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        with mh.hf.speed_up(model) as report:
            assert report.left["model.layers.0.mlp.up_proj"] == "its weight is on meta"
            torch.testing.assert_close(model(tokens(1, 3)).logits, plain)


def test_a_forward_that_is_put_over_ours_stays() -> None:
    model = small_llama()
    report = mh.hf.speed_up(model)
    head, called = model.lm_head, []
    ours = head.forward

    def over(x: Tensor) -> Tensor:
        called.append(True)
        return ours(x)

    head.forward = over
    with torch.no_grad():
        sped_up = model(tokens(1, 3)).logits
        report.undo()
        assert head.forward is over
        torch.testing.assert_close(model(tokens(1, 3)).logits, sped_up)
    assert len(called) == 2


def test_autocast(products: list[bool]) -> None:
    model = small_llama()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        plain = model(tokens(1, 3)).logits
        with mh.hf.speed_up(model):
            products.clear()
            ours = model(tokens(1, 3)).logits
    assert ours.dtype is plain.dtype
    assert not any(products)
    torch.testing.assert_close(ours, plain, rtol=0.1, atol=0.1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled() -> None:
    model = small_llama()
    with torch.no_grad(), mh.hf.speed_up(model):
        expected = model(tokens(1, 5), use_cache=False).logits
        compiled = torch.compile(model, backend="aot_eager")
        torch.testing.assert_close(compiled(tokens(1, 5), use_cache=False).logits, expected)


@pytest.mark.parametrize("way", ["watch", "ablate", "patch", "attentions", "trace"])
@pytest.mark.parametrize("model", ["Llama", "GPT2", "Bert", "ViT"])
def test_what_is_seen_and_changed(model: str, way: str) -> None:
    architecture = find(model)
    built, inputs = architecture.build(), architecture.inputs()

    def outcome() -> list[Tensor]:
        match way:
            case "watch":
                with mh.hf.watch(built) as seen:
                    built(**inputs)
                return [seen[n].weights() for n in seen]
            case "ablate":
                with mh.hf.ablate(built, {0: [1], 1: [0, 2]}):
                    return list(tensors(built(**inputs)).values())
            case "patch":
                with mh.hf.patch(built, 1, lambda heads: heads.roll(1, dims=1)):
                    return list(tensors(built(**inputs)).values())
            case "trace":
                t = mh.hf.trace(built, 1, **inputs)
                return [t["weights"], t["output"]]
        return list(run(built, inputs).values())

    with torch.no_grad():
        expected = outcome()
        with mh.hf.speed_up(built):
            ours = outcome()
    for mine, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)

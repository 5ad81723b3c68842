"""Modules of Hugging Face models that run in one native call, and those that only look like them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
import multihead.hf
from multihead.kernel import eligible
from tests.hf_architectures import tokens
from tests.hf_running import find, padding, small_llama, tensors

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # transformers', in GPT-BigCode
    pytest.mark.usefixtures("quiet_and_on_one_thread"),
]


ONE_CALL = {"GPT2", "Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3", "Phi3", "ViT", "DeiT"}
APART = {"Bert", "Roberta", "XLMRoberta", "Electra"}  # the last product lies in a module beside the others


@pytest.mark.parametrize("model", sorted(ONE_CALL | APART))
def test_attention_is_one_call(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture = find(model)
    built = architecture.build("eager")
    with torch.no_grad(), mh.hf.speed_up(built) as report:
        names = [name.removesuffix(".self") for name in mh.hf.attentions(built)]
        how = "attention and what it puts out in one call" if model in APART else "attention in one call"
        assert {report.replaced[name] for name in names} == {how}
        reasons: list[Any] = []
        read_parts = eligible.parts

        def parts(*args: Any) -> Any:
            reasons.append(read_parts(*args))
            return reasons[-1]

        monkeypatch.setattr(eligible, "parts", parts)
        monkeypatch.setattr("multihead.hf.interface.attend", None)  # nothing goes the long way
        if architecture.generates:
            built.generate(tokens(2, 9), attention_mask=padding(9, "left"), max_new_tokens=9, do_sample=False)
        else:
            built(**architecture.inputs())
    assert reasons
    assert not any(isinstance(reason, eligible.Reason) for reason in reasons)


def test_what_only_looks_like_it_is_left() -> None:
    """Structure and names fit, and still it computes something else: only the proof tells."""
    model = small_llama()
    mlp, norm = (model.get_submodule(f"model.layers.1.{name}") for name in ("mlp", "input_layernorm"))

    class SharperRMSNorm(type(norm)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Tensor:
            variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
            return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon) * torch.rsqrt(variance)

    class Twice(type(mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.act_fn(self.up_proj(x)))

    mlp.__class__, norm.__class__ = Twice, SharperRMSNorm
    with torch.no_grad():
        plain = model(tokens(1, 5)).logits
        with mh.hf.speed_up(model) as report:
            assert report.left["model.layers.1.mlp"] == "computes something else"
            assert report.left["model.layers.1.input_layernorm"] == "computes something else"
            torch.testing.assert_close(model(tokens(1, 5)).logits, plain)


def test_attention_that_only_looks_like_it_is_left() -> None:
    """Cohere's heads are turned in neighbours, by a function of the same name."""
    with mh.hf.speed_up(find("Cohere2").build("eager")) as report:
        assert "not in one call (computes something else)" in report.replaced["model.layers.0.self_attn"]


@pytest.mark.parametrize("model", ["Llama", "GPT2", "ViT"])
def test_a_module_with_a_hook_of_its_own_is_one_call(model: str) -> None:
    """Transformers hangs one on every attention module once weights were asked for, and never takes it off."""
    built, inputs = find(model).build("eager"), find(model).inputs()
    name, module = next(iter(mh.hf.attentions(built).items()))
    seen: list[Tensor] = []
    module.register_forward_hook(lambda m, args, out: seen.append(out[0]))
    with torch.no_grad():
        built(**inputs, output_attentions=True)
        built(**inputs)
        with mh.hf.speed_up(built) as report:
            assert report.replaced[name] == "attention in one call"
            assert len(seen) == 2  # none of the proof's
            built(**inputs)
    torch.testing.assert_close(seen[2], seen[1])


@pytest.mark.parametrize("name", ["self", "output", "output.dropout", "output.dense", "self.key", "output.LayerNorm"])
def test_hooks_within_an_attention_of_two_modules(name: str) -> None:
    """They see what they saw, and what they change counts, whenever they come."""
    model, inputs = find("Bert").build("eager"), find("Bert").inputs()
    with mh.hf.speed_up(model), torch.no_grad():
        expected = tensors(model(**inputs))
        seen: list[Any] = []
        part = model.encoder.layer[1].attention.get_submodule(name)
        hook = part.register_forward_hook(lambda m, args, out: seen.append(1))
        changed = (
            model.encoder.layer[0]
            .attention.get_submodule(name)
            .register_forward_pre_hook(
                lambda m, args, kwargs: ((args[0].roll(1, -1), *args[1:]), kwargs), with_kwargs=True
            )
        )
        ours = tensors(model(**inputs))
    assert len(seen) == 1
    with torch.no_grad():
        for key, t in tensors(model(**inputs)).items():
            torch.testing.assert_close(ours[key], t, rtol=1e-4, atol=1e-5)
            assert not torch.allclose(ours[key], expected[key])
    hook.remove()
    changed.remove()


def test_a_model_that_is_sped_up_while_it_trains() -> None:
    model = small_llama(attention_dropout=0.5).train()
    with mh.hf.speed_up(model) as report:
        assert "attention in one call" in report.replaced.values()
        assert model.model.layers[0].self_attn.training
        with torch.no_grad():
            a, b = (model(tokens(1, 30)).logits for _ in range(2))
            assert not torch.equal(a, b)  # dropout is at work
            a, b = (model.eval()(tokens(1, 30)).logits for _ in range(2))
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 37), (2, 3, 64), (1, 29, 37), (61, 48)])
def test_a_gated_feed_forward_part(shape: tuple[int, ...], tanh: bool, dtype: torch.dtype) -> None:
    """Against the same in float64; the plain one in `dtype` shows what rounding alone costs."""
    E, F = shape[-1], 83
    gate, up = (nn.Linear(E, F, bias=tanh, dtype=dtype) for _ in range(2))
    down = nn.Linear(F, 19, bias=False, dtype=dtype)
    x = 3 * torch.randn(shape, dtype=dtype)
    x[..., 0] = 40  # gates far out on both sides

    def act(z: Tensor) -> Tensor:
        return nn.functional.gelu(z, approximate="tanh") if tanh else nn.functional.silu(z)

    with torch.no_grad():
        gate.weight[:2, 0] = torch.tensor([3.0, -3.0])
        read: Any = eligible.feed_forward(gate, up, down, tanh, x)
        if isinstance(read, eligible.Reason) and dtype is not torch.float32:
            pytest.skip(f"{dtype} is as fast in torch on this CPU")
        y = x.new_empty((*shape[:-1], 19))
        read.run(y, x.new_empty(read.rows * 2 * read.width), torch.get_num_threads())
        plain = down(act(gate(x)) * up(x))
        gate, up, down, x = gate.double(), up.double(), down.double(), x.double()
        exact = down(act(gate(x)) * up(x))
    bound = 2 * (plain.double() - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
    assert (y.double() - exact).abs().max() <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 37), (2, 3, 64), (1, 29, 576), (5, 1)])
def test_an_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., : shape[-1]]  # rows with gaps between them
    weight, y = torch.randn(shape[-1], dtype=dtype), torch.empty(shape, dtype=dtype)
    with torch.no_grad():
        assert eligible.norm(x, weight, 1e-5, y) is None
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    plain = weight * (x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-5).rsqrt()).to(dtype)
    bound = 2 * (plain.double() - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
    assert (y.double() - exact).abs().max() <= bound


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda g, u, d, x: (g, nn.Linear(8, 5), d, x), "not of one width"),
        (lambda g, u, d, x: (g, u, nn.Identity(), x), "does more than multiply"),
        (lambda g, u, d, x: (g, u, d, x.double()), "x is not rows of float32"),
        (lambda g, u, d, x: (g, u, d, x[..., :7]), "does not fit|that fit"),
        (lambda g, u, d, x: (g.double(), u, d, x), "not of the dtype|rows of float32"),
        (lambda g, u, d, x: (None, u, d, x), "does more than multiply"),
        (lambda g, u, d, x: (g, None, d, x), "down|fit"),
    ],
)
def test_parts_that_do_not_fit_are_refused(wrong: Callable, why: str) -> None:
    import re

    parts = wrong(nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 8), torch.randn(1, 2, 8))
    with torch.no_grad():
        read = eligible.feed_forward(*parts[:3], False, parts[3])
    assert isinstance(read, eligible.Reason)
    assert re.search(why, read.says), read.says

"""A model that was sped up gives what it gave, in every way to call it, and is itself again afterwards.

Longer than other files because every way to call a model is tried on the same architectures.
"""

import copy
import inspect
import pickle
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

import multihead as mh
import multihead.hf
from multihead.hf.cache import GrowingLayer
from multihead.kernel import eligible
from multihead.kernel.forward import Forward, LinearForward
from tests.hf_architectures import ARCHITECTURES, GROUPED, LEDGER, Architecture, Refused, tokens
from tests.test_hf import DRAWS, by_model, finite_eager, padding, run, tensors  # noqa: F401

FAMILIES = {
    f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3", "Phi3", "Gemma2", "GptOss")
} | {"GPT2LMHeadModel"}
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # transformers', in GPT-BigCode


@pytest.fixture(autouse=True, scope="module")
def _quiet_and_on_one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each product of an `nn.Linear` that was asked for ran on the kernel."""
    asked: list[bool] = []

    def projection(*args: Any, **given: Any) -> Any:
        read = original(*args, **given)
        asked.append(not isinstance(read, eligible.Reason))
        return read

    original = eligible.projection
    monkeypatch.setattr(eligible, "projection", projection)
    return asked


def find(model: str) -> Architecture:
    return next(a for a in ARCHITECTURES if a.model.startswith(model))


def llama(**options: Any) -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**{**GROUPED, "max_position_embeddings": 512, **options})
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()


def of_whom(model: nn.Module) -> dict[str, Any]:
    """What lies in the dictionaries of modules that did not come from their class, and where each parameter lies."""
    own = {n: [k for k in m.__dict__ if k == "forward"] for n, m in model.named_modules()}
    state = {name: (t.data_ptr(), tuple(t.shape)) for name, t in model.state_dict().items()}
    return {
        "own": own,
        "state": state,
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
    }


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *LEDGER], **by_model)
def test_outputs_of_every_architecture(architecture: Architecture | Refused) -> None:
    """Those that have no attention interface keep working, too."""
    model, inputs = architecture.build("eager"), architecture.inputs()
    with torch.no_grad():
        before, found = of_whom(model), tensors(model(**inputs))
        with mh.hf.speed_up(model) as report:
            assert report.replaced
            assert of_whom(model)["state"] == before["state"]
            model(**inputs)
        assert of_whom(model) == before
        after = tensors(model(**inputs))
    for name, t in found.items():
        assert torch.equal(after[name], t)


def beyond_the_bound(architecture: Architecture | Refused, seed: int) -> dict[str, float]:
    """The error of a model that is sped up over the bound of decision 6: see `tests/test_hf.py`."""
    model, inputs = architecture.build("eager", seed=seed), architecture.inputs()
    wide = {name: t.double() if t.dtype.is_floating_point else t for name, t in inputs.items()}
    with torch.no_grad():
        plain = tensors(model(**inputs))
        with mh.hf.speed_up(model):
            ours = tensors(model(**inputs))
        exact = tensors(model.double()(**wide))
    assert ours.keys() == plain.keys()
    found = {}
    for name, truth in exact.items():
        mine, eager = ((t[name].double() - truth).abs().max() for t in (ours, plain))
        bound = 2 * eager + torch.finfo(torch.float32).eps * truth.abs().max()
        found[name] = float(mine / bound.clamp(min=1e-300))
    return found


@pytest.mark.usefixtures("finite_eager")
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *LEDGER], **by_model)
def test_outputs_are_as_exact_as_they_were(architecture: Architecture | Refused) -> None:
    """In one draw of weights, or, where layers have multiplied a rounding, in the mean of many."""
    first = beyond_the_bound(architecture, seed=3)
    if max(first.values()) <= 1:
        return
    others = [beyond_the_bound(architecture, seed=100 + n) for n in range(DRAWS)]
    for name in (name for name, ratio in first.items() if ratio > 1):
        mean = statistics.geometric_mean(max(ratios[name], 1e-3) for ratios in others)
        assert mean <= 1, f"{name}: {mean:.2f} times the bound in the mean of {DRAWS} models, {first[name]:.2f} in one"


def test_the_bound_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that are wrong by a hundred-thousandth."""
    monkeypatch.setattr(LinearForward, "__call__", lambda self, x: 1.00001 * self.plain(x))
    assert max(beyond_the_bound(find("Llama"), seed=3).values()) > 5


def greedy(model: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
    options = {"max_new_tokens": 200, "do_sample": False, "suppress_tokens": [0], **options}
    return model.generate(**inputs, return_dict_in_generate=True, output_logits=True, **options)


def assert_same_text(model: Any, inputs: dict[str, Tensor], ours: Any, theirs: Any) -> None:
    """Token for token, or first different where the error bound of decision 6 cannot tell the two tokens apart.

    There the logits of float64 decide: each side's may be off by `bound`, so that tokens within twice that may change
    places.
    """
    prompt = inputs["input_ids"].shape[1]
    for row, (a, b) in enumerate(zip(ours.sequences, theirs.sequences, strict=True)):
        differ = (a != b).nonzero()
        if not len(differ):
            continue
        at = int(differ[0])
        seen = inputs["attention_mask"][row : row + 1]
        so_far = {
            "input_ids": b[None, :at],
            "attention_mask": torch.cat((seen, seen.new_ones(1, at - prompt)), 1),
        }
        exact = greedy(copy.deepcopy(model).double(), so_far, max_new_tokens=1).logits[0][0]
        plain = theirs.logits[at - prompt][row]
        bound = 2 * (plain - exact).abs().max() + torch.finfo(plain.dtype).eps * exact.abs().max()
        gap = (exact[a[at]] - exact[b[at]]).abs()
        assert gap <= 2 * bound, f"row {row}, token {at - prompt}: {float(gap):.1e} apart, bound {float(bound):.1e}"


def test_another_text_is_not_the_same() -> None:
    model = llama()
    inputs = {"input_ids": tokens(2, 9), "attention_mask": padding(9, "left")}
    theirs = greedy(model, inputs, max_new_tokens=12)
    ours = copy.deepcopy(theirs)
    ours.sequences[1, 15] = 3 + (ours.sequences[1, 15] - 2) % 50
    with pytest.raises(AssertionError, match="row 1, token 6"):
        assert_same_text(model, inputs, ours, theirs)


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a.model in FAMILIES], **by_model)
def test_the_same_text_for_200_tokens(architecture: Architecture) -> None:
    longer = "n_positions" if architecture.model.startswith("GPT2") else "max_position_embeddings"
    architecture = Architecture(**{**vars(architecture), "options": {**architecture.options, longer: 256}})
    model = architecture.build("eager")
    inputs = {"input_ids": tokens(2, 9), "attention_mask": padding(9, "left")}
    theirs = greedy(model, inputs)
    with mh.hf.speed_up(model):
        ours = greedy(model, inputs)
    assert ours.sequences.shape == (2, 209)
    assert_same_text(model, inputs, ours, theirs)


WAYS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "beams, several answers": {"num_beams": 4, "num_return_sequences": 2},
    "a static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "chunks of the prompt": {"prefill_chunk_size": 4},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", sorted(FAMILIES))
def test_ways_to_generate(model: str, way: str) -> None:
    built: Any = find(model).build("eager")
    inputs = {"input_ids": tokens(2, 9), "attention_mask": padding(9, "left")}
    theirs = greedy(built, inputs, max_new_tokens=20, **WAYS[way])
    with mh.hf.speed_up(built):
        ours = greedy(built, inputs, max_new_tokens=20, **WAYS[way])
    assert torch.equal(ours.sequences, theirs.sequences)


@pytest.mark.parametrize("model", sorted(FAMILIES))
def test_assisted_decoding(model: str) -> None:
    built, helper = find(model).build("eager"), find(model).build("eager", seed=3)
    for parameter in helper.parameters():  # right now and then
        parameter.data += 0.02 * torch.randn_like(parameter)
    options = {"max_new_tokens": 24, "do_sample": False, "assistant_model": helper}
    theirs = built.generate(tokens(1, 9), **options)
    with mh.hf.speed_up(built), mh.hf.speed_up(helper):
        assert torch.equal(built.generate(tokens(1, 9), **options), theirs)


def test_a_chat_goes_on() -> None:
    model = llama()
    given = {"max_new_tokens": 6, "do_sample": False}

    def chat(past: DynamicCache) -> Tensor:
        said = tokens(1, 9)
        for _ in range(3):
            said = model.generate(said, past_key_values=past, **given)
            said = torch.cat((said, tokens(1, 4)), 1)
        return said

    theirs = chat(DynamicCache(config=model.config))
    with mh.hf.speed_up(model):
        assert torch.equal(chat(mh.hf.cache(model)), theirs)
        assert torch.equal(chat(DynamicCache(config=model.config)), theirs)


def test_caches_grow_in_place_whoever_makes_them() -> None:
    model = llama()
    with mh.hf.speed_up(model), torch.no_grad():
        written = model.generate(tokens(1, 5), max_new_tokens=3, return_dict_in_generate=True)
        by_hand = model(tokens(1, 5)).past_key_values
        for past in (written.past_key_values, by_hand):
            assert {type(layer) for layer in past.layers} == {GrowingLayer}
        given = DynamicCache(config=model.config)
        model(tokens(1, 5), past_key_values=given)
        assert {type(layer) for layer in given.layers} == {GrowingLayer}
        static = StaticCache(config=model.config, max_cache_len=16)
        assert model(tokens(1, 5), past_key_values=static).past_key_values is static
    assert type(model(tokens(1, 5)).past_key_values.layers[0]) is not GrowingLayer


def test_no_copy_of_the_cache_for_a_token() -> None:
    model = llama()
    past = mh.hf.cache(model)
    with mh.hf.speed_up(model), torch.no_grad():
        model(tokens(1, 64), past_key_values=past)
        at = [layer.keys.data_ptr() for layer in past.layers]
        for _ in range(20):
            model(tokens(1, 1), past_key_values=past)
        assert [layer.keys.data_ptr() for layer in past.layers] == at


def test_everything_runs_on_the_kernel(products: list[bool]) -> None:
    model = llama()
    with mh.hf.speed_up(model) as report, torch.no_grad():
        linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        assert set(linears) <= set(report.replaced)
        model(tokens(1, 1))
    assert products
    assert all(products)


# What could notice ---------------------------------------------------------------------------------------------------


def test_gradients(products: list[bool]) -> None:
    model = llama()
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
    model = llama()
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
    model = llama()
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
    model = llama()

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
    model = llama()

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
    model = llama(tie_word_embeddings=False)
    small = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    with torch.no_grad():
        plain = small(tokens(1, 3)).logits
        with mh.hf.speed_up(small) as report:
            assert not any("product" in how for how in report.replaced.values())
            torch.testing.assert_close(small(tokens(1, 3)).logits, plain)


def test_weights_that_come_when_they_are_called_for() -> None:
    accelerate = pytest.importorskip("accelerate", reason="pip install accelerate: its offloading is the test")
    model = llama()
    with torch.no_grad():
        plain = model(tokens(1, 3)).logits
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        with mh.hf.speed_up(model) as report:
            assert report.left["model.layers.0.mlp.up_proj"] == "its weight is on meta"
            torch.testing.assert_close(model(tokens(1, 3)).logits, plain)


def test_a_forward_that_is_put_over_ours_stays() -> None:
    model = llama()
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
    model = llama()
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
    model = llama()
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


# The model stays what it is ------------------------------------------------------------------------------------------


def test_a_copy_and_a_pickle_have_forwards_of_their_own() -> None:
    model = llama()
    with mh.hf.speed_up(model), torch.no_grad():
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            for parameter in other.parameters():
                parameter.zero_()
            assert not other(tokens(1, 3)).logits.any()
            forwards = {id(m.__dict__["forward"].module): m for m in other.modules() if "forward" in m.__dict__}
            assert all(number == id(module) for number, module in forwards.items())
        assert model(tokens(1, 3)).logits.any()


def test_what_is_saved_is_what_would_be_saved(tmp_path: Any) -> None:
    model = llama()
    with mh.hf.speed_up(model):
        model.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        assert torch.equal(again(tokens(1, 3)).logits, model(tokens(1, 3)).logits)


def test_weights_may_change_meanwhile() -> None:
    model, other = llama(), llama()
    for parameter in other.parameters():
        parameter.data.mul_(1.1)
    with torch.no_grad(), mh.hf.speed_up(model):
        model(tokens(1, 3))
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(model(tokens(1, 3)).logits, other(tokens(1, 3)).logits)
        model.to(torch.float64)
        torch.testing.assert_close(model(tokens(1, 3)).logits, other.double()(tokens(1, 3)).logits)


def test_the_signature_stays() -> None:
    model = llama()
    before = inspect.signature(model.forward), inspect.signature(model.lm_head.forward)
    with mh.hf.speed_up(model):
        assert (inspect.signature(model.forward), inspect.signature(model.lm_head.forward)) == before


def test_twice_and_undone_in_either_order() -> None:
    for order in ((0, 1), (1, 0)):
        model = llama()
        before = of_whom(model)
        reports = mh.hf.speed_up(model), mh.hf.speed_up(model)
        assert "is sped up already" in reports[1].left.values()
        assert not any("product" in how for how in reports[1].replaced.values())
        with torch.no_grad():
            model(tokens(1, 3))
        for n in order:
            reports[n].undo()
            reports[n].undo()
        assert of_whom(model)["own"] == before["own"]


def test_what_fails_leaves_cache_and_model_as_they_were() -> None:
    model = llama()
    past = mh.hf.cache(model)
    with mh.hf.speed_up(model), torch.no_grad():
        expected = model(tokens(1, 12)).logits[:, -1]
        model(tokens(1, 12)[:, :9], past_key_values=past)

        def fail(*_: Any) -> None:
            raise KeyboardInterrupt

        hook = model.model.layers[1].mlp.up_proj.register_forward_hook(fail)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                model(tokens(1, 12)[:, 9:], past_key_values=past)
            assert [layer.get_seq_length() for layer in past.layers] == [9, 9]
        with pytest.raises(KeyboardInterrupt):
            model.generate(tokens(1, 12), max_new_tokens=4)
        hook.remove()
        again = model(tokens(1, 12)[:, 9:], past_key_values=past).logits[:, -1]
        torch.testing.assert_close(again, expected)
        assert model.generate(tokens(1, 12), max_new_tokens=4).shape == (1, 16)


def test_an_interrupted_generation_can_be_taken_up() -> None:
    model = llama()
    options = {"max_new_tokens": 30, "do_sample": False}
    expected = model.generate(tokens(1, 9), **options)
    past = mh.hf.cache(model)
    calls = 0

    def interrupt(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise KeyboardInterrupt

    with mh.hf.speed_up(model), torch.no_grad():
        hook = model.model.layers[1].self_attn.o_proj.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.generate(tokens(1, 9), past_key_values=past, **options)
        hook.remove()
        written = past.get_seq_length()
        assert written == 9 + 10
        said = expected[:, : written + 1]
        rest = model.generate(said, past_key_values=past, max_new_tokens=39 - said.shape[1], do_sample=False)
    assert torch.equal(rest, expected)


def test_the_report_says_what_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    model = find("GPT2").build("eager")
    with mh.hf.speed_up(model) as report:
        assert "is a Conv1D" in report.left["transformer.h.0.mlp.c_fc"]
        assert "transformer.h.0.attn.c_attn" not in report.left  # a part of the one call
        assert "lm_head" in report.replaced
        assert "sped up" in str(report)
        assert "Conv1D" in str(report)
    assert "as it was" in str(report)
    half = llama().half()
    monkeypatch.setattr(mh.kernel, "widens_float16", lambda: False)
    with mh.hf.speed_up(half) as report:
        assert "float16" in report.left["lm_head"]
    monkeypatch.setattr(mh.kernel, "widens_float16", lambda: True)
    with mh.hf.speed_up(half) as report:
        assert "lm_head" in report.replaced
    with pytest.raises(TypeError, match="model=dict: expected a Hugging Face model"):
        mh.hf.speed_up({})  # type: ignore[arg-type]


def test_without_the_core_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mh.kernel, "module", None)
    monkeypatch.setattr(mh.kernel, "missing", "not built: no compiler")
    model = llama()
    with mh.hf.speed_up(model) as report:
        assert report.left == {"": "the native module is not built: no compiler"}
        assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_model_inside_another_module() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = llama()

        def forward(self, ids: Tensor) -> Tensor:
            return self.inner(ids).logits

    wrapped = Wrapped().eval()
    with torch.no_grad():
        plain = wrapped(tokens(1, 3))
        with mh.hf.speed_up(wrapped) as report:
            assert wrapped.inner.config._attn_implementation == "multihead"
            assert "inner.lm_head" in report.replaced
            torch.testing.assert_close(wrapped(tokens(1, 3)), plain)
    assert wrapped.inner.config._attn_implementation == "eager"


def test_forwards_are_known_to_the_core() -> None:
    """A linear with a forward of ours is plain still; with anyone else's it is not."""
    linear = nn.Linear(8, 8)
    x = torch.randn(2, 8)
    with torch.no_grad():
        LinearForward(linear).put()
        assert isinstance(linear.forward, Forward)
        assert not isinstance(eligible.projection(linear, x), eligible.Reason)
        linear.forward = lambda x: x
        assert isinstance(eligible.projection(linear, x), eligible.Reason)


# Modules in one call --------------------------------------------------------------------------------------------------

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
    model = llama()
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
    model = llama(attention_dropout=0.5).train()
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

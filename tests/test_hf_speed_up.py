"""A model that was sped up gives what it gave, in every way to call it, and is itself again afterwards."""

import copy
import inspect
import pickle
import statistics
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
from tests.hf_architectures import ARCHITECTURES, LEDGER, Architecture, Refused, tokens
from tests.hf_running import DRAWS, by_model, find, padding, small_llama, tensors

FAMILIES = {
    f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3", "Phi3", "Gemma2", "GptOss")
} | {"GPT2LMHeadModel"}
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # transformers', in GPT-BigCode
    pytest.mark.usefixtures("quiet_and_on_one_thread"),
]


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
    model = small_llama()
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
    model = small_llama()
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
    model = small_llama()
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
    model = small_llama()
    past = mh.hf.cache(model)
    with mh.hf.speed_up(model), torch.no_grad():
        model(tokens(1, 64), past_key_values=past)
        at = [layer.keys.data_ptr() for layer in past.layers]
        for _ in range(20):
            model(tokens(1, 1), past_key_values=past)
        assert [layer.keys.data_ptr() for layer in past.layers] == at


def test_everything_runs_on_the_kernel(products: list[bool]) -> None:
    model = small_llama()
    with mh.hf.speed_up(model) as report, torch.no_grad():
        linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        assert set(linears) <= set(report.replaced)
        model(tokens(1, 1))
    assert products
    assert all(products)


# The model stays what it is ------------------------------------------------------------------------------------------


def test_a_copy_and_a_pickle_have_forwards_of_their_own() -> None:
    model = small_llama()
    with mh.hf.speed_up(model), torch.no_grad():
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            for parameter in other.parameters():
                parameter.zero_()
            assert not other(tokens(1, 3)).logits.any()
            forwards = {id(m.__dict__["forward"].module): m for m in other.modules() if "forward" in m.__dict__}
            assert all(number == id(module) for number, module in forwards.items())
        assert model(tokens(1, 3)).logits.any()


def test_what_is_saved_is_what_would_be_saved(tmp_path: Any) -> None:
    model = small_llama()
    with mh.hf.speed_up(model):
        model.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        assert torch.equal(again(tokens(1, 3)).logits, model(tokens(1, 3)).logits)


def test_weights_may_change_meanwhile() -> None:
    model, other = small_llama(), small_llama()
    for parameter in other.parameters():
        parameter.data.mul_(1.1)
    with torch.no_grad(), mh.hf.speed_up(model):
        model(tokens(1, 3))
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(model(tokens(1, 3)).logits, other(tokens(1, 3)).logits)
        model.to(torch.float64)
        torch.testing.assert_close(model(tokens(1, 3)).logits, other.double()(tokens(1, 3)).logits)


def test_the_signature_stays() -> None:
    model = small_llama()
    before = inspect.signature(model.forward), inspect.signature(model.lm_head.forward)
    with mh.hf.speed_up(model):
        assert (inspect.signature(model.forward), inspect.signature(model.lm_head.forward)) == before


def test_twice_and_undone_in_either_order() -> None:
    for order in ((0, 1), (1, 0)):
        model = small_llama()
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
    model = small_llama()
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
    model = small_llama()
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
    half = small_llama().half()
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
    model = small_llama()
    with mh.hf.speed_up(model) as report:
        assert report.left == {"": "the native module is not built: no compiler"}
        assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_model_inside_another_module() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_llama()

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

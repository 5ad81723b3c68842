"""One place decides whether a call may leave torch: every reason, at every argument, through every entry.

What is asked of each cell: the numbers of the specification, or an error in words; never a crash, and never the numbers
of an address that is not what it seems. Cells that used to crash run here in the process of the tests.

Longer than other files because one table crosses reasons, arguments and entries.
"""

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import multihead as mh
import multihead.hf
import multihead.nn
from multihead import kernel
from multihead.attention import named
from multihead.hf.interface import attention
from multihead.kernel import eligible, linear

pytestmark = pytest.mark.skipif(kernel.module is None, reason=f"the native module is {kernel.missing}")


class Wrapper(Tensor):
    """A tensor of somebody else's, whose own memory is not where its numbers are."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapper":
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(t: Any) -> Any:
            return t.inner if isinstance(t, Wrapper) else t

        return func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))


def negated(t: Tensor) -> Tensor:
    return torch._neg_view(-t)


def conjugated(t: Tensor) -> Tensor:
    return torch.complex(torch.zeros_like(t), -t).conj().imag


def freed(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def shrunk(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(t.element_size())
    return t


def not_made(t: Tensor) -> Tensor:
    return torch._efficientzerotensor(tuple(t.shape))


def strided(t: Tensor) -> Tensor:
    return torch.stack([t, torch.full_like(t, torch.nan)], -1)[..., 0]


def same(t: Tensor) -> Tensor:
    return t.clone()


RIGHT = {"a subclass": Wrapper, "a negative bit": negated, "a conjugate's part": conjugated, "strided": strided}
WRONG = {"a freed storage": freed, "a shrunk storage": shrunk}

B, H, G, Q, K, D, V = 2, 4, 2, 5, 7, 8, 6
CAUSAL = mh.Causal()
SHAPES = {
    "q": (B, H, Q, D),
    "k": (B, G, K, D),
    "v": (B, G, K, V),
    "bias": (H, Q, K),
    "sinks": (H,),
}


def given(change: Callable[[Tensor], Tensor] = same, name: str = "") -> dict[str, Tensor]:
    torch.manual_seed(1)
    drawn = {key: torch.randn(shape) for key, shape in SHAPES.items()}
    return {key: change(t) if key == name else t for key, t in drawn.items()}


def attended(given: dict[str, Tensor], mask: Any = CAUSAL) -> Tensor:
    return mh.attend(given["q"], given["k"], given["v"], mask, bias=given["bias"], sinks=given["sinks"])


def looked(given: dict[str, Tensor], mask: Any = CAUSAL) -> Tensor:
    lens = mh.look(given["q"], given["k"], mask, bias=given["bias"], sinks=given["sinks"])
    found = lens.entropy(), lens.rows(None), lens.map(Q, 3), lens.received(), lens.top(2)[0], lens.weights()
    return torch.cat([t.flatten() for t in found])


def attended_with_more(given: dict[str, Tensor], mask: Any = CAUSAL) -> Tensor:
    more: dict[str, Any] = {"return_lse": True, "return_max_logit": True}
    found = mh.attend(given["q"], given["k"], given["v"], mask, bias=given["bias"], sinks=given["sinks"], **more)
    return torch.cat([t.flatten() for t in found])


def called_by_a_model(given: dict[str, Tensor], mask: Any = CAUSAL) -> Tensor:
    """As transformers' models call attention, on the way that most of them take."""
    allowed = mask if isinstance(mask, Tensor) else mask.dense(Q, K, torch.device("cpu"))[None, None]
    tensors = given["q"], given["k"], given["v"], allowed
    heads, _ = attention(nn.Identity().eval(), *tensors, s_aux=given["sinks"], position_bias=given["bias"])
    return heads


ENTRIES = {"attend": attended, "attend, all": attended_with_more, "look": looked, "hf": called_by_a_model}


def plain(t: Tensor) -> Tensor:
    return t.inner if isinstance(t, Wrapper) else t


class TestTensors:
    @pytest.mark.parametrize("entry", ENTRIES)
    @pytest.mark.parametrize("name", SHAPES)
    @pytest.mark.parametrize("change", RIGHT)
    def test_what_torch_computes_with_is_right(self, change: str, name: str, entry: str) -> None:
        expected = ENTRIES[entry](given())
        found = plain(ENTRIES[entry](given(RIGHT[change], name)))
        torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize("name", SHAPES)
    def test_zeros_that_are_not_made_yet_are_zeros(self, name: str) -> None:
        torch.testing.assert_close(attended(given(not_made, name)), attended(given(torch.zeros_like, name)))

    @pytest.mark.parametrize("entry", ENTRIES)
    @pytest.mark.parametrize("name", SHAPES)
    @pytest.mark.parametrize("change", WRONG)
    def test_a_storage_that_does_not_hold_the_tensor_is_an_error(self, change: str, name: str, entry: str) -> None:
        if entry == "look" and name == "v":
            pytest.skip("a lens has no values")
        with pytest.raises((ValueError, RuntimeError), match=r"storage|allocated"):
            ENTRIES[entry](given(WRONG[change], name))

    @pytest.mark.parametrize("entry", ENTRIES)
    @pytest.mark.parametrize("change", [*RIGHT, *WRONG])
    def test_masks(self, change: str, entry: str) -> None:
        allowed = torch.rand(B, 1, Q, K) > 0.3
        if change in ("a negative bit", "a conjugate's part"):
            pytest.skip("bool has no sign")
        if change in RIGHT:
            found = plain(
                ENTRIES[entry](given(), RIGHT[change](allowed) if change != "strided" else allowed.mT.contiguous().mT)
            )
            torch.testing.assert_close(found, ENTRIES[entry](given(), allowed))
        else:
            with pytest.raises((ValueError, RuntimeError), match=r"storage|allocated|bound"):
                ENTRIES[entry](given(), WRONG[change](allowed))

    @pytest.mark.parametrize("change", [*RIGHT, *WRONG])
    def test_a_models_mask_of_floats(self, change: str) -> None:
        t, added = given(), torch.randn(B, 1, Q, K)
        self.judge(
            change,
            lambda: attention(nn.Identity().eval(), t["q"], t["k"], t["v"], (RIGHT | WRONG)[change](added)),
            attention(nn.Identity().eval(), t["q"], t["k"], t["v"], added),
        )

    @pytest.mark.parametrize("change", WRONG)
    @pytest.mark.parametrize("name", ["cu_seq_lens_q", "cu_seq_lens_k"])
    def test_a_models_packed_lengths(self, name: str, change: str) -> None:
        t, ends = given(), {"cu_seq_lens_q": torch.tensor([0, 2, Q]), "cu_seq_lens_k": torch.tensor([0, 3, K])}
        ends[name] = WRONG[change](ends[name])
        with pytest.raises(ValueError, match=f"{name} sees .* expected one that was not freed or made smaller"):
            attention(nn.Identity().eval(), t["q"], t["k"], t["v"], **ends)

    def test_empty_and_strided(self) -> None:
        q, empty = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 0, 8)[..., ::2]
        assert not mh.attend(q, empty, empty).any()

    @pytest.mark.parametrize("change", [*RIGHT, *WRONG])
    @pytest.mark.parametrize("name", ["x", "weight", "bias"])
    def test_projections(self, name: str, change: str) -> None:
        torch.manual_seed(2)
        tensors = {"x": torch.randn(3, 8), "weight": torch.randn(6, 8), "bias": torch.randn(6)}
        expected = nn.functional.linear(*tensors.values())
        tensors[name] = (RIGHT | WRONG)[change](tensors[name])
        if change in WRONG:
            with pytest.raises((ValueError, RuntimeError), match=r"storage|allocated"):
                linear.linear(*tensors.values(), None)
        else:
            torch.testing.assert_close(plain(linear.linear(*tensors.values(), None)), expected)

    @pytest.mark.parametrize("change", [*RIGHT, *WRONG])
    @pytest.mark.parametrize("name", ["x", "q_proj.weight", "v_proj.bias", "o_proj.weight", "sinks"])
    def test_layers(self, name: str, change: str) -> None:
        torch.manual_seed(2)
        layer, x = mh.MultiHeadAttention(24, 6, sinks=True).requires_grad_(False).eval(), torch.randn(2, 5, 24)
        expected = layer(x)
        if name == "x":
            x = (RIGHT | WRONG)[change](x)
        else:
            replace(layer, name, (RIGHT | WRONG)[change])
        self.judge(change, lambda: layer(x), (expected,))

    @pytest.mark.parametrize("change", [*RIGHT, *WRONG])
    @pytest.mark.parametrize("need_weights", [False, True])
    @pytest.mark.parametrize(
        "name",
        ["query", "key", "value", "attn_mask", "key_padding_mask", "q_proj_weight", "in_proj_bias", "out_proj.weight"],
    )
    def test_torchs_layer(self, name: str, need_weights: bool, change: str) -> None:
        torch.manual_seed(2)
        layer = mh.nn.MultiheadAttention(24, 6, kdim=10, vdim=14, batch_first=True).requires_grad_(False).eval()
        shapes = {
            "query": (2, 5, 24),
            "key": (2, 7, 10),
            "value": (2, 7, 14),
            "attn_mask": (5, 7),
            "key_padding_mask": (2, 7),
        }
        tensors = {key: torch.randn(shape) for key, shape in shapes.items()}
        expected = layer(**tensors, need_weights=need_weights)
        if name in tensors:
            tensors[name] = (RIGHT | WRONG)[change](tensors[name])
        else:
            replace(layer, name, (RIGHT | WRONG)[change])
        self.judge(change, lambda: layer(**tensors, need_weights=need_weights), expected)

    @pytest.mark.parametrize("change", [*RIGHT, *WRONG])
    @pytest.mark.parametrize(
        "name",
        ["x", "self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.up_proj.weight", "input_layernorm.weight"],
    )
    def test_a_model_that_was_sped_up(self, name: str, change: str) -> None:
        torch.manual_seed(2)
        config = transformers.LlamaConfig(
            vocab_size=8, hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=6
        )
        model, x = transformers.LlamaModel(config).requires_grad_(False).eval(), torch.randn(2, 5, 24)
        model.set_attn_implementation("multihead")
        with mh.hf.speed_up(model) as report:
            assert report.replaced
            expected = (model(inputs_embeds=x, use_cache=False)[0],)
            if name == "x":
                x = (RIGHT | WRONG)[change](x)
            else:
                replace(model.layers[0], name, (RIGHT | WRONG)[change])
            self.judge(change, lambda: model(inputs_embeds=x, use_cache=False)[0], expected)

    def judge(self, change: str, call: Callable[[], Any], expected: tuple[Tensor | None, ...]) -> None:
        if change in WRONG:
            with pytest.raises((ValueError, RuntimeError), match=r"storage|allocated"):
                call()
            return
        found = call()
        for a, b in zip(found if isinstance(found, tuple) else (found,), expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(plain(a), b)


def replace(module: nn.Module, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """A parameter by what `change` makes of it, which need not be a parameter."""
    owner, _, leaf = name.rpartition(".")
    parameters = module.get_submodule(owner)._parameters
    parameters[leaf] = change(parameters[leaf].data)  # type: ignore[union-attr, assignment]


class Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **kwargs or {})


class Listening(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **kwargs or {})


class TestModes:
    @pytest.mark.parametrize("entry", ENTRIES)
    @pytest.mark.parametrize("device", ["meta", "cpu"])
    def test_a_default_device_changes_nothing(self, device: str, entry: str) -> None:
        expected, tensors = ENTRIES[entry](given()), given()
        with torch.device(device):
            assert torch.equal(ENTRIES[entry](tensors), expected)
        torch.set_default_device(device)
        try:
            assert torch.equal(ENTRIES[entry](tensors), expected)
        finally:
            torch.set_default_device(None)

    def test_nor_for_a_layer(self) -> None:
        layer, x = mh.MultiHeadAttention(24, 6).eval(), torch.randn(5, 24)
        theirs = mh.nn.MultiheadAttention(24, 6).eval()
        with torch.no_grad():
            expected, expected_theirs = layer(x), theirs(x, x, x)
            with torch.device("meta"):
                assert torch.equal(layer(x), expected)
                for a, b in zip(theirs(x, x, x), expected_theirs):
                    assert torch.equal(a, b)

    @pytest.mark.parametrize("options", [{}, {"rope": True, "qk_norm": True}], ids=str)
    def test_nor_in_training_and_decoding(self, options: dict) -> None:
        layer, x = mh.MultiHeadAttention(24, 6, **options), torch.randn(1, 5, 24)

        def answers() -> list[Tensor]:
            layer.zero_grad()
            layer(x, mask=CAUSAL).sum().backward()
            cache = layer.new_cache(device=torch.device("cpu"))
            with torch.no_grad():
                rows = [layer(row, mask=CAUSAL, cache=cache) for row in x.split(2, 1)]
            return [*rows, *(p.grad for p in layer.parameters() if p.grad is not None)]

        expected = answers()
        with torch.device("meta"):
            found = answers()
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)

    def test_a_default_device_leaves_calls_eligible(self) -> None:
        with torch.device("meta"):
            assert eligible.watched() is None

    @pytest.mark.parametrize("mode", [Watching, Listening])
    @pytest.mark.parametrize("entry", ENTRIES)
    def test_modes_see_the_call(self, entry: str, mode: Any) -> None:
        expected, tensors = ENTRIES[entry](given()), given()
        with mode() as watching:
            torch.testing.assert_close(ENTRIES[entry](tensors), expected)
        assert watching.seen
        if entry == "attend" and mode is Watching:
            assert any("multihead.attend" in name for name in watching.seen)

    def test_reasons_are_in_words(self) -> None:
        tensors = given()
        q, k, v = tensors["q"], tensors["k"], tensors["v"]
        assert str(mh.explain(q, k, v)).splitlines()[0].endswith("skipping what is hidden")

        def why() -> str:
            return str(mh.explain(q, k, v)).splitlines()[0]

        with Watching():
            assert "through torch's operator, because a dispatch mode watches" in why()
        with Listening():
            assert "a function mode watches" in why()
        with forward_ad.dual_level():
            assert mh.explain(q, k, v).backend == "reference"
        q = q.clone().requires_grad_()
        assert "a gradient of q is wanted" in why()
        q, k = q.detach(), Wrapper(k)
        assert "k is a Wrapper, which wants to see the call" in why()
        k, v = k.inner, negated(v)
        assert "v has its negative bit set" in why()

    def test_torch_func_inside_a_mode_is_still_torch_func(self) -> None:
        q = torch.randn(2, 1, 2, 3, 4)
        expected = torch.stack([mh.attend(t, t, t) for t in q])
        for mode in (Watching, Listening):
            with mode():
                found = torch.func.vmap(lambda t: mh.attend(t, t, t))(q)
            torch.testing.assert_close(found, expected)

    def test_jit_traces_see_the_call(self) -> None:
        tensors = given()
        with pytest.warns((DeprecationWarning, FutureWarning, torch.jit.TracerWarning)):  # FutureWarning: torch 2.15
            traced = torch.jit.trace(lambda q: mh.attend(q, q, q), tensors["q"], check_trace=False)
        other = torch.randn_like(tensors["q"])
        torch.testing.assert_close(traced(other), mh.attend(other, other, other))


class TestAskedOnce:
    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Which calls were read by the kernel, and what it said of them."""
        made: list[str] = []
        for name in ("attend", "attention", "layer", "linear", "projection"):
            read = getattr(kernel.module, name)

            def counted(*args: Any, name: str = name, read: Any = read) -> Any:
                found = read(*args)
                made.append(f"{name} refused" if isinstance(found, tuple) else name)
                return found

            monkeypatch.setattr(kernel.module, name, counted)
        monkeypatch.setattr(eligible, "MANY", True)
        return made

    def test_where_it_is_eligible(self, asked: list[str]) -> None:
        layer, x = mh.MultiHeadAttention(24, 6).eval(), torch.randn(5, 24)
        turned = mh.MultiHeadAttention(24, 6, rope=True).eval()
        with torch.no_grad():
            layer(x, mask=mh.Causal())
            assert asked == ["layer"]
            asked.clear()
            turned(x)
            assert asked == ["layer"]
            asked.clear()
            turned(x, cache=turned.new_cache())
            assert asked == ["layer"]
            asked.clear()
            turned(x, bias=torch.zeros(5, 5))
            assert asked == ["projection"] * 3 + ["attend", "projection"]
            asked.clear()
        qkv = [given()[name] for name in "qkv"]
        mh.attend(*qkv)
        assert asked == ["attend"]
        asked.clear()
        mh.attend(*qkv, return_lse=True)
        assert asked == ["attention"]

    def test_in_training_nothing_is_read_in_vain(self, asked: list[str]) -> None:
        layer, x = mh.MultiHeadAttention(24, 6), torch.randn(5, 24)
        layer(x, mask=mh.Causal()).sum().backward()
        assert asked.count("attention") == 2  # forward and backward, inside the operators
        assert set(asked) <= {"attention", "attend refused"}
        assert asked.count("attend refused") <= 1


class TestTwoWaysToRead:
    """By torch's C functions, and by attributes where torch does not have them."""

    @pytest.fixture(params=[True, False], ids=["in C", "by attributes"])
    def in_c(self, request: pytest.FixtureRequest) -> Any:
        assert kernel.module is not None
        kernel.module.remember_torch(request.param)
        yield request.param
        kernel.module.remember_torch(True)

    def test_the_same_is_read(self, in_c: bool) -> None:
        for name in SHAPES:
            for change in (negated, strided, Wrapper):
                torch.testing.assert_close(plain(attended(given(change, name))), attended(given()))
            for wrong in (freed, shrunk):
                with pytest.raises((ValueError, RuntimeError), match="storage"):
                    attended(given(wrong, name))
        layer, x = mh.MultiHeadAttention(24, 6).eval(), torch.randn(5, 24)
        with torch.no_grad(), mh.backend("reference"):
            expected = layer(x)
        with torch.no_grad():
            torch.testing.assert_close(layer(x), expected)

    @pytest.mark.parametrize("options", [{}, {"kv_heads": 2, "rope": True}, {"qk_norm": True, "sinks": True}], ids=str)
    def test_the_layer_gives_the_same(self, in_c: bool, options: dict) -> None:
        layer, x = mh.MultiHeadAttention(24, 6, **options).eval(), torch.randn(2, 5, 24)
        cache = layer.new_cache(batch=2)
        with torch.no_grad():
            with mh.backend("reference"):
                expected = layer(x, mask=mh.Causal())
            torch.testing.assert_close(layer(x, mask=mh.Causal()), expected)
            rows = [layer(row, mask=mh.Causal(), cache=cache) for row in x.split(1, dim=1)]
        torch.testing.assert_close(torch.cat(rows, dim=1), expected)

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
    def test_what_cannot_be_read_is_said(self, in_c: bool) -> None:
        assert kernel.module is not None
        q = torch.randn(1, 2, 3, 4)

        def said(t: Any) -> str:
            call = SimpleNamespace(q=t, k=q, v=q, bias=None, sinks=None, scale=None, softcap=None, dropout=0.0)
            read = kernel.module.attention(call)  # type: ignore[union-attr]
            assert isinstance(read, tuple)
            return read[0]

        for odd in (None, 3, "q", q[0], q[None], q.to("meta"), q.to_sparse(), q.long(), q.to(torch.complex64),
                    torch.nested.nested_tensor([q[0, 0], q[0, 1]])):  # fmt: skip
            assert said(odd).startswith(("q ", "a ")), said(odd)


SHARED = {
    "q=k=v": lambda q, k, v: (q, q, q),
    "q=k": lambda q, k, v: (q, q, v),
    "k=v": lambda q, k, v: (q, k, k),
    "q=v": lambda q, k, v: (q, k, q),
    "two views of one": lambda q, k, v: (q.view_as(q), q.view_as(q), v),
}


class TestGradientsOfOneTensorGivenTwice:
    @pytest.mark.parametrize("shared", SHARED)
    @pytest.mark.parametrize("options", ["none", "lse", "sinks", "bias"])
    def test_they_are_those_of_clones(self, options: str, shared: str) -> None:
        torch.manual_seed(3)
        leaves = torch.randn(3, 1, 2, 3, 4, dtype=torch.float64).unbind()
        more: dict[str, Any] = {}
        if options == "sinks":
            more["sinks"] = torch.randn(2, dtype=torch.float64, requires_grad=True)
        if options == "bias":
            more["bias"] = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)

        def gradients(create_graph: bool, cloned: bool) -> tuple[Tensor, ...]:
            x = [t.clone().requires_grad_() for t in leaves]
            q, k, v = SHARED[shared](*x)
            if cloned:
                q, k, v = (t.clone() for t in (q, k, v))
            out = mh.attend(q, k, v, return_lse=options == "lse", **more)
            total = out[0].square().sum() + out[1].sin().sum() if options == "lse" else out.square().sum()
            wanted = [*x, *more.values()]
            found = torch.autograd.grad(total, wanted, create_graph=create_graph, allow_unused=True)
            return tuple(g for g in found if g is not None)

        expected = gradients(False, True)
        for create_graph in (False, True):
            for found, right in zip(gradients(create_graph, False), expected, strict=True):
                torch.testing.assert_close(found, right)

    def test_a_sink_of_minus_infinity_beside_a_query_that_sees_nothing(self) -> None:
        q = torch.randn(1, 1, 2, 4, requires_grad=True)
        nothing = torch.zeros(2, 2, dtype=torch.bool)
        for backend in ("native", "reference"):
            sinks = torch.full((1,), -torch.inf, requires_grad=True)
            mh.attend(q, q, q, nothing, sinks=sinks, backend=backend).sum().backward()
            assert sinks.grad is not None
            assert torch.equal(sinks.grad, torch.zeros(1))


def test_the_backends_are_where_the_docstring_says() -> None:
    assert list(mh.attention.BACKENDS) == ["native", "sdpa", "flex", "reference"]
    assert named(None) is None


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("backend", ["native", "sdpa", "reference", None])
class TestWhatHasNoStorageGoesToNoBackend:
    """Torch's own operations do not look: they would read beyond the end of the storage, or end the process."""

    @pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
    @pytest.mark.parametrize("mode", [contextlib.nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)])
    def test_tensors(self, wrong: Callable, backend: str | None, name: str, mode: Callable) -> None:
        t = given(wrong, name)
        with mode(), pytest.raises(ValueError, match=f"{name} sees .* expected one that was not freed or made smaller"):
            mh.attend(t["q"], t["k"], t["v"], bias=t["bias"], backend=backend)

    @pytest.mark.parametrize("shape", [(1, 1), (Q, K), (B, H, Q, K)], ids=str)
    @pytest.mark.parametrize("other", [None, mh.Causal(), mh.Allowed(torch.ones(1, 1, dtype=torch.bool))], ids=str)
    def test_masks(self, wrong: Callable, backend: str | None, shape: tuple, other: Any) -> None:
        t = given()
        behind = torch.ones(*shape, 2, dtype=torch.bool)[..., 1]  # so that one byte is too few
        behind.untyped_storage().resize_(0 if wrong is freed else 1)
        dense = mh.Allowed(behind)
        for mask in (dense,) if other is None else (dense & other, other & dense):
            with pytest.raises(ValueError, match="expected one that was not freed or made smaller"):
                mh.attend(t["q"], t["k"], t["v"], mask, backend=backend)

    @pytest.mark.parametrize("name", ["q", "k", "v", "mask"])
    def test_under_vmap(self, wrong: Callable, backend: str | None, name: str) -> None:
        """Of a tensor that is mapped over, what is behind it is looked at."""
        t = {n: torch.stack([x, x]) for n, x in given().items()} | {"mask": torch.ones(Q, K, dtype=torch.bool)}
        t[name] = wrong(t[name])
        rows = torch.vmap(lambda q, k, v: mh.attend(q, k, v, t["mask"], backend=backend))
        with pytest.raises(ValueError, match=f"{name} sees .* expected one that was not freed or made smaller"):
            rows(t["q"], t["k"], t["v"])


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("backend", ["native", "sdpa", "reference"])
def test_zeros_that_were_not_made_are_zeros_on_every_backend(backend: str, name: str) -> None:
    zero, real = given(not_made, name), given(torch.zeros_like, name)
    found, expected = (mh.attend(t["q"], t["k"], t["v"], backend=backend) for t in (zero, real))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("asked", [("out",), ("lse",), ("out", "lse")], ids=" and ".join)
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_gradient_of_v_alone_beside_a_log_sum_exp_that_has_none(asked: tuple[str, ...], create_graph: bool) -> None:
    t = given()
    t["v"].requires_grad_()
    found = dict(zip(("out", "lse"), mh.attend(t["q"], t["k"], t["v"], return_lse=True)))
    total = sum(found[name].sum() for name in asked)
    (d_v,) = torch.autograd.grad(total, [t["v"]], create_graph=create_graph, allow_unused=True)
    weights = mh.look(t["q"], t["k"]).weights().unflatten(1, (G, H // G)).sum((2, 3))  # (B, G, K)
    expected = weights[..., None].expand(B, G, K, V) if "out" in asked else torch.zeros(B, G, K, V)
    assert torch.allclose(torch.zeros_like(t["v"]) if d_v is None else d_v, expected, atol=1e-6)

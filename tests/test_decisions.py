"""The design's decisions, each as a test that carries its number."""

import copy
import importlib
import inspect
import re

import pytest
import torch

import multihead as mh
from multihead import kernel
from multihead.attention import BACKENDS
from multihead.lens import attend_with_weights
from multihead.masks import lower
from multihead.masks.intervals import Frame, Ramp
from tests.cases import CASES, accepting, assert_within_bound

each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_with_gradients = pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "flex"])  # none on a CPU
NAN, INF = torch.nan, torch.inf


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype)


def close(found: torch.Tensor, wanted: torch.Tensor, **more: bool) -> None:
    """Equal but for another order of summing, of a few float64 numbers of about 1; in the same order, bits are equal."""
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13, **more)


def attend_or_skip(q, k, v, mask, backend: str, **options):
    why = mh.explain(q, k, v, mask, **options).reasons[backend]
    if why.startswith("refuses"):
        pytest.skip(f"{backend} {why}")
    return mh.attend(q, k, v, mask, backend=backend, **options)


class TestDecision1BooleanMasksSayWhatMayBeSeen:
    @each_backend
    def test_true_may_attend(self, backend: str) -> None:
        q, k, v = drawn(1, 1, 1, 2), drawn(1, 1, 3, 2), drawn(1, 1, 3, 2)
        only_the_second = torch.tensor([[False, True, False]])
        assert torch.equal(mh.attend(q, k, v, only_the_second, backend=backend), v[:, :, 1:2])

    def test_the_last_query_sees_the_last_key(self) -> None:
        assert mh.Causal().dense(2, 5).tolist() == [[True] * 4 + [False], [True] * 5]

    def test_a_three_dimensional_mask_is_heads_queries_keys(self) -> None:
        H, Q, K = 2, 3, 4
        allowed = torch.rand(H, Q, K) < 0.7
        q, k, v = drawn(H, H, Q, 2), drawn(H, H, K, 2), drawn(H, H, K, 2)  # a batch of H: (B,Q,K) would pass too
        assert torch.equal(mh.attend(q, k, v, allowed), mh.attend(q, k, v, allowed[None]))

    def test_a_float_mask_is_refused_with_a_word_about_bias(self) -> None:
        q = drawn(1, 1, 2, 2)
        with pytest.raises(TypeError, match="bias="):
            mh.attend(q, q, q, torch.zeros(2, 2))


class TestDecision2AMaskLowersToOneInterval:
    def test_of_plain_numbers_where_it_can(self) -> None:
        visible = lower(mh.Causal(window=4), Frame.of(3, 9), B=1, H=1)
        assert (visible.start, visible.stop) == (Ramp(3, 0, 9), Ramp(7, 0, 9))

    def test_with_a_dense_remainder_only_where_it_must(self) -> None:
        visible = lower(mh.Causal() & mh.Allowed(torch.ones(3, 9, dtype=torch.bool)), Frame.of(3, 9), B=1, H=1)
        assert isinstance(visible.stop, Ramp)
        assert visible.dense is not None


@each_backend
def test_decision_3_order_of_operations(backend: str) -> None:
    """q·k · scale → softcap → + bias → mask → softmax with the sink in the denominator → · v."""
    q, k, v, bias, sinks = drawn(1, 2, 3, 4), drawn(1, 2, 5, 4), drawn(1, 2, 5, 4), drawn(2, 3, 5), drawn(2)
    logits = 1.5 * torch.tanh(q @ k.transpose(-1, -2) * 0.8 / 1.5) + bias
    logits = logits.masked_fill(~mh.Causal().dense(3, 5), -INF)
    powers = logits.exp()
    wanted = powers / (powers.sum(-1, keepdim=True) + sinks.exp()[:, None, None]) @ v
    options = {"scale": 0.8, "softcap": 1.5, "bias": bias, "sinks": sinks}
    close(attend_or_skip(q, k, v, mh.Causal(), backend, **options), wanted)


class TestDecision4WhatIsHiddenStaysHidden:
    @each_with_gradients
    @pytest.mark.parametrize("mask", [mh.Causal(), mh.Padding([0, 3]), torch.zeros(5, 3, dtype=torch.bool)], ids=str)
    def test_a_query_that_sees_nothing_gives_zero_and_no_gradient(self, backend: str, mask) -> None:
        q, k, v = (drawn(2, 2, n, 4).requires_grad_() for n in (5, 3, 3))
        out = mh.attend(q, k, v, mask, backend=backend)
        dead = ~mh.masks.as_mask(mask).dense(5, 3).expand(2, 1, 5, 3).any(-1)[:, 0]  # (B, Q)
        assert dead.any()
        out.pow(2).sum().backward()
        assert (out.transpose(1, 2)[dead] == 0).all()
        assert (q.grad.transpose(1, 2)[dead] == 0).all()
        assert all(t.grad.isfinite().all() for t in (q, k, v))
        with torch.no_grad():
            lse = mh.attend(q, k, v, mask, backend=backend, return_lse=True)[1]
        assert (lse.transpose(1, 2)[dead] == -INF).all()
        assert lse.transpose(1, 2)[~dead].isfinite().all()

    def test_with_a_sink_its_logit_is_what_is_left(self) -> None:
        q, k, sinks = drawn(1, 2, 5, 4), drawn(1, 2, 3, 4), drawn(2)
        out, lse = mh.attend(q, k, k, mh.Causal(), sinks=sinks, return_lse=True)
        assert (out[:, :, :2] == 0).all()
        assert torch.equal(lse[0, :, :2], sinks[:, None].expand(2, 2))

    @pytest.mark.parametrize("training", [True, False])
    @each_with_gradients
    def test_in_train_and_eval(self, backend: str, training: bool) -> None:
        layer = mh.MultiHeadAttention(8, heads=2, dtype=torch.float64).train(training)
        x = drawn(2, 3, 8).requires_grad_()
        y = layer(x, mask=mh.Padding([0, 2]), backend=backend)
        assert torch.equal(y[0], layer.o_proj.bias.expand(3, 8))
        y[0].sum().backward()
        assert (x.grad == 0).all()

    @each_with_gradients
    @pytest.mark.parametrize("odd", [NAN, INF, -INF])
    @pytest.mark.parametrize("where", ["k", "v"])
    @pytest.mark.parametrize(
        "mask",
        [mh.Causal(), mh.Causal(window=2), mh.Padding([3]), torch.tensor([True, True, True, False])],
        ids=["causal", "window", "padding", "dense"],
    )
    def test_a_hidden_nan_reaches_neither_output_nor_gradient(self, backend: str, odd: float, where: str, mask) -> None:
        q, k, v = (drawn(1, 2, 4, 3) for _ in range(3))
        hidden_from = ~mh.masks.as_mask(mask).dense(4, 4).expand(1, 1, 4, 4)[0, 0, :, 3]  # who does not see key 3
        wanted = mh.attend(q, k, v, mask, backend="reference")[:, :, hidden_from]
        without = mh.attend(q.clone().requires_grad_(), k, v, mask, backend=backend)[:, :, hidden_from]
        {"k": k, "v": v}[where][:, :, 3] = odd
        for t in (q, k, v):
            t.requires_grad_()
        out = mh.attend(q, k, v, mask, backend=backend)[:, :, hidden_from]
        close(out, wanted)
        if backend == "native":
            assert torch.equal(out, without)
        (grad,) = torch.autograd.grad(out.sum(), q)
        assert grad[:, :, hidden_from].isfinite().all()

    @each_backend
    @pytest.mark.parametrize("where", ["q", "k", "v"])
    @pytest.mark.parametrize(
        "mask", [None, mh.Causal(), torch.ones(4, 4, dtype=torch.bool)], ids=["none", "causal", "dense"]
    )
    def test_a_visible_nan_makes_the_row_nan(self, backend: str, where: str, mask) -> None:
        t = {name: drawn(1, 2, 4, 3) for name in "qkv"}
        t[where][:, :, 2] = NAN
        out = mh.attend(**t, mask=mask, backend=backend)
        sees = (
            torch.arange(4) == 2
            if where == "q"
            else torch.ones(4).bool()
            if not isinstance(mask, mh.Causal)
            else torch.arange(4) >= 2
        )
        assert out[:, :, sees].isnan().all()
        assert out[:, :, ~sees].isfinite().all()

    @each_backend
    @pytest.mark.parametrize("mask", [None, mh.Causal()], ids=["none", "causal"])
    @pytest.mark.parametrize("keys", [1, 5, 37])
    def test_a_query_of_nan_is_not_lost_over_a_few_keys(self, backend: str, mask, keys: int) -> None:
        t = {name: torch.randn(1, 2, keys, 8) for name in "qkv"}  # a width that the fused kernel takes
        t["q"][:, :, -1] = NAN
        out = mh.attend(**t, mask=mask, backend=backend)
        assert out[:, :, -1].isnan().all()
        assert out[:, :, :-1].isfinite().all()

    @each_backend
    def test_a_nan_that_every_query_sees_is_not_lost_either(self, backend: str) -> None:
        t = {name: torch.randn(1, 2, 3, 8) for name in "qkv"}
        t["k"][:] = NAN
        assert mh.attend(**t, backend=backend).isnan().all()

    @each_with_gradients
    def test_a_query_of_nan_that_sees_nothing_reaches_no_gradient(self, backend: str) -> None:
        t = {name: drawn(1, 2, 5, 8) for name in "qkv"}
        t["q"][:, :, 1] = NAN
        for tensor in t.values():
            tensor.requires_grad_()
        out = mh.attend(**t, mask=(torch.arange(5) != 1)[:, None], backend=backend)
        out.sum().backward()
        assert (out[:, :, 1] == 0).all()
        assert all(tensor.grad.isfinite().all() for tensor in t.values())

    @each_backend
    def test_also_when_compiled(self, backend: str) -> None:
        q, k, v = (drawn(1, 2, 4, 3) for _ in range(3))
        k[:, :, 3], v[:, :, 2] = NAN, NAN
        compiled = torch.compile(mh.attend, fullgraph=True, backend="aot_eager")
        for mask in (mh.Causal(), mh.Padding([2]), torch.tensor([True, True, False, False])):
            found = compiled(q, k, v, mask, backend=backend)
            close(found, mh.attend(q, k, v, mask, backend="reference"), equal_nan=True)
            assert torch.equal(found.nan_to_num(7.0), mh.attend(q, k, v, mask, backend=backend).nan_to_num(7.0))


class TestDecision5OneResultInEveryMode:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
    def test_attention_is_the_same_to_the_last_bit(self, dtype: torch.dtype) -> None:
        """Of whatever batch it is part of, with a gradient recorded or not, and whatever else is asked for."""
        q, k, v = (torch.randn(3, 4, 37, 16).to(dtype) for _ in range(3))
        wanted = mh.attend(q, k, v, mh.Causal())
        for found in (
            mh.attend(q.clone().requires_grad_(), k, v, mh.Causal()),
            torch.cat([mh.attend(q[b : b + 1], k[b : b + 1], v[b : b + 1], mh.Causal()) for b in range(3)]),
            mh.attend(q, k, v, torch.ones(37, 37, dtype=torch.bool).tril()),
            mh.attend(q, k, v, mh.Causal(), return_lse=True, return_max_logit=True)[0],
            attend_with_weights(q, k, v, mh.Causal())[0],
        ):
            assert torch.equal(found, wanted)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    def test_a_layer_in_train_or_eval_watched_or_not(self, dtype: torch.dtype) -> None:
        layer, x = mh.MultiHeadAttention(12, heads=3, dtype=dtype), drawn(2, 5, 12, dtype=dtype)
        wanted = layer(x, mask=mh.Causal())
        for found in (
            layer.train()(x, mask=mh.Causal()),
            layer.eval()(x, mask=mh.Causal()),
            layer(x, mask=torch.ones(5, 5, dtype=torch.bool).tril()),
            mh.trace(layer, x, mask=mh.Causal())["output"],
        ):
            assert torch.equal(found, wanted)

    @pytest.mark.skipif(kernel.module is None, reason="torch's products, in which the order depends on the rows")
    def test_a_layer_batched_or_single(self) -> None:
        """By the kernel's product to the last bit; by torch's, as where gradients are recorded, to the rounding of sums."""
        layer, x = mh.MultiHeadAttention(12, heads=3), torch.randn(2, 5, 12)
        with torch.no_grad():
            assert torch.equal(torch.stack([layer(row) for row in x]), layer(x))
        layer, x = layer.double(), x.double()
        close(torch.stack([layer(row) for row in x]), layer(x))

    def test_watching_changes_no_bit(self) -> None:
        layer, x = mh.MultiHeadAttention(64, heads=4), torch.randn(2, 33, 64)
        for mask in (None, mh.Causal(), mh.Causal(window=7)):
            assert torch.equal(mh.trace(layer, x, mask=mask)["output"], layer(x, mask=mask))

    def test_any_thread_count(self) -> None:
        q, threads = torch.randn(2, 4, 65, 16), torch.get_num_threads()
        try:
            results = []
            for n in (1, 2):
                torch.set_num_threads(n)
                results.append(mh.attend(q, q, q, mh.Causal()))
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(*results)

    def test_dropout_drops_the_same_weights_wherever_it_is_computed(self) -> None:
        layer, x = mh.MultiHeadAttention(12, heads=3, dropout=0.5, dtype=torch.float64), drawn(2, 5, 12)
        torch.manual_seed(3)
        wanted = layer(x, mask=mh.Causal())
        torch.manual_seed(3)
        with mh.patch(layer, "weights", lambda w: w):  # forces the steps as written
            close(layer(x, mask=mh.Causal()), wanted)


@pytest.mark.parametrize("case", [CASES[0], CASES[7]], ids=lambda c: c.why)
def test_decision_6_error_bound(case) -> None:
    for backend in accepting(case):
        out = case.run(torch.float32, backend)
        assert_within_bound(out, case.plain(torch.float32)[0], case.exact(torch.float32)[0], torch.float32)


def test_decision_6_the_bound_can_fail() -> None:
    case = CASES[0]
    exact, plain = case.exact(torch.float32)[0], case.plain(torch.float32)[0]
    off = plain + 1e-5
    with pytest.raises(AssertionError):
        assert_within_bound(off, plain, exact, torch.float32)


def test_decision_7_a_named_backend_never_falls_back() -> None:
    q = drawn(1, 2, 3, 4)
    with pytest.raises(ValueError, match="backend='sdpa' refuses this call: torch's fused kernels have no softcap"):
        mh.attend(q, q, q, softcap=2.0, backend="sdpa")


class TestDecision8TheProjectionsAreRealAndHonoured:
    def make(self) -> mh.MultiHeadAttention:
        return mh.MultiHeadAttention(8, heads=4, kv_heads=2, dtype=torch.float64)

    def test_hooks_on_each_are_called_local_and_global(self) -> None:
        layer, called = self.make(), []
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        for name in names:
            getattr(layer, name).register_forward_hook(lambda *_, name=name: called.append(name))
        layer(drawn(3, 8))
        assert sorted(called) == sorted(names)
        seen = []
        handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
        try:
            layer(drawn(3, 8))
        finally:
            handle.remove()
        assert all(any(m is getattr(layer, name) for m in seen) for name in names)

    def test_an_adapter_in_place_of_a_projection_trains(self) -> None:
        class Adapter(torch.nn.Module):
            def __init__(self, base: torch.nn.Linear) -> None:
                super().__init__()
                self.base, self.down = base, torch.nn.Linear(base.in_features, 2, bias=False, dtype=torch.float64)
                self.up = torch.nn.Linear(2, base.out_features, bias=False, dtype=torch.float64)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.base(x) + self.up(self.down(x))

        layer = self.make().requires_grad_(False)
        layer.o_proj, layer.q_proj = Adapter(layer.o_proj), Adapter(layer.q_proj)
        layer(drawn(3, 8)).sum().backward()
        assert layer.o_proj.down.weight.grad.abs().sum() > 0
        assert layer.q_proj.up.weight.grad.abs().sum() > 0

    def test_a_parametrization_is_seen(self) -> None:
        layer, x = self.make(), drawn(3, 8)
        before = layer(x)
        torch.nn.utils.parametrizations.weight_norm(layer.v_proj)
        close(layer(x), before)
        with torch.no_grad():
            layer.v_proj.parametrizations.weight.original0.zero_()
        assert not torch.allclose(layer(x), before)

    def test_heads_at_run_time_are_what_the_projections_put_out(self) -> None:
        """Two halves of a layer, cut by heads, add up to the whole."""
        layer, x = self.make(), drawn(3, 8)
        halves = []
        for first in (0, 1):
            half = copy.deepcopy(layer)
            for name, width in (("q_proj", 4), ("k_proj", 2), ("v_proj", 2)):
                rows = slice(first * width, (first + 1) * width)
                old = getattr(layer, name)
                new = torch.nn.Linear(8, width, dtype=torch.float64)
                new.weight.data, new.bias.data = old.weight.data[rows], old.bias.data[rows]
                setattr(half, name, new)
            columns = slice(first * 4, (first + 1) * 4)
            half.o_proj = torch.nn.Linear(4, 8, bias=False, dtype=torch.float64)
            half.o_proj.weight.data = layer.o_proj.weight.data[:, columns]
            halves.append(half(x, mask=mh.Causal()))
        close(sum(halves) + layer.o_proj.bias, layer(x, mask=mh.Causal()))


def test_decision_10_errors_name_argument_value_and_expectation() -> None:
    with pytest.raises(
        ValueError, match=re.escape("heads=7 does not divide E=1024: give head_dim=, or a width that is")
    ):
        mh.MultiHeadAttention(1024, heads=7)


PUBLIC = {  # module: what the design says can be taken from it
    "multihead": "MultiHeadAttention Causal Window Prefix Padding Documents Allowed RoPE Lens Trace attend explain backend "
    "look trace ablate patch diagnose load_weights save_weights explore models nn hf distributed heads steps",
    "multihead.nn": "MultiheadAttention replace",
    "multihead.hf": "watch ablate speed_up cache",
    "multihead.steps": "attend",
    "multihead.heads": "",
    "multihead.models": "load",
    "multihead.distributed": "shard_heads shard_sequence",
}
LENS = "rows columns map top peak entropy mass received weights why"


def test_the_names_of_the_design_are_where_it_says() -> None:
    for module, names in PUBLIC.items():
        found = importlib.import_module(module)
        for name in names.split():
            assert hasattr(found, name), f"{module}.{name}"
    for name in LENS.split():
        assert callable(getattr(mh.Lens, name)), name
    layer = mh.MultiHeadAttention(8, heads=2)
    for name in ("new_cache", "look", "w_q", "w_k", "w_v", "w_o", "q_proj", "k_proj", "v_proj", "o_proj"):
        assert hasattr(layer, name), name


def test_the_public_surface_is_that_of_the_design() -> None:
    def arguments(f) -> list[str]:
        return [name for name in inspect.signature(f).parameters if name != "self"]

    assert arguments(mh.MultiHeadAttention) == [
        "width", "heads", "kv_heads", "head_dim", "value_dim", "context_dim", "bias", "rope", "qk_norm", "softcap",
        "sinks", "dropout", "scale", "device", "dtype",
    ]  # fmt: skip
    assert arguments(mh.attend) == [
        "q", "k", "v", "mask", "scale", "softcap", "sinks", "bias", "dropout", "backend", "return_lse",
        "return_max_logit",
    ]  # fmt: skip
    assert arguments(mh.explain) == arguments(mh.attend)
    layer = mh.MultiHeadAttention(8, heads=2, kv_heads=1, value_dim=3, context_dim=5)
    assert (layer.w_q.shape, layer.w_k.shape, layer.w_v.shape) == ((8, 2, 4), (5, 1, 4), (5, 1, 3))
    assert layer.w_o.shape == (2, 3, 8)
    for name in mh.__all__:
        assert getattr(mh, name).__doc__, f"{name} has no docstring"

"""attend(): every case on every backend, to the error bound; the rules of choice; what bad input gets."""

import subprocess
import sys

import pytest
import torch
from torch.autograd import forward_ad

import multihead as mh
from multihead import kernel
from multihead.attention import BACKENDS
from tests.cases import CASES, ORDERS, Case, accepting, assert_within_bound, by_why, max_error

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, **by_why)
def test_error_is_at_most_twice_plain(case: Case, dtype: torch.dtype) -> None:
    exact, exact_lse = case.exact(dtype)
    plains = zip(*(case.plain(dtype, order) for order in ORDERS))
    plain, plain_lse = (max(of, key=lambda p: max_error(p, e)) for of, e in zip(plains, (exact, exact_lse)))
    accepted = accepting(case, dtype, return_lse=True)
    assert "reference" in accepted
    for backend in accepted:
        out, lse = case.run(dtype, backend, return_lse=True)
        assert out.dtype == dtype
        assert lse.dtype == torch.promote_types(dtype, torch.float32)
        assert_within_bound(out, plain, exact, dtype)
        assert_within_bound(lse, plain_lse, exact_lse, dtype)


@pytest.mark.parametrize("case", [c for c in CASES if c.Q and c.K], **by_why)
def test_gradients_of_every_backend_are_those_of_the_specification(case: Case) -> None:
    def gradients(backend: str) -> dict[str, torch.Tensor]:
        t = {name: tensor.requires_grad_() for name, tensor in case.tensors(torch.float64).items()}
        out = mh.attend(**t, mask=case.mask, backend=backend, **case.options)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
        (out * weights).sum().backward()
        return {name: tensor.grad for name, tensor in t.items()}

    wanted = gradients("reference")
    for backend in accepting(case, torch.float64):
        if backend == "flex":  # has no gradients on a CPU: see test_flex
            continue
        for name, grad in gradients(backend).items():
            torch.testing.assert_close(grad, wanted[name], rtol=1e-9, atol=1e-9, msg=lambda m: f"{backend} {name}: {m}")  # noqa: B023


@pytest.mark.parametrize("view", ["transposed", "broadcast", "sliced", "last axis strided"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_views_of_every_kind_give_what_their_copies_give(view: str, backend: str) -> None:
    def make(B: int, H: int, N: int, D: int) -> torch.Tensor:
        if view == "transposed":
            return torch.randn(B, N, H, D).transpose(1, 2)
        if view == "broadcast":
            return torch.randn(1, H, N, D).expand(B, H, N, D)
        if view == "sliced":
            return torch.randn(B, 2 * H, N + 3, D)[:, ::2, 2:-1]
        return torch.randn(B, H, N, 2 * D)[..., ::2]

    q, k, v = make(3, 4, 5, 8), make(3, 4, 7, 8), make(3, 4, 7, 8)
    found = mh.attend(q, k, v, mh.Causal(), backend=backend)
    copied = mh.attend(q.clone(), k.clone(), v.clone(), mh.Causal(), backend=backend)
    torch.testing.assert_close(found, copied)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"dropout": 0.4}], ids=["plain", "softcap", "dropout"])
def test_the_native_backend_agrees_with_the_specification_in_every_derivative(options: dict) -> None:
    """Out and lse, their gradients with sinks, and gradients of gradients; the same weights are dropped."""
    if kernel.module is None:
        pytest.skip(f"the native module is {kernel.missing}")

    def derivatives(backend: str) -> list[torch.Tensor]:
        torch.manual_seed(4)
        inputs = [
            torch.randn(*s, dtype=torch.float64, requires_grad=True)
            for s in ((2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 6), (4,))
        ]
        q, k, v, sinks = inputs
        out, lse = mh.attend(q, k, v, mh.Causal(), sinks=sinks, backend=backend, return_lse=True, **options)
        loss = (out * torch.randn(out.shape, dtype=out.dtype)).sum() + (
            lse * torch.randn(lse.shape, dtype=lse.dtype)
        ).sum()
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.pow(2).sum() for g in first), inputs)
        plain = torch.autograd.grad(mh.attend(q, k, v, sinks=sinks, backend=backend, **options).pow(2).sum(), inputs)
        return [out, lse, *first, *second, *plain]

    for found, wanted in zip(derivatives("native"), derivatives("reference")):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


class TestChoice:
    """Backends are chosen by stated rules and never fall back silently."""

    q = torch.randn(1, 2, 3, 4)

    best = "native" if kernel.module is not None else "sdpa"

    def test_the_first_that_can_takes_the_call(self) -> None:
        assert mh.explain(self.q, self.q, self.q).backend == self.best
        meta = self.q.to("meta")
        assert mh.explain(meta, meta, meta).backend == "sdpa"
        assert mh.explain(meta, meta, meta, softcap=1.0).backend == "reference"

    @pytest.mark.skipif(kernel.module is None, reason=f"the native module is {kernel.missing}")
    def test_explain_says_how_numbers_are_multiplied(self) -> None:
        how = {torch.float32: "", torch.float16: "as float32, "}
        how[torch.bfloat16] = "in pairs, " if kernel.instruction_set().endswith("_bf16") else "as float32, "
        for dtype, words in how.items():
            q = self.q.to(dtype)
            assert f"native kernel, {kernel.instruction_set()}, {words}skipping" in str(mh.explain(q, q, q))

    def test_explain_says_what_each_would_do(self) -> None:
        told = str(mh.explain(self.q, self.q, self.q, mh.Causal(window=2), sinks=torch.zeros(2)))
        assert "  sdpa: refuses: torch's fused kernels have no sinks" in told
        assert "  reference: the seven steps as written" in told
        assert f"→ {mh.explain(self.q, self.q, self.q, sinks=torch.zeros(2)).backend}: " in told

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ({"softcap": 3.0}, "no softcap"),
            ({"sinks": torch.zeros(2)}, "no sinks"),
            ({"dropout": 0.5}, "a generator of their own"),
        ],
        ids=["softcap", "sinks", "dropout"],
    )
    def test_a_named_backend_refuses_in_words(self, options: dict, why: str) -> None:
        with pytest.raises(ValueError, match=f"backend='sdpa' refuses this call: .*{why}"):
            mh.attend(self.q, self.q, self.q, backend="sdpa", **options)
        with mh.backend("sdpa"), pytest.raises(ValueError, match=why):
            mh.attend(self.q, self.q, self.q, **options)

    def test_lse_of_sdpa_has_no_gradient_and_so_is_refused_one(self) -> None:
        with pytest.raises(ValueError, match="without a gradient"):
            mh.attend(self.q.clone().requires_grad_(), self.q, self.q, backend="sdpa", return_lse=True)

    def test_a_block_names_a_backend_and_a_call_may_name_another(self) -> None:
        with mh.backend("reference"):
            assert mh.explain(self.q, self.q, self.q).backend == "reference"
            assert mh.explain(self.q, self.q, self.q, backend="sdpa").backend == "sdpa"
            with mh.backend("sdpa"):
                assert mh.explain(self.q, self.q, self.q).backend == "sdpa"
            assert mh.explain(self.q, self.q, self.q).backend == "reference"
        assert mh.explain(self.q, self.q, self.q).backend == self.best

    def test_an_unknown_name_is_an_error_that_lists_the_known(self) -> None:
        with pytest.raises(ValueError, match="backend='flash': expected one of native, sdpa, flex, reference"):
            mh.attend(self.q, self.q, self.q, backend="flash")
        with pytest.raises(ValueError, match="expected one of"), mh.backend("flash"):
            pass


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


GOOD = {"q": ones(2, 6, 5, 8), "k": ones(2, 3, 7, 8), "v": ones(2, 3, 7, 9)}
BAD = [
    ({"q": [1.0]}, TypeError, r"q is a list: expected a tensor \(B,H,Q,D\)"),
    ({"q": ones(6, 5, 8)}, ValueError, r"q has shape \(6, 5, 8\): expected four axes \(B,H,Q,D\)"),
    ({"v": ones(2, 3, 7)}, ValueError, r"v has shape .*expected four axes \(B,G,K,V\)"),
    (
        {"q": ones(2, 6, 5, 8).to(torch.float8_e4m3fn)},
        TypeError,
        "q has dtype torch.float8_e4m3fn: expected a floating dtype of 16, 32 or 64 bits",
    ),
    (
        {"bias": ones(5, 7).to(torch.float8_e4m3fn)},
        TypeError,
        "bias has dtype torch.float8_e4m3fn: expected a floating dtype of 16",
    ),
    ({"q": ones(2, 6, 5, 8).long()}, TypeError, r"q has dtype torch.int64: expected a floating dtype"),
    ({"k": ones(2, 3, 7, 8, dtype=torch.float64)}, TypeError, r"k has dtype torch.float64 but q has torch.float32"),
    ({"k": ones(2, 3, 7, 8).to("meta")}, ValueError, r"k is on meta but q is on cpu"),
    ({"k": ones(3, 3, 7, 8)}, ValueError, r"batches 2, 3, 2: expected one B"),
    ({"k": ones(2, 3, 7, 4)}, ValueError, r"k has head width 4 but q has D=8"),
    ({"k": ones(2, 3, 6, 8)}, ValueError, r"v has 3 heads of 7 keys but k has G=3 heads of K=6"),
    ({"q": ones(2, 5, 5, 8)}, ValueError, r"q has H=5 heads and k has G=3: expected H to be a multiple of G"),
    ({"mask": ones(5, 7)}, TypeError, r"a mask is bool, True = may attend; give scores to add as bias="),
    ({"mask": ones(5, 7).int()}, TypeError, r"torch.int32 tensor: expected bool"),
    ({"mask": "causal"}, TypeError, r"mask is a str: expected None, a mask such as Causal\(\), or a bool tensor"),
    ({"mask": ones(5, 6).bool()}, ValueError, r"the mask has shape \(5, 6\): expected .*\(Q,K\)=\(5, 7\)"),
    (
        {"mask": mh.Padding([1, 2, 3])},
        ValueError,
        r"the mask is for 3 batch rows: expected B=2, or one row for all",
    ),
    ({"mask": mh.Padding([1, 8])}, ValueError, r"lengths=\[1, 8\]: expected 0…7, the number of keys K=7"),
    ({"mask": mh.Documents([2, 2])}, ValueError, r"lengths=\[2, 2\] adds up to 4: expected Q=5"),
    ({"bias": ones(5, 6)}, ValueError, r"bias has shape \(5, 6\): expected one that broadcasts to \(B,H,Q,K\)"),
    ({"bias": ones(5, 7).bool()}, TypeError, r"bias is .*bool.*a mask of what may be seen goes to mask="),
    ({"sinks": ones(3)}, ValueError, r"sinks has shape \(3,\): expected"),
    ({"sinks": ones(1)}, ValueError, r"sinks has shape \(1,\): expected one logit for each of the H=6 query heads"),
    ({"sinks": 0.5}, TypeError, r"sinks is float: expected a floating tensor \(H,\)"),
    ({"softcap": 0.0}, ValueError, r"softcap=0.0: expected a number above 0"),
    ({"softcap": -1.0}, ValueError, r"softcap=-1.0"),
    ({"softcap": float("inf")}, ValueError, r"softcap=inf: expected a number above 0"),
    ({"softcap": "30"}, TypeError, r"softcap is a str: expected a number"),
    ({"scale": float("nan")}, ValueError, r"scale=nan: expected a finite number, or None for 1/√D"),
    ({"scale": 10**400}, ValueError, r"scale=an integer of 1329 bits: expected a finite number.*at most 3.4e\+38"),
    ({"scale": -(10**5000)}, ValueError, r"scale=an integer of 16610 bits: expected a finite number"),
    ({"scale": 1e300}, ValueError, r"scale=1e\+300: expected a finite number.*float32, at most 3.4e\+38"),
    ({"softcap": 1e300}, ValueError, r"softcap=1e\+300: expected a number above 0.*float32, 2e-31 to 2e\+31"),
    ({"softcap": 1e-60}, ValueError, r"softcap=1e-60: expected a number above 0.*float32, 2e-31 to 2e\+31"),
    ({"softcap": 10**400}, ValueError, r"softcap=an integer of 1329 bits: expected a number above 0"),
    ({"scale": ones(1)}, TypeError, r"scale is a Tensor: expected a number"),
    ({"dropout": None}, TypeError, r"dropout is a NoneType: expected a number"),
    ({"dropout": 1.5}, ValueError, r"dropout=1.5: expected a probability, 0 to 1"),
    ({"dropout": -0.1}, ValueError, r"dropout=-0.1"),
]


@pytest.mark.parametrize("mask", [mh.Causal(), mh.Causal(window=3), None], ids=str)
@pytest.mark.parametrize("backend", ["native", "sdpa", "reference", None])
def test_a_scale_below_zero_hides_what_is_hidden(backend: str | None, mask: mh.Mask | None) -> None:
    q, k, v = torch.randn(3, 2, 3, 7, 8, generator=torch.Generator().manual_seed(0))
    if backend == "native" and kernel.module is None:
        pytest.skip(f"the native module is {kernel.missing}")
    found = mh.attend(q, k, v, mask, scale=-0.5, backend=backend)
    torch.testing.assert_close(found, mh.attend(-q, k, v, mask, scale=0.5, backend="reference"))


@pytest.mark.parametrize(("wrong", "error", "message"), BAD, ids=[m for _, _, m in BAD])
def test_bad_input_is_named(wrong: dict, error: type[Exception], message: str) -> None:
    assert mh.attend(**GOOD).shape == (2, 6, 5, 9)
    with pytest.raises(error, match=message):
        mh.attend(**(GOOD | wrong))


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_computes_in_its_dtype_as_torch_does(backend: str) -> None:
    q = torch.randn(1, 2, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = mh.attend(q, q, q, mh.Causal(), backend=backend)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, mh.attend(*[q.bfloat16()] * 3, mh.Causal(), backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_bias_keeps_its_range_beside_smaller_floats(dtype: torch.dtype, backend: str) -> None:
    q, k, v = (torch.randn(1, 2, 5, 8).to(dtype) for _ in range(3))
    bias = torch.full((5, 5), -1e5)  # the same for every key: as if there were none
    wanted = mh.attend(q, k, v, backend="reference")
    torch.testing.assert_close(mh.attend(q, k, v, bias=bias, backend=backend), wanted, atol=0.02, rtol=0.02)


class TestDropout:
    """Weights are kept or dropped by a function of (seed, b, h, q, k)."""

    def test_the_seed_comes_from_torchs_generator(self) -> None:
        q = torch.randn(2, 3, 11, 8)
        torch.manual_seed(5)
        first = mh.attend(q, q, q, dropout=0.3)
        assert not torch.equal(first, mh.attend(q, q, q, dropout=0.3))
        torch.manual_seed(5)
        assert torch.equal(first, mh.attend(q, q, q, dropout=0.3))

    def test_the_mean_over_seeds_is_the_result_without(self) -> None:
        q = torch.randn(1, 2, 5, 8, dtype=torch.float64)
        many = torch.stack([mh.attend(q, q, q, dropout=0.25) for _ in range(4000)])
        spread = many.std(0) / 4000**0.5
        assert ((many.mean(0) - mh.attend(q, q, q)).abs() < 5 * spread).all()

    def test_all_or_nothing(self) -> None:
        q = torch.randn(1, 2, 5, 8)
        assert torch.equal(mh.attend(q, q, q, dropout=1.0), torch.zeros_like(q))

    def test_the_lse_is_that_of_all_weights(self) -> None:
        q = torch.randn(1, 2, 5, 8)
        dropped, whole = (mh.attend(q, q, q, dropout=p, backend="reference", return_lse=True)[1] for p in (0.5, 0.0))
        assert torch.equal(dropped, whole)


@pytest.mark.parametrize("with_bias", [False, True])
def test_sdpa_refuses_a_score_that_may_overflow_where_it_is_hidden(with_bias: bool) -> None:
    """The kernel adds −inf to the inf of a hidden score; NaN and inf themselves are hidden without that."""
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    q[:, :, 1], k[:, :, 4], v[:, :, 3, 0] = 1e20, 1e25, torch.nan
    seen = torch.ones(5, 5, dtype=torch.bool)
    seen[:, 3:] = False
    hidden = {"bias": torch.zeros(5, 5).masked_fill(~seen, -torch.inf)} if with_bias else {"mask": seen}
    with pytest.raises(ValueError, match="a score may overflow"):
        mh.attend(q, k, v, backend="sdpa", **hidden)
    wanted = mh.attend(q[:, :, :], k[:, :, :3], v[:, :, :3], backend="reference")
    assert wanted.isfinite().all()
    torch.testing.assert_close(mh.attend(q, k, v, backend="reference", **hidden), wanted)
    k[:, :, 4] = torch.inf
    torch.testing.assert_close(mh.attend(q, k, v, backend="sdpa", **hidden), wanted)


@pytest.mark.parametrize("wrt", ["q", "k", "v", "bias"])
def test_sdpa_says_that_it_has_no_second_derivative(wrt: str) -> None:
    given = {name: torch.randn(1, 2, 5, 8) for name in ("q", "k", "v")} | {"bias": torch.randn(5, 5)}
    x = given[wrt].requires_grad_()
    (once,) = torch.autograd.grad(mh.attend(backend="sdpa", **given).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"backend='sdpa' has no second derivative.*name 'reference'"):
        torch.autograd.grad(once.square().sum(), x)
    (expected,) = torch.autograd.grad(mh.attend(backend="reference", **given).square().sum(), x)
    torch.testing.assert_close(once.detach(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch's own, at its first jvp
def test_forward_mode_derivatives_are_those_of_the_specification() -> None:
    q, k, v, t = (torch.randn(1, 2, 5, 8, dtype=torch.float64) for _ in range(4))
    _, wanted = torch.func.jvp(lambda q: mh.attend(q, k, v, mh.Causal(), backend="reference"), (q,), (t,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, t)
        found = forward_ad.unpack_dual(mh.attend(dual, k, v, mh.Causal())).tangent
        for name in ("native", "sdpa"):
            with pytest.raises(ValueError, match=f"backend='{name}' refuses this call"):
                mh.attend(dual, k, v, backend=name)
    torch.testing.assert_close(found, wanted)
    layer, x, t = mh.MultiHeadAttention(8, heads=2).requires_grad_(False), torch.randn(3, 8), torch.randn(3, 8)
    _, wanted = torch.func.jvp(layer, (x,), (t,))
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, t))).tangent
    torch.testing.assert_close(found, wanted)


def test_forward_and_backward_of_the_native_backend_need_memory_of_order_n() -> None:
    """At 16,384 tokens, outputs and gradients included, less than 16 MiB; one (Q, K) matrix would take 1 GiB."""
    if kernel.module is None:
        pytest.skip(f"the native module is {kernel.missing}")
    script = """
import resource, torch, multihead as mh
q, k, v = (torch.randn(1, 1, 16384, 8, requires_grad=True) for _ in range(3))
mh.attend(*(t[:, :, :600] for t in (q, k, v)), mh.Causal(), backend="native", return_lse=True)[0].sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
mh.attend(q, k, v, mh.Causal(), backend="native", return_lse=True)[0].sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    used = int(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout)
    assert used < 16 * 2**20


def test_a_call_leaves_memory_of_order_n_for_the_lse_of_sdpa() -> None:
    """The log-sum-exp at 8192 tokens adds less than a tenth of what a (Q, K) matrix would take."""
    script = """
import resource, torch, multihead as mh
from multihead.attention.sdpa import logsumexp
q = torch.randn(1, 1, 8192, 8)
mh.attend(q[:, :, :600], q[:, :, :600], q[:, :, :600], mh.Causal(), backend="sdpa", return_lse=True)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
mh.attend(q, q, q, mh.Causal(), backend="sdpa", return_lse=True)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    used = int(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout)
    assert used < 8192 * 8192 * 4 / 10


class Marked(torch.Tensor):
    """A class of somebody's own that changes nothing."""


@pytest.mark.parametrize("bias", [False, True])
def test_a_gradient_of_a_class_of_ones_own_is_taken_as_torch_takes_it(bias: bool) -> None:
    q, k, v = (t.requires_grad_() for t in torch.randn(3, 2, 3, 7, 8))
    added = {"bias": torch.randn(7, 7, requires_grad=True)} if bias else {}
    outputs, asked = mh.attend(q, k, v, return_lse=True, **added), [q, k, v, *added.values()]
    back = [torch.randn_like(t) for t in outputs]
    wanted = torch.autograd.grad(outputs, asked, back, retain_graph=True)
    found = torch.autograd.grad(outputs, asked, [t.as_subclass(Marked) for t in back])
    for one, other in zip(found, wanted):
        assert torch.equal(one.as_subclass(torch.Tensor), other)

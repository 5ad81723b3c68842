"""torch's own OpInfo samples of `scaled_dot_product_attention`, on every backend: values, gradients, gradcheck.

The judge is torch's math kernel in float64. The bound on values is the package's own: an error of at most twice that of
the plain implementation that rounds every operation to the same dtype, and one rounding. The bound on gradients is
wider, four times plain's, with plain at its worst over several orders of summation and both ways to take a gradient:
the samples are so small, and their scores so large, that a gradient is a small difference of large numbers and plain's
error in a single order a matter of luck.
"""

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from adapters import Ledger, refusals, standing
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import SampleInput

import multihead as mh

(OP,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
ORDERS = 8
LEDGER = Ledger("opinfo")


@cache
def samples(dtype: torch.dtype, requires_grad: bool = False) -> dict[str, SampleInput]:
    """The samples by number and kind, such as 16-3d-4d-causal: q (H,Q,D) that broadcasts to k (B,H,K,D)."""
    torch.manual_seed(0)
    found = {}
    for n, sample in enumerate(OP.sample_inputs("cpu", dtype, requires_grad)):
        ranks = dict.fromkeys(f"{t.dim()}d" for t in (sample.input, *sample.args))
        marks = {"causal": sample.kwargs["is_causal"], "mask": "attn_mask" in sample.kwargs}
        marks["dropout"] = sample.kwargs["dropout_p"] > 0
        found["-".join([f"{n:02}", *ranks, *(mark for mark, there in marks.items() if there)])] = sample
    return found


NAMES = list(samples(torch.float32))


def as_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> dict:
    """The arguments of `mh.attend` that mean what these mean to torch, with axes added up to (B, H, …).

    torch's is_causal is top-left: the last of Q queries stands at key Q − 1, wherever the last key is.
    """
    leading = torch.broadcast_shapes(*(t.shape[:-2] for t in (q, k, v)))
    q, k, v = (t.expand(*leading, *t.shape[-2:]) for t in (q, k, v))
    if len(leading) == 1:
        q, k, v = (t.unsqueeze(1) for t in (q, k, v))  # one head
    mask = standing(q.shape[-2], k.shape[-2], q.shape[-2], None, 0) if is_causal else None
    return {"q": q, "k": k, "v": v, "mask": mask, "bias": attn_mask, "dropout": dropout_p}


def ours(backend: str) -> Callable[..., Tensor]:
    def run(*inputs: Tensor, **options: object) -> Tensor:
        out = mh.attend(**as_call(*inputs, **options), backend=backend)
        return out if max(t.dim() for t in inputs[:3]) == 4 else out.squeeze(1)

    return run


def exact(*inputs: Tensor, **options: object) -> Tensor:
    """What torch itself makes of it, by its plain kernel."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*inputs, **options)


class Forgetful(torch.autograd.Function):
    """softmax(scores) · v whose gradient makes the weights anew from their log-sum-exp, as fused kernels do."""

    @staticmethod
    def forward(scores: Tensor, v: Tensor) -> Tensor:
        return scores.softmax(-1) @ v

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: FunctionCtx, upstream: Tensor) -> tuple[Tensor, Tensor]:
        scores, v, out = ctx.saved_tensors
        weights = (scores - scores.logsumexp(-1, keepdim=True)).exp()
        return weights * (upstream @ v.mT - (upstream * out).sum(-1, keepdim=True)), weights.mT @ upstream


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    order: Tensor | None = None,
    forgetful: bool = False,
) -> Tensor:
    """What anyone would write, each operation rounded to the dtype of the inputs; `order` is that of the sum over D."""
    if order is not None:
        q, k = q[..., order], k[..., order]
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if is_causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    if attn_mask is not None:
        scores = scores + attn_mask
    return Forgetful.apply(scores, v) if forgetful else scores.softmax(-1) @ v


def unpack(sample: SampleInput) -> tuple[tuple[Tensor, ...], dict]:
    """The tensors of a sample, the mask among them where there is one, and its options."""
    options = dict(sample.kwargs)
    mask = options.pop("attn_mask", None)
    return (sample.input, *sample.args, *([] if mask is None else [mask])), options


def differentiate(f: Callable[..., Tensor], name: str, dtype: torch.dtype, into: torch.dtype) -> list[Tensor]:
    """The output of a sample in `dtype`, computed in `into`, then the gradient of each tensor that went in."""
    inputs, options = unpack(samples(dtype, requires_grad=True)[name])
    inputs = tuple(t.detach().to(into).requires_grad_() for t in inputs)
    out = f(*inputs, **options)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream.to(into))]


@cache
def judge(name: str, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """The exact output and gradients, each with the error that is allowed."""
    right = differentiate(exact, name, dtype, torch.float64)
    D, generator = samples(dtype)[name].input.shape[-1], torch.Generator().manual_seed(0)
    orders = [None, *(torch.randperm(D, generator=generator) for _ in range(1, ORDERS))]
    attempts = [
        differentiate(partial(plain, order=order, forgetful=forgetful), name, dtype, dtype)
        for order in orders
        for forgetful in (False, True)
    ]
    errors = [torch.stack([(t.double() - truth).abs().max() for t, truth in zip(a, right)]) for a in attempts]
    allowed = 4 * torch.stack(errors).amax(0)
    allowed[0] = 2 * errors[0][0]  # the output
    rounding = [torch.finfo(dtype).eps * truth.abs().max() for truth in right]
    return list(zip(right, allowed + torch.stack(rounding)))


def assert_within(found: Tensor, truth: Tensor, allowed: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == truth.shape
    assert found.dtype == dtype
    assert (found.double() - truth).abs().max() <= allowed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "backend"), LEDGER.pairs(NAMES))
def test_values_are_those_of_torch(name: str, backend: str, dtype: torch.dtype) -> None:
    inputs, options = unpack(samples(dtype)[name])
    assert_within(ours(backend)(*inputs, **options), *judge(name, dtype)[0], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "backend"), LEDGER.pairs(NAMES))
def test_values_and_gradients_are_those_of_torch(name: str, backend: str, dtype: torch.dtype) -> None:
    """Asking for a gradient may take another kernel, so the values are judged again."""
    found, right = differentiate(ours(backend), name, dtype, dtype), judge(name, dtype)
    assert len(found) == len(right)
    for each, (truth, allowed) in zip(found, right):
        assert_within(each, truth, allowed, dtype)


@pytest.mark.parametrize("name", [name for name in NAMES if not LEDGER.leaves_out(name)])
def test_gradcheck(name: str) -> None:
    """Of the first derivative and of the second: the specification is differentiable twice."""
    inputs, options = unpack(samples(torch.float64, requires_grad=True)[name])
    assert gradcheck(lambda *t: ours("reference")(*t, **options), inputs, fast_mode=True)
    assert gradgradcheck(lambda *t: ours("reference")(*t, **options), inputs, fast_mode=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "backend"), LEDGER.refused)
def test_a_backend_that_is_named_refuses_in_the_words_of_the_ledger(
    name: str, backend: str, dtype: torch.dtype
) -> None:
    inputs, options = unpack(samples(dtype)[name])
    with pytest.raises(ValueError, match="refuses this call") as refusal:
        ours(backend)(*inputs, **options)
    assert str(refusal.value).endswith(LEDGER.refused[name, backend])


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_ledger_lists_exactly_what_is_refused(dtype: torch.dtype, requires_grad: bool) -> None:
    found = {}
    for name, sample in samples(dtype, requires_grad).items():
        inputs, options = unpack(sample)
        found |= {(name, backend): why for backend, why in refusals(as_call(*inputs, **options)).items()}
    assert found == LEDGER.refused


def test_the_ledger_has_no_stale_entry() -> None:
    assert not LEDGER.stale(NAMES)


def test_what_is_left_out_has_dropout() -> None:
    for name, sample in samples(torch.float32).items():
        assert LEDGER.leaves_out(name) == (sample.kwargs["dropout_p"] > 0)

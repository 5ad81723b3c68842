"""FlexAttention as a backend: our semantics, by blocks, chosen where no kernel of ours is.

That a call gives on `flex` what it must is tested with all other backends (test_attend, test_decisions, test_properties,
conformance), on a CPU and not compiled. Here are what is its own: blocks, rules, gradients, and the compiled kernel.
"""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import multihead as mh
from multihead.attention import flex, prepare
from multihead.call import Arguments
from multihead.masks import lower
from multihead.masks.intervals import Frame
from tests.distributed import bound

Q, K = 300, 411
SOME = torch.rand(4, Q, K, generator=torch.Generator().manual_seed(0)) < 0.3
SOME[1, 5] = False
MASKS = {
    "everything": None,
    "causal": mh.Causal(),
    "window": mh.Causal(window=40),
    "both ways": mh.Window(20, 170),
    "prefix": mh.Prefix(270),
    "a prefix for each row": mh.Prefix(torch.tensor([7, 300])),
    "padding, one row with no key": mh.Padding([0, 211]),
    "left padding": mh.Padding([9, 211], side="left") & mh.Causal(),
    "documents": mh.Documents([100, 200], [20, 391]) & mh.Causal(),
    "dense for each head": mh.Allowed(SOME),
    "dense and causal": mh.Causal() & mh.Allowed(SOME),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -torch.inf, 2.0, -1.0])},
    "a bias for each head": {"bias": torch.randn(4, Q, K, generator=torch.Generator().manual_seed(1))},
    "a bias that hides": {"bias": torch.zeros(1, 1, 1, K).index_fill_(3, torch.arange(100, 300), -torch.inf)},
}


def tensors(dtype: torch.dtype = torch.float32, queries: int = Q, keys: int = K, seed: int = 0) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    shapes = ((2, 4, queries, 16), (2, 2, keys, 16), (2, 2, keys, 24))
    return [torch.randn(shape, generator=made).to(dtype) for shape in shapes]


@pytest.mark.parametrize("name", MASKS)
def test_blocks_are_those_that_a_dense_mask_says(name: str) -> None:
    visible = lower(MASKS[name], Frame.of(Q, K), 2, 4)
    partial, full = flex.blocks(visible, torch.device("cpu"))
    interval = torch.nn.functional.pad(
        torch.ones(2, 4, Q, K, dtype=torch.bool)
        & mh.masks.intervals.Visible(Q, K, visible.start, visible.stop).allowed(),
        (0, -K % flex.BLOCK, 0, -Q % flex.BLOCK),
    )
    real = torch.nn.functional.pad(torch.ones(Q, dtype=torch.bool), (0, -Q % flex.BLOCK))[:, None] | interval
    tiles = (
        t.unflatten(-1, (-1, flex.BLOCK)).unflatten(-3, (-1, flex.BLOCK)).transpose(-2, -3) for t in (interval, real)
    )
    seen, _ = (t.flatten(-2) for t in tiles)
    queries = torch.arange(-(-Q // flex.BLOCK) * flex.BLOCK).view(-1, 1, flex.BLOCK, 1) < Q
    whole = seen.unflatten(-1, (flex.BLOCK, flex.BLOCK)).logical_or(~queries).all(-1).all(-1)
    assert torch.equal((partial | full).expand(seen.shape[:-1]), seen.any(-1))
    assert torch.equal(full.expand(whole.shape), whole & seen.any(-1))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MASKS)
def test_it_gives_what_the_reference_gives(name: str, options: str) -> None:
    """With a NaN among the queries and an infinite value among those that some queries do not see."""
    q, k, v = tensors()
    q[0, 0, 3] = torch.nan
    v[1, 1, 310] = torch.inf
    k[0, 1, 40] = torch.nan
    given = {"mask": MASKS[name], "return_lse": True, **OPTIONS[options]}
    (out, lse), (right, right_lse) = (mh.attend(q, k, v, **given, backend=b) for b in ("flex", "reference"))
    exact, exact_lse = mh.attend(q.double(), k.double(), v.double(), **given, backend="reference")
    for found, plain, wide in ((out, right, exact), (lse, right_lse, exact_lse)):
        finite = wide.isfinite() & plain.isfinite()
        assert torch.equal(found.isfinite(), plain.isfinite()) or found is lse
        assert torch.equal(found == -torch.inf, plain == -torch.inf)
        numbers = [t.masked_fill(~finite, 0) for t in (found, plain, wide)]
        assert not bound.check(name, numbers[0], [numbers[1]], numbers[2].numpy(), torch.float32)


def test_who_is_asked_in_which_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is not a CPU: torch's fused kernels where they need no mask, else flex, else a mask."""
    monkeypatch.setattr(flex, "DEVICES", ("meta", "cpu"))
    q, k, v = (t.to("meta") for t in tensors(queries=K))

    def taken(**given: Any) -> str:
        return mh.explain(q, k, v, **given).backend

    assert taken() == taken(mask=mh.Causal()) == "sdpa"
    assert taken(mask=mh.Causal(window=9)) == taken(softcap=3.0) == taken(sinks=torch.zeros(4, device="meta")) == "flex"
    assert taken(mask=mh.Prefix(9)) == taken(bias=torch.zeros(K, K, device="meta")) == "flex"
    assert taken(dropout=0.5) == "reference"
    double = [t.double() for t in (q, k, v)]
    assert mh.explain(*double, mask=mh.Causal(window=9)).backend == "sdpa"
    assert "not compiled for float64" in mh.explain(*double).reasons["flex"]
    cpu = mh.explain(*tensors(), mask=mh.Causal(window=9))
    assert cpu.backend != "flex"
    assert "(only where it is named)" in cpu.reasons["flex"]


def test_what_it_cannot_do_it_refuses() -> None:
    q, k, v = tensors()
    for given, why in (
        ({"dropout": 0.1}, "no dropout"),
        ({"sinks": torch.zeros(4, requires_grad=True)}, "no backward pass on a CPU"),
    ):
        with pytest.raises(ValueError, match=why):
            mh.attend(q, k, v, **given, backend="flex")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="empty sequences"):
        mh.attend(q[:, :, :0], k, v, backend="flex")
    with pytest.raises(ValueError, match="not compiled for meta"):
        mh.attend(*(t.to("meta") for t in (q, k, v)), backend="flex")


traced = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own tracing


@pytest.fixture
def differentiable() -> Iterator[None]:
    """Torch keeps gradients from a CPU, though its uncompiled FlexAttention has them: here it may."""
    with (
        mock.patch.object(torch_flex, "_validate_device", return_value=None),
        mock.patch.object(flex, "attend", return_value=torch_flex.flex_attention),
        mock.patch.object(torch_flex, "_warn_once", return_value=None),
        torch._dynamo.config.patch(recompile_limit=200),
    ):
        yield


@traced
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("causal", "plain"),
        ("window", "softcap"),
        ("padding, one row with no key", "sinks"),
        ("documents", "a bias for each head"),
    ],
)
def test_gradients(differentiable: None, name: str, options: str) -> None:
    queries, keys = (Q, K) if options != "plain" else (67, 59)  # the first queries see nothing
    t = dict(zip("qkv", tensors(queries=queries, keys=keys)))
    more = dict(OPTIONS[options])
    if "sinks" in more:
        more["sinks"] = torch.tensor([0.5, -2.0, 2.0, -1.0])
    t |= {n: more.pop(n) for n in ("sinks", "bias") if n in more}
    made = {n: value.clone().requires_grad_() for n, value in t.items()}
    extra = {n: made.get(n) for n in ("sinks", "bias")}
    call = prepare(Arguments(made["q"], made["k"], made["v"], MASKS[name], **extra, **more))
    out, _ = flex.Flex().run(call, None)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    (out * weight).sum().backward()
    found = {"out": out.detach(), **{n: value.grad for n, value in made.items()}}
    mask: Any = Dense(MASKS[name], 2)
    right = bound.exact(t, mask, weight, **more)
    plains = [bound.plain(t, mask, weight, order, **more) for order in bound.ORDERS]
    for n, exact in right.items():
        assert not bound.check(n, found[n], [p[n] for p in plains], exact, torch.float32)


class Dense:
    """A mask whose dense form has a batch axis."""

    def __init__(self, mask: Any, batch: int) -> None:
        self.mask, self.batch = mask, batch

    def dense(self, Q: int, K: int) -> Tensor:
        return lower(self.mask, Frame.of(Q, K), self.batch, 4).allowed().broadcast_to(self.batch, 4, Q, K)


@traced
def test_a_second_derivative_is_refused(differentiable: None) -> None:
    q, k, v = (t.requires_grad_() for t in tensors(queries=9, keys=9))
    out, _ = flex.Flex().run(prepare(Arguments(q, k, v, mh.Causal())), None)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="backend='flex' has no second derivative"):
        grad.sum().backward()


def test_compiled_for_inference() -> None:
    """One kernel for all windows and lengths of a kind: what differs reaches it in tensors."""
    with mock.patch.object(flex, "attend", flex.compiled):
        for window, keys in ((40, 411), (77, 411), (40, 523)):
            q, k, v = tensors(keys=keys)
            call = prepare(Arguments(q, k, v, mh.Causal(window=window), softcap=2.0))
            with torch.no_grad():
                out, _ = flex.Flex().run(call, None)
            plain, exact = (
                mh.attend(*t, mh.Causal(window=window), softcap=2.0, backend="reference")
                for t in ((q, k, v), [t.double() for t in (q, k, v)])
            )
            assert isinstance(exact, Tensor)
            assert not bound.check("out", out, [plain], exact.numpy(), torch.float32)  # type: ignore[list-item]


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="flex as a GPU runs it: there is none here")


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MASKS)
def test_on_a_gpu(name: str, options: str, dtype: torch.dtype) -> None:
    """Output, log-sum-exp and gradients of the compiled kernel, beside the reference in the same dtype."""
    made = [t.cuda().requires_grad_() for t in tensors(dtype)]
    more = {n: o.cuda().to(dtype) if isinstance(o, Tensor) else o for n, o in OPTIONS[options].items()}
    mask = mh.Allowed(SOME.cuda()) if name == "dense for each head" else MASKS[name]
    results = []
    for backend, wide in (("flex", False), ("reference", False), ("reference", True)):
        qkv = [t.detach().to(torch.float64 if wide else dtype).requires_grad_() for t in made]
        wider = {n: o.double() if wide and isinstance(o, Tensor) else o for n, o in more.items()}
        out, lse = mh.attend(*qkv, mask, return_lse=True, backend=backend, **wider)  # type: ignore[arg-type]
        grads = torch.autograd.grad(out.square().sum(), qkv)
        results.append([t.detach().cpu().nan_to_num(neginf=0.0) for t in (out, lse, *grads)])
    for n, (found, plain, exact) in enumerate(zip(*results)):
        assert not bound.check(str(n), found, [plain], exact.numpy(), dtype)


@needs_gpu
def test_on_a_gpu_no_matrix_of_scores_is_held() -> None:
    q = torch.randn(1, 4, 8192, 64, device="cuda", dtype=torch.bfloat16)
    mh.attend(q, q, q, mh.Causal(window=512), softcap=20.0)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mh.attend(q, q, q, mh.Causal(window=512), softcap=20.0)
    assert torch.cuda.max_memory_allocated() - before < 8192 * 8192  # bytes: less than one bool for each pair

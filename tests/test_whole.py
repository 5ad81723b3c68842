"""The whole layer in one native call: as exact as step by step, and never where somebody would notice."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.flop_counter import FlopCounterMode

import multihead as mh
from multihead import kernel
from multihead.kernel import eligible

pytestmark = pytest.mark.skipif(kernel.module is None, reason=f"the native module is {kernel.missing}")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the whole layer ran in one native call."""
    assert kernel.module is not None
    made: list[int] = []
    read = kernel.module.layer

    class Counted:
        def __init__(self, call: Any) -> None:
            self.call = call

        def __getattr__(self, name: str) -> Any:
            return getattr(self.call, name)

        def put_out(self, x: Tensor) -> Tensor:
            made.append(1)
            return self.call.put_out(x)

    def counted(*args: Any) -> Counted | tuple[str, bool]:
        call = read(*args)
        return call if isinstance(call, tuple) else Counted(call)

    monkeypatch.setattr(kernel.module, "layer", counted)
    return made


def layer(**options: Any) -> mh.MultiHeadAttention:
    torch.manual_seed(0)
    made = mh.MultiHeadAttention(24, 6, **options)
    for name, p in made.named_parameters():
        if name.endswith("bias") or name == "sinks":
            nn.init.normal_(p)
    return made.eval()


class OwnRoPE(mh.RoPE):
    """Somebody's subclass: what it does to q and k is not known."""


MASKS = {
    "none": None,
    "causal": mh.Causal(),
    "window": mh.Window(1, 1),
    "padding": mh.Padding([3, 5]),
    "dense": torch.arange(2 * 6 * 5 * 5).view(2, 6, 5, 5) % 7 < 4,
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_heads": 2, "head_dim": 7, "value_dim": 3},
        {"bias": False, "softcap": 2.0},
        {"sinks": True, "scale": 0.3},
    ],
    ids=str,
)
def test_error_is_at_most_twice_that_of_the_steps(
    mask: mh.Mask | Tensor | None, options: dict[str, Any], calls: list[int]
) -> None:
    made, x = layer(**options), torch.randn(2, 5, 24)
    with torch.no_grad():
        fast = made(x, mask=mask)
        assert len(calls) == 1
        with mh.backend("reference"):
            plain = made(x, mask=mask)
            exact = made.double()(x.double(), mask=mask)
        assert len(calls) == 1
    bound = 2 * (plain - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
    assert (fast - exact).abs().max() <= bound


@pytest.mark.parametrize("options", [{}, {"kv_heads": 2, "head_dim": 7, "value_dim": 3, "bias": False}], ids=str)
def test_many_tokens(options: dict[str, Any], calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eligible, "MANY", True)
    made, x = layer(**options), torch.randn(3, 67, 24)
    with torch.no_grad():
        fast = made(x, mask=mh.Causal())
        assert torch.equal(fast[1], made(x[1], mask=mh.Causal()))  # a batch changes nothing
        assert len(calls) == 2
        with mh.backend("reference"):
            plain = made(x, mask=mh.Causal())
            exact = made.double()(x.double(), mask=mh.Causal())
    bound = 2 * (plain - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
    assert (fast - exact).abs().max() <= bound


def test_what_a_projection_holds_is_looked_up_again(calls: list[int]) -> None:
    made, x = layer(), torch.randn(5, 24)
    with torch.no_grad():
        made(x)
        for change in (
            lambda: made.q_proj.weight.mul_(2),
            lambda: setattr(made.k_proj.weight, "data", torch.randn(24, 24)),
            lambda: setattr(made.v_proj.bias, "data", torch.randn(24)),
            lambda: setattr(made.o_proj, "weight", nn.Parameter(torch.randn(24, 24))),
            lambda: setattr(made.q_proj, "bias", None),
            lambda: setattr(made.o_proj.weight, "data", torch.randn(48, 24)[::2]),
            lambda: setattr(made.v_proj.weight, "data", torch.randn(24, 24).t()),  # read as it lies
            lambda: made.double().float(),
        ):
            change()
            with mh.backend("reference"):
                plain = made(x)
            torch.testing.assert_close(made(x), plain, rtol=0, atol=1e-6 * float(plain.abs().max()))
    assert len(calls) == 9
    halved = copy.deepcopy(made).half()
    with torch.no_grad():
        assert halved(x.half()).dtype is torch.float16


def test_the_default_dtype_does_not_matter() -> None:
    made, x = layer(), torch.randn(5, 24)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            assert made(x).dtype is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_every_way_to_call_it(calls: list[int]) -> None:
    made, cross = layer(), layer(context_dim=10)
    x, context = torch.randn(2, 5, 24), torch.randn(2, 3, 10)
    with torch.inference_mode():
        whole = made(x)
        torch.testing.assert_close(made(x[1]), whole[1])
        torch.testing.assert_close(made(x.transpose(1, 2).contiguous().transpose(1, 2)), whole)  # by the steps
        torch.testing.assert_close(made(x[:, ::2]), made(x[:, ::2].contiguous()))
        torch.testing.assert_close(cross(x, context)[0], cross(x[0], context[0]))
    assert len(calls) == 6
    frozen = layer().requires_grad_(False)
    assert not frozen(x).requires_grad
    assert len(calls) == 7


def hooked(made: mh.MultiHeadAttention) -> None:
    made.v_proj.register_forward_hook(lambda *_: None)


def hooked_before(made: mh.MultiHeadAttention) -> None:
    made.q_proj.register_forward_pre_hook(lambda *_: None)


def hooked_backward(made: mh.MultiHeadAttention) -> None:
    made.k_proj.register_full_backward_hook(lambda *_: None)


def hooked_before_backward(made: mh.MultiHeadAttention) -> None:
    made.o_proj.register_full_backward_pre_hook(lambda *_: None)


class Watchful(nn.Parameter):
    """A tensor of somebody else's."""


def subclassed(made: mh.MultiHeadAttention) -> None:
    made.q_proj.weight = Watchful(made.q_proj.weight.data)


def mixed(made: mh.MultiHeadAttention) -> None:
    made.v_proj.bias = nn.Parameter(made.v_proj.bias.data[:1].expand(24))  # stride 0


def adapted(made: mh.MultiHeadAttention) -> None:
    made.q_proj = nn.Sequential(made.q_proj)  # type: ignore[assignment]


def patched(made: mh.MultiHeadAttention) -> None:
    forward = made.o_proj.forward
    made.o_proj.forward = lambda x: forward(x)  # type: ignore[method-assign]


def parametrized(made: mh.MultiHeadAttention) -> None:
    parametrize.register_parametrization(made.k_proj, "weight", nn.Identity())


def test_sinks_may_lie_apart(calls: list[int]) -> None:
    made, x = layer(sinks=True), torch.randn(5, 24)
    together = made.sinks.data.clone()
    with torch.no_grad():
        expected = made(x)
        made.sinks = nn.Parameter(torch.stack([together, -together], 1)[:, 0])
        assert torch.equal(made(x), expected)
    assert len(calls) == 2


class TestNotTaken:
    @pytest.mark.parametrize(
        "change",
        [
            hooked,
            hooked_before,
            hooked_backward,
            hooked_before_backward,
            adapted,
            patched,
            parametrized,
            subclassed,
            mixed,
        ],
    )
    def test_where_a_projection_is_more_than_a_product(
        self, change: Callable[[mh.MultiHeadAttention], None], calls: list[int]
    ) -> None:
        made, x = layer(), torch.randn(5, 24)
        change(made)
        with torch.no_grad():
            taken = made(x)
            assert not calls
            with mh.backend("reference"):
                torch.testing.assert_close(taken, made(x))

    @pytest.mark.parametrize("options", [{"rope": OwnRoPE()}, {"dropout": 0.5}], ids=["a RoPE of its own", "dropout"])
    def test_where_a_step_has_more_to_do(self, options: dict[str, Any], calls: list[int]) -> None:
        with torch.no_grad():
            layer(**options).train()(torch.randn(5, 24))
        assert not calls

    @pytest.mark.parametrize("options", [{"rope": True}, {"qk_norm": True}], ids=str)
    def test_but_where_rope_or_norms_are_our_own(self, options: dict[str, Any], calls: list[int]) -> None:
        with torch.no_grad():
            layer(**options)(torch.randn(5, 24))
        assert len(calls) == 1

    def test_where_something_watches(self, calls: list[int]) -> None:
        made, x = layer(), torch.randn(5, 24)
        assert made(x).requires_grad
        with torch.no_grad():
            mh.trace(made, x)
            with mh.ablate(made, heads=[0]):
                made(x)
            with FlopCounterMode(display=False) as counter:
                made(x)
            with mh.backend("sdpa"):
                made(x)
            with torch.autocast("cpu", torch.float16):
                made(x)
            torch.func.vmap(made)(x[None])
            torch.compile(made, fullgraph=True, backend="eager")(x)
            hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
            made(x)
            hook.remove()
        assert counter.get_total_flops() > 0
        assert not calls

    def test_in_training_with_dropout_or_with_no_tokens(self, calls: list[int]) -> None:
        made = layer(dropout=0.5)
        with torch.no_grad():
            made(torch.randn(2, 0, 24))
            made.train()(torch.randn(5, 24))
        assert not calls

    def test_with_many_tokens_where_torch_multiplies_as_fast(
        self, calls: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(eligible, "MANY", False)
        with torch.no_grad():
            layer()(torch.randn(eligible.ROWS + 1, 24))
            assert not calls
            layer()(torch.randn(eligible.ROWS, 24))
        assert len(calls) == 1

    def test_with_other_numbers(self, calls: list[int]) -> None:
        with torch.no_grad():
            layer().double()(torch.randn(5, 24).double())
        assert not calls


def test_what_is_read_off_torch_is_checked() -> None:
    assert kernel.module is not None
    made, x = layer(), torch.randn(2, 5, 24)
    children = dict(made._modules)

    def read(x: Any, context: Any = None, children: Any = children, **sizes: int) -> Any:
        widths = SimpleNamespace(**({"E": 24, "C": 24, "D": 4, "V": 4} | sizes))
        of = SimpleNamespace(_modules=children, sizes=widths, scale=0.5, softcap=None, sinks=None)
        assert kernel.module is not None
        return kernel.module.layer(of, x, context)

    def refused(*args: Any, **sizes: int) -> bool:
        found = read(*args, **sizes)
        return isinstance(found, tuple) and len(found[0]) > 5

    assert read(x).sizes == (2, 6, 5, 5)
    assert read(nn.Parameter(x)).sizes == (2, 6, 5, 5)
    assert read(x[0], x[1]).sizes == (1, 6, 5, 5)
    for other in (x.double(), x.to_sparse(), x.to("meta"), x[0, 0], x[None], x[..., :23], None, 3):
        assert refused(other)
        assert other is None or refused(x, other)
    for context in (x[0], x[:1], x[:, :0]):
        assert refused(x, context)
    for wrong in ({"D": 5}, {"V": 5}, {"C": 23}, {"E": 23}, {"D": 48}):
        assert refused(x, None, **wrong)
    for missing in children:
        if missing.endswith("proj"):
            assert refused(x, None, {k: v for k, v in children.items() if k != missing})
            assert refused(x, None, children | {missing: None})
            assert refused(x, None, children | {missing: nn.Linear(24, 23)})
            assert refused(x, None, children | {missing: nn.Linear(24, 24).double()})
            assert refused(x, None, children | {missing: nn.Linear(24, 24, device="meta")})
    assert refused(x, None, [])


def test_the_error_is_the_same_as_with_many_tokens() -> None:
    with torch.no_grad(), pytest.raises(ValueError, match="E=24"):
        layer()(torch.randn(5, 23))
    with torch.no_grad(), pytest.raises(ValueError, match="broadcasts"):
        layer()(torch.randn(5, 24), mask=torch.ones(4, 4, dtype=torch.bool))


HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("faster", [True, False])
def test_half_precision_goes_there_where_it_is_faster(
    dtype: torch.dtype, faster: bool, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "in_pairs", lambda: faster)
    monkeypatch.setattr(kernel, "widens_float16", lambda: faster)
    with torch.no_grad():
        assert layer().to(dtype)(torch.randn(5, 24, dtype=dtype)).dtype is dtype
    assert bool(calls) is faster


OPTIONS: list[dict[str, Any]] = [{}, {"kv_heads": 2, "rope": True, "qk_norm": True, "sinks": True, "softcap": 3.0}]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "everything"])
@pytest.mark.parametrize("N", [1, 4, 11, 40])
def test_float32_on_weights_of_half_precision(
    N: int, options: dict[str, Any], dtype: torch.dtype, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As exact as float32 is on the same weights, with any number of rows: torch has no such product."""
    monkeypatch.setattr(eligible, "MANY", False)
    made, x = layer(**options).to(dtype), torch.randn(2, N, 24)
    wide = copy.deepcopy(made).float()
    with torch.no_grad():
        y, exact = made(x, mask=mh.Causal()), copy.deepcopy(made).double()(x.double(), mask=mh.Causal())
        with mh.backend("reference"):
            plain = wide(x, mask=mh.Causal())
        assert (y.dtype, len(calls)) == (torch.float32, 1)
        bound = 2 * (plain - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
        assert (y - exact).abs().max() <= bound

        cache, same = made.new_cache(batch=2), wide.new_cache(batch=2, dtype=dtype)
        assert cache.nbytes == same.nbytes
        for token in x.split(1, dim=1):  # keys and values are rounded as they are kept, in both
            found, wanted = (of(token, mask=mh.Causal(), cache=c) for of, c in ((made, cache), (wide, same)))
            torch.testing.assert_close(
                found, wanted, rtol=0, atol=2 * torch.finfo(dtype).eps * float(exact.abs().max())
            )


def test_float32_on_weights_of_half_precision_is_refused_where_torch_would_multiply() -> None:
    made, x = layer().bfloat16(), torch.randn(3, 24)
    with pytest.raises(ValueError, match="only in inference on the CPU, where the layer is one native call"):
        made(x)  # its weights want gradients
    with torch.no_grad():
        assert made(x).dtype is torch.float32
        with pytest.raises(ValueError, match="only in inference"):
            mh.trace(made, x)
        with pytest.raises(ValueError, match="only in inference"), mh.backend("reference"):
            made(x)
        with pytest.raises(ValueError, match=r"weights are torch\.bfloat16 on cpu$"):
            made(x.double())
        with pytest.raises(ValueError, match=r"weights are torch\.float32 on cpu$"):
            layer()(x.bfloat16())

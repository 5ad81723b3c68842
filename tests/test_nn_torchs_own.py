"""What torch's own tests of its layer do with one, done with ours: its attributes into torch's function, odd dtypes, masks.

After the purposes of torch's test/nn/test_multihead_attention.py, twenty of them: the last section counts how many ours
passes, and torch's does, and holds which one of them fails. docs/nn.md has the count.
"""

import contextlib
import copy
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from multihead.nn import MultiheadAttention, replace

N, L, S, E, H = 3, 5, 7, 12, 3


def by_torchs_function(m: nn.MultiheadAttention, q: Tensor, k: Tensor, v: Tensor, **masks: Any) -> Any:
    """`F.multi_head_attention_forward`, called as code does that looks at `_qkv_same_embed_dim`."""
    split: dict[str, Any] = {}
    if not m._qkv_same_embed_dim:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        split = {"use_separate_proj_weight": True} | {name: getattr(m, name) for name in names}
    return F.multi_head_attention_forward(
        q, k, v, E, H, m.in_proj_weight, m.in_proj_bias, m.bias_k, m.bias_v, m.add_zero_attn, 0.0, m.out_proj.weight,
        m.out_proj.bias, training=False, **split, **masks,
    )  # fmt: skip


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize(
    "make", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 10, "vdim": 10}], ids=str
)
@pytest.mark.parametrize("padded", [False, True])
def test_torchs_function_takes_our_attributes(make: dict, padded: bool, average: bool) -> None:
    module = MultiheadAttention(E, H, dtype=torch.float64, **make).eval()
    q, k = torch.randn(L, N, E, dtype=torch.float64), torch.randn(S, N, make.get("kdim", E), dtype=torch.float64)
    masks: dict[str, Any] = {"attn_mask": torch.randn(L, S, dtype=torch.float64), "average_attn_weights": average}
    masks |= {"key_padding_mask": torch.arange(S).expand(N, S) >= torch.tensor([[S], [4], [2]])} if padded else {}
    if padded:
        masks["attn_mask"] = masks["attn_mask"] > 1
        masks["attn_mask"][:, 0] = False
    assert_close(module(q, k, k, **masks), by_torchs_function(module, q, k, k, **masks))


def test_what_it_says_of_itself_is_true() -> None:
    assert MultiheadAttention(E, H)._qkv_same_embed_dim
    assert not MultiheadAttention(E, H, kdim=10)._qkv_same_embed_dim
    theirs = nn.TransformerEncoderLayer(E, H, 13)
    replace(theirs)
    assert theirs.self_attn._qkv_same_embed_dim
    copied = copy.deepcopy(theirs.self_attn)
    assert len(copied._forward_pre_hooks) == 1
    copied._reset_parameters()
    assert len(copied._forward_pre_hooks) == 1, "once is enough"


def test_masks_of_both_kinds_at_once() -> None:
    module = MultiheadAttention(E, H, batch_first=True).eval()
    x, attn_mask, padding = torch.rand(8, L, E), torch.rand(L, L) < 0.5, torch.rand(8, L) < 0.5
    with torch.no_grad():
        ours = module(x, x, x, attn_mask=attn_mask, key_padding_mask=padding)[0]
        t = x.transpose(0, 1)
        theirs = by_torchs_function(module, t, t, t, attn_mask=attn_mask, key_padding_mask=padding)[0].transpose(0, 1)
    seen = ~(attn_mask | padding[:, None]).all(-1)  # rows that see nothing are NaN in torch
    assert_close(ours[seen], theirs[seen])


@pytest.mark.parametrize("make", [{}, {"kdim": 10, "vdim": 10}], ids=str)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("weights", "bias"), [(torch.double, torch.half), (torch.float, torch.double)], ids=str)
def test_a_bias_of_another_dtype(make: dict, grad: bool, weights: torch.dtype, bias: torch.dtype) -> None:
    module = MultiheadAttention(E, H, batch_first=True, dtype=weights, **make).eval()
    module.in_proj_bias = nn.Parameter(torch.randn(3 * E).to(bias))
    q, k = torch.randn(N, L, E, dtype=weights), torch.randn(N, S, make.get("kdim", E), dtype=weights)
    same = copy.deepcopy(module)
    same.in_proj_bias = nn.Parameter(module.in_proj_bias.to(weights))
    with torch.set_grad_enabled(grad):
        output = module(q, k, k)[0]
        assert output.dtype == weights
        assert_close(output, same(q, k, k)[0])
    if grad:
        output.sum().backward()
        assert module.in_proj_bias.grad.dtype == bias


def test_pefts_lora_on_the_whole_module() -> None:
    peft = pytest.importorskip("peft", reason="peft is optional")

    def adapted(kind: type) -> Any:
        torch.manual_seed(0)
        model = nn.ModuleDict({"attention": kind(E, H, batch_first=True)})
        config = peft.LoraConfig(target_modules=["attention"], r=2, init_lora_weights=False)
        return peft.get_peft_model(model, config).double()

    ours, theirs, x = adapted(MultiheadAttention), adapted(nn.MultiheadAttention), torch.randn(N, L, E).double()
    ours.load_state_dict(theirs.state_dict())
    outputs = [model.base_model.model["attention"](x, x, x)[0] for model in (ours, theirs)]
    assert_close(*outputs)
    for output in outputs:
        output.square().sum().backward()
    grads = [{n: p.grad for n, p in m.named_parameters() if "lora" in n} for m in (ours, theirs)]
    assert_close(*grads)
    assert len(grads[0]) == 4


@pytest.mark.parametrize("targets", [["self_attn"], ["out_proj"]], ids=str)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_pefts_lora_really_trains(targets: list[str]) -> None:
    """With peft's own start, where one factor is 0: every adapter moves, nothing else does, and the loss falls."""
    peft = pytest.importorskip("peft", reason="peft is optional")
    layer = nn.TransformerEncoderLayer(E, H, 13, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    assert len(replace(model).replaced) == 2
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, r=2))
    x, goal = torch.randn(N, L, E), torch.randn(N, L, E)
    before = {name: p.detach().clone() for name, p in adapted.named_parameters()}
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * len(["in_proj", "out_proj"] if targets == ["self_attn"] else targets)
    optimizer, losses = torch.optim.Adam(trained.values(), lr=0.03), []
    for _ in range(12):
        optimizer.zero_grad()
        loss = (adapted(x) - goal).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for name, p in adapted.named_parameters():
        if name in trained:
            assert not torch.equal(p, before[name]), name
        else:
            assert_close(p, before[name])  # peft adds its product to in_proj_weight and takes it away: rounded twice
    with torch.no_grad():
        learnt = adapted.eval()(x)
        assert_close(learnt, adapted.train()(x))
        with adapted.eval().disable_adapter():
            assert not torch.allclose(learnt, adapted(x))
        assert_close(adapted.merge_and_unload()(x), learnt)


# The twenty -----------------------------------------------------------------------------------------------------------

ROWS = torch.tensor([False, False, True, True])


def function_with(average: bool) -> Callable[[type], None]:
    """`F.multi_head_attention_forward` on the layer's attributes; a bias does not go with static keys."""

    def check(kind: type) -> None:
        for options in ({}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 10, "vdim": 10}):
            module = kind(E, H, **options).eval()
            q, k = torch.randn(1, N, E), torch.randn(S, N, module.kdim)
            mask = torch.zeros(1, S).masked_fill(torch.arange(S) > 4, -torch.inf)
            given: dict[str, Any] = {"attn_mask": mask, "average_attn_weights": average}
            assert_close(by_torchs_function(module, q, k, k, **given), module(q, k, k, **given))
            static = torch.randn(N * H, S, E // H)
            refuses = pytest.raises(AssertionError, match="bias cannot be added to static key")
            with refuses if module.bias_k is not None else contextlib.nullcontext():
                by_torchs_function(module, q, k, k, static_k=static, static_v=static, **given)

    return check


def a_mask_for_each_head(kind: type) -> None:
    module, q, k = kind(8, 4), torch.rand(2, 8, 8), torch.rand(3, 8, 8)
    mask = torch.zeros(8, 2, 3).masked_fill(torch.rand(8, 2, 3) < 0.5, -torch.inf)
    mask[..., 0] = 0
    whole = module(q, k, k, attn_mask=mask.repeat_interleave(4, 0))[0]
    for n in range(8):
        one = [t[:, n : n + 1] for t in (q, k, k)]
        assert_close(whole[:, n : n + 1], module(*one, attn_mask=mask[n])[0])


def no_bias(kind: type) -> None:
    module = kind(8, 4, bias=False)
    assert module.in_proj_bias is None
    assert module.out_proj.bias is None


def refuses_shapes(module: nn.Module, n: int, **given: Any) -> None:
    """AssertionErrors in torch's words, with a batch and without."""
    mask, masks = "expected `attn_mask` to be `None`, 2-D or 3-D but found 1-D", {"attn_mask": ROWS[:n]}
    for axes, other in ((3, 2), (2, 3)):
        q, k, v = (torch.randn([4] * axes) for _ in range(3))
        odd, more = torch.randn([n if other == 2 else 4] * other), given if axes == 3 else {}
        found = f"expected `key` and `value` to be {axes}-D but found"
        padding = ROWS[:n] if axes == 3 else torch.stack((ROWS, ROWS)).view(1, 8)
        padded = f"expected `key_padding_mask` to be `None` or {axes - 1}-D but found {padding.dim()}-D tensor instead"
        for message, args, options in (
            (f"{found} {other}-D and {axes}-D tensors respectively", (q, odd, v), {}),
            (f"{found} {axes}-D and {other}-D tensors respectively", (q, k, odd), {}),
            (padded, (q, k, v), {"key_padding_mask": padding}),
            (f"{mask} tensor instead", (q, k, v), masks),
        ):
            with pytest.raises(AssertionError, match=re.escape(message)):
                module(*args, **options, **more)
    with pytest.raises(AssertionError, match=r"Expected `attn_mask` shape to be \(4, 4, 4\)"):
        module(q, k, v, attn_mask=torch.rand(5, 4, 4) < 0.5)


def wrong_shapes(kind: type) -> None:
    refuses_shapes(kind(4, 4), 4)
    with torch.no_grad():
        refuses_shapes(kind(4, 4).eval(), 4)


def wrong_shapes_in_inference(kind: type) -> None:
    with torch.no_grad():
        refuses_shapes(kind(4, 4, batch_first=True).eval(), 3, need_weights=False)


def nested_tensors(kind: type) -> None:
    one, two, three = (
        torch.nested.nested_tensor([torch.randn(n, 10), torch.randn(m, 10)], layout=torch.jagged)
        for n, m in ((4, 6), (7, 16), (7, 16))
    )
    module, empty = kind(10, 5, batch_first=True).eval(), torch.nested.nested_tensor([])
    module(one, one, one)
    module(one, two, three)
    message = "query should be unbatched 2D or batched 3D tensor but received 1-D query tensor"
    with pytest.raises(AssertionError, match=message):
        module(empty, empty, empty)
    for options in ({"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}):
        module = kind(10, 5, batch_first=True, **options).eval()
        for mode in (contextlib.nullcontext(), torch.no_grad(), torch.inference_mode()):
            with mode:
                module(one, one, one)
    module.requires_grad_(False)(one, one, one)


def two_masks(kind: type) -> None:
    module = kind(14, 7, batch_first=True).eval()
    x, attn_mask, padding = torch.rand(8, L, 14), torch.rand(L, L) < 0.5, torch.rand(8, L) < 0.5
    with torch.no_grad():
        ours, t = module(x, x, x, attn_mask=attn_mask, key_padding_mask=padding)[0], x.transpose(0, 1)
        theirs = F.multi_head_attention_forward(
            t, t, t, 14, 7, module.in_proj_weight, module.in_proj_bias, module.bias_k, module.bias_v,
            module.add_zero_attn, module.dropout, module.out_proj.weight, module.out_proj.bias, training=False,
            key_padding_mask=padding, need_weights=False, attn_mask=attn_mask,
        )[0].transpose(0, 1)  # fmt: skip
    seen = ~(attn_mask | padding[:, None]).all(-1)
    assert_close(ours[seen], theirs[seen])


def torchs_own_kernel(kind: type) -> None:
    module, x = kind(16, 8, batch_first=True).eval(), torch.rand(8, L, 16)
    nothing = mock.MagicMock(return_value=(torch.Tensor(), torch.Tensor()))
    with torch.no_grad(), mock.patch("torch._native_multi_head_attention", new=nothing) as kernel:
        module(x, x, x, attn_mask=torch.rand(L, L) < 0.5, key_padding_mask=torch.rand(8, L) < 0.5)
    assert kernel.called


def of_dtype(dtype: torch.dtype, batch_first: bool) -> Callable[[type], None]:
    """On CUDA alone in torch's file; here on the CPU."""

    def check(kind: type) -> None:
        for training in (True, False) if batch_first else (True,):
            module = kind(128, 8, batch_first=batch_first).to(dtype).train(training)
            q, k, v = (torch.randn(10, 8, 128, dtype=dtype) for _ in range(3))
            with torch.set_grad_enabled(training):
                output = module(q, k, v, need_weights=not batch_first)[0]
            assert (output.shape, output.dtype) == (q.shape, dtype)

    return check


def half_bias(kind: type) -> None:
    module, x = kind(4, 4, batch_first=True, dtype=torch.double).eval(), torch.randn(4, 4, 4).double()
    module.in_proj_bias = nn.Parameter(module.in_proj_bias.half())
    with torch.no_grad():
        module(x, x, x)


def in_double(make: dict, width: int, context: int) -> Callable[[type], None]:
    def check(kind: type) -> None:
        x, other = torch.rand(4, 4, width).double(), torch.rand(4, 4, context).double()
        with torch.no_grad():
            kind(width, width, dtype=torch.double, **make).eval()(x, other if context != width else x, other)

    return check


def padding_in_compile(kind: type) -> None:
    layer = nn.TransformerEncoderLayer(E, H, 13, batch_first=True, dtype=torch.double)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    if kind is MultiheadAttention:
        replace(encoder)
    hidden = torch.rand(1, 41) > 0.5
    hidden[:, 0] = True
    compiled = torch.compile(encoder, fullgraph=True, backend="eager")
    compiled(torch.randn(1, 41, E).double(), mask=None, src_key_padding_mask=hidden)


KERNEL, NESTED = "two masks take torch's own kernel", "nested tensors outside torch's fast path"
TWENTY: dict[str, Callable[[type], None]] = {
    "against the function, mean of the weights": function_with(average=True),
    "against the function, weights of each head": function_with(average=False),
    "a mask for each head": a_mask_for_each_head,
    "no bias": no_bias,
    "wrong shapes": wrong_shapes,
    "wrong shapes, fast path": wrong_shapes_in_inference,
    NESTED: nested_tensors,
    "two masks": two_masks,
    KERNEL: torchs_own_kernel,
    **{f"in {d}": of_dtype(d, False) for d in (torch.half, torch.float, torch.double)},
    **{f"in {d}, batch first": of_dtype(d, True) for d in (torch.half, torch.float, torch.double)},
    "a bias of another dtype": half_bias,
    "small": in_double({"batch_first": True}, 4, 4),
    "padding in torch.compile": padding_in_compile,
    "no bias of the projection in": in_double({"bias": False}, 2, 2),
    "projections in apart": in_double({"kdim": 2, "vdim": 2}, 4, 2),
}


@pytest.mark.parametrize(("kind", "fails"), [(MultiheadAttention, KERNEL), (nn.MultiheadAttention, NESTED)])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor")
def test_nineteen_of_the_twenty(kind: type, fails: str, record_property: Callable[[str, object], None]) -> None:
    """Ours never takes torch's own kernel, which is its purpose; torch's takes nested tensors on its fast path alone."""
    failed = {}
    for name, check in TWENTY.items():
        try:
            check(kind)
        except Exception as error:  # noqa: BLE001: each counts, whatever it is
            failed[name] = error
    passed = f"{len(TWENTY) - len(failed)} of {len(TWENTY)}"
    record_property("of torch's own tests", f"{kind.__module__.partition('.')[0]}'s layer passes {passed}")
    assert (passed, list(failed)) == ("19 of 20", [fails]), failed

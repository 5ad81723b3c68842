"""Each line of the table in docs/nn.md: what is different from torch on purpose, and how."""

import re
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import multihead as mh
import multihead.nn as ours
from multihead.nn import MultiheadAttention, replace

N, L, S, E, H = 2, 5, 7, 12, 4
TABLE = Path(__file__).parents[1] / "docs" / "nn.md"


def test_the_table_and_the_tests_name_each_other() -> None:
    listed = re.findall(r"`(test_\w+)` \|$", TABLE.read_text(), re.MULTILINE)
    here = {name for name in globals() if name.startswith("test_")} - {"test_the_table_and_the_tests_name_each_other"}
    assert len(listed) == len(set(listed)) > 10
    assert {name for name in listed if name not in here} == set()
    assert {name for name in here if name not in listed and not name.startswith("test_out_proj")} == set()


def make(**given: Any) -> MultiheadAttention:
    module = MultiheadAttention(E, H, batch_first=True, **given)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    return module


DEAD = [  # every way to hide every key of row 1, or of query 3
    pytest.param({"key_padding_mask": torch.tensor([[False] * S, [True] * S])}, id="padding"),
    pytest.param({"key_padding_mask": torch.tensor([[0.0] * S, [-torch.inf] * S])}, id="float padding"),
    pytest.param({"attn_mask": (torch.arange(L) == 3)[:, None].expand(L, S)}, id="mask"),
    pytest.param({"attn_mask": torch.where(torch.arange(L) == 3, -torch.inf, 0.3)[:, None].expand(L, S)}, id="float"),
    pytest.param(
        {
            "attn_mask": torch.ones(L, S, dtype=torch.bool).triu(1),
            "key_padding_mask": torch.tensor([[False] * S, [True, True] + [False] * (S - 2)]),
        },
        id="both together",
    ),
]


@pytest.mark.parametrize("mode", ["train", "eval", "inference"])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("masks", DEAD)
def test_a_query_that_sees_nothing(masks: dict, need_weights: bool, mode: str) -> None:
    module = make().train(mode == "train")
    x = torch.randn(N, L, E, requires_grad=mode != "inference")
    context = torch.randn(N, S, E, requires_grad=mode != "inference")
    with torch.inference_mode(mode == "inference"):
        output, weights = module(x, context, context, need_weights=need_weights, **masks)
        _, always = module(x, context, context, average_attn_weights=False, **masks)
    dead = always.sum(-1).amax(1) == 0  # (N, L)
    assert 0 < dead.sum() < N * L
    assert_close(output[dead], module.out_proj.bias.expand_as(output[dead]))
    assert output.isfinite().all()
    theirs = nn.MultiheadAttention(E, H, batch_first=True)(x, context, context, need_weights=need_weights, **masks)[0]
    assert (theirs[dead].isnan() if need_weights else theirs[dead] == 0).all()  # its out_proj.bias starts at 0
    if need_weights:
        assert (weights[dead] == 0).all()
        assert_close(weights[~dead].sum(-1), torch.ones_like(weights[~dead].sum(-1)))
    if mode != "inference":
        output.sum().backward()
        assert (x.grad[dead] == 0).all()
        for t in (x, context, *module.parameters()):
            assert t.grad.isfinite().all()


def test_hidden_nan_stays_hidden() -> None:
    module, x, context = make(), torch.randn(N, L, E), torch.randn(N, S, E)
    padding = torch.arange(S).expand(N, S) >= 4
    expected = module(x, context, context, key_padding_mask=padding)
    context[:, 4:] = torch.nan
    output, weights = module(x, context, context, key_padding_mask=padding)
    assert_close(output, expected[0])
    assert_close(weights, expected[1])
    theirs = nn.MultiheadAttention(E, H, batch_first=True)
    assert theirs(x, context, context, key_padding_mask=padding)[0].isnan().any()


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("extra", [False, True], ids=["", "learned and zero keys"])
@pytest.mark.parametrize("keys", [L, S, 3])
def test_is_causal_without_a_mask(keys: int, extra: bool, need_weights: bool) -> None:
    module = make(add_bias_kv=extra, add_zero_attn=extra)
    x, context = torch.randn(N, L, E), torch.randn(N, keys, E)
    hidden = torch.ones(L, keys, dtype=torch.bool).triu(1)
    padding = torch.arange(keys).expand(N, keys) >= torch.tensor([[keys], [2]])
    for more in ({}, {"key_padding_mask": padding}):
        output, _ = module(x, context, context, is_causal=True, need_weights=need_weights, **more)
        expected, _ = module(x, context, context, attn_mask=hidden, need_weights=need_weights, **more)
        assert_close(output, expected)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        nn.MultiheadAttention(E, H)(x, x, x, is_causal=True)


@pytest.mark.parametrize("need_weights", [True, False])
def test_is_causal_is_never_more_than_the_mask(need_weights: bool) -> None:
    module, x = make(), torch.randn(N, L, E)
    mask = torch.rand(L, L) < 0.4
    hinted = module(x, x, x, attn_mask=mask, is_causal=True, need_weights=need_weights)[0]
    assert torch.equal(hinted, module(x, x, x, attn_mask=mask, need_weights=need_weights)[0])
    theirs, mask[:, 0] = nn.MultiheadAttention(E, H, batch_first=True), False
    padding = torch.zeros(N, L, dtype=torch.bool)
    for more, dropped in (({}, not need_weights), ({"key_padding_mask": padding}, False)):
        one, two = (
            theirs(x, x, x, attn_mask=mask, is_causal=c, need_weights=need_weights, **more) for c in (False, True)
        )
        assert torch.allclose(one[0], two[0], atol=1e-6) == (not dropped)


@pytest.mark.parametrize("shape", [(N, H, L, S), (N, 1, L, S), (1, H, 1, S), (1, 1, L, 1), (N, 1, 1, 1)])
@pytest.mark.parametrize("floating", [False, True], ids=["bool", "float"])
@pytest.mark.parametrize("extra", [False, True], ids=["", "zero key"])
def test_four_axes(shape: tuple[int, ...], floating: bool, extra: bool) -> None:
    module, x, context = make(add_zero_attn=extra), torch.randn(N, L, E), torch.randn(N, S, E)
    mask = torch.randn(shape) if floating else torch.rand(shape) < 0.4
    three = mask.expand(N, H, L, S).reshape(N * H, L, S)
    assert_close(module(x, context, context, attn_mask=mask), module(x, context, context, attn_mask=three))
    with pytest.raises(AssertionError, match="2-D or 3-D but found 4-D"):
        nn.MultiheadAttention(E, H, batch_first=True)(x, context, context, attn_mask=mask)


def test_masks_of_mixed_types() -> None:
    module, x, context = make(), torch.randn(N, L, E), torch.randn(N, S, E)
    padding, mask = torch.arange(S).expand(N, S) >= 5, torch.randn(L, S)
    expected = module(x, context, context, mask.new_zeros(N, S).masked_fill(padding, -torch.inf), attn_mask=mask)
    assert_close(module(x, context, context, padding, attn_mask=mask), expected)  # a warning would be an error
    assert_close(module(x, context, context, padding, attn_mask=mask.double()), expected)
    with pytest.warns(UserWarning, match="mismatched"):
        nn.MultiheadAttention(E, H, batch_first=True)(x, context, context, padding, attn_mask=mask)
    with pytest.raises(RuntimeError, match="dtype"):
        nn.MultiheadAttention(E, H, batch_first=True)(x, context, context, attn_mask=mask.double())


def test_weights_change_nothing() -> None:
    module, x = make(), torch.randn(N, L, E)
    with torch.no_grad():  # where the kernel may give them itself
        outputs = [
            module(x, x, x, **given)[0] for given in ({}, {"average_attn_weights": False}, {"need_weights": False})
        ]
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[2])
    seen = []
    real = ours.attend

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(mh.explain(*args, **kwargs).backend)
        return real(*args, **kwargs)

    with patch.object(ours, "attend", watched):
        with_weights = module(x, x, x, need_weights=True)[0]
        without = module(x, x, x, need_weights=False)[0]
    assert torch.equal(with_weights, without)
    assert seen[0] == seen[1] != "reference"


def test_weights_are_those_before_dropout() -> None:
    module, x = make(dropout=0.7), torch.randn(N, L, E)
    weights = module(x, x, x)[1]
    assert_close(weights, module.eval()(x, x, x)[1])
    theirs = nn.MultiheadAttention(E, H, dropout=0.7, batch_first=True)(x, x, x)[1]
    assert not torch.allclose(theirs.sum(-1), torch.ones(N, L))


def test_dropout_is_the_same_with_and_without_weights() -> None:
    module, x = make(dropout=0.7), torch.randn(N, L, E)
    found = []
    for need_weights in (True, False):
        torch.manual_seed(11)
        found.append(module(x, x, x, need_weights=need_weights)[0])
    assert torch.equal(*found)
    assert not torch.allclose(found[0], module(x, x, x)[0])


class LoRA(nn.Module):
    """The least that an adapter is: the linear layer it wraps, frozen, plus a low-rank product that is trained."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_out_proj_is_called() -> None:
    layer = nn.TransformerEncoderLayer(E, H, 13, batch_first=True, dropout=0.0)
    replace(layer)
    x, seen = torch.randn(N, L, E), []
    handle = layer.self_attn.out_proj.register_forward_hook(lambda m, given, output: seen.append(output.shape))
    layer(x)
    assert seen == [(N, L, E)]
    handle.remove()

    layer.self_attn.out_proj = LoRA(layer.self_attn.out_proj)
    layer(x).square().sum().backward()
    assert layer.self_attn.out_proj.down.weight.grad.abs().max() > 0
    assert layer.self_attn.out_proj.base.weight.grad is None
    before = layer.eval()(x)
    with torch.inference_mode():
        assert_close(layer(x), before)
        layer.self_attn.out_proj.up.weight.data.zero_()
        assert not torch.allclose(layer(x), before)


def test_out_proj_takes_pefts_adapters() -> None:
    peft = pytest.importorskip("peft", reason="peft is optional")
    layer = nn.TransformerEncoderLayer(E, H, 13, batch_first=True, dropout=0.0)
    replace(layer)
    adapted = peft.get_peft_model(layer, peft.LoraConfig(target_modules=["out_proj"], r=2, init_lora_weights=False))
    x = torch.randn(N, L, E)
    adapted(x).square().sum().backward()
    grads = [p.grad for name, p in adapted.named_parameters() if "lora" in name]
    assert len(grads) == 2
    assert all(grad.abs().max() > 0 for grad in grads)
    with torch.inference_mode(), adapted.eval().disable_adapter():
        without = adapted(x)
    assert not torch.allclose(adapted(x), without)


@pytest.mark.parametrize("mode", ["train", "eval", "no_grad", "inference_mode"])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_really_called_inside_torchs_layers(mode: str, padded: bool) -> None:
    """Counted without hooks: a hook by itself keeps torch from its fast path."""
    model = nn.Transformer(E, H, 2, 3, 13, batch_first=True, dropout=0.0).train(mode == "train")
    report = replace(model)
    assert len(report.replaced) == 2 + 2 * 3
    calls = []
    real = MultiheadAttention.forward

    def counted(self: MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return real(self, *args, **kwargs)

    call = {"src_key_padding_mask": torch.arange(S).expand(N, S) >= torch.tensor([[S], [4]])} if padded else {}
    guard = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(mode, torch.enable_grad)
    with (
        patch.object(MultiheadAttention, "forward", counted),
        patch("torch._transformer_encoder_layer_fwd", side_effect=AssertionError("bypassed")),
        patch("torch._native_multi_head_attention", side_effect=AssertionError("bypassed")),
        guard(),
    ):
        model(torch.randn(N, S, E), torch.randn(N, L, E), **call)
    assert len(calls) == len(set(calls)) == 8


def test_padded_positions_are_the_same_in_training_and_inference() -> None:
    layer = nn.TransformerEncoderLayer(E, H, 13, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 2)
    x, padding = torch.randn(N, L, E), torch.arange(L).expand(N, L) >= torch.tensor([[L], [3]])
    trained = encoder(x, src_key_padding_mask=padding)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype, torch says
        assert (encoder.eval()(x, src_key_padding_mask=padding)[padding] == 0).all()
        assert replace(encoder).nested_off == [""]
        assert_close(encoder(x, src_key_padding_mask=padding), trained)
        even = nn.TransformerEncoderLayer(
            E, 2, 13, batch_first=True, dropout=0.0
        )  # torch nests an even number of heads
        replace(even)
        built = nn.TransformerEncoder(even, 2).eval()  # around one of ours: nested as torch's
        padded = built(x, src_key_padding_mask=padding)
        assert built.use_nested_tensor
        assert (padded[padding] == 0).all()
        built.use_nested_tensor = False
        assert_close(padded[~padding], built(x, src_key_padding_mask=padding)[~padding])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("make", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(batch_first: bool, is_causal: bool, layout: torch.layout, make: dict) -> None:
    module = MultiheadAttention(E, H, batch_first=batch_first, **make)
    rows, others = ([torch.randn(n, E) for n in lengths] for lengths in ((3, L), (6, 2)))
    nested, other, more = (torch.nested.nested_tensor(r, layout=layout) for r in (rows, others, others))
    calls = []
    module.register_forward_hook(lambda *_: calls.append(1))
    for given, sources in (((nested, nested, nested), rows), ((nested, other, more), others)):
        output, weights = module(*given, is_causal=is_causal)
        assert output.is_nested
        assert output.layout == layout
        assert len(calls) == 1
        for row, source, out, w in zip(rows, sources, output.unbind(), weights):
            expected, expected_weights = module(row, source, source, is_causal=is_causal)
            assert_close(out, expected)
            if not make:  # the extra keys stand behind the padding
                assert_close(w[: len(row), : len(source)], expected_weights)
        calls.clear()
        output.unbind()[0].sum().backward()
    with pytest.raises(ValueError, match="nested tensors: expected no attn_mask"):
        module(nested, nested, nested, attn_mask=torch.zeros(L, L))
    with pytest.raises(ValueError, match=r"query \[3, 5\], key \[6, 2\], value \[3, 5\]: expected as many rows"):
        module(nested, other, nested)
    with pytest.raises(ValueError, match="key is not nested and 3-D: expected query, key and value to be nested"):
        module(nested, torch.randn(2, L, E), nested)
    theirs = nn.MultiheadAttention(E, 2, batch_first=True)
    for training in (True, False) if layout == torch.jagged else (True,):
        with torch.no_grad(), pytest.raises(AssertionError, match="does not support NestedTensor outside"):
            theirs.train(training)(nested, nested, nested)
    if layout == torch.jagged:
        assert (nested + module(nested, nested, nested)[0]).is_nested, "the rows are those of the query"


ERRORS: list[tuple[dict, type, str]] = [
    ({"query": torch.randn(L)}, ValueError, r"query .*, of shape \(5,\): expected \(L,E\), or \(N,L,E\)"),
    ({"query": torch.randn(N, L, E + 1)}, ValueError, r"query has shape .* a last axis of 12"),
    ({"key": torch.randn(N, S, E + 1)}, ValueError, r"key has shape .* a last axis of 12"),
    ({"key": torch.randn(S, E)}, ValueError, r"key has shape \(7, 12\), and query's asks for \(N,S,kdim\)"),
    ({"value": torch.randn(N, S + 1, E)}, ValueError, "key has S=7 positions but value has 8"),
    ({"value": torch.randn(N + 1, S, E)}, ValueError, "value has shape .* a batch of N=2"),
    ({"key": torch.randn(N, S, E).double()}, ValueError, "key is .*float64.*, but the weights are torch.float32"),
    ({"key_padding_mask": torch.zeros(S, N)}, ValueError, r"key_padding_mask has shape .* \(N,S\)=\(2, 7\)"),
    ({"key_padding_mask": torch.zeros(N, S).long()}, TypeError, "key_padding_mask is .*int64.*: expected a bool"),
    ({"attn_mask": torch.zeros(S, L)}, ValueError, r"attn_mask has shape .* \(N·H,L,S\)=\(8, 5, 7\)"),
    ({"attn_mask": torch.zeros(N, L, S)}, ValueError, r"attn_mask has shape \(2, 5, 7\)"),
    ({"attn_mask": torch.zeros(N, H, S, L)}, ValueError, r"attn_mask has shape .* \(N,H,L,S\)"),
    ({"attn_mask": torch.zeros(L, S, dtype=torch.int32)}, TypeError, "attn_mask is .*int32"),
    ({"attn_mask": [[0.0]]}, TypeError, "attn_mask is list"),
]


@pytest.mark.parametrize(("change", "kind", "message"), ERRORS, ids=lambda e: "")
def test_errors_name_the_argument(change: dict, kind: type[Exception], message: str) -> None:
    good = {"query": torch.randn(N, L, E), "key": torch.randn(N, S, E), "value": torch.randn(N, S, E)}
    make()(**good)
    with pytest.raises(kind, match=message) as refused:
        make()(**good | change)
    a_shape = kind is ValueError and "the weights are" not in message
    assert isinstance(refused.value, AssertionError) == a_shape


def test_second_derivatives() -> None:
    x = torch.randn(1, 3, E, dtype=torch.float64, requires_grad=True)

    def second(module: nn.Module, need_weights: bool) -> Tensor:
        output = module(x, x, x, need_weights=need_weights)[0]
        (first,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    theirs, module = nn.MultiheadAttention(E, H, batch_first=True).double(), make().double()
    module.load_state_dict(theirs.state_dict())
    expected = second(theirs, True)
    with pytest.raises(RuntimeError, match="not implemented"):
        second(theirs, False)
    for name in ("native", "reference"):
        with mh.backend(name):
            assert_close(second(module, True), expected)
            assert_close(second(module, False), expected)
    with mh.backend("sdpa"), pytest.raises(RuntimeError, match=r"no second derivative: .* name 'reference'"):
        second(module, False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_no_torchscript() -> None:
    torch.jit.script(nn.MultiheadAttention(E, H))
    with pytest.raises((OSError, RuntimeError)):
        torch.jit.script(make())

"""`multihead.nn.MultiheadAttention` means what `torch.nn.MultiheadAttention` means, argument by argument.

torch's own class is the oracle, in float64, where its answer is a number. Sizes are distinct, so that a swapped axis
cannot pass.

Longer than other files because it follows torch's signature, argument by argument.
"""

import copy
import itertools
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import multihead as mh
import multihead.nn as ours

N, L, S, E, H, KDIM, VDIM = 2, 5, 7, 12, 3, 10, 14
EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


def random_mask(*shape: int) -> Tensor:
    """A bool mask in torch's meaning that hides about a third, and never the first key."""
    mask = torch.rand(shape) < 0.35
    mask[..., 0] = False
    return mask


def as_float(mask: Tensor) -> Tensor:
    """The same mask with −inf for hidden, and random numbers elsewhere."""
    return torch.randn(mask.shape, dtype=torch.float64).masked_fill(mask, -torch.inf)


@dataclass
class Case:
    why: str
    make: dict = field(default_factory=dict)
    call: Any = dict  # makes the keyword arguments of forward
    cross: bool = True  # other keys and values than queries
    batched: bool = True


CASES = [
    Case("self-attention: one packed product", cross=False),
    Case("cross-attention"),
    Case("batch first", {"batch_first": True}),
    Case("batch first, self-attention", {"batch_first": True}, cross=False),
    Case("no bias", {"bias": False}),
    Case("kdim and vdim", {"kdim": KDIM, "vdim": VDIM}),
    Case("kdim alone: v keeps the model's width", {"kdim": KDIM, "batch_first": True}),
    Case("kdim and vdim without bias", {"kdim": KDIM, "vdim": VDIM, "bias": False}),
    Case("learned key and value", {"add_bias_kv": True}),
    Case("zero key and value", {"add_zero_attn": True, "batch_first": True}),
    Case("both, in torch's order", {"add_bias_kv": True, "add_zero_attn": True}),
    Case("2-D bool mask", call=lambda: {"attn_mask": random_mask(L, S)}),
    Case("2-D float mask", call=lambda: {"attn_mask": as_float(random_mask(L, S))}),
    Case("3-D bool mask, heads fastest", call=lambda: {"attn_mask": random_mask(N * H, L, S)}),
    Case("3-D float mask", {"batch_first": True}, lambda: {"attn_mask": as_float(random_mask(N * H, L, S))}),
    Case("bool padding", call=lambda: {"key_padding_mask": random_mask(N, S)}),
    Case("bool padding at the right", call=lambda: {"key_padding_mask": torch.arange(S) >= torch.tensor([[4], [6]])}),
    Case("float padding", call=lambda: {"key_padding_mask": as_float(random_mask(N, S))}),
    Case(
        "both bool masks: hidden by either",
        {"batch_first": True},
        lambda: {"attn_mask": random_mask(L, S), "key_padding_mask": random_mask(N, S)},
    ),
    Case(
        "both float masks add up",
        call=lambda: {
            "attn_mask": as_float(random_mask(N * H, L, S)),
            "key_padding_mask": as_float(random_mask(N, S)),
        },
    ),
    Case(
        "masks do not reach the learned and zero keys",
        {"add_bias_kv": True, "add_zero_attn": True},
        lambda: {"attn_mask": random_mask(N * H, L, S), "key_padding_mask": random_mask(N, S)},
    ),
    Case(
        "nor do float masks",
        {"add_bias_kv": True, "batch_first": True},
        lambda: {"attn_mask": as_float(random_mask(L, S)), "key_padding_mask": as_float(random_mask(N, S))},
    ),
    Case(
        "causal mask with the hint",
        call=lambda: {"attn_mask": torch.ones(L, L, dtype=torch.bool).triu(1), "is_causal": True},
        cross=False,
    ),
    Case(
        "causal mask and padding",
        call=lambda: {
            "attn_mask": torch.ones(L, L, dtype=torch.bool).triu(1),
            "key_padding_mask": torch.arange(L) >= torch.tensor([[4], [3]]),
        },
        cross=False,
    ),
    Case("unbatched", batched=False),
    Case("unbatched ignores batch_first", {"batch_first": True}, batched=False),
    Case("unbatched with learned and zero keys", {"add_bias_kv": True, "add_zero_attn": True}, batched=False),
    Case(
        "unbatched with a mask for each head and padding",
        call=lambda: {"attn_mask": random_mask(H, L, S), "key_padding_mask": random_mask(S)},
        batched=False,
    ),
]


def pair(**make: Any) -> tuple[nn.MultiheadAttention, ours.MultiheadAttention]:
    """The module of torch and ours, with the same numbers everywhere, biases included."""
    theirs = nn.MultiheadAttention(E, H, dtype=torch.float64, **make)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.4)
    mine = ours.MultiheadAttention(E, H, dtype=torch.float64, **make)
    mine.load_state_dict(theirs.state_dict())
    return theirs, mine


def inputs(case: Case) -> list[Tensor]:
    sizes = [(L, E), (S, case.make.get("kdim", E)), (S, case.make.get("vdim", E))]
    if not case.cross:
        sizes = sizes[:1]
    order = (lambda n, w: (n, w)) if not case.batched else lambda n, w: (N, n, w) if batch_first else (n, N, w)
    batch_first = case.make.get("batch_first", False)
    made = [torch.randn(order(*size), dtype=torch.float64, requires_grad=True) for size in sizes]
    return made if case.cross else made * 3


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("average", [True, False], ids=["mean", "heads"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.why)
def test_output_weights_and_gradients_are_torchs(case: Case, average: bool, training: bool) -> None:
    theirs, mine = pair(**case.make)
    theirs.train(training), mine.train(training)
    x, call = inputs(case), case.call()
    expected, expected_weights = theirs(*x, average_attn_weights=average, **call)
    output, weights = mine(*x, average_attn_weights=average, **call)
    assert output.is_contiguous() or case.make.get("batch_first")
    assert_close(output, expected, **EXACT)
    assert_close(weights, expected_weights, **EXACT)

    without, none = mine(*x, need_weights=False, **call)
    assert none is None
    assert torch.equal(without, output), "asking for weights changed the output"

    sources = [*dict.fromkeys(x), *theirs.parameters()], [*dict.fromkeys(x), *mine.parameters()]
    assert [n for n, _ in theirs.named_parameters()] == [n for n, _ in mine.named_parameters()]
    up, down = torch.randn_like(output), torch.randn_like(weights)
    one = torch.autograd.grad([expected, expected_weights], sources[0], [up, down])
    two = torch.autograd.grad([output, weights], sources[1], [up, down])
    assert_close(two, one, **EXACT)


@st.composite
def any_call(draw: Any) -> tuple[dict, list[Tensor], dict]:
    """A module, its inputs and its masks, drawn from all that torch takes and answers with numbers."""
    heads, size = draw(st.integers(1, 4)), st.integers(1, 6)
    queries, keys, batch = draw(size), draw(size), draw(st.none() | st.integers(1, 3))
    width = heads * draw(st.integers(1, 4))
    make = {name: draw(st.booleans()) for name in ("bias", "add_bias_kv", "add_zero_attn", "batch_first")}
    kdim, vdim = draw(st.sampled_from([(width, width), (5, width), (width, 3), (5, 3)]))
    make |= {"embed_dim": width, "num_heads": heads, "kdim": kdim, "vdim": vdim}
    rows = [(queries, width), (keys, kdim), (keys, vdim)]
    if batch is not None:
        rows = [(batch, n, w) if make["batch_first"] else (n, batch, w) for n, w in rows]
    x = [torch.randn(row, dtype=torch.float64) for row in rows]
    floating = draw(st.booleans())
    shapes = {
        "attn_mask": draw(st.sampled_from([None, (queries, keys), ((batch or 1) * heads, queries, keys)])),
        "key_padding_mask": draw(st.sampled_from([None, (keys,) if batch is None else (batch, keys)])),
    }
    masks = {name: random_mask(*shape) for name, shape in shapes.items() if shape is not None}
    return make, x, {name: as_float(mask) if floating else mask for name, mask in masks.items()}


@settings(max_examples=60, deadline=None)
@given(any_call())
def test_any_call_is_torchs(drawn: tuple[dict, list[Tensor], dict]) -> None:
    make, x, masks = drawn
    theirs = nn.MultiheadAttention(**make, dtype=torch.float64)
    mine = ours.MultiheadAttention(**make, dtype=torch.float64)
    mine.load_state_dict(theirs.state_dict())
    assert_close(mine(*x, **masks), theirs(*x, **masks), **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    theirs, mine = pair()
    x = torch.randn(L, N, E, dtype=torch.float64)
    exact = theirs(x, x, x)
    theirs, mine, x = theirs.to(dtype), mine.to(dtype), x.to(dtype)
    for got, plain, true in zip(mine(x, x, x), theirs(x, x, x), exact):
        assert got.dtype == plain.dtype == dtype
        bound = 2 * (plain.double() - true).abs().max() + torch.finfo(dtype).eps * true.abs().max()
        assert (got.double() - true).abs().max() <= bound


def test_autocast() -> None:
    mine = ours.MultiheadAttention(E, H)
    x = torch.randn(L, N, E)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, weights = mine(x, x, x)
    assert output.dtype == torch.bfloat16
    assert_close(output.float(), mine(x, x, x)[0], rtol=0.05, atol=0.05)
    assert_close(weights.float().sum(-1), torch.ones(N, L), rtol=0.02, atol=0.02)


def test_it_is_torchs_class_with_torchs_state_dict_and_start() -> None:
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(E, H, add_bias_kv=True)
    torch.manual_seed(3)
    mine = ours.MultiheadAttention(E, H, add_bias_kv=True)
    assert isinstance(mine, nn.MultiheadAttention)
    assert_close(mine.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    theirs.load_state_dict(mine.state_dict())
    for name in ("embed_dim", "kdim", "vdim", "num_heads", "head_dim", "dropout", "batch_first", "add_zero_attn"):
        assert getattr(mine, name) == getattr(theirs, name)
    assert repr(mine) == repr(theirs)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_compute_the_same(copied: Any) -> None:
    mine = ours.MultiheadAttention(E, H, add_bias_kv=True)
    x = torch.randn(L, N, E)
    again = copied(mine)
    assert type(again) is ours.MultiheadAttention
    assert torch.equal(again(x, x, x)[0], mine(x, x, x)[0])


def test_reset_starts_over_packed_or_split() -> None:
    for make in ({}, {"kdim": KDIM}):
        mine = ours.MultiheadAttention(E, H, **make)
        before = copy.deepcopy(mine.state_dict())
        mine._reset_parameters()
        assert any(not torch.equal(mine.state_dict()[name], before[name]) for name in before)
        x = torch.randn(S, N, KDIM if make else E)
        assert mine(torch.randn(L, N, E), x, torch.randn(S, N, E))[0].shape == (L, N, E)


def test_dropout_is_for_training_only_and_keeps_the_mean() -> None:
    mine = ours.MultiheadAttention(E, H, dropout=0.5, batch_first=True)
    x = torch.randn(1, L, E)
    assert torch.equal(mine.eval()(x, x, x)[0], mine(x, x, x)[0])
    mine.train()
    torch.manual_seed(5)
    one = mine(x, x, x, need_weights=False)[0]
    assert not torch.equal(one, mine(x, x, x)[0])
    torch.manual_seed(5)
    assert torch.equal(one, mine(x, x, x)[0]), "the same seed drops the same weights"
    rows = x.expand(2000, L, E)  # each row of a batch drops its own
    many = mine(rows, rows, rows, need_weights=False)[0]
    error = many.std(0) / 2000**0.5
    assert ((many.mean(0) - mine.eval()(x, x, x)[0][0]).abs() < 5 * error + 1e-6).all()


@pytest.mark.parametrize(("queries", "keys", "batch"), [(0, S, N), (L, 0, N), (L, S, 0)])
def test_empty_sequences_and_batches(queries: int, keys: int, batch: int) -> None:
    mine = ours.MultiheadAttention(E, H, batch_first=True)
    context = torch.randn(batch, keys, E)
    output, weights = mine(torch.randn(batch, queries, E), context, context)
    assert output.shape == (batch, queries, E)
    assert weights.shape == (batch, queries, keys)
    assert output.isfinite().all()
    if keys == 0:
        assert_close(output, mine.out_proj.bias.expand_as(output))


def test_compiled_and_exported_as_it_is() -> None:
    mine = ours.MultiheadAttention(E, H, batch_first=True).eval()
    x, padding = torch.randn(N, L, E), torch.arange(L) >= torch.tensor([[4], [5]])
    masks = {"key_padding_mask": padding, "attn_mask": torch.ones(L, L, dtype=torch.bool).triu(1)}
    expected = mine(x, x, x, **masks)
    compiled = torch.compile(mine, backend="eager", fullgraph=True)
    assert_close(compiled(x, x, x, **masks), expected)
    exported = torch.export.export(mine, (x, x, x), masks).module()
    assert_close(exported(x, x, x, **masks), expected)


def test_vmap_over_modules_of_one_shape() -> None:
    modules = [ours.MultiheadAttention(E, H) for _ in range(3)]
    stacked, _ = torch.func.stack_module_state(modules)
    x = torch.randn(L, N, E)

    def call(parameters: dict, x: Tensor) -> Tensor:
        return torch.func.functional_call(modules[0], parameters, (x, x, x), {"need_weights": False})[0]

    with mh.backend("reference"):  # torch's fused kernel has no batching rule, and warns
        together = torch.vmap(call, (0, None))(stacked, x)
    assert_close(together, torch.stack([m(x, x, x)[0] for m in modules]))


def test_parametrized_weights_are_read_at_each_call() -> None:
    mine = ours.MultiheadAttention(E, H)
    x = torch.randn(L, N, E)
    nn.utils.parametrizations.weight_norm(mine, "in_proj_weight")
    before = mine(x, x, x)[0]
    with torch.no_grad():
        mine.parametrizations.in_proj_weight.original0.mul_(2)
    assert not torch.allclose(mine(x, x, x)[0], before)


def test_biases_and_weights_taken_away_later() -> None:
    theirs, mine = pair()
    x = torch.randn(L, N, E, dtype=torch.float64)
    theirs.in_proj_bias = mine.in_proj_bias = None
    assert_close(mine(x, x, x), theirs(x, x, x), **EXACT)


def test_numbers_do_not_depend_on_how_inputs_lie_in_memory() -> None:
    mine = ours.MultiheadAttention(E, H, batch_first=True)
    x = torch.randn(N, L, E)
    strided = torch.randn(N, L, 2 * E)[..., ::2].copy_(x)
    mask = random_mask(L, L)
    expected = mine(x, x, x, attn_mask=mask)
    assert_close(mine(strided, strided, strided, attn_mask=mask.t().contiguous().t()), expected)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("masks", list(itertools.product([False, True], repeat=2)), ids=["-", "causal", "pad", "both"])
def test_inside_torchs_transformer(norm_first: bool, masks: tuple[bool, bool]) -> None:
    """The whole encoder and decoder, trained and in inference, with the masks that torch makes on the way."""
    padded, causal = masks
    make: dict[str, Any] = {"batch_first": True, "norm_first": norm_first, "dtype": torch.float64}
    layer = nn.TransformerEncoderLayer(E, 4, 17, dropout=0.0, **make)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)  # nested, torch puts 0 at padded positions
    theirs = nn.Transformer(E, 4, 1, 2, 17, dropout=0.0, custom_encoder=encoder, **make)
    mine = copy.deepcopy(theirs)
    ours.replace(mine)
    source, target = torch.randn(N, S, E, dtype=torch.float64), torch.randn(N, L, E, dtype=torch.float64)
    call: dict[str, Any] = {}
    if causal:
        call["tgt_mask"] = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    if padded:
        hide = torch.arange(S) >= torch.tensor([[S], [4]])
        call |= {"src_key_padding_mask": hide, "memory_key_padding_mask": hide}
    assert_close(mine(source, target, **call), theirs(source, target, **call), **EXACT)
    with torch.inference_mode():
        assert_close(mine.eval()(source, target, **call), theirs.eval()(source, target, **call), **EXACT)


class Largest(TorchDispatchMode):
    """The most numbers that any tensor made in the block has."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for t in made if isinstance(made, tuple | list) else (made,):
            if isinstance(t, Tensor) and not t._is_view():
                self.numel = max(self.numel, t.untyped_storage().nbytes() // t.element_size())
        return made


@pytest.mark.parametrize("gradient", [False, True])
def test_the_mean_of_the_weights_never_holds_those_of_every_head(gradient: bool, monkeypatch) -> None:
    length, width, heads = 700, 64, 32
    monkeypatch.setattr("multihead.nn.AT_ONCE", 3 * length**2)  # 3 heads, 3, … and 2 at last
    theirs = nn.MultiheadAttention(width, heads, batch_first=True)
    attention = ours.MultiheadAttention(width, heads, batch_first=True)
    attention.load_state_dict(theirs.state_dict())
    x, hidden = torch.randn(1, length, width), random_mask(length, length)
    with torch.set_grad_enabled(gradient), Largest() as largest:
        _, weights = attention(x, x, x, attn_mask=hidden)
        if gradient:
            weights.square().sum().backward()
    assert length**2 <= largest.numel <= 4 * length**2
    with torch.set_grad_enabled(gradient):
        _, expected = theirs(x, x, x, attn_mask=hidden)
        assert_close(weights, expected)
        if gradient:
            expected.square().sum().backward()
            assert_close(attention.in_proj_weight.grad, theirs.in_proj_weight.grad)


@pytest.mark.parametrize("average", [False, True])
def test_weights_come_from_the_log_sum_exp_of_the_kernel(average: bool, monkeypatch) -> None:
    """No softmax beside the kernel where nobody wants a gradient; with one, the same numbers."""
    attention, x = ours.MultiheadAttention(24, 4, batch_first=True), torch.randn(2, 7, 24)
    padding = torch.arange(7) >= torch.tensor([[5], [7]])
    _, expected = attention(x, x, x, padding, average_attn_weights=average)
    assert expected.requires_grad
    monkeypatch.setattr("multihead.nn._step_3", None)
    with torch.no_grad():
        _, weights = attention(x, x, x, padding, average_attn_weights=average)
    assert_close(weights, expected.detach())


def test_weights_of_large_scores_keep_their_last_digits() -> None:
    """The kernel's log-sum-exp is rounded to float32: of a score of 1e4, to a thousandth. Rows add up to 1 all the same."""
    attention, x = ours.MultiheadAttention(24, 4, batch_first=True), 300 * torch.randn(2, 7, 24)
    with torch.no_grad():
        _, weights = attention(x, x, x, average_attn_weights=False)
        _, mean = attention(x, x, x)
    assert_close(weights.sum(-1), torch.ones(2, 4, 7), rtol=0, atol=3e-7)
    assert_close(mean, weights.mean(1), rtol=0, atol=3e-7)


def test_what_is_no_module_is_refused_in_words() -> None:
    with pytest.raises(TypeError, match=r"model=int: expected an nn\.Module"):
        ours.replace(3)  # type: ignore[arg-type]

"""The layer: against the specification and torch's own, with everything torch does to modules."""

import copy
import io
import pickle

import pytest
import torch
import torch._dynamo.testing
from torch import nn

import multihead as mh
from multihead import steps
from multihead.positions import NTKScaling
from tests.fuzz import plain


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


LAYERS = {
    "plain": {},
    "no bias": {"bias": False},
    "grouped": {"kv_heads": 2},
    "one kv head": {"kv_heads": 1},
    "own head widths": {"head_dim": 6, "value_dim": 5},
    "rope": {"rope": True},
    "rope of one's own": {"rope": mh.RoPE(base=500.0, dim=2, pairing="interleaved")},
    "qk_norm": {"qk_norm": True, "rope": True},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "scale": {"scale": 0.3},
    "everything": {"kv_heads": 3, "head_dim": 4, "value_dim": 7, "rope": True, "qk_norm": True, "softcap": 5.0, "sinks": True},
}  # fmt: skip


each_layer = pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)


def a_layer(options: dict, **more) -> mh.MultiHeadAttention:
    layer = mh.MultiHeadAttention(24, heads=6, dtype=torch.float64, **options, **more)
    for parameter in layer.parameters():  # biases, norms and sinks too: what starts as 0 or 1 must count
        nn.init.normal_(parameter, std=0.5)
    return layer


def by_the_specification(layer: mh.MultiHeadAttention, x, context=None, mask=None, positions=None) -> torch.Tensor:
    s, source = layer.sizes, x if context is None else context

    def turn(norm):
        def turned(t):
            if norm is not None:
                t = t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6) * norm.weight
            where = torch.arange(t.shape[2]) if positions is None else positions
            return t if layer.rope is None else layer.rope.rotate(t, where)

        return turned

    def bias(projection, *shape):
        return None if projection.bias is None else projection.bias.view(*shape)

    return steps.seven_steps(
        x,
        source,
        layer.w_q,
        layer.w_k,
        layer.w_v,
        layer.w_o,
        b_q=bias(layer.q_proj, s.H, s.D),
        b_k=bias(layer.k_proj, s.G, s.D),
        b_v=bias(layer.v_proj, s.G, s.V),
        b_o=bias(layer.o_proj, s.E),
        turn_q=turn(layer.q_norm),
        turn_k=turn(layer.k_norm),
        allowed=None if mask is None else mask.dense(x.shape[1], source.shape[1]),
        scale=layer.scale,
        softcap=layer.softcap,
        sinks=layer.sinks,
    )["output"]


@each_layer
@pytest.mark.parametrize("mask", [None, mh.Causal(), mh.Padding([2, 7])], ids=str)
def test_the_layer_is_the_seven_steps(options: dict, mask) -> None:
    layer, x = a_layer(options), drawn(2, 7, 24)
    close(layer(x, mask=mask), by_the_specification(layer, x, mask=mask))


@each_layer
def test_cross_attention_is_the_seven_steps_on_a_context(options: dict) -> None:
    layer, x, context = a_layer(options, context_dim=11), drawn(2, 5, 24), drawn(2, 7, 11)
    close(layer(x, context), by_the_specification(layer, x, context))
    close(layer(x[0], context[0]), layer(x, context)[0])


def test_without_extras_it_is_torchs_layer() -> None:
    theirs = nn.MultiheadAttention(24, 6, batch_first=True, dtype=torch.float64)
    ours = mh.MultiHeadAttention(24, heads=6, dtype=torch.float64)
    with torch.no_grad():
        for name, weight, bias in zip("qkv", theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3)):
            getattr(ours, f"{name}_proj").weight.copy_(weight)
            getattr(ours, f"{name}_proj").bias.copy_(bias.normal_())
        ours.o_proj.load_state_dict(theirs.out_proj.state_dict())
    x = drawn(2, 7, 24)
    close(ours(x), theirs(x, x, x)[0])
    causal = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    close(ours(x, mask=mh.Causal()), theirs(x, x, x, attn_mask=causal)[0])


def test_positions_say_where_tokens_stand() -> None:
    layer, x = a_layer({"rope": True}), drawn(2, 5, 24)
    close(layer(x, positions=torch.arange(5) + 100), layer(x))  # only distances count
    spread = torch.tensor([0, 3, 4, 9, 20])
    close(layer(x, positions=spread), by_the_specification(layer, x, positions=spread))
    each = torch.stack([spread, torch.arange(5)])
    close(layer(x, positions=each)[1], layer(x)[1])
    close(layer(x[0], positions=spread), layer(x, positions=each)[0])
    assert not torch.allclose(layer(x, positions=spread), layer(x))


def test_context_positions_say_where_the_context_stands() -> None:
    layer, x, context = a_layer({"rope": True}), drawn(1, 3, 24), drawn(1, 4, 24)
    moved = layer(x, context, positions=torch.arange(3) + 50, context_positions=torch.arange(4) + 50)
    close(moved, layer(x, context))


def test_dynamic_scaling_uses_one_length_for_queries_and_keys() -> None:
    rope = mh.RoPE(scaling=NTKScaling(2.0, original_length=4))
    layer, x = a_layer({"rope": rope}), drawn(1, 9, 24)
    close(layer(x), by_the_specification(layer, x))


def test_bias_is_added_to_the_scores() -> None:
    layer, x = a_layer({}), drawn(2, 5, 24)
    bias = torch.zeros(5, 5, dtype=torch.float64).masked_fill(~mh.Causal().dense(5, 5), -torch.inf)
    close(layer(x, bias=bias), layer(x, mask=mh.Causal()))


@each_layer
def test_state_dicts_round_trip(options: dict) -> None:
    layer, other, x = a_layer(options), a_layer(options), drawn(2, 5, 24)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other(x), layer(x))


@each_layer
def test_deepcopy_and_pickle(options: dict) -> None:
    layer, x = a_layer(options), drawn(2, 5, 24)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x, mask=mh.Causal()), layer(x, mask=mh.Causal()))


@each_layer
def test_compiled_in_one_graph(options: dict) -> None:
    layer, x = a_layer(options), drawn(2, 7, 24)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for mask in (None, mh.Causal(), mh.Causal(window=3) & mh.Padding(torch.tensor([3, 7]))):
        close(compiled(x, mask=mask), layer(x, mask=mask))
    compiled(x, mask=mh.Causal()).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("options", [LAYERS["plain"], LAYERS["everything"]], ids=["plain", "everything"])
def test_compiled_by_inductor(options: dict) -> None:
    layer, x = a_layer(options), drawn(2, 7, 24)
    close(torch.compile(layer, fullgraph=True)(x, mask=mh.Causal()), layer(x, mask=mh.Causal()))


def test_compiled_with_dropout() -> None:
    layer, x = a_layer({"dropout": 0.5}), drawn(2, 7, 24)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert not torch.equal(compiled(x), compiled(x))
    assert torch.equal(compiled.eval()(x), compiled(x))


@each_layer
def test_exported_with_masks_as_inputs(options: dict) -> None:
    layer, x = a_layer(options).eval(), drawn(2, 7, 24)
    mask = mh.Causal() & mh.Padding(torch.tensor([3, 7]))
    program = torch.export.export(layer, (x,), {"mask": mask})
    other = mh.Causal() & mh.Padding(torch.tensor([5, 1]))
    close(program.module()(x, mask=other), layer(x, mask=other))


def test_exported_with_any_number_of_tokens() -> None:
    layer = a_layer({"rope": True}).eval()
    tokens = torch.export.Dim("tokens", min=2, max=512)
    program = torch.export.export(
        layer, (drawn(2, 7, 24),), {"mask": mh.Causal()}, dynamic_shapes={"x": {1: tokens}, "mask": []}
    )
    x = drawn(2, 31, 24)
    close(program.module()(x, mask=mh.Causal()), layer(x, mask=mh.Causal()))


@pytest.mark.parametrize("kind", [{"capacity": 64}, {}, {"window": 8}], ids=["fixed", "growing", "sliding"])
def test_compiled_decoding_does_not_compile_for_every_token(kind: dict) -> None:
    layer = a_layer({"rope": True, "kv_heads": 2}).eval()
    counter = torch._dynamo.testing.CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    x, cache, counts = drawn(1, 60, 24), layer.new_cache(**kind), []
    with torch.no_grad():
        for t in range(60):
            y = compiled(x[:, t : t + 1], mask=mh.Causal(), cache=cache)
            counts.append(counter.frame_count)
        close(y[:, 0], layer(x, mask=mh.Causal(window=kind.get("window")))[:, -1])
    assert counts[-1] <= 10
    assert counts[35:45] == [counts[35]] * 10


def assert_within_bound_of_bfloat16(y: torch.Tensor, layer: mh.MultiHeadAttention, x: torch.Tensor) -> None:
    """Decision 6 for a causal call under autocast: twice the error of the plain layer in bfloat16, and one rounding."""

    def by_plain(dtype: torch.dtype, order=torch.matmul) -> torch.Tensor:
        s, positions = layer.sizes, torch.arange(x.shape[1]).expand(x.shape[:2])
        parameters = {name: p.detach().to(dtype) for name, p in layer.named_parameters()}
        rope = None if layer.rope is None else (layer.rope.base, s.D, "halves")
        made = plain.Layer(parameters, s.H, s.G, layer.scale, layer.softcap, rope, order)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return made(x.to(dtype), *made.keys_and_values(x.to(dtype), positions), seen, positions)

    exact = plain.numbers(by_plain(torch.float64))
    verdict = plain.judge("y", y, exact, lambda order: by_plain(torch.bfloat16, order), torch.bfloat16)
    assert verdict.fine, verdict


@pytest.mark.parametrize("options", [LAYERS["plain"], LAYERS["everything"]], ids=["plain", "everything"])
def test_autocast(options: dict) -> None:
    torch.manual_seed(0)
    layer = a_layer(options).float()
    x = torch.randn(2, 7, 24)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x, mask=mh.Causal())
        y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert_within_bound_of_bfloat16(y, layer, x)
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_autocast_with_a_cache() -> None:
    torch.manual_seed(0)
    layer, x = a_layer(LAYERS["everything"]).float().eval(), torch.randn(1, 5, 24)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cache = layer.new_cache()
        parts = [layer(piece, mask=mh.Causal(), cache=cache) for piece in x.split(1, dim=1)]
    assert_within_bound_of_bfloat16(torch.cat(parts, dim=1), layer, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each_layer
def test_to_another_dtype(options: dict, dtype: torch.dtype) -> None:
    layer = a_layer(options).to(dtype)
    assert layer(torch.randn(2, 5, 24).to(dtype), mask=mh.Causal()).dtype == dtype


@each_layer
def test_on_the_meta_device(options: dict) -> None:
    layer = mh.MultiHeadAttention(24, heads=6, device="meta", **options)
    y = layer(torch.empty(2, 5, 24, device="meta"), mask=mh.Causal())
    assert (y.device.type, y.shape) == ("meta", (2, 5, 24))
    real = layer.to_empty(device="cpu")
    real.reset_parameters()
    assert real(torch.randn(2, 5, 24)).isfinite().all()


def test_activation_checkpointing_gives_the_same_gradients_dropout_included() -> None:
    layer, x = a_layer({"dropout": 0.3}), drawn(2, 5, 24)

    def gradients(run) -> list[torch.Tensor]:
        torch.manual_seed(1)
        layer.zero_grad()
        run(x).sum().backward()
        return [p.grad.clone() for p in layer.parameters()]

    again = gradients(lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False))
    for found, wanted in zip(again, gradients(layer)):
        close(found, wanted)


@each_layer
def test_torch_func(options: dict) -> None:
    layer, x = a_layer(options), drawn(3, 5, 24)
    parameters = dict(layer.named_parameters())

    def loss(parameters, row):
        return torch.func.functional_call(layer, parameters, (row,), {"mask": mh.Causal()}).pow(2).sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for b in range(3):
        layer.zero_grad()
        loss(parameters, x[b]).backward()
        for name, parameter in parameters.items():
            close(each[name][b], parameter.grad)


def test_double_backward_through_the_reference() -> None:
    layer, x = a_layer({}), drawn(1, 3, 24).requires_grad_()
    with mh.backend("reference"):
        (grad,) = torch.autograd.grad(layer(x, mask=mh.Causal()).pow(2).sum(), x, create_graph=True)
    grad.pow(2).sum().backward()
    assert x.grad.abs().sum() > 0


def test_dropout_is_for_training() -> None:
    layer, x = a_layer({"dropout": 0.5}), drawn(2, 5, 24)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("shape", [(0, 24), (2, 0, 24), (0, 3, 24)], ids=str)
def test_empty_sequences_give_empty_results(shape: tuple) -> None:
    assert a_layer({"rope": True})(drawn(*shape), mask=mh.Causal()).shape == shape


def test_an_empty_context_is_a_context_that_says_nothing() -> None:
    layer = a_layer({})
    close(layer(drawn(2, 3, 24), drawn(2, 0, 24)), layer.o_proj.bias.expand(2, 3, 24))


def test_initial_weights_keep_the_size_of_what_passes_through() -> None:
    layer = mh.MultiHeadAttention(512, heads=8)
    q = mh.trace(layer, torch.randn(64, 512))["q"]
    assert 0.7 < float(q.std()) < 1.4
    assert all((p.bias == 0).all() for p in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj))


def test_its_repr_shows_its_sizes() -> None:
    shown = repr(
        mh.MultiHeadAttention(24, heads=6, kv_heads=2, value_dim=5, context_dim=7, rope=True, sinks=True, softcap=2.0)
    )
    for part in ("E=24, H=6, G=2, D=4, V=5, C=7", "rope=RoPE(", "sinks=True", "softcap=2.0"):
        assert part in shown


def test_the_views_are_views() -> None:
    layer = mh.MultiHeadAttention(24, heads=6, kv_heads=2)
    for view, projection in (
        (layer.w_q, layer.q_proj),
        (layer.w_k, layer.k_proj),
        (layer.w_v, layer.v_proj),
        (layer.w_o, layer.o_proj),
    ):
        assert view.data_ptr() == projection.weight.data_ptr()


def test_lengths_that_cannot_be_read_are_taken_as_they_are() -> None:
    layer = mh.MultiHeadAttention(24, heads=6, device="meta")
    y = layer(torch.empty(2, 5, 24, device="meta"), lengths=torch.empty(2, dtype=torch.long, device="meta"))
    assert y.shape == (2, 5, 24)
    layer, x, lengths = a_layer({}), drawn(3, 2, 5, 24), torch.tensor([[1, 5], [4, 2], [0, 3]])
    each = torch.func.vmap(lambda x, lengths: layer(x, mask=mh.Causal(), lengths=lengths))(x, lengths)
    one_by_one = torch.stack([layer(a, mask=mh.Causal(), lengths=b) for a, b in zip(x, lengths)])
    torch.testing.assert_close(each, one_by_one)


BAD = [
    (lambda: mh.MultiHeadAttention(10, heads=3), ValueError, "heads=3 does not divide E=10"),
    (lambda: mh.MultiHeadAttention(12, heads=0), ValueError, "heads=0: expected at least 1"),
    (lambda: mh.MultiHeadAttention(12, heads=2.0), TypeError, "heads=2.0 is a float"),
    (lambda: mh.MultiHeadAttention(12, heads=6, kv_heads=4), ValueError, "kv_heads=4 does not divide heads=6: expected one of 1, 2, 3, 6"),
    (lambda: mh.MultiHeadAttention(12, heads=4, rope=True), ValueError, "3"),
    (lambda: mh.MultiHeadAttention(12, heads=4, dropout=2), ValueError, "dropout=2: expected a probability"),
    (lambda: mh.MultiHeadAttention(12, heads=4, softcap=0), ValueError, "softcap=0: expected a number above 0"),
    (lambda: mh.MultiHeadAttention(12, heads=4, dtype=torch.int8), TypeError, "dtype=torch.int8: expected a floating dtype"),
    (lambda: mh.MultiHeadAttention(12, heads=4, dtype=torch.float8_e5m2), TypeError, "dtype=torch.float8_e5m2: expected a floating dtype of 16, 32 or 64 bits"),
    (lambda: a_layer({})(drawn(2, 5, 24).to(torch.float8_e4m3fn)), TypeError, "x has dtype torch.float8_e4m3fn: expected a floating dtype of 16"),
    (lambda: a_layer({})([1.0]), TypeError, "x is a list: expected a tensor"),
    (lambda: a_layer({})(drawn(24)), ValueError, r"x has shape \(24,\): expected \(N,E\) or \(B,N,E\)"),
    (lambda: a_layer({})(drawn(1, 2, 3, 24)), ValueError, r"expected \(N,E\) or \(B,N,E\)"),
    (lambda: a_layer({})(drawn(2, 5, 23)), ValueError, "expected the last axis to be E=24"),
    (lambda: a_layer({})(drawn(2, 5, 24).long()), TypeError, "x has dtype torch.int64: expected a floating dtype"),
    (lambda: a_layer({})(drawn(2, 5, 24).float()), ValueError, r"x is .*float32 on cpu, but the layer's weights are .*float64"),
    (lambda: a_layer({})(drawn(2, 5, 24).to("meta")), ValueError, "on meta, but the layer's weights are"),
    (lambda: a_layer({})(drawn(2, 5, 24), drawn(3, 5, 24)), ValueError, "expected .*B=2"),
    (lambda: a_layer({})(drawn(2, 5, 24), drawn(2, 5, 9)), ValueError, "context has shape .* last axis to be C=24"),
    (lambda: a_layer({}, context_dim=9)(drawn(2, 5, 24)), ValueError, r"context_dim=9: expected a context"),
    (lambda: a_layer({})(drawn(2, 5, 24), mask=torch.zeros(5, 5)), TypeError, "bias="),
    (lambda: a_layer({})(drawn(2, 5, 24), mask=torch.zeros(4, 5).bool()), ValueError, "the mask has shape"),
    (lambda: a_layer({"rope": True})(drawn(2, 5, 24), positions=torch.arange(4)), ValueError, r"positions has shape \(4,\)"),
    (lambda: a_layer({"rope": True})(drawn(2, 5, 24), positions=torch.rand(5)), TypeError, "expected a tensor of integers"),
    (lambda: a_layer({})(drawn(2, 5, 24), context_positions=torch.arange(5)), ValueError, "context_positions is given without context"),
    (lambda: a_layer({})(drawn(5, 24), mh.Causal()), TypeError, "context is a Causal: expected a tensor; a mask goes to mask="),
    (lambda: a_layer({})(drawn(2, 5, 24), backend="fast"), ValueError, "backend='fast': expected one of"),
]  # fmt: skip


@pytest.mark.parametrize(("use", "error", "message"), BAD, ids=[m for _, _, m in BAD])
def test_bad_input_is_named(use, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        use()

"""Positions against Hugging Face's own code, and against what each idea promises.

Sizes are distinct, and prime where evenness is not needed: a swapped axis cannot pass.

Longer than other files because every way to give positions is held against the same two oracles.
"""

import dataclasses
import re

import pytest
import torch
from beartype import beartype
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import jaxtyped
from torch.testing import assert_close
from transformers import CohereConfig, GPTNeoXConfig, LlamaConfig, T5Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.gpt_neox import modeling_gpt_neox as neox
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.swin.modeling_swin import SwinRelativePositionBias
from transformers.models.t5.modeling_t5 import T5Attention

from multihead.positions import (
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    RoPE,
    SwinBias,
    T5Bias,
    alibi,
    alibi_slopes,
    relative_buckets,
)

B, H, N, D = 2, 3, 5, 14
FAR = 100_000  # where one wrong bit of a frequency is a hundredth of a radian
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}

SCALINGS = [  # ours, Hugging Face's rope_parameters
    pytest.param(None, {"rope_type": "default"}, id="none"),
    pytest.param(LinearScaling(3.7), {"rope_type": "linear", "factor": 3.7}, id="linear"),
    pytest.param(
        Llama3Scaling(8.0, 1.5, 5.0, 211),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.5,
            "high_freq_factor": 5.0,
            "original_max_position_embeddings": 211,
        },
        id="llama3: fast, slow and blended pairs",
    ),
]
EVERY_ROPE = [
    RoPE(),
    RoPE(base=500.0, dim=6, pairing="interleaved", scaling=LinearScaling(3.0)),
    RoPE(scaling=NTKScaling(3.0)),
    RoPE(scaling=NTKScaling(3.0, original_length=3)),
    RoPE(dim=10, scaling=Llama3Scaling(8.0, original_length=101)),
]
each_rope = pytest.mark.parametrize("rope", EVERY_ROPE, ids=["plain", "linear", "ntk", "dynamic", "llama3"])


def llama_config(head_dim: int = D, base: float = 10000.0, longest: int = 4096, **rope) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=longest,
        rope_parameters={"rope_theta": base, **rope},
    )


def rows(seed: int = 0, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (B, H, N, D)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def ragged() -> torch.Tensor:
    return torch.stack((torch.arange(N), torch.arange(N) * 3 + 7))  # (B, N)


# RoPE against Hugging Face


@pytest.mark.parametrize(("scaling", "theirs"), SCALINGS)
@pytest.mark.parametrize(("head_dim", "base"), [(2, 10000.0), (22, 137.0), (64, 500000.0)])
def test_frequencies_are_hugging_faces_to_the_last_bit(scaling, theirs, head_dim, base):
    config = llama_config(head_dim, base, **theirs)
    theirs_init = ROPE_INIT_FUNCTIONS.get(
        theirs["rope_type"], llama.LlamaRotaryEmbedding.compute_default_rope_parameters
    )
    assert torch.equal(RoPE(base=base, scaling=scaling).frequencies(head_dim), theirs_init(config)[0])


def test_the_llama3_case_has_fast_slow_and_blended_pairs():
    ratio = RoPE(base=500000.0).frequencies(64) / RoPE(base=500000.0, scaling=SCALINGS[2].values[0]).frequencies(64)
    assert (ratio == 1).any()
    assert (ratio == 8).any()
    assert ((ratio > 1.01) & (ratio < 7.99)).any()


@pytest.mark.parametrize("length", [None, 17, 64, 65, 500])
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_dynamic_ntk_frequencies_are_hugging_faces(length, factor):
    config = llama_config(22, longest=64, rope_type="dynamic", factor=factor)
    theirs, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=length)
    rope = RoPE(scaling=NTKScaling(factor, original_length=64))
    assert_close(rope.frequencies(22, length=length), theirs, rtol=1e-6, atol=0)
    if length is not None:
        assert_close(rope.frequencies(22, length=torch.tensor(length)), theirs, rtol=1e-6, atol=0)


def test_fixed_ntk_is_the_dynamic_one_at_the_length_that_stretches_by_its_factor():
    config = llama_config(22, longest=64, rope_type="dynamic", factor=1.0)
    theirs, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=3 * 64)
    assert_close(RoPE(scaling=NTKScaling(3.0)).frequencies(22), theirs, rtol=1e-6, atol=0)


def test_ntk_slows_the_slowest_pair_by_its_factor_and_spares_the_fastest():
    ratio = RoPE().frequencies(22) / RoPE(scaling=NTKScaling(3.0)).frequencies(22)
    assert_close(ratio[[0, -1]], torch.tensor([1.0, 3.0]), rtol=1e-6, atol=0)
    assert (ratio.diff() > 0).all()


@pytest.mark.parametrize(
    ("scaling", "theirs"),
    [
        *SCALINGS,
        pytest.param(NTKScaling(2.5, original_length=61), {"rope_type": "dynamic", "factor": 2.5}, id="dynamic"),
    ],
)
@pytest.mark.parametrize("far", [0, 50, FAR], ids="from {}".format)
def test_halves_rotate_as_llama(scaling, theirs, far):
    q, k, positions = rows(1), rows(2), torch.arange(N)[None] * 7 + far
    rotary = llama.LlamaRotaryEmbedding(llama_config(longest=61, **theirs))
    for ours, expected in zip((q, k), llama.apply_rotary_pos_emb(q, k, *rotary(q, positions))):
        for given_as in (positions, positions[0], positions.expand(B, N), positions.int()):
            rotated = RoPE(scaling=scaling).rotate(ours, given_as)
            assert_close(rotated, expected, rtol=0, atol=1e-6)


def test_interleaved_rotates_as_cohere():
    q, k = rows(1), rows(2)
    rotary = cohere.CohereRotaryEmbedding(
        CohereConfig(hidden_size=H * D, num_attention_heads=H, head_dim=D, rope_parameters=PLAIN)
    )
    rope = RoPE(pairing="interleaved")
    for ours, expected in zip((q, k), cohere.apply_rotary_pos_emb(q, k, *rotary(q, ragged()))):
        assert_close(rope.rotate(ours, ragged()), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dim", [2, 6, D])
def test_interleaved_rotates_as_gptj_partial_width_too(dim):
    x = rows()
    table = gptj.create_sinusoidal_positions(97, dim)
    sin, cos = table[ragged()].chunk(2, dim=-1)  # (B, N, dim/2) each
    turned = gptj.apply_rotary_pos_emb(x[..., :dim].transpose(1, 2), sin, cos).transpose(1, 2)
    expected = torch.cat((turned, x[..., dim:]), dim=-1)
    assert_close(RoPE(dim=dim, pairing="interleaved").rotate(x, ragged()), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("fraction", "dim"), [(0.25, 10), (0.5, 20), (1.0, 40)])
def test_partial_width_rotates_as_gpt_neox(fraction, dim):
    q, k = rows(1, shape=(B, H, N, 40)), rows(2, shape=(B, H, N, 40))
    config = GPTNeoXConfig(
        hidden_size=H * 40, num_attention_heads=H, rope_parameters=PLAIN | {"partial_rotary_factor": fraction}
    )
    rotary = neox.GPTNeoXRotaryEmbedding(config)
    for ours, expected in zip((q, k), neox.apply_rotary_pos_emb(q, k, *rotary(q, ragged()))):
        assert_close(RoPE(dim=dim).rotate(ours, ragged()), expected, rtol=0, atol=1e-6)


# What RoPE promises

ropes = st.builds(
    RoPE,
    base=st.floats(1.5, 1e6),
    dim=st.sampled_from([None, 2, 6, 10, D]),
    pairing=st.sampled_from(["halves", "interleaved"]),
    scaling=st.sampled_from([None, LinearScaling(3.0), NTKScaling(5.0), Llama3Scaling(8.0, original_length=101)]),
)
places = st.lists(st.integers(0, 10_000), min_size=N, max_size=N).map(torch.tensor)
quick = settings(max_examples=30, deadline=None)


@quick
@given(ropes, places)
def test_rotation_preserves_the_norm_of_every_pair(rope, positions):
    x = rows(dtype=torch.float64)
    dim = rope.dim or D

    def norms(t):
        pairs = t[..., :dim].unflatten(-1, (2, -1) if rope.pairing == "halves" else (-1, 2))
        return pairs.norm(dim=-2 if rope.pairing == "halves" else -1)

    turned = rope.rotate(x, positions)
    assert_close(norms(turned), norms(x), rtol=1e-12, atol=1e-12)
    if positions.any():
        assert not torch.equal(turned, x)


@quick
@given(ropes, places, places, st.integers(0, 10_000))
def test_scores_depend_on_relative_positions_only(rope, at, behind, shift):
    q, k = rows(1, torch.float64), rows(2, torch.float64)

    def scores(shift):
        return torch.einsum("bhqd,bhkd->bhqk", rope.rotate(q, at + shift), rope.rotate(k, behind + shift))

    assert_close(scores(shift), scores(0), rtol=0, atol=1e-9)


@quick
@given(ropes, places, places)
def test_turning_twice_is_turning_by_the_sum(rope, first, then):
    x = rows(dtype=torch.float64)
    assert_close(rope.rotate(rope.rotate(x, first), then), rope.rotate(x, first + then), rtol=0, atol=1e-9)


@each_rope
def test_position_zero_is_the_identity(rope):
    assert torch.equal(rope.rotate(rows(), torch.zeros(N, dtype=torch.int64)), rows())


@pytest.mark.parametrize("pairing", ["halves", "interleaved"])
def test_partial_width_is_a_narrow_head_beside_numbers_left_alone(pairing):
    x = rows()
    turned = RoPE(dim=6, pairing=pairing).rotate(x, ragged())
    assert torch.equal(turned[..., 6:], x[..., 6:])
    assert torch.equal(turned[..., :6], RoPE(pairing=pairing).rotate(x[..., :6], ragged()))


@pytest.mark.parametrize("pairing", ["halves", "interleaved"])
def test_float64_has_float64_angles(pairing):
    x, positions = rows(dtype=torch.float64), [0, 1, 97, 1009, FAR]
    first = [2 * p if pairing == "interleaved" else p for p in range(D // 2)]
    second = [2 * p + 1 if pairing == "interleaved" else p + D // 2 for p in range(D // 2)]
    angles = torch.tensor([[n / 10000.0 ** (2 * p / D) for p in range(D // 2)] for n in positions], dtype=x.dtype)
    turned = torch.complex(x[..., first], x[..., second]) * torch.polar(torch.ones_like(angles), angles)
    ours = RoPE(pairing=pairing).rotate(x, torch.tensor(positions))
    assert_close(torch.complex(ours[..., first], ours[..., second]), turned, rtol=0, atol=1e-9)


@each_rope
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_dtypes_round_once_at_the_end(rope, dtype):
    x = rows().to(dtype)
    assert torch.equal(rope.rotate(x, ragged() + 1000), rope.rotate(x.float(), ragged() + 1000).to(dtype))


@each_rope
def test_a_batch_rotates_as_its_rows_alone(rope):
    x = rows()
    together = rope.rotate(x, ragged())
    for b in range(B):
        assert torch.equal(together[b], rope.rotate(x[b], ragged()[b]))


def test_length_is_what_dynamic_scaling_goes_by():
    rope, x, positions = RoPE(scaling=NTKScaling(2.0, original_length=11)), rows(), torch.arange(N)
    assert torch.equal(rope.rotate(x, positions), RoPE().rotate(x, positions)), "5 positions are within 11"
    longer = rope.rotate(x, positions, length=33)
    assert_close(longer, RoPE(scaling=NTKScaling(5.0)).rotate(x, positions), rtol=0, atol=1e-6)  # 1 + 2·(33/11 − 1)
    per_row = rope.rotate(x, positions, length=torch.tensor([7, 33]))
    assert torch.equal(per_row, torch.stack((RoPE().rotate(x[0], positions), longer[1])))


@each_rope
def test_no_items_rotate_to_no_items(rope):
    assert rope.rotate(rows()[:, :, :0], torch.arange(0)).shape == (B, H, 0, D)


@each_rope
def test_gradients_of_rotate(rope):
    x = rows(dtype=torch.float64, shape=(1, 2, 3, D)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rope.rotate(x, torch.tensor([5, 0, 3])), x)


def test_rope_is_a_value():
    same = {RoPE(scaling=LinearScaling(2.0)), RoPE(scaling=LinearScaling(2.0)), RoPE()}
    assert len(same) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        RoPE().base = 5.0


# Everywhere torch goes


class Rotate(torch.nn.Module):
    def __init__(self, rope: RoPE) -> None:
        super().__init__()
        self.rope = rope

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.rope.rotate(x, positions)


class Biases(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.t5 = filled(T5Bias(H))

    def forward(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return self.t5(queries.shape[0], keys.shape[0]) + alibi(H, queries.shape[0], keys.shape[0])


def filled(bias: T5Bias | SwinBias) -> T5Bias | SwinBias:
    """Distinct numbers in the table, for a table of zeros would hide any mistake."""
    with torch.no_grad():
        bias.table.copy_(torch.arange(bias.table.numel()).reshape(bias.table.shape))
    return bias


@each_rope
def test_rotate_compiles_whole(rope):
    compiled = torch.compile(RoPE.rotate, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(rope, rows(), ragged()), rope.rotate(rows(), ragged()))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own
def test_rotate_and_buckets_compile_to_native_code():
    rope = RoPE(dim=6, scaling=NTKScaling(3.0, original_length=3))
    compiled = torch.compile(rope.rotate, fullgraph=True)
    assert_close(compiled(rows(), ragged()), rope.rotate(rows(), ragged()), rtol=0, atol=2e-6)
    relative = torch.arange(-211, 211)
    buckets = torch.compile(relative_buckets, fullgraph=True)(relative)
    assert torch.equal(buckets, relative_buckets(relative)), "no bucket's edge moves"


@each_rope
def test_rotate_exports_for_any_batch_and_length(rope):
    batch, items = torch.export.Dim("batch"), torch.export.Dim("items")
    exported = torch.export.export(
        Rotate(rope), (rows(), ragged()), dynamic_shapes=({0: batch, 2: items}, {0: batch, 1: items})
    )
    x, positions = rows(shape=(7, H, 11, D)), torch.arange(77).reshape(7, 11)
    assert torch.equal(exported.module()(x, positions), rope.rotate(x, positions))


@each_rope
def test_rotate_maps_over_a_batch(rope):
    assert torch.equal(torch.func.vmap(rope.rotate)(rows(), ragged()), rope.rotate(rows(), ragged()))


def test_biases_compile_and_export_for_any_length():
    module, (q, k) = Biases(), (torch.zeros(5), torch.zeros(7))
    assert torch.equal(torch.compile(module, fullgraph=True, backend="aot_eager")(q, k), module(q, k))
    dims = ({0: torch.export.Dim("queries")}, {0: torch.export.Dim("keys")})
    exported = torch.export.export(module, (q, k), dynamic_shapes=dims).module()
    assert torch.equal(exported(torch.zeros(11), torch.zeros(13)), module(torch.zeros(11), torch.zeros(13)))
    swin = filled(SwinBias(H, (5, 2)))
    assert torch.equal(torch.compile(swin, fullgraph=True, backend="aot_eager")(), swin())


def test_everything_runs_on_meta():
    for rope in EVERY_ROPE:
        assert rope.rotate(rows().to("meta"), ragged().to("meta")).shape == (B, H, N, D)
    assert alibi(H, 5, 7, device="meta").is_meta
    assert T5Bias(H, device="meta")(5, 7).shape == (H, 5, 7)
    assert SwinBias(H, (5, 2), device="meta")().shape == (H, 10, 10)


def test_shapes_in_signatures_are_true():
    def checked(function):
        return jaxtyped(function, typechecker=beartype)

    for rope in EVERY_ROPE:
        checked(RoPE.rotate)(rope, rows(), ragged())
        checked(RoPE.rotate)(rope, rows()[0], ragged()[0], length=torch.tensor(97))
        checked(RoPE.frequencies)(rope, D, length=torch.tensor([17, 97]))
    checked(alibi_slopes)(7)
    checked(alibi)(H, 5, 7)
    checked(relative_buckets)(torch.arange(6).reshape(2, 3))
    checked(T5Bias.forward)(T5Bias(H), 5, 7)
    checked(SwinBias.forward)(SwinBias(H, (5, 2)))


# ALiBi


@pytest.mark.parametrize("heads", range(1, 24))
def test_alibi_is_blooms_and_mpts(heads):
    K = 11
    bloom = build_alibi_tensor(torch.ones(1, K, dtype=torch.int64), heads, torch.float32)[:, 0]  # slope · key
    assert_close(alibi_slopes(heads), bloom[:, 1], rtol=1e-6, atol=0)
    assert_close(
        alibi(heads, K, K).tril(), (bloom[:, None, :] - bloom[:, :, None]).tril(), rtol=1e-6, atol=1e-6
    )  # theirs up to a number per query, which softmax ignores
    assert_close(alibi(heads, 1, K), build_mpt_alibi_tensor(heads, K), rtol=1e-6, atol=0)


def test_alibi_counts_from_the_last_key():
    whole = alibi(H, 11, 11)
    assert torch.equal(alibi(H, 5, 11), whole[:, -5:])
    assert torch.equal(alibi(H, 11, 5), whole[:, :, -5:])
    assert torch.equal(whole, whole.mT)


def test_alibi_rounds_once_at_the_end():
    assert torch.equal(alibi(11, 3, 601, dtype=torch.bfloat16), alibi(11, 3, 601).bfloat16())
    exact = -alibi_slopes(7, dtype=torch.float64)[:, None] * torch.arange(600, -1, -1)
    assert_close(alibi(7, 1, 601, dtype=torch.float64)[:, 0], exact, rtol=1e-15, atol=0)


# T5


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("buckets", [4, 6, 10, 32, 34, 64, 254])
@pytest.mark.parametrize("max_distance", [17, 64, 100, 128, 1000])
def test_buckets_are_t5s_at_every_distance(bidirectional, buckets, max_distance):
    if max_distance <= buckets // (4 if bidirectional else 2):
        with pytest.raises(ValueError, match=f"max_distance={max_distance}: "):
            relative_buckets(torch.arange(3), bidirectional=bidirectional, buckets=buckets, max_distance=max_distance)
        return
    relative = torch.arange(-max_distance - 9, max_distance + 10)
    theirs = T5Attention._relative_position_bucket(relative, bidirectional, buckets, max_distance)
    ours = relative_buckets(relative, bidirectional=bidirectional, buckets=buckets, max_distance=max_distance)
    assert torch.equal(ours, theirs)


def test_buckets_of_int8_reach_its_lowest_number():
    relative = torch.arange(-128, 128)
    assert torch.equal(relative_buckets(relative.to(torch.int8)), relative_buckets(relative))


@pytest.mark.parametrize("decoder", [False, True])
@pytest.mark.parametrize(("Q", "K"), [(7, 7), (5, 61), (1, 13)])
def test_t5_bias_is_hugging_faces(decoder, Q, K):
    config = T5Config(
        d_model=H * D,
        d_kv=D,
        num_heads=H,
        is_decoder=decoder,
        relative_attention_num_buckets=10,
        relative_attention_max_distance=37,
    )
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    ours = T5Bias(H, bidirectional=not decoder, buckets=10, max_distance=37)
    assert not ours.table.any(), "no preference before training"
    ours.load_state_dict({"table": theirs.relative_attention_bias.weight})
    expected = theirs.compute_bias(Q, K, past_seen_tokens=K - Q)[0]
    assert torch.equal(ours(Q, K), expected)

    weight = rows(shape=(H, Q, K))
    (ours(Q, K) * weight).sum().backward()
    (expected * weight).sum().backward()
    assert_close(ours.table.grad, theirs.relative_attention_bias.weight.grad)


# Swin


@pytest.mark.parametrize("window", [(5, 3), (3, 5), (7, 7), (1, 2)])
def test_swin_bias_is_hugging_faces(window):
    theirs, ours = SwinRelativePositionBias(H, window), SwinBias(H, window)
    assert not ours.table.any(), "no preference before training"
    with torch.no_grad():
        theirs.relative_position_bias_table.normal_()
    ours.load_state_dict({"table": theirs.relative_position_bias_table})
    assert torch.equal(ours(), theirs()[0])

    weight = rows(shape=ours().shape)
    (ours() * weight).sum().backward()
    (theirs()[0] * weight).sum().backward()
    assert_close(ours.table.grad, theirs.relative_position_bias_table.grad)


# Refusals

n = torch.arange(N)
REFUSALS = [  # what is asked, and what the refusal says
    (lambda: RoPE(base=0.0), "base=0.0: expected a finite number above 0"),
    (lambda: RoPE(base=float("nan")), "base=nan: expected a finite number above 0"),
    (lambda: RoPE(base="10000"), "base='10000': expected a finite number above 0"),
    (lambda: RoPE(dim=7), "dim=7 is odd, and RoPE turns pairs: give an even dim"),
    (lambda: RoPE(dim=0), "dim=0: expected an integer of at least 2"),
    (lambda: RoPE(dim=4.0), "dim=4.0: expected an integer of at least 2"),
    (lambda: RoPE(pairing="neox"), "pairing='neox' is unknown: expected one of ('halves', 'interleaved')"),
    (lambda: RoPE(scaling="linear"), "scaling='linear': expected a LinearScaling, NTKScaling, Llama3Scaling or None"),
    (lambda: LinearScaling(0), "factor=0: expected a finite number above 0"),
    (lambda: NTKScaling(-1.0), "factor=-1.0: expected a finite number above 0"),
    (lambda: NTKScaling(2.0, original_length=0), "original_length=0: expected an integer of at least 1"),
    (lambda: Llama3Scaling(float("inf")), "factor=inf: expected a finite number above 0"),
    (lambda: Llama3Scaling(8.0, 4.0, 4.0), "low_freq_factor=4.0 is not below high_freq_factor=4.0"),
    (lambda: Llama3Scaling(8.0, original_length=2.5), "original_length=2.5: expected an integer of at least 1"),
    (lambda: RoPE().frequencies(7), "D=7 is odd, and RoPE turns pairs: give an even head width, or an even dim below"),
    (lambda: RoPE(dim=16).rotate(rows(), n), "dim=16 is more than the head width D=14: expected dim <= D"),
    (
        lambda: RoPE().rotate(rows()[0, 0, 0], n),
        "x has shape (14,) and dtype torch.float32: expected floats, (…, N, D)",
    ),
    (lambda: RoPE().rotate(rows().int(), n), "dtype torch.int32: expected floats, (…, N, D)"),
    (lambda: RoPE().rotate(rows(), n.float()), "positions has dtype torch.float32: expected integers"),
    (lambda: RoPE().rotate(rows(), n > 2), "positions has dtype torch.bool: expected integers"),
    (
        lambda: RoPE().rotate(rows(), torch.arange(3)),
        "positions has shape (3,), and x (2, 3, 5, 14): expected (N,)=(5,) or (B,N)=(2, 5)",
    ),
    (lambda: RoPE().rotate(rows(), n.expand(3, N)), "positions has shape (3, 5), and x (2, 3, 5, 14)"),
    (lambda: RoPE().rotate(rows(), n.expand(B, H, N)), "positions has shape (2, 3, 5), and x (2, 3, 5, 14)"),
    (lambda: RoPE().rotate(rows(), torch.tensor(3)), "positions has shape (), and x (2, 3, 5, 14)"),
    (lambda: RoPE().rotate(rows()[0, 0], n[None]), "positions has shape (1, 5), and x (5, 14): expected (N,)=(5,)"),
    (lambda: RoPE().rotate(rows(), n, length=-1), "length=-1: expected an integer of at least 0"),
    (lambda: RoPE().rotate(rows(), n, length=n), "length has shape (5,), and x (2, 3, 5, 14): expected one number or"),
    (lambda: RoPE().rotate(rows(), n, length=torch.tensor(2.5)), "length has dtype torch.float32: expected integers"),
    (lambda: alibi_slopes(0), "heads=0: expected an integer of at least 1"),
    (lambda: alibi(3, -1, 5), "queries=-1: expected an integer of at least 0"),
    (lambda: alibi(3, 5, 2.5), "keys=2.5: expected an integer of at least 0"),
    (lambda: relative_buckets(n.double()), "relative has dtype torch.float64: expected integers"),
    (lambda: relative_buckets(n, buckets=2), "buckets=2: expected an integer of at least 4"),
    (lambda: relative_buckets(n, buckets=33), "buckets=33 is odd, and bidirectional=True halves it"),
    (lambda: relative_buckets(n, max_distance=8), "max_distance=8: expected an integer of at least 9"),
    (lambda: T5Bias(0), "heads=0: expected an integer of at least 1"),
    (lambda: T5Bias(3, bidirectional=False, buckets=1), "buckets=1: expected an integer of at least 2"),
    (lambda: T5Bias(3)(True, 5), "queries=True: expected an integer of at least 0"),
    (lambda: SwinBias(3, 7), "window=7: expected (height, width), in patches"),
    (lambda: SwinBias(3, (5, 0)), "window width=0: expected an integer of at least 1"),
]


@pytest.mark.parametrize(("ask", "says"), REFUSALS, ids=[says for _, says in REFUSALS])
def test_a_refusal_is_useful(ask, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        ask()

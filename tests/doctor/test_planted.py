"""Every known mistake, planted in independently written implementations, is named first, with its step."""

import pytest
import torch

import multihead as mh
from tests.doctor.planted import Einsum, Grouped, Modern, Views


def layer_of(width: int, heads: int, **options) -> mh.MultiHeadAttention:
    """A layer none of whose parameters is zero, so that leaving one out shows."""
    layer = mh.MultiHeadAttention(width, heads=heads, **options).eval()
    with torch.no_grad():
        for p in layer.parameters():
            if p.dim() == 1:
                p.add_(0.3 * torch.randn_like(p))
    return layer


PLAIN = [  # mistake, step, mask
    ("q and k swapped", 1, None),
    ("k and v swapped", 1, None),
    ("k used as v", 4, None),
    ("QKV packing: per head against per matrix", 1, None),
    ("weight used transposed", 1, None),
    ("bias missing on q", 1, None),
    ("bias missing on v", 1, None),
    ("bias missing on q, k and v", 1, None),
    ("heads split by view without transpose", 2, None),
    ("heads interleaved (D, H) instead of (H, D)", 2, None),
    ("scale missing", 3, None),
    ("scale by √E instead of √D", 3, None),
    ("scale by D instead of √D", 3, "causal"),
    ("softmax over queries", 3, None),
    ("softmax over heads", 3, "causal"),
    ("softmax over the batch", 3, None),
    ("mask missing", 3, "causal"),
    ("mask polarity inverted", 3, "causal"),
    ("mask polarity inverted", 3, "padding"),
    ("causal mask off by one, strict", 3, "causal"),
    ("causal mask off by one, one ahead", 3, "causal"),
    ("mask transposed", 3, "causal"),
    ("mask applied after softmax without renormalising", 3, "causal"),
    ("mask added as 0/1", 3, "causal"),
    ("mask filled with 0", 3, "causal"),
    ("mask filled with a finite value too small", 3, "causal"),
    ("padding mask on queries instead of keys", 3, "padding"),
    ("padding mask shared across the batch", 3, "padding"),
    ("half-precision softmax", 3, "causal"),
    ("dropout active in eval", 3, None),
    ("dropout applied to scores", 3, "causal"),
    ("heads merged without transposing back", 5, None),
    ("heads merged in reverse order", 6, "causal"),
    ("W_o missing", 7, None),
    ("W_o per head instead of across heads", 7, None),
    ("W_o used transposed", 7, None),
    ("bias missing on the output", 7, None),
]
SIZES = [(2, 5, 32, 4), (3, 8, 48, 3)]  # B, N, E, H
LENGTHS = {2: [4, 3], 3: [5, 8, 2]}


def masks(kind: str | None, B: int):
    lengths = torch.tensor(LENGTHS[B])
    return {None: None, "causal": mh.Causal(), "padding": mh.Padding(lengths)}[kind], lengths


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("style", [Einsum, Views])
@pytest.mark.parametrize(("mistake", "step", "mask"), PLAIN)
@pytest.mark.wrong
def test_a_planted_mistake_is_named_first(style, mistake, step, mask, sizes):
    B, N, E, H = sizes
    layer, x = layer_of(E, H), torch.randn(B, N, E)
    wanted, lengths = masks(mask, B)
    report = mh.diagnose(style(layer, mistake, mask, lengths), layer, x, mask=wanted)
    assert report.verdict == "diagnosed", report
    assert report.cause.startswith(mistake), report
    assert report.step == step
    assert len(report.causes) == 1
    assert report.explanation
    assert report.fix


ACROSS = [("v made from x instead of the context", 1, None, 6, 6)]
ACROSS += [("causal mask aligned top-left instead of bottom-right", 3, mh.Causal(), 4, 7)]
ACROSS += [
    ("k and v swapped", 1, None, 4, 7),
    ("q and k swapped", 1, None, 4, 7),
    ("mask missing", 3, mh.Causal(), 4, 7),
]


@pytest.mark.parametrize("style", [Einsum, Views])
@pytest.mark.parametrize(("mistake", "step", "mask", "Q", "K"), ACROSS)
@pytest.mark.wrong
def test_a_mistake_planted_in_cross_attention(style, mistake, step, mask, Q, K):
    layer, x, context = layer_of(32, 4), torch.randn(2, Q, 32), torch.randn(2, K, 32)
    candidate = style(layer, mistake, None if mask is None else "causal")
    report = mh.diagnose(candidate, layer, x, context, mask)
    assert (report.cause, report.step) == (mistake, step), report


WIDE = ["scale missing", "heads split by view without transpose", "QKV packing: per head against per matrix",
        "mask filled with a finite value too small", "W_o per head instead of across heads"]  # fmt: skip


@pytest.mark.parametrize("style", [Einsum, Views])
@pytest.mark.parametrize("mistake", WIDE)
@pytest.mark.wrong
def test_the_width_of_the_running_example(style, mistake):
    layer = layer_of(1024, 8)
    report = mh.diagnose(style(layer, mistake, "causal"), layer, torch.randn(4, 1024)[None], mask=mh.Causal())
    assert report.cause.startswith(mistake), report


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("mistake", ["scale by √E instead of √D", "mask added as 0/1", "heads merged in reverse order"])
@pytest.mark.wrong
def test_a_mistake_is_named_in_other_dtypes(mistake, dtype):
    layer = layer_of(32, 4).to(dtype)
    candidate = Views(layer, mistake, "causal").to(dtype)
    report = mh.diagnose(candidate, layer, torch.randn(2, 5, 32, dtype=dtype), mask=mh.Causal())
    assert report.cause == mistake, report


def decoding(layer, mistake):
    """Token by token, with a cache of keys and values, as a language model generates."""
    s, turn = layer.sizes, layer.rope.rotate

    def candidate(x):
        keys = values = None
        rows = []
        for n in range(x.shape[1]):
            token = x[:, n : n + 1]
            q, k, v = (
                p(token).unflatten(-1, (-1, s.D)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj)
            )
            at = torch.tensor([0 if mistake == "RoPE positions restarted" else n])
            q = turn(q, at)
            k = k if mistake == "turned in the cache" else turn(k, at)
            keys = k if keys is None else torch.cat([keys, k], 2)
            values = v if values is None else torch.cat([values, v], 2)
            used = keys
            if mistake in ("RoPE applied after the cache", "turned in the cache"):
                used = turn(keys, torch.arange(n + 1))
            if mistake == "RoPE applied after the cache, again and again":
                used = keys = turn(keys, torch.arange(n + 1))
                used = keys
            weights = (q @ used.repeat_interleave(s.H // s.G, 1).transpose(-2, -1) * s.D**-0.5).softmax(-1)
            rows.append((weights @ values.repeat_interleave(s.H // s.G, 1)).transpose(1, 2).flatten(2))
        return layer.o_proj(torch.cat(rows, 1))

    return candidate


@pytest.mark.parametrize(
    "mistake",
    ["RoPE positions restarted", "RoPE applied after the cache", "RoPE applied after the cache, again and again"],
)
@pytest.mark.wrong
def test_a_mistake_planted_in_a_decoding_loop(mistake):
    layer = layer_of(32, 4, kv_heads=2, rope=True)
    report = mh.diagnose(decoding(layer, mistake), layer, torch.randn(2, 6, 32), mask=mh.Causal())
    assert report.verdict == "diagnosed", report
    named = mistake.removesuffix(", again and again")
    assert any(name.startswith(named) for name in (report.cause, *report.indistinguishable)), report


def test_keys_that_are_turned_in_the_cache_are_healthy():
    layer = layer_of(32, 4, kv_heads=2, rope=True)
    for right in ("", "turned in the cache"):
        report = mh.diagnose(decoding(layer, right), layer, torch.randn(2, 6, 32), mask=mh.Causal())
        assert report.verdict == "healthy", report


MODERN = [
    ("GQA: repeat for repeat_interleave", 3),
    ("RoPE pairs halves against interleaved", 2),
    ("RoPE applied to v", 2),
    ("RoPE positions off by one for q", 2),
    ("RoPE positions off by one for k", 2),
    ("RoPE positions restarted", 2),
    ("RoPE positions restarted in chunks", 2),
    ("RoPE applied after the cache", 2),
    ("QK-norm missing", 2),
    ("QK-norm over the wrong axis", 2),
    ("QK-norm over the wrong axis (positions)", 2),
    ("softcap missing", 3),
    ("softcap after the mask", 3),
    ("sinks missing", 3),
    ("scale missing", 3),
    ("causal mask off by one, strict", 3),
    ("mask applied after softmax without renormalising", 3),
    ("mask filled with a finite value too small", 3),
    ("dropout active in eval", 3),
    ("dropout applied to scores", 3),
    ("heads merged in reverse order", 6),
]


@pytest.mark.parametrize("implementation", [Modern, Grouped])
@pytest.mark.parametrize("style", ["rotate_half", "complex"])
@pytest.mark.parametrize(("mistake", "step"), MODERN)
@pytest.mark.wrong
def test_a_mistake_planted_among_grouped_heads_rope_norm_softcap_and_sinks(implementation, style, mistake, step):
    pairing = "halves" if style == "rotate_half" else "interleaved"
    B, N, E, H, G = (2, 6, 32, 4, 2) if style == "complex" else (1, 9, 48, 6, 3)
    layer = layer_of(E, H, kv_heads=G, rope=mh.RoPE(pairing=pairing), qk_norm=True, softcap=3.0, sinks=True)
    report = mh.diagnose(implementation(layer, mistake, style), layer, torch.randn(B, N, E), mask=mh.Causal())
    assert report.verdict == "diagnosed", report
    named = mistake.removesuffix(" in chunks").removesuffix(" (positions)")
    together = [report.cause, *report.indistinguishable]
    if "off by one for" in mistake:  # q one ahead and k one behind are the same
        assert any(cause.startswith(named) for cause in together), report
        assert report.cause.startswith("RoPE positions off by one")
    else:
        assert report.cause.startswith(named), report
    assert report.step == step

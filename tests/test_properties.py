"""What must hold for every size: hypothesis draws them, prime where a swapped axis could hide."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import multihead as mh
from multihead.attention import BACKENDS

primes = st.sampled_from([1, 2, 3, 5, 7, 11])
heads = st.sampled_from([(1, 1), (2, 1), (3, 3), (6, 2), (6, 3)])
backends = st.sampled_from([name for name in BACKENDS if name != "flex"])  # that one: tests/test_flex.py
masks = st.sampled_from([None, mh.Causal(), mh.Causal(window=3), mh.Window(2, 1), mh.Prefix(2)])
some = settings(max_examples=30, deadline=None)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def a_layer(HG: tuple[int, int], D: int, **more) -> mh.MultiHeadAttention:
    H, G = HG
    return mh.MultiHeadAttention(13, heads=H, kv_heads=G, head_dim=2 * D, value_dim=D + 1, dtype=torch.float64, **more)


@some
@given(primes, primes, heads, st.booleans(), st.integers(0, 4))
def test_cached_decode_token_by_token_is_the_whole_sequence(B: int, N: int, HG, rope: bool, prompt: int) -> None:
    layer, x = a_layer(HG, 3, rope=rope), drawn(B, N, 13)
    prompt = min(prompt, N)
    cache = layer.new_cache(batch=B)
    parts = [layer(x[:, :prompt], mask=mh.Causal(), cache=cache)]
    parts += [layer(x[:, t : t + 1], mask=mh.Causal(), cache=cache) for t in range(prompt, N)]
    close(torch.cat(parts, dim=1), layer(x, mask=mh.Causal()))


@some
@given(st.lists(st.tuples(primes, primes), min_size=1, max_size=4), heads, masks, backends)
def test_documents_are_separate_calls(cuts, HG, mask, backend: str) -> None:
    (H, G), Q, K = HG, [q for q, _ in cuts], [k for _, k in cuts]
    q, k, v = drawn(2, H, sum(Q), 3), drawn(2, G, sum(K), 3), drawn(2, G, sum(K), 5)
    packed = mh.Documents(Q, K) if mask is None else mh.Documents(Q, K) & mask
    found = mh.attend(q, k, v, packed, backend=backend)
    alone = [
        mh.attend(*one, mask, backend=backend)
        for one in zip(q.split(Q, dim=2), k.split(K, dim=2), v.split(K, dim=2), strict=True)
    ]
    close(found, torch.cat(alone, dim=2))


@some
@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), heads, st.sampled_from(["left", "right"]), backends)
def test_padding_is_cropping(lengths: list[int], HG, side: str, backend: str) -> None:
    (H, G), B, K = HG, len(lengths), 7
    q, k, v = drawn(B, H, 5, 3), drawn(B, G, K, 3), drawn(B, G, K, 5)
    found = mh.attend(q, k, v, mh.Padding(lengths, side), backend=backend)
    for b, n in enumerate(lengths):
        kept = slice(0, n) if side == "right" else slice(K - n, K)
        close(found[b : b + 1], mh.attend(q[b : b + 1], k[b : b + 1, :, kept], v[b : b + 1, :, kept], backend=backend))


@some
@given(primes, primes, heads, masks, backends)
def test_grouped_heads_are_repeated_heads(Q: int, K: int, HG, mask, backend: str) -> None:
    H, G = HG
    q, k, v = drawn(2, H, Q, 3), drawn(2, G, K, 3), drawn(2, G, K, 5)
    repeated = (t.repeat_interleave(H // G, dim=1) for t in (k, v))
    close(mh.attend(q, k, v, mask, backend=backend), mh.attend(q, *repeated, mask, backend=backend))


@some
@given(st.integers(1, 9), heads, st.randoms(use_true_random=False))
def test_without_a_mask_order_means_nothing(N: int, HG, random) -> None:
    layer, x = a_layer(HG, 2), drawn(2, N, 13)
    order = random.sample(range(N), N)
    close(layer(x[:, order]), layer(x)[:, order])


@some
@given(primes, primes, heads, masks, backends)
def test_a_batch_is_each_row_alone(B: int, N: int, HG, mask, backend: str) -> None:
    layer, x = a_layer(HG, 2, rope=True), drawn(B, N, 13)
    together = layer(x, mask=mask, backend=backend)
    for b in range(B):
        close(together[b], layer(x[b], mask=mask, backend=backend))
        close(together[b : b + 1], layer(x[b : b + 1], mask=mask, backend=backend))


@some
@given(primes, primes, heads, masks)
def test_the_output_is_the_sum_of_what_each_head_contributes(B: int, N: int, HG, mask) -> None:
    layer, x = a_layer(HG, 2), drawn(B, N, 13)
    trace = mh.trace(layer, x, mask=mask)
    contributions = torch.einsum("bhqv,hve->bhqe", trace["heads"], layer.w_o)
    close(contributions.sum(1) + layer.o_proj.bias, layer(x, mask=mask))


@some
@given(primes, primes, heads, st.sampled_from([mh.Causal(), mh.Causal(window=3)]))
def test_a_causal_row_is_the_end_of_its_own_prefix(B: int, N: int, HG, mask) -> None:
    """Row 3 of "I love pepperoni pizza" stands for "I love pepperoni"."""
    layer, x = a_layer(HG, 2, rope=True), drawn(B, N, 13)
    whole = layer(x, mask=mask)
    for n in range(1, N + 1):
        close(whole[:, n - 1], layer(x[:, :n], mask=mask)[:, -1])

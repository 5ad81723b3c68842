"""The whole layer in one call, against the same steps in float64."""

from __future__ import annotations

import pytest
import torch
from oracle import ISAS, Problem, causal, error, rounding

from multihead import _native

CASES = [  # B Q  K   E   C   H  G  D   V   mask    bias   why
    (1, 4, 4, 128, 128, 8, 8, 16, 16, True, True, "the running example, smaller"),
    (2, 3, 5, 37, 29, 6, 3, 7, 11, False, True, "all sizes distinct, cross-attention"),
    (1, 1, 1, 16, 16, 1, 1, 16, 16, False, False, "one token"),
    (1, 13, 13, 65, 65, 5, 1, 13, 9, True, False, "rows that do not fill a group; widths that do not fill a vector"),
    (3, 2, 2, 40, 40, 2, 2, 20, 20, True, True, "a batch"),
    (3, 41, 41, 70, 70, 6, 2, 11, 13, True, True, "many tokens: rows in lanes, strips that cross batch rows"),
    (1, 17, 17, 520, 520, 4, 4, 32, 32, False, False, "one more than few; inputs in three stretches"),
    (2, 5, 60, 33, 90, 3, 1, 16, 8, False, True, "few queries on many keys: both kinds of product"),
    (2, 30, 45, 40, 56, 4, 2, 16, 48, True, True, "many tokens in heads of whole vectors"),
    (1, 200, 3, 48, 17, 2, 2, 24, 24, False, True, "many queries on few keys"),
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c[-1])
def test_error_is_at_most_twice_plain(case, isa):
    B, Q, K, E, C, H, G, D, V, is_causal, biased, _ = case
    make = torch.Generator().manual_seed(1)
    x = torch.randn(B, Q, E, generator=make)
    context = x if (K, C) == (Q, E) else torch.randn(B, K, C, generator=make)
    sizes = [(H * D, E), (G * D, C), (G * V, C), (E, H * V)]
    weights = [torch.randn(*s, generator=make) * s[1] ** -0.5 for s in sizes]
    biases = [torch.randn(s[0], generator=make) if biased else None for s in sizes]
    mask = causal(Q, K) if is_causal else {}

    def plain(dtype: torch.dtype) -> torch.Tensor:
        w = [t.to(dtype) for t in weights]
        b = [None if t is None else t.to(dtype) for t in biases]
        linear = torch.nn.functional.linear
        q = linear(x.to(dtype), w[0], b[0]).view(B, Q, H, D).transpose(1, 2)
        k = linear(context.to(dtype), w[1], b[1]).view(B, K, G, D).transpose(1, 2)
        v = linear(context.to(dtype), w[2], b[2]).view(B, K, G, V).transpose(1, 2)
        out, _ = Problem(q, k, v, D**-0.5, **mask).plain(dtype)
        return linear(out.transpose(1, 2).reshape(B, Q, H * V), w[3], b[3])

    results = []
    for threads in (1, 2):
        y = torch.full((B, Q, E), torch.nan)
        addresses = [0 if b is None else b.data_ptr() for b in biases]
        parts = [(w.data_ptr(), w.stride(0), at) for w, at in zip(weights, addresses, strict=True)]
        _native.layer(x.data_ptr(), x.shape, x.stride(), context.data_ptr(), context.shape, context.stride(), *parts,
                      (H, G, D, V), y.data_ptr(), D**-0.5, threads, isa=isa, **mask)  # fmt: skip
        results.append(y)
    exact = plain(torch.float64)
    assert error(results[0], exact) <= 2 * error(plain(torch.float32), exact) + rounding(exact, torch.float32)
    assert torch.equal(*results)

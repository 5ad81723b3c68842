"""The largest logit of each head, from every backend: masks, softcap, bias, sinks, dead heads, dtypes, gradients."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

import multihead as mh
from multihead.attention import largest

B, H, G, Q, K, D, V = 2, 6, 3, 5, 7, 8, 4


def dead_head() -> torch.Tensor:
    allowed = torch.ones(1, H, Q, K, dtype=torch.bool)
    allowed[:, 2] = False
    return allowed


CASES: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("causal: the first queries see less", {"mask": mh.Causal()}),
    ("window", {"mask": mh.Causal(window=2)}),
    ("padding, a row of nothing", {"mask": mh.Padding([3, 0])}),
    ("dense, a dead head", {"mask": dead_head()}),
    ("softcap", {"softcap": 0.7}),
    ("bias", {"bias": 3 * torch.linspace(-1, 1, H * Q * K).sin().view(H, Q, K)}),
    ("bias that hides", {"bias": torch.zeros(Q, K).masked_fill(torch.ones(Q, K).triu(1).bool(), -torch.inf)}),
    ("sinks do not count", {"sinks": torch.full((H,), 50.0)}),
    ("a scale of its own", {"scale": 3.5}),
    ("a negative scale", {"scale": -0.5}),
    ("everything", {"mask": mh.Causal(), "softcap": 2.0, "bias": torch.ones(Q, K), "sinks": torch.zeros(H)}),
]


def exact(q: torch.Tensor, k: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """Written out, in float64."""
    scores = q.double() @ k.double().repeat_interleave(H // G, 1).mT * given.get("scale", D**-0.5)
    if "softcap" in given:
        scores = given["softcap"] * torch.tanh(scores / given["softcap"])
    scores = scores + given.get("bias", torch.zeros(())).double()
    mask = given.get("mask")
    if mask is not None:
        seen = mask if isinstance(mask, torch.Tensor) else torch.stack(
            [(mh.Padding([n]) if isinstance(mask, mh.Padding) else mask).dense(Q, K).view(Q, K) for n in (3, 0)]
        )[:, None]  # fmt: skip
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.amax((-2, -1))


@pytest.mark.parametrize("backend", ["native", "sdpa", "flex", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("why", "given"), CASES, ids=[case[0] for case in CASES])
def test_every_backend_gives_it(why: str, given: dict, dtype: torch.dtype, backend: str) -> None:
    q, k, v = torch.randn(B, H, Q, D).to(dtype), torch.randn(B, G, K, D).to(dtype), torch.randn(B, G, K, V).to(dtype)
    if mh.explain(q, k, v, **given).reasons[backend].startswith("refuses"):
        with pytest.raises(ValueError, match="refuses this call"):
            mh.attend(q, k, v, **given, backend=backend, return_max_logit=True)
        return
    out, top = mh.attend(q, k, v, **given, backend=backend, return_max_logit=True)
    out_2, lse, top_2 = mh.attend(q, k, v, **given, backend=backend, return_lse=True, return_max_logit=True)
    assert torch.equal(out, out_2)
    assert torch.equal(top, top_2)
    assert top.shape == (B, H)
    assert top.dtype == lse.dtype == torch.promote_types(dtype, torch.float32)
    tight = 1e-12 if dtype == torch.float64 else 1e-5
    assert_close(top.double(), exact(q, k, given), rtol=tight, atol=tight)
    assert_close(mh.look(q, k, **given).max_logit(), top, rtol=tight, atol=tight)
    assert torch.equal(out, mh.attend(q, k, v, **given, backend=backend, return_lse=True)[0])


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_beside_a_gradient(backend: str) -> None:
    q, k, v = (torch.randn(B, H, Q, D, requires_grad=True) for _ in range(3))
    out, top = mh.attend(q, k, v, mask=mh.Causal(), backend=backend, return_max_logit=True)
    assert not top.requires_grad
    out.sum().backward()
    assert q.grad is not None
    with torch.no_grad():
        assert_close(mh.attend(q, k, v, mask=mh.Causal(), backend=backend, return_max_logit=True)[1], top)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_visible_nan_shows_and_a_hidden_one_does_not(backend: str) -> None:
    q, k, v = (torch.randn(1, 2, Q, D) for _ in range(3))
    k[0, 1, -1] = torch.nan
    top = mh.attend(q, k, v, mask=mh.Causal(), backend=backend, return_max_logit=True)[1]
    assert top.isnan().tolist() == [[False, True]]
    top = mh.attend(q, k, v, mask=mh.Padding([Q - 1]), backend=backend, return_max_logit=True)[1]
    assert not top.isnan().any()


@pytest.mark.parametrize(("why", "given"), CASES, ids=[case[0] for case in CASES])
def test_a_lens_adds_up_blocks_of_queries(why: str, given: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest, "AT_ONCE", 2 * B * H * K)  # two queries at once, then one
    q, k = 3 * torch.randn(B, H, Q, D), torch.randn(B, G, K, D)
    q[:, :, -1] *= 10  # the largest is in the last block, or would be
    assert_close(mh.look(q, k, **given).max_logit().double(), exact(q, k, given), rtol=1e-5, atol=1e-5)
    columns = given | {"bias": torch.linspace(-9, 9, K)}  # one for each key, the same in every block
    assert_close(mh.look(q, k, **columns).max_logit().double(), exact(q, k, columns), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0), (1, 300), (300, 1)])
def test_no_queries_no_keys_and_many(queries: int, keys: int) -> None:
    q, k = torch.randn(1, 4, queries, D), torch.randn(1, 2, keys, D)
    top = mh.attend(q, k, k, return_max_logit=True)[1]
    other = mh.attend(q, k, k, backend="reference", return_max_logit=True)[1]
    assert top.shape == (1, 4)
    assert_close(top, other)
    if not queries * keys:
        assert (top == -torch.inf).all()

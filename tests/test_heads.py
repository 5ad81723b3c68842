"""What heads do: every score against the same from dense weights, and on heads built to have it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead import heads
from multihead.lens import region

N = 23
TOKENS = torch.randint(5, (2, N), generator=torch.Generator().manual_seed(3))
OPTIONS = {
    "causal": {"mask": mh.Causal()},
    "everything": {},
    "window, sink": {"mask": mh.Causal(window=6), "sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])},
}


@pytest.fixture(params=["a tile for all", "many small tiles"])
def _tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many small tiles":
        monkeypatch.setattr(region, "SIDE", 8)
        monkeypatch.setattr(region, "TILE", 128)


def lens_and_weights(options: dict, Q: int = N) -> tuple[mh.Lens, Tensor, Tensor]:
    """A lens with grouped heads, its weights, and what may be seen."""
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(2, n, N, 8, generator=generator, dtype=torch.float64) for n in (4, 2))
    options = {name: t.double() if isinstance(t, Tensor) else t for name, t in options.items()}
    lens = mh.look(q[:, :, N - Q :], k, **options)
    mask = options.get("mask")
    return lens, lens.weights(), torch.ones(Q, N, dtype=torch.bool) if mask is None else mask.dense(Q, N)


def mean_on(pattern: Tensor, w: Tensor, seen: Tensor) -> Tensor:
    """The mean weight on a pattern (B,1,Q,K), over the queries that may see a key of it."""
    pattern = (pattern & seen).expand_as(w)
    counted = pattern.any(-1)
    return (w * pattern).sum(-1).where(counted, 0).sum(-1) / counted.sum(-1).clamp(min=1)


# A score, and the same from all weights, where queries stand at i and keys at j.
SCORES: dict[str, tuple[Callable, Callable]] = {
    "distance": (heads.distance, lambda w, seen, i, j: (w * (i - j).abs()).sum(-1).mean(-1)),
    "previous_token": (heads.previous_token, lambda w, seen, i, j: mean_on(j == i - 1, w, seen)),
    "first_token": (heads.first_token, lambda w, seen, i, j: mean_on((j == 0) & (i > 0), w, seen)),
    "same_token": (
        lambda lens: heads.same_token(lens, TOKENS),
        lambda w, seen, i, j: mean_on((TOKENS[:, i] == TOKENS[:, None, j])[:, None] & (i != j), w, seen),
    ),
    "induction": (
        lambda lens: heads.induction(lens, TOKENS),
        lambda w, seen, i, j: mean_on((TOKENS[:, i] == TOKENS[:, None, j - 1])[:, None] & (j > 0) & (j <= i), w, seen),
    ),
    "similarity": (
        heads.similarity,
        lambda w, seen, i, j: torch.nn.functional.cosine_similarity(w.flatten(2)[:, :, None], w.flatten(2)[:, None], -1),
    ),
}  # fmt: skip


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("Q", [N, 7])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", SCORES)
def test_scores_are_those_of_dense_weights(name: str, options: str, Q: int) -> None:
    ours, dense = SCORES[name]
    lens, w, seen = lens_and_weights(OPTIONS[options], Q)
    i, j = torch.arange(N - Q, N)[:, None], torch.arange(N)
    torch.testing.assert_close(ours(lens), dense(w, seen, i, j), rtol=1e-9, atol=1e-11)


def test_distance_between_patches_is_euclidean() -> None:
    lens, w, _ = lens_and_weights({})
    grid = torch.stack([torch.arange(N) // 5, torch.arange(N) % 5], dim=1)
    wanted = (w * torch.cdist(grid.double(), grid.double())).sum(-1).mean(-1)
    torch.testing.assert_close(heads.distance(lens, grid), wanted)
    with pytest.raises(ValueError, match=r"positions is .*: expected \(K,\) or \(K,C\) with K=23"):
        heads.distance(lens, grid[1:])


def test_heads_built_to_have_a_pattern_have_it() -> None:
    """Keys and queries are one-hot, so that a head looks where it is told to."""
    tokens = torch.tensor([3, 1, 4, 0, 2, 3, 1, 4, 0, 2])
    place, token = torch.eye(10), torch.eye(5)[tokens]
    before = torch.cat([torch.zeros(1, 5), token[:-1]])
    q = torch.stack([place, token @ torch.eye(5, 10), token @ torch.eye(5, 10)])[None]
    q[0, 0] = torch.roll(place, -1, 1)  # asks for the place before its own
    k = torch.stack([place, token @ torch.eye(5, 10), before @ torch.eye(5, 10)])[None]
    lens = mh.look(q, k, mh.Causal(), scale=50.0)
    assert heads.previous_token(lens)[0, 0] > 0.99
    assert heads.induction(lens, tokens)[0, 2] > 0.99
    assert heads.induction(lens, tokens)[0, 0] < 0.05
    assert heads.same_token(lens, tokens)[0, 1] > 0.45  # half on itself
    assert heads.similarity(lens)[0, 0, 0] == pytest.approx(1.0)


@pytest.mark.parametrize("score", [heads.same_token, heads.induction])
def test_tokens_are_checked(score: Callable) -> None:
    lens = lens_and_weights({})[0]
    with pytest.raises(ValueError, match=r"expected \(K,\) or \(B,K\) with B=2, K=23"):
        score(lens, TOKENS[:, 1:])
    with pytest.raises(TypeError, match="integers"):
        score(lens, TOKENS.float())
    with pytest.raises(ValueError, match="expected self-attention"):
        score(mh.look(torch.ones(1, 1, 5, 2), torch.ones(1, 1, 3, 2)), torch.ones(3).long())


# Stacks of layers -----------------------------------------------------------------------------------------------------


def stack(mask: mh.Mask | None, sinks: bool = False, N: int = 9) -> tuple[list[mh.Lens], list[Tensor]]:
    layers = [mh.MultiHeadAttention(16, heads=4, kv_heads=2, sinks=sinks, dtype=torch.float64) for _ in range(3)]
    lenses = [layer.requires_grad_(False).look(torch.randn(2, N, 16).double() * 3, mask=mask) for layer in layers]
    half = [0.5 * lens.weights().mean(1) + 0.5 * torch.eye(N) for lens in lenses]
    return lenses, [layer / layer.sum(-1, keepdim=True) for layer in half]


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("mask", [None, mh.Causal()], ids=["everything", "causal"])
def test_rollout_is_the_product_of_the_layers(mask: mh.Mask | None, sinks: bool) -> None:
    lenses, layers = stack(mask, sinks)
    wanted = layers[2] @ layers[1] @ layers[0]
    torch.testing.assert_close(heads.rollout(lenses), wanted)
    torch.testing.assert_close(heads.rollout(lenses, queries=[4, -1]), wanted[:, [4, -1]])
    torch.testing.assert_close(heads.rollout(lenses).sum(-1), torch.ones(2, 9).double())


def least_cut(layers: list[Tensor], query: int, key: int) -> float:
    """The minimum cut, which equals the maximum flow (Ford & Fulkerson 1956), by trying every cut of two layers."""
    N = layers[0].shape[-1]
    first, second = layers  # inputs ← middle ← outputs
    cuts = []
    for side in range(2**N):
        with_source = torch.tensor([bool(side >> n & 1) for n in range(N)])
        cuts.append(float(second[query, ~with_source].sum() + first[with_source, key].sum()))
    return min(cuts)


def test_flow_is_the_least_cut() -> None:
    lenses, layers = stack(mh.Causal(), N=6)
    found = heads.flow(lenses[:2], query=-1)
    assert found.shape == (2, 6)
    for b in range(2):
        for key in range(6):
            wanted = least_cut([layer[b] for layer in layers[:2]], -1, key)
            assert float(found[b, key]) == pytest.approx(wanted, abs=1e-9)
    one = heads.flow(lenses[:1], query=3, keys=[0, 3])
    torch.testing.assert_close(one, layers[0][:, 3, [0, 3]])


def test_stacks_are_checked() -> None:
    lenses, _ = stack(None)
    with pytest.raises(ValueError, match="expected one for each layer"):
        heads.rollout([])
    with pytest.raises(ValueError, match=r"lenses\[1\] has .*: expected B=2 and Q=K=9"):
        heads.rollout([lenses[0], mh.look(torch.ones(2, 4, 8, 2), torch.ones(2, 4, 8, 2))])
    with pytest.raises(ValueError, match="residual=0"):
        heads.rollout(lenses, residual=0)
    with pytest.raises(IndexError, match="query=9: expected -9…8"):
        heads.flow(lenses, query=9)


# Step 7 ---------------------------------------------------------------------------------------------------------------


def test_contributions_are_what_each_head_writes() -> None:
    layer, x = mh.MultiHeadAttention(12, heads=3, kv_heads=1, value_dim=5).requires_grad_(False), torch.randn(2, 7, 12)
    found = heads.contributions(layer, x, mask=mh.Causal())
    written = []
    for head in range(3):
        with mh.ablate(layer, heads=[h for h in range(3) if h != head]):
            written.append(layer(x, mask=mh.Causal()) - layer.o_proj.bias)
    torch.testing.assert_close(found, torch.stack(written, dim=-1).norm(dim=2))
    torch.testing.assert_close(heads.contributions(layer, x[0], mask=mh.Causal()), found[0])
    cache = layer.new_cache(batch=2)
    heads.contributions(layer, x, mask=mh.Causal(), cache=cache)
    assert cache.length == 0


def test_mixing_says_what_w_o_is_for() -> None:
    layer = mh.MultiHeadAttention(12, heads=3)
    blocks = layer.o_proj.weight.detach().view(3, 4, 3, 4)  # (group, ·, head, ·)
    wanted = blocks.square().sum(dim=(1, 3)).T.sqrt() / blocks.norm()
    torch.testing.assert_close(heads.mixing(layer), wanted)
    with torch.no_grad():
        layer.o_proj.weight.copy_(torch.eye(12))
    torch.testing.assert_close(heads.mixing(layer), torch.eye(3) / 3**0.5)


def test_own_token_is_the_diagonal() -> None:
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8)
    for mask in (None, mh.Causal()):
        lens = mh.look(q, k, mask=mask)
        wanted = lens.weights()[:, :, torch.arange(5), torch.arange(5) + 2].mean(-1)
        assert torch.allclose(heads.own_token(lens), wanted, atol=1e-6)
    with pytest.raises(ValueError, match="expected self-attention"):
        heads.own_token(mh.look(k, q))

"""What a head attends to, as one number for each head, (B,H): each from the tiles of a lens, in O(N) memory.

A score is a mean over queries, and leaves out those that may not see a key of the pattern. Query q stands at key
q + (K − Q), as in every mask; of packed documents and ragged batches, look at one sequence at a time.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from multihead.call import without_autocast
from multihead.lens import Lens
from multihead.lens.region import At
from multihead.sizes import describe
from multihead.tensors import holds_integers


def distance(lens: Lens, positions: Tensor | None = None) -> Tensor:
    """How far a head looks: the mean over queries of Σ w·|position of the query − position of the key|, (B,H).

    Args:
        lens: the lens.
        positions: of the keys, (K,), or (K,2) for patches of an image, where the distance is Euclidean; 0, 1, 2…
            unless given.

    Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words", figure 7: low in some heads of the first layers, as of a
    convolution, and high in others.

    >>> q = torch.zeros(1, 1, 5, 4)
    >>> heads.distance(mh.look(q, q, mask=mh.Causal(window=2)))  # half on the token before, but for the first token
    tensor([[0.4000]])
    """
    _, _, Q, K = lens.shape
    where = torch.arange(K, device=lens.device) if positions is None else positions.to(lens.device)
    if where.shape[0] != K or where.dim() > 2:
        raise ValueError(f"positions is {describe(where)}: expected (K,) or (K,C) with K={K}")
    _queries_are_keys(lens)
    where = where.to(torch.float64 if lens.device.type != "mps" else torch.float32).reshape(K, -1)

    def share(at: At, w: Tensor) -> Tensor:
        return torch.cdist(where[K - Q :][at.queries], where[at.keys]).to(w.dtype)

    found, _ = _sum(lens, share)
    return _mean(found, lens.lse > -torch.inf)


def previous_token(lens: Lens) -> Tensor:
    """How much a head attends to the token before: (B,H), 1 for a pure previous-token head.

    Voita et al. 2019, "Analyzing Multi-Head Self-Attention", section 5.1, where such heads are called positional;
    half of an induction circuit in Olsson et al. 2022, "In-context Learning and Induction Heads".

    >>> q = torch.zeros(1, 1, 5, 4)
    >>> heads.previous_token(mh.look(q, q, mask=mh.Causal(window=2)))  # two keys in sight, and no preference
    tensor([[0.5000]])
    """
    _queries_are_keys(lens)
    offset = lens.shape[3] - lens.shape[2]
    return _pattern(lens, lambda query, key: key == query + offset - 1)


def first_token(lens: Lens) -> Tensor:
    """How much a head attends to key 0, where heads rest that have nothing to do: (B,H). Query 0 has no choice.

    Xiao et al. 2024, "Efficient Streaming Language Models with Attention Sinks".

    >>> q = torch.zeros(1, 1, 3, 4)
    >>> heads.first_token(mh.look(q, q, mask=mh.Causal()))  # the mean of 1/2 and 1/3
    tensor([[0.4167]])
    """
    B, H, Q, K = lens.shape
    if K == 0:
        return torch.zeros(B, H, dtype=lens.dtype, device=lens.device)
    seen = lens.allowed(At(slice(0, B), slice(0, H), slice(0, Q), slice(0, 1)))[..., 0]
    chooses = torch.arange(Q, device=lens.device) != Q - K
    return _mean(lens.mass(0).detach(), (seen & chooses).expand(B, H, Q))


def own_token(lens: Lens) -> Tensor:
    """How much a head attends to the query's own place: (B,H), 1 for a head that looks nowhere else.

    >>> q = torch.zeros(1, 1, 4, 8)
    >>> heads.own_token(mh.look(q, q, mask=mh.Causal(window=2)))  # half, but for the first token, which sees no other
    tensor([[0.6250]])
    """
    _queries_are_keys(lens)
    offset = lens.shape[3] - lens.shape[2]
    return _pattern(lens, lambda query, key: key == query + offset)


def same_token(lens: Lens, tokens: Tensor) -> Tensor:
    """How much a head attends to other places that hold the query's own token: (B,H).

    Args:
        lens: the lens.
        tokens: what stands at each key, integers (K,) or (B,K).

    Wang et al. 2023, "Interpretability in the Wild", section 3, where such heads are called duplicate-token heads.

    >>> q = torch.zeros(1, 1, 4, 4)
    >>> heads.same_token(mh.look(q, q), torch.tensor([7, 8, 7, 9])).shape
    torch.Size([1, 1])
    """
    ids, offset = _tokens(lens, tokens), lens.shape[3] - lens.shape[2]
    return _pattern(
        lens, lambda query, key: key != query + offset, lambda at: _of_queries(ids, offset, at) == _of_keys(ids, at)
    )


def induction(lens: Lens, tokens: Tensor) -> Tensor:
    """How much a head attends to what came after earlier occurrences of the query's token: (B,H).

    In "… A B … A" an induction head attends from the second A to B, and so predicts B.

    Args:
        lens: the lens.
        tokens: what stands at each key, integers (K,) or (B,K).

    Olsson et al. 2022, "In-context Learning and Induction Heads".

    >>> lm = mh.models.load("lm")
    >>> said = torch.randint(1, lm.tokenizer.size, (1, 50)).repeat(1, 2)  # random tokens, said twice
    >>> scores = torch.stack([heads.induction(lens, said)[0] for lens in lm.look(said)])  # (layers, H)
    >>> bool(scores.max() > 0.5)
    True
    """
    ids, offset = _tokens(lens, tokens), lens.shape[3] - lens.shape[2]
    before = torch.cat([torch.full_like(ids[:, :1], torch.iinfo(ids.dtype).min), ids[:, :-1]], dim=1)
    return _pattern(
        lens, lambda query, key: key <= query + offset, lambda at: _of_queries(ids, offset, at) == _of_keys(before, at)
    )


def similarity(lens: Lens) -> Tensor:
    """How alike the weights of two heads are: the cosine between all weights of one and of the other, (B,H,H).

    Bian et al. 2021, "On Attention Redundancy: A Comprehensive Study", where it is one of several measures.

    >>> q = torch.randn(1, 1, 5, 4).repeat(1, 2, 1, 1)  # two heads that do the same
    >>> bool((heads.similarity(mh.look(q, q)) > 0.999).all())
    True
    """
    B, H, _, _ = lens.shape
    products = torch.zeros(B, H, H, dtype=torch.float64 if lens.device.type != "mps" else torch.float32)
    products = products.to(lens.device)
    with without_autocast(lens.device):
        for at, w in lens.tiles(all_heads=True):
            flat = w.flatten(2)  # (b, H, q·k)
            products[at.batch] += flat @ flat.transpose(1, 2)
    length = products.diagonal(dim1=1, dim2=2).sqrt()
    alike = products / (length[:, :, None] * length[:, None, :]).clamp(min=torch.finfo(products.dtype).tiny)
    return alike.to(lens.dtype)


# What they share ------------------------------------------------------------------------------------------------------


def _queries_are_keys(lens: Lens) -> None:
    _, _, Q, K = lens.shape
    if Q > K:
        raise ValueError(f"Q={Q} queries on K={K} keys: expected self-attention, where each query stands at a key")


def _pattern(
    lens: Lens, fits: Callable[[Tensor, Tensor], Tensor], also: Callable[[At], Tensor] | None = None
) -> Tensor:
    """The mean over queries, of those that may see a key of the pattern, of the weight they give to such keys."""

    def share(at: At, w: Tensor) -> Tensor:
        query = torch.arange(at.queries.start, at.queries.stop, device=w.device)[:, None]
        key = torch.arange(at.keys.start, at.keys.stop, device=w.device)
        pattern = fits(query, key)
        return pattern if also is None else pattern & also(at)

    return _mean(*_sum(lens, share))


def _sum(lens: Lens, share: Callable[[At, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Σ w·share over the keys of each query, and whether it may see a key whose share is not 0: (B,H,Q) each."""
    total = torch.zeros(lens.shape[:3], dtype=lens.dtype, device=lens.device)
    possible = torch.zeros(lens.shape[:3], dtype=torch.bool, device=lens.device)
    for at, w in lens.tiles():
        part = share(at, w)
        possible[at.rows] |= ((part != 0) & lens.allowed(at)).any(-1)
        total[at.rows] += (w * part).sum(-1)
    return total, possible


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """Over the queries that count; 0 where none does."""
    return values.where(counted, 0).sum(-1) / counted.sum(-1).clamp(min=1)


def _tokens(lens: Lens, tokens: Tensor) -> Tensor:
    B, _, _, K = lens.shape
    _queries_are_keys(lens)
    if not isinstance(tokens, Tensor) or not holds_integers(tokens):
        what = describe(tokens) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise TypeError(f"tokens is {what}: expected a tensor of integers, one for each key")
    if tokens.shape not in ((K,), (B, K), (1, K)):
        raise ValueError(f"tokens is {describe(tokens)}: expected (K,) or (B,K) with B={B}, K={K}")
    return tokens.long().to(lens.device).expand(B, K)


def _of_queries(tokens: Tensor, offset: int, at: At) -> Tensor:
    return tokens[at.batch, offset + at.queries.start : offset + at.queries.stop][:, None, :, None]  # (b, 1, q, 1)


def _of_keys(tokens: Tensor, at: At) -> Tensor:
    return tokens[at.batch, at.keys][:, None, None, :]  # (b, 1, 1, k)

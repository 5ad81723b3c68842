"""Which inputs reach which outputs of a stack of layers: attention rollout and attention flow.

Abnar & Zuidema 2020, "Quantifying Attention Flow in Transformers". Every layer is half what its heads attend to, on the
mean, and half the residual stream, which stays in place; rows are normalised, so that a sink or a query that sees
nothing leaves the residual its part.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from multihead.call import without_autocast
from multihead.lens import Lens
from multihead.lens.selections import Selection, choose
from multihead.sizes import require_int


def rollout(lenses: Sequence[Lens], queries: Selection = None, residual: float = 0.5) -> Tensor:
    """How much of each input is in chosen outputs, when attention is the only thing that moves anything: (B,q,K).

    Each row adds up to 1. It is pulled through the layers from the last to the first, tile by tile: O(q·N) memory,
    whatever the number of heads.

    Args:
        lenses: one for each layer, the first layer first, each with as many queries as keys.
        queries: which outputs; all unless given.
        residual: the part of the residual stream.

    >>> layers = [mh.MultiHeadAttention(32, heads=4) for _ in range(3)]
    >>> x = torch.randn(1, 7, 32)
    >>> heads.rollout([layer.look(x, mask=mh.Causal()) for layer in layers], queries=-1).shape
    torch.Size([1, 1, 7])
    """
    B, N = _check(lenses, residual)
    last = lenses[-1]
    number = torch.arange(N, device=last.device)
    rows = number[choose("queries", queries, N, last.device)]
    share = (rows[:, None] == number).to(last.dtype).expand(B, -1, -1)  # (B, q, N), one 1 in each row
    for lens in reversed(lenses):
        share = share / _row_sums(lens, residual)[:, None]
        moved = share * residual
        with without_autocast(lens.device):
            for at, w in lens.tiles(all_heads=True):
                moved[at.batch, :, at.keys] += (1 - residual) * (share[at.batch, :, at.queries] @ w.mean(1))
        share = moved
    return share


def flow(lenses: Sequence[Lens], query: int, keys: Selection = None, residual: float = 0.5) -> Tensor:
    """The most that can flow from an output to each of the inputs, with weights as the capacities of pipes: (B,k).

    A maximum flow needs the whole graph: this takes O(layers·N²) memory, whatever the number of heads, and a search for
    each input, so it is for short sequences. `rollout` is for long ones.

    Args:
        lenses: one for each layer, the first layer first, each with as many queries as keys.
        query: which output.
        keys: which inputs; all unless given.
        residual: the part of the residual stream.

    >>> lenses = [mh.look(*torch.randn(2, 1, 2, 4, 8), mask=mh.Causal()) for _ in range(3)]
    >>> heads.flow(lenses, query=-1).shape
    torch.Size([1, 4])
    """
    B, N = _check(lenses, residual)
    [start] = torch.arange(N)[choose("query", require_int("query", query, -N), N)].tolist()
    wanted = torch.arange(N)[choose("keys", keys, N)].tolist()
    graphs = []
    for lens in lenses:
        mean = torch.zeros(B, N, N, dtype=torch.float64)
        for at, w in lens.tiles(all_heads=True):
            mean[at.batch, at.queries, at.keys] = w.mean(1).double().cpu()
        mean = (1 - residual) * mean + residual * torch.eye(N, dtype=torch.float64)
        graphs.append(mean / mean.sum(-1, keepdim=True))
    found = [[_most(graphs, b, start, key) for key in wanted] for b in range(B)]
    return torch.tensor(found, dtype=lenses[-1].dtype, device=lenses[-1].device).view(B, len(wanted))


def _check(lenses: Sequence[Lens], residual: float) -> tuple[int, int]:
    if not lenses:
        raise ValueError("lenses is empty: expected one for each layer")
    B, _, N, _ = lenses[0].shape
    for n, lens in enumerate(lenses):
        if (lens.shape[0], *lens.shape[2:]) != (B, N, N):
            raise ValueError(f"lenses[{n}] has (B,H,Q,K)={lens.shape}: expected B={B} and Q=K={N}")
    if not 0 < residual <= 1:
        raise ValueError(f"residual={residual}: expected a part above 0, at most 1")
    return B, N


def _row_sums(lens: Lens, residual: float) -> Tensor:
    """What a layer's rows add up to before they are normalised: (B, N)."""
    return residual + (1 - residual) * lens.mass(None).detach().mean(1)


def _most(graphs: list[Tensor], b: int, start: int, end: int) -> float:
    """The maximum flow from an output to an input: Edmonds & Karp 1972, shortest paths with room first.

    Node (layer, position) is layer·N + position; the outputs are layer len(graphs), the inputs layer 0.
    """
    N = graphs[0].shape[-1]
    room: list[dict[int, float]] = [{} for _ in range((len(graphs) + 1) * N)]
    for layer, graph in enumerate(graphs):
        for q, row in enumerate(graph[b].tolist()):
            for k, capacity in enumerate(row):
                if capacity > 0:
                    room[(layer + 1) * N + q][layer * N + k] = capacity
                    room[layer * N + k].setdefault((layer + 1) * N + q, 0.0)
    source, total = len(graphs) * N + start, 0.0
    while path := _path(room, source, end):
        least = min(room[a][b] for a, b in path)
        for a, b in path:
            room[a][b] -= least
            room[b][a] += least
        total += least
    return total


def _path(room: list[dict[int, float]], source: int, end: int) -> list[tuple[int, int]]:
    came = {source: source}
    waiting = deque([source])
    while waiting and end not in came:
        node = waiting.popleft()
        for other, left in room[node].items():
            if left > 1e-12 and other not in came:  # what rounding leaves is no room
                came[other] = node
                waiting.append(other)
    path = []
    while end in came and end != source:
        path.append((came[end], end))
        end = came[end]
    return path

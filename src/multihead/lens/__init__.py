"""The lens: exact attention weights, and what they add up to, on demand and in O(N) memory.

With q, k and two numbers a query any weight is exp(q·k·scale − top)·factor, so nothing needs the (Q, K) matrix but
`weights`.

Longer than other files because every question to a lens has its shapes and an example beside it.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multihead import steps
from multihead.attention import compute, largest, prepare
from multihead.call import Arguments, Call, without_autocast
from multihead.lens import plots, statistics
from multihead.lens.gradient import Refusal, columns_with_gradient, masked_scores, sinks_of
from multihead.lens.kept import BLOCK, Blocks
from multihead.lens.picture import draw_lens
from multihead.lens.region import At, Region, Scan
from multihead.lens.selections import Chosen, Selection, choose, count, take
from multihead.lens.statistics import State
from multihead.lens.why import Origin, Why, resolve, split
from multihead.masks import Mask
from multihead.masks.intervals import Visible
from multihead.sizes import describe, require_int
from multihead.tensors import require_storage

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def look(
    q: Tensor,
    k: Tensor,
    mask: Mask | Visible | Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    lse: Tensor | None = None,
) -> "Lens":
    """A lens on the weights that `attend` uses for the same arguments, but for dropout.

    Nothing is computed yet: the lens keeps q and k, not copies of them, and computes what it is asked for.

    Args:
        q: queries (B,H,Q,D).
        k: keys (B,G,K,D), where G divides H: query head h reads key head h // (H//G).
        mask: what each query may see, as in `attend`; `scale`, `softcap`, `sinks` and `bias` too.
        scale: factor of the scores, 1/√D unless given.
        softcap: scores become softcap · tanh(scores / softcap).
        sinks: (H,) a logit for each head that joins the softmax's denominator.
        bias: added to the scores; broadcasts right-aligned to (B,H,Q,K). −inf hides.
        lse: (B,H,Q) from `attend(..., return_lse=True)`, which saves a pass over the scores. A rounded number cannot
            be unrounded: its rounding, up to |lse|·2⁻²⁴ in float32 and |lse|·2⁻⁵² in float64, is a relative error of
            every weight then, and where another backend computed it so is the difference between two ways of rounding
            a score; but not of whole rows (`rows`, `weights`), which are divided by their sum. Without it the lens
            keeps what the pass found, unrounded.

    >>> q, k, v = torch.randn(1, 8, 4096, 64), torch.randn(1, 2, 4096, 64), torch.randn(1, 2, 4096, 64)
    >>> out, lse = mh.attend(q, k, v, mask=mh.Causal(), return_lse=True)
    >>> lens = mh.look(q, k, mask=mh.Causal(), lse=lse)
    >>> lens.rows(-1).shape, lens.map(64, 64, keys=range(4000, 4096)).shape
    (torch.Size([1, 8, 1, 4096]), torch.Size([1, 8, 64, 64]))
    """
    return Lens(prepare(Arguments(q, k, k, mask, scale, softcap, sinks, bias)), lse)


def attend_with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Visible | Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """What `attend` gives, and all weights before dropout, (B,H,Q,K), float32 or wider; neither has a gradient.

    Asking for weights never changes which kernel runs. Where it is the native one, it gives them itself.
    """
    given = Arguments(q, k, v, mask, scale, softcap, sinks, bias, dropout, want_lse=True)
    out, lse, _, weights = compute(given, want_weights=True)
    if weights is None:
        weights = look(q, k, mask, scale=scale, softcap=softcap, sinks=sinks, bias=bias, lse=lse).weights()
    return out, weights


class Lens:
    """Attention weights and what they add up to, computed when asked for; made by `mh.look` or `layer.look`.

    Shapes have a batch axis always. Heads, queries and keys are selected by an int (its axis stays), a slice, a range,
    a list or a tensor of integers; negative ones count from the end. A hidden weight is 0. Results are float32, or
    float64 for float64.

    `rows`, `columns` and `weights` are differentiable; `max_logit` and `why` have no gradient. The others are computed
    tile by tile and forget the tiles, so their results refuse `backward`, in words, where q or k ask for a gradient.
    """

    def __init__(self, call: Call, lse: Tensor | None = None) -> None:
        self._call = call
        self._with_gradient = Region.of(call)
        self._region = self._with_gradient.detach()
        self._given = None if lse is None else _checked(lse, self._region)
        self._lse = None if self._given is None else self._given.detach()
        self._by: ModuleType | None = None  # who computed what is kept
        self._state: State | None = None
        self._blocks: Blocks | None = None
        self._scanned: Scan | None = None
        self._received: Tensor | None = None
        self.origin: Origin | None = None  # where q and k came from, if that is known

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, Q, K)."""
        return self._region.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of what the lens gives: float32, or float64 for float64."""
        return self._region.exact

    @property
    def device(self) -> torch.device:
        return self._region.q.device

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps: q and k, which may be shared with others, and what it has computed so far."""
        part, found = self._region, self._scanned
        kept = [part.q, part.k, part.bias, part.dense, self._lse, self._received, *(found or ())[1:]]
        kept.append(None if self._state is None else self._state.numbers)
        known = self._blocks.nbytes if self._blocks is not None else 0
        return known + sum(t.nbytes for t in kept if t is not None)

    def allowed(self, at: At) -> Tensor:
        """What the mask lets be seen in a tile: bool, broadcasts to the tile. See `tiles`."""
        return self._region.allowed(at)

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp of each query, (B,H,Q), sinks included; −inf where nothing is seen."""
        lse = self._state_of().lse(self._region) if self._lse is None else self._lse.to(self.dtype, copy=True)
        return self._refuse_gradient("lse", lse)

    def max_logit(self) -> Tensor:
        """The largest score of each head, (B,H), after scale, softcap, bias and mask: −inf where nothing is seen.

        The sink does not count, and it has no gradient; `attend(…, return_max_logit=True)` gives it with the output.
        """
        with without_autocast(self.device):
            return largest.of_scores(self._call)

    @torch.no_grad()
    def why(self, query: int, key: int, head: int, batch: int = 0) -> Why:
        """Why `query` attends to `key` in `head`: its score, split into terms that add up to it. Print it.

        By dimension of the head always; by RoPE frequency and by source where the lens comes from a layer, and in the
        models of this package by every source (embedding, each earlier layer's heads and MLP, biases).

        >>> layer, x = mh.MultiHeadAttention(32, heads=4, rope=True), torch.randn(5, 32)
        >>> why = layer.look(x, mask=mh.Causal()).why(query=3, key=1, head=2)
        >>> why.sources, why.terms.shape, why.frequencies.shape, why.dimensions.shape
        (['x', 'bias'], torch.Size([2, 2]), torch.Size([4]), torch.Size([8]))
        >>> all(abs(float(t.sum()) - why.score) < 1e-5 for t in (why.terms, why.frequencies, why.dimensions))
        True
        """
        place = b, h, i, j = resolve(self.shape, batch, head, query, key)
        part = self._region.select(*self._choose(h, i)[:2])
        masked, weight = float(masked_scores(part)[b, 0, 0, j]), float(self.rows(i, h)[b, 0, 0, j])
        return split(place, part.q[b, 0, 0], part.k[b, 0, j], part.scale, masked, weight, self.origin)

    def rows(self, queries: Selection, heads: Selection = None) -> Tensor:
        """All weights of some queries: (B,H,q,K)."""
        h, q, _ = self._choose(heads, queries)
        if self._call.needs_grad:
            part = self._with_gradient.select(h, q)
            with without_autocast(part.q.device):
                return steps.weigh(masked_scores(part), sinks_of(part))[0]
        part = self._region.select(h, q)
        weights = statistics.weights(part, self._state_of(h, q))
        return weights if self._lse is None else _divided(weights, part.sinks, take(take(self._lse, 1, h), 2, q))

    def columns(self, keys: Selection, heads: Selection = None) -> Tensor:
        """How much every query attends to some keys: (B,H,Q,k)."""
        h, _, k = self._choose(heads, None, keys)
        if self._call.needs_grad:
            part = self._with_gradient.select(h)
            with without_autocast(part.q.device):
                if self._given is None or not self._given.requires_grad:
                    return columns_with_gradient(part, k)
                lse = take(self._given, 1, h).to(part.exact)
                lse = lse.masked_fill(lse == -torch.inf, 0)  # nothing is seen: −inf − −inf is no number
                return torch.exp(masked_scores(part.select(keys=k)) - lse[..., None])
        return statistics.weights(self._region.select(h, None, k), self._state_of(h))

    def weights(self, heads: Selection = None) -> Tensor:
        """All weights, (B,H,Q,K): the one result that takes O(Q·K) memory."""
        return self.rows(None, heads)

    def map(
        self,
        height: int,
        width: int,
        queries: Selection = None,
        keys: Selection = None,
        pool: str = "mean",
        heads: Selection = None,
    ) -> Tensor:
        """The weights of these queries and keys as a picture, (B,H,height,width), of any resolution.

        Bins are those of torch's adaptive pooling; where there are fewer queries or keys than bins, they repeat.

        Args:
            height: bins of queries.
            width: bins of keys.
            queries: which; all unless given. With `keys`, this zooms in, down to single weights.
            keys: which; all unless given.
            pool: "mean", or "max", which keeps single large weights visible.
            heads: which; all unless given.

        >>> q = k = torch.randn(1, 2, 3000, 16)
        >>> lens = mh.look(q, k, mask=mh.Causal())
        >>> lens.map(20, 30).shape, lens.map(5, 5, queries=range(2995, 3000), keys=range(5), pool="max").shape
        (torch.Size([1, 2, 20, 30]), torch.Size([1, 2, 5, 5]))
        """
        require_int("height", height, 1)
        require_int("width", width, 1)
        if pool not in ("mean", "max"):
            raise ValueError(f"pool={pool!r}: expected 'mean' or 'max'")
        h, q, k = self._choose(heads, queries, keys)
        for name, chosen in (("queries", q), ("keys", k)):
            if count(chosen) == 0:
                raise ValueError(f"there are no {name} to map: expected at least one")
        part, state = self._region.select(h, q, k), self._state_of(h, q)
        return self._refuse_gradient("map", statistics.pooled(part, state, height, width, pool))

    def top(self, n: int, queries: Selection = None, heads: Selection = None) -> tuple[Tensor, Tensor]:
        """The n largest weights of each query and their keys, (B,H,Q,n) each, largest first.

        Ties go to the lowest key. Where a query sees fewer than n keys, the rest has weight 0 and key −1.

        Args:
            n: how many.
            queries: which; all unless given.
            heads: which; all unless given.

        >>> q = k = torch.randn(1, 2, 3000, 16)
        >>> weights, keys = mh.look(q, k, mask=mh.Causal()).top(5, queries=-1, heads=0)
        >>> weights.shape, keys.shape
        (torch.Size([1, 1, 1, 5]), torch.Size([1, 1, 1, 5]))
        """
        require_int("n", n, 1)
        h, q, _ = self._choose(heads, queries)
        weights, keys = statistics.top(self._region.select(h, q), self._state_of(h, q), n)
        return self._refuse_gradient("top", weights), keys

    def peak(self) -> tuple[Tensor, Tensor]:
        """The largest weight of each query and its key, (B,H,Q) each; weight 0 and key −1 where nothing is seen.

        Ties go to the lowest key. Shares one pass with `entropy`.
        """
        found = self._scan()
        assert found.peak is not None
        assert found.key is not None
        return self._refuse_gradient("peak", found.peak.clone()), found.key.clone()

    def entropy(self) -> Tensor:
        """−Σ w ln w over the keys of each query, in nats: (B,H,Q).

        The weight of a sink is no term of the sum, so the weights in it may add up to less than 1.
        """
        entropy = self._scan().entropy
        assert entropy is not None
        return self._refuse_gradient("entropy", entropy.clone())

    def received(self) -> Tensor:
        """How much attention each key gets from all queries together: (B,H,K)."""
        if self._received is None:
            self._received = statistics.received(self._region, self._state_of())
        return self._refuse_gradient("received", self._received.clone())

    def mass(self, keys: Selection) -> Tensor:
        """The weight of these keys together, for each query: (B,H,Q). A key given twice counts twice."""
        _, _, k = self._choose(None, None, keys)
        return self._refuse_gradient("mass", statistics.mass(self._region.select(keys=k), self._state_of()))

    def tiles(self, all_heads: bool = False) -> Iterator[tuple[At, Tensor]]:
        """Every weight that may be more than 0, once, a tile at a time: for statistics of one's own.

        Gives where the tile lies, a slice for each axis of (B,H,Q,K), and the tile, which is yours to change.
        `all_heads`: each tile has every head. There is no gradient.

        >>> q = k = torch.randn(1, 2, 2000, 16)
        >>> lens = mh.look(q, k)
        >>> total = sum(tile.square().sum() for _, tile in lens.tiles())
        >>> torch.allclose(total, lens.weights().square().sum())
        True
        """
        yield from statistics.tiles(self._region, self._state_of(), all_heads)

    def plot(self, what: str = "map", **options: Any) -> "Figure":
        """A matplotlib figure; see `multihead.lens.plots`. Needs `pip install "multihead[plot]"`.

        Args:
            what: "map", the weights of each head pooled to at most 256 × 256; "weights", not pooled; "entropy", of
                each head over the queries.
            options: `heads=`, `queries=` and `keys=` (selections), `batch=` (a row of the batch, 0 unless given), and
                for a map `height=`, `width=`, `pool=`.
        """
        return plots.plot(self, what, **options)

    def draw(
        self, height: int = 16, width: int = 16, pool: str = "mean", heads: Selection = None, batch: int = 0
    ) -> str:
        """The weights of each head as text, for a terminal: queries down, keys across.

        >>> print(mh.look(torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 3, 8), mask=mh.Causal()).draw())
        weights, in percent; query down, key across
        head 0
        0  100   ·   ·
        1   50  50   ·
        2   33  33  33
        """
        return draw_lens(self, height, width, pool, heads, batch)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """In a notebook: the explorer's widget, or a still picture."""
        from multihead.explorer.notebook import mimebundle

        return mimebundle(self)

    def _repr_html_(self) -> str:
        """The still picture, for what knows nothing but HTML."""
        from multihead.explorer.still import still

        return still(self)

    def _display_(self) -> Any:
        """The same in marimo."""
        from multihead.explorer.notebook import display

        return display(self)

    def __repr__(self) -> str:
        (B, H, Q, K), k = self.shape, self._call.k
        heads = f"H={H}" if k.shape[1] == H else f"H={H}, G={k.shape[1]}"
        return f"Lens(B={B}, {heads}, Q={Q}, K={K}, {str(k.dtype).removeprefix('torch.')} on {k.device})"

    def _choose(self, heads: Selection, queries: Selection, keys: Selection = None) -> tuple[Chosen, Chosen, Chosen]:
        (_, H, Q, K), device = self.shape, self._call.q.device
        return (
            choose("heads", heads, H, device),
            choose("queries", queries, Q, device),
            choose("keys", keys, K, device),
        )

    def _chosen(self) -> ModuleType:
        """Who computes now; what others have left is forgotten."""
        by = statistics.chosen(self._region)
        if self._by is not by:
            self._by, self._state, self._blocks = by, None, None
        return by

    def _state_of(self, heads: Chosen | None = None, queries: Chosen | None = None) -> State:
        """The state of some heads' queries; kept where it had to be computed for many of them."""
        (_, H, Q, _), by = self.shape, self._chosen()
        heads, queries = slice(0, H) if heads is None else heads, slice(0, Q) if queries is None else queries
        if self._lse is not None:
            part = self._region.select(heads, queries)
            return State.of_lse(part, by, take(take(self._lse, 1, heads), 2, queries))
        if self._state is None and (count(heads), count(queries)) != (H, Q):
            if isinstance(heads, slice) and isinstance(queries, slice) and count(queries) >= BLOCK and count(heads):
                self._blocks = Blocks(self._region, by) if self._blocks is None else self._blocks
                return self._blocks.state(heads, queries)
            part = self._region.select(heads, queries)
            return State(by, statistics.scan(part, by, entropy_and_peak=False).state)
        if self._state is None:
            self._state = State(by, statistics.scan(self._region, by, entropy_and_peak=False).state)
        return self._state.select(heads, queries)

    def _scan(self) -> Scan:
        if self._scanned is None:
            by, given = self._chosen(), self._lse is not None
            self._scanned = statistics.scan(self._region, by, self._state_of() if given else None)
            if not given:
                self._state = State(by, self._scanned.state)
        return self._scanned

    def _refuse_gradient(self, name: str, result: Tensor) -> Tensor:
        if not self._call.needs_grad:
            return result
        sources = [t for t in (self._call.q, self._call.k, self._call.sinks, self._call.bias) if t is not None]
        return Refusal.apply(name, result, *sources)


def _checked(lse: Tensor, region: Region) -> Tensor:
    if not isinstance(lse, Tensor) or not lse.dtype.is_floating_point:
        what = describe(lse) if isinstance(lse, Tensor) else type(lse).__name__
        raise TypeError(f"lse is {what}: expected a floating tensor (B,H,Q), as attend(..., return_lse=True) gives it")
    require_storage("lse", lse)
    if lse.shape != region.shape[:3] or lse.device != region.q.device:
        raise ValueError(f"lse is {describe(lse)}: expected (B,H,Q)={region.shape[:3]} on {region.q.device}")
    return lse.to(region.wide).masked_fill(lse == torch.inf, torch.nan)  # a visible inf: no weights to speak of


def _divided(weights: Tensor, sinks: Tensor | None, lse: Tensor) -> Tensor:
    """Whole rows by their own sum, the sink's share in it: so that the rounding of a given lse cancels."""
    total = weights.sum(-1)
    if sinks is not None:
        total = total + torch.exp(sinks[:, None] - lse).to(total.dtype)
    known = total.isfinite() & (total > 0)  # not where nothing is seen, or a NaN
    return weights.div_(total.where(known, 1)[..., None])

"""Step 2: mistakes in splitting the heads, and in what makes q and k ready to meet: QK-norm and RoPE."""

from collections.abc import Iterable

from multihead.doctor.cause import Cause, Changes, Setting, Ways, when
from multihead.doctor.norms import spellings, word


def _by_view(how: str) -> Ways:
    def ways(setting: Setting) -> Iterable[tuple[str, Changes]]:
        if setting.weights.sizes.H > 1:
            yield "", {"split": how}
            for letters in ("q", "k", "v", "qk", "kv"):
                yield f"(of {' and '.join(letters)} alone)", {"split": how, "split_of": letters}

    return ways


def _restarted(setting: Setting) -> Iterable[tuple[str, Changes]]:
    if setting.weights.rope is None:
        return
    yield "with every token, for q", {"rope": "restart:q1"}
    yield "with every token", {"rope": "restart:1"}
    for chunk in range(2, min(max(setting.call.sizes[1:]), 33)):
        yield f"after {chunk} items", {"rope": f"restart:{chunk}"}
        yield f"at 0 from item {chunk} on", {"rope": f"stand still:{chunk}"}
        yield f"after {chunk} items, for q", {"rope": f"restart:q{chunk}"}
        yield f"at 0 from item {chunk} on, for q", {"rope": f"stand still:q{chunk}"}


def _backwards(setting: Setting) -> Iterable[tuple[str, Changes]]:
    if setting.weights.rope is not None:
        for detail, how in (("(k)", "backwards:1"), ("(q and k)", "backwards"), ("(q)", "backwards:0")):
            yield detail, {"rope": how}


def _another_base(setting: Setting) -> Iterable[tuple[str, Changes]]:
    rope = setting.weights.rope
    for base in BASES if rope is not None else ():
        if rope is not None and base != rope.base:
            yield f"({base:,.0f})", {"rope": f"base:{base}"}


def _another_scaling(setting: Setting) -> Iterable[tuple[str, Changes]]:
    rope = setting.weights.rope
    if rope is None:
        return
    if rope.scaling is not None:
        yield "(none)", {"rope": "unscaled"}
    for kind, factors in (("linear", (2, 4, 8, 0.5, 16)), ("ntk", (2, 4, 8)), ("llama3", (8, 32, 4))):
        for factor in factors:
            yield f"({kind}, factor {factor:g})", {"rope": f"{kind}:{factor}"}


def _rope(setting: Setting) -> bool:
    return setting.weights.rope is not None


def _norm(setting: Setting) -> bool:
    return setting.weights.norm is not None


def _plain(setting: Setting) -> bool:
    w = setting.weights
    return w.sizes.H == w.sizes.G > 1 and w.rope is None and w.norm is None and w.sinks is None


def _added(setting: Setting) -> Iterable[tuple[str, Changes]]:
    """Norms of the candidate's own first: one for q and one for k, or one for both."""
    if _norm(setting):
        return
    own = setting.weights.of_heads
    kinds = [(f"own {n}", f"own {n + 1}") for n in range(len(own) - 1)]
    kinds += [(text, text) for text in spellings(len(own))]
    orders = ("added", "turned") if own and _rope(setting) else ("added",)
    for letters, said in (("qk", "q and k"), ("q", "q alone"), ("k", "k alone")):
        for q, k in kinds:
            for order in orders:
                detail = f"({word(q, own)} on {said}{', after RoPE' if order == 'turned' else ''})"
                yield detail, {"norm": f"{order} {q}, {k}", "norm_of": letters}


def _among_heads(setting: Setting) -> Iterable[tuple[str, Changes]]:
    call, w = setting.call, setting.weights
    if call.context is None and w.sizes.H > 1 and w.softcap is None and w.sinks is None:
        for merge in ("transpose", "view"):
            yield "", {"over": "heads", "merge": merge}
            if setting.masked:
                yield "", {"over": "heads, causal", "merge": merge}


BASES = (1e4, 5e5, 1e6, 1.6e5, 1e3, 1e2, 1e5, 5e6, 1e7, 1e8)

_OFF_BY_ONE = (
    "RoPE turns q and k by their positions, and q·k sees the difference only. Here one of the two counts from one more "
    "or one less than the other (one from 0 and one from 1, or the position of the next token), so every distance is "
    "off by one. Moving q one ahead and k one behind give the same numbers and cannot be told apart."
)

CAUSES = (
    Cause(
        "heads split by view without transpose",
        2,
        "The projection's output is (B, N, H·D): item by item. `view(B, H, N, D)` does not move heads in front of "
        "positions, it cuts the same memory differently: “head 0” gets all heads of the first items. The shape is "
        "right, so nothing complains.",
        "q = q.view(B, N, H, D).transpose(1, 2)           # not q.view(B, H, N, D)",
        _by_view("view"),
    ),
    Cause(
        "heads interleaved (D, H) instead of (H, D)",
        2,
        "The H·D numbers of an item are head 0's D numbers, then head 1's, …. Here they are read as D groups of H: "
        "head h takes every H-th number. A layer trained like this is consistent with itself; weights from elsewhere "
        "are not.",
        "q = q.view(B, N, H, D).transpose(1, 2)           # not view(B, N, D, H)",
        _by_view("interleaved"),
    ),
    Cause(
        "heads not split",
        2,
        "q, k and v meet as they come out of the projections, (B, N, H·D): one head as wide as the model, with one "
        "pattern of weights where H were asked for. Every shape fits.",
        "q, k, v = (t.view(B, N, H, D).transpose(1, 2) for t in (q, k, v))",
        when(_plain, {"split": "none", "scale": "√HD"}, {"split": "none"}),
    ),
    Cause(
        "attention over the heads axis",
        2,
        "q, k and v are (B, N, H, D) when they meet: the heads were never moved in front of the positions, so those of "
        "one item attend to one another, and no item reads another. `scaled_dot_product_attention` takes (B, H, N, D); "
        "every shape fits, so nothing complains.",
        "q, k, v = (t.view(B, N, H, D).transpose(1, 2) for t in (q, k, v))",
        _among_heads,
        paired=0,
    ),
    Cause(
        "RoPE pairs halves against interleaved",
        2,
        "RoPE turns pairs of numbers. Which numbers make a pair is a convention: p and p + D/2 (“halves”: GPT-NeoX, "
        "Llama in Hugging Face's layout) or 2p and 2p + 1 (“interleaved”: the paper, GPT-J, Llama in Meta's layout). "
        "The implementation uses the other one than the weights were trained for.",
        "q1, q2 = q[..., : D // 2], q[..., D // 2 :]      # halves\n"
        "q1, q2 = q[..., 0::2], q[..., 1::2]              # interleaved\n"
        'mh.RoPE(pairing="interleaved")                   # or permute the rows of W_q and W_k when converting',
        when(_rope, {"rope": "other pairing"}),
    ),
    Cause(
        "RoPE turned backwards",
        2,
        "The sign of the sine is the wrong way round, for k alone, for q alone or for both. With one of them backwards "
        "q·k sees the sum of the two positions instead of their difference; with both, a distance has the wrong sign.",
        "a, b = x[..., : D // 2], x[..., D // 2 :]\n"
        "turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)      # the same for q and k",
        _backwards,
        paired=3,
    ),
    Cause(
        "RoPE pairs one way, its angles laid out the other",
        2,
        "The cosines and sines stand as one pairing has them (each frequency twice in a row, or all of them and then "
        "all again), and the numbers are paired as in the other: the two of a pair turn by different angles, which is "
        "no rotation.",
        "cos, sin = (torch.cat([a, a], dim=-1) for a in (cos, sin))              # with rotate_half\n"
        "cos, sin = (a.repeat_interleave(2, dim=-1) for a in (cos, sin))         # with pairs 2p, 2p + 1",
        when(_rope, {"rope": "crossed:pairs"}, {"rope": "crossed:angles"}),
        paired=0,
    ),
    Cause(
        "RoPE without its minus",
        2,
        "Turning a pair (a, b) gives (a·cos − b·sin, b·cos + a·sin). Here both are added, which is no rotation: "
        "lengths change, and scores depend on where items stand.",
        "rotated = torch.cat([-x2, x1], dim=-1)           # rotate_half: the first half is minus the second",
        when(_rope, {"rope": "no minus"}),
        paired=0,
    ),
    Cause(
        "RoPE along the heads instead of the items",
        2,
        "The angle grows with the number of the head: q and k were (B, N, H, D) where the rotation takes the last axis "
        "but one for the items', as on (B, H, N, D). All items of a head turn alike: their order is lost. Where G is "
        "H, q and k turn alike as well, which is the same as no RoPE.",
        "q = rotate(q.transpose(1, 2))    # (B, H, N, D): items on the last axis but one",
        when(lambda s: _rope(s) and s.weights.sizes.G < s.weights.sizes.H, {"rope": "along heads"}),
        paired=0,
    ),
    Cause(
        "RoPE with another base",
        2,
        "The pairs turn by base^(−2p/D) radians per position, and the base is not the reference's: 10,000 in the "
        "paper, 500,000 in Llama 3, 1,000,000 in Qwen 2 and Mixtral, 160,000 in ModernBERT.",
        "mh.RoPE(base=…)                  # rope_theta in a Hugging Face configuration",
        _another_base,
        paired=3,
    ),
    Cause(
        "RoPE with another scaling",
        2,
        "The rotation is stretched for longer sequences (linear, NTK-aware, Llama 3), and here it is stretched "
        "otherwise, or not at all.",
        "mh.RoPE(scaling=mh.positions.LinearScaling(4.0)) # rope_scaling, or rope_parameters, in the configuration",
        _another_scaling,
    ),
    Cause(
        "RoPE applied to v",
        2,
        "RoPE turns q and k, so that their product knows the distance. The values carry content and are mixed as they "
        "are: here they are turned too.",
        "q, k = rope(q), rope(k)          # v stays as it is",
        when(lambda s: _rope(s) and s.weights.sizes.V == s.weights.sizes.D, {"rope": "on v"}),
    ),
    Cause(
        "RoPE missing",
        2,
        "The reference turns q and k by their positions, this implementation does not (or every position is 0, or the "
        "angle grows along the heads instead of the items): it cannot tell the order of the items.",
        "q, k = rope.rotate(q, positions), rope.rotate(k, positions)",
        when(_rope, {"rope": "none"}),
    ),
    Cause(
        "RoPE positions restarted",
        2,
        "Positions start from 0 again where they should go on: typically a decoding loop that turns each new token as "
        "if it were the first (`arange(x.shape[1])` with one token is always 0), or a chunk that forgets how many "
        "tokens the cache holds.",
        "positions = torch.arange(N) + cache.length",
        _restarted,
        paired=2,
    ),
    Cause(
        "RoPE applied to q alone or to k alone",
        2,
        "Only one of q and k is turned, so that scores depend on where an item stands, not on how far apart two are.",
        "q, k = rope.rotate(q, positions), rope.rotate(k, positions)",
        when(_rope, {"rope": "q only"}, {"rope": "k only"}),
    ),
    Cause(
        "RoPE positions off by one for q",
        2,
        _OFF_BY_ONE,
        "positions = torch.arange(N)      # one and the same for q and k",
        when(_rope, {"rope": "shift:0+1"}, {"rope": "shift:0-1"}),
    ),
    Cause(
        "RoPE positions off by one for k",
        2,
        _OFF_BY_ONE,
        "positions = torch.arange(N)      # one and the same for q and k",
        when(_rope, {"rope": "shift:1+1"}, {"rope": "shift:1-1"}),
    ),
    Cause(
        "RoPE applied after the cache",
        2,
        "Keys were turned, stored, and then turned again when they were read: the cache must hold keys that are turned "
        "once (rotate, then append), or never (append, then rotate everything by its own position).",
        "k = rope.rotate(k, positions)    # the new keys only,\nk = torch.cat([cache, k], dim=2) # which then join",
        when(
            lambda s: _rope(s) and s.call.context is None and s.call.sizes[1] <= 64,
            {"rope": "twice"},
            {"rope": "every step:1"},
            {"rope": "every step:2"},
        ),
    ),
    Cause(
        "QK-norm missing",
        2,
        "The reference normalises each head's q and k (RMS over D) before they meet; here they meet as they are.",
        "q, k = q_norm(q), k_norm(k)      # on (B, H, N, D), before RoPE",
        when(_norm, {"norm": "none"}, {"norm": "q only"}, {"norm": "k only"}),
    ),
    Cause(
        "QK-norm where the reference has none",
        2,
        "Each head's q and k are normalised before they meet (as in Qwen 3, OLMo 2 or ViT-22B), and the reference "
        "takes them as they are: the scores no longer grow with the length of q and k.",
        "scores = q @ k.transpose(-2, -1) / math.sqrt(D)  # or a reference with qk_norm=True",
        _added,
    ),
    Cause(
        "QK-norm centred (LayerNorm) instead of RMSNorm",
        2,
        "The norm of q and k takes the mean away first, as LayerNorm does (and timm's `qk_norm` unless told "
        "otherwise); the reference has an RMSNorm, which only divides by the root of the mean square.",
        "self.q_norm, self.k_norm = nn.RMSNorm(D), nn.RMSNorm(D)",
        when(_norm, {"norm": "centred"}),
        paired=1,
    ),
    Cause(
        "QK-norm over the wrong axis",
        2,
        "Each head's vector of D numbers is normalised on its own. Here the mean square is taken over another axis: "
        "all heads together (before they are split), the positions, or the heads.",
        "nn.RMSNorm(D)(q)                 # q (B, H, N, D): over the last axis, after the split",
        when(_norm, {"norm": "flat"}, {"norm": "positions"}, {"norm": "heads axis"}),
    ),
    Cause(
        "QK-norm after RoPE",
        2,
        "The norm's weight scales each of the D numbers, and RoPE mixes them in pairs: the order matters. The norm "
        "comes first.",
        "q = rope.rotate(q_norm(q), positions)",
        when(lambda s: _norm(s) and _rope(s), {"norm": "after rope"}),
    ),
    Cause(
        "QK-norm with another eps",
        2,
        "The small number that is added to the mean square before its root is not the reference's.",
        "nn.RMSNorm(D, eps=1e-6)          # the eps the weights were trained with",
        lambda s: [(f"({eps:g})", {"eps": eps}) for eps in (0.0, 1e-12, 1e-8, 1e-5, 1e-4, 1e-3) if _norm(s)],
        paired=0,
    ),
)

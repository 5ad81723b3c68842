"""Step 3: mistakes in the scores and in the softmax."""

from collections.abc import Iterable

from multihead.doctor.cause import Cause, Changes, Setting, Ways, one, when


def _scale(how: str) -> Ways:
    return one(scale=how)


def _axis(axis: str) -> Ways:
    def ways(setting: Setting) -> Iterable[tuple[str, Changes]]:
        if axis != "heads" or setting.weights.sizes.H > 1:
            yield "", {"axis": axis}
            if setting.masked:  # what is hidden for all of the wrong axis: NaN with −inf, even with a finite number
                yield "", {"axis": axis, "value": -1e30}

    return ways


def _alibi(setting: Setting) -> Iterable[tuple[str, Changes]]:
    H = setting.weights.sizes.H
    for how, said in FADING.items():
        alike = (how == "by H" and not H & (H - 1)) or (how == "signed" and setting.masked)
        if not alike:
            yield said and f"({said})", {"bias": how}


FADING = {
    "alibi": "",
    "signed": "later keys gain",
    "from 1": "slopes from 1 on",
    "by H": "slopes 2^(−8h/H), though H is no power of two",
    "growing": "growing with the distance",
}
SUNK = {
    "unshifted": "without the row's largest score taken away",
    "scaled": "times the scale",
    "negated": "negated",
    "head 0": "head 0's for all",
    "twice": "twice",
}

CAUSES = (
    Cause(
        "scale missing",
        3,
        "Scores are not divided by √D. A product of D numbers grows like √D, so the softmax becomes nearly one-hot: "
        "the layer looks at one item only, and gradients vanish.",
        "scores = q @ k.transpose(-2, -1) / math.sqrt(D)",
        _scale("none"),
    ),
    Cause(
        "scale by √E instead of √D",
        3,
        "Scores are divided by the root of the model's width E instead of the root of the head's width D. They come "
        "out √H times too small, and the weights too even.",
        "scores = q @ k.transpose(-2, -1) / math.sqrt(D)  # D = E // H, q.shape[-1]",
        _scale("√E"),
    ),
    Cause(
        "scale by D instead of √D",
        3,
        "Scores are divided by D; that is the same as dividing twice by √D (once in q or in the weights, once in the "
        "scores). The weights come out too even.",
        "scores = q @ k.transpose(-2, -1) / math.sqrt(D)  # once, and with the root",
        _scale("D"),
    ),
    Cause(
        "scale multiplied instead of divided",
        3,
        "Scores are multiplied by √D where they should be divided by it.",
        "scores = q @ k.transpose(-2, -1) / math.sqrt(D)",
        _scale("times √D"),
    ),
    Cause(
        "scale by another size",
        3,
        "Scores are divided by a number that is made of another axis than the head's width.",
        "scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])",
        lambda s: [(f"({how})", {"scale": how}) for how in ("E", "√H", "H", "√K")],
        paired=0,
    ),
    Cause(
        "scale is 1/√D, the reference has its own",
        3,
        "The reference was made with a scale of its own (`scale=`), and this implementation divides by √D.",
        "scores = q @ k.transpose(-2, -1) * scale",
        when(lambda s: abs(s.weights.scale - s.weights.sizes.D**-0.5) > 1e-9, {"scale": "1/√D"}),
    ),
    Cause(
        "scale after the softmax",
        3,
        "The weights are divided by √D instead of the scores: the softmax sees scores √D times too large, and a row's "
        "weights add up to 1/√D.",
        "weights = (q @ k.transpose(-2, -1) / math.sqrt(D)).softmax(dim=-1)",
        _scale("after"),
        paired=1,
    ),
    Cause(
        "softmax over queries",
        3,
        "The softmax runs over the queries' axis: each column adds up to 1 instead of each row, so an output row is no "
        "longer a mean of values.",
        "weights = scores.softmax(dim=-1)                 # scores (B, H, Q, K): over keys",
        _axis("queries"),
    ),
    Cause(
        "softmax over heads",
        3,
        "The softmax runs over the heads' axis: heads compete for each pair of items instead of keys competing for "
        "each query.",
        "weights = scores.softmax(dim=-1)                 # scores (B, H, Q, K): over keys",
        _axis("heads"),
    ),
    Cause(
        "softmax over the batch",
        3,
        "The softmax runs over the batch axis: what one sequence gets depends on its neighbours in the batch, and with "
        "a batch of one all weights are 1. `softmax(scores, 0)`, or `nn.Softmax()` without a `dim`, does that.",
        "weights = scores.softmax(dim=-1)                 # scores (B, H, Q, K): over keys",
        _axis("batch"),
    ),
    Cause(
        "softmax missing",
        3,
        "The scores themselves are used as weights: they are not positive and do not add up to 1.",
        "weights = scores.softmax(dim=-1)",
        one(axis="none"),
    ),
    Cause(
        "softmax twice",
        3,
        "The weights go through a softmax again. They lie between 0 and 1, so what comes out is nearly even, and what "
        "was hidden is seen again. Often one softmax is in a helper, or in the loss's habit of taking logits.",
        "weights = scores.softmax(dim=-1)                 # once",
        one(axis="twice"),
        paired=0,
    ),
    Cause(
        "one more in the softmax's denominator",
        3,
        "Each row's denominator has 1 added to it, as a sink with the logit 0 would: the weights of a row add up to "
        "less than 1. That is a design of its own (softmax-off-by-one), and the reference was not made with it; or a "
        "number that was to keep from dividing by 0.",
        "weights = scores.softmax(dim=-1)                 # or a reference with sinks=True, its sinks 0",
        when(lambda s: s.weights.sinks is None, {"axis": "one more"}),
        paired=0,
    ),
    Cause(
        "sigmoid for softmax",
        3,
        "Each score goes through a sigmoid by itself: keys do not compete, and a row's weights add up to anything.",
        "weights = scores.softmax(dim=-1)",
        one(axis="sigmoid"),
        paired=0,
    ),
    Cause(
        "softmax to the base 2",
        3,
        "2 is raised to the scores instead of e: they count for ln 2 = 0.69 of what they should. Kernels use exp2 for "
        "speed, and multiply the scores by log₂ e first.",
        "raised = torch.exp2(scores * math.log2(math.e))",
        one(axis="base 2"),
        paired=0,
    ),
    Cause(
        "q and k of length 1",
        3,
        "q and k are divided by their lengths, so that a score is a cosine: between −1 and 1 before the scale, and the "
        "weights come out nearly even. The reference takes them as they are.",
        "scores = q @ k.transpose(-2, -1) / math.sqrt(D)  # no F.normalize; or a reference with qk_norm=True",
        lambda s: (
            [
                ("", {"norm": "unit"}),
                ("(q alone)", {"norm": "unit", "norm_of": "q"}),
                ("(k alone)", {"norm": "unit", "norm_of": "k"}),
            ]
            if s.weights.norm is None
            else []
        ),
        paired=1,
    ),
    Cause(
        "GQA: k and v repeated in two ways",
        3,
        "Of k and v one is repeated so that head h reads head h // (H/G), the other so that it reads h % G: a head "
        "weighs by one head's keys and takes another's values.",
        "k, v = (t.repeat_interleave(H // G, dim=1) for t in (k, v))      # (B, G, K, D) → (B, H, K, D)",
        lambda s: (
            [(f"(`repeat` of {name})", {"repeat": f"all of {name}"}) for name in "kv"]
            if 1 < s.weights.sizes.G < s.weights.sizes.H
            else []
        ),
        paired=0,
    ),
    Cause(
        "GQA: every head reads the first",
        3,
        "All query heads read key/value head 0, as broadcasting `k[:, :1]` does; the others are never read.",
        "k, v = (t.repeat_interleave(H // G, dim=1) for t in (k, v))      # (B, G, K, D) → (B, H, K, D)",
        when(lambda s: s.weights.sizes.G > 1, {"repeat": "first"}),
        paired=0,
    ),
    Cause(
        "GQA: repeat for repeat_interleave",
        3,
        "With G key/value heads for H query heads, head h reads key/value head h // (H/G): neighbours share. `repeat` "
        "and `expand` on the wrong axis give h % G instead, so most query heads read another head's keys.",
        "k, v = (t.repeat_interleave(H // G, dim=1) for t in (k, v))      # (B, G, K, D) → (B, H, K, D)",
        when(lambda s: 1 < s.weights.sizes.G < s.weights.sizes.H, {"repeat": "all"}),
    ),
    Cause(
        "softcap missing",
        3,
        "The reference caps its scores, softcap · tanh(scores / softcap); here large scores go through as they are.",
        "scores = softcap * torch.tanh(scores / softcap)  # before the mask",
        when(lambda s: s.weights.softcap is not None, {"softcap": "missing"}),
    ),
    Cause(
        "softcap after the mask",
        3,
        "The cap comes after the mask, and tanh turns the −inf of a hidden pair into −softcap: a finite score, so what "
        "is hidden leaks in.",
        "scores = softcap * torch.tanh(scores / softcap)\nscores = scores.masked_fill(~allowed, -torch.inf)",
        when(lambda s: s.weights.softcap is not None and s.masked, {"softcap": "after"}),
    ),
    Cause(
        "softcap in another form",
        3,
        "Scores are held between −softcap and softcap, but not as softcap · tanh(scores / softcap), once.",
        "scores = softcap * torch.tanh(scores / softcap)  # before the mask",
        lambda s: (
            [(f"({how})", {"softcap": how}) for how in ("twice", "clamped", "not multiplied")]
            if s.weights.softcap is not None
            else []
        ),
        paired=0,
    ),
    Cause(
        "ALiBi where the reference has none",
        3,
        "Scores fall with the distance of query and key (ALiBi), and the reference takes them as they are: a layer has "
        "ALiBi only where it is called with `bias=`. Where H is a power of two the slopes are 2^(−8/H), 2^(−16/H), … "
        "2^(−8).",
        "scores = q @ k.transpose(-2, -1) / math.sqrt(D)  # or: layer(x, mask=…, bias=mh.positions.alibi(H, Q, K))",
        _alibi,
        paired=0,
    ),
    Cause(
        "sinks missing",
        3,
        "Each head of the reference has a sink, a learned logit that joins the softmax's denominator; here the weights "
        "of a row add up to 1, so every row takes more than it should.",
        "logits = torch.cat([scores, sinks.view(1, H, 1, 1).expand(B, H, Q, 1)], dim=-1)\n"
        "weights = logits.softmax(dim=-1)[..., :-1]",
        when(lambda s: s.weights.sinks is not None, {"sinks": "missing"}),
    ),
    Cause(
        "sinks in another form",
        3,
        "A sink is a logit beside the scores of a row: the largest of all is taken away from it too, it is not scaled, "
        "and each head has its own. It joins the denominator once.",
        "logits = torch.cat([scores, sinks.view(1, H, 1, 1).expand(B, H, Q, 1)], dim=-1)\n"
        "weights = logits.softmax(dim=-1)[..., :-1]",
        lambda s: [(f"({said})", {"sinks": how}) for how, said in SUNK.items()] if s.weights.sinks is not None else [],
        paired=0,
    ),
)

"""Step 3: mistakes in what is hidden, and in how."""

from collections.abc import Iterable

from multihead.doctor import masking
from multihead.doctor.cause import Cause, Changes, Setting, Ways

FILLS = (-1.0, -10.0, -100.0, -2.0, -3.0, -5.0, -8.0, -9.0, -15.0, -20.0, -25.0, -30.0, -50.0, -1e3, -0.5)


def _kinds(*names: str) -> Ways:
    def ways(setting: Setting) -> Iterable[tuple[str, Changes]]:
        B, Q, K = setting.call.sizes
        found = masking.parts(setting.call.mask)
        for kind in masking.kinds(setting.call.mask, B, Q, K):
            name, _, number = kind.partition("@")
            name, _, keys = name.partition(":")
            if name in names:
                detail = f"({type(found[int(number)]).__name__} alone)" if number else ""
                if name in ("window+1", "window-1"):
                    detail = "(one too wide)" if name == "window+1" else "(one too narrow)"
                detail = f"({keys} keys)" if keys else detail
                yield detail, {"mask": kind}
                wrong = masking.mistaken(kind, setting.call.mask, B, Q, K, setting.call.x.device)
                if not bool(wrong.any(-1).all()):  # some row sees nothing: what becomes of it is a choice of its own
                    for empty in ("nan", "mean", "all", "own"):
                        yield detail, {"mask": kind, "empty": empty}

    return ways


def _hidden(*ways: Changes) -> Ways:
    return lambda setting: [("", way) for way in ways] if setting.masked else []


def _finite(setting: Setting) -> Iterable[tuple[str, Changes]]:
    if setting.masked:
        for value in FILLS:
            for how in ("fill", "add"):
                yield f"({value:g})", {"hide": how, "value": value}


CAUSES = (
    Cause(
        "mask missing",
        3,
        "The mask has no effect: every query sees every key. A causal model then reads the answer it should predict, "
        "or padding is mixed in. Often the masked scores are not assigned back (`masked_fill` without the underscore "
        "returns a new tensor), or the argument never reaches the inner function.",
        "scores = scores.masked_fill(~allowed, -torch.inf)",
        _kinds("missing"),
    ),
    Cause(
        "causal mask where nothing should be hidden",
        3,
        "No query should be kept from any key, and here a query sees no key after its own: the layer is causal by "
        "itself. Encoders, vision transformers and cross-attention see everything.",
        "weights = scores.softmax(dim=-1)                 # no mask; or compare with mask=mh.Causal()",
        _kinds("causal"),
    ),
    Cause(
        "mask polarity inverted",
        3,
        "What should be seen is hidden and what should be hidden is seen. Conventions differ: True means “may attend” "
        "in scaled_dot_product_attention, Keras, Flax and here, and “hide” in nn.MultiheadAttention.",
        "scores = scores.masked_fill(~allowed, -torch.inf)                # allowed: True = may attend",
        _kinds("inverted"),
        paired=4,
    ),
    Cause(
        "causal mask off by one, strict",
        3,
        "Query i sees keys below i but not itself; the first query sees nothing at all. Usually the diagonal of `tril` "
        "or `triu` is off by one.",
        "allowed = torch.ones(N, N, dtype=torch.bool).tril()              # not tril(-1), not ~triu()",
        _kinds("strict"),
        paired=4,
    ),
    Cause(
        "causal mask off by one, one ahead",
        3,
        "Query i sees key i + 1, the very token a language model has to predict. The loss falls wonderfully and the "
        "model generates nonsense. Usually the diagonal of `tril` or `triu` is off by one.",
        "allowed = torch.ones(N, N, dtype=torch.bool).tril()              # not tril(1), not ~triu(2)",
        _kinds("ahead"),
    ),
    Cause(
        "sliding window off by one",
        3,
        "The window holds one key more or one less than it should. `Causal(window=w)` lets a query see w keys, its own "
        "included.",
        "allowed = (key <= i) & (key > i - w)",
        _kinds("window+1", "window-1"),
    ),
    Cause(
        "sliding window missing",
        3,
        "Every query sees all keys up to its own, also those beyond the window: nothing is wrong as long as a sequence "
        "fits into it. Often the window is in the configuration and never reaches the attention function.",
        "allowed = (key <= i) & (key > i - w)",
        _kinds("no window"),
    ),
    Cause(
        "sliding window of another size",
        3,
        "A query sees its newest keys only, as many as are given here, and the reference has a window of another size "
        "or none: mh.Causal(window=…).",
        "allowed = (key <= i) & (key > i - w)             # w: the reference's window; without one, key <= i",
        _kinds("window"),
        paired=0,
    ),
    Cause(
        "causal mask aligned top-left instead of bottom-right",
        3,
        "With more keys than queries (a cache, a context) the last query should see the last key. Here query 0 is "
        "taken to stand at key 0, so that the newest keys are hidden; `is_causal=True` of "
        "scaled_dot_product_attention does that.",
        "allowed = torch.ones(Q, K, dtype=torch.bool).tril(K - Q)",
        _kinds("top-left"),
    ),
    Cause(
        "padding mask on queries instead of keys",
        3,
        "Padding must be hidden as keys: no real item may read it. Here the rows of padded queries are blanked "
        "instead, and every real item still reads the padding. (B, K) has to become (B, 1, 1, K), not (B, 1, K, 1).",
        "allowed = real[:, None, None, :]                 # real (B, K), True = a real item",
        _kinds("on queries"),
        paired=4,
    ),
    Cause(
        "padding mask on queries as well as keys",
        3,
        "Padded keys are hidden, and the rows of padded queries are blanked too. What a padded query puts out is "
        "ignored, so this alone would be harmless.",
        "allowed = real[:, None, None, :]                 # real (B, K), True = a real item",
        _kinds("on queries too"),
        paired=4,
    ),
    Cause(
        "padding mask shared across the batch",
        3,
        "The mask of the first row of the batch is used for all rows: other sequences read padding, or miss items.",
        "allowed = real[:, None, None, :]                 # real (B, K): a row of its own for each sequence",
        _kinds("shared"),
        paired=4,
    ),
    Cause(
        "mask transposed",
        3,
        "The mask's axes are exchanged: where query i may see key j, here query j may see key i. A causal mask becomes "
        "anti-causal.",
        "allowed[i, j]                    # query i, key j: rows are queries",
        _kinds("transposed"),
        paired=4,
    ),
    Cause(
        "mask applied after softmax without renormalising",
        3,
        "The softmax runs over all keys and the hidden weights are zeroed afterwards, so the rows no longer add up to "
        "1: a row that sees few keys comes out too small.",
        "scores = scores.masked_fill(~allowed, -torch.inf)\nweights = scores.softmax(dim=-1)",
        _hidden({"hide": "after"}),
    ),
    Cause(
        "mask added as 0/1",
        3,
        "A mask of zeros and ones is added to the scores. That shifts them by 1; it hides nothing.",
        "scores = scores.masked_fill(~allowed, -torch.inf)",
        _hidden({"hide": "add seen"}, {"hide": "add hidden"}),
    ),
    Cause(
        "mask filled with 0",
        3,
        "Hidden scores are set to 0 (or multiplied by a 0/1 mask). e⁰ is 1, not 0: what is hidden keeps a weight like "
        "any other.",
        "scores = scores.masked_fill(~allowed, -torch.inf)",
        _hidden({"hide": "fill", "value": 0.0}),
    ),
    Cause(
        "mask filled with a finite value too small",
        3,
        "Hidden scores get a finite number that is not far enough below the others, so that hidden keys keep some "
        "weight.",
        "scores = scores.masked_fill(~allowed, -torch.inf)                # or torch.finfo(scores.dtype).min",
        _finite,
    ),
)

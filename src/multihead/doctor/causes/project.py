"""Step 1: mistakes in making q, k and v."""

from collections.abc import Iterable

from multihead.doctor.cause import Cause, Changes, Setting, when
from multihead.doctor.norms import spellings, word
from multihead.masks import Causal


def _names(letters: str) -> str:
    words = [f"W_{letter}" for letter in letters]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _without_bias(setting: Setting) -> Iterable[tuple[str, Changes]]:
    there = {name for name in "qkvo" if (b := setting.weights.b[name]) is not None and bool(b.any())}
    for letters in ("q", "k", "v", "qkv", "qkvo", "qk", "kv", "qv", "qo", "vo", "qvo", "kvo"):
        if set(letters) <= there:
            yield "on " + " and ".join(", ".join(letters).rsplit(", ", 1)), {"unbiased": letters}


def _transposed(setting: Setting) -> Iterable[tuple[str, Changes]]:
    s = setting.weights.sizes
    width = {"q": (s.E, s.H * s.D), "k": (s.C, s.G * s.D), "v": (s.C, s.G * s.V), "o": (s.H * s.V, s.E)}
    for letters in ("qkv", "qkvo", "q", "k", "v", "qk", "kv", "qv"):
        if all(width[name][0] == width[name][1] for name in letters):
            yield f"({_names(letters)})", {"transposed": letters}


def _swapped(setting: Setting) -> Iterable[tuple[str, Changes]]:
    s = setting.weights.sizes
    if s.G == s.H and s.C == s.E:
        yield "", {"roles": "kqv"}
        if setting.weights.norm is not None:
            yield "", {"roles": "kqv", "norm": "right"}


def _crosses(setting: Setting) -> bool:
    return setting.call.context is not None and setting.weights.sizes.C == setting.weights.sizes.E


def _from_x(setting: Setting) -> bool:
    _, Q, K = setting.call.sizes
    return _crosses(setting) and Q == K


def _over_the_batch(setting: Setting) -> Iterable[tuple[str, Changes]]:
    call = setting.call
    plain = call.mask is None or (isinstance(call.mask, Causal) and call.mask.window is None)
    if call.context is None and call.positions is None and plain and call.sizes[:2] != (1, 1):
        yield "", {"over": "batch"}


def _normed(setting: Setting) -> Iterable[tuple[str, Changes]]:
    s, own = setting.weights.sizes, setting.weights.inner
    for place in ("x", "the output", *(["merged heads"] if s.H * s.V == s.E else [])):
        for text in spellings(len(own)):
            yield f"({word(text, own)} on {place})", {"normed": f"{text} on {place}"}


CAUSES = (
    Cause(
        "attention over the batch axis",
        1,
        "(B, N, E) is taken for (N, B, E): the items at one place of all sequences attend to each other, and the items "
        "of a sequence never meet. `nn.MultiheadAttention` and `nn.Transformer` do that unless they are made with "
        "batch_first=True; every shape fits, so nothing complains.",
        "nn.MultiheadAttention(E, H, batch_first=True)    # or give it x.transpose(0, 1), and transpose what comes out",
        _over_the_batch,
        paired=1,
    ),
    Cause(
        "a norm inside",
        1,
        "There is a LayerNorm or an RMSNorm inside, on x, on the merged heads or on the output. In a transformer block "
        "it stands beside attention, not in it: compare without it, or give the reference the normalised x.",
        "x = x + attention(norm(x))       # the norm belongs to the block",
        _normed,
        paired=2,
    ),
    Cause(
        "q and k swapped",
        1,
        "The queries are made with W_k and the keys with W_q (or the scores are k·qᵀ instead of q·kᵀ, which gives the "
        "same numbers in self-attention). Every score s(i, j) becomes s(j, i): item i weighs j by how well j's "
        "question fits i's offer. A layer trained that way works; one whose weights come from elsewhere does not.",
        "q, k = x @ W_q, x @ W_k          # not the other way round\nscores = q @ k.transpose(-2, -1)",
        _swapped,
    ),
    Cause(
        "k and v swapped",
        1,
        "Queries are compared with the values, and the keys are what gets mixed. Usually two arguments or two slices "
        "of a packed projection stand in the wrong order.",
        "scores = q @ k.transpose(-2, -1)\nheads = weights @ v",
        when(lambda s: s.weights.sizes.V == s.weights.sizes.D, {"roles": "qvk"}),
    ),
    Cause(
        "q and v swapped",
        1,
        "The values ask and the queries are mixed: two arguments or two slices of a packed projection stand in the "
        "wrong order.",
        "q, k, v = qkv.chunk(3, dim=-1)   # in the order they were packed",
        when(lambda s: s.square, {"roles": "vkq"}),
    ),
    Cause(
        "k used as v",
        4,
        "The weights mix the keys instead of the values: W_v is never used. Often a copied line whose last letter was "
        "not changed.",
        "heads = weights @ v              # not weights @ k",
        when(lambda s: s.weights.sizes.V == s.weights.sizes.D, {"roles": "qkk"}),
    ),
    Cause(
        "q used as k",
        1,
        "The queries are compared with themselves: W_k is never used. Often a copied line with one letter unchanged.",
        "k = context @ W_k",
        when(
            lambda s: s.weights.sizes.G == s.weights.sizes.H and s.weights.sizes.C == s.weights.sizes.E,
            {"roles": "qqv"},
        ),
    ),
    Cause(
        "v made from x instead of the context",
        1,
        "In cross-attention keys and values both come from the context. Here the values come from x: the weights are "
        "right, and mix the wrong sequence. With another number of keys than queries it would not even run.",
        "k, v = context @ W_k, context @ W_v",
        when(_from_x, {"sources": "xcx"}),
    ),
    Cause(
        "k made from x instead of the context",
        1,
        "In cross-attention keys and values both come from the context. Here the keys come from x: the weights compare "
        "x with itself.",
        "k, v = context @ W_k, context @ W_v",
        when(_from_x, {"sources": "xxc"}),
    ),
    Cause(
        "context ignored",
        1,
        "Keys and values are made from x, as in self-attention: the context is never read.",
        "k, v = context @ W_k, context @ W_v",
        when(lambda s: _from_x(s) or (_crosses(s) and not s.masked), {"sources": "xxx"}),
    ),
    Cause(
        "q made from the context instead of x",
        1,
        "In cross-attention the queries come from x, keys and values from the context. Here all come from the context, "
        "or x and context have changed places.",
        "q = x @ W_q\nk, v = context @ W_k, context @ W_v",
        when(_from_x, {"sources": "ccc"}, {"sources": "cxx"}),
    ),
    Cause(
        "QKV packing: per head against per matrix",
        1,
        "One matrix holds W_q, W_k and W_v. Its rows can be packed per matrix (all of q, then all of k, then all of v: "
        "torch, GPT-2, Llama) or per head (q, k, v of head 0, then of head 1, …: GPT-NeoX, BLOOM, Megatron). It was "
        "packed one way and is read the other, so most heads mix rows of q, k and v. A layer trained like this is "
        "consistent with itself; a checkpoint packed the other way is not.",
        "q, k, v = qkv.view(B, N, 3, H, D).unbind(2)      # packed per matrix\n"
        "q, k, v = qkv.view(B, N, H, 3, D).unbind(3)      # packed per head: choose what the checkpoint has",
        when(lambda s: s.square, {"packing": "per head"}, {"packing": "split"}, {"packing": "innermost"}),
    ),
    Cause(
        "weight used transposed",
        1,
        "A square matrix fits both ways round, so nothing complains. `nn.Linear` stores (out, in) and computes "
        "x @ weight.T; a plain parameter (in, out) is used as x @ W; GPT-2's Conv1D stores (in, out).",
        "q = x @ q_proj.weight.T          # nn.Linear stores (out, in)\n"
        "linear.weight.copy_(conv1d.weight.T)             # when converting from GPT-2",
        _transposed,
    ),
    Cause(
        "bias missing",
        1,
        "The reference adds a bias that this implementation leaves out: the parameter is not created, not loaded, or "
        "not added. (On k alone it would not matter without RoPE and QK-norm: it adds the same number to a whole row "
        "of scores.)",
        "q = x @ W_q + b_q                # the same for k, v and the output\nnn.Linear(E, H * D, bias=True)",
        _without_bias,
        paired=4,
    ),
)

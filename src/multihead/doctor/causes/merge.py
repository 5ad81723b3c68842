"""Steps 4 to 7: mistakes in mixing the values and putting the heads together."""

from collections.abc import Iterable

from multihead.doctor.cause import Cause, Changes, Setting, when


def _heads(setting: Setting) -> bool:
    return setting.weights.sizes.H > 1


def _same_width(setting: Setting) -> bool:
    s = setting.weights.sizes
    return s.H * s.V == s.E


def _without_bias(setting: Setting) -> Iterable[tuple[str, Changes]]:
    b = setting.weights.b["o"]
    return [("", {"unbiased": "o"})] if b is not None and bool(b.any()) else []


CAUSES = (
    Cause(
        "weights transposed before they mix",
        4,
        "The values are mixed by the columns of the weights instead of their rows: what key j was given by every query "
        "lands in row j. Only rows add up to 1. Often two letters of an einsum have changed places.",
        'heads = torch.einsum("bhqk,bhkv->bhqv", weights, v)',
        when(lambda s: s.call.sizes[1] == s.call.sizes[2], {"mix": "transposed"}),
        paired=0,
    ),
    Cause(
        "heads merged without transposing back",
        5,
        "The heads are (B, H, N, D). `reshape(B, N, H·D)` without moving positions in front first lays all positions "
        "of head 0 where the heads of the first items should be. The shape is right, so nothing complains.",
        "merged = heads.transpose(1, 2).reshape(B, N, H * D)",
        when(_heads, {"merge": "view"}),
    ),
    Cause(
        "heads merged in reverse order",
        6,
        "The heads are laid side by side from the last to the first, so each meets the rows of W_o that belong to "
        "another.",
        "merged = torch.cat([head[0], head[1], …], dim=-1)               # in the order they were split",
        when(_heads, {"merge": "reverse"}),
    ),
    Cause(
        "heads merged interleaved (D, H) instead of (H, D)",
        6,
        "The merged row takes one number from each head in turn instead of one whole head after another.",
        "merged = heads.transpose(1, 2).flatten(2)        # (B, N, H, D) → (B, N, H·D)",
        when(_heads, {"merge": "interleaved"}),
    ),
    Cause(
        "W_o missing",
        7,
        "The merged heads are returned as they are: each group of outputs depends on one head only, and heads never "
        "mix.",
        "return merged @ W_o + b_o",
        when(_same_width, {"output": "missing"}),
    ),
    Cause(
        "W_o per head instead of across heads",
        7,
        "Each head is multiplied by its own block of W_o and the results are laid side by side. W_o mixes: every "
        "output reads every head.",
        "merged = heads.transpose(1, 2).flatten(2)\nreturn merged @ W_o              # once, on the merged heads",
        when(lambda s: _heads(s) and s.weights.sizes.E % s.weights.sizes.H == 0, {"output": "per head"}),
    ),
    Cause(
        "W_o used transposed",
        7,
        "A square matrix fits both ways round, so nothing complains. `nn.Linear` stores (out, in) and computes "
        "x @ weight.T; GPT-2's Conv1D stores (in, out).",
        "return merged @ out_proj.weight.T",
        when(_same_width, {"transposed": "o"}),
    ),
    Cause(
        "bias missing on the output",
        7,
        "The reference adds a bias after W_o, and this implementation does not.",
        "return merged @ W_o + b_o",
        _without_bias,
    ),
    Cause(
        "bias twice on the output",
        7,
        "b_o is added twice: by the projection, and once more after it.",
        "return out_proj(merged)          # nn.Linear adds its bias",
        when(lambda s: s.weights.b["o"] is not None, {"output": "bias twice"}),
        paired=0,
    ),
    Cause(
        "residual added inside",
        7,
        "The output is x plus attention: the residual connection belongs to the block around the layer. Inside the "
        "layer it will be added twice.",
        "return output                    # and in the block: x = x + attention(norm(x))",
        when(lambda s: True, {"residual": True}),
    ),
)

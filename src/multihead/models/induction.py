"""A start from which a language model of this size learns induction: see the model card, "What was found".

An induction head is two heads of two layers. One looks at the token before and writes down what it was; the other, in a
layer above, looks for where that is its own token (Olsson et al. 2022, "In-context Learning and Induction Heads"). From
random weights neither pays without the other. Here the first starts with its task, the second with a hint.
"""

import torch

from multihead.layer import MultiHeadAttention


@torch.no_grad()
def start(first: MultiHeadAttention, second: MultiHeadAttention) -> None:
    """Head 0 of `first` looks at the token before; head 0 of `second` asks with what it reads for what it writes."""
    _look_back(first)
    head = slice(0, first.sizes.D)
    second.q_proj.weight[head] = first.v_proj.weight[head]
    second.k_proj.weight[head] = first.o_proj.weight[:, head].T


def _look_back(attention: MultiHeadAttention) -> None:
    """RoPE turns the bias b of k by j and that of q, R₋₁b, by i: their product is largest where j = i − 1."""
    D, rope = attention.sizes.D, attention.rope
    assert rope is not None
    pairs = len(rope.frequencies(D))
    fast = torch.zeros(1, 1, 1, D)
    fast[..., : min(3, pairs)] = (7.5 / attention.scale) ** 0.5  # a neighbour scores four less, by the fast pairs
    for projection, offset in ((attention.q_proj, -1), (attention.k_proj, 0)):
        projection.weight[:D] *= 0.1
        projection.bias[:D] = rope.rotate(fast, torch.tensor([offset])).flatten()

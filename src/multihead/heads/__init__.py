"""What heads do: patterns of one lens, paths through a stack of layers, and what each head writes to the output."""

from multihead.heads.output import contributions, mixing
from multihead.heads.patterns import distance, first_token, induction, own_token, previous_token, same_token, similarity
from multihead.heads.stack import flow, rollout

__all__ = [
    "contributions",
    "distance",
    "first_token",
    "flow",
    "induction",
    "mixing",
    "own_token",
    "previous_token",
    "rollout",
    "same_token",
    "similarity",
]

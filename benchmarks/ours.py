"""The package under test, as a user calls it."""

import multihead as mh
from benchmarks.measure import Local

NAME = "multihead"


def mask_of(mask):
    """The package's mask for a case's, or None where everything is visible."""
    causal = mh.Causal(window=mask.window) if mask.causal else None
    if not mask.documents:
        return causal
    documents = mh.Documents(list(mask.documents))
    return documents & causal if causal else documents


def attend(case, q, k, v):
    mask = mask_of(case.mask)
    return Local(NAME, lambda: mh.attend(q, k, v, mask=mask), detail=mh.explain(q, k, v, mask=mask).backend)


def layer(case, x, weights):
    module = mh.MultiHeadAttention(case.E, heads=case.H).eval()
    module.load_state_dict({f"{name[2]}_proj.{_PARTS[name[0]]}": value for name, value in weights.items()})
    mask = mask_of(case.mask)
    return Local(NAME, lambda: module(x, mask=mask))


_PARTS = {"w": "weight", "b": "bias"}

"""The package under test, as a user calls it."""

import torch

import multihead as mh
from multihead.bench.cases import ONE_ATTEND
from multihead.bench.measure import Local

NAME = "multihead"


def mask_of(mask):
    """The package's mask for a case's, or None where everything is visible."""
    causal = mh.Causal(window=mask.window) if mask.causal else None
    if not mask.documents:
        return causal
    documents = mh.Documents(list(mask.documents))
    return documents & causal if causal else documents


def attend(case, q, k, v, name=NAME):
    mask = mask_of(case.mask)
    return Local(name, lambda: mh.attend(q, k, v, mask=mask), detail=mh.explain(q, k, v, mask=mask).backend)


def training(case, q, k, v, d_out, name=NAME):
    mask = mask_of(case.mask)

    def run():
        return torch.autograd.grad(mh.attend(q, k, v, mask=mask), (q, k, v), d_out)

    detail = mh.explain(q, k, v, mask=mask).backend
    return Local(name, run, detail=detail, unpack=flat, mode=torch.enable_grad)


def layer(case, x, weights, name=NAME):
    module = mh.MultiHeadAttention(case.E, heads=case.H).eval().to(x.dtype)
    module.load_state_dict({f"{name[2]}_proj.{_PARTS[name[0]]}": value for name, value in weights.items()})
    mask = mask_of(case.mask)
    return Local(name, lambda: module(x, mask=mask))


def lens(case, q, k):
    """A new lens for each call: nothing is kept from the last one, and no lse is given."""
    mask = mask_of(case.mask)

    def run():
        looked = mh.look(q, k, mask=mask)
        if case.what == "rows":
            return (looked.rows(case.queries),)
        if case.what == "map":
            return (looked.map(512, 512),)
        return looked.entropy(), looked.peak()[0], looked.received()

    return Local(NAME, run, unpack=flat)


def one_attend(case, q, k, exact):
    """The yardstick: `attend` with k for values. What it gives is not what the lens gives, and is checked elsewhere."""
    mask = mask_of(case.mask)
    return Local(ONE_ATTEND, lambda: mh.attend(q, k, k, mask=mask), "a yardstick", unpack=lambda out: exact)


def flat(results):
    return torch.cat([t.flatten() for t in results])


_PARTS = {"w": "weight", "b": "bias"}

"""A case made concrete: its tensors, the right answer, and everyone who is to answer, on the same arrays."""

import torch

from multihead.bench import models, oracle, ours
from multihead.bench.cases import ONE_ATTEND, Attend, Layer, Lens, Model
from multihead.bench.peers import layers, runtimes, sdpa, weights


class AttendProblem:
    def __init__(self, case, threads, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.case = case
        shapes = [(case.B, heads, length, case.D) for heads, length in ((case.H, case.Q), *[(case.G, case.K)] * 2)]
        self.tensors = [torch.randn(shape, generator=generator) for shape in shapes]  # q, k, v
        self.exact, plain = (oracle.attend(*self.tensors, case.mask, t) for t in (torch.float64, torch.float32))
        self.bound = oracle.bound_of(self.exact, plain)

    def ours(self):
        return ours.attend(self.case, *self.tensors)

    def peer(self, name):
        return sdpa.BUILDERS[name](self.case, *self.tensors)


class LayerProblem:
    def __init__(self, case, threads, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.case, self.threads, E = case, threads, case.E
        self.x = torch.randn(case.B, case.N, E, generator=generator)
        self.weights = {f"w_{n}": torch.randn(E, E, generator=generator) * E**-0.5 for n in "qkvo"}
        self.weights |= {f"b_{n}": torch.randn(E, generator=generator) * 0.1 for n in "qkvo"}
        self.exact, plain = (oracle.layer(self.x, self.weights, case, t) for t in (torch.float64, torch.float32))
        self.bound = oracle.bound_of(self.exact, plain)

    def ours(self):
        return ours.layer(self.case, self.x, self.weights)

    def peer(self, name):
        if name in layers.BUILDERS:
            return layers.BUILDERS[name](self.case, self.x, self.weights)
        return runtimes.build(
            name, self.case, self.x, self.weights, self.threads, self.exact, self.bound * oracle.PEER_ALLOWANCE
        )


class LensProblem:
    def __init__(self, case, threads, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.case = case
        self.q, self.k = (torch.randn(case.B, case.H, case.N, case.D, generator=generator) for _ in range(2))
        self.exact, plain = (oracle.lens(self.q, self.k, case, t) for t in (torch.float64, torch.float32))
        self.bound = oracle.bound_of(self.exact, plain)

    def ours(self):
        return ours.lens(self.case, self.q, self.k)

    def peer(self, name):
        if name == ONE_ATTEND:
            return ours.one_attend(self.case, self.q, self.k, self.exact)
        return weights.BUILDERS[name](self.case, self.q, self.k)


class ModelProblem:
    def __init__(self, case, threads, seed=0):
        self.case = case
        self.model, self.inputs = models.build(case, seed)
        self.exact, plain = (
            models.answer(case, self.model, self.inputs, t).double() for t in (torch.float64, torch.float32)
        )
        # Layers multiply a rounding, by chance more on one side: see assert_as_exact_as_eager in tests/test_hf.py.
        self.bound = oracle.bound_of(self.exact, plain.float()) * oracle.PEER_ALLOWANCE

    def ours(self):
        return models.contender(self.case, self.model, self.inputs, models.OURS, ours.NAME)

    def peer(self, name):
        return models.contender(self.case, self.model, self.inputs, models.ATTENTIONS[name], name)


PROBLEMS = {Attend: AttendProblem, Layer: LayerProblem, Lens: LensProblem, Model: ModelProblem}


def problem_of(case, threads):
    return PROBLEMS[type(case)](case, threads)

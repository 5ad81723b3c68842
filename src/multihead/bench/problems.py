"""A case made concrete: its tensors, the right answer, and everyone who is to answer, on the same arrays."""

import torch

from multihead.bench import models, oracle, ours
from multihead.bench.cases import ONE_ATTEND, OURS_FP32, ZENTORCH, Attend, Layer, Lens, Model, Train
from multihead.bench.generating import StepProblem, WholeProblem
from multihead.bench.generation import Step, Whole
from multihead.bench.peers import layers, runtimes, sdpa, weights, zentorch


class AttendProblem:
    def __init__(self, case, threads, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.case, self.threads = case, threads
        shapes = [(case.B, heads, length, case.D) for heads, length in ((case.H, case.Q), *[(case.G, case.K)] * 2)]
        self.tensors = [torch.randn(shape, generator=generator).to(case.type) for shape in shapes]  # q, k, v
        self.exact, plain = (oracle.attend(*self.tensors, case.mask, t) for t in (torch.float64, case.type))
        self.bound = oracle.bound_of(self.exact, plain)

    def ours(self):
        return ours.attend(self.case, *self.tensors)

    def peer(self, name):
        if name == OURS_FP32:
            return ours.attend(self.case, *(t.float() for t in self.tensors), name=name)
        if name == ZENTORCH:
            return zentorch.attend(self.case, *self.tensors, self.threads)
        return sdpa.BUILDERS[name](self.case, *self.tensors)


class TrainProblem:
    def __init__(self, case, threads, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.case = case
        queries, keys = (case.B, case.H, case.Q, case.D), (case.B, case.G, case.K, case.D)
        self.tensors = [
            torch.randn(shape, generator=generator).to(case.type) for shape in (queries, keys, keys, queries)
        ]  # q, k, v, d_out
        self.exact, plain = (oracle.gradients(*self.tensors, case.mask, t) for t in (torch.float64, case.type))
        self.bound = oracle.bound_of(self.exact, plain)

    def leaves(self, dtype):
        """Leaves of a graph: q, k and v; and d_out."""
        *inputs, d_out = (t.detach().to(dtype) for t in self.tensors)
        return [*(t.requires_grad_() for t in inputs), d_out]

    def ours(self):
        return ours.training(self.case, *self.leaves(self.case.type))

    def peer(self, name):
        if name == OURS_FP32:
            return ours.training(self.case, *self.leaves(torch.float32), name=name)
        return sdpa.training(self.case, *self.leaves(self.case.type))


class LayerProblem:
    def __init__(self, case, threads, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.case, self.threads, E = case, threads, case.E
        self.x = torch.randn(case.B, case.N, E, generator=generator)
        self.weights = {f"w_{n}": torch.randn(E, E, generator=generator) * E**-0.5 for n in "qkvo"}
        self.weights |= {f"b_{n}": torch.randn(E, generator=generator) * 0.1 for n in "qkvo"}
        self.x, self.weights = self.x.to(case.type), {name: w.to(case.type) for name, w in self.weights.items()}
        self.exact, plain = (oracle.layer(self.x, self.weights, case, t) for t in (torch.float64, case.type))
        self.bound = oracle.bound_of(self.exact, plain)

    def ours(self):
        return ours.layer(self.case, self.x, self.weights)

    def peer(self, name):
        if name in layers.BUILDERS:
            return layers.BUILDERS[name](self.case, self.x, self.weights)
        if name == OURS_FP32:
            return ours.layer(self.case, self.x.float(), {n: w.float() for n, w in self.weights.items()}, name)
        if name == ZENTORCH:
            return zentorch.layer(self.case, self.x, self.weights, self.threads)
        return runtimes.build(
            name, self.case, self.x, self.weights, self.threads, self.exact, self.bound * oracle.PEER_ALLOWANCE
        )


class LensProblem:
    def __init__(self, case, threads, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.case = case
        shape = (case.B, case.H, case.N, case.D)
        self.q, self.k = (torch.randn(shape, generator=generator).to(case.type) for _ in range(2))
        self.exact, plain = (oracle.lens(self.q, self.k, case, t) for t in (torch.float64, case.type))
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
        self.exact, plain = (models.answer(case, self.model, self.inputs, t) for t in (torch.float64, case.type))
        # Layers multiply a rounding, by chance more on one side: see assert_as_exact_as_eager in tests/test_hf.py.
        self.bound = oracle.bound_of(self.exact, plain) * oracle.PEER_ALLOWANCE

    def ours(self):
        return models.contender(self.case, self.model, self.inputs, models.OURS, ours.NAME)

    def peer(self, name):
        return models.contender(self.case, self.model, self.inputs, models.ATTENTIONS[name], name)


PROBLEMS = {
    Attend: AttendProblem,
    Train: TrainProblem,
    Layer: LayerProblem,
    Lens: LensProblem,
    Model: ModelProblem,
    Step: StepProblem,
    Whole: WholeProblem,
}


def problem_of(case, threads):
    return PROBLEMS[type(case)](case, threads)

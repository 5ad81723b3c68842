"""Contenders in a child process each; ONNX Runtime and OpenVINO with the graph they run fastest."""

import importlib.util
import multiprocessing
import subprocess
import sys

import torch

from multihead.bench.cases import OPENVINO, ORT, ZENTORCH
from multihead.bench.oracle import WrongResult, check
from multihead.bench.peers import child

# Seconds until a runtime's idle threads sleep. 12 ms were seen to be too few for either; after 50 ms of rest two of
# five blocks against OpenVINO, and against nobody else, were still disturbed.
RESTS = {ORT: 0.05, OPENVINO: 0.2, ZENTORCH: 0.05}
PATIENCE = 300  # seconds for one answer
TRIAL = 0.1  # seconds to try each form of the graph for
MODULES = {ORT: "onnxruntime", OPENVINO: "openvino", ZENTORCH: "zentorch"}


class Unavailable(Exception):
    """A peer that cannot take part, and why."""


class Runtime:
    """A contender whose calls happen, and are timed, in a child process."""

    def __init__(self, name, threads):
        self.name, self.detail, self.rest = name, "", RESTS[name]
        # A fresh interpreter: a fork would carry torch's threads along, broken, and multiprocessing's spawn would
        # run the caller's main module again.
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            # By its file and not as a module of this package, which would import torch.
            command = [sys.executable, "-P", child.__file__, str(theirs.fileno()), MODULES[name], str(threads)]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    def ask(self, *message):
        try:
            self._connection.send(message)
            if not self._connection.poll(PATIENCE):
                raise Unavailable(f"no answer within {PATIENCE} s")
            fine, answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise Unavailable(f"its process ended with code {self._process.wait(5)}") from error
        if not fine:
            raise Unavailable(answer.splitlines()[0][:200])
        return answer

    @property
    def alive(self):
        return self._process.poll() is None

    def seconds(self, calls):
        return self.ask("time", calls)

    def result(self):
        return torch.from_numpy(self.ask("result"))

    def close(self):
        self._connection.close()  # the child ends when it reads the end
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def require(*modules):
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise Unavailable(f"{module} is not installed")


def build(name, case, x, weights, threads, exact, bound):
    """Start the runtime, try every form of the graph, keep the fastest that computes the right thing."""
    require("onnx", MODULES[name])
    from multihead.bench.peers.graphs import FORMS, layer_graph

    arrays = {key: value.float().numpy() for key, value in weights.items()}
    sizes = {"batch": case.B, "length": case.N, "heads": case.H, "causal": case.mask.causal}
    rows, hint = x.float().numpy(), "f32" if case.dtype == "fp32" else case.dtype  # NumPy has no bfloat16
    models = {form: layer_graph(form, arrays, **sizes) for form in FORMS}
    runtime = Runtime(name, threads)
    try:
        times, refused = {}, []
        for form, model in models.items():
            try:
                runtime.ask("load", model, rows, hint)
                check(f"{name} with {form}", runtime.result(), exact, bound)
                times[form] = trial(runtime)
            except (Unavailable, WrongResult) as error:
                if not runtime.alive:
                    raise
                refused.append(f"{form}: {error}")
        if not times:
            raise Unavailable("; ".join(refused))
        fastest = min(times, key=times.get)
        runtime.ask("load", models[fastest], rows, hint)
        runtime.detail = f"fastest of {len(times)} graphs: {fastest}"
    except BaseException:
        runtime.close()
        raise
    return runtime


def trial(runtime):
    """Seconds per call, the best of a few short runs."""
    runtime.seconds(1)
    calls = max(1, int(TRIAL / 3 / runtime.seconds(1)))
    return min(runtime.seconds(calls) / calls for _ in range(3))

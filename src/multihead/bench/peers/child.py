"""A runtime in a process of its own: loads graphs, runs them, and times itself.

Runtimes keep worker threads that spin after a call and slow whatever runs next in the same process. Only zentorch's
child imports torch, whose threads would join them.
"""

import signal
import sys
import time
from multiprocessing.connection import Connection

import numpy as np


def serve(connection, runtime, threads):
    """Answer ("load", …), ("result",) and ("time", calls) until closed: (True, answer) or (False, reason)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    run = None
    while True:
        try:
            command, *arguments = connection.recv()
        except EOFError:
            return
        try:
            if command == "load":
                run, answer = LOADERS[runtime](*arguments, threads), None
            elif command == "result":
                answer = run()
                answer = answer if isinstance(answer, np.ndarray) else answer.float().numpy()
            else:
                answer = seconds(run, *arguments)
        except Exception as error:
            connection.send((False, f"{type(error).__name__}: {error}"))
        else:
            connection.send((True, answer))


def seconds(run, calls):
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return time.perf_counter() - start


def load_onnxruntime(model, x, precision, threads):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(["y"], {"x": x})[0]  # quicker here than I/O binding to a fresh array


def load_openvino(model, x, precision, threads):
    import openvino

    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": precision,  # without it, bfloat16 where the CPU has it
    }
    core = openvino.Core()
    request = core.compile_model(core.read_model(model), "CPU", settings).create_infer_request()
    request.set_input_tensor(openvino.Tensor(x, shared_memory=True))

    def run():
        y = np.empty_like(x)  # a fresh output for every call, as all contenders; written in place, not copied
        request.set_output_tensor(openvino.Tensor(y, shared_memory=True))
        request.infer()
        return y

    return run


def load_zentorch(kind, arrays, dtype, options, threads):
    """`arrays`: the bits of tensors of that dtype, as integers or floats of the same size."""
    import torch
    import zentorch  # noqa: F401  brings its operators

    torch.set_num_threads(threads)
    t = {name: torch.from_numpy(array).view(getattr(torch, dtype)) for name, array in arrays.items()}
    ops = torch.ops.zentorch
    attend = ops.zentorch_sdpa

    def attention():
        return attend(t["q"], t["k"], t["v"], 0.0, options["causal"], attn_mask=t.get("mask"))[0]

    def layer():
        B, N, E = t["x"].shape
        H = options["heads"]
        qkv = ops.zentorch_linear_unary(t["x"].view(B * N, E), t["w_qkv"], t["b_qkv"])
        q, k, v = qkv.view(B, N, 3, H, E // H).permute(2, 0, 3, 1, 4).unbind()
        heads = attend(q, k, v, 0.0, options["causal"])[0]
        return ops.zentorch_linear_unary(heads.transpose(1, 2).reshape(B * N, E), t["w_o"], t["b_o"]).view(B, N, E)

    call = {"attend": attention, "layer": layer}[kind]

    def run():
        with torch.inference_mode():
            return call()

    return run


LOADERS = {"zentorch": load_zentorch, "onnxruntime": load_onnxruntime, "openvino": load_openvino}

if __name__ == "__main__":
    descriptor, runtime, threads = sys.argv[1:]
    serve(Connection(int(descriptor)), runtime, int(threads))

"""A runtime in a process of its own: loads graphs, runs them, and times itself.

Runtimes keep worker threads that spin after a call and slow whatever runs next in the same process. Nothing here
imports torch, whose threads would join them.
"""

import signal
import sys
import time
from multiprocessing.connection import Connection

import numpy as np


def serve(connection, runtime, threads):
    """Answer ("load", model, x), ("result",) and ("time", calls) until closed: (True, answer) or (False, reason)."""
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


def load_onnxruntime(model, x, threads):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(["y"], {"x": x})[0]  # quicker here than I/O binding to a fresh array


def load_openvino(model, x, threads):
    import openvino

    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",  # without it, bfloat16 where the CPU has it
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


LOADERS = {"onnxruntime": load_onnxruntime, "openvino": load_openvino}

if __name__ == "__main__":
    descriptor, runtime, threads = sys.argv[1:]
    serve(Connection(int(descriptor)), runtime, int(threads))

"""Ranks for tests: processes on loopback with gloo, one thread each, started once and given functions to run."""

import multiprocessing as mp
import os
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

MOST = 4
SIZES = (2, 3, 4)
TIMEOUT = 60.0

context = mp.get_context("forkserver")
context.set_forkserver_preload(["torch", "torch.distributed.tensor.parallel", "multihead.distributed"])


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def join(rank: int, ranks: int, port: int, timeout: float, host: str = "127.0.0.1") -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout)
    )


def _serve(rank: int, port: int, pipe: Connection) -> None:
    join(rank, MOST, port, TIMEOUT)
    meshes = {}
    for size in SIZES:
        group = dist.new_group(list(range(size)))
        if rank < size:
            meshes[size] = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ranks",))
    while (task := pipe.recv()) is not None:
        function, size, args = task
        try:
            torch.manual_seed(0)
            answer: Any = function(meshes[size], *args)
            pipe.send((True, answer))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class Pool:
    """`run(function, ranks, *args)` calls function(mesh, *args) on each of the ranks: their answers, in order."""

    def __init__(self) -> None:
        port, self.pipes, self.processes = free_port(), [], []
        for rank in range(MOST):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, port, there), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, function: Callable, ranks: int, *args: Any) -> list[Any]:
        for pipe in self.pipes[:ranks]:
            pipe.send((function, ranks, args))
        answers = [self._answer(pipe) for pipe in self.pipes[:ranks]]
        wrong = [f"rank {rank}:\n{said}" for rank, (fine, said) in enumerate(answers) if not fine]
        assert not wrong, "\n".join(wrong)
        return [said for _, said in answers]

    def _answer(self, pipe: Connection) -> tuple[bool, Any]:
        if not pipe.poll(2 * TIMEOUT):
            return False, "no answer"
        return pipe.recv()

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def run_once(
    function: Callable, ranks: int, *args: Any, timeout: float = 5.0, wait: float = 120.0, but: int | None = None
) -> list[Any]:
    """The same with processes of their own, for tests in which ranks die: what each returned or raised, or None.

    The answer of rank `but` is not waited for.
    """
    port, pipes, processes = free_port(), [], []
    for rank in range(ranks):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_once, args=(rank, ranks, port, timeout, there, function, args), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    found = []
    for rank, pipe in enumerate(pipes):
        try:
            found.append(pipe.recv() if rank != but and pipe.poll(wait) else None)
        except EOFError:
            found.append(None)
    for process in processes:
        process.kill()
        process.join()
    return found


def _once(rank: int, ranks: int, port: int, timeout: float, pipe: Connection, function: Callable, args: tuple) -> None:
    join(rank, ranks, port, timeout)
    try:
        answer: Any = function(dist.group.WORLD, *args)
    except Exception as error:
        answer = error.args[0], getattr(error, "rank", None), type(error).__name__
    pipe.send(answer)
    pipe.close()
    time.sleep(2 * TIMEOUT)  # a rank that has failed may live on: the others must not depend on its end

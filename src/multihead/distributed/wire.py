"""Messages between the ranks of a group: sent in the background, counted, and never waited for without an end.

Everything here is point to point, so a rank that does not answer is known by its number. A wait ends at the latest with
the timeout of the process group (`init_process_group(timeout=…)`).
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh

GRACE = 2.0  # seconds to wait for what a lost rank may have said about another
FAILURES = "multihead/lost"  # under this name in the group's store: who has lost whom


class RankLost(RuntimeError):
    """Another rank has died, hangs, or is somewhere else in its program; `rank` is its global number.

    >>> try:  # doctest: +SKIP
    ...     y = layer(x)
    ... except mh.distributed.RankLost as lost:
    ...     print(f"go on from the checkpoint without rank {lost.rank}")
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class Receipt:
    """A message on its way: `wait()` gives the tensor."""

    def __init__(self, wire: "Wire", work: Any, buffer: Tensor, dtype: torch.dtype, shape: tuple[int, ...], peer: int):
        self.wire, self.work, self.buffer, self.dtype, self.shape, self.peer = wire, work, buffer, dtype, shape, peer

    def wait(self) -> Tensor:
        if self.work is not None:
            self.wire.finish(self.work, self.peer, "a message from")
            self.work = None
        return self.buffer.view(self.dtype).view(self.shape)


class Wire:
    """The ranks of a one-dimensional mesh, or of a process group, and what has crossed between them.

    Args:
        mesh: a `DeviceMesh` of one dimension (of a larger one, take `mesh["cp"]`), or a process group.
    """

    def __init__(self, mesh: DeviceMesh | dist.ProcessGroup) -> None:
        if isinstance(mesh, DeviceMesh):
            if mesh.ndim != 1:
                names: tuple[object, ...] = mesh.mesh_dim_names or tuple(range(mesh.ndim))
                raise ValueError(f"mesh has the dimensions {names}: expected one of them, such as mesh[{names[0]!r}]")
            group = mesh.get_group()
        elif isinstance(mesh, dist.ProcessGroup):
            group = mesh
        else:
            raise TypeError(
                f"mesh is a {type(mesh).__name__}: expected a DeviceMesh of one dimension or a ProcessGroup"
            )
        self.mesh, self.group = mesh, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.sent = self.received = 0  # bytes, headers included
        self.waited = 0.0  # seconds in which this rank did nothing but wait for messages
        self._pending: list[tuple[Any, Tensor, int, int]] = []  # work, data, peer, tag

    @property
    def others(self) -> list[int]:
        """The other ranks in the order of the ring: the next one first."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def name(self, peer: int) -> str:
        """A rank of the group as the launcher numbers it."""
        return f"rank {dist.get_global_rank(self.group, peer)}"

    def send(self, t: Tensor, to: int, tag: int = 0) -> None:
        """Send in the background; `flush` waits until all has gone."""
        if not t.numel():
            return
        self._pending = [entry for entry in self._pending if not entry[0].is_completed()]
        data = t.detach().contiguous().flatten().view(torch.uint8)
        work = self._try(lambda: dist.isend(data, group=self.group, group_dst=to, tag=tag), to, "a message to")
        self._pending.append((work, data, to, tag))
        self.sent += data.numel()

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, source: int, tag: int = 0, *,
        into: Tensor | None = None,
    ) -> Receipt:  # fmt: skip
        """Receive in the background a tensor whose shape is known; `into`: a buffer that has room for it."""
        count = torch.Size(shape).numel() * dtype.itemsize
        if into is None:
            into = torch.empty(count, dtype=torch.uint8, device=device)
        buffer = into.view(torch.uint8)[:count]
        if not count:
            return Receipt(self, None, buffer, dtype, shape, source)
        work = self._try(
            lambda: dist.irecv(buffer, group=self.group, group_src=source, tag=tag), source, "a message from"
        )
        self.received += count
        return Receipt(self, work, buffer, dtype, shape, source)

    def flush(self, tag: int | None = None, leave: int = 0) -> None:
        """Wait until every message has left; of one tag only, or all but the newest `leave`."""
        chosen = [n for n, entry in enumerate(self._pending) if tag is None or entry[3] == tag]
        chosen = chosen[: len(chosen) - leave]
        now = [self._pending[n] for n in chosen]
        self._pending = [entry for n, entry in enumerate(self._pending) if n not in chosen]
        for work, _, peer, _ in now:
            self.finish(work, peer, "a message to")

    def finish(self, work: Any, peer: int, what: str) -> None:
        """Wait for one message."""
        began = time.monotonic()
        self._try(work.wait, peer, what)
        self.waited += time.monotonic() - began

    def exchange(self, t: Tensor, tag: int = 0) -> list[Tensor]:
        """The same-shaped tensor of every rank, in the order of the ranks."""
        receipts = {peer: self.receive(tuple(t.shape), t.dtype, t.device, peer, tag) for peer in self.others}
        for peer in self.others:
            self.send(t, peer, tag)
        found = [t if rank == self.rank else receipts[rank].wait() for rank in range(self.size)]
        self.flush()
        return found

    def add_up(self, t: Tensor) -> Tensor:
        """The sum of every rank's tensor, added in the order of the ranks in float32 or wider: the same on all.

        Each rank adds up a part and sends it to the others: 2·(ranks − 1)/ranks of the tensor leave each rank.
        """
        wide = t.detach().to(torch.promote_types(t.dtype, torch.float32)).contiguous().flatten()
        parts = list(wide.tensor_split(self.size))
        mine = tuple(parts[self.rank].shape)
        receipts = {peer: self.receive(mine, wide.dtype, wide.device, peer) for peer in self.others}
        for peer in self.others:
            self.send(parts[peer], peer)
        total = torch.zeros_like(parts[self.rank])
        for rank in range(self.size):
            total += parts[rank] if rank == self.rank else receipts[rank].wait()
        finals = {peer: self.receive(tuple(parts[peer].shape), wide.dtype, wide.device, peer) for peer in self.others}
        for peer in self.others:
            self.send(total, peer)
        summed = [total if rank == self.rank else finals[rank].wait() for rank in range(self.size)]
        self.flush()
        return torch.cat(summed).view(t.shape).to(t.dtype)

    def _try(self, act: Callable[[], Any], peer: int, what: str) -> Any:
        began = time.monotonic()
        try:
            return act()
        except RuntimeError as error:
            raise self._lost(peer, what, time.monotonic() - began, error) from error

    def _lost(self, peer: int, what: str, waited: float, error: RuntimeError) -> RankLost:
        """The error that names the rank at fault: the peer, or the one that the peer itself has lost."""
        lost = dist.get_global_rank(self.group, peer)
        said = self._read_note(lost)
        how = str(error).splitlines()[0] if str(error) else type(error).__name__
        message = f"{what} rank {lost} did not come through within {waited:.1f} s ({how})"
        culprit = lost
        if said is not None and said != dist.get_rank():
            culprit = said
            message = f"rank {said} is lost, says rank {lost}, which this rank was waiting for"
        self._write_note(culprit)
        return RankLost(f"rank {culprit} has died, hangs, or is elsewhere in its program: {message}", culprit)

    def _read_note(self, rank: int) -> int | None:
        def read(store: Store) -> int | None:
            end = time.monotonic() + GRACE
            while time.monotonic() < end:
                if store.check([f"{FAILURES}/{rank}"]):
                    return int(store.get(f"{FAILURES}/{rank}"))
                time.sleep(0.05)
            return None

        return _within(2 * GRACE, read)

    def _write_note(self, culprit: int) -> None:
        _within(GRACE, lambda store: store.set(f"{FAILURES}/{dist.get_rank()}", str(culprit)))


def _within(seconds: float, ask: Callable[[Store], Any]) -> Any:
    """What the store answers; None where it is gone or slow, for it lives in a process that may be the lost one."""
    found: list[Any] = []

    def run() -> None:
        with suppress(RuntimeError, ValueError):
            found.append(ask(dist.distributed_c10d._get_default_store()))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None

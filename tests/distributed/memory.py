"""Bytes of tensors, counted: every allocation and release that torch's CPU allocator reports, in order."""

from collections.abc import Callable, Iterator
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


def peak(act: Callable[[], Any]) -> tuple[int, int]:
    """The most bytes of tensors made by `act` that were alive at once, and those that are when it has returned."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = act()
    alive, most = 0, 0
    events = sorted(_allocations(profiler.profiler.kineto_results.experimental_event_tree()))
    for _, change in events:
        alive += change
        most = max(most, alive)
    del kept
    return most, alive


def _allocations(events: Any) -> Iterator[tuple[int, int]]:
    for event in events:
        if event.tag == _EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.alloc_size
        yield from _allocations(event.children)

"""Bytes of tensors, counted: every allocation and release that torch's CPU allocator reports, in order."""

from collections.abc import Callable, Iterator
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


def peak(act: Callable[[], Any]) -> tuple[int, int]:
    """The most bytes held at once by tensors that `act` made, and those that are still held when it has returned."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = act()
    held, most = 0, 0
    events = sorted(_allocations(profiler.profiler.kineto_results.experimental_event_tree()))
    for _, change in events:
        held += change
        most = max(most, held)
    del kept
    return most, held


def _allocations(events: Any) -> Iterator[tuple[int, int]]:
    for event in events:
        if event.tag == _EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.alloc_size
        yield from _allocations(event.children)

"""Events of collectives for torch's profiler. Like Gloo's, they are named "ring:all_reduce" and so on."""

from __future__ import annotations

import torch


class Event:
    """An event that has begun. It lasts until `end`, which any thread may call."""

    def __init__(self, name: str) -> None:
        record = torch.profiler.record_function(f"ring:{name}")
        record.__enter__()
        self._end = torch.futures.Future()
        record._call_end_callbacks_on_future(self._end)

    def end(self) -> None:
        if not self._end.done():
            self._end.set_result(None)


def begin(name: str) -> Event | None:
    """Begins an event if a profiler is active in this thread."""
    return Event(name) if torch.autograd._profiler_enabled() else None


def end(event: Event | None) -> None:
    """Ends an event if there is one."""
    if event is not None:
        event.end()

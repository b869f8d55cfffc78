"""Records collectives as events in torch's profiler. An event has a name such as "ring:all_reduce". (The
corresponding event of the backend Gloo is "gloo:all_reduce".)"""

from __future__ import annotations

import torch


class ProfilerEvent:
    """An event that has begun. Any thread may end the event by calling `end`."""

    def __init__(self, name: str) -> None:
        record = torch.profiler.record_function(f"ring:{name}")
        record.__enter__()
        self._end = torch.futures.Future()
        record._call_end_callbacks_on_future(self._end)

    def end(self) -> None:
        """Ends the event. A second call of `end` does nothing."""
        if not self._end.done():
            self._end.set_result(None)


def begin_event(name: str) -> ProfilerEvent | None:
    """Begins an event and returns it. Returns `None` if no profiler is active in this thread."""
    return ProfilerEvent(name) if torch.autograd._profiler_enabled() else None


def end_event(event: ProfilerEvent | None) -> None:
    """Ends an event. Does nothing if `event` is `None`."""
    if event is not None:
        event.end()

"""Handles of asynchronous operations."""

from collections.abc import Callable, Sequence
from typing import Any

from . import _core


class Handle:
    """An operation that has begun. Do not use its arrays before `wait` has returned.

    If you drop the handle, the operation goes on for the other ranks, but its result may not arrive here. A receive that has
    matched no message yet is cancelled.
    """

    __slots__ = ("_core", "_finish")

    def __init__(self, core: _core.Handle, finish: Callable[[Any], Any]) -> None:
        self._core = core
        self._finish = finish

    def wait(self, timeout: float | None = None) -> Any:
        """Waits for the operation and returns its result, or raises its error.

        Raises `StillRunning` after `timeout` seconds. The operation then goes on, and you can wait again.
        """
        return self._finish(self._core.wait(timeout))

    def test(self) -> bool:
        """Whether the operation has ended, with a result or an error. Makes progress without waiting."""
        return self._core.test()

    def cancel(self) -> bool:
        """Cancels a receive that has matched no message yet. Returns whether it did."""
        return self._core.cancel()


def wait_all(handles: Sequence[Handle], timeout: float | None = None) -> list[Any]:
    """Waits for all handles and returns their results in order. Each wait may take `timeout` seconds."""
    return [handle.wait(timeout) for handle in handles]


def wait_any(handles: Sequence[Handle], timeout: float | None = None) -> int | None:
    """Waits until an operation has ended. Returns its index; `None` after `timeout` seconds, or if there are no handles."""
    return _core.wait_any([handle._core for handle in handles], timeout)

"""Handles of asynchronous operations."""

from collections.abc import Callable, Sequence
from typing import Any

from . import _core


class Handle:
    """The handle of an operation that has begun. Do not use the operation's arrays before `wait` has returned.

    If you drop the handle, the operation continues for the other ranks, but the arrays of this rank may never receive the result.
    If you drop the handle of a receive that has matched no message yet, the receive is cancelled.
    """

    __slots__ = ("_core", "_convert_result")

    def __init__(self, core: _core.Handle, convert_result: Callable[[Any], Any]) -> None:
        self._core = core
        self._convert_result = convert_result

    def wait(self, timeout: float | None = None) -> Any:
        """Waits for the operation and returns its result, or raises its error.

        Raises `StillRunning` after `timeout` seconds. The operation then continues, and you can wait again.
        """
        return self._convert_result(self._core.wait(timeout))

    def test(self) -> bool:
        """Returns whether the operation has ended, with a result or an error. Does not wait, but advances the
        operations in progress."""
        return self._core.test()

    def cancel(self) -> bool:
        """Cancels a receive that has matched no message yet. Returns whether the receive is cancelled. After a
        cancellation, `wait` raises `Error`.
        """
        return self._core.cancel()


def end_call(handle: _core.Handle | None, make_result: Callable[[], Any]) -> Any:
    """Returns the result of a blocking call, which has no handle, or the handle of an asynchronous call."""
    return make_result() if handle is None else Handle(handle, lambda _: make_result())


def wait_all(handles: Sequence[Handle], timeout: float | None = None) -> list[Any]:
    """Waits for all operations and returns their results in the order of `handles`. Raises `StillRunning` if the wait for
    one operation takes longer than `timeout` seconds."""
    return [handle.wait(timeout) for handle in handles]


def wait_any(handles: Sequence[Handle], timeout: float | None = None) -> int | None:
    """Waits until one of the operations has ended, and returns the index of this operation's handle in `handles`.
    Returns `None` after `timeout` seconds, or if `handles` is empty.
    """
    return _core.wait_any([handle._core for handle in handles], timeout)

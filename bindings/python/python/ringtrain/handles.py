"""Operations that go on by themselves."""

from collections.abc import Callable, Sequence
from typing import Any

from . import _core


class Handle:
    """An operation under way. Nobody may use its arrays before `wait` has returned. Dropping it lets the operation go on for the
    other ranks, but its result may never come here; a receive that has found no message yet is withdrawn."""

    __slots__ = ("_core", "_finish")

    def __init__(self, core: _core.Handle, finish: Callable[[Any], Any]) -> None:
        self._core = core
        self._finish = finish

    def wait(self, timeout: float | None = None) -> Any:
        """The operation's result, once it has ended.

        Raises `StillRunning` after `timeout` seconds; the operation goes on then. Raises what the operation failed with.
        """
        return self._finish(self._core.wait(timeout))

    def test(self) -> bool:
        """Whether it has ended, well or not. Does what can be done for it without waiting."""
        return self._core.test()

    def cancel(self) -> bool:
        """Withdraws a receive that has found no message yet, and says whether it did."""
        return self._core.cancel()


def wait_all(handles: Sequence[Handle], timeout: float | None = None) -> list[Any]:
    """The results of all, in their order; each may take `timeout` seconds."""
    return [handle.wait(timeout) for handle in handles]


def wait_any(handles: Sequence[Handle], timeout: float | None = None) -> int | None:
    """The index of one that has ended; `None` after `timeout` seconds, or if there are none."""
    return _core.wait_any([handle._core for handle in handles], timeout)

"""Ends this process's part of the job when the Python program ends.

A program that ends normally closes its groups. A program that ends with an uncaught exception first tells the other ranks.
"""

import atexit
import contextlib
import os
import sys
import weakref
from types import TracebackType
from typing import Protocol

from . import _core


class Resource(Protocol):
    """Something that must be closed before the interpreter exits."""

    def fail(self, message: str) -> None:
        """Ends the job on the other ranks with this message. Does nothing if the job has ended already."""

    def shutdown(self) -> None:
        """Closes the resource. A second call does nothing."""


class GroupResource:
    """A group of ranks that is closed when the program ends."""

    def __init__(self, group: _core.Group) -> None:
        self.group = group
        register(self)

    def fail(self, message: str) -> None:
        with contextlib.suppress(_core.Error):  # the job has ended already
            self.group.abort(message)

    def shutdown(self) -> None:
        with contextlib.suppress(_core.Error):  # the job has failed, and the callers of its operations have got the error
            self.group.close()


# In the order of registration. A dictionary, because weak sets have no order.
_resources: weakref.WeakValueDictionary[int, Resource] = weakref.WeakValueDictionary()
_registered = 0
_pid = 0
_reported: BaseException | None = None


def register(resource: Resource) -> None:
    """Calls `resource.shutdown()` when this process ends, in the reverse order of registration, and `resource.fail()` before
    that if an exception ends it."""
    global _registered, _pid
    if not _registered:
        _install_exception_hook()
        atexit.register(_shut_down_all)
    if _pid != os.getpid():
        # After a fork the resources belong to the parent.
        _resources.clear()
        _pid = os.getpid()
    _registered += 1
    _resources[_registered] = resource


def _install_exception_hook() -> None:
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            _report(error)
        finally:
            previous(kind, error, trace)

    sys.excepthook = hook


def _report(error: BaseException) -> None:
    """Tells the other ranks that this exception ended the program."""
    global _reported
    # An interactive session continues after an exception, and a forked child is not a rank.
    if error is _reported or os.getpid() != _pid or hasattr(sys, "ps1") or sys.flags.interactive:
        return
    _reported = error
    # If the job itself failed, every rank has the error already.
    if isinstance(error, _core.JobFailed) or isinstance(error.__cause__, _core.JobFailed):
        return
    for resource in _newest_first():
        resource.fail(f"its program ended with {type(error).__name__}: {error}; see that rank's own output for the traceback")


def _shut_down_all() -> None:
    if os.getpid() != _pid:
        return
    # The program may have replaced the hook, but the interpreter still keeps the exception that ended it.
    last = getattr(sys, "last_value", None)
    if last is not None:
        _report(last)
    for resource in _newest_first():
        resource.shutdown()


def _newest_first() -> list[Resource]:
    return [resource for _, resource in sorted(_resources.items(), reverse=True)]

"""Leaves the job when the Python program ends.

If the program ends normally, this module closes the groups of the program. If the program ends with an uncaught
exception, this module first ends the job on the other ranks, and the errors of the other ranks name the exception.
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
    """An object that holds connections or threads, and must be closed before the interpreter exits."""

    def fail(self, message: str) -> None:
        """Ends the job on the other ranks. The errors of these ranks contain `message`. Does nothing if the job has
        ended already."""

    def shutdown(self) -> None:
        """Closes the resource. A second call of `shutdown` does nothing."""


class GroupResource:
    """Closes a group of ranks, a `ParameterServer` or a `Gossip` when the program ends."""

    def __init__(self, group: _core.Group | _core.Gossip | _core.ParameterServer) -> None:
        self.group = group
        register_resource(self)

    def fail(self, message: str) -> None:
        with contextlib.suppress(_core.Error):  # the job has ended already
            self.group.abort(message)

    def shutdown(self) -> None:
        with contextlib.suppress(_core.Error):  # the job has failed, and its operations have already raised the error
            self.group.close()


# The registered resources, by the number of the registration. A weak set would not keep the order of the resources.
_resources: weakref.WeakValueDictionary[int, Resource] = weakref.WeakValueDictionary()
_registration_count = 0
# The id of the process that registered the resources.
_pid = 0
# The exception of which the other ranks have been informed.
_reported: BaseException | None = None


def register_resource(resource: Resource) -> None:
    """Calls `resource.shutdown()` when this process ends. If an uncaught exception ends the process, calls
    `resource.fail()` first. Resources are closed in the reverse order of their registration.
    """
    global _registration_count, _pid
    if not _registration_count:
        _install_exception_hook()
        atexit.register(_shut_down_all)
    if _pid != os.getpid():
        # This process was forked: the resources that were registered before belong to its parent.
        _resources.clear()
        _pid = os.getpid()
    _registration_count += 1
    _resources[_registration_count] = resource


def _install_exception_hook() -> None:
    previous = sys.excepthook

    def report_and_call_previous(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            _end_job_because_of(error)
        finally:
            previous(kind, error, trace)

    sys.excepthook = report_and_call_previous


def _end_job_because_of(error: BaseException) -> None:
    """Ends the job on the other ranks. The errors of these ranks name the exception `error`."""
    global _reported
    # Do nothing in an interactive session, which continues after an exception, and in a forked child, which is not a rank.
    if error is _reported or os.getpid() != _pid or hasattr(sys, "ps1") or sys.flags.interactive:
        return
    _reported = error
    # If the failure of the job is the cause of the exception, every rank has raised that error already.
    if isinstance(error, _core.JobFailed) or isinstance(error.__cause__, _core.JobFailed):
        return
    for resource in _resources_newest_first():
        resource.fail(f"its program ended with {type(error).__name__}: {error}; see that rank's own output for the traceback")


def _shut_down_all() -> None:
    if os.getpid() != _pid:
        return
    # If the program has replaced the hook, the exception that ended the program is still in `sys.last_value`.
    last = getattr(sys, "last_value", None)
    if last is not None:
        _end_job_because_of(last)
    for resource in _resources_newest_first():
        resource.shutdown()


def _resources_newest_first() -> list[Resource]:
    return [resource for _, resource in sorted(_resources.items(), reverse=True)]

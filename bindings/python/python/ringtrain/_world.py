"""The job that this process has joined."""

import os
import signal
import threading
from types import FrameType

from . import _core, _shutdown
from .group import Group

_lock = threading.Lock()
_world: Group | None = None
_resource: _shutdown.GroupResource | None = None


def join_world(**options: object) -> Group:
    """Returns the group of all ranks. Joins the job first if this process has not joined it yet."""
    global _world, _resource
    with _lock:
        if _world is None or _world.core.is_closed:
            _world = Group(_core.join(**options))  # type: ignore[arg-type]
            _resource = _shutdown.GroupResource(_world.core)
            _record_on_sigterm()
        elif options:
            raise _core.InvalidArgument("the job has been joined already; shut down before joining another")
        return _world


def _record_on_sigterm() -> None:
    """With a flight recorder, makes SIGTERM write the last operations before it ends the process, unless the program handles
    SIGTERM itself."""
    is_main = threading.current_thread() is threading.main_thread()
    if os.environ.get("RING_FLIGHT_RECORDER") and is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _write_record_and_end)


def _write_record_and_end(number: int, _frame: FrameType | None) -> None:
    if is_joined() and _world is not None:
        _world.write_flight_record(f"the process got {signal.Signals(number).name}")
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def current_world() -> Group:
    """Returns the group of all ranks. Raises `Error` if this process has not joined the job."""
    world = _world
    if world is None or world.core.is_closed:
        raise _core.Error("ringtrain is not initialised; call ringtrain.init() first")
    return world


def is_joined() -> bool:
    """Returns whether this process has joined a job and has not left it."""
    return _world is not None and not _world.core.is_closed


def leave_world() -> None:
    """Leaves the job. Does nothing if this process has not joined a job."""
    global _world
    with _lock:
        world, _world = _world, None
    if world is not None:
        world.close()


def abort_world(message: str) -> None:
    """Ends the job on every rank. The errors of all ranks contain `message`. Does nothing if this process has not joined a
    job."""
    world = _world
    if world is not None and not world.core.is_closed:
        world.core.abort(message)


# After a fork only the parent is a rank. In the child, every call raises `Forked`.
os.register_at_fork(before=_core.before_fork, after_in_child=_core.after_fork)

"""The job that this process has joined."""

import os
import threading

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
        elif options:
            raise _core.InvalidArgument("the job has been joined already; shut down before joining another")
        return _world


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

"""The job that this process belongs to."""

import os
import threading

from . import _core

_lock = threading.Lock()
_world: _core.Group | None = None


def join(**options) -> _core.Group:
    """The group of all ranks; joins the job if this process has not."""
    global _world
    with _lock:
        if _world is None or _world.is_closed:
            _world = _core.join(**options)
        elif options:
            raise _core.InvalidArgument("the job has been joined already; shut down before joining another")
        return _world


def current() -> _core.Group:
    """The group of all ranks, which this process has joined."""
    world = _world
    if world is None or world.is_closed:
        raise _core.Error("ringtrain is not initialised; call ringtrain.init() first")
    return world


def is_joined() -> bool:
    """Whether this process has joined its job and not left it."""
    return _world is not None and not _world.is_closed


def leave() -> None:
    """Leaves the job; does nothing if there is none."""
    global _world
    with _lock:
        world, _world = _world, None
    if world is not None:
        world.close()


os.register_at_fork(after_in_child=_core.after_fork)

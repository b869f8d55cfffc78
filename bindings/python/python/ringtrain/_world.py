"""The job that this process belongs to."""

import atexit
import os
import sys
import threading
from types import TracebackType

from . import _core
from .group import Group

_lock = threading.Lock()
_world: Group | None = None
_is_prepared = False


def join(**options: object) -> Group:
    """The group of all ranks; joins the job if this process has not."""
    global _world
    with _lock:
        if _world is None or _world.core.is_closed:
            _world = Group(_core.join(**options))  # type: ignore[arg-type]
            _prepare_for_the_end()
        elif options:
            raise _core.InvalidArgument("the job has been joined already; shut down before joining another")
        return _world


def current() -> Group:
    """The group of all ranks, which this process has joined."""
    world = _world
    if world is None or world.core.is_closed:
        raise _core.Error("ringtrain is not initialised; call ringtrain.init() first")
    return world


def is_joined() -> bool:
    """Whether this process has joined its job and not left it."""
    return _world is not None and not _world.core.is_closed


def leave() -> None:
    """Leaves the job; does nothing if there is none."""
    global _world
    with _lock:
        world, _world = _world, None
    if world is not None:
        world.close()


def give_up(message: str) -> None:
    """Ends the job on every rank, if this process belongs to one; the others are told why."""
    world = _world
    if world is not None and not world.core.is_closed:
        world.core.abort(message)


def _prepare_for_the_end() -> None:
    """A program that ends well says goodbye; one that dies of an exception tells the others so, who may wait for it."""
    global _is_prepared
    if _is_prepared:
        return
    _is_prepared = True
    atexit.register(_leave_at_exit)
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # Of a failed job all ranks know already.
        if not isinstance(error, _core.JobFailed):
            try:
                give_up(f"its program ended with {kind.__name__}: {error}; look at that rank's own output for where")
            except Exception as failure:  # noqa: BLE001  (what the program died of is what has to be shown)
                print(f"ringtrain: the other ranks could not be told: {failure}", file=sys.stderr)
        previous(kind, error, trace)

    sys.excepthook = hook


def _leave_at_exit() -> None:
    try:
        leave()
    except _core.Forked:
        pass


# A fork's child is no rank, if this process was one.
os.register_at_fork(before=_core.before_fork, after_in_child=_core.after_fork)

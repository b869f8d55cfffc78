"""The job of this process: its start and end, and the errors of operations inside jitted functions."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import jax
from jax._src import dispatch

from ringtrain import _core, _shutdown, _world
from ringtrain.group import Group
from ringtrain.jax import interrupts

_group: _core.Group | None = None
_resources: tuple[_shutdown.Resource, ...] = ()
# The first error of an operation inside a jitted function.
_failure: BaseException | None = None


def init(**options: Any) -> Group:
    """Joins the job, and returns the group of all ranks. Accepts the options of `ringtrain.init`. A second call without options
    returns the same group.

    The operations of this module have a group of their own, with the same ranks, so they do not mix with other operations of
    the group that this function returns.
    """
    global _group, _resources, _failure
    world = _world.join_world(**options)
    if _group is None or _group.is_closed:
        _forget_failed_operations()
        _failure = None
        _group = world.core.duplicate()
        # Resources are closed in reverse order, so the operations in progress end before the group is closed.
        _resources = (_shutdown.GroupResource(_group), _OperationsInProgress())
        interrupts.watch(_group)
        _install_exception_hook()
    return world


def shutdown() -> None:
    """Waits for the operations in progress, and leaves the job. Does nothing if this process has not joined a job."""
    global _group, _resources
    for resource in reversed(_resources):
        resource.shutdown()
    _group, _resources = None, ()
    _world.leave_world()


def is_initialized() -> bool:
    """Returns whether this process has called `init` and has not called `shutdown` since."""
    return _group is not None and not _group.is_closed


def current_group() -> _core.Group:
    """Returns the group of this module's operations. Raises `ringtrain.Error` if this process is not in a job, and
    `ringtrain.Forked` if it was forked from a rank."""
    require_rank()
    if _group is None or _group.is_closed:
        raise _core.Error("this process is not in a job; call ringtrain.jax.init() first")
    return _group


def rank() -> int:
    """Returns this process's rank in the job. In a jitted function, the rank is a constant."""
    return current_group().rank


def size() -> int:
    """Returns the number of ranks in the job. In a jitted function, the size is a constant."""
    return current_group().size


def local_rank() -> int:
    """Returns the number of this process among the ranks of the job on this host, counted from 0."""
    return current_group().local_rank


def local_size() -> int:
    """Returns the number of ranks of the job on this host."""
    return current_group().local_size


def require_rank() -> None:
    """Raises `ringtrain.Forked` in a process that was forked from a rank."""
    if _is_forked:
        raise _core.Forked(
            "this process was forked from a rank and is not a rank itself, and JAX does not work in forked processes: "
            "communicate in the parent, or start processes with spawn"
        )


def _mark_as_forked() -> None:
    global _is_forked
    _is_forked = _group is not None


_is_forked = False
os.register_at_fork(after_in_child=_mark_as_forked)


# Errors


def record_failure(error: BaseException) -> None:
    """Keeps the error of an operation inside a jitted function. JAX raises a `JaxRuntimeError` with the text of this error."""
    global _failure
    if _failure is None:
        _failure = error


def original_error(error: BaseException) -> BaseException | None:
    """Returns the error of the operation that made JAX raise `error`, or `None` if `error` has another cause."""
    if not isinstance(error, jax.errors.JaxRuntimeError):
        return None
    text = str(error)
    if _failure is not None and type(_failure).__name__ in text and str(_failure) in text:
        return _failure
    # Ctrl-C may interrupt the callback itself, outside the operation.
    return KeyboardInterrupt() if text.rstrip().endswith("\nKeyboardInterrupt:") else None


@contextlib.contextmanager
def job_errors() -> Iterator[None]:
    """Raises the error of an operation as itself, for example `ringtrain.PeerLost`, where JAX raises a `JaxRuntimeError`. Use
    it as a context manager, or as a decorator of the function that calls jitted functions:

        with ringtrain.jax.job_errors():
            for batch in batches:
                params, loss = step(params, batch)

    JAX runs jitted functions asynchronously, so an error may be raised where the program first uses a result.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        original = original_error(error)
        if original is None:
            raise
        raise original.with_traceback(None) from None


def wait_for_operations() -> None:
    """Waits until the jitted functions that this thread has called have executed their operations. Raises the error of an
    operation."""
    with job_errors():
        jax.effects_barrier()


def _forget_failed_operations() -> None:
    """Lets new jitted functions run: otherwise JAX would raise the error of a failed operation again in each of them."""
    dispatch.runtime_tokens.clear()


class _OperationsInProgress:
    """Waits at the end of the program for the operations of jitted functions whose results the program has not used."""

    def __init__(self) -> None:
        _shutdown.register_resource(self)

    def fail(self, message: str) -> None:
        """The group's own resource ends the job."""

    def shutdown(self) -> None:
        try:
            jax.effects_barrier()
        except Exception as error:
            _forget_failed_operations()
            # If an exception has ended the program, Python has printed it already.
            if getattr(sys, "last_value", None) is None:
                text = original_error(error) or error
                print(f"ringtrain.jax: an operation inside a jitted function has failed: {text}", file=sys.stderr)


_is_hook_installed = False


def _install_exception_hook() -> None:
    """Makes Python print the error of an operation instead of JAX's error, which has the same text inside a long traceback."""
    global _is_hook_installed
    if _is_hook_installed:
        return
    _is_hook_installed = True
    previous = sys.excepthook

    def print_original(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        original = original_error(error)
        if original is None:
            previous(kind, error, trace)
        else:
            previous(type(original), original.with_traceback(trace), trace)

    sys.excepthook = print_original

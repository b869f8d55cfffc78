"""Ends the job if Ctrl-C interrupts an operation of a jitted function.

While the main thread waits for a result of JAX, Python runs no signal handlers, and the operation runs in a thread of JAX. So a
separate thread gets the signals, through `signal.set_wakeup_fd`, and aborts the operation. JAX then returns to the main thread,
and Python raises `KeyboardInterrupt` there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from ringtrain import _core

# After Ctrl-C, an operation that takes longer than this number of seconds is aborted.
_PATIENCE_SECONDS = 0.1

_changed = threading.Condition()
# The number of operations that have begun, and whether one is in progress.
_begun = 0
_is_in_progress = False
_group: _core.Group | None = None
_is_watching = False


@contextlib.contextmanager
def in_progress() -> Iterator[None]:
    """Marks that an operation is in progress."""
    global _begun, _is_in_progress
    with _changed:
        _begun += 1
        _is_in_progress = True
        _changed.notify_all()
    try:
        yield
    finally:
        with _changed:
            _is_in_progress = False


def watch(group: _core.Group) -> None:
    """Aborts the operations of `group` on Ctrl-C, unless the program handles SIGINT or uses `signal.set_wakeup_fd` itself."""
    global _group, _is_watching
    _group = group
    is_main = threading.current_thread() is threading.main_thread()
    if _is_watching or not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writer, False)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if previous != -1:
        signal.set_wakeup_fd(previous)
        os.close(reader)
        os.close(writer)
        return
    _is_watching = True
    threading.Thread(target=_read_signals, args=(reader,), name="ringtrain-signals", daemon=True).start()


def _read_signals(reader: int) -> None:
    while numbers := os.read(reader, 64):
        if signal.SIGINT in numbers:
            _abort_operation()


def _abort_operation() -> None:
    """Aborts the operation in progress, or the next operation, unless the main thread runs Python code before. Then Python
    handles the signal."""
    position = _position_of_main_thread()
    while position is not None and position == _position_of_main_thread():
        with _changed:
            begun = _begun
            _changed.wait_for(lambda begun=begun: _begun != begun, _PATIENCE_SECONDS)
            is_stuck = _is_in_progress and _begun == begun
        if is_stuck and _group is not None:
            with contextlib.suppress(_core.Error):  # the job has ended already
                _group.abort("its program was interrupted by Ctrl-C")
            return


def _position_of_main_thread() -> tuple[FrameType, int] | None:
    """Returns the instruction that the main thread executes."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return None if frame is None else (frame, frame.f_lasti)

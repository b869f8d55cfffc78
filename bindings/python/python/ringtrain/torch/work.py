"""Subclasses of `torch.distributed.Work`, through which torch waits for an operation."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringtrain import _core
from ringtrain.torch import profiling
from ringtrain.torch.completion import Completer

# The interval at which a thread that completes futures checks whether its group is being closed. The thread must have left
# compiled code before the interpreter exits.
_CLOSE_CHECK_SECONDS = 0.25

# Communication hooks whose continuations begin no collectives. Such continuations may run in any thread at any time.
_HOOKS_WITHOUT_COLLECTIVES = ("torch.distributed.algorithms.ddp_comm_hooks.default_hooks",)

Explain = Callable[[Exception], Exception]


def seconds(timeout: timedelta | None) -> float | None:
    """Converts a timeout of torch to seconds, or to `None` for no timeout. If a program sets no timeout, torch passes
    0 or -1 ms.
    """
    if timeout is None or timeout.days < 0 or not timeout:
        return None
    return timeout.total_seconds()


class CompletedWork(dist._Work):
    """The `Work` of an operation that was already complete when its result was returned to torch."""

    def __init__(self, tensors: Sequence[Any] = (), source: int = -1) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._source = source

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def block_current_stream(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> Exception | None:
        return None

    def result(self) -> list[Any]:
        return self._tensors

    def source_rank(self) -> int:
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def get_future(self) -> torch.futures.Future:
        future = new_future(self._tensors)
        future.set_result(self._tensors)
        return future


class PendingWork(dist._Work):
    """The `Work` of operations that have begun. `handles` has one handle for each operation, and `tensors` receive
    the results. If the operations write to other memory than `tensors`, the functions in `after` copy the results to
    `tensors`.

    `completer` completes the futures of collectives in the order of the collectives. For sends and receives,
    `completer` is None: they can end in any order, so the future of each send or receive has its own thread. `event`
    is the operations' profiler event.
    """

    def __init__(
        self,
        handles: Sequence[_core.Handle],
        tensors: Sequence[Any],
        after: Sequence[Callable[[], None]],
        explain: Explain,
        completer: Completer | None,
        event: profiling.ProfilerEvent | None = None,
    ) -> None:
        super().__init__()
        self._handles = handles
        self._tensors = list(tensors)
        self._after = after
        self._explain = explain
        self._completer = completer
        self._event = event
        self._lock = threading.Lock()
        self._ended = False
        self._error: Exception | None = None
        self._source = -1
        self._future: torch.futures.Future | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until the operation has ended, and raises its error if it failed. Raises `ringtrain.StillRunning` after
        `timeout`; the operation then continues."""
        self.wait_seconds(seconds(timeout))
        return True

    def wait_seconds(self, limit: float | None) -> None:
        """Does the same as `wait`, with a limit in seconds."""
        if not self._ended:
            self._wait_handles(limit)
        if self._error is not None:
            raise self._error.with_traceback(None)

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def wait_while(self, keep_waiting: Callable[[], bool]) -> None:
        """Waits until the operation has ended, but does not raise its error. If `keep_waiting` returns False while
        the operation runs, this method stops waiting. In that case, the operation fails with the reason that the
        process group was closed.
        """
        while not self._ended:
            try:
                self._wait_handles(_CLOSE_CHECK_SECONDS)
            except _core.StillRunning:
                if not keep_waiting():
                    self._end(_core.Error("the process group was closed before the operation ended"))

    def is_completed(self) -> bool:
        if not self._ended and all(handle.test() for handle in self._handles):
            self._wait_handles(None)
        return self._ended

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Any]:
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        """Returns the rank that sent the message, or -1 while that rank is unknown."""
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def get_future(self) -> torch.futures.Future:
        """Returns a future whose value is the list of tensors.

        If the operation fails, the future's continuation raises the error. An error that is set on the future itself would crash
        DistributedDataParallel.

        A continuation may begin other collectives, as in PowerSGD, and all ranks must begin these collectives in the
        same order. Therefore, if a communication hook calls `get_future`, this method waits for the operation before
        it returns the future. The thread that adds a continuation to a complete future also runs the continuation.
        """
        if self._completer is not None and _is_called_by_hook():
            self.wait()
        return self.overlapping_future()

    def overlapping_future(self) -> torch.futures.Future:
        """Returns the same future as `get_future`, but never waits. The future's continuations must not begin collectives."""
        with self._lock:
            if self._future is not None:
                return self._future
            base = new_future(self._tensors)
            self._future = base.then(lambda _: self.result())
        if self._ended:
            base.set_result(None)
        elif self._completer is not None:
            self._completer.add(self, lambda: base.set_result(None))
        else:
            threading.Thread(target=self._complete_in_own_thread, args=(base,), name="ring-message", daemon=True).start()
        return self._future

    def _complete_in_own_thread(self, base: torch.futures.Future) -> None:
        self.wait_while(lambda: True)
        base.set_result(None)

    def _wait_handles(self, limit: float | None) -> None:
        """Waits for all handles and stores the first error. The only exception that this
        method raises is `StillRunning`, if an operation has not ended within `limit` seconds.
        """
        value = None
        try:
            for handle in self._handles:
                value = handle.wait(limit)
        except _core.StillRunning:
            raise
        except Exception as error:
            self._end(self._explain(error))
            return
        self._end(None, value)

    def _end(self, error: Exception | None, value: Any = None) -> None:
        with self._lock:
            if self._ended:
                return
            if error is None:
                try:
                    for copy in self._after:
                        copy()
                except Exception as failure:
                    error = failure
            if isinstance(value, tuple):
                self._source = value[0]
            self._error = error
            self._after = ()
            self._ended = True
        profiling.end_event(self._event)


def _is_called_by_hook() -> bool:
    """Returns whether a communication hook or other Python code within the backward pass called `get_future`.

    Returns False if torch's compiled code called `get_future`: then the innermost Python frame is that of the backward pass.
    """
    frame: types.FrameType | None = sys._getframe(2)
    if frame is None or frame.f_globals.get("__name__") in _HOOKS_WITHOUT_COLLECTIVES or _is_backward(frame):
        return False
    while frame is not None and not _is_backward(frame):
        frame = frame.f_back
    return frame is not None


def _is_backward(frame: types.FrameType) -> bool:
    return frame.f_code.co_name == "_engine_run_backward"


def new_future(tensors: Sequence[Any]) -> torch.futures.Future:
    """Returns a new future for these tensors. The future gets a list of the GPUs that hold the tensors."""
    devices = {tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor) and not tensor.is_cpu}
    return torch.futures.Future(devices=list(devices))

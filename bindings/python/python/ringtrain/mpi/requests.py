"""`MPI.Request`: operations in progress, persistent requests, and generalized requests."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from .. import _core
from . import constants as c
from .errors import Exception, to_mpi_exception
from .status import Status

# The result of an operation that has ended: the object, the source, the tag and the number of bytes.
Outcome = tuple[Any, int, int, int]
NOTHING: Outcome = (None, c.ANY_SOURCE, c.ANY_TAG, 0)
NO_PROCESS: Outcome = (None, c.PROC_NULL, c.ANY_TAG, 0)
# The longest pause in seconds between two tests of requests for which no handle can wait.
_PAUSE_MAX = 0.001


class CompletedHandle:
    """The handle of an operation that has already ended."""

    __slots__ = ("_result",)

    def __init__(self, result: Any = None) -> None:
        self._result = result

    def wait(self, timeout: float | None = None) -> Any:
        """Returns the result."""
        return self._result

    def test(self) -> bool:
        """Returns True."""
        return True

    def cancel(self) -> bool:
        """Returns False, because the operation has already ended."""
        return False


class CombinedHandle:
    """Combines several handles. The combined operation ends when all operations have ended, and has the result of the first
    handle."""

    __slots__ = ("_handles",)

    def __init__(self, *handles: Any) -> None:
        self._handles = handles

    def wait(self, timeout: float | None = None) -> Any:
        """Waits for all operations, and returns the result of the first handle."""
        deadline = None if timeout is None else time.monotonic() + timeout
        results = [handle.wait(None if deadline is None else max(0.0, deadline - time.monotonic())) for handle in self._handles]
        return results[0] if results else None

    def test(self) -> bool:
        """Returns whether all operations have ended."""
        return all([handle.test() for handle in self._handles])

    def cancel(self) -> bool:
        """Returns False, because a part of the combined operation has already been sent."""
        return False


class Request:
    """An operation in progress. The lower-case methods return the received object."""

    def __new__(cls, request: "Request | None" = None) -> "Request":
        self = super().__new__(cls)
        if request is None:
            self._handle: Any = None
            self._finish: Callable[[Any], Outcome] | None = None
            self._is_cancelled = False
        else:
            self.__dict__.update(request.__dict__)
        return self

    @classmethod
    def _of(cls, handle: Any, finish: Callable[[Any], Outcome] | None = None) -> "Request":
        self = Request.__new__(cls)
        self._handle, self._finish = handle, finish
        return self

    def _complete(self, status: Status | None) -> Any:
        """Waits until the operation has ended, makes the request null, and returns the received object."""
        handle = self._handle
        if handle is None:
            if status is not None:
                status._empty()
            return None
        if self._is_cancelled:
            self._forget()
            if status is not None:
                status._fill(c.ANY_SOURCE, c.ANY_TAG, 0, cancelled=True)
            return None
        finish = self._finish
        try:
            raw = handle.wait()
            outcome = NOTHING if finish is None else finish(raw)
        except _core.Error as error:
            if isinstance(error, _core.StillRunning):
                raise
            raise _mpi_exception(error, status) from error
        finally:
            self._forget()
        if status is not None:
            status._fill(outcome[1], outcome[2], outcome[3])
        return outcome[0]

    def _forget(self) -> None:
        self._handle = self._finish = None
        self._is_cancelled = False

    def _is_ready(self) -> bool:
        return self._handle is None or self._is_cancelled or self._handle.test()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Request):
            return NotImplemented
        return self is other or bool(self) is bool(other) and self._identity() is other._identity()

    def _identity(self) -> object:
        return self._handle

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return self._handle is not None

    def __reduce__(self) -> str:
        if self is REQUEST_NULL:
            return "REQUEST_NULL"
        raise ValueError("cannot serialize requests")

    def Wait(self, status: Status | None = None) -> bool:
        """Waits until the operation has ended."""
        self._complete(status)
        return True

    def Test(self, status: Status | None = None) -> bool:
        """Returns whether the operation has ended. If so, the request is null afterwards."""
        if not self._is_ready():
            return False
        self._complete(status)
        return True

    def Get_status(self, status: Status | None = None) -> bool:
        """Returns whether the operation has ended. Does not make the request null."""
        if not self._is_ready():
            return False
        if self._handle is not None and not self._is_cancelled:
            outcome = self._outcome()
            if status is not None:
                status._fill(*outcome[1:])
        elif status is not None:
            status._empty()
        return True

    def _outcome(self) -> Outcome:
        """Returns the result of an operation that has ended, and stores it for the call that completes the request."""
        try:
            raw = self._handle.wait()
            outcome = NOTHING if self._finish is None else self._finish(raw)
        except _core.Error as error:
            raise _mpi_exception(error, None) from error
        self._handle, self._finish = CompletedHandle(outcome), _return_outcome
        return outcome

    def wait(self, status: Status | None = None) -> Any:
        """Waits until the operation has ended, and returns the received object."""
        return self._complete(status)

    def test(self, status: Status | None = None) -> tuple[bool, Any | None]:
        """Returns whether the operation has ended, and the received object."""
        return (True, self._complete(status)) if self._is_ready() else (False, None)

    get_status = Get_status

    def Cancel(self) -> None:
        """Cancels a receive that has matched no message yet. A wait for the cancelled receive ends at once, and
        `Status.Is_cancelled` returns True."""
        if self._handle is None:
            raise Exception(c.ERR_REQUEST)
        self._is_cancelled = self._handle.cancel()

    cancel = Cancel

    def Free(self) -> None:
        """Makes the request null. The operation continues."""
        if self._handle is None:
            raise Exception(c.ERR_REQUEST)
        self._forget()

    def free(self) -> None:
        """Calls `Free` if the request is not null."""
        if self:
            self.Free()

    @classmethod
    def _next(cls, requests: Sequence["Request"], must_wait: bool) -> int | None:
        """Returns the index of a request that has ended. Returns `UNDEFINED` if all requests are null, and `None` if no request
        has ended."""
        active = [i for i, request in enumerate(requests) if request._handle is not None]
        if not active:
            return c.UNDEFINED
        for i in active:
            if requests[i]._is_ready():
                return i
        if not must_wait:
            return None
        handles = [requests[i]._handle for i in active]
        if all(isinstance(handle, _core.Handle) for handle in handles):
            found = _core.wait_any(handles)
            return active[0] if found is None else active[found]
        pause = 0.0
        while True:  # a request has a combined handle: test each request in turn, which also advances the operations
            for i in active:
                if requests[i]._is_ready():
                    return i
            time.sleep(pause)
            pause = min(2 * pause + 1e-6, _PAUSE_MAX)

    @classmethod
    def _some(cls, requests: Sequence["Request"], must_wait: bool) -> list[int] | None:
        first = cls._next(requests, must_wait)
        if first == c.UNDEFINED:
            return None
        if first is None:
            return []
        return [i for i, request in enumerate(requests) if request._handle is not None and request._is_ready()]

    @classmethod
    def _complete_all(
        cls, requests: Sequence["Request"], statuses: list[Status] | None, which: Sequence[int] | None = None
    ) -> list[Any]:
        objects, first = [], None
        _lengthen(statuses, len(requests) if which is None else len(which))
        for place, i in enumerate(range(len(requests)) if which is None else which):
            status = statuses[place] if statuses is not None and place < len(statuses) else None
            try:
                objects.append(requests[i]._complete(status))
            except Exception as error:  # complete the other requests too
                first = first or error
        if first is not None:
            raise first
        return objects

    @classmethod
    def Waitany(cls, requests: Sequence["Request"], status: Status | None = None) -> int:
        """Waits until a request has ended, and returns its index."""
        return cls.waitany(requests, status)[0]

    @classmethod
    def waitany(cls, requests: Sequence["Request"], status: Status | None = None) -> tuple[int, Any]:
        """Waits until a request has ended, and returns its index and its object."""
        found = cls._next(requests, True)
        if found == c.UNDEFINED:
            if status is not None:
                status._empty()
            return c.UNDEFINED, None
        return found, requests[found]._complete(status)

    @classmethod
    def Testany(cls, requests: Sequence["Request"], status: Status | None = None) -> tuple[int, bool]:
        """Returns the index of a request that has ended, and whether there is such a request."""
        return cls.testany(requests, status)[:2]

    @classmethod
    def testany(cls, requests: Sequence["Request"], status: Status | None = None) -> tuple[int, bool, Any | None]:
        """Returns the index of a request that has ended, whether there is such a request, and its object."""
        found = cls._next(requests, False)
        if found is None:
            return c.UNDEFINED, False, None
        if found == c.UNDEFINED:
            if status is not None:
                status._empty()
            return c.UNDEFINED, True, None
        return found, True, requests[found]._complete(status)

    @classmethod
    def Waitall(cls, requests: Sequence["Request"], statuses: list[Status] | None = None) -> bool:
        """Waits for all requests."""
        cls._complete_all(requests, statuses)
        return True

    @classmethod
    def waitall(cls, requests: Sequence["Request"], statuses: list[Status] | None = None) -> list[Any]:
        """Waits for all requests, and returns their objects."""
        return cls._complete_all(requests, statuses)

    @classmethod
    def Testall(cls, requests: Sequence["Request"], statuses: list[Status] | None = None) -> bool:
        """Returns whether all requests have ended."""
        return cls.testall(requests, statuses)[0]

    @classmethod
    def testall(cls, requests: Sequence["Request"], statuses: list[Status] | None = None) -> tuple[bool, list[Any] | None]:
        """Returns whether all requests have ended, and their objects."""
        if not all([request._is_ready() for request in requests]):
            return False, None
        return True, cls._complete_all(requests, statuses)

    @classmethod
    def Waitsome(cls, requests: Sequence["Request"], statuses: list[Status] | None = None) -> list[int] | None:
        """Waits until at least one request has ended. Returns the indices of the requests that have ended, or `None` if all
        requests are null."""
        return cls.waitsome(requests, statuses)[0]

    @classmethod
    def waitsome(
        cls, requests: Sequence["Request"], statuses: list[Status] | None = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        """Does the same as `Waitsome`, and also returns the objects of these requests."""
        which = cls._some(requests, True)
        return (None, None) if which is None else (which, cls._complete_all(requests, statuses, which))

    @classmethod
    def Testsome(cls, requests: Sequence["Request"], statuses: list[Status] | None = None) -> list[int] | None:
        """Returns the indices of the requests that have ended, or `None` if all requests are null. Does not wait."""
        return cls.testsome(requests, statuses)[0]

    @classmethod
    def testsome(
        cls, requests: Sequence["Request"], statuses: list[Status] | None = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        """Does the same as `Testsome`, and also returns the objects of these requests."""
        which = cls._some(requests, False)
        return (None, None) if which is None else (which, cls._complete_all(requests, statuses, which))

    @classmethod
    def Get_status_any(cls, requests: Sequence["Request"], status: Status | None = None) -> tuple[int, bool]:
        """Returns the index of a request that has ended, and whether there is such a request. Does not make the request null."""
        found = cls._next(requests, False)
        if found is None:
            return c.UNDEFINED, False
        if found != c.UNDEFINED:
            requests[found].Get_status(status)
        elif status is not None:
            status._empty()
        return found, True

    @classmethod
    def Get_status_all(cls, requests: Sequence["Request"], statuses: list[Status] | None = None) -> bool:
        """Returns whether all requests have ended. Does not make the requests null."""
        if not all([request._is_ready() for request in requests]):
            return False
        _lengthen(statuses, len(requests))
        for i, request in enumerate(requests):
            request.Get_status(statuses[i] if statuses is not None else None)
        return True

    @classmethod
    def Get_status_some(cls, requests: Sequence["Request"], statuses: list[Status] | None = None) -> list[int] | None:
        """Returns the indices of the requests that have ended. Does not make the requests null."""
        which = cls._some(requests, False)
        _lengthen(statuses, len(which or ()))
        for place, i in enumerate(which or ()):
            requests[i].Get_status(statuses[place] if statuses is not None else None)
        return which

    get_status_any = Get_status_any
    get_status_all = Get_status_all
    get_status_some = Get_status_some


class Prequest(Request):
    """An operation that a program can start several times. Each start parses the buffers again."""

    def __new__(cls, request: Request | None = None) -> "Prequest":
        self = super().__new__(cls, request)
        self.__dict__.setdefault("_begin", None)
        return self

    @classmethod
    def _prepared(cls, begin: Callable[[], Request]) -> "Prequest":
        self = cls.__new__(cls)
        self._begin = begin
        return self

    def _identity(self) -> object:
        return self._begin

    def __bool__(self) -> bool:
        return self._begin is not None

    def Start(self) -> None:
        """Starts the operation. Raises `Exception` if the operation is in progress."""
        if self._begin is None or self._handle is not None:
            raise Exception(c.ERR_REQUEST)
        started = self._begin()
        self._handle, self._finish = started._handle, started._finish

    @classmethod
    def Startall(cls, requests: Sequence["Prequest"]) -> None:
        """Starts all requests."""
        for request in requests:
            request.Start()

    def Free(self) -> None:
        """Makes the request null."""
        if self._begin is None:
            raise Exception(c.ERR_REQUEST)
        self._begin = None
        self._forget()


class Grequest(Request):
    """A generalized request. Its operation ends when the program calls `Complete`."""

    @classmethod
    def Start(
        cls,
        query_fn: Callable[..., None] | None = None,
        free_fn: Callable[..., None] | None = None,
        cancel_fn: Callable[..., None] | None = None,
        args: tuple | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> "Grequest":
        """Returns a new request. `query_fn(status, ..)` fills the status, `free_fn(..)` is called when the request is
        completed, and `cancel_fn(completed, ..)` cancels the operation."""
        self = cls.__new__(cls)
        event = self._event = _Event(cancel_fn, args or (), kwargs or {})

        def finish(obj: Any) -> Outcome:
            status = Status()
            if query_fn is not None:
                query_fn(status, *event.args, **event.kwargs)
            if free_fn is not None:
                free_fn(*event.args, **event.kwargs)
            return obj, status.source, status.tag, status.count

        self._handle, self._finish = event, finish
        return self

    def complete(self, obj: Any = None) -> None:
        """Ends the operation. `wait` then returns `obj`."""
        self._event.end(obj)

    def Complete(self) -> None:
        """Ends the operation."""
        self._event.end(None)


class _Event:
    """The handle of a `Grequest`."""

    def __init__(self, cancel_fn: Callable[..., None] | None, args: tuple, kwargs: dict[str, Any]) -> None:
        self._ended = threading.Event()
        self._cancel_fn = cancel_fn
        self._obj: Any = None
        self.args = args
        self.kwargs = kwargs

    def end(self, obj: Any) -> None:
        self._obj = obj
        self._ended.set()

    def wait(self, timeout: float | None = None) -> Any:
        self._ended.wait(timeout)
        return self._obj

    def test(self) -> bool:
        return self._ended.is_set()

    def cancel(self) -> bool:
        if self._cancel_fn is not None:
            self._cancel_fn(self._ended.is_set(), *self.args, **self.kwargs)
        return False


def _return_outcome(outcome: Outcome) -> Outcome:
    return outcome


def _mpi_exception(error: _core.Error, status: Status | None) -> Exception:
    """Returns the MPI exception for `error`. If a message was truncated, `status` describes this message afterwards."""
    if isinstance(error, _core.Truncated):
        if status is not None:
            status._fill(error.source, error.tag, error.count)
            status.error = c.ERR_TRUNCATE
        return to_mpi_exception(error, c.ERR_TRUNCATE)
    return to_mpi_exception(error)


def _lengthen(statuses: list[Status] | None, count: int) -> None:
    if isinstance(statuses, list) and len(statuses) < count:
        statuses += [Status() for _ in range(count - len(statuses))]


REQUEST_NULL = Request()

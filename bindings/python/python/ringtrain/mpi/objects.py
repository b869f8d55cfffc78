"""Messages and collectives of Python objects: the lower-case methods of communicators, which use pickles."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from .. import _core
from ..objects import call_with_encoded
from . import constants as c
from .errors import Exception, to_mpi_exception
from .messages import Message
from .operations import SUM, Op
from .pickling import pickle
from .point_to_point import TAG_MAX
from .requests import NO_PROCESS, CompletedHandle, Outcome, Request, _return_outcome
from .status import Status

_InvalidArgument, _Error = _core.InvalidArgument, _core.Error
_Reduction = Op | Callable[[Any, Any], Any]


class Objects:
    """The methods of communicators that send and receive Python objects."""

    _group: Any

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Sends an object."""
        self._send_object(obj, dest, tag, False)

    def _send_object(self, obj: Any, dest: int, tag: int, synchronous: bool) -> None:
        if dest == c.PROC_NULL:
            return
        if not 0 <= tag <= TAG_MAX or dest < 0:
            self._check_destination(dest, tag)  # type: ignore[attr-defined]
        try:
            self._group.send_bytes(pickle.dumps(obj), dest, tag, synchronous)
        except _Error as error:
            raise self._to_mpi_exception(error, dest, tag) from error

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Sends an object. Returns when a receive has matched the message."""
        self._send_object(obj, dest, tag, True)

    def recv(self, buf: Any = None, source: int = c.ANY_SOURCE, tag: int = c.ANY_TAG, status: Status | None = None) -> Any:
        """Receives an object. `buf` has no effect, because messages are always received whole."""
        if buf is not None:
            warnings.warn("the 'buf' argument is deprecated", UserWarning, stacklevel=2)
        if source == c.PROC_NULL:
            if status is not None:
                status._fill(*NO_PROCESS[1:])
            return None
        if source < -1 or not -1 <= tag <= TAG_MAX:
            self._parse_source_and_tag(source, tag)  # type: ignore[attr-defined]
        try:
            data, came_from, its_tag = self._group.receive_bytes(None if source < 0 else source, None if tag < 0 else tag)
        except _Error as error:
            raise self._to_mpi_exception(error, source, tag) from error
        if status is not None:
            status._fill(came_from, its_tag, len(data))
        return pickle.loads(data) if data else None  # `Send` with an empty buffer sends no bytes

    def _to_mpi_exception(self, error: _core.Error, rank: int, tag: int) -> Exception:
        is_rank = rank == c.ANY_SOURCE or rank < self._group.size
        return to_mpi_exception(error, c.ERR_RANK if isinstance(error, _InvalidArgument) and not is_rank else None)

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Begins to send an object, and returns a request."""
        return self._isend_object(obj, dest, tag, False)

    def _isend_object(self, obj: Any, dest: int, tag: int, synchronous: bool) -> Request:
        if dest == c.PROC_NULL:
            return Request._of(CompletedHandle())
        self._check_destination(dest, tag)  # type: ignore[attr-defined]
        try:
            return Request._of(self._group.send_bytes(pickle.dumps(obj), dest, tag, synchronous, async_op=True))
        except _Error as error:
            raise to_mpi_exception(error) from error

    def issend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Begins to send an object. The request is complete when a receive has matched the message."""
        return self._isend_object(obj, dest, tag, True)

    def bsend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Sends an object, and returns at once."""
        self.isend(obj, dest, tag)

    def ibsend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Sends an object. The returned request has already ended."""
        self.isend(obj, dest, tag)
        return Request._of(CompletedHandle())

    def irecv(self, buf: Any = None, source: int = c.ANY_SOURCE, tag: int = c.ANY_TAG) -> Request:
        """Begins to receive an object, and returns a request. `Request.wait` returns the object."""
        if source == c.PROC_NULL:
            return Request._of(CompletedHandle(NO_PROCESS), _return_outcome)
        source_or_any, tag_or_any = self._parse_source_and_tag(source, tag)  # type: ignore[attr-defined]
        try:
            return Request._of(self._group.receive_bytes(source_or_any, tag_or_any, async_op=True), _unpickle_message)
        except _Error as error:
            raise to_mpi_exception(error) from error

    def sendrecv(
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = c.ANY_SOURCE,
        recvtag: int = c.ANY_TAG,
        status: Status | None = None,
    ) -> Any:
        """Sends one object and receives another object at the same time."""
        self._parse_source_and_tag(c.ANY_SOURCE if source == c.PROC_NULL else source, recvtag)  # type: ignore[attr-defined]
        sent = self.isend(sendobj, dest, sendtag)
        try:
            return self.recv(recvbuf, source, recvtag, status)
        finally:
            sent.wait()

    def probe(self, source: int = c.ANY_SOURCE, tag: int = c.ANY_TAG, status: Status | None = None) -> bool:
        """Waits for a message, but does not receive it."""
        return self.Probe(source, tag, status)  # type: ignore[attr-defined]

    def iprobe(self, source: int = c.ANY_SOURCE, tag: int = c.ANY_TAG, status: Status | None = None) -> bool:
        """Returns whether there is a message. Does not receive the message."""
        return self.Iprobe(source, tag, status)  # type: ignore[attr-defined]

    def mprobe(self, source: int = c.ANY_SOURCE, tag: int = c.ANY_TAG, status: Status | None = None) -> Message:
        """Waits for a message and takes it. Then only the returned object can receive this message."""
        return self.Mprobe(source, tag, status)  # type: ignore[attr-defined]

    def improbe(self, source: int = c.ANY_SOURCE, tag: int = c.ANY_TAG, status: Status | None = None) -> Message | None:
        """Takes a message if there is one. Otherwise returns None."""
        return self.Improbe(source, tag, status)  # type: ignore[attr-defined]

    def barrier(self) -> None:
        """Waits until all ranks have called `barrier`."""
        self._call("barrier")

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Returns the root's object on every rank."""
        is_root = self._is_root(root)
        return pickle.loads(self._exchange_objects("broadcast_bytes", lambda: pickle.dumps(obj) if is_root else None, root))

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Returns the list of all ranks' objects on the root, and None on the other ranks."""
        self._is_root(root)
        parts = self._exchange_objects("gather_bytes", lambda: pickle.dumps(sendobj), root)
        return None if parts is None else [pickle.loads(part) for part in parts]

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Returns item r of the root's sequence on rank r."""
        is_root = self._is_root(root)
        return pickle.loads(
            self._exchange_objects("scatter_bytes", lambda: self._pickle_items(sendobj) if is_root else None, root)
        )

    def allgather(self, sendobj: Any) -> list[Any]:
        """Returns the list of all ranks' objects on every rank."""
        return [pickle.loads(part) for part in self._exchange_objects("all_gather_bytes", lambda: pickle.dumps(sendobj))]

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Sends item r to rank r. Returns the list of the items that the ranks sent to this rank."""
        return [pickle.loads(part) for part in self._exchange_objects("all_to_all_bytes", lambda: self._pickle_items(sendobj))]

    def reduce(self, sendobj: Any, op: _Reduction = SUM, root: int = 0) -> Any | None:
        """Reduces all ranks' objects from left to right. Returns the result on the root, and None on the other ranks."""
        objects = self.gather(sendobj, root)
        return None if objects is None else _reduce_objects(objects, op)

    def allreduce(self, sendobj: Any, op: _Reduction = SUM) -> Any:
        """Reduces all ranks' objects from left to right, and returns the result on every rank."""
        return _reduce_objects(self.allgather(sendobj), op)

    def scan(self, sendobj: Any, op: _Reduction = SUM) -> Any:
        """Reduces the objects of rank 0 to this rank from left to right, and returns the result."""
        return _reduce_objects(self.allgather(sendobj)[: self._group.rank + 1], op)

    def exscan(self, sendobj: Any, op: _Reduction = SUM) -> Any:
        """Reduces the objects of the ranks before this rank from left to right, and returns the result. Returns None on rank
        0."""
        before = self.allgather(sendobj)[: self._group.rank]
        return _reduce_objects(before, op) if before else None

    def _is_root(self, root: int) -> bool:
        group = self._group
        if not 0 <= root < group.size:
            raise Exception(c.ERR_ROOT, f"{root} is not a rank of a communicator of size {group.size}")
        return root == group.rank

    def _call(self, operation: str, *arguments: Any) -> Any:
        try:
            return getattr(self._group, operation)(*arguments)
        except _Error as error:
            raise to_mpi_exception(error) from error

    def _exchange_objects(self, operation: str, encode: Callable[[], Any], *arguments: Any) -> Any:
        try:
            return call_with_encoded(getattr(self._group, operation), encode, *arguments)
        except _Error as error:
            raise to_mpi_exception(error) from error

    def _pickle_items(self, items: Sequence[Any] | None) -> list[bytes]:
        size = self._group.size
        if items is None:
            return [pickle.dumps(None)] * size
        items = list(items)
        if len(items) != size:
            raise ValueError(f"expecting {size} items, got {len(items)}")
        return [pickle.dumps(item) for item in items]


def _unpickle_message(raw: tuple[bytes, int, int]) -> Outcome:
    data, source, tag = raw
    return pickle.loads(data) if data else None, source, tag, len(data)


def _reduce_objects(objects: Sequence[Any], op: _Reduction) -> Any:
    result = objects[0]
    for other in objects[1:]:
        result = op(result, other)
    return result

"""`MPI.Message`: a message that a matched probe has taken, and that only one receive can get."""

from typing import TYPE_CHECKING, Any

from . import constants as c
from .buffers import parse_block
from .errors import Exception
from .pickling import pickle
from .requests import CompletedHandle, Request, _return_outcome
from .status import Status

if TYPE_CHECKING:
    from .communicator import Comm


class Message:
    """A message that a matched probe has taken. After a receive, this object is null."""

    __slots__ = ("_data", "_source", "_tag")

    def __new__(cls, message: "Message | None" = None) -> "Message":
        self = super().__new__(cls)
        for slot in Message.__slots__:
            setattr(self, slot, None if message is None else getattr(message, slot))
        return self

    @classmethod
    def _of(cls, data: bytes, source: int, tag: int) -> "Message":
        self = cls.__new__(cls)
        self._data, self._source, self._tag = data, source, tag
        return self

    def _take(self) -> tuple[bytes, int, int]:
        if self._data is None:
            raise Exception(c.ERR_REQUEST, "the message has been received already, or there is none")
        taken = self._data, self._source, self._tag
        if self._source == c.PROC_NULL:
            return taken
        self._data = self._source = self._tag = None
        return taken

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return self._source == other._source and (self._data is other._data or self._source == c.PROC_NULL)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return self._data is not None

    def __reduce__(self) -> str:
        if self is MESSAGE_NULL:
            return "MESSAGE_NULL"
        if self is MESSAGE_NO_PROC:
            return "MESSAGE_NO_PROC"
        raise ValueError("cannot serialize messages")

    def free(self) -> None:
        """Discards the message."""
        self._data = self._source = self._tag = None

    @classmethod
    def Probe(cls, comm: "Comm", source: int = c.ANY_SOURCE, tag: int = c.ANY_TAG, status: Status | None = None) -> "Message":
        """Does the same as `Comm.Mprobe`."""
        return cls(comm.Mprobe(source, tag, status))

    @classmethod
    def Iprobe(
        cls, comm: "Comm", source: int = c.ANY_SOURCE, tag: int = c.ANY_TAG, status: Status | None = None
    ) -> "Message | None":
        """Does the same as `Comm.Improbe`."""
        message = comm.Improbe(source, tag, status)
        return None if message is None else cls(message)

    probe = Probe
    iprobe = Iprobe

    def Recv(self, buf: Any, status: Status | None = None) -> None:
        """Copies the message into a buffer. Raises `Exception` of the class `ERR_TRUNCATE` if the message is longer than the
        buffer."""
        data, source, tag = self._take()
        if source != c.PROC_NULL:
            block = parse_block(buf, True)
            if len(data) > block.nbytes:
                raise Exception(c.ERR_TRUNCATE, f"a message of {len(data)} bytes does not fit into {block.nbytes}")
            block.store(data)
        if status is not None:
            status._fill(source, tag, len(data))

    def Irecv(self, buf: Any) -> Request:
        """Copies the message into a buffer. The returned request has already ended."""
        status = Status()
        self.Recv(buf, status)
        return Request._of(CompletedHandle((None, status.source, status.tag, status.count)), _return_outcome)

    def recv(self, status: Status | None = None) -> Any:
        """Returns the object in the message."""
        data, source, tag = self._take()
        if status is not None:
            status._fill(source, tag, len(data))
        return pickle.loads(data) if data else None

    def irecv(self) -> Request:
        """Returns a request that has already ended. `Request.wait` returns the object in the message."""
        status = Status()
        obj = self.recv(status)
        return Request._of(CompletedHandle((obj, status.source, status.tag, status.count)), _return_outcome)


MESSAGE_NULL = Message()
MESSAGE_NO_PROC = Message._of(b"", c.PROC_NULL, c.ANY_TAG)

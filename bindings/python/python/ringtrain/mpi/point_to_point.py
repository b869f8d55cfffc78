"""Messages in buffers: `Send`, `Recv` and related methods. Messages are sent as bytes, regardless of the datatypes on both
sides."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import _core
from . import constants as c
from .buffers import Block, parse_block
from .datatypes import DATATYPES_BY_DTYPE_ID
from .errors import Exception, to_mpi_exception, unsupported
from .messages import Message
from .requests import NO_PROCESS, CombinedHandle, CompletedHandle, Outcome, Prequest, Request, _mpi_exception, _return_outcome
from .status import Status

TAG_MAX = 2**31 - 1
_InvalidArgument, _Error, _ndarray = _core.InvalidArgument, _core.Error, np.ndarray


class PointToPoint:
    """The methods of communicators that send and receive buffers."""

    _group: Any

    def _check_destination(self, dest: int, tag: int) -> None:
        if not 0 <= dest < self._group.size:
            raise Exception(c.ERR_RANK, f"{dest} is not a rank of a communicator of size {self._group.size}")
        if not 0 <= tag <= TAG_MAX:
            raise Exception(c.ERR_TAG, f"{tag} is not within 0 and {TAG_MAX}")

    def _parse_source_and_tag(self, source: int, tag: int) -> tuple[int | None, int | None]:
        """Converts a source and a tag to ringtrain's form, in which `None` matches any source or any tag."""
        if source != c.ANY_SOURCE and not 0 <= source < self._group.size:
            raise Exception(c.ERR_RANK, f"{source} is not a rank of a communicator of size {self._group.size}")
        if tag != c.ANY_TAG and not 0 <= tag <= TAG_MAX:
            raise Exception(c.ERR_TAG, f"{tag} is not within 0 and {TAG_MAX}")
        return (None if source < 0 else source), (None if tag < 0 else tag)

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Sends a buffer. Returns when the program may change the buffer again."""
        self._send(buf, dest, tag, False)

    def _send(self, buf: Any, dest: int, tag: int, synchronous: bool) -> None:
        if type(buf) is _ndarray and id(buf.dtype) in DATATYPES_BY_DTYPE_ID and dest >= 0 and 0 <= tag <= TAG_MAX:
            try:
                return self._group.send_bytes(buf, dest, tag, synchronous)
            except _InvalidArgument:
                pass  # nothing has been sent: the code below accepts more buffers, or raises MPI's error
            except _Error as error:
                raise to_mpi_exception(error) from error
        if dest == c.PROC_NULL:
            return None
        self._check_destination(dest, tag)
        data = parse_block(buf, False).send_memory()
        try:
            return self._group.send_bytes(data, dest, tag, synchronous)
        except _Error as error:
            raise to_mpi_exception(error) from error

    def Recv(self, buf: Any, source: int = c.ANY_SOURCE, tag: int = c.ANY_TAG, status: Status | None = None) -> None:
        """Receives a message into a buffer. Raises `Exception` of the class `ERR_TRUNCATE` if the message is longer than the
        buffer. The message is then lost."""
        if type(buf) is _ndarray and id(buf.dtype) in DATATYPES_BY_DTYPE_ID and source >= -1 and -1 <= tag <= TAG_MAX:
            try:
                got = self._group.receive_into_bytes(buf, None if source < 0 else source, None if tag < 0 else tag)
                if status is not None:
                    status._fill(*got)
                return
            except _InvalidArgument as error:
                if isinstance(error, _core.Truncated):
                    raise _mpi_exception(error, status) from error
            except _Error as error:
                raise to_mpi_exception(error) from error
        if source == c.PROC_NULL:
            if status is not None:
                status._fill(*NO_PROCESS[1:])
            return
        self._receive_block(parse_block(buf, True), source, tag, status)

    def _receive_block(self, block: Block, source: int, tag: int, status: Status | None) -> None:
        source_or_any, tag_or_any = self._parse_source_and_tag(source, tag)
        place = block.receive_memory()
        try:
            got = self._group.receive_into_bytes(place, source_or_any, tag_or_any)
        except _Error as error:
            raise _mpi_exception(error, status) from error
        block.store_received(place[: got[2]])
        if status is not None:
            status._fill(*got)

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Begins to send a buffer, and returns a request."""
        return self._isend(buf, dest, tag, False)

    def _isend(self, buf: Any, dest: int, tag: int, synchronous: bool) -> Request:
        if dest == c.PROC_NULL:
            return Request._of(CompletedHandle())
        self._check_destination(dest, tag)
        data = parse_block(buf, False).send_memory()
        try:
            return Request._of(self._group.send_bytes(data, dest, tag, synchronous, async_op=True))
        except _Error as error:
            raise to_mpi_exception(error) from error

    def Irecv(self, buf: Any, source: int = c.ANY_SOURCE, tag: int = c.ANY_TAG) -> Request:
        """Begins to receive a message into a buffer, and returns a request."""
        if source == c.PROC_NULL:
            return Request._of(CompletedHandle(NO_PROCESS), _return_outcome)
        source_or_any, tag_or_any = self._parse_source_and_tag(source, tag)
        block = parse_block(buf, True)
        place = block.receive_memory()
        try:
            handle = self._group.receive_into_bytes(place, source_or_any, tag_or_any, async_op=True)
        except _Error as error:
            raise to_mpi_exception(error) from error
        return Request._of(handle, _store_function(block, place))

    def Sendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = c.ANY_SOURCE,
        recvtag: int = c.ANY_TAG,
        status: Status | None = None,
    ) -> None:
        """Sends one buffer, and receives a message into another buffer at the same time."""
        # Check the arguments of the receive before the send begins.
        block = None if source == c.PROC_NULL else parse_block(recvbuf, True)
        self._parse_source_and_tag(c.ANY_SOURCE if source == c.PROC_NULL else source, recvtag)
        sent = self.Isend(sendbuf, dest, sendtag)
        try:
            if block is not None:
                self._receive_block(block, source, recvtag, status)
            elif status is not None:
                status._fill(*NO_PROCESS[1:])
        finally:
            sent.Wait()

    def Sendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int = c.ANY_SOURCE,
        recvtag: int = c.ANY_TAG,
        status: Status | None = None,
    ) -> None:
        """Sends a buffer, and receives a message into the same buffer."""
        self.Sendrecv(self._copy_bytes(buf, dest), dest, sendtag, buf, source, recvtag, status)

    def Isendrecv(
        self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, source: int = c.ANY_SOURCE, recvtag: int = c.ANY_TAG
    ) -> Request:
        """Begins a `Sendrecv`, and returns a request."""
        received = self.Irecv(recvbuf, source, recvtag)
        sent = self.Isend(sendbuf, dest, sendtag)
        return Request._of(CombinedHandle(received._handle, sent._handle), received._finish)

    def Isendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = c.ANY_SOURCE, recvtag: int = c.ANY_TAG
    ) -> Request:
        """Begins a `Sendrecv_replace`, and returns a request."""
        return self.Isendrecv(self._copy_bytes(buf, dest), dest, sendtag, buf, source, recvtag)

    @staticmethod
    def _copy_bytes(buf: Any, dest: int) -> bytes:
        return b"" if dest == c.PROC_NULL else bytes(parse_block(buf, False).send_memory())

    def Bsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Sends a copy of a buffer, and returns at once. Needs no attached buffer."""
        self.Ibsend(buf, dest, tag)

    def Ibsend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Sends a copy of a buffer. The returned request has already ended."""
        if dest != c.PROC_NULL:
            self.Isend(self._copy_bytes(buf, dest), dest, tag)
        return Request._of(CompletedHandle())

    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Sends a buffer. Returns when a receive has matched the message."""
        self._send(buf, dest, tag, True)

    def Issend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Begins to send a buffer. The request is complete when a receive has matched the message."""
        return self._isend(buf, dest, tag, True)

    def Rsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Does the same as `Send`."""
        self.Send(buf, dest, tag)

    def Irsend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Does the same as `Isend`."""
        return self.Isend(buf, dest, tag)

    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Returns a persistent request for `Send`."""
        return self._prepared(lambda: self.Isend(buf, dest, tag))

    def Recv_init(self, buf: Any, source: int = c.ANY_SOURCE, tag: int = c.ANY_TAG) -> Prequest:
        """Returns a persistent request for `Recv`."""
        return self._prepared(lambda: self.Irecv(buf, source, tag))

    def Bsend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Returns a persistent request for `Bsend`."""
        return self._prepared(lambda: self.Ibsend(buf, dest, tag))

    def Ssend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Returns a persistent request for `Ssend`."""
        return self._prepared(lambda: self.Issend(buf, dest, tag))

    Rsend_init = Send_init

    def _prepared(self, begin: Callable[[], Request]) -> Prequest:
        self._group.size  # noqa: B018  (a null communicator raises here)
        return Prequest._prepared(begin)

    def Psend_init(self, *_args: Any, **_options: Any) -> Prequest:
        """Not supported."""
        raise unsupported("MPI.Comm.Psend_init")

    def Precv_init(self, *_args: Any, **_options: Any) -> Prequest:
        """Not supported."""
        raise unsupported("MPI.Comm.Precv_init")

    def _probe(self, source: int, tag: int, timeout: float) -> tuple[int, int, int] | None:
        source_or_any, tag_or_any = self._parse_source_and_tag(source, tag)
        try:
            found = self._group.probe(source_or_any, tag_or_any, timeout)
        except _Error as error:
            raise to_mpi_exception(error) from error
        return None if found is None else found[:3]

    def Probe(self, source: int = c.ANY_SOURCE, tag: int = c.ANY_TAG, status: Status | None = None) -> bool:
        """Waits for a message, but does not receive it."""
        found = NO_PROCESS[1:] if source == c.PROC_NULL else None
        while found is None:
            found = self._probe(source, tag, self._group.timeout)
        if status is not None:
            status._fill(*found)
        return True

    def Iprobe(self, source: int = c.ANY_SOURCE, tag: int = c.ANY_TAG, status: Status | None = None) -> bool:
        """Returns whether there is a message. Does not receive the message."""
        found = NO_PROCESS[1:] if source == c.PROC_NULL else self._probe(source, tag, 0.0)
        if found is not None and status is not None:
            status._fill(*found)
        return found is not None

    def Mprobe(self, source: int = c.ANY_SOURCE, tag: int = c.ANY_TAG, status: Status | None = None) -> Message:
        """Waits for a message and takes it. Then only the returned object can receive this message."""
        message = self._take_message(source, tag, status, self._group.timeout)
        while message is None:
            message = self._take_message(source, tag, status, self._group.timeout)
        return message

    def Improbe(self, source: int = c.ANY_SOURCE, tag: int = c.ANY_TAG, status: Status | None = None) -> Message | None:
        """Takes a message if there is one. Otherwise returns None."""
        return self._take_message(source, tag, status, 0.0)

    def _take_message(self, source: int, tag: int, status: Status | None, timeout: float) -> Message | None:
        if source == c.PROC_NULL:
            if status is not None:
                status._fill(*NO_PROCESS[1:])
            return Message._of(b"", c.PROC_NULL, c.ANY_TAG)
        found = self._probe(source, tag, timeout)
        if found is None:
            return None
        try:
            data, came_from, its_tag = self._group.receive_bytes(found[0], found[1])
        except _Error as error:
            raise to_mpi_exception(error) from error
        if status is not None:
            status._fill(came_from, its_tag, len(data))
        return Message._of(data, came_from, its_tag)


def _store_function(block: Block, place: memoryview) -> Callable[[tuple[int, int, int]], Outcome]:
    if block.is_flat:
        return _status_outcome

    def finish(got: tuple[int, int, int]) -> Outcome:
        block.store_received(place[: got[2]])
        return (None, *got)

    return finish


def _status_outcome(got: tuple[int, int, int]) -> Outcome:
    return (None, *got)

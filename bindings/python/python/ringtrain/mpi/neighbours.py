"""Collectives among the neighbours of a process in a topology. These collectives send messages in a separate group."""

import builtins
from collections.abc import Sequence
from typing import Any

from .. import _core
from . import constants as c
from .buffers import Block, Blocks, parse_block, parse_blocks, parse_blocks_w
from .errors import Exception, to_mpi_exception
from .info import INFO_NULL
from .pickling import pickle
from .requests import NOTHING, CombinedHandle, Outcome, Prequest, Request

_OBJECT, _REASON = b"o", b"r"
"""The first byte of a message of `neighbor_alltoall` says what follows: a pickled object, or the reason why the sender has no
object."""


class Neighbours:
    """The methods of communicators with a topology. Neighbours are in MPI's order: for each dimension, first the neighbour
    before this process, then the neighbour after it."""

    _group: Any
    _state: Any

    inedges = property(lambda self: self._neighbours())
    outedges = property(lambda self: self._neighbours())
    inoutedges = property(lambda self: (self._neighbours(), self._neighbours()))
    indegree = property(lambda self: len(self._neighbours()))
    outdegree = property(lambda self: len(self._neighbours()))
    degrees = property(lambda self: (len(self._neighbours()), len(self._neighbours())))

    def _neighbours(self) -> list[int]:
        return self._grid.neighbours(self._group.rank)  # type: ignore[attr-defined]

    def _begin_exchange(self, outgoing: Sequence[Any], incoming: Sequence[Block]) -> Request:
        """Begins to send one message to each neighbour, and to receive one message from each neighbour.

        The message to the neighbour after this process arrives there as the message from the neighbour before. The tag of a
        message is the index of the sender among the receiver's neighbours: `place ^ 1`. So two messages have different tags
        even if both neighbours of a dimension are the same rank."""
        neighbour_group, handles, settled = self._state.neighbour_group, [], []
        try:
            for place, (rank, block) in enumerate(zip(self._neighbours(), incoming, strict=True)):
                if rank != c.PROC_NULL:
                    memory = block.receive_memory()
                    handles.append(neighbour_group.receive_into_bytes(memory, rank, place, async_op=True))
                    settled.append((block, memory))
            for place, (rank, data) in enumerate(zip(self._neighbours(), outgoing, strict=True)):
                if rank != c.PROC_NULL:
                    handles.append(neighbour_group.send_bytes(data, rank, place ^ 1, async_op=True))
        except _core.Error as error:
            raise to_mpi_exception(error) from error

        def finish(_raw: Any) -> Outcome:
            for block, memory in settled:
                block.store_received(memory)
            return NOTHING

        return Request._of(CombinedHandle(*handles), finish)

    def Ineighbor_allgather(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Begins to send the same buffer to all neighbours, and to receive one buffer from each neighbour."""
        count = len(self._neighbours())
        first = parse_block(recvbuf, True, count)
        data = parse_block(sendbuf, False).send_memory()
        return self._begin_exchange([data] * count, [first.part(i, first.count) for i in range(count)])

    def Ineighbor_allgatherv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Does the same as `Ineighbor_allgather`, with a separate length and position for the buffer of each neighbour."""
        count = len(self._neighbours())
        data = parse_block(sendbuf, False).send_memory()
        return self._begin_exchange([data] * count, parse_blocks(recvbuf, True, count).blocks())

    def Ineighbor_alltoall(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Begins to send one part of the buffer to each neighbour, and to receive one part from each neighbour."""
        count = len(self._neighbours())
        sent, first = parse_block(sendbuf, False, count), parse_block(recvbuf, True, count)
        parts = [sent.part(i, sent.count).send_memory() for i in range(count)]
        return self._begin_exchange(parts, [first.part(i, first.count) for i in range(count)])

    def Ineighbor_alltoallv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Does the same as `Ineighbor_alltoall`, with a separate length and position for each part."""
        count = len(self._neighbours())
        return self._begin_block_exchange(parse_blocks(sendbuf, False, count), parse_blocks(recvbuf, True, count))

    def Ineighbor_alltoallw(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Does the same as `Ineighbor_alltoallv`, with a separate datatype for each part."""
        count = len(self._neighbours())
        return self._begin_block_exchange(parse_blocks_w(sendbuf, False, count), parse_blocks_w(recvbuf, True, count))

    def _begin_block_exchange(self, sent: Blocks, received: Blocks) -> Request:
        return self._begin_exchange([block.send_memory() for block in sent.blocks()], received.blocks())

    def Neighbor_allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Sends the same buffer to all neighbours, and receives one buffer from each neighbour."""
        self.Ineighbor_allgather(sendbuf, recvbuf).Wait()

    def Neighbor_allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Does the same as `Neighbor_allgather`, with a separate length and position for the buffer of each neighbour."""
        self.Ineighbor_allgatherv(sendbuf, recvbuf).Wait()

    def Neighbor_alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """Sends one part of the buffer to each neighbour, and receives one part from each neighbour."""
        self.Ineighbor_alltoall(sendbuf, recvbuf).Wait()

    def Neighbor_alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Does the same as `Neighbor_alltoall`, with a separate length and position for each part."""
        self.Ineighbor_alltoallv(sendbuf, recvbuf).Wait()

    def Neighbor_alltoallw(self, sendbuf: Any, recvbuf: Any) -> None:
        """Does the same as `Neighbor_alltoallv`, with a separate datatype for each part."""
        self.Ineighbor_alltoallw(sendbuf, recvbuf).Wait()

    def Neighbor_allgather_init(self, sendbuf: Any, recvbuf: Any, info: Any = INFO_NULL) -> Prequest:
        """Returns a persistent request for `Neighbor_allgather`."""
        return self._prepared(lambda: self.Ineighbor_allgather(sendbuf, recvbuf))  # type: ignore[attr-defined]

    def Neighbor_allgatherv_init(self, sendbuf: Any, recvbuf: Any, info: Any = INFO_NULL) -> Prequest:
        """Returns a persistent request for `Neighbor_allgatherv`."""
        return self._prepared(lambda: self.Ineighbor_allgatherv(sendbuf, recvbuf))  # type: ignore[attr-defined]

    def Neighbor_alltoall_init(self, sendbuf: Any, recvbuf: Any, info: Any = INFO_NULL) -> Prequest:
        """Returns a persistent request for `Neighbor_alltoall`."""
        return self._prepared(lambda: self.Ineighbor_alltoall(sendbuf, recvbuf))  # type: ignore[attr-defined]

    def Neighbor_alltoallv_init(self, sendbuf: Any, recvbuf: Any, info: Any = INFO_NULL) -> Prequest:
        """Returns a persistent request for `Neighbor_alltoallv`."""
        return self._prepared(lambda: self.Ineighbor_alltoallv(sendbuf, recvbuf))  # type: ignore[attr-defined]

    def Neighbor_alltoallw_init(self, sendbuf: Any, recvbuf: Any, info: Any = INFO_NULL) -> Prequest:
        """Returns a persistent request for `Neighbor_alltoallw`."""
        return self._prepared(lambda: self.Ineighbor_alltoallw(sendbuf, recvbuf))  # type: ignore[attr-defined]

    def neighbor_allgather(self, sendobj: Any) -> list[Any]:
        """Sends the same object to all neighbours. Returns the objects of the neighbours, with None for each missing
        neighbour."""
        return self.neighbor_alltoall([sendobj] * len(self._neighbours()))

    def neighbor_alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Sends one object to each neighbour. Returns the objects of the neighbours, with None for each missing neighbour."""
        ranks, own_error = self._neighbours(), None
        try:
            items = list(sendobj)
            if len(items) != len(ranks):
                raise ValueError(f"expecting {len(ranks)} items, got {len(items)}")
            messages = [_OBJECT + pickle.dumps(item) for item in items]
        except builtins.Exception as error:
            own_error = error
            messages = [_REASON + f"{type(error).__name__}: {error}".encode()] * len(ranks)
        received = self._exchange_messages(ranks, messages)
        if own_error is not None:
            raise own_error
        for rank, data in zip(ranks, received, strict=True):
            if data.startswith(_REASON):
                reason = data.removeprefix(_REASON).decode()
                raise Exception(c.ERR_OTHER, f"rank {self._group.members[rank]} did not contribute to this collective: {reason}")
        return [pickle.loads(data[1:]) if data else None for data in received]

    def _exchange_messages(self, ranks: Sequence[int], messages: Sequence[bytes]) -> list[bytes]:
        """Sends a message to each neighbour. Returns the messages of the neighbours, with empty bytes for each missing
        neighbour."""
        neighbour_group = self._state.neighbour_group
        try:
            sent = [
                neighbour_group.send_bytes(message, rank, place ^ 1, async_op=True)
                for place, (rank, message) in enumerate(zip(ranks, messages, strict=True))
                if rank != c.PROC_NULL
            ]
            received = [
                b"" if rank == c.PROC_NULL else neighbour_group.receive_bytes(rank, place)[0] for place, rank in enumerate(ranks)
            ]
            for handle in sent:
                handle.wait()
        except _core.Error as error:
            raise to_mpi_exception(error) from error
        return received

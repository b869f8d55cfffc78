"""Collectives among the neighbours of a topology, as messages beside those of the program."""

import builtins
from collections.abc import Sequence
from typing import Any

from .. import _core
from . import constants as c
from .buffers import Block, Blocks, parse_block, parse_blocks, parse_blocks_w
from .errors import Exception, translated
from .info import INFO_NULL
from .pickling import pickle
from .requests import NOTHING, Outcome, Prequest, Request, Sequel

_OBJECT, _REASON = b"o", b"r"
"""The first byte of a message of `neighbor_alltoall`: the pickled object, or the reason why the sender has no object, follows."""


class Neighbours:
    """The methods of communicators with a topology. Neighbours are in MPI's order: before and after, dimension by dimension."""

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

    def _exchanged(self, outgoing: Sequence[Any], incoming: Sequence[Block]) -> Request:
        """One message to each neighbour and one from each.

        What goes to the neighbour after arrives there as from the one before: the places of a pair of neighbours are swapped,
        which tells messages apart where both are the same rank.
        """
        beside, handles, settled = self._state.beside, [], []
        try:
            for place, (rank, block) in enumerate(zip(self._neighbours(), incoming, strict=True)):
                if rank != c.PROC_NULL:
                    memory = block.incoming()
                    handles.append(beside.receive_into_bytes_async(memory, rank, place))
                    settled.append((block, memory))
            for place, (rank, data) in enumerate(zip(self._neighbours(), outgoing, strict=True)):
                if rank != c.PROC_NULL:
                    handles.append(beside.send_bytes_async(data, rank, place ^ 1))
        except _core.Error as error:
            raise translated(error) from error

        def finish(_raw: Any) -> Outcome:
            for block, memory in settled:
                block.settle(memory)
            return NOTHING

        return Request._of(Sequel(*handles), finish)

    def Ineighbor_allgather(self, sendbuf: Any, recvbuf: Any) -> Request:
        """The same buffer to all neighbours, and one from each; goes on by itself."""
        count = len(self._neighbours())
        first = parse_block(recvbuf, True, count)
        data = parse_block(sendbuf, False).outgoing()
        return self._exchanged([data] * count, [first.part(i, first.count) for i in range(count)])

    def Ineighbor_allgatherv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """The same with lengths and places of each neighbour's own."""
        count = len(self._neighbours())
        data = parse_block(sendbuf, False).outgoing()
        return self._exchanged([data] * count, parse_blocks(recvbuf, True, count).blocks())

    def Ineighbor_alltoall(self, sendbuf: Any, recvbuf: Any) -> Request:
        """A part for each neighbour, and one from each; goes on by itself."""
        count = len(self._neighbours())
        sent, first = parse_block(sendbuf, False, count), parse_block(recvbuf, True, count)
        parts = [sent.part(i, sent.count).outgoing() for i in range(count)]
        return self._exchanged(parts, [first.part(i, first.count) for i in range(count)])

    def Ineighbor_alltoallv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """The same with lengths and places of each neighbour's own."""
        count = len(self._neighbours())
        return self._exchanged_blocks(parse_blocks(sendbuf, False, count), parse_blocks(recvbuf, True, count))

    def Ineighbor_alltoallw(self, sendbuf: Any, recvbuf: Any) -> Request:
        """The same with datatypes of each neighbour's own, too."""
        count = len(self._neighbours())
        return self._exchanged_blocks(parse_blocks_w(sendbuf, False, count), parse_blocks_w(recvbuf, True, count))

    def _exchanged_blocks(self, sent: Blocks, received: Blocks) -> Request:
        return self._exchanged([block.outgoing() for block in sent.blocks()], received.blocks())

    def Neighbor_allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """The same buffer to all neighbours, and one from each."""
        self.Ineighbor_allgather(sendbuf, recvbuf).Wait()

    def Neighbor_allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """The same with lengths and places of each neighbour's own."""
        self.Ineighbor_allgatherv(sendbuf, recvbuf).Wait()

    def Neighbor_alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """A part for each neighbour, and one from each."""
        self.Ineighbor_alltoall(sendbuf, recvbuf).Wait()

    def Neighbor_alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        """The same with lengths and places of each neighbour's own."""
        self.Ineighbor_alltoallv(sendbuf, recvbuf).Wait()

    def Neighbor_alltoallw(self, sendbuf: Any, recvbuf: Any) -> None:
        """The same with datatypes of each neighbour's own, too."""
        self.Ineighbor_alltoallw(sendbuf, recvbuf).Wait()

    def Neighbor_allgather_init(self, sendbuf: Any, recvbuf: Any, info: Any = INFO_NULL) -> Prequest:
        """`Neighbor_allgather`, to be started again and again."""
        return self._prepared(lambda: self.Ineighbor_allgather(sendbuf, recvbuf))  # type: ignore[attr-defined]

    def Neighbor_allgatherv_init(self, sendbuf: Any, recvbuf: Any, info: Any = INFO_NULL) -> Prequest:
        """`Neighbor_allgatherv`, to be started again and again."""
        return self._prepared(lambda: self.Ineighbor_allgatherv(sendbuf, recvbuf))  # type: ignore[attr-defined]

    def Neighbor_alltoall_init(self, sendbuf: Any, recvbuf: Any, info: Any = INFO_NULL) -> Prequest:
        """`Neighbor_alltoall`, to be started again and again."""
        return self._prepared(lambda: self.Ineighbor_alltoall(sendbuf, recvbuf))  # type: ignore[attr-defined]

    def Neighbor_alltoallv_init(self, sendbuf: Any, recvbuf: Any, info: Any = INFO_NULL) -> Prequest:
        """`Neighbor_alltoallv`, to be started again and again."""
        return self._prepared(lambda: self.Ineighbor_alltoallv(sendbuf, recvbuf))  # type: ignore[attr-defined]

    def Neighbor_alltoallw_init(self, sendbuf: Any, recvbuf: Any, info: Any = INFO_NULL) -> Prequest:
        """`Neighbor_alltoallw`, to be started again and again."""
        return self._prepared(lambda: self.Ineighbor_alltoallw(sendbuf, recvbuf))  # type: ignore[attr-defined]

    def neighbor_allgather(self, sendobj: Any) -> list[Any]:
        """The same object to all neighbours, and one from each; None from where there is nobody."""
        return self.neighbor_alltoall([sendobj] * len(self._neighbours()))

    def neighbor_alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """An object for each neighbour, and one from each; None from where there is nobody."""
        ranks, own_error = self._neighbours(), None
        try:
            items = list(sendobj)
            if len(items) != len(ranks):
                raise ValueError(f"expecting {len(ranks)} items, got {len(items)}")
            messages = [_OBJECT + pickle.dumps(item) for item in items]
        except builtins.Exception as error:
            own_error = error
            messages = [_REASON + f"{type(error).__name__}: {error}".encode()] * len(ranks)
        received = self._exchanged_messages(ranks, messages)
        if own_error is not None:
            raise own_error
        for rank, data in zip(ranks, received, strict=True):
            if data.startswith(_REASON):
                reason = data.removeprefix(_REASON).decode()
                raise Exception(c.ERR_OTHER, f"rank {self._group.members[rank]} did not contribute to this collective: {reason}")
        return [pickle.loads(data[1:]) if data else None for data in received]

    def _exchanged_messages(self, ranks: Sequence[int], messages: Sequence[bytes]) -> list[bytes]:
        """Sends a message to each neighbour. Returns the message of each neighbour, and no bytes where there is no neighbour."""
        beside = self._state.beside
        try:
            sent = [
                beside.send_bytes_async(message, rank, place ^ 1)
                for place, (rank, message) in enumerate(zip(ranks, messages, strict=True))
                if rank != c.PROC_NULL
            ]
            received = [b"" if rank == c.PROC_NULL else beside.receive_bytes(rank, place)[0] for place, rank in enumerate(ranks)]
            for handle in sent:
                handle.wait()
        except _core.Error as error:
            raise translated(error) from error
        return received

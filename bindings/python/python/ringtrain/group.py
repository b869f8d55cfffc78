"""Groups of ranks, and collectives and messages on numpy arrays."""

import math
import operator
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from . import _core, arrays
from ._errors import InvalidArgument
from .arrays import contiguous, elements, finished, moved, place, reduced, rows, written
from .handles import Handle
from .objects import Objects


class Status(NamedTuple):
    """What is known of a message."""

    source: int
    tag: int
    count: int
    """Elements."""


class Group(Objects):
    """Some ranks of a job, seen from one of them.

    All ranks of a group call the same collectives in the same order, with arrays of the same shape and type; what does not agree
    ends the
    job with an error that says what each rank asked for. When a rank dies, every rank's current or next call raises an error
    that names
    it. Other Python threads run while a call waits. Messages may be sent and received by several threads at once; collectives of
    one group
    are done one after the other.

    Collectives return their result as a new array, or in `out` if that is given; `out` may be the input itself, which is then
    changed in
    place, without a copy. Inputs that are not contiguous are copied first.

    Reductions are "sum", "avg", "min", "max", "prod"; "land", "lor", "lxor" on whether numbers are not 0; "band", "bor", "bxor"
    on integers.
    On booleans sums are "any" and products "all". Complex numbers have sums and averages.
    """

    def __init__(self, core: _core.Group) -> None:
        self.core = core
        """The compiled part's group."""
        self.rank: int = core.rank
        self.size: int = core.size
        self.local_rank: int = core.local_rank
        """This process's number among the group's ranks of its host."""
        self.local_size: int = core.local_size
        self.transport: str = core.transport
        """"shm", "tcp", "shm+tcp" (memory within hosts) or "none" (a group of one)."""

    @property
    def members(self) -> list[int]:
        """The members' ranks in the job, which errors name."""
        return self.core.members

    @property
    def timeout(self) -> float:
        """Seconds that an operation may take which is begun from now on."""
        return self.core.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.core.timeout = seconds

    def __repr__(self) -> str:
        return f"<ringtrain.Group: rank {self.rank} of {self.size}, {self.transport}>"

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the group. The last one of a job says goodbye to all peers."""
        self.core.close()

    def abort(self, message: str) -> None:
        """Ends the job on every rank: this rank's reason becomes everybody's error, which this raises."""
        raise self.core.abort(message)

    def statistics(self) -> dict[str, float]:
        """What the job has done so far on this rank: operations, bytes, and seconds of communication and of waiting for it."""
        return self.core.statistics()

    def algorithm(self, operation: str, bytes: int) -> str:
        """How an operation such as "all_reduce" on an array of so many bytes is done."""
        return self.core.algorithm(operation, bytes)

    # Groups of some of the ranks

    def split(self, colour: int | None, key: int = 0) -> "Group | None":
        """Ranks that pass the same colour form a new group, in the order of their keys; who passes `None` is in none. All ranks
        call it."""
        core = self.core.split(colour, key)
        return None if core is None else Group(core)

    def subgroup(self, ranks: Sequence[int]) -> "Group | None":
        """The group of these ranks, in this order; `None` on all others. All ranks of this group call it with the same list."""
        core = self.core.subgroup(ranks)
        return None if core is None else Group(core)

    def duplicate(self) -> "Group":
        """A group of the same ranks, whose operations do not get in the way of this one's."""
        return Group(self.core.duplicate())

    def alloc(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray:
        """An array of zeros in memory that the ranks of a host share, where there is such: an `all_reduce` of it or of a
        contiguous part
        with `out=` itself moves nothing through sockets or slots. All ranks call it; each may have its own shape. Its memory is
        given back
        with the last array on it."""
        shape = tuple(operator.index(length) for length in (shape if isinstance(shape, Sequence) else (shape,)))
        if min(shape, default=0) < 0:
            raise InvalidArgument(f"no array has the shape {shape}")
        count = math.prod(shape)
        dtype = np.dtype(dtype)
        # A length that cannot be is an error on every rank, so the others have to hear of it.
        shared = self.core.alloc(min(count, sys.maxsize), arrays.name_of(dtype))
        return np.frombuffer(shared, dtype=dtype, count=count).reshape(shape)

    # Reductions

    def all_reduce(self, x: ArrayLike, op: str = "sum", *, out: NDArray | None = None, compression: str | None = None) -> Any:
        """The reduction of all ranks' arrays, on every rank, with the same bits everywhere.

        `compression` "fp16" or "bf16" rounds float32 to half as many bytes on the way.
        """
        array = contiguous(x)
        result = place(out, array.shape, array.dtype)
        target = reduced(result, op)
        given = None if result is array else reduced(array, op)
        self.core.all_reduce(target, op, given, compression)
        return finished(result, x)

    def all_reduce_async(
        self, x: ArrayLike, op: str = "sum", *, out: NDArray | None = None, compression: str | None = None
    ) -> Handle:
        """`all_reduce`, going on by itself. The result is `Handle.wait`'s."""
        array = contiguous(x)
        result = place(out, array.shape, array.dtype)
        target = reduced(result, op)
        given = None if result is array else reduced(array, op)
        return Handle(self.core.all_reduce_async(target, op, given, compression), lambda _: finished(result, x))

    def reduce(self, x: ArrayLike, op: str = "sum", root: int = 0, *, out: NDArray | None = None) -> Any:
        """The reduction of all ranks' arrays, on the root; `None` on the others."""
        array = contiguous(x)
        if self.rank != root:
            self.core.reduce(None, op, root, reduced(array, op))
            return None
        result = place(out, array.shape, array.dtype)
        self.core.reduce(reduced(result, op), op, root, None if result is array else reduced(array, op))
        return finished(result, x)

    def reduce_async(self, x: ArrayLike, op: str = "sum", root: int = 0, *, out: NDArray | None = None) -> Handle:
        """`reduce`, going on by itself."""
        array = contiguous(x)
        if self.rank != root:
            return Handle(self.core.reduce_async(None, op, root, reduced(array, op)), lambda _: None)
        result = place(out, array.shape, array.dtype)
        given = None if result is array else reduced(array, op)
        return Handle(self.core.reduce_async(reduced(result, op), op, root, given), lambda _: finished(result, x))

    def _parts_of_sum(
        self, x: ArrayLike, op: str, out: NDArray | None, counts: Sequence[int] | None
    ) -> tuple[NDArray, NDArray, list[int] | None]:
        array = contiguous(x)
        if counts is None:
            own, scaled = rows(array, self.size, "an array"), None
        else:
            self._check_counts(counts, array.shape[0] if array.ndim else 0)
            own, scaled = counts[self.rank], elements(list(counts), array.shape[1:])
        result = place(out, (own, *array.shape[1:]), array.dtype)
        if scaled is not None and array.dtype.kind == "c":
            scaled = [2 * count for count in scaled]
        return array, result, scaled

    def reduce_scatter(
        self, x: ArrayLike, op: str = "sum", *, out: NDArray | None = None, counts: Sequence[int] | None = None
    ) -> NDArray:
        """This rank's rows of the reduction of all ranks' arrays: the r-th of n equal parts, or `counts[r]` of them."""
        array, result, scaled = self._parts_of_sum(x, op, out, counts)
        self.core.reduce_scatter(reduced(result, op), reduced(array, op), op, scaled)
        return result

    def reduce_scatter_async(
        self, x: ArrayLike, op: str = "sum", *, out: NDArray | None = None, counts: Sequence[int] | None = None
    ) -> Handle:
        """`reduce_scatter`, going on by itself."""
        array, result, scaled = self._parts_of_sum(x, op, out, counts)
        begun = self.core.reduce_scatter_async(reduced(result, op), reduced(array, op), op, scaled)
        return Handle(begun, lambda _: result)

    def scan(self, x: ArrayLike, op: str = "sum", *, out: NDArray | None = None) -> Any:
        """The reduction of the arrays of all ranks up to and including this one."""
        array = contiguous(x)
        result = place(out, array.shape, array.dtype)
        self.core.scan(reduced(result, op), op, None if result is array else reduced(array, op))
        return finished(result, x)

    def scan_async(self, x: ArrayLike, op: str = "sum", *, out: NDArray | None = None) -> Handle:
        """`scan`, going on by itself."""
        array = contiguous(x)
        result = place(out, array.shape, array.dtype)
        given = None if result is array else reduced(array, op)
        return Handle(self.core.scan_async(reduced(result, op), op, given), lambda _: finished(result, x))

    def exscan(self, x: ArrayLike, op: str = "sum", *, out: NDArray | None = None) -> Any:
        """The reduction of the arrays of all ranks before this one; `None` on rank 0, where `out` stays as it was."""
        array = contiguous(x)
        result = place(out, array.shape, array.dtype)
        self.core.exscan(reduced(result, op), op, None if result is array else reduced(array, op))
        return None if self.rank == 0 else finished(result, x)

    def exscan_async(self, x: ArrayLike, op: str = "sum", *, out: NDArray | None = None) -> Handle:
        """`exscan`, going on by itself."""
        array = contiguous(x)
        result = place(out, array.shape, array.dtype)
        given = None if result is array else reduced(array, op)
        begun = self.core.exscan_async(reduced(result, op), op, given)
        return Handle(begun, lambda _: None if self.rank == 0 else finished(result, x))

    # Everybody's arrays

    def broadcast(self, x: ArrayLike, root: int = 0, *, out: NDArray | None = None) -> Any:
        """The root's array, on every rank. The others' is looked at for its shape and type alone."""
        array = contiguous(x)
        result = place(out, array.shape, array.dtype)
        if self.rank == root and result is not array:
            result[...] = array
        self.core.broadcast(moved(result), root)
        return finished(result, x)

    def broadcast_async(self, x: ArrayLike, root: int = 0, *, out: NDArray | None = None) -> Handle:
        """`broadcast`, going on by itself."""
        array = contiguous(x)
        result = place(out, array.shape, array.dtype)
        if self.rank == root and result is not array:
            result[...] = array
        return Handle(self.core.broadcast_async(moved(result), root), lambda _: finished(result, x))

    def _gathered(self, array: NDArray, out: NDArray | None, counts: Sequence[int] | None) -> tuple[NDArray, list[int] | None]:
        """Where all parts go, and their counts of elements if they differ."""
        if counts is None:
            return place(out, (self.size, *array.shape), array.dtype), None
        scaled = self._own_counted(array, counts)
        return place(out, (sum(counts), *array.shape[1:]), array.dtype), scaled

    def _own_counted(self, array: NDArray, counts: Sequence[int] | None) -> list[int] | None:
        """Counts of elements, of which this rank has this array."""
        if counts is None:
            return None
        self._check_counts(counts, None)
        if array.ndim == 0 or array.shape[0] != counts[self.rank]:
            raise InvalidArgument(f"this rank's array has shape {array.shape}, and counts say {counts[self.rank]} rows")
        return elements(list(counts), array.shape[1:])

    def all_gather(self, x: ArrayLike, *, out: NDArray | None = None, counts: Sequence[int] | None = None) -> NDArray:
        """Every rank's array, of shape (n, *shape); with `counts`, arrays of so many rows one after another."""
        array = contiguous(x)
        result, scaled = self._gathered(array, out, counts)
        self.core.all_gather(moved(result), moved(array), scaled)
        return result

    def all_gather_async(self, x: ArrayLike, *, out: NDArray | None = None, counts: Sequence[int] | None = None) -> Handle:
        """`all_gather`, going on by itself."""
        array = contiguous(x)
        result, scaled = self._gathered(array, out, counts)
        return Handle(self.core.all_gather_async(moved(result), moved(array), scaled), lambda _: result)

    def all_gather_list(self, x: ArrayLike) -> list[NDArray]:
        """Every rank's array, where they have different numbers of rows, which are gathered first."""
        array = np.atleast_1d(contiguous(x))
        counts = [int(count) for count in self.all_gather(np.int64(array.shape[0]))]
        parts = np.split(self.all_gather(array, counts=counts), np.cumsum(counts)[:-1])
        return list(parts)

    def gather(
        self,
        x: ArrayLike,
        root: int = 0,
        *,
        out: NDArray | None = None,
        counts: Sequence[int] | None = None,
    ) -> NDArray | None:
        """Every rank's array on the root, as `all_gather` has it; `None` on the others."""
        array = contiguous(x)
        if self.rank != root:
            scaled = self._own_counted(array, counts)
            self.core.gather(None, moved(array), root, scaled)
            return None
        result, scaled = self._gathered(array, out, counts)
        self.core.gather(moved(result), moved(array), root, scaled)
        return result

    def gather_async(
        self,
        x: ArrayLike,
        root: int = 0,
        *,
        out: NDArray | None = None,
        counts: Sequence[int] | None = None,
    ) -> Handle:
        """`gather`, going on by itself."""
        array = contiguous(x)
        if self.rank != root:
            scaled = self._own_counted(array, counts)
            return Handle(self.core.gather_async(None, moved(array), root, scaled), lambda _: None)
        result, scaled = self._gathered(array, out, counts)
        return Handle(self.core.gather_async(moved(result), moved(array), root, scaled), lambda _: result)

    def _scattered(
        self, x: ArrayLike | None, root: int, out: NDArray | None, counts: Sequence[int] | None
    ) -> tuple[NDArray | None, NDArray, list[int] | None]:
        array = contiguous(x) if self.rank == root and x is not None else None
        if self.rank == root and array is None:
            raise InvalidArgument("the root has to pass what is scattered")
        if array is not None:
            # What cannot be is found before the others are told of it.
            moved(array)
        if counts is not None:
            self._check_counts(counts, None)
        if out is None:
            form = None if array is None else (array.shape, array.dtype)
            shape, dtype = self.broadcast_object(form, root)
            if counts is None and (not shape or shape[0] % self.size):
                raise InvalidArgument(f"an array of shape {shape} cannot be divided into {self.size} equal parts of rows")
            if counts is not None and (not shape or shape[0] != sum(counts)):
                raise InvalidArgument(f"counts {list(counts)} are not those of an array of shape {shape}")
            own = shape[0] // self.size if counts is None else counts[self.rank]
            out = np.empty((own, *shape[1:]), dtype)
        scaled = None if counts is None else elements(list(counts), out.shape[1:])
        return array, written(out), scaled

    def scatter(
        self,
        x: ArrayLike | None,
        root: int = 0,
        *,
        out: NDArray | None = None,
        counts: Sequence[int] | None = None,
    ) -> NDArray:
        """The r-th of n equal parts of the root's rows, or `counts[r]` of them. The others pass nothing. Either all ranks pass
        `out`, or
        none does, and the root tells them the shape and type first."""
        array, result, scaled = self._scattered(x, root, out, counts)
        self.core.scatter(moved(result), None if array is None else moved(array), root, scaled)
        return result

    def scatter_async(
        self,
        x: ArrayLike | None,
        root: int = 0,
        *,
        out: NDArray | None = None,
        counts: Sequence[int] | None = None,
    ) -> Handle:
        """`scatter`, going on by itself; without `out`, once the shape and type have been told."""
        array, result, scaled = self._scattered(x, root, out, counts)
        given = None if array is None else moved(array)
        return Handle(self.core.scatter_async(moved(result), given, root, scaled), lambda _: result)

    def _exchanged(
        self,
        x: ArrayLike,
        out: NDArray | None,
        send_counts: Sequence[int] | None,
        receive_counts: Sequence[int] | None,
    ) -> tuple[NDArray, NDArray, list[int] | None, list[int] | None]:
        array = contiguous(x)
        if (send_counts is None) != (receive_counts is None):
            raise InvalidArgument("uneven parts need both send_counts and receive_counts")
        if send_counts is None or receive_counts is None:
            rows(array, self.size, "an array")
            return array, place(out, array.shape, array.dtype), None, None
        self._check_counts(send_counts, array.shape[0] if array.ndim else 0)
        self._check_counts(receive_counts, None)
        row = array.shape[1:]
        result = place(out, (sum(receive_counts), *row), array.dtype)
        return array, result, elements(list(send_counts), row), elements(list(receive_counts), row)

    def all_to_all(
        self,
        x: ArrayLike,
        *,
        out: NDArray | None = None,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
    ) -> NDArray:
        """The r-th of n equal parts of the rows goes to rank r; what the ranks have for this one comes back in rank order. With
        counts, so
        many rows to and from each rank."""
        array, result, sent, received = self._exchanged(x, out, send_counts, receive_counts)
        self.core.all_to_all(moved(result), moved(array), sent, received)
        return result

    def all_to_all_async(
        self,
        x: ArrayLike,
        *,
        out: NDArray | None = None,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
    ) -> Handle:
        """`all_to_all`, going on by itself."""
        array, result, sent, received = self._exchanged(x, out, send_counts, receive_counts)
        return Handle(self.core.all_to_all_async(moved(result), moved(array), sent, received), lambda _: result)

    def barrier(self) -> None:
        """Returns when every rank has entered."""
        self.core.barrier()

    def barrier_async(self) -> Handle:
        """`barrier`, going on by itself."""
        return Handle(self.core.barrier_async(), lambda _: None)

    def _check_counts(self, counts: Sequence[int], total: int | None) -> None:
        if len(counts) != self.size or min(counts) < 0:
            raise InvalidArgument(f"counts {list(counts)} are not a number of rows for each of {self.size} ranks")
        if total is not None and sum(counts) != total:
            raise InvalidArgument(f"counts {list(counts)} come to {sum(counts)} rows, and there are {total}")

    # Messages

    def send(self, x: ArrayLike, to: int, tag: int = 0, *, synchronous: bool = False) -> None:
        """Sends an array. Returns when it has left this rank; with `synchronous`, when a receive has matched it. A receive takes
        at least as many elements of the same type."""
        self.core.send(moved(contiguous(x)), to, tag, synchronous)

    def send_async(self, x: ArrayLike, to: int, tag: int = 0, *, synchronous: bool = False) -> Handle:
        """Begins a `send` and returns its handle."""
        return Handle(self.core.send_async(moved(contiguous(x)), to, tag, synchronous), lambda _: None)

    def receive(self, out: NDArray, source: int | None = None, tag: int | None = None) -> Status:
        """Receives an array into the beginning of `out`; from anybody, with any tag, where that is `None`."""
        return Status(*self.core.receive(moved(written(out)), source, tag))

    def receive_async(self, out: NDArray, source: int | None = None, tag: int | None = None) -> Handle:
        """`receive`, going on by itself; `Handle.wait` gives the `Status`."""
        target = moved(written(out))
        return Handle(self.core.receive_async(target, source, tag), lambda status: Status(*status))

    def send_receive(
        self,
        x: ArrayLike,
        to: int,
        out: NDArray,
        source: int | None = None,
        *,
        send_tag: int = 0,
        receive_tag: int | None = None,
    ) -> Status:
        """Sends to one rank and receives from another, or the same, at once."""
        target = moved(written(out))
        return Status(*self.core.send_receive(moved(contiguous(x)), to, send_tag, target, source, receive_tag))

    def probe(self, source: int | None = None, tag: int | None = None, timeout: float = 0.0) -> Status | None:
        """A message that has come and that nobody has asked for; `None` after `timeout` seconds. It stays where it is."""
        found = self.core.probe(source, tag, timeout)
        return None if found is None else Status(*found[:3])

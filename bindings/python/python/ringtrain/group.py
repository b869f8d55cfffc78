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
    """The source, the tag and the length of a message."""

    source: int
    tag: int
    count: int
    """The number of elements."""


class Group(Objects):
    """A group of ranks of a job.

    All ranks of a group call the same collectives in the same order, with arrays of the same shape and type. If their calls do
    not agree, the job ends with an error that says what each rank asked for. When a rank dies, every rank's current or next call
    raises an error that names it.

    Other Python threads run while a call waits. Several threads may send and receive messages at once. Collectives of one group
    run one after another.

    Collectives return their result as a new array, or in `out` if you pass it. `out` may be the input itself, which is then
    changed in place, without a copy. If `out` and the input overlap otherwise, the input is copied first. So are inputs that are
    not contiguous.

    Reductions are "sum", "avg", "min", "max", "prod"; "land", "lor", "lxor", which treat numbers as booleans; and "band", "bor",
    "bxor" on integers. On booleans a sum is "any" and a product is "all". Complex numbers have sums and averages.
    """

    def __init__(self, core: _core.Group) -> None:
        self.core = core
        """The group of the compiled module."""
        self.rank: int = core.rank
        self.size: int = core.size
        self.local_rank: int = core.local_rank
        """The number of this process among the group's ranks on its host."""
        self.local_size: int = core.local_size
        self.transport: str = core.transport
        """"shm", "tcp", "shm+tcp" (memory within hosts) or "none" (a group of one)."""

    @property
    def members(self) -> list[int]:
        """The members' ranks in the job. Errors name these numbers."""
        return self.core.members

    @property
    def timeout(self) -> float:
        """How many seconds each operation that begins from now on may take."""
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
        """Closes the group. Closing the last group of a job closes the connections to all peers."""
        self.core.close()

    def abort(self, message: str) -> None:
        """Ends the job on every rank. This call and the current or next call of all ranks raise `Aborted` with the message."""
        raise self.core.abort(message)

    def statistics(self) -> dict[str, float]:
        """Counters of this rank: operations, bytes, seconds of communication, and seconds that calls waited for it."""
        return self.core.statistics()

    def algorithm(self, operation: str, bytes: int) -> str:
        """The algorithm of an operation, for example "all_reduce", on an array of this many bytes."""
        return self.core.algorithm(operation, bytes)

    # Groups of some of the ranks

    def split(self, colour: int | None, key: int = 0) -> "Group | None":
        """Forms a group of the ranks that pass the same colour, in the order of their keys. Returns `None` on ranks that pass
        `None`. All ranks call it."""
        core = self.core.split(colour, key)
        return None if core is None else Group(core)

    def subgroup(self, ranks: Sequence[int]) -> "Group | None":
        """Forms a group of these ranks, in this order. Returns `None` on other ranks. All ranks call it with the same list."""
        core = self.core.subgroup(ranks)
        return None if core is None else Group(core)

    def duplicate(self) -> "Group":
        """Forms a group of the same ranks, with operations and messages that are independent of this group's."""
        return Group(self.core.duplicate())

    def alloc(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray:
        """Returns an array of zeros in memory that the ranks of a host share, if they can share memory.

        An in-place `all_reduce` of it, or of a contiguous part, needs no copy. All ranks call `alloc`; their shapes may differ.
        The memory is freed with the last array that uses it.
        """
        shape = tuple(operator.index(length) for length in (shape if isinstance(shape, Sequence) else (shape,)))
        if min(shape, default=0) < 0:
            raise InvalidArgument(f"an array cannot have the shape {shape}")
        count = math.prod(shape)
        dtype = np.dtype(dtype)
        # An impossible length is an error on every rank, so the compiled module has to tell the others.
        shared = self.core.alloc(min(count, sys.maxsize), arrays.name_of(dtype))
        return np.frombuffer(shared, dtype=dtype, count=count).reshape(shape)

    # Reductions

    def all_reduce(self, x: ArrayLike, op: str = "sum", *, out: NDArray | None = None, compression: str | None = None) -> Any:
        """Reduces the arrays of all ranks and returns the result on every rank, with the same bits on all of them.

        `compression` "fp16" or "bf16" sends float32 as 16-bit floats.
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
        """Begins an `all_reduce` and returns its handle. `Handle.wait` returns the result."""
        array = contiguous(x)
        result = place(out, array.shape, array.dtype)
        target = reduced(result, op)
        given = None if result is array else reduced(array, op)
        return Handle(self.core.all_reduce_async(target, op, given, compression), lambda _: finished(result, x))

    def reduce(self, x: ArrayLike, op: str = "sum", root: int = 0, *, out: NDArray | None = None) -> Any:
        """Reduces the arrays of all ranks. Returns the result on the root, and `None` on the other ranks."""
        array = contiguous(x)
        if self.rank != root:
            self.core.reduce(None, op, root, reduced(array, op))
            return None
        result = place(out, array.shape, array.dtype)
        self.core.reduce(reduced(result, op), op, root, None if result is array else reduced(array, op))
        return finished(result, x)

    def reduce_async(self, x: ArrayLike, op: str = "sum", root: int = 0, *, out: NDArray | None = None) -> Handle:
        """Begins a `reduce` and returns its handle."""
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
        """Reduces the arrays of all ranks and returns this rank's rows of the result: the r-th of n equal parts, or `counts[r]`
        rows."""
        array, result, scaled = self._parts_of_sum(x, op, out, counts)
        self.core.reduce_scatter(reduced(result, op), reduced(array, op), op, scaled)
        return result

    def reduce_scatter_async(
        self, x: ArrayLike, op: str = "sum", *, out: NDArray | None = None, counts: Sequence[int] | None = None
    ) -> Handle:
        """Begins a `reduce_scatter` and returns its handle."""
        array, result, scaled = self._parts_of_sum(x, op, out, counts)
        begun = self.core.reduce_scatter_async(reduced(result, op), reduced(array, op), op, scaled)
        return Handle(begun, lambda _: result)

    def scan(self, x: ArrayLike, op: str = "sum", *, out: NDArray | None = None) -> Any:
        """Returns the reduction of the arrays of ranks 0 to this one."""
        array = contiguous(x)
        result = place(out, array.shape, array.dtype)
        self.core.scan(reduced(result, op), op, None if result is array else reduced(array, op))
        return finished(result, x)

    def scan_async(self, x: ArrayLike, op: str = "sum", *, out: NDArray | None = None) -> Handle:
        """Begins a `scan` and returns its handle."""
        array = contiguous(x)
        result = place(out, array.shape, array.dtype)
        given = None if result is array else reduced(array, op)
        return Handle(self.core.scan_async(reduced(result, op), op, given), lambda _: finished(result, x))

    def exscan(self, x: ArrayLike, op: str = "sum", *, out: NDArray | None = None) -> Any:
        """Returns the reduction of the arrays of lower ranks. On rank 0 it returns `None` and leaves `out` as it was."""
        array = contiguous(x)
        result = place(out, array.shape, array.dtype)
        self.core.exscan(reduced(result, op), op, None if result is array else reduced(array, op))
        return None if self.rank == 0 else finished(result, x)

    def exscan_async(self, x: ArrayLike, op: str = "sum", *, out: NDArray | None = None) -> Handle:
        """Begins an `exscan` and returns its handle."""
        array = contiguous(x)
        result = place(out, array.shape, array.dtype)
        given = None if result is array else reduced(array, op)
        begun = self.core.exscan_async(reduced(result, op), op, given)
        return Handle(begun, lambda _: None if self.rank == 0 else finished(result, x))

    # Collectives that move arrays

    def broadcast(self, x: ArrayLike, root: int = 0, *, out: NDArray | None = None) -> Any:
        """Returns the root's array on every rank. The other ranks pass an array of the same shape and type."""
        array = contiguous(x)
        result = place(out, array.shape, array.dtype)
        if self.rank == root and result is not array:
            result[...] = array
        self.core.broadcast(moved(result), root)
        return finished(result, x)

    def broadcast_async(self, x: ArrayLike, root: int = 0, *, out: NDArray | None = None) -> Handle:
        """Begins a `broadcast` and returns its handle."""
        array = contiguous(x)
        result = place(out, array.shape, array.dtype)
        if self.rank == root and result is not array:
            result[...] = array
        return Handle(self.core.broadcast_async(moved(result), root), lambda _: finished(result, x))

    def _gathered(self, array: NDArray, out: NDArray | None, counts: Sequence[int] | None) -> tuple[NDArray, list[int] | None]:
        """The array for all parts, and the parts' counts of elements if they differ."""
        if counts is None:
            return place(out, (self.size, *array.shape), array.dtype), None
        scaled = self._own_counted(array, counts)
        return place(out, (sum(counts), *array.shape[1:]), array.dtype), scaled

    def _own_counted(self, array: NDArray, counts: Sequence[int] | None) -> list[int] | None:
        """Counts of rows as counts of elements, after a check that this rank's array has its count."""
        if counts is None:
            return None
        self._check_counts(counts, None)
        if array.ndim == 0 or array.shape[0] != counts[self.rank]:
            raise InvalidArgument(f"this rank's array has shape {array.shape}, and counts say {counts[self.rank]} rows")
        return elements(list(counts), array.shape[1:])

    def all_gather(self, x: ArrayLike, *, out: NDArray | None = None, counts: Sequence[int] | None = None) -> NDArray:
        """Returns every rank's array, stacked to shape (n, *shape). With `counts`, the arrays have these numbers of rows
        and are concatenated."""
        array = contiguous(x)
        result, scaled = self._gathered(array, out, counts)
        self.core.all_gather(moved(result), moved(array), scaled)
        return result

    def all_gather_async(self, x: ArrayLike, *, out: NDArray | None = None, counts: Sequence[int] | None = None) -> Handle:
        """Begins an `all_gather` and returns its handle."""
        array = contiguous(x)
        result, scaled = self._gathered(array, out, counts)
        return Handle(self.core.all_gather_async(moved(result), moved(array), scaled), lambda _: result)

    def all_gather_list(self, x: ArrayLike) -> list[NDArray]:
        """Returns a list of every rank's array. Their numbers of rows may differ and are gathered first."""
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
        """Returns every rank's array on the root, as `all_gather` does, and `None` on the other ranks."""
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
        """Begins a `gather` and returns its handle."""
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
            raise InvalidArgument("the root has to pass the array to scatter")
        if array is not None:
            # Refuses types that cannot be sent before it tells the other ranks of the array.
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
        """Returns the r-th of n equal parts of the root's rows on rank r, or `counts[r]` rows. The other ranks pass `None`.

        Either all ranks pass `out` or none does. Without `out` the root first sends the shape and type to the others.
        """
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
        """Begins a `scatter` and returns its handle. Without `out` it first waits for the shape and type from the root."""
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
        """Sends the r-th of n equal parts of the rows to rank r, and returns the parts that the ranks sent to this one, in rank
        order. With `send_counts` and `receive_counts` the parts have these numbers of rows."""
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
        """Begins an `all_to_all` and returns its handle."""
        array, result, sent, received = self._exchanged(x, out, send_counts, receive_counts)
        return Handle(self.core.all_to_all_async(moved(result), moved(array), sent, received), lambda _: result)

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.core.barrier()

    def barrier_async(self) -> Handle:
        """Begins a `barrier` and returns its handle."""
        return Handle(self.core.barrier_async(), lambda _: None)

    def _check_counts(self, counts: Sequence[int], total: int | None) -> None:
        if len(counts) != self.size or min(counts) < 0:
            raise InvalidArgument(f"counts {list(counts)} are not one number of rows for each of {self.size} ranks")
        if total is not None and sum(counts) != total:
            raise InvalidArgument(f"counts {list(counts)} add up to {sum(counts)} rows, but the array has {total}")

    # Messages

    def send(self, x: ArrayLike, to: int, tag: int = 0, *, synchronous: bool = False) -> None:
        """Sends an array. Returns when it has left this rank; with `synchronous`, when a receive has matched it. A receive takes
        at least as many elements of the same type."""
        self.core.send(moved(contiguous(x)), to, tag, synchronous)

    def send_async(self, x: ArrayLike, to: int, tag: int = 0, *, synchronous: bool = False) -> Handle:
        """Begins a `send` and returns its handle."""
        return Handle(self.core.send_async(moved(contiguous(x)), to, tag, synchronous), lambda _: None)

    def receive(self, out: NDArray, source: int | None = None, tag: int | None = None) -> Status:
        """Receives an array into the beginning of `out`. `None` stands for any source or any tag."""
        return Status(*self.core.receive(moved(written(out)), source, tag))

    def receive_async(self, out: NDArray, source: int | None = None, tag: int | None = None) -> Handle:
        """Begins a `receive` and returns its handle. `Handle.wait` returns the `Status`."""
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
        """Sends to one rank and receives from another, or the same, at the same time."""
        target = moved(written(out))
        return Status(*self.core.send_receive(moved(contiguous(x)), to, send_tag, target, source, receive_tag))

    def probe(self, source: int | None = None, tag: int | None = None, timeout: float = 0.0) -> Status | None:
        """Returns the status of the next message that no receive has matched, or `None` after `timeout` seconds. Does not receive
        it."""
        found = self.core.probe(source, tag, timeout)
        return None if found is None else Status(*found[:3])

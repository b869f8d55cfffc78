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
from ._text import counted
from .arrays import (
    as_contiguous,
    as_reducible,
    as_sendable,
    check_writable,
    element_counts,
    result_array,
    rows_per_part,
    scalar_or_array,
)
from .handles import Handle, end_call
from .objects import ObjectCollectives


class Status(NamedTuple):
    """The source, the tag and the length of a message."""

    source: int
    tag: int
    count: int
    """The number of elements."""


class Group(_core.ArrayGroup, ObjectCollectives):
    """A group of ranks of a job.

    All ranks of a group call the same collectives in the same order, with arrays of the same shape and type. If their
    calls differ, the job ends with an error that says what each rank called. When a rank dies, the current or next
    call of every rank raises an error that names the dead rank.

    Other Python threads run while a call waits. Several threads may send and receive messages at once. Collectives of
    one group run one after another.

    Collectives return their result as a new array, or in `out` if you pass it. If `out` is the input itself, the
    operation is in place and copies nothing. If `out` overlaps with the input in another way, or the input is not
    contiguous, the call copies the input first.

    The reductions are:

    - "sum", "avg", "min", "max" and "prod";
    - "land", "lor" and "lxor" (logical operations), which treat numbers as booleans;
    - "band", "bor" and "bxor" (bitwise operations), which need integers or booleans.

    On booleans, "sum" is the logical or, and "prod" is the logical and. Complex numbers can be reduced only with
    "sum" and "avg".
    """

    _Status = Status

    def __init__(self, core: _core.Group) -> None:
        self.core = core
        """The group object of the compiled module, which executes the calls."""
        self.rank: int = core.rank
        self.size: int = core.size
        self.local_rank: int = core.local_rank
        """The number of this process among the group's ranks on the same host, from 0."""
        self.local_size: int = core.local_size
        self.transport: str = core.transport
        """"shm", "tcp", "shm+tcp" (shared memory within a host, TCP between hosts) or "none" (a group of one rank)."""

    @property
    def members(self) -> list[int]:
        """For each member of this group, its rank in the job. Error messages name a rank by its rank in the job."""
        return self.core.members

    @property
    def timeout(self) -> float:
        """How many seconds an operation may take; `math.inf` means no limit. If you set `timeout`, the new value
        applies only to operations that begin later."""
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
        """Ends the job on every rank. On this rank, the call raises `Aborted` with the message. On every other rank,
        the current or next call raises `Aborted`."""
        raise self.core.abort(message)

    def write_timeline(self) -> str | None:
        """Writes the timeline of all ranks to the file of the environment variable RING_TIMELINE. All ranks must call it on
        the group of all ranks, usually at the end of the program. Returns a line about the timeline on rank 0. Returns `None`
        on other ranks and without a timeline."""
        return self.core.write_timeline()

    def write_flight_record(self, reason: str) -> None:
        """Writes the last operations of this rank to the directory of the environment variable RING_FLIGHT_RECORDER. The library
        does that itself if an operation fails. Call it if the program fails for another `reason`."""
        self.core.write_flight_record(reason)

    def statistics(self) -> dict[str, float]:
        """Returns this rank's counters by name. "operations", "bytes_sent" and "bytes_received" are numbers.
        "encoded_elements" and "encoded_bytes" count the elements that compressed calls sent, and the bytes of their encodings.
        "communication" is the time in which an operation was under way, and "exposed" the time for which calls
        waited; both are in seconds."""
        return self.core.statistics()

    def algorithm(self, operation: str, bytes: int) -> str:
        """Returns the name of the algorithm that `operation`, for example "all_reduce", uses for an array of `bytes`
        bytes."""
        return self.core.algorithm(operation, bytes)

    # Groups of some of the ranks

    def split(self, colour: int | None, key: int = 0) -> "Group | None":
        """Forms a group of the ranks that pass the same colour, in the order of their keys. Returns `None` on ranks that pass
        the colour `None`. All ranks must call `split`."""
        core = self.core.split(colour, key)
        return None if core is None else Group(core)

    def subgroup(self, ranks: Sequence[int]) -> "Group | None":
        """Forms a group of the ranks of this group that are listed in `ranks`, in the order of the list. Returns
        `None` on ranks that are not in the list. All ranks must call `subgroup` with the same list."""
        core = self.core.subgroup(ranks)
        return None if core is None else Group(core)

    def duplicate(self) -> "Group":
        """Forms another group of the same ranks. Operations and messages of the new group are independent of those of
        this group. All ranks must call `duplicate`."""
        return Group(self.core.duplicate())

    def alloc(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray:
        """Returns an array of zeros in memory that the ranks of a host share, if they can share memory.

        An in-place `all_reduce` of the array, or of a contiguous part of it, needs no copy. All ranks must call `alloc`; the
        shapes may differ between ranks. The memory is freed when the last array that uses it is freed.
        """
        shape = tuple(operator.index(length) for length in (shape if isinstance(shape, Sequence) else (shape,)))
        if min(shape, default=0) < 0:
            raise InvalidArgument(f"an array cannot have the shape {shape}")
        count = math.prod(shape)
        dtype = np.dtype(dtype)
        # A length that is too large must fail on every rank, so the compiled module checks it and informs the other ranks.
        shared = self.core.alloc(min(count, sys.maxsize), arrays.dtype_name(dtype))
        return np.frombuffer(shared, dtype=dtype, count=count).reshape(shape)

    # `ArrayGroup` has the blocking forms of the following operations. It passes arguments that need a conversion to the methods
    # with an underscore, whose first parameter says whether the call only begins the operation.

    # Reductions

    def _all_reduce(
        self, async_op: bool, x: ArrayLike, op: str, out: NDArray | None, compression: str | _core.Compressor | None
    ) -> Any:
        array = as_contiguous(x)
        result = result_array(out, array.shape, array.dtype)
        source = None if result is array else as_reducible(array, op)
        handle = self.core.all_reduce(as_reducible(result, op), op, source, compression, async_op=async_op)
        return end_call(handle, lambda: scalar_or_array(result, x))

    def all_reduce_async(
        self,
        x: ArrayLike,
        op: str = "sum",
        *,
        out: NDArray | None = None,
        compression: str | _core.Compressor | None = None,
    ) -> Handle:
        """Begins an `all_reduce` and returns its handle. `Handle.wait` returns the result."""
        return self._all_reduce(True, x, op, out, compression)

    def _reduce(self, async_op: bool, x: ArrayLike, op: str, root: int, out: NDArray | None) -> Any:
        array = as_contiguous(x)
        if self.rank != root:
            handle = self.core.reduce(None, op, root, as_reducible(array, op), async_op=async_op)
            return end_call(handle, lambda: None)
        result = result_array(out, array.shape, array.dtype)
        source = None if result is array else as_reducible(array, op)
        handle = self.core.reduce(as_reducible(result, op), op, root, source, async_op=async_op)
        return end_call(handle, lambda: scalar_or_array(result, x))

    def reduce(self, x: ArrayLike, op: str = "sum", root: int = 0, *, out: NDArray | None = None) -> Any:
        """Reduces the arrays of all ranks. Returns the result on the root, and `None` on the other ranks."""
        return self._reduce(False, x, op, root, out)

    def reduce_async(self, x: ArrayLike, op: str = "sum", root: int = 0, *, out: NDArray | None = None) -> Handle:
        """Begins a `reduce` and returns its handle."""
        return self._reduce(True, x, op, root, out)

    def _reduce_scatter_arguments(
        self, x: ArrayLike, op: str, out: NDArray | None, counts: Sequence[int] | None
    ) -> tuple[NDArray, NDArray, list[int] | None]:
        array = as_contiguous(x)
        if counts is None:
            own, scaled = rows_per_part(array, self.size, "an array"), None
        else:
            self._check_counts(counts, array.shape[0] if array.ndim else 0)
            own, scaled = counts[self.rank], element_counts(list(counts), array.shape[1:])
        result = result_array(out, (own, *array.shape[1:]), array.dtype)
        if scaled is not None and array.dtype.kind == "c":
            scaled = [2 * count for count in scaled]
        return array, result, scaled

    def _reduce_scatter(self, async_op: bool, x: ArrayLike, op: str, out: NDArray | None, counts: Sequence[int] | None) -> Any:
        array, result, scaled = self._reduce_scatter_arguments(x, op, out, counts)
        source = as_reducible(array, op)
        handle = self.core.reduce_scatter(as_reducible(result, op), source, op, scaled, async_op=async_op)
        return end_call(handle, lambda: result)

    def reduce_scatter_async(
        self, x: ArrayLike, op: str = "sum", *, out: NDArray | None = None, counts: Sequence[int] | None = None
    ) -> Handle:
        """Begins a `reduce_scatter` and returns its handle."""
        return self._reduce_scatter(True, x, op, out, counts)

    def _scan(self, async_op: bool, x: ArrayLike, op: str, out: NDArray | None, *, is_exclusive: bool = False) -> Any:
        array = as_contiguous(x)
        result = result_array(out, array.shape, array.dtype)
        source = None if result is array else as_reducible(array, op)
        scan = self.core.exscan if is_exclusive else self.core.scan
        handle = scan(as_reducible(result, op), op, source, async_op=async_op)
        return end_call(handle, lambda: None if is_exclusive and self.rank == 0 else scalar_or_array(result, x))

    def scan(self, x: ArrayLike, op: str = "sum", *, out: NDArray | None = None) -> Any:
        """Returns, on rank r, the reduction of the arrays of ranks 0 to r."""
        return self._scan(False, x, op, out)

    def scan_async(self, x: ArrayLike, op: str = "sum", *, out: NDArray | None = None) -> Handle:
        """Begins a `scan` and returns its handle."""
        return self._scan(True, x, op, out)

    def exscan(self, x: ArrayLike, op: str = "sum", *, out: NDArray | None = None) -> Any:
        """Returns, on rank r, the reduction of the arrays of ranks 0 to r-1. On rank 0, `exscan` returns `None` and
        does not change `out`."""
        return self._scan(False, x, op, out, is_exclusive=True)

    def exscan_async(self, x: ArrayLike, op: str = "sum", *, out: NDArray | None = None) -> Handle:
        """Begins an `exscan` and returns its handle."""
        return self._scan(True, x, op, out, is_exclusive=True)

    # Collectives without a reduction

    def _broadcast(self, async_op: bool, x: ArrayLike, root: int, out: NDArray | None) -> Any:
        array = as_contiguous(x)
        result = result_array(out, array.shape, array.dtype)
        if self.rank == root and result is not array:
            result[...] = array
        handle = self.core.broadcast(as_sendable(result), root, async_op=async_op)
        return end_call(handle, lambda: scalar_or_array(result, x))

    def broadcast_async(self, x: ArrayLike, root: int = 0, *, out: NDArray | None = None) -> Handle:
        """Begins a `broadcast` and returns its handle."""
        return self._broadcast(True, x, root, out)

    def _gather_arguments(
        self, array: NDArray, out: NDArray | None, counts: Sequence[int] | None
    ) -> tuple[NDArray, list[int] | None]:
        """Returns the array that will receive the gathered rows, and `counts` converted from rows to elements."""
        if counts is None:
            return result_array(out, (self.size, *array.shape), array.dtype), None
        scaled = self._check_own_count(array, counts)
        return result_array(out, (sum(counts), *array.shape[1:]), array.dtype), scaled

    def _check_own_count(self, array: NDArray, counts: Sequence[int] | None) -> list[int] | None:
        """Checks that this rank's array has `counts[rank]` rows. Returns the number of elements of each rank."""
        if counts is None:
            return None
        self._check_counts(counts, None)
        if array.ndim == 0 or array.shape[0] != counts[self.rank]:
            raise InvalidArgument(
                f"this rank's array has shape {array.shape}, but counts has {counted(counts[self.rank], 'row')} for it"
            )
        return element_counts(list(counts), array.shape[1:])

    def _all_gather(self, async_op: bool, x: ArrayLike, out: NDArray | None, counts: Sequence[int] | None) -> Any:
        array = as_contiguous(x)
        result, scaled = self._gather_arguments(array, out, counts)
        handle = self.core.all_gather(as_sendable(result), as_sendable(array), scaled, async_op=async_op)
        return end_call(handle, lambda: result)

    def all_gather_async(self, x: ArrayLike, *, out: NDArray | None = None, counts: Sequence[int] | None = None) -> Handle:
        """Begins an `all_gather` and returns its handle."""
        return self._all_gather(True, x, out, counts)

    def all_gather_list(self, x: ArrayLike) -> list[NDArray]:
        """Returns a list of the arrays of all ranks, in rank order. The arrays may have different numbers of rows. To
        find the numbers of rows, the ranks first run an additional all-gather."""
        array = np.atleast_1d(as_contiguous(x))
        counts = [int(count) for count in self.all_gather(np.int64(array.shape[0]))]
        parts = np.split(self.all_gather(array, counts=counts), np.cumsum(counts)[:-1])
        return list(parts)

    def _gather(self, async_op: bool, x: ArrayLike, root: int, out: NDArray | None, counts: Sequence[int] | None) -> Any:
        array = as_contiguous(x)
        if self.rank == root:
            result, scaled = self._gather_arguments(array, out, counts)
            target = as_sendable(result)
        else:
            result, target, scaled = None, None, self._check_own_count(array, counts)
        handle = self.core.gather(target, as_sendable(array), root, scaled, async_op=async_op)
        return end_call(handle, lambda: result)

    def gather_async(
        self, x: ArrayLike, root: int = 0, *, out: NDArray | None = None, counts: Sequence[int] | None = None
    ) -> Handle:
        """Begins a `gather` and returns its handle."""
        return self._gather(True, x, root, out, counts)

    def _scatter_arguments(
        self, x: ArrayLike | None, root: int, out: NDArray | None, counts: Sequence[int] | None
    ) -> tuple[NDArray | None, NDArray, list[int] | None]:
        array = None

        def check_shape_and_type() -> tuple[tuple[int, ...], np.dtype]:
            nonlocal array
            if x is None:
                raise InvalidArgument("the root has to pass the array to scatter")
            array = as_contiguous(x)
            as_sendable(array)  # raises an error for elements that cannot be sent
            return array.shape, array.dtype

        if counts is not None:
            self._check_counts(counts, None)
        if out is None:
            # If the root's array is wrong, the other ranks get the reason.
            shape, dtype = self._broadcast_from_root(check_shape_and_type, root)
            if counts is None and (not shape or shape[0] % self.size):
                raise InvalidArgument(f"an array of shape {shape} cannot be divided into {self.size} equal parts of rows")
            if counts is not None and (not shape or shape[0] != sum(counts)):
                raise InvalidArgument(
                    f"counts {list(counts)} add up to {counted(sum(counts), 'row')}, but the array has shape {shape}"
                )
            own = shape[0] // self.size if counts is None else counts[self.rank]
            out = np.empty((own, *shape[1:]), dtype)
        elif self.rank == root:
            check_shape_and_type()
        scaled = None if counts is None else element_counts(list(counts), out.shape[1:])
        return array, check_writable(out), scaled

    def _scatter(self, async_op: bool, x: ArrayLike | None, root: int, out: NDArray | None, counts: Sequence[int] | None) -> Any:
        array, result, scaled = self._scatter_arguments(x, root, out, counts)
        source = None if array is None else as_sendable(array)
        handle = self.core.scatter(as_sendable(result), source, root, scaled, async_op=async_op)
        return end_call(handle, lambda: result)

    def scatter_async(
        self,
        x: ArrayLike | None,
        root: int = 0,
        *,
        out: NDArray | None = None,
        counts: Sequence[int] | None = None,
    ) -> Handle:
        """Begins a `scatter` and returns its handle. Without `out`, the call first waits for the shape and type from
        the root."""
        return self._scatter(True, x, root, out, counts)

    def _all_to_all_arguments(
        self,
        x: ArrayLike,
        out: NDArray | None,
        send_counts: Sequence[int] | None,
        receive_counts: Sequence[int] | None,
    ) -> tuple[NDArray, NDArray, list[int] | None, list[int] | None]:
        array = as_contiguous(x)
        if (send_counts is None) != (receive_counts is None):
            raise InvalidArgument("uneven parts need both send_counts and receive_counts")
        if send_counts is None or receive_counts is None:
            rows_per_part(array, self.size, "an array")
            return array, result_array(out, array.shape, array.dtype), None, None
        self._check_counts(send_counts, array.shape[0] if array.ndim else 0)
        self._check_counts(receive_counts, None)
        row = array.shape[1:]
        result = result_array(out, (sum(receive_counts), *row), array.dtype)
        return array, result, element_counts(list(send_counts), row), element_counts(list(receive_counts), row)

    def _all_to_all(
        self,
        async_op: bool,
        x: ArrayLike,
        out: NDArray | None,
        send_counts: Sequence[int] | None,
        receive_counts: Sequence[int] | None,
    ) -> Any:
        array, result, sent, received = self._all_to_all_arguments(x, out, send_counts, receive_counts)
        handle = self.core.all_to_all(as_sendable(result), as_sendable(array), sent, received, async_op=async_op)
        return end_call(handle, lambda: result)

    def all_to_all_async(
        self,
        x: ArrayLike,
        *,
        out: NDArray | None = None,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
    ) -> Handle:
        """Begins an `all_to_all` and returns its handle."""
        return self._all_to_all(True, x, out, send_counts, receive_counts)

    def barrier_async(self) -> Handle:
        """Begins a `barrier` and returns its handle."""
        return end_call(self.core.barrier(async_op=True), lambda: None)

    def _check_counts(self, counts: Sequence[int], total: int | None) -> None:
        if len(counts) != self.size or min(counts) < 0:
            raise InvalidArgument(
                f"counts {list(counts)} are not one number of rows for each of the {counted(self.size, 'rank')}"
            )
        if total is not None and sum(counts) != total:
            raise InvalidArgument(f"counts {list(counts)} add up to {counted(sum(counts), 'row')}, but the array has {total}")

    # Messages

    def _send(self, async_op: bool, x: ArrayLike, to: int, tag: int, synchronous: bool) -> Any:
        handle = self.core.send(as_sendable(as_contiguous(x)), to, tag, synchronous, async_op=async_op)
        return end_call(handle, lambda: None)

    def send_async(self, x: ArrayLike, to: int, tag: int = 0, *, synchronous: bool = False) -> Handle:
        """Begins a `send` and returns its handle."""
        return self._send(True, x, to, tag, synchronous)

    def _receive(self, async_op: bool, out: NDArray, source: int | None, tag: int | None) -> Any:
        received = self.core.receive(as_sendable(check_writable(out)), source, tag, async_op=async_op)
        return Handle(received, lambda status: Status(*status)) if async_op else Status(*received)

    def receive_async(self, out: NDArray, source: int | None = None, tag: int | None = None) -> Handle:
        """Begins a `receive` and returns its handle. `Handle.wait` returns the `Status`."""
        return self._receive(True, out, source, tag)

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
        """At the same time, sends `x` to rank `to` and receives an array from rank `source` into `out`. `to` and
        `source` may be the same rank."""
        target = as_sendable(check_writable(out))
        return Status(*self.core.send_receive(as_sendable(as_contiguous(x)), to, send_tag, target, source, receive_tag))

    def probe(self, source: int | None = None, tag: int | None = None, timeout: float = 0.0) -> Status | None:
        """Waits for a message that no receive has matched, and returns the status of the message. Returns `None` if
        no such message arrives within `timeout` seconds. A later `receive` still receives the message."""
        found = self.core.probe(source, tag, timeout)
        return None if found is None else Status(*found[:3])

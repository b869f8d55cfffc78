"""Horovod's operations on numpy arrays. The operations are named tensors: ranks may begin them in any order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringtrain import _core, arrays
from ringtrain._horovod import gathering
from ringtrain._horovod.compression import Compression, Compressor, find_wire, half_type
from ringtrain._horovod.process_sets import ProcessSet, global_process_set
from ringtrain._text import counted

Average, Sum, Min, Max, Product = "avg", "sum", "min", "max", "prod"


class Operation:
    """An operation that has begun. `wait` returns its result."""

    def __init__(self, handle: _core.Handle, finish: Callable[[Any], Any]) -> None:
        self._handle = handle
        self._finish: Callable[[Any], Any] | None = finish
        self._result: Any = None

    def wait(self) -> Any:
        """Waits for the operation and returns its result, or raises its error."""
        gathered = self._handle.wait()
        if self._finish is not None:
            self._result = self._finish(gathered)
            self._finish = None
        return self._result

    def test(self) -> bool:
        """Returns whether the operation has ended, with a result or an error."""
        return self._handle.test()


@dataclass(frozen=True)
class Reduction:
    """The options of an all-reduce or a reduce-scatter."""

    op: str = Average
    prescale: float = 1.0
    postscale: float = 1.0
    compression: type[Compressor] | str = Compression.none


def reduction_name(average: bool | None, op: str | None) -> str:
    """Returns the reduction for Horovod's arguments `average` and `op`. The default is the average."""
    if average is not None and op is not None:
        raise ValueError("the op parameter supersedes average; pass only one of them")
    if op is None:
        return Average if average is None or average else Sum
    if op not in (Average, Sum, Min, Max, Product):
        raise NotImplementedError(f"the reduction {op!r} is not implemented; use Average, Sum, Min, Max or Product")
    return op


def element_name(dtype: np.dtype[Any]) -> str | None:
    """Returns the compiled module's name for elements of this type, or None if the module cannot reduce them."""
    if dtype.name == "bfloat16":
        return "bf16"
    return arrays.dtype_name(dtype) if dtype.kind in "biuf" and dtype.itemsize <= 8 and dtype.isbuiltin == 1 else None


def as_memory(array: NDArray, writable: bool = True) -> _core.Memory:
    """Returns the memory of a contiguous array. A complex number is two real numbers. An element of a type without reductions is
    bytes."""
    name, count = element_name(array.dtype), array.size
    if name is None and array.dtype.kind == "c" and array.dtype.itemsize <= 16:
        name, count = "f32" if array.dtype.itemsize == 8 else "f64", 2 * count
    elif name is None:
        name, count = "u8", array.nbytes
    return _core.Memory(array, array.__array_interface__["data"][0], count, name, writable)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every rank of the set has called `barrier`."""
    members = process_set.members()
    # A maximum needs all ranks, so a barrier fails if a rank has joined.
    members.named.all_reduce(members.tensor_name("barrier", None), bytearray(1), Max).wait()


def begin_all_reduce(
    array: ArrayLike,
    reduction: Reduction = Reduction(),
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    kind: str = "allreduce",
) -> Operation:
    """Begins to reduce an array over all ranks into a new array. Ranks match arrays with the same `kind` and `name`."""
    members = process_set.members()
    source, op, restore = _convert(np.asarray(array), reduction, members.group.size)
    result = np.empty_like(source)
    full_name = members.tensor_name(kind, name)
    handle = members.named.all_reduce(full_name, as_memory(result), op, as_memory(source, False))
    return Operation(handle, lambda _: restore(result))


def begin_broadcast(
    array: ArrayLike, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Operation:
    """Begins to copy the root's array into a new array on every rank. The root is a rank of the job, not of the set."""
    members = process_set.members()
    result = np.array(array, order="C")
    root = members.rank_in_group(root_rank)
    handle = members.named.broadcast(members.tensor_name("broadcast", name), as_memory(result), root)
    return Operation(handle, lambda _: result)


def begin_all_gather(array: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set) -> Operation:
    """Begins to concatenate the ranks' arrays along the first dimension. The arrays may differ only in the length of their first
    dimension. The result is the whole array, and the number of rows of each rank."""
    members = process_set.members()
    source = arrays.as_contiguous(array)
    if source.ndim == 0:
        raise _core.InvalidArgument("allgather needs a first dimension; a single number has none")
    text = f"{source.dtype}|{source.shape[1:]}|{source.shape[0]}"
    data = source.reshape(-1).view(np.uint8)
    handle = gathering.gather_parts(members, members.tensor_name("allgather", name), text, data)

    def finish(result: bytearray) -> tuple[NDArray, list[int]]:
        described = gathering.split_parts(result)
        rows = gathering.row_counts(members, described)
        parts = [part.view(source.dtype).reshape(n, *source.shape[1:]) for n, (_, part) in zip(rows, described, strict=True)]
        return np.concatenate(parts), rows

    return Operation(handle, finish)


def begin_reduce_scatter(
    array: ArrayLike,
    reduction: Reduction = Reduction(),
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    kind: str = "reducescatter",
) -> Operation:
    """Begins to reduce the arrays of all ranks. The result is this rank's part of the rows. If the rows cannot be divided evenly,
    each of the first ranks gets one row more than the others."""
    members = process_set.members()
    n, rank = members.group.size, members.group.rank
    source, op, restore = _convert(np.asarray(array), reduction, n)
    if source.ndim == 0:
        raise _core.InvalidArgument("reducescatter needs a first dimension; a single number has none")
    rows = [source.shape[0] // n + (index < source.shape[0] % n) for index in range(n)]
    if source.shape[0] % n:
        # The named tensors divide elements and not rows, so each rank's part gets the same number of rows.
        padded = np.zeros((n, rows[0], *source.shape[1:]), source.dtype)
        for part, values in zip(padded, np.split(source, np.cumsum(rows)[:-1]), strict=True):
            part[: len(values)] = values
        source = padded.reshape(-1, *source.shape[1:])
    result = np.empty((rows[0], *source.shape[1:]), source.dtype)
    full_name = members.tensor_name(kind, name)
    handle = members.named.reduce_scatter(full_name, as_memory(result), as_memory(source, False), op)
    return Operation(handle, lambda _: restore(result[: rows[rank]]))


def all_to_all(
    array: ArrayLike, splits: Sequence[int] | None = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[NDArray, list[int]]:
    """Sends `splits[i]` rows of the array to rank i. Without `splits`, each rank gets the same number of rows. Returns the
    received rows in rank order, and how many rows came from each rank.

    If several threads of a rank call `all_to_all`, all ranks must make the calls in the same order."""
    members = process_set.members()
    group, source = members.group, arrays.as_contiguous(array)
    if source.ndim == 0:
        raise _core.InvalidArgument("alltoall needs a first dimension; a single number has none")
    if splits is None and source.shape[0] % group.size:
        raise _core.InvalidArgument(
            f"{counted(source.shape[0], 'row')} cannot be split evenly among {group.size} ranks; pass splits"
        )
    send = [source.shape[0] // group.size] * group.size if splits is None else [int(split) for split in splits]
    if len(send) != group.size or sum(send) != source.shape[0] or min(send) < 0:
        raise _core.InvalidArgument(f"the splits {send} do not divide {counted(source.shape[0], 'row')} among {group.size} ranks")
    # This all-gather also waits until all ranks have called `all_to_all`, and fails if a rank has joined or has other rows.
    counts = np.array(send, np.int64)
    text = f"{source.dtype}|{source.shape[1:]}|{group.size}"
    parts = gathering.split_parts(
        gathering.gather_parts(members, members.tensor_name("alltoall", name), text, counts.view(np.uint8)).wait()
    )
    gathering.row_counts(members, parts)
    receive = [int(part.view(np.int64)[group.rank]) for _, part in parts]
    result = np.empty((sum(receive), *source.shape[1:]), source.dtype)
    per_row = math.prod(source.shape[1:]) * source.dtype.itemsize
    as_bytes = (result.reshape(-1).view(np.uint8), source.reshape(-1).view(np.uint8))
    group.all_to_all(*as_bytes, [count * per_row for count in send], [count * per_row for count in receive])
    return result, receive


def _convert(array: NDArray, reduction: Reduction, size: int) -> tuple[NDArray, str, Callable[[NDArray], NDArray]]:
    """Returns the array to send, the reduction, and the function that converts the result back."""
    wire = find_wire(reduction.compression, for_gradients=False)
    dtype = array.dtype
    is_float = dtype.kind in "fc" or dtype.name == "bfloat16"
    if element_name(dtype) is None and not (dtype.kind == "c" and reduction.op in (Average, Sum)):
        raise _core.Unsupported(f"elements of type {dtype} cannot be reduced with {reduction.op}")
    # Averages of integers are rounded towards minus infinity, as in Horovod.
    divides = reduction.op == Average and not is_float
    source = arrays.as_contiguous(array)
    if reduction.prescale != 1.0:
        source = (source * reduction.prescale).astype(dtype)
    if wire is not None and dtype in (np.float32, np.float64):
        source = source.astype(half_type(wire))

    def restore(result: NDArray) -> NDArray:
        result = result.astype(dtype, copy=False)
        if divides:
            result = result // size
        if reduction.postscale != 1.0:
            result = (result * reduction.postscale).astype(dtype)
        return result

    return source, Sum if divides else reduction.op, restore

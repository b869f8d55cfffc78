"""Executes collectives on numpy arrays. Reductions and broadcasts of several arrays use few flat buckets instead of one
operation for each array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ringtrain import _core
from ringtrain._horovod.compression import Compressor, find_wire
from ringtrain._horovod.division import divide_into_buckets
from ringtrain._horovod.operations import as_memory
from ringtrain.jax import job

BUCKET_BYTES = 64 << 20
"""The default size of a bucket in bytes. A larger array has a bucket of its own."""

# Buckets with at least this number of bytes in total are in memory that the ranks of a host share, if they can. This memory is
# kept for the next call.
_SHARED_BYTES_MIN = 64 << 10
# Each bucket and each array in a bucket of a broadcast begins at a multiple of this number of bytes.
_ALIGNMENT = 16

Arrays = Sequence[NDArray]
Shape = tuple[int, ...]


class Collective(Protocol):
    """An operation with its options. Equal objects are the same operation."""

    def run(self, group: _core.Group, inputs: Arrays) -> list[NDArray]:
        """Executes the operation, and returns an output for each input. A later call may overwrite the outputs."""

    def output_shape(self, shape: Shape, size: int) -> Shape:
        """Returns the shape of the output for an input of the shape `shape`, in a job of `size` ranks."""
        return shape


class CompressionState:
    """What a rank has not sent yet of arrays that are reduced again and again: the errors of a codec that rounds a lot.
    `compression` is the name of the codec, for example "int8" or "topk:0.01".

    Use an object for one call of `all_reduce` or `distribute` only, always with the same tree.
    """

    def __init__(self, compression: type[Compressor] | str) -> None:
        self.compression = find_wire(compression)
        self._by_bucket: dict[int, _core.Compressor] = {}

    def compressor(self, bucket: int) -> _core.Compressor | None:
        """Returns the compressor of a bucket, or `None` without a compression."""
        if self.compression is not None and bucket not in self._by_bucket:
            self._by_bucket[bucket] = _core.Compressor(self.compression)
        return self._by_bucket.get(bucket)

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """Returns a copy of the errors of each bucket, for a checkpoint. Every rank has its own errors, so every rank saves
        them."""
        job.wait_for_operations()
        return {bucket: compressor.state_dict() for bucket, compressor in self._by_bucket.items()}

    def load_state_dict(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Replaces the errors by a result of `state_dict`."""
        job.wait_for_operations()
        self._by_bucket.clear()
        for bucket, errors in state.items():
            if compressor := self.compressor(int(bucket)):
                compressor.load_state_dict(dict(errors))


Compression = type[Compressor] | str | CompressionState | None
"""An attribute of `ringtrain.jax.Compression`, the name of a codec, or a state."""


def compression_state(compression: Compression) -> CompressionState | None:
    """Returns a new state for the name of a codec. Returns a state unchanged."""
    if compression is None or isinstance(compression, CompressionState):
        return compression
    return CompressionState(compression)


@dataclass(frozen=True)
class AllReduce(Collective):
    """Reduces the arrays of all ranks. Arrays of the same type share a bucket."""

    op: str
    compression: CompressionState | None = None
    """The compression of elements of the type float32."""
    bucket_bytes: int = BUCKET_BYTES

    def run(self, group: _core.Group, inputs: Arrays) -> list[NDArray]:
        buckets = divide_into_buckets([(array.dtype, array.nbytes) for array in inputs], self.bucket_bytes)
        flats, outputs = _pack(group, inputs, buckets, alignment=1)
        for array, output in zip(inputs, outputs, strict=True):
            output[...] = array
        handles = []
        for number, (members, flat) in enumerate(zip(buckets, flats, strict=True)):
            dtype = inputs[members[0]].dtype
            compressor = None
            if self.compression is not None and dtype == np.float32:
                compressor = self.compression.compressor(number)
            memory = as_memory(flat.view(dtype))
            handles.append(group.all_reduce(memory, self.op, None, compressor, async_op=len(buckets) > 1))
        for handle in handles:
            if handle is not None:
                handle.wait()
        return outputs


@dataclass(frozen=True)
class Broadcast(Collective):
    """Copies the root's arrays to all ranks."""

    root: int

    def run(self, group: _core.Group, inputs: Arrays) -> list[NDArray]:
        (flat,), outputs = _pack(group, inputs, [list(range(len(inputs)))], alignment=_ALIGNMENT)
        if group.rank == self.root:
            for array, output in zip(inputs, outputs, strict=True):
                output[...] = array
        group.broadcast(as_memory(flat), self.root)
        return outputs


@dataclass(frozen=True)
class SumOnRoot(Collective):
    """Adds the arrays of all ranks on the root. The other ranks get zeros."""

    root: int

    def run(self, group: _core.Group, inputs: Arrays) -> list[NDArray]:
        is_root = group.rank == self.root
        outputs = [np.zeros_like(array) for array in inputs]
        for array, output in zip(inputs, outputs, strict=True):
            group.reduce(as_memory(output) if is_root else None, "sum", self.root, as_memory(array, False))
        return outputs


@dataclass(frozen=True)
class AllGather(Collective):
    """Concatenates the rows of all ranks in rank order."""

    def run(self, group: _core.Group, inputs: Arrays) -> list[NDArray]:
        outputs = [np.empty(self.output_shape(array.shape, group.size), array.dtype) for array in inputs]
        for array, output in zip(inputs, outputs, strict=True):
            group.all_gather(as_memory(output), as_memory(array, False))
        return outputs

    def output_shape(self, shape: Shape, size: int) -> Shape:
        return (size * shape[0], *shape[1:])


@dataclass(frozen=True)
class ReduceScatter(Collective):
    """Reduces the arrays of all ranks. Each rank gets an equal part of the rows."""

    op: str

    def run(self, group: _core.Group, inputs: Arrays) -> list[NDArray]:
        outputs = [np.empty(self.output_shape(array.shape, group.size), array.dtype) for array in inputs]
        for array, output in zip(inputs, outputs, strict=True):
            group.reduce_scatter(as_memory(output), as_memory(array), self.op)
        return outputs

    def output_shape(self, shape: Shape, size: int) -> Shape:
        return (shape[0] // size, *shape[1:])


@dataclass(frozen=True)
class AllToAll(Collective):
    """Sends an equal part of the rows to each rank."""

    def run(self, group: _core.Group, inputs: Arrays) -> list[NDArray]:
        outputs = [np.empty_like(array) for array in inputs]
        for array, output in zip(inputs, outputs, strict=True):
            group.all_to_all(as_memory(output), as_memory(array, False))
        return outputs


def _pack(
    group: _core.Group, arrays: Arrays, buckets: Sequence[Sequence[int]], alignment: int
) -> tuple[list[NDArray[np.uint8]], list[NDArray]]:
    """Returns the memory of each bucket, and for each array a part of a bucket with the same shape and type."""
    spans: list[tuple[int, int]] = []
    offsets = [0] * len(arrays)
    end = 0
    for members in buckets:
        start = end = _round_up(end, _ALIGNMENT)
        for index in members:
            offsets[index] = end = _round_up(end, alignment)
            end += arrays[index].nbytes
        spans.append((start, end))
    memory = _find_memory(group, end)
    parts = [
        memory[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
        for array, offset in zip(arrays, offsets, strict=True)
    ]
    return [memory[start:end] for start, end in spans], parts


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


# The group of the last call that used shared memory, and this memory. JAX copies the outputs of a call before the next call.
_shared_memory: tuple[_core.Group, NDArray[np.uint8]] | None = None


def _find_memory(group: _core.Group, count: int) -> NDArray[np.uint8]:
    """Returns `count` bytes. All ranks call this function with the same arguments."""
    global _shared_memory
    if count < _SHARED_BYTES_MIN or group.size == 1:
        return np.empty(count, np.uint8)
    if _shared_memory is None or _shared_memory[0] is not group or _shared_memory[1].size < count:
        _shared_memory = None
        _shared_memory = group, np.frombuffer(group.alloc(count, "u8"), np.uint8)
    return _shared_memory[1][:count]

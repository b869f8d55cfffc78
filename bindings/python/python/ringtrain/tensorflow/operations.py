"""Horovod's operations on tensors of TensorFlow, with gradients. They work in eager mode and inside `tf.function`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringtrain._horovod import job
from ringtrain._horovod import operations as arrays
from ringtrain._horovod.compression import Compression, Compressor
from ringtrain._horovod.operations import Average, Reduction, Sum, reduction_name
from ringtrain._horovod.process_sets import ProcessSet, find_set, global_process_set
from ringtrain.tensorflow.host import call_on_host


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | str = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduces tensors of the same shape over all ranks. The default is the average. `tf.IndexedSlices` are gathered: the result
    has the slices of all ranks. `device_dense`, `device_sparse` and `ignore_name_scope` have no effect."""
    reduction = Reduction(reduction_name(average, op), prescale_factor, postscale_factor, compression)
    if isinstance(tensor, tf.IndexedSlices):
        return _allreduce_slices(tensor, reduction, name, process_set)
    return _all_reduce(tf.convert_to_tensor(tensor), reduction, name, process_set, "allreduce")


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | str = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduces several tensors at once. The gradients are those of `allreduce`. `tf.IndexedSlices` are gathered one after
    another."""
    reduction = Reduction(reduction_name(average, op), prescale_factor, postscale_factor, compression)
    names = _names(name, len(tensors))
    results = list(tensors)
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, tf.IndexedSlices):
            results[index] = _allreduce_slices(tensor, reduction, names[index], process_set)
    dense = [index for index, tensor in enumerate(tensors) if not isinstance(tensor, tf.IndexedSlices)]
    reduced = _all_reduce_together(
        [tf.convert_to_tensor(tensors[index]) for index in dense], reduction, [names[index] for index in dense], process_set
    )
    for index, tensor in zip(dense, reduced, strict=True):
        results[index] = tensor
    return results


def _all_reduce_together(
    tensors: Sequence[tf.Tensor], reduction: Reduction, names: Sequence[str | None], process_set: ProcessSet
) -> list[tf.Tensor]:
    @tf.custom_gradient
    def reduce_all(*values: tf.Tensor) -> Any:
        def on_host(*parts: Any) -> list[Any]:
            begun = [
                arrays.begin_all_reduce(part, reduction, name, process_set, kind="grouped_allreduce")
                for part, name in zip(parts, names, strict=True)
            ]
            return [operation.wait() for operation in begun]

        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            _require_gradient(reduction.op)
            return [_all_reduce(g, reduction, None, process_set, "allreduce") for g in upstream]

        return call_on_host(on_host, values, [v.dtype for v in values], [v.shape for v in values]), gradient

    return list(reduce_all(*tensors)) if tensors else []


def allgather(
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenates the ranks' tensors along the first dimension. They may differ only in the length of the first dimension. The
    gradient is this rank's part of the sum of the gradients of all ranks."""

    @tf.custom_gradient
    def gather(value: tf.Tensor) -> Any:
        def on_host(part: Any) -> list[Any]:
            whole, rows = arrays.begin_all_gather(part, name, process_set).wait()
            return [whole, np.array(rows, np.int32)]

        shapes = [[None, *value.shape[1:]], [process_set.members().group.size]]
        whole, rows = call_on_host(on_host, [value], [value.dtype, tf.int32], shapes)

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            total = _all_reduce(upstream, Reduction(Sum), None, process_set, "allreduce")
            rank = process_set.members().group.rank
            start = tf.reduce_sum(rows[:rank])
            return tf.reshape(total[start : start + rows[rank]], tf.shape(value))

        return whole, gradient

    return gather(_with_rows(tensor, "allgather"))


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, ignore_name_scope: bool = False, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gathers several tensors, one after another."""
    names = _names(name, len(tensors))
    return [allgather(tensor, part, process_set=process_set) for tensor, part in zip(tensors, names, strict=True)]


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the root's tensor. The root is a rank of the job, not of the set. On the root, the gradient is the sum of the
    gradients of all ranks; elsewhere it is zero."""

    @tf.custom_gradient
    def send(value: tf.Tensor) -> Any:
        def on_host(part: Any) -> list[Any]:
            return [arrays.begin_broadcast(part, root_rank, name, process_set).wait()]

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            total = _all_reduce(upstream, Reduction(Sum), None, process_set, "allreduce")
            return total if job.rank() == root_rank else tf.zeros_like(total)

        return call_on_host(on_host, [value], [value.dtype], [value.shape])[0], gradient

    return send(tf.convert_to_tensor(tensor))


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends `splits[i]` rows of the tensor to rank i. Without `splits`, each rank gets the same number of rows. Returns the
    received rows in rank order. With `splits`, also returns how many rows came from each rank, as int32."""

    @tf.custom_gradient
    def exchange(value: tf.Tensor, counts: tf.Tensor) -> Any:
        def on_host(part: Any, sent: Any) -> list[Any]:
            rows, received = arrays.all_to_all(part, sent.tolist() if sent.size else None, name, process_set)
            return [rows, np.array(received, np.int32)]

        shapes = [[None, *value.shape[1:]], [process_set.members().group.size]]
        rows, received = call_on_host(on_host, [value, counts], [value.dtype, tf.int32], shapes)

        def gradient(upstream: tf.Tensor, _: Any) -> tuple[tf.Tensor, None]:
            back, _ = alltoall(upstream, received, process_set=process_set)
            return tf.reshape(back, tf.shape(value)), None

        return (rows, received), gradient

    counts = tf.zeros([0], tf.int32) if splits is None else tf.cast(splits, tf.int32)
    rows, received = exchange(_with_rows(tensor, "alltoall"), counts)
    return rows if splits is None else (rows, received)


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] | str = Compression.none,
    op: str = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduces the tensors of all ranks, and returns this rank's part of the rows. If the rows cannot be divided evenly, each of
    the first ranks gets one row more. As in Horovod, the gradient of a sum is multiplied by the number of ranks."""
    reduction = Reduction(reduction_name(None, op), prescale_factor, postscale_factor, compression)
    size = process_set.members().group.size

    @tf.custom_gradient
    def scatter(value: tf.Tensor) -> Any:
        def on_host(part: Any) -> list[Any]:
            return [arrays.begin_reduce_scatter(part, reduction, name, process_set).wait()]

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            _require_gradient(reduction.op)
            factor = prescale_factor * postscale_factor * (size if reduction.op == Sum else 1)
            return tf.reshape(allgather(upstream * tf.cast(factor, upstream.dtype), process_set=process_set), tf.shape(value))

        return call_on_host(on_host, [value], [value.dtype], [[None, *value.shape[1:]]])[0], gradient

    return scatter(_with_rows(tensor, "reducescatter"))


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] | str = Compression.none,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Reduces and scatters several tensors, one after another, as `reducescatter` does."""
    scale = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return [reducescatter(tensor, compression=compression, op=op, process_set=process_set, **scale) for tensor in tensors]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every rank of the set has called `barrier`. Inside `tf.function`, the graph waits."""

    def on_host() -> list[Any]:
        arrays.barrier(process_set)
        return [np.int32(0)]

    call_on_host(on_host, [], [tf.int32], [[]])


def join(device: int = -1) -> int:
    """Declares that this rank has no more data, and waits until all ranks have called `join`. Returns the rank that called it
    last. Not inside `tf.function`. See `ringtrain.torch.join`."""
    if not tf.executing_eagerly():
        raise NotImplementedError("join inside tf.function is not implemented; call join outside")
    return job.join(device)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns the number of ranks of a process set as a tensor."""
    return tf.constant(find_set(process_set_id).size(), tf.int32, name=name or "size")


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns 1 as a tensor if this process is in a process set, and otherwise 0."""
    return tf.constant(int(find_set(process_set_id).included()), tf.int32, name=name or "process_set_included")


def rank_op(name: str | None = None) -> tf.Tensor:
    """Returns this process's rank as a tensor."""
    return tf.constant(job.rank(), tf.int32, name=name or "rank")


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Returns the number of ranks on this host as a tensor."""
    return tf.constant(job.local_size(), tf.int32, name=name or "local_size")


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Returns this process's rank among the ranks on its host as a tensor."""
    return tf.constant(job.local_rank(), tf.int32, name=name or "local_rank")


def _all_reduce(tensor: tf.Tensor, reduction: Reduction, name: str | None, process_set: ProcessSet, kind: str) -> tf.Tensor:
    @tf.custom_gradient
    def reduce(value: tf.Tensor) -> Any:
        def on_host(part: Any) -> list[Any]:
            return [arrays.begin_all_reduce(part, reduction, name, process_set, kind).wait()]

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            _require_gradient(reduction.op)
            return _all_reduce(upstream, reduction, None, process_set, kind)

        return call_on_host(on_host, [value], [value.dtype], [value.shape])[0], gradient

    return reduce(tensor)


def _allreduce_slices(
    slices: tf.IndexedSlices, reduction: Reduction, name: str | None, process_set: ProcessSet
) -> tf.IndexedSlices:
    if reduction.op not in (Average, Sum):
        raise NotImplementedError(f"the reduction {reduction.op!r} of tf.IndexedSlices is not implemented; use Average or Sum")
    factor = reduction.prescale * reduction.postscale
    factor /= process_set.members().group.size if reduction.op == Average else 1
    values = allgather(slices.values, name and f"{name}.values", process_set=process_set)
    indices = allgather(slices.indices, name and f"{name}.indices", process_set=process_set)
    return tf.IndexedSlices(values * tf.cast(factor, values.dtype), indices, slices.dense_shape)


def _with_rows(tensor: Any, function: str) -> tf.Tensor:
    value = tf.convert_to_tensor(tensor)
    if value.shape.rank == 0:
        raise ValueError(f"{function} needs a first dimension; a single number has none")
    return value


def _names(name: str | None, count: int) -> list[str | None]:
    return [None if name is None else f"{name}_{index}of{count}" for index in range(1, count + 1)]


def _require_gradient(op: str) -> None:
    if op not in (Average, Sum):
        raise NotImplementedError(f"the gradient of the reduction {op!r} is not implemented; only Average and Sum have gradients")

"""Horovod's operations on tensors.

The operations are named tensors: ranks may begin them in any order, and tensors with the same name belong together. A tensor
without a name gets a number, so the ranks must begin operations without names in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringtrain import _core
from ringtrain._horovod.operations import Average, Max, reduction_name
from ringtrain._horovod.process_sets import ProcessSet, global_process_set
from ringtrain._text import counted
from ringtrain.torch import autograd, gathering, tensors
from ringtrain.torch.compression import Compression, Compressor
from ringtrain.torch.reduction import Handle, TensorReduction

Tensor = torch.Tensor


def synchronize(handle: Handle | Callable[[], Any]) -> Any:
    """Waits for an operation and returns its result."""
    return handle() if callable(handle) else handle.wait()


def poll(handle: Handle) -> bool:
    """Returns whether the operation has ended, so that `synchronize` would return at once."""
    return handle.test()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every rank of the set has called `barrier`."""
    members = process_set.members()
    # A maximum needs all ranks, so a barrier fails if a rank has joined.
    members.named.all_reduce(members.tensor_name("barrier", None), bytearray(1), Max).wait()


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    compression: type[Compressor] | str = Compression.none,
) -> Handle:
    """Begins to reduce a tensor over all ranks into a new tensor. The default reduction is the average."""
    settings = TensorReduction(process_set, reduction_name(average, op), prescale_factor, postscale_factor, compression)
    return settings.begin(tensor, None, "allreduce", name)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begins to reduce a tensor over all ranks in place."""
    settings = TensorReduction(process_set, reduction_name(average, op), prescale_factor, postscale_factor)
    return settings.begin(tensor, tensor, "allreduce", name)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] | str = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduces tensors of the same shape over all ranks into a new tensor. The default reduction is the average.

    Autograd can compute the gradient only if the reduction is a sum or an average.
    """
    settings = TensorReduction(process_set, reduction_name(average, op), prescale_factor, postscale_factor, compression)
    return autograd.AllReduceFunction.apply(tensor, settings.begin(tensor, None, "allreduce", name), settings)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduces a tensor over all ranks in place."""
    return allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set).wait()


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Begins to concatenate the ranks' tensors along the first dimension. The tensors may differ only in the length
    of their first dimension."""
    return begin_gather(tensor, name, process_set).then(lambda whole_and_rows: whole_and_rows[0])


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenates the ranks' tensors along the first dimension. The tensors may differ only in the length of their
    first dimension."""
    return autograd.AllGatherFunction.apply(tensor, begin_gather(tensor, name, process_set), process_set)


def begin_gather(tensor: Tensor, name: str | None, process_set: ProcessSet) -> Handle:
    """Begins an all-gather. The result is the whole tensor, and the number of rows of each rank."""
    members = process_set.members()
    handle, finish = gathering.begin_gather_rows(members, members.tensor_name("allgather", name), tensor)
    return Handle([handle], lambda results: finish(results[0]))


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begins to copy the root's tensor into a new tensor on every rank. The root is a rank of the job, not of the set."""
    return broadcast_async_(tensor.detach().clone(), root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begins to copy the root's tensor into the tensor of every rank. The root is a rank of the job, not of the set."""
    members = process_set.members()
    root = members.rank_in_group(root_rank)
    host, back = tensors.writable_on_host(tensor)
    handle = members.named.broadcast(members.tensor_name("broadcast", name), tensors.as_memory(host), root)

    def finish(_: list[Any]) -> Tensor:
        if back is not None:
            back()
        return tensor

    return Handle([handle], finish)


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Returns a new tensor with the elements of the root's tensor. The root is a rank of the job, not of the set."""
    handle = broadcast_async(tensor, root_rank, name, process_set)
    return autograd.BroadcastFunction.apply(tensor, handle, root_rank, process_set)


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Copies the root's tensor into the tensor of every rank. The root is a rank of the job, not of the set."""
    return broadcast_async_(tensor, root_rank, name, process_set).wait()


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begins an `alltoall`. The rows are exchanged in `synchronize`, so all ranks must synchronize these operations in the same
    order."""
    begun = _begin_all_to_all(tensor, splits, name, process_set)
    return begun.then(lambda rows_and_counts: rows_and_counts[0] if splits is None else rows_and_counts)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends `splits[i]` rows of the tensor to rank i. Without `splits`, each rank gets the same number of rows.
    Returns the received rows in rank order. With `splits`, also returns how many rows came from each rank, as int32.

    If several threads of a rank call `alltoall`, all ranks must make the calls in the same order."""

    def exchange_back(gradient: Tensor, counts: Tensor) -> Tensor:
        return _begin_all_to_all(gradient, counts, None, process_set).wait()[0]

    begun = _begin_all_to_all(tensor, splits, name, process_set)
    rows, counts = autograd.AllToAllFunction.apply(tensor, begun, exchange_back)
    return rows if splits is None else (rows, counts)


def _begin_all_to_all(tensor: Tensor, splits: Tensor | Sequence[int] | None, name: str | None, process_set: ProcessSet) -> Handle:
    """Begins an exchange of the numbers of rows, after which the handle exchanges the rows. The result is the received rows, and
    how many rows came from each rank."""
    members = process_set.members()
    group, source = members.group, tensors.readable_on_host(tensor.detach())
    if source.dim() == 0:
        raise _core.InvalidArgument("alltoall needs a first dimension; a single number has none")
    if splits is None and source.shape[0] % group.size:
        raise _core.InvalidArgument(
            f"{counted(source.shape[0], 'row')} cannot be split evenly among {group.size} ranks; pass splits"
        )
    sent = [source.shape[0] // group.size] * group.size if splits is None else [int(split) for split in splits]
    if len(sent) != group.size or sum(sent) != source.shape[0] or min(sent) < 0:
        raise _core.InvalidArgument(f"the splits {sent} do not divide {counted(source.shape[0], 'row')} among {group.size} ranks")
    # This all-gather also waits until all ranks have called `alltoall`, and fails if a rank has joined.
    counts = torch.tensor(sent, dtype=torch.int64)
    handle, finish = gathering.begin_gather_rows(members, members.tensor_name("alltoall", name), counts)

    def exchange(results: list[Any]) -> tuple[Tensor, Tensor]:
        received = finish(results[0])[0].view(group.size, group.size)[:, group.rank]
        result = torch.empty((int(received.sum()), *source.shape[1:]), dtype=source.dtype)
        per_row = source.shape[1:].numel() * tensors.values_per_element(source)
        group.all_to_all(
            tensors.as_memory(result),
            tensors.as_memory(source, False),
            [count * per_row for count in sent],
            [count * per_row for count in received.tolist()],
        )
        return result.to(tensor.device), received.to(torch.int32)

    return Handle([handle], exchange)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    compression: type[Compressor] | str = Compression.none,
) -> Handle:
    """Begins to reduce the tensors of all ranks. The result is this rank's part of the rows. If the rows cannot be divided
    evenly, each of the first ranks gets one row more than the others."""
    settings = TensorReduction(process_set, reduction_name(None, op), prescale_factor, postscale_factor, compression)
    return settings.begin_scatter(tensor, name)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] | str = Compression.none,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduces the tensors of all ranks and returns this rank's part of the rows. If the rows cannot be divided
    evenly, each of the first ranks gets one row more than the others."""
    settings = TensorReduction(process_set, reduction_name(None, op), prescale_factor, postscale_factor, compression)
    return autograd.ReduceScatterFunction.apply(tensor, settings.begin_scatter(tensor, name), settings)


def metric_average(value: Tensor | float, name: str | None = None, process_set: ProcessSet = global_process_set) -> float:
    """Returns the average over all ranks of a number, such as a loss."""
    return float(allreduce_(torch.tensor([float(value)], dtype=torch.float64), name=name, process_set=process_set))

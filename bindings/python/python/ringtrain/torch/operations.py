"""Horovod's operations on tensors.

The operations are named tensors: ranks may begin them in any order, and tensors with the same name belong together. A tensor
without a name gets a number, so the ranks must begin operations without names in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringtrain import _core
from ringtrain._horovod.operations import Average, Max, Sum, reduction_name
from ringtrain._horovod.process_sets import ProcessSet, global_process_set
from ringtrain.torch import gathering, tensors
from ringtrain.torch.compression import WIRE_TYPES, Compression, Compressor, find_compression

Tensor = torch.Tensor


class Handle:
    """The handle of an operation that has begun. `synchronize(handle)` returns the operation's result."""

    def __init__(self, handles: Sequence[_core.Handle], finish: Callable[[list[Any]], Any]) -> None:
        self._handles = handles
        self._finish: Callable[[list[Any]], Any] | None = finish
        self._result: Any = None

    def wait(self) -> Any:
        """Waits for the operation and returns its result, or raises its error."""
        results = [handle.wait() for handle in self._handles]
        if self._finish is not None:
            self._result = self._finish(results)
            self._finish = None
        return self._result

    def test(self) -> bool:
        """Returns whether the operation has ended, with a result or an error."""
        return all(handle.test() for handle in self._handles)


def synchronize(handle: Handle) -> Any:
    """Waits for an operation and returns its result."""
    return handle.wait()


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
    settings = _Reduction(process_set, reduction_name(average, op), prescale_factor, postscale_factor, compression)
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
    settings = _Reduction(process_set, reduction_name(average, op), prescale_factor, postscale_factor)
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
    settings = _Reduction(process_set, reduction_name(average, op), prescale_factor, postscale_factor, compression)
    return _AllReduce.apply(tensor, name, settings)


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


def _begin_group(begin: Callable[..., Handle], kind: str, tensors: Sequence[Tensor], name: str | None, **options: Any) -> Handle:
    """Begins an operation on each of several tensors. The result of the handle is the list of the operations' results."""
    members = options.get("process_set", global_process_set).members()
    base = members.tensor_name(kind, name)
    handles = [begin(tensor, name=f"{base}_{index}of{len(tensors)}", **options) for index, tensor in enumerate(tensors, 1)]
    return Handle(handles, list)


def grouped_allreduce_async(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: str | None = None, **options: Any
) -> Handle:
    """Begins to reduce several tensors, each into a new tensor. Accepts the other options of `allreduce_async` by name."""
    return _begin_group(allreduce_async, "grouped_allreduce", tensors, name, average=average, op=op, **options)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] | str = Compression.none,
    op: str | None = None,
    **options: Any,
) -> list[Tensor]:
    """Reduces several tensors, each into a new tensor. Accepts the other options of `allreduce` by name. Autograd computes no
    gradients."""
    return grouped_allreduce_async(tensors, average, name, op, compression=compression, **options).wait()


def grouped_allreduce_async_(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: str | None = None, **options: Any
) -> Handle:
    """Begins to reduce several tensors in place. Accepts the other options of `allreduce_async_` by name."""
    return _begin_group(allreduce_async_, "grouped_allreduce", tensors, name, average=average, op=op, **options)


def grouped_allreduce_(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: str | None = None, **options: Any
) -> list[Tensor]:
    """Reduces several tensors in place. Accepts the other options of `allreduce_` by name."""
    return grouped_allreduce_async_(tensors, average, name, op, **options).wait()


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Begins to concatenate the ranks' tensors along the first dimension. The tensors may differ only in the length
    of their first dimension."""
    members = process_set.members()
    handle, finish = gathering.begin_gather_rows(members, members.tensor_name("allgather", name), tensor)
    return Handle([handle], lambda results: finish(results[0])[0])


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenates the ranks' tensors along the first dimension. The tensors may differ only in the length of their
    first dimension."""
    return _AllGather.apply(tensor, name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begins an `allgather_async` of each tensor."""
    return _begin_group(allgather_async, "grouped_allgather", tensors, name, process_set=process_set)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Gathers several tensors. Autograd computes no gradients."""
    return grouped_allgather_async(tensors, name, process_set).wait()


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
    return _Broadcast.apply(tensor, root_rank, name, process_set)


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Copies the root's tensor into the tensor of every rank. The root is a rank of the job, not of the set."""
    return broadcast_async_(tensor, root_rank, name, process_set).wait()


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends `splits[i]` rows of the tensor to rank i. Without `splits`, each rank gets the same number of rows.
    Returns the received rows in rank order. With `splits`, also returns how many rows came from each rank, as int32.

    If several threads of a rank call `alltoall`, all ranks must make the calls in the same order."""
    members = process_set.members()
    group, source = members.group, tensors.readable_on_host(tensor)
    if splits is None and source.shape[0] % group.size:
        raise _core.InvalidArgument(f"{source.shape[0]} rows cannot be split evenly among {group.size} ranks; pass splits")
    send_counts = [source.shape[0] // group.size] * group.size if splits is None else [int(split) for split in splits]
    if len(send_counts) != group.size or sum(send_counts) != source.shape[0] or min(send_counts) < 0:
        raise _core.InvalidArgument(f"the splits {send_counts} do not divide {source.shape[0]} rows among {group.size} ranks")
    # This all-gather also waits until all ranks have called `alltoall`, and fails if a rank has joined.
    counts = torch.tensor(send_counts, dtype=torch.int64)
    handle, finish = gathering.begin_gather_rows(members, members.tensor_name("alltoall", name), counts)
    received = finish(handle.wait())[0].view(group.size, group.size)[:, group.rank]
    receive_counts = received.tolist()
    row_elements = _element_count(source.shape[1:]) * tensors.values_per_element(source)
    result = torch.empty((sum(receive_counts), *source.shape[1:]), dtype=source.dtype)
    group.all_to_all(
        tensors.as_memory(result),
        tensors.as_memory(source, False),
        [count * row_elements for count in send_counts],
        [count * row_elements for count in receive_counts],
    )
    result = result.to(tensor.device)
    return result if splits is None else (result, received.to(torch.int32))


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
    settings = _Reduction(process_set, reduction_name(None, op), prescale_factor, postscale_factor, compression)
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
    settings = _Reduction(process_set, reduction_name(None, op), prescale_factor, postscale_factor, compression)
    return _ReduceScatter.apply(tensor, name, settings)


def grouped_reducescatter_async(tensors: Sequence[Tensor], name: str | None = None, **options: Any) -> Handle:
    """Begins a `reducescatter_async` of each tensor, with the same options."""
    return _begin_group(reducescatter_async, "grouped_reducescatter", tensors, name, **options)


def grouped_reducescatter(tensors: Sequence[Tensor], name: str | None = None, **options: Any) -> list[Tensor]:
    """Reduces several tensors, and returns this rank's part of the rows of each. Autograd computes no gradients."""
    return grouped_reducescatter_async(tensors, name, **options).wait()


def metric_average(value: Tensor | float, name: str | None = None, process_set: ProcessSet = global_process_set) -> float:
    """Returns the average over all ranks of a number, such as a loss."""
    return float(allreduce_(torch.tensor([float(value)], dtype=torch.float64), name=name, process_set=process_set))


class _Reduction:
    """The options of an all-reduce or a reduce-scatter."""

    def __init__(
        self,
        process_set: ProcessSet,
        op: str,
        prescale: float = 1.0,
        postscale: float = 1.0,
        compression: type[Compressor] | str = Compression.none,
    ) -> None:
        self.process_set, self.op = process_set, op
        self._prescale, self._postscale, self._compression = prescale, postscale, find_compression(compression)
        wire = self._compression.wire
        if wire is not None and wire not in WIRE_TYPES:
            raise _core.Unsupported(
                f"the compression {wire} is for the gradients of a DistributedOptimizer; for a single tensor, use fp16 or bf16"
            )
        self.scale = prescale * postscale

    def begin(self, tensor: Tensor, into: Tensor | None, kind: str, name: str | None) -> Handle:
        """Begins an all-reduce. The result is in `into`, or in a new tensor."""
        members = self.process_set.members()
        source, op, restore = self._convert(tensor)
        host = source if into is not None and source.data_ptr() == into.data_ptr() else torch.empty_like(source)
        input_memory = None if host is source else tensors.as_memory(source, False)
        handle = members.named.all_reduce(members.tensor_name(kind, name), tensors.as_memory(host), op, input_memory)

        def finish(_: list[Any]) -> Tensor:
            result = restore(host)
            if into is None:
                return result.to(tensor.device)
            if result is not into:
                into.detach().copy_(result.view(into.shape))
            return into

        return Handle([handle], finish)

    def begin_scatter(self, tensor: Tensor, name: str | None) -> Handle:
        """Begins a reduce-scatter by rows."""
        members = self.process_set.members()
        source, op, restore = self._convert(tensor)
        if source.dim() == 0:
            raise _core.InvalidArgument("reducescatter needs a first dimension; a single number has none")
        n, rank = members.group.size, members.group.rank
        rows = [source.shape[0] // n + (index < source.shape[0] % n) for index in range(n)]
        if source.shape[0] % n:
            # The named tensors divide elements and not rows, so each rank's part gets the same number of rows.
            padded = source.new_zeros((n, rows[0], *source.shape[1:]))
            for part, values in zip(padded, source.split(rows), strict=True):
                part[: len(values)] = values
            source = padded.flatten(0, 1)
        result = torch.empty((rows[0], *source.shape[1:]), dtype=source.dtype)
        memory, input_memory = tensors.as_memory(result), tensors.as_memory(source, False)
        handle = members.named.reduce_scatter(members.tensor_name("reducescatter", name), memory, input_memory, op)
        return Handle([handle], lambda _: restore(result[: rows[rank]]).to(tensor.device))

    def _convert(self, tensor: Tensor) -> tuple[Tensor, str, Callable[[Tensor], Tensor]]:
        """Returns the tensor to send, which is on the host, the reduction, and the function that converts the result back."""
        packed, context = self._compression.compress(tensor.detach())
        source = tensors.readable_on_host(packed)
        # Averages of integers are rounded towards minus infinity, as in Horovod.
        divides = self.op == Average and not source.dtype.is_floating_point and not source.dtype.is_complex
        if self._prescale != 1.0:
            source = (source * self._prescale).to(source.dtype)
        if self._compression.wire is not None and source.dtype is torch.float32:
            source = source.to(WIRE_TYPES[self._compression.wire])

        def restore(result: Tensor) -> Tensor:
            result = result if result.dtype is packed.dtype else result.to(packed.dtype)
            if divides:
                result.div_(self.process_set.members().group.size, rounding_mode="floor")
            if self._postscale != 1.0:
                result.mul_(self._postscale)
            return self._compression.decompress(result, context)

        return source, Sum if divides else self.op, restore


def _element_count(shape: Sequence[int]) -> int:
    product = 1
    for length in shape:
        product *= length
    return product


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, settings: _Reduction) -> Tensor:
        ctx.settings = settings
        return settings.begin(tensor, None, "allreduce", name).wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _require_gradient(ctx.settings.op)
        return ctx.settings.begin(gradient, None, "allreduce", None).wait(), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, process_set: ProcessSet) -> Tensor:
        members = ctx.members = process_set.members()
        handle, finish = gathering.begin_gather_rows(members, members.tensor_name("allgather", name), tensor)
        result, ctx.rows = finish(handle.wait())
        ctx.process_set = process_set
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        reduced = allreduce(gradient, op=Average, process_set=ctx.process_set)
        return reduced.split(ctx.rows)[ctx.members.group.rank], None, None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        members = process_set.members()
        ctx.process_set, ctx.is_root = process_set, members.rank_in_group(root_rank) == members.group.rank
        return broadcast_async(tensor, root_rank, name, process_set).wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        reduced = allreduce(gradient, op=Average, process_set=ctx.process_set)
        return (reduced if ctx.is_root else torch.zeros_like(reduced)), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, settings: _Reduction) -> Tensor:
        ctx.settings = settings
        return settings.begin_scatter(tensor, name).wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Multiplies the gradient of a sum by the number of ranks, as Horovod does."""
        settings = ctx.settings
        _require_gradient(settings.op)
        factor = settings.scale * (settings.process_set.size() if settings.op == Sum else 1)
        return allgather(gradient * factor, process_set=settings.process_set), None, None


def _require_gradient(op: str) -> None:
    if op not in (Average, Sum):
        raise NotImplementedError(f"the gradient of the reduction {op!r} is not implemented; only Average and Sum have gradients")

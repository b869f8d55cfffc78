"""Horovod's functions for PyTorch: `import ringtrain.torch as hvd` runs a Horovod script.

There is one difference. Horovod matches operations by name, so with Horovod the ranks may begin operations in different
orders. In this module all ranks must begin operations in the same order, and names have no effect.
`DistributedOptimizer` reduces the gradients in the same order on all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ringtrain import _core, _shutdown, _world
from ringtrain.torch import rendezvous, tensors
from ringtrain.torch.backend import ring_group
from ringtrain.torch.compression import Compression, Compressor

Tensor = torch.Tensor

Average, Sum, Min, Max, Product = "avg", "sum", "min", "max", "prod"

_TIMEOUT_SECONDS = 1800.0  # The default of torch.distributed.


_current: _shutdown.GroupResource | None = None


def init() -> None:
    """Joins the first job in this list that exists. Does nothing if this process has already joined a job.

    1. The job of torch.distributed's default group, if this group has the backend "ring".
    2. The job for which ringrun or torchrun started this process.
    3. A new job of one rank.
    """
    global _current
    if _current is not None:
        return
    if dist.is_initialized() and dist.get_backend() == "ring":
        group = ring_group().core.duplicate()
    elif _world.is_joined() or "RING_RANK" in os.environ:
        group = rendezvous.join_job_of_ringrun(_TIMEOUT_SECONDS)
    elif {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        store, env_rank, env_size = next(iter(dist.rendezvous("env://")))
        member = rendezvous.Membership(env_rank, env_size, _TIMEOUT_SECONDS, started_by_ringrun=False)
        group = rendezvous.join_through_store(dist.PrefixStore("ringtrain.torch", store), member)
    else:
        group = _core.solo()
    _current = _shutdown.GroupResource(group)


def shutdown() -> None:
    """Leaves the job."""
    global _current
    if _current is not None:
        _current.shutdown()
    _current = None


def is_initialized() -> bool:
    """Returns whether this process has called `init` and has not called `shutdown` since."""
    return _current is not None


def world() -> _core.Group:
    """Returns the group of all ranks. Raises `ringtrain.Error` if `init` has not been called."""
    if _current is None:
        raise _core.Error("ringtrain.torch has not been initialised; call init() first")
    return _current.group


def rank() -> int:
    """Returns this process's rank."""
    return world().rank


def size() -> int:
    """Returns the number of ranks."""
    return world().size


def local_rank() -> int:
    """Returns this process's rank among the ranks on its host."""
    return world().local_rank


def local_size() -> int:
    """Returns the number of ranks on this host."""
    return world().local_size


def barrier() -> None:
    """Waits until every rank has called `barrier`."""
    world().barrier()


def join(device: int = -1) -> int:
    """Raises NotImplementedError: a rank cannot leave while other ranks continue."""
    raise NotImplementedError(
        "ringtrain.torch.join is not implemented: give every rank the same number of batches, "
        "or use DistributedDataParallel with its join()"
    )


class Handle:
    """The handle of an operation that has begun. `synchronize(handle)` returns the operation's result."""

    def __init__(self, handle: _core.Handle, finish: Callable[[], Any]) -> None:
        self._handle = handle
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def wait(self) -> Any:
        """Waits for the operation and returns its result, or raises its error."""
        self._handle.wait()
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result

    def test(self) -> bool:
        """Returns whether the operation has ended, with a result or an error."""
        return self._handle.test()


def synchronize(handle: Handle) -> Any:
    """Waits for an operation and returns its result."""
    return handle.wait()


def poll(handle: Handle) -> bool:
    """Returns whether the operation has ended, so that `synchronize` would return at once."""
    return handle.test()


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: type[Compressor] = Compression.none,
) -> Handle:
    """Begins to reduce a tensor over all ranks into a new tensor. The default reduction is the average."""
    return _begin_allreduce(tensor, None, _reduction_name(average, op), prescale_factor, postscale_factor, compression)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begins to reduce a tensor over all ranks in place."""
    return _begin_allreduce(tensor, tensor, _reduction_name(average, op), prescale_factor, postscale_factor, Compression.none)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduces tensors of the same shape over all ranks into a new tensor. The default reduction is the average.

    Autograd can compute the gradient only if the reduction is a sum or an average.
    """
    return _AllReduce.apply(tensor, _reduction_name(average, op), prescale_factor, postscale_factor, compression)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduces a tensor over all ranks in place."""
    return allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor).wait()


def grouped_allreduce_async(tensors: Sequence[Tensor], *arguments: Any, **options: Any) -> list[Handle]:
    """Begins to reduce several tensors, each into a new tensor. Accepts the same options as `allreduce_async`."""
    return [allreduce_async(tensor, *arguments, **options) for tensor in tensors]


def grouped_allreduce(tensors: Sequence[Tensor], *arguments: Any, **options: Any) -> list[Tensor]:
    """Reduces several tensors, each into a new tensor. Accepts the same options as `allreduce_async`."""
    return [handle.wait() for handle in grouped_allreduce_async(tensors, *arguments, **options)]


def grouped_allreduce_(tensors: Sequence[Tensor], *arguments: Any, **options: Any) -> list[Tensor]:
    """Reduces several tensors in place. Accepts the same options as `allreduce_async_`."""
    handles = [allreduce_async_(tensor, *arguments, **options) for tensor in tensors]
    return [handle.wait() for handle in handles]


def allgather_async(tensor: Tensor, name: str | None = None) -> Handle:
    """Begins to concatenate the ranks' tensors along the first dimension. The tensors may differ only in the length
    of their first dimension."""
    return _begin_allgather(tensor)[0]


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """Concatenates the ranks' tensors along the first dimension. The tensors may differ only in the length of their
    first dimension."""
    return _AllGather.apply(tensor)


def broadcast_async(tensor: Tensor, root_rank: int, name: str | None = None) -> Handle:
    """Begins to copy the root's tensor into a new tensor on every rank."""
    return broadcast_async_(tensor.detach().clone(), root_rank, name)


def broadcast_async_(tensor: Tensor, root_rank: int, name: str | None = None) -> Handle:
    """Begins to copy the root's tensor into the tensor of every rank."""
    host, back = tensors.writable_on_host(tensor)
    return Handle(world().broadcast_async(tensors.as_memory(host), root_rank), _finish_function(tensor, back))


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """Returns a new tensor with the elements of the root's tensor."""
    return _Broadcast.apply(tensor, root_rank)


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """Copies the root's tensor into the tensor of every rank."""
    return broadcast_async_(tensor, root_rank, name).wait()


def alltoall(tensor: Tensor, splits: Tensor | Sequence[int] | None = None, name: str | None = None) -> Any:
    """Sends `splits[i]` rows of the tensor to rank i. Without `splits`, each rank gets the same number of rows.
    Returns the received rows in rank order. With `splits`, also returns how many rows came from each rank, as int32."""
    group, source = world(), tensors.readable_on_host(tensor)
    if splits is None and source.shape[0] % group.size:
        raise _core.InvalidArgument(f"{source.shape[0]} rows cannot be split evenly among {group.size} ranks; pass splits")
    send_counts = [source.shape[0] // group.size] * group.size if splits is None else [int(split) for split in splits]
    if len(send_counts) != group.size or sum(send_counts) != source.shape[0] or min(send_counts) < 0:
        raise _core.InvalidArgument(f"the splits {send_counts} do not divide {source.shape[0]} rows among {group.size} ranks")
    sent, received = torch.tensor(send_counts, dtype=torch.int64), torch.empty(group.size, dtype=torch.int64)
    group.all_to_all(tensors.as_memory(received), tensors.as_memory(sent, False))
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


def reducescatter(tensor: Tensor, name: str | None = None, op: str | None = None) -> Tensor:
    """Reduces the tensors of all ranks and returns this rank's part of the rows. If the rows cannot be divided
    evenly, each of the first ranks gets one row more than the others."""
    group, source = world(), tensors.readable_on_host(tensor)
    rows = [source.shape[0] // group.size + (index < source.shape[0] % group.size) for index in range(group.size)]
    result = torch.empty((rows[group.rank], *source.shape[1:]), dtype=source.dtype)
    counts = [count * _element_count(source.shape[1:]) * tensors.values_per_element(source) for count in rows]
    group.reduce_scatter(tensors.as_memory(result), tensors.as_memory(source, False), _reduction_name(None, op), counts)
    return result.to(tensor.device)


def metric_average(value: Tensor | float, name: str | None = None) -> float:
    """Returns the average over all ranks of a number, such as a loss."""
    number = torch.tensor([float(value)], dtype=torch.float64)
    world().all_reduce(tensors.as_memory(number), Average)
    return float(number)


def _reduction_name(average: bool | None, op: str | None) -> str:
    if average is not None and op is not None:
        raise ValueError("the op parameter supersedes average; pass only one of them")
    if op is None:
        return Average if average is None or average else Sum
    if op not in (Average, Sum, Min, Max, Product):
        raise NotImplementedError(f"the reduction {op!r} is not implemented; use Average, Sum, Min, Max or Product")
    return op


def _begin_allreduce(
    tensor: Tensor, into: Tensor | None, op: str, prescale: float, postscale: float, compression: type[Compressor]
) -> Handle:
    group = world()
    packed, context = compression.compress(tensor.detach())
    source = tensors.readable_on_host(packed)
    # Averages of integers are rounded towards minus infinity, as in Horovod.
    divide = op == Average and not source.dtype.is_floating_point and not source.dtype.is_complex
    if prescale != 1.0:
        source = source * prescale
    host = source if into is not None and source.data_ptr() == into.data_ptr() else torch.empty_like(source)
    wire = compression.wire if source.dtype is torch.float32 else None
    input_memory = None if host is source else tensors.as_memory(source, False)
    handle = group.all_reduce_async(tensors.as_memory(host), Sum if divide else op, input_memory, wire)

    def finish() -> Tensor:
        if divide:
            host.div_(group.size, rounding_mode="floor")
        if postscale != 1.0:
            host.mul_(postscale)
        result = compression.decompress(host, context)
        if into is None:
            return result.to(tensor.device)
        if result is not into:
            into.detach().copy_(result.view(into.shape))
        return into

    return Handle(handle, finish)


def _begin_allgather(tensor: Tensor) -> tuple[Handle, list[int]]:
    """Begins to concatenate the ranks' tensors. Returns the handle of the operation, and the number of rows of each rank's
    tensor."""
    group, source = world(), tensors.readable_on_host(tensor)
    rows = _rows_of_all(group, source)
    result = torch.empty((sum(rows), *source.shape[1:]), dtype=source.dtype)
    row_elements = _element_count(source.shape[1:]) * tensors.values_per_element(source)
    counts = [count * row_elements for count in rows]
    handle = group.all_gather_async(tensors.as_memory(result), tensors.as_memory(source, False), counts)
    return Handle(handle, lambda: result.to(tensor.device)), rows


def _finish_function(tensor: Tensor, back: Callable[[], None] | None) -> Callable[[], Tensor]:
    """Returns the last step of an operation, a function that returns `tensor`. If `back` is not `None`, the last step first
    calls `back`, which copies the operation's result into `tensor`."""

    def finish() -> Tensor:
        if back is not None:
            back()
        return tensor

    return finish


def _rows_of_all(group: _core.Group, source: Tensor) -> list[int]:
    """Returns each rank's number of rows. Raises `ringtrain.InvalidArgument` on all ranks if the types differ, or the shapes
    differ in another dimension than the first."""
    if source.dim() == 0:
        raise _core.InvalidArgument("allgather needs a first dimension; a single number has none")
    texts = group.all_gather_bytes(f"{source.shape[0]}|{source.dtype}|{tuple(source.shape[1:])}".encode())
    described = [text.decode().split("|", 1) for text in texts]
    for index, (_, kind) in enumerate(described):
        if kind != described[0][1]:
            raise _core.InvalidArgument(f"allgather: rank 0 has rows of {described[0][1]}, and rank {index} has rows of {kind}")
    return [int(rows) for rows, _ in described]


def _element_count(shape: Sequence[int]) -> int:
    product = 1
    for length in shape:
        product *= length
    return product


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, op: str, prescale: float, postscale: float, compression: type[Compressor]) -> Tensor:
        ctx.settings = op, prescale, postscale, compression
        return _begin_allreduce(tensor, None, *ctx.settings).wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.settings[0] not in (Average, Sum):
            raise NotImplementedError(
                f"the gradient of the reduction {ctx.settings[0]!r} is not implemented; only Average and Sum have gradients"
            )
        return _begin_allreduce(gradient, None, *ctx.settings).wait(), None, None, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        handle, ctx.rows = _begin_allgather(tensor)
        return handle.wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        reduced = allreduce(gradient, op=Average)
        return reduced.split(ctx.rows)[rank()]


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int) -> Tensor:
        ctx.root_rank = root_rank
        return broadcast_async(tensor, root_rank).wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        reduced = allreduce(gradient, op=Average)
        return (reduced if rank() == ctx.root_rank else torch.zeros_like(reduced)), None

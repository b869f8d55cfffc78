"""The gradients of Horovod's operations. Each function gets the handle of an operation that has begun, and returns its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ringtrain._horovod.operations import Average, Sum
from ringtrain._horovod.process_sets import ProcessSet
from ringtrain.torch import gathering
from ringtrain.torch.reduction import Handle, TensorReduction

Tensor = torch.Tensor


class AllReduceFunction(torch.autograd.Function):
    """The gradient is the same reduction of the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, handle: Handle, settings: TensorReduction) -> Tensor:
        ctx.settings = settings
        return handle.wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _require_gradient(ctx.settings.op)
        return ctx.settings.begin(gradient, None, "allreduce", None).wait(), None, None


class AllGatherFunction(torch.autograd.Function):
    """The gradient is this rank's part of the average of the gradients of all ranks, as in Horovod. The result of the handle is
    the whole tensor, and the number of rows of each rank."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, handle: Handle, process_set: ProcessSet) -> Tensor:
        result, ctx.rows = handle.wait()
        ctx.process_set = process_set
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        reduced = _average(gradient, ctx.process_set)
        return reduced.split(ctx.rows)[ctx.process_set.members().group.rank], None, None


class BroadcastFunction(torch.autograd.Function):
    """The gradient is the average of the gradients of all ranks on the root, as in Horovod, and zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, handle: Handle, root_rank: int, process_set: ProcessSet) -> Tensor:
        members = process_set.members()
        ctx.process_set, ctx.is_root = process_set, members.rank_in_group(root_rank) == members.group.rank
        return handle.wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        reduced = _average(gradient, ctx.process_set)
        return (reduced if ctx.is_root else torch.zeros_like(reduced)), None, None, None


class AllToAllFunction(torch.autograd.Function):
    """The gradient has the rows of the gradients, which `exchange_back` sends to the ranks from which the rows came."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, handle: Handle, exchange_back: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        rows, counts = handle.wait()
        ctx.counts, ctx.exchange_back = counts, exchange_back
        ctx.mark_non_differentiable(counts)
        return rows, counts

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        return ctx.exchange_back(gradient, ctx.counts), None, None


class ReduceScatterFunction(torch.autograd.Function):
    """The gradient has the rows of the gradients of all ranks. For a sum, it is multiplied by the number of ranks, as in
    Horovod."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, handle: Handle, settings: TensorReduction) -> Tensor:
        ctx.settings = settings
        return handle.wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        settings = ctx.settings
        _require_gradient(settings.op)
        factor = settings.scale * (settings.process_set.size() if settings.op == Sum else 1)
        members = settings.process_set.members()
        handle, finish = gathering.begin_gather_rows(members, members.tensor_name("allgather", None), gradient * factor)
        return finish(handle.wait())[0], None, None


def _average(gradient: Tensor, process_set: ProcessSet) -> Tensor:
    return TensorReduction(process_set, Average).begin(gradient, None, "allreduce", None).wait()


def _require_gradient(op: str) -> None:
    if op not in (Average, Sum):
        raise NotImplementedError(f"the gradient of the reduction {op!r} is not implemented; only Average and Sum have gradients")

"""Horovod's operations on several tensors at once. The operations of all tensors begin before the first one is waited for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringtrain._horovod.operations import Average, reduction_name
from ringtrain._horovod.process_sets import ProcessSet, global_process_set
from ringtrain.torch import autograd, operations
from ringtrain.torch.compression import Compression, Compressor
from ringtrain.torch.reduction import Handle, TensorReduction

Tensor = torch.Tensor


def _names(kind: str, name: str | None, count: int, process_set: ProcessSet) -> list[str]:
    base = process_set.members().tensor_name(kind, name)
    return [f"{base}_{index}of{count}" for index in range(1, count + 1)]


def _begin_all_reduces(
    settings: TensorReduction, tensors: Sequence[Tensor], name: str | None, in_place: bool = False
) -> list[Handle]:
    names = _names("grouped_allreduce", name, len(tensors), settings.process_set)
    return [
        settings.begin(tensor, tensor if in_place else None, "allreduce", part)
        for tensor, part in zip(tensors, names, strict=True)
    ]


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begins to reduce several tensors, each into a new tensor, as `allreduce_async` does. The result of the handle is a list."""
    settings = TensorReduction(process_set, reduction_name(average, op), prescale_factor, postscale_factor)
    return Handle(_begin_all_reduces(settings, tensors, name), list)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] | str = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduces several tensors, each into a new tensor, as `allreduce` does."""
    settings = TensorReduction(process_set, reduction_name(average, op), prescale_factor, postscale_factor, compression)
    handles = _begin_all_reduces(settings, tensors, name)
    return [autograd.AllReduceFunction.apply(tensor, handle, settings) for tensor, handle in zip(tensors, handles, strict=True)]


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begins to reduce several tensors in place, as `allreduce_async_` does. The result of the handle is a list."""
    settings = TensorReduction(process_set, reduction_name(average, op), prescale_factor, postscale_factor)
    return Handle(_begin_all_reduces(settings, tensors, name, in_place=True), list)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduces several tensors in place, as `allreduce_` does."""
    return grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set).wait()


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begins an `allgather_async` of each tensor. The result of the handle is a list."""
    names = _names("grouped_allgather", name, len(tensors), process_set)
    parts = zip(tensors, names, strict=True)
    return Handle([operations.allgather_async(tensor, part, process_set) for tensor, part in parts], list)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Gathers several tensors, as `allgather` does."""
    names = _names("grouped_allgather", name, len(tensors), process_set)
    handles = [operations.begin_gather(tensor, part, process_set) for tensor, part in zip(tensors, names, strict=True)]
    return [
        autograd.AllGatherFunction.apply(tensor, handle, process_set) for tensor, handle in zip(tensors, handles, strict=True)
    ]


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begins a `reducescatter_async` of each tensor. The result of the handle is a list."""
    settings = TensorReduction(process_set, reduction_name(None, op), prescale_factor, postscale_factor)
    return Handle(_begin_reduce_scatters(settings, tensors, name), list)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] | str = Compression.none,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduces several tensors, and returns this rank's part of the rows of each, as `reducescatter` does."""
    settings = TensorReduction(process_set, reduction_name(None, op), prescale_factor, postscale_factor, compression)
    handles = _begin_reduce_scatters(settings, tensors, name)
    return [
        autograd.ReduceScatterFunction.apply(tensor, handle, settings) for tensor, handle in zip(tensors, handles, strict=True)
    ]


def _begin_reduce_scatters(settings: TensorReduction, tensors: Sequence[Tensor], name: str | None) -> list[Handle]:
    names = _names("grouped_reducescatter", name, len(tensors), settings.process_set)
    return [settings.begin_scatter(tensor, part) for tensor, part in zip(tensors, names, strict=True)]

"""All-gathers of tensors whose first dimensions may differ."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ringtrain import _core
from ringtrain._horovod import gathering
from ringtrain._horovod.process_sets import Members
from ringtrain.torch import tensors


def begin_gather_rows(
    members: Members, name: str, tensor: torch.Tensor
) -> tuple[_core.Handle, Callable[[bytearray], tuple[torch.Tensor, list[int]]]]:
    """Begins to concatenate the ranks' tensors. Returns the handle, and a function that converts the result of the handle to the
    whole tensor and the number of rows of each rank's tensor. This function raises `ringtrain.InvalidArgument` on all ranks if
    the types differ, or the shapes differ in another dimension than the first."""
    source = tensors.readable_on_host(tensor).detach()
    if source.dim() == 0:
        raise _core.InvalidArgument("allgather needs a first dimension; a single number has none")
    dtype, shape = source.dtype, source.shape[1:]
    data = source.reshape(-1).view(torch.uint8).numpy()
    handle = gathering.gather_parts(members, name, f"{dtype}|{tuple(shape)}|{source.shape[0]}", data)

    def finish(result: bytearray) -> tuple[torch.Tensor, list[int]]:
        described = gathering.split_parts(result)
        rows = gathering.row_counts(members, described)
        parts = [torch.from_numpy(data).view(dtype).view(count, *shape) for count, (_, data) in zip(rows, described, strict=True)]
        return torch.cat(parts).to(tensor.device), rows

    return handle, finish

"""All-gathers of named tensors that carry a text with the data of each rank, for example the shape of a tensor."""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch

from ringtrain import _core
from ringtrain.torch import tensors
from ringtrain.torch.process_sets import Members

# The data of each rank begin at a multiple of this number of bytes, so that they can be viewed as elements of any type.
_ALIGNMENT = 16


def gather_parts(members: Members, name: str, description: str, data: torch.Tensor) -> _core.Handle:
    """Begins to gather a text and bytes of every rank. `split_parts` divides the result of the handle."""
    head = description.encode()
    lengths = struct.pack("<QQ", len(head), data.numel())
    first, last = -(len(lengths) + len(head)) % _ALIGNMENT, -data.numel() % _ALIGNMENT
    head_tensor = torch.frombuffer(bytearray(lengths + head + bytes(first)), dtype=torch.uint8)
    packed = torch.cat([head_tensor, data, torch.zeros(last, dtype=torch.uint8)])
    return members.named.all_gather_bytes(name, tensors.as_memory(packed, False))


def split_parts(gathered: bytearray) -> list[tuple[str, torch.Tensor]]:
    """Returns the text and the bytes of each rank."""
    parts, everything, start = [], torch.frombuffer(gathered, dtype=torch.uint8), 0
    while start < len(gathered):
        head, length = struct.unpack_from("<QQ", gathered, start)
        first = start + 16 + head + -(16 + head) % _ALIGNMENT
        parts.append((gathered[start + 16 : start + 16 + head].decode(), everything[first : first + length]))
        start = first + length + -length % _ALIGNMENT
    return parts


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
    handle = gather_parts(members, name, f"{dtype}|{tuple(shape)}|{source.shape[0]}", source.reshape(-1).view(torch.uint8))

    def finish(result: bytearray) -> tuple[torch.Tensor, list[int]]:
        described = [(*description.rpartition("|")[::2], data) for description, data in split_parts(result)]
        for rank, (kind, _, _) in zip(members.ranks, described, strict=True):
            if kind != described[0][0]:
                raise _core.InvalidArgument(
                    f"allgather: rank {members.ranks[0]} has rows of {described[0][0]}, and rank {rank} has rows of {kind}"
                )
        rows = [int(count) for _, count, _ in described]
        parts = [data.view(dtype).view(count, *shape) for count, (_, _, data) in zip(rows, described, strict=True)]
        return torch.cat(parts).to(tensor.device), rows

    return handle, finish

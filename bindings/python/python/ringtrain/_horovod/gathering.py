"""All-gathers of named tensors that carry a text with the data of each rank, for example the shape of an array."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from ringtrain import _core
from ringtrain._horovod.process_sets import Members

# The data of each rank begin at a multiple of this number of bytes, so that they can be viewed as elements of any type.
_ALIGNMENT = 16


def gather_parts(members: Members, name: str, description: str, data: NDArray[np.uint8]) -> _core.Handle:
    """Begins to gather a text and bytes of every rank. `split_parts` divides the result of the handle."""
    head = description.encode()
    lengths = struct.pack("<QQ", len(head), data.size)
    first, last = -(len(lengths) + len(head)) % _ALIGNMENT, -data.size % _ALIGNMENT
    start = np.frombuffer(lengths + head + bytes(first), np.uint8)
    return members.named.all_gather_bytes(name, np.concatenate([start, data, np.zeros(last, np.uint8)]))


def split_parts(gathered: bytearray) -> list[tuple[str, NDArray[np.uint8]]]:
    """Returns the text and the bytes of each rank."""
    parts, everything, start = [], np.frombuffer(gathered, np.uint8), 0
    while start < len(gathered):
        head, length = struct.unpack_from("<QQ", gathered, start)
        first = start + 16 + head + -(16 + head) % _ALIGNMENT
        parts.append((gathered[start + 16 : start + 16 + head].decode(), everything[first : first + length]))
        start = first + length + -length % _ALIGNMENT
    return parts


def row_counts(members: Members, described: list[tuple[str, NDArray[np.uint8]]]) -> list[int]:
    """Returns the number of rows of each rank. The text of each rank is `KIND|ROWS`. Raises `ringtrain.InvalidArgument` on all
    ranks if the kinds differ."""
    kinds = [text.rpartition("|")[::2] for text, _ in described]
    for rank, (kind, _) in zip(members.ranks, kinds, strict=True):
        if kind != kinds[0][0]:
            raise _core.InvalidArgument(
                f"allgather: rank {members.ranks[0]} has rows of {kinds[0][0]}, and rank {rank} has rows of {kind}"
            )
    return [int(count) for _, count in kinds]

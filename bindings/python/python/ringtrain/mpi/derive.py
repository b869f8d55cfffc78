"""Derives the layouts of datatypes from other layouts, and implements `Get_contents` and `decode`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from . import constants as c
from .errors import Exception
from .layout import Layout, joined, repeated

if TYPE_CHECKING:
    from .datatypes import Datatype


def contiguous(old: Layout, count: int) -> Layout:
    """Returns the layout of `count` elements, one after the other."""
    _require(count >= 0, c.ERR_ARG)
    if old.is_flat and count and isinstance(old.sizes, int):
        return Layout(old.offsets, old.lengths * count, 0, old.extent * count, old.sizes)
    return _placed(old, np.arange(count, dtype=np.int64) * old.extent)


def vector(old: Layout, count: int, blocklength: int, stride_bytes: int) -> Layout:
    """Returns the layout of `count` blocks. The starts of two consecutive blocks are `stride_bytes` bytes apart."""
    _require(count >= 0 and blocklength >= 0, c.ERR_ARG)
    return _placed(contiguous(old, blocklength), np.arange(count if blocklength else 0, dtype=np.int64) * stride_bytes)


def indexed(old: Layout, blocklengths: Sequence[int], displacements: Sequence[int]) -> Layout:
    """Returns the layout of blocks. Block i has `blocklengths[i]` elements and starts at byte `displacements[i]`."""
    _require(len(blocklengths) == len(displacements), c.ERR_ARG)
    _require(all(length >= 0 for length in blocklengths), c.ERR_ARG)
    if len(set(blocklengths)) == 1 and blocklengths[0]:
        return _placed(contiguous(old, blocklengths[0]), np.array(displacements, dtype=np.int64))
    places = [d + np.arange(n, dtype=np.int64) * old.extent for n, d in zip(blocklengths, displacements, strict=True)]
    return _placed(old, np.concatenate(places) if places else np.zeros(0, np.int64))


def struct(blocklengths: Sequence[int], displacements: Sequence[int], olds: Sequence[Layout]) -> Layout:
    """Returns the layout of blocks of different types. The extent is rounded up to the strictest alignment, as in C."""
    _require(len(blocklengths) == len(displacements) == len(olds), c.ERR_ARG)
    parts = [_placed(contiguous(old, n), np.array([d])) for n, d, old in zip(blocklengths, displacements, olds, strict=True) if n]
    parts = [part for part in parts if part.size or part.extent]
    lb = min((part.lb for part in parts), default=0)
    ub = max((part.lb + part.extent for part in parts), default=0)
    alignment = max((_alignment(old) for old in olds), default=1)
    return joined(parts, lb, -(-(ub - lb) // alignment) * alignment)


def subarray(old: Layout, sizes: Sequence[int], subsizes: Sequence[int], starts: Sequence[int], is_fortran: bool) -> Layout:
    """Returns the layout of a part of an array. The extent is that of the whole array."""
    _require(len(sizes) == len(subsizes) == len(starts) > 0, c.ERR_ARG)
    _require(
        all(0 <= start and start + part <= size for size, part, start in zip(sizes, subsizes, starts, strict=True)), c.ERR_ARG
    )
    dimensions = list(zip(sizes, subsizes, starts, strict=True))
    places = np.zeros(1, np.int64)
    step = old.extent
    for size, part, start in dimensions if is_fortran else reversed(dimensions):
        places = ((start + np.arange(part, dtype=np.int64))[:, None] * step + places[None, :]).ravel()
        step *= size
    placed = repeated(old, places, 0, math.prod(sizes) * old.extent)
    return placed


def envelope(datatype: Datatype) -> tuple[int, int, int, int, int]:
    """Returns the numbers of integers, addresses, counts and types from which a type was derived, and the combiner."""
    integers, addresses, counts, types = ([], [], [], []) if datatype.is_named else contents(datatype)
    return len(integers), len(addresses), len(counts), len(types), datatype.combiner


def contents(datatype: Datatype) -> tuple[list[int], list[int], list[int], list[Datatype]]:
    """Returns the integers, addresses, counts and types from which a type was derived, in the order of the MPI standard."""
    combiner, made = datatype._made
    if combiner == c.COMBINER_NAMED:
        raise Exception(c.ERR_TYPE, "a predefined datatype has no contents")
    if combiner == c.COMBINER_STRUCT:
        lengths, displacements, types = made
        return [len(lengths), *lengths], list(displacements), [], list(types)
    old, *rest = made
    if combiner in (c.COMBINER_DUP, c.COMBINER_CONTIGUOUS, c.COMBINER_VECTOR):
        return list(rest), [], [], [old]
    if combiner == c.COMBINER_HVECTOR:
        return rest[:2], [rest[2]], [], [old]
    if combiner == c.COMBINER_INDEXED:
        return [len(rest[0]), *rest[0], *rest[1]], [], [], [old]
    if combiner == c.COMBINER_HINDEXED:
        return [len(rest[0]), *rest[0]], list(rest[1]), [], [old]
    if combiner == c.COMBINER_INDEXED_BLOCK:
        return [len(rest[1]), rest[0], *rest[1]], [], [], [old]
    if combiner == c.COMBINER_HINDEXED_BLOCK:
        return [len(rest[1]), rest[0]], list(rest[1]), [], [old]
    if combiner == c.COMBINER_SUBARRAY:
        return [len(rest[0]), *rest[0], *rest[1], *rest[2], rest[3]], [], [], [old]
    return [], list(rest), [], [old]


# The name of each combiner, and the names of the constructor's arguments after the old type.
_COMBINERS = {
    c.COMBINER_DUP: ("DUP", ()),
    c.COMBINER_CONTIGUOUS: ("CONTIGUOUS", ("count",)),
    c.COMBINER_VECTOR: ("VECTOR", ("count", "blocklength", "stride")),
    c.COMBINER_HVECTOR: ("HVECTOR", ("count", "blocklength", "stride")),
    c.COMBINER_INDEXED: ("INDEXED", ("blocklengths", "displacements")),
    c.COMBINER_HINDEXED: ("HINDEXED", ("blocklengths", "displacements")),
    c.COMBINER_INDEXED_BLOCK: ("INDEXED_BLOCK", ("blocklength", "displacements")),
    c.COMBINER_HINDEXED_BLOCK: ("HINDEXED_BLOCK", ("blocklength", "displacements")),
    c.COMBINER_SUBARRAY: ("SUBARRAY", ("sizes", "subsizes", "starts", "order")),
    c.COMBINER_RESIZED: ("RESIZED", ("lb", "extent")),
}


def decode(datatype: Datatype) -> tuple[Datatype, str, dict]:
    """Returns the type from which a type was derived, the name of the combiner, and the other arguments by name."""
    combiner, made = datatype._made
    if combiner == c.COMBINER_NAMED:
        return datatype, "NAMED", {}
    if combiner == c.COMBINER_STRUCT:
        return type(datatype)(), "STRUCT", dict(zip(("blocklengths", "displacements", "datatypes"), made, strict=True))
    name, arguments = _COMBINERS[combiner]
    return made[0], name, dict(zip(arguments, made[1:], strict=True))


def constructor_and_arguments(datatype: Datatype) -> tuple[str, tuple]:
    """Returns the name of the constructor and the arguments of a derived type, for a pickle."""
    combiner, made = datatype._made
    return ("STRUCT" if combiner == c.COMBINER_STRUCT else _COMBINERS[combiner][0]).lower(), made


def rebuilt(way: str, made: tuple) -> Datatype:
    """Returns the type that the constructor `way` makes from the arguments `made`. Unpickling calls this function."""
    from .datatypes import Datatype

    if way == "struct":
        return Datatype.Create_struct(*made)
    return getattr(made[0], f"Create_{way}")(*made[1:])


def pack(datatype: Datatype, inbuf: object, outbuf: object, position: int) -> int:
    """Packs the elements of `inbuf` into `outbuf`, starting at byte `position`. Returns the position after the packed bytes."""
    from .buffers import Block, raw_memory

    source = raw_memory(inbuf, writable=False)
    target = raw_memory(outbuf, writable=True)
    block = Block(source, 0, len(source) // datatype._extent if datatype._extent else 0, datatype)
    end = position + block.nbytes
    if end > len(target):
        raise Exception(c.ERR_TRUNCATE, f"{block.nbytes} bytes do not fit into {len(target)} from {position} on")
    target[position:end] = memoryview(block.send_memory()).cast("B")
    return end


def unpack(datatype: Datatype, inbuf: object, position: int, outbuf: object) -> int:
    """Unpacks as many elements as `outbuf` holds from `inbuf`, starting at byte `position`. Returns the position after the
    unpacked bytes."""
    from .buffers import Block, raw_memory

    source = raw_memory(inbuf, writable=False)
    target = raw_memory(outbuf, writable=True)
    block = Block(target, 0, len(target) // datatype._extent if datatype._extent else 0, datatype)
    end = position + block.nbytes
    if end > len(source):
        raise Exception(c.ERR_TRUNCATE, f"{block.nbytes} bytes are not in {len(source)} from {position} on")
    block.store(source[position:end])
    return end


def _placed(old: Layout, displacements: np.ndarray) -> Layout:
    if len(displacements) == 0:
        return repeated(old, displacements, 0, 0)
    lb = int(displacements.min()) + old.lb
    ub = int(displacements.max()) + old.lb + old.extent
    return repeated(old, displacements, lb, ub - lb)


def _alignment(layout: Layout) -> int:
    if isinstance(layout.sizes, int):
        return layout.sizes if layout.sizes in (1, 2, 4, 8, 16) else 1
    return int(layout.sizes.max()) if len(layout.sizes) else 1


def _require(is_so: bool, code: int) -> None:
    if not is_so:
        raise Exception(code)

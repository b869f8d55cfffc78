"""The layout of a derived datatype: its blocks in memory, and how they are packed and unpacked."""

import math
from dataclasses import dataclass, field

import numpy as np

_UNITS = (8, 4, 2, 1)


@dataclass(slots=True)
class Layout:
    """Blocks of bytes, in the order in which they are sent. `offsets` has the distance of each block from the address of the
    element, and `lengths` has the length of each block (both in bytes, as int64).

    `sizes` has the sizes of the basic elements in the same order, or is one number if all basic elements have the same size."""

    offsets: np.ndarray
    lengths: np.ndarray
    lb: int
    extent: int
    sizes: np.ndarray | int
    _indices: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of bytes that are sent for one element."""
        return int(self.lengths.sum())

    @property
    def is_flat(self) -> bool:
        """Whether elements are sent without packing."""
        if self.size == 0:
            return self.extent == 0
        return len(self.offsets) == 1 and self.offsets[0] == 0 and self.lb == 0 and self.lengths[0] == self.extent

    @property
    def true_lb(self) -> int:
        """The offset of the first byte."""
        return int(self.offsets.min()) if len(self.offsets) else 0

    @property
    def true_ub(self) -> int:
        """The offset of the byte after the last byte."""
        return int((self.offsets + self.lengths).max()) if len(self.offsets) else 0

    def pack(self, memory: memoryview, offset: int, count: int) -> np.ndarray:
        """Returns the bytes of `count` elements. The first element begins at byte `offset` of `memory`."""
        units, index = self._where(memory, offset, count)
        return units[index].view(np.uint8)

    def unpack(self, data: bytes | memoryview | np.ndarray, memory: memoryview, offset: int, count: int) -> None:
        """Writes packed bytes to the elements in `memory`. `data` may be shorter than `count` packed elements."""
        nbytes = len(data)
        units, index = self._where(memory, offset, count)
        width = units.itemsize
        whole = nbytes // width
        units[index[:whole]] = np.frombuffer(data, dtype=units.dtype, count=whole)
        if nbytes % width:
            raw = np.frombuffer(memory, dtype=np.uint8)[offset + int(index[whole]) * width :]
            raw[: nbytes % width] = np.frombuffer(data, dtype=np.uint8)[whole * width :]

    def _where(self, memory: memoryview, offset: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the memory as an array of the widest units into which all blocks can be divided, and the index of each unit."""
        step = math.gcd(int(np.gcd.reduce(self.offsets, initial=0)), int(np.gcd.reduce(self.lengths, initial=0)), self.extent)
        width = next(unit for unit in _UNITS if step % unit == 0)
        index = self._indices.get(width)
        if index is None:
            index = self._indices[width] = _unit_indices(self.offsets // width, self.lengths // width)
        if count != 1:
            index = (np.arange(count, dtype=np.int64)[:, None] * (self.extent // width) + index[None, :]).ravel()
        available = (len(memory) - offset) // width
        if len(index) and (index.min() < 0 or index.max() >= available):
            raise ValueError(f"message: {count} elements of the datatype reach beyond the buffer, which has {len(memory)} bytes")
        units = np.frombuffer(memory, dtype=f"u{width}", count=max(available, 0), offset=min(offset, len(memory)))
        return units, index


def repeated(old: Layout, displacements: np.ndarray, lb: int, extent: int) -> Layout:
    """Returns the layout of copies of `old`, one at each displacement in bytes."""
    offsets = (displacements[:, None] + old.offsets[None, :]).ravel()
    lengths = np.tile(old.lengths, len(displacements))
    sizes = old.sizes if isinstance(old.sizes, int) else np.tile(old.sizes, len(displacements))
    return Layout(*_merged(offsets, lengths), lb, extent, sizes)


def joined(parts: list[Layout], lb: int, extent: int) -> Layout:
    """Returns the layout of all `parts`."""
    if not parts:
        return Layout(np.zeros(0, np.int64), np.zeros(0, np.int64), lb, extent, 1)
    offsets = np.concatenate([part.offsets for part in parts])
    lengths = np.concatenate([part.lengths for part in parts])
    first = parts[0].sizes
    if isinstance(first, int) and all(isinstance(part.sizes, int) and part.sizes == first for part in parts):
        sizes: np.ndarray | int = first
    else:
        sizes = np.concatenate([_sizes(part) for part in parts])
    return Layout(*_merged(offsets, lengths), lb, extent, sizes)


def basic(size: int, extent: int) -> Layout:
    """Returns the layout of a basic type."""
    return Layout(np.zeros(1, np.int64), np.full(1, size, np.int64), 0, extent, size)


def _sizes(part: Layout) -> np.ndarray:
    if isinstance(part.sizes, int):
        return np.full(part.size // part.sizes if part.sizes else 0, part.sizes, np.int64)
    return part.sizes


def _merged(offsets: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merges blocks that follow each other in memory."""
    some = lengths > 0
    offsets, lengths = offsets[some], lengths[some]
    if len(offsets) < 2:
        return offsets, lengths
    begins = np.concatenate(([True], offsets[1:] != offsets[:-1] + lengths[:-1]))
    first = np.flatnonzero(begins)
    return offsets[first], np.add.reduceat(lengths, first)


def _unit_indices(offsets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the index of each unit of all blocks."""
    total = int(lengths.sum())
    if total == 0:
        return np.zeros(0, np.int64)
    before = np.cumsum(lengths) - lengths
    return np.repeat(offsets - before, lengths) + np.arange(total, dtype=np.int64)

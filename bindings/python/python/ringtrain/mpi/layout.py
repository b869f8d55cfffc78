"""Where the bytes of a derived datatype lie: blocks in memory, and how they become one run of bytes and back."""

import math
from dataclasses import dataclass, field

import numpy as np

_UNITS = (8, 4, 2, 1)


@dataclass(slots=True)
class Layout:
    """Blocks of bytes in the order in which they are sent: `offsets` from the element's address, and `lengths`, both int64.

    `sizes` are those of the basic elements in the same order, or one number where they are all alike.
    """

    offsets: np.ndarray
    lengths: np.ndarray
    lb: int
    extent: int
    sizes: np.ndarray | int
    _indices: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes that one element takes when it is sent."""
        return int(self.lengths.sum())

    @property
    def is_flat(self) -> bool:
        """Whether elements are sent just as they lie."""
        if self.size == 0:
            return self.extent == 0
        return len(self.offsets) == 1 and self.offsets[0] == 0 and self.lb == 0 and self.lengths[0] == self.extent

    @property
    def true_lb(self) -> int:
        """Where the first byte lies."""
        return int(self.offsets.min()) if len(self.offsets) else 0

    @property
    def true_ub(self) -> int:
        """Where the byte after the last one lies."""
        return int((self.offsets + self.lengths).max()) if len(self.offsets) else 0

    def pack(self, memory: memoryview, offset: int, count: int) -> np.ndarray:
        """The bytes of `count` elements, the first of which begins at `offset`."""
        units, index = self._where(memory, offset, count)
        return units[index].view(np.uint8)

    def unpack(self, data: bytes | memoryview | np.ndarray, memory: memoryview, offset: int, count: int) -> None:
        """Puts bytes where they belong; there may be fewer than `count` elements take."""
        nbytes = len(data)
        units, index = self._where(memory, offset, count)
        width = units.itemsize
        whole = nbytes // width
        units[index[:whole]] = np.frombuffer(data, dtype=units.dtype, count=whole)
        if nbytes % width:
            raw = np.frombuffer(memory, dtype=np.uint8)[offset + int(index[whole]) * width :]
            raw[: nbytes % width] = np.frombuffer(data, dtype=np.uint8)[whole * width :]

    def _where(self, memory: memoryview, offset: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The memory in the widest units that all blocks consist of, and the index of each unit."""
        step = math.gcd(int(np.gcd.reduce(self.offsets, initial=0)), int(np.gcd.reduce(self.lengths, initial=0)), self.extent)
        width = next(unit for unit in _UNITS if step % unit == 0)
        index = self._indices.get(width)
        if index is None:
            index = self._indices[width] = _spread(self.offsets // width, self.lengths // width)
        if count != 1:
            index = (np.arange(count, dtype=np.int64)[:, None] * (self.extent // width) + index[None, :]).ravel()
        available = (len(memory) - offset) // width
        if len(index) and (index.min() < 0 or index.max() >= available):
            raise ValueError(f"message: {count} elements of the datatype reach beyond the buffer, which has {len(memory)} bytes")
        units = np.frombuffer(memory, dtype=f"u{width}", count=max(available, 0), offset=min(offset, len(memory)))
        return units, index


def repeated(old: Layout, displacements: np.ndarray, lb: int, extent: int) -> Layout:
    """One copy of `old` at each of the displacements, in bytes."""
    offsets = (displacements[:, None] + old.offsets[None, :]).ravel()
    lengths = np.tile(old.lengths, len(displacements))
    sizes = old.sizes if isinstance(old.sizes, int) else np.tile(old.sizes, len(displacements))
    return Layout(*_merged(offsets, lengths), lb, extent, sizes)


def joined(parts: list[Layout], lb: int, extent: int) -> Layout:
    """One layout after the other."""
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
    """The layout of a basic type."""
    return Layout(np.zeros(1, np.int64), np.full(1, size, np.int64), 0, extent, size)


def _sizes(part: Layout) -> np.ndarray:
    if isinstance(part.sizes, int):
        return np.full(part.size // part.sizes if part.sizes else 0, part.sizes, np.int64)
    return part.sizes


def _merged(offsets: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blocks that follow each other in memory become one."""
    some = lengths > 0
    offsets, lengths = offsets[some], lengths[some]
    if len(offsets) < 2:
        return offsets, lengths
    begins = np.concatenate(([True], offsets[1:] != offsets[:-1] + lengths[:-1]))
    first = np.flatnonzero(begins)
    return offsets[first], np.add.reduceat(lengths, first)


def _spread(offsets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The index of each unit of all blocks."""
    total = int(lengths.sum())
    if total == 0:
        return np.zeros(0, np.int64)
    before = np.cumsum(lengths) - lengths
    return np.repeat(offsets - before, lengths) + np.arange(total, dtype=np.int64)

"""Parses buffer arguments: arrays, bytes, and lists such as `[data, count, datatype]`. Converts them to blocks of memory."""

import contextlib
import ctypes
from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from . import constants as c
from . import dlpack
from .datatypes import DATATYPES_BY_DTYPE_ID, Datatype, as_datatype, lookup
from .errors import Exception, unsupported

_NOTHING = memoryview(bytearray(0))


class _Constant:
    """A constant that a program can pass in the place of a buffer."""

    __slots__ = ("_name",)

    def __new__(cls) -> "_Constant":
        return _CONSTANTS.setdefault(cls, super().__new__(cls))

    def __repr__(self) -> str:
        return self._name

    def __reduce__(self) -> str:
        return self._name

    def __bool__(self) -> bool:
        return self._name != "BOTTOM"

    def __int__(self) -> int:
        return 0


_CONSTANTS: dict[type, _Constant] = {}


class BottomType(_Constant):
    """The type of `BOTTOM`."""

    __slots__ = ()
    __index__ = _Constant.__int__


class InPlaceType(_Constant):
    """The type of `IN_PLACE`."""

    __slots__ = ()


class BufferAutomaticType(_Constant):
    """The type of `BUFFER_AUTOMATIC`."""

    __slots__ = ()


BOTTOM, IN_PLACE, BUFFER_AUTOMATIC = BottomType(), InPlaceType(), BufferAutomaticType()
BOTTOM._name, IN_PLACE._name, BUFFER_AUTOMATIC._name = "BOTTOM", "IN_PLACE", "BUFFER_AUTOMATIC"


class Block:
    """`count` elements of `datatype`. The first element begins at byte `offset` of `memory`."""

    __slots__ = ("memory", "offset", "count", "datatype")

    def __init__(self, memory: memoryview, offset: int, count: int, datatype: Datatype) -> None:
        self.memory = memory
        self.offset = offset
        self.count = count
        self.datatype = datatype

    @property
    def nbytes(self) -> int:
        """The number of bytes that are sent for the elements."""
        return self.count * self.datatype._wire

    @property
    def is_flat(self) -> bool:
        """Whether the elements are sent without packing."""
        return self.datatype._flat

    def flat(self) -> memoryview:
        """Returns the memory of elements that are sent without packing."""
        end = self.offset + self.count * self.datatype._wire
        if end > len(self.memory):
            raise ValueError(
                f"message: {self.count} elements of {self.datatype._extent} bytes reach beyond "
                f"the buffer of {len(self.memory)} bytes"
            )
        return self.memory[self.offset : end]

    def send_memory(self) -> memoryview:
        """Returns the bytes to send: the memory of the elements, or packed bytes."""
        if self.datatype._flat:
            return self.flat()
        return memoryview(self.datatype._valid().pack(self.memory, self.offset, self.count))

    def receive_memory(self) -> memoryview:
        """Returns the memory to receive into: the memory of the elements, or temporary memory. In both cases, call
        `store_received` after the receive."""
        return self.flat() if self.datatype._flat else memoryview(bytearray(self.nbytes))

    def store_received(self, received: memoryview) -> None:
        """Unpacks the bytes that were received into the memory from `receive_memory`. Does nothing if this is the memory of the
        elements."""
        if not self.datatype._flat:
            self.datatype._valid().unpack(received, self.memory, self.offset, self.count)

    def store(self, data: bytes | memoryview) -> None:
        """Writes bytes to the elements. There may be fewer bytes than the elements need."""
        if self.datatype._flat:
            self.memory[self.offset : self.offset + len(data)] = data
        else:
            self.datatype._valid().unpack(data, self.memory, self.offset, self.count)

    def array(self) -> np.ndarray:
        """Returns the elements as a numpy array. Raises `Exception` if they have a derived type."""
        dtype = self.datatype.dtype
        if dtype is None:
            raise Exception(
                c.ERR_OP, "elements of derived datatypes can be reduced only with operations that the program created"
            )
        return np.frombuffer(self.flat(), dtype=dtype)

    def part(self, which: int, count: int) -> "Block":
        """Returns block number `which` of consecutive blocks of `count` elements."""
        return Block(self.memory, self.offset + which * count * self.datatype._extent, count, self.datatype)


class Blocks:
    """One block for each rank, with separate counts, displacements (in bytes) and datatypes."""

    __slots__ = ("memory", "counts", "displacements", "datatypes")

    def __init__(self, memory: memoryview, counts: list[int], displacements: list[int], datatypes: list[Datatype]) -> None:
        self.memory = memory
        self.counts = counts
        self.displacements = displacements
        self.datatypes = datatypes

    def __getitem__(self, rank: int) -> Block:
        return Block(self.memory, self.displacements[rank], self.counts[rank], self.datatypes[rank])

    def blocks(self) -> list[Block]:
        """Returns the blocks of all ranks."""
        return [self[rank] for rank in range(len(self.counts))]

    def sizes(self) -> list[int]:
        """Returns the number of bytes that are sent for each block."""
        return [count * datatype._wire for count, datatype in zip(self.counts, self.datatypes, strict=True)]

    def _dense(self) -> memoryview | None:
        """Returns the memory of all blocks if the blocks follow each other without gaps and are sent without packing. Otherwise
        returns None."""
        begin = end = None
        for size, at, datatype in zip(self.sizes(), self.displacements, self.datatypes, strict=True):
            if size == 0:
                continue
            if not datatype._flat or (end is not None and at != end):
                return None
            begin = at if begin is None else begin
            end = at + size
        if begin is None:
            return _NOTHING
        if end > len(self.memory):
            raise ValueError(f"message: the blocks reach to {end} bytes, the buffer has {len(self.memory)}")
        return self.memory[begin:end]

    def send_memory(self) -> memoryview:
        """Returns the bytes to send, one block after the other."""
        dense = self._dense()
        return memoryview(b"".join(block.send_memory() for block in self.blocks())) if dense is None else dense

    def receive_memory(self) -> memoryview:
        """Returns the memory to receive into, one block after the other: the memory of the blocks, or temporary memory. In both
        cases, call `store_received` after the receive."""
        dense = self._dense()
        return memoryview(bytearray(sum(self.sizes()))) if dense is None else dense

    def store_received(self, received: memoryview) -> None:
        """Unpacks the bytes that were received into the memory from `receive_memory`. Does nothing if this is the memory of the
        blocks."""
        if self._dense() is None:
            at = 0
            for block in self.blocks():
                block.store(received[at : at + block.nbytes])
                at += block.nbytes


def raw_memory(given: object, writable: bool) -> memoryview:
    """Returns the bytes of a buffer."""
    return _memory(given, writable)[0]


def _memory(given: object, writable: bool) -> tuple[memoryview, str | None]:
    """Returns the bytes of a buffer, and the code of the element type, or `None` if numpy has no such type."""
    if isinstance(given, np.ndarray):
        return _array_memory(given, writable)
    try:
        view = memoryview(given)  # type: ignore[arg-type]
    except TypeError:
        return _foreign_memory(given, writable)
    if writable and view.readonly:
        raise BufferError("Object is not writable.")
    if view.nbytes == 0:
        return _NOTHING, view.format
    if not view.c_contiguous:
        raise BufferError("message: the buffer is not contiguous")
    return view.cast("B"), view.format


def _array_memory(array: np.ndarray, writable: bool) -> tuple[memoryview, str]:
    flags = array.flags
    if not flags.c_contiguous:
        if not flags.f_contiguous:
            raise BufferError("message: the array is not contiguous")
        array = array.T
    if writable and not flags.writeable:
        raise BufferError("Object is not writable.")
    dtype = array.dtype
    kind = dtype.kind
    code = (
        dtype.str
        if not dtype.isnative
        else dtype.char
        if kind not in "SUV" or dtype.itemsize == (4 if kind == "U" else 1)
        else dtype.str[1:]
    )
    if array.size == 0:
        return _NOTHING, code
    if dtype.hasobject:
        raise KeyError("cannot map 'O' to MPI datatype")
    if kind in "mM" or dtype.isbuiltin != 1 or not dtype.isnative:
        array = array.view(np.uint8) if array.ndim else array.reshape(1).view(np.uint8)
    return memoryview(array).cast("B"), code


def _foreign_memory(given: object, writable: bool) -> tuple[memoryview, str | None]:
    """Returns the bytes of a tensor, for example of torch, and the code of the element type, or `None` if MPI has no such
    datatype."""
    if hasattr(given, "__dlpack__"):
        return dlpack.memory_of(given, writable)
    if hasattr(given, "__cuda_array_interface__"):
        raise unsupported(
            "an object that has only __cuda_array_interface__, which may be in GPU memory",
            "pass an array in host memory, for example a numpy array",
        )
    raise TypeError("message: expecting buffer or list/tuple")


def _is_buffer(given: object) -> bool:
    if isinstance(given, np.ndarray | bytes | bytearray | memoryview):
        return True
    if isinstance(given, list | tuple):
        return False
    try:
        memoryview(given)  # type: ignore[arg-type]
    except TypeError:
        if hasattr(given, "__dlpack__") or hasattr(given, "__cuda_array_interface__"):
            return True
        raise TypeError("message: expecting buffer or list/tuple") from None
    return True


def _basic(data: object, kind: object, writable: bool) -> tuple[memoryview, Datatype]:
    """Returns the memory of a buffer, and the datatype of its elements."""
    if data is None or data is BOTTOM:
        return _NOTHING, as_datatype(kind)  # type: ignore[arg-type]
    memory, code = _memory(data, writable)
    if kind is not None:
        return memory, as_datatype(kind)  # type: ignore[arg-type]
    if code is None:
        raise unsupported(
            "a tensor of elements without an MPI datatype, such as bfloat16", "pass [tensor, MPI.BYTE], or convert it"
        )
    return memory, lookup(code)


def _elements(length: int, datatype: Datatype) -> int:
    """Returns the number of elements in `length` bytes."""
    if length == 0:
        return 0
    if datatype._layout is None:
        raise ValueError("message: cannot infer count, datatype is null")
    extent, lb = datatype._extent, datatype._lb
    if extent <= 0:
        raise ValueError(f"message: cannot infer count, datatype extent {extent} (lb:{lb}, ub:{lb + extent})")
    if length % extent:
        raise ValueError(
            f"message: cannot infer count, buffer length {length} is not a multiple of "
            f"datatype extent {extent} (lb:{lb}, ub:{lb + extent})"
        )
    return length // extent


def parse_block(message: object, writable: bool, blocks: int = 1) -> Block:
    """Returns the block that a buffer argument describes. If the argument holds `blocks` blocks of the same length, returns the
    first of these blocks."""
    if type(message) is np.ndarray and id(message.dtype) in DATATYPES_BY_DTYPE_ID:
        # A fast path for contiguous arrays. The general code below handles all other buffers.
        with contextlib.suppress(TypeError, ValueError):
            memory = memoryview(message).cast("B")
            if not (writable and memory.readonly or message.size % max(blocks, 1)):
                return Block(memory, 0, message.size // max(blocks, 1), DATATYPES_BY_DTYPE_ID[id(message.dtype)])
    count = displacement = kind = None
    if _is_buffer(message):
        data = message
    else:
        parts: Sequence = message  # type: ignore[assignment]
        if len(parts) == 2:
            data, count = parts
            if isinstance(count, Datatype | str):
                count, kind = None, count
        elif len(parts) == 3:
            data, count, kind = parts
        elif len(parts) == 4:
            data, count, displacement, kind = parts
        else:
            raise ValueError("message: expecting 2 to 4 items")
        if isinstance(count, list | tuple):
            count, displacement = count
    memory, datatype = _basic(data, kind, writable)
    offset = 0 if displacement is None else _offset(index(displacement), len(memory), datatype)
    if count is not None:
        count = index(count)
        if count < 0:
            raise ValueError(f"message: negative count {count}")
        if count > 0 and data is None:
            raise ValueError(f"message: buffer is None but count is {count}")
        if count > 0 and data is BOTTOM:
            raise unsupported("MPI.BOTTOM with absolute addresses", "pass the buffer itself")
        if count > 0:
            datatype._valid()
    else:
        found = _elements(len(memory) - offset, datatype)
        if blocks > 1 and found % blocks:
            raise ValueError(
                f"message: cannot infer count, number of entries {found} is not a multiple of required number of blocks {blocks}"
            )
        count = found // max(blocks, 1)
    return Block(memory, offset, count, datatype)


def _offset(displacement: int, length: int, datatype: Datatype) -> int:
    if displacement < 0:
        raise ValueError(f"message: negative displacement {displacement}")
    if displacement == 0:
        return 0
    if datatype._layout is None:
        raise ValueError("message: cannot handle displacement, datatype is null")
    if datatype._extent <= 0:
        raise ValueError(f"message: cannot handle displacement, datatype extent {datatype._extent}")
    if displacement * datatype._extent > length:
        raise ValueError(
            f"message: displacement {displacement} out of bounds, number of datatype entries {length // datatype._extent}"
        )
    return displacement * datatype._extent


def parse_blocks(message: object, writable: bool, blocks: int) -> Blocks:
    """Returns the block of each of `blocks` ranks in a buffer argument. The blocks may have different lengths and positions."""
    counts = displacements = kind = None
    if _is_buffer(message):
        data = message
    else:
        parts: Sequence = message  # type: ignore[assignment]
        if len(parts) == 2:
            data, counts = parts
            if isinstance(counts, Datatype | str):
                counts, kind = None, counts
        elif len(parts) == 3:
            data, counts, kind = parts
        elif len(parts) == 4:
            data, counts, displacements, kind = parts
        else:
            raise ValueError("message: expecting 2 to 4 items")
        if isinstance(counts, tuple) and displacements is None:
            counts, displacements = counts
    memory, datatype = _basic(data, kind, writable)
    if counts is None:
        found = _elements(len(memory), datatype)
        counts = [found // blocks + (found % blocks > i) for i in range(blocks)]
    counts = _numbers(counts, blocks)
    if displacements is None:
        displacements = [0] * blocks
        for i in range(1, blocks):
            displacements[i] = displacements[i - 1] + counts[i - 1]
    else:
        with contextlib.suppress(TypeError):
            displacements = [index(displacements) * i for i in range(blocks)]
    extent = datatype._extent
    return Blocks(memory, counts, [d * extent for d in _numbers(displacements, blocks)], [datatype] * blocks)


def parse_blocks_w(message: object, writable: bool, blocks: int) -> Blocks:
    """Does the same as `parse_blocks`, with a separate datatype for each block, and with displacements in bytes."""
    parts: Sequence = message  # type: ignore[assignment]
    counts = displacements = None
    if len(parts) == 2:
        data, kinds = parts
    elif len(parts) == 3:
        data, (counts, displacements), kinds = parts
    elif len(parts) == 4:
        data, counts, displacements, kinds = parts
    else:
        raise ValueError("message: expecting 2 to 4 items")
    if data is None or data is BOTTOM:
        if counts is None:
            raise ValueError("message: BOTTOM requires counts")
        if displacements is None:
            raise ValueError("message: BOTTOM requires displs")
        memory = _NOTHING
    else:
        memory = raw_memory(data, writable)
    if counts is None and displacements is None:
        counts, displacements = [1] * blocks, [0] * blocks
    kinds = [as_datatype(kind) for kind in kinds]
    if len(kinds) != blocks:
        raise ValueError(f"expecting {blocks} items, got {len(kinds)}")
    return Blocks(memory, _numbers(counts, blocks), _numbers(displacements, blocks), kinds)


def _numbers(given: object, length: int) -> list[int]:
    """Returns a list of `length` integers: the items of the sequence `given`, or the integer `given` repeated."""
    with contextlib.suppress(TypeError):
        return [index(given)] * length  # type: ignore[arg-type]
    numbers = [index(number) for number in given]  # type: ignore[attr-defined]
    if len(numbers) != length:
        raise ValueError(f"expecting {length} items, got {len(numbers)}")
    return numbers


class buffer(np.ndarray):  # noqa: N801  (MPI's name)
    """Bytes in memory: an array of `uint8` with the methods of mpi4py's class `buffer`. `MPI.memory` is the same class."""

    def __new__(cls, given: object = b"", /) -> "buffer":
        return cls.frombuffer(given)

    @staticmethod
    def allocate(nbytes: int, clear: bool = False) -> "buffer":
        """Returns new memory. If `clear` is true, all bytes are 0."""
        return (np.zeros if clear else np.empty)(nbytes, np.uint8).view(buffer)

    @staticmethod
    def frombuffer(obj: object, readonly: bool = False) -> "buffer":
        """Returns the bytes of a buffer without a copy."""
        view = np.frombuffer(raw_memory(obj, False), np.uint8).view(buffer)
        return view.toreadonly() if readonly else view

    @staticmethod
    def fromaddress(address: int, nbytes: int, readonly: bool = False) -> "buffer":
        """Returns `nbytes` bytes at an address. Does not check that the address is valid."""
        view = (
            np.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), np.uint8).view(buffer)
            if nbytes
            else buffer.allocate(0)
        )
        return view.toreadonly() if readonly else view

    def __setitem__(self, where: Any, value: Any) -> None:
        # Assign the bytes of a buffer to a slice, regardless of the type of the buffer's elements.
        if isinstance(where, slice) and not isinstance(value, int | np.integer):
            value = np.frombuffer(raw_memory(value, False), np.uint8)
        super().__setitem__(where, value)

    def toreadonly(self) -> "buffer":
        """Returns a read-only view of the same bytes."""
        view = self.view()
        view.flags.writeable = False
        return view

    def cast(self, format: str, shape: Sequence[int] | None = None) -> memoryview:  # noqa: A002
        """Returns a memoryview with another format."""
        view = memoryview(self).cast("B")
        return view.cast(format, shape) if shape is not None else view.cast(format)  # type: ignore[call-overload]

    def release(self) -> None:
        """Does nothing. Python frees the memory when no object refers to it."""

    address = property(lambda self: self.ctypes.data)
    obj = property(lambda self: self.base)
    readonly = property(lambda self: not self.flags.writeable)
    format = property(lambda self: "B")


def addressof(location: object) -> int:
    """Returns the address of a buffer's first byte, or 0 for `BOTTOM`."""
    if location is None or location is BOTTOM:
        return 0
    return np.frombuffer(raw_memory(location, False), np.uint8).ctypes.data

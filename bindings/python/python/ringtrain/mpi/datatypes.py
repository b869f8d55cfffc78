"""`MPI.Datatype`: the predefined types with the equivalent numpy types, and derived types."""

from collections.abc import Sequence

import numpy as np

from . import constants as c
from . import derive
from .errors import Exception, unsupported
from .layout import Layout, basic


class Datatype:
    """The type of the elements of a buffer. `dtype` is the equivalent numpy type, or None if there is none."""

    __slots__ = ("dtype", "_name", "_wire", "_lb", "_extent", "_flat", "_layout", "_code", "_made", "_predefined")

    def __new__(cls, datatype: "Datatype | None" = None) -> "Datatype":
        self = super().__new__(cls)
        if datatype is None:
            self._set("MPI_DATATYPE_NULL", None, None, None, c.COMBINER_NAMED)
        else:
            for slot in Datatype.__slots__:
                setattr(self, slot, getattr(datatype, slot))
        return self

    def _set(
        self, name: str, dtype: np.dtype | None, layout: Layout | None, code: str | None, combiner: int, made: tuple = ()
    ) -> None:
        self.dtype = dtype
        self._name = name
        self._layout = layout
        self._code = code
        self._made = (combiner, made)
        self._predefined = False
        if layout is None:
            self._wire, self._lb, self._extent, self._flat = 0, 0, 0, True
        else:
            self._wire, self._lb, self._extent, self._flat = layout.size, layout.lb, layout.extent, layout.is_flat

    @classmethod
    def _derived(cls, layout: Layout, combiner: int, made: tuple) -> "Datatype":
        self = Datatype.__new__(cls)
        self._set("", None, layout, None, combiner, made)
        return self

    def _valid(self) -> Layout:
        if self._layout is None:
            raise Exception(c.ERR_TYPE)
        return self._layout

    def _basic_elements(self, nbytes: int) -> int:
        layout = self._valid()
        if isinstance(layout.sizes, int):
            return nbytes // layout.sizes if layout.sizes and nbytes % layout.sizes == 0 else (0 if nbytes == 0 else c.UNDEFINED)
        if layout.size == 0:
            return 0 if nbytes == 0 else c.UNDEFINED
        ends = np.cumsum(layout.sizes)
        rest = nbytes % layout.size
        within = int(np.searchsorted(ends, rest, side="right"))
        if rest and (within == 0 or ends[within - 1] != rest):
            return c.UNDEFINED
        return nbytes // layout.size * len(layout.sizes) + (within if rest else 0)

    def __eq__(self, other: object) -> bool:
        return self._layout is other._layout if isinstance(other, Datatype) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return self._layout is not None

    def __reduce__(self) -> str | tuple:
        for name, datatype in PREDEFINED.items():
            if datatype is self:
                return name
        if self._predefined or self._layout is None:
            return (_by_name, (self._name,))
        kind, params = derive.constructor_and_arguments(self)
        return (derive.rebuilt, (kind, params))

    def __repr__(self) -> str:
        return f"<ringtrain.mpi.MPI.Datatype {self._name or 'derived'}>"

    def Get_size(self) -> int:
        """Returns the number of bytes of data in an element, without padding."""
        self._valid()
        # The padding in predefined pairs is sent, but does not count in their size.
        return (
            sum(self.dtype[i].itemsize for i in range(len(self.dtype)))
            if self.dtype is not None and self.dtype.names
            else self._wire
        )

    def Get_extent(self) -> tuple[int, int]:
        """Returns the lower bound and the extent in bytes."""
        self._valid()
        return self._lb, self._extent

    def Get_true_extent(self) -> tuple[int, int]:
        """Returns the offset of the first byte of data, and the number of bytes from there to the end of the data."""
        layout = self._valid()
        return layout.true_lb, layout.true_ub - layout.true_lb

    def Dup(self) -> "Datatype":
        """Returns a copy."""
        layout = self._valid()
        copy = type(self)._derived(layout, c.COMBINER_DUP, (self,))
        copy._layout = Layout(layout.offsets, layout.lengths, layout.lb, layout.extent, layout.sizes)
        copy.dtype, copy._code = self.dtype, self._code
        return copy

    Create_dup = Dup

    def Commit(self) -> "Datatype":
        """Does nothing, and returns this type."""
        self._valid()
        return self

    def Free(self) -> None:
        """Makes this the null type."""
        if self._predefined:
            raise Exception(c.ERR_TYPE, "predefined datatypes cannot be freed")
        self._valid()
        self._set("MPI_DATATYPE_NULL", None, None, None, c.COMBINER_NAMED)

    def free(self) -> None:
        """Calls `Free` if this is a derived type."""
        if self._layout is not None and not self._predefined:
            self.Free()

    def Create_contiguous(self, count: int) -> "Datatype":
        """Returns the type of `count` elements, one after the other."""
        return self._derived(derive.contiguous(self._valid(), count), c.COMBINER_CONTIGUOUS, (self, count))

    def Create_vector(self, count: int, blocklength: int, stride: int) -> "Datatype":
        """Returns the type of `count` blocks of `blocklength` elements. The starts of two consecutive blocks are `stride`
        elements apart."""
        layout = derive.vector(self._valid(), count, blocklength, stride * self._extent)
        return self._derived(layout, c.COMBINER_VECTOR, (self, count, blocklength, stride))

    def Create_hvector(self, count: int, blocklength: int, stride: int) -> "Datatype":
        """Does the same as `Create_vector`, with `stride` in bytes."""
        layout = derive.vector(self._valid(), count, blocklength, stride)
        return self._derived(layout, c.COMBINER_HVECTOR, (self, count, blocklength, stride))

    def Create_indexed(self, blocklengths: Sequence[int], displacements: Sequence[int]) -> "Datatype":
        """Returns the type of blocks. Block i has `blocklengths[i]` elements and starts at element `displacements[i]`."""
        layout = derive.indexed(self._valid(), blocklengths, [d * self._extent for d in displacements])
        return self._derived(layout, c.COMBINER_INDEXED, (self, list(blocklengths), list(displacements)))

    def Create_hindexed(self, blocklengths: Sequence[int], displacements: Sequence[int]) -> "Datatype":
        """Does the same as `Create_indexed`, with displacements in bytes."""
        layout = derive.indexed(self._valid(), blocklengths, displacements)
        return self._derived(layout, c.COMBINER_HINDEXED, (self, list(blocklengths), list(displacements)))

    def Create_indexed_block(self, blocklength: int, displacements: Sequence[int]) -> "Datatype":
        """Returns the type of blocks of `blocklength` elements. Block i starts at element `displacements[i]`."""
        layout = derive.indexed(self._valid(), [blocklength] * len(displacements), [d * self._extent for d in displacements])
        return self._derived(layout, c.COMBINER_INDEXED_BLOCK, (self, blocklength, list(displacements)))

    def Create_hindexed_block(self, blocklength: int, displacements: Sequence[int]) -> "Datatype":
        """Does the same as `Create_indexed_block`, with displacements in bytes."""
        layout = derive.indexed(self._valid(), [blocklength] * len(displacements), displacements)
        return self._derived(layout, c.COMBINER_HINDEXED_BLOCK, (self, blocklength, list(displacements)))

    @classmethod
    def Create_struct(
        cls, blocklengths: Sequence[int], displacements: Sequence[int], datatypes: Sequence["Datatype"]
    ) -> "Datatype":
        """Returns the type of blocks of different types. The displacements are in bytes."""
        layout = derive.struct(blocklengths, displacements, [datatype._valid() for datatype in datatypes])
        return cls._derived(layout, c.COMBINER_STRUCT, (list(blocklengths), list(displacements), list(datatypes)))

    def Create_subarray(
        self, sizes: Sequence[int], subsizes: Sequence[int], starts: Sequence[int], order: int = c.ORDER_C
    ) -> "Datatype":
        """Returns the type of a part of an array of the shape `sizes`. In each dimension, the part has `subsizes` elements,
        beginning with element `starts`."""
        layout = derive.subarray(self._valid(), sizes, subsizes, starts, order == c.ORDER_FORTRAN)
        return self._derived(layout, c.COMBINER_SUBARRAY, (self, list(sizes), list(subsizes), list(starts), order))

    def Create_resized(self, lb: int, extent: int) -> "Datatype":
        """Returns the same type with another lower bound and another extent, in bytes."""
        old = self._valid()
        layout = Layout(old.offsets, old.lengths, lb, extent, old.sizes)
        return self._derived(layout, c.COMBINER_RESIZED, (self, lb, extent))

    Resized = Create_resized

    def Create_darray(self, *_args: object, **_options: object) -> "Datatype":
        """Not supported."""
        raise unsupported("MPI.Datatype.Create_darray", "Create_subarray describes each rank's part")

    @classmethod
    def Create_f90_integer(cls, r: int) -> "Datatype":
        """Returns the integer type for `r` decimal digits."""
        return next(t for digits, t in ((2, INT8_T), (4, INT16_T), (9, INT32_T), (18, INT64_T)) if r <= digits)

    @classmethod
    def Create_f90_real(cls, p: int, r: int) -> "Datatype":
        """Returns the real type for `p` decimal digits and decimal exponents up to `r`."""
        return FLOAT if p <= 6 and r <= 37 else DOUBLE

    @classmethod
    def Create_f90_complex(cls, p: int, r: int) -> "Datatype":
        """Returns the complex type for `p` decimal digits and decimal exponents up to `r`."""
        return C_FLOAT_COMPLEX if p <= 6 and r <= 37 else C_DOUBLE_COMPLEX

    @classmethod
    def Match_size(cls, typeclass: int, size: int) -> "Datatype":
        """Returns the type of the class `typeclass` that has `size` bytes."""
        letter = {c.TYPECLASS_INTEGER: "i", c.TYPECLASS_REAL: "f", c.TYPECLASS_COMPLEX: "c"}.get(typeclass, "")
        try:
            return typedict[f"{letter}{size}"]
        except KeyError:
            raise Exception(c.ERR_ARG, f"no type of class {typeclass} has {size} bytes") from None

    @classmethod
    def Get_value_index(cls, value: "Datatype", index: "Datatype") -> "Datatype":
        """Returns the predefined type of a pair of a value and an index, or the null type if there is none."""
        for pair in (FLOAT_INT, DOUBLE_INT, LONG_INT, INT_INT, SHORT_INT, LONG_DOUBLE_INT):
            if pair.dtype[0] == value.dtype and pair.dtype[1] == index.dtype:
                return pair
        return DATATYPE_NULL

    def Get_envelope(self) -> tuple[int, int, int, int, int]:
        """Returns the numbers of integers, addresses, counts and types from which this type was derived, and the combiner."""
        self._valid()
        return derive.envelope(self)

    def Get_contents(self) -> tuple[list[int], list[int], list[int], list["Datatype"]]:
        """Returns the integers, addresses, counts and types from which this type was derived."""
        self._valid()
        return derive.contents(self)

    def decode(self) -> tuple["Datatype", str, dict]:
        """Returns the type from which this type was derived, the name of the combiner, and the other arguments by name."""
        self._valid()
        return derive.decode(self)

    def Pack_size(self, count: int, comm: object) -> int:
        """Returns the number of bytes that `count` packed elements take."""
        self._valid()
        return count * self._wire

    def Pack(self, inbuf: object, outbuf: object, position: int, comm: object) -> int:
        """Packs elements into `outbuf`, starting at byte `position`. Returns the position after the packed bytes."""
        return derive.pack(self, inbuf, outbuf, position)

    def Unpack(self, inbuf: object, position: int, outbuf: object, comm: object) -> int:
        """Unpacks elements from `inbuf`, starting at byte `position`. Returns the position after the unpacked bytes."""
        return derive.unpack(self, inbuf, position, outbuf)

    def Pack_external(self, *_args: object) -> int:
        """Not supported."""
        raise unsupported("MPI.Datatype.Pack_external")

    def Unpack_external(self, *_args: object) -> int:
        """Not supported."""
        raise unsupported("MPI.Datatype.Unpack_external")

    def Pack_external_size(self, *_args: object) -> int:
        """Not supported."""
        raise unsupported("MPI.Datatype.Pack_external_size")

    def Get_name(self) -> str:
        """Returns the name."""
        self._valid()
        return self._name

    def Set_name(self, name: str) -> None:
        """Sets the name."""
        self._valid()
        self._name = name

    def tocode(self) -> str:
        """Returns the character code or the type string, such as `d` or `i4`."""
        self._valid()
        if self._code is None:
            raise ValueError("cannot map to character code or type string")
        return self._code

    @classmethod
    def fromcode(cls, code: str) -> "Datatype":
        """Returns the type with a character code or a type string."""
        return lookup(code)

    size = property(Get_size)
    extent = property(lambda self: self.Get_extent()[1])
    lb = property(lambda self: self.Get_extent()[0])
    ub = property(lambda self: sum(self.Get_extent()))
    true_extent = property(lambda self: self.Get_true_extent()[1])
    true_lb = property(lambda self: self.Get_true_extent()[0])
    true_ub = property(lambda self: sum(self.Get_true_extent()))
    envelope = property(Get_envelope)
    contents = property(Get_contents)
    name = property(Get_name, Set_name)

    @property
    def combiner(self) -> int:
        """The constructor of this type, as one of the constants `COMBINER_...`."""
        self._valid()
        return self._made[0]

    @property
    def is_named(self) -> bool:
        """Whether this type was not derived from another type."""
        return self.combiner == c.COMBINER_NAMED

    @property
    def is_predefined(self) -> bool:
        """Whether this is the null type, or a type that was not derived from another type."""
        return self._layout is None or self.is_named

    @property
    def typechar(self) -> str:
        """numpy's character for this type, or `V` if numpy has no such type."""
        self._valid()
        dtype = self.dtype
        return "V" if dtype is None or dtype.names else _CHARS.get(self._code, dtype.char) if self._code else dtype.char

    @property
    def typestr(self) -> str:
        """numpy's type string for this type, or `V` and the extent if numpy has no such type."""
        self._valid()
        dtype = self.dtype
        return f"V{self._extent}" if dtype is None or dtype.names else "U1" if dtype.kind == "U" else dtype.str[1:]


_CHARS = {"c": "c", "p": "p", "i8": "l", "u8": "L"}


def lookup(code: str) -> Datatype:
    """Returns the type with a character code, a type string or a buffer format."""
    if code[:1] == ">":
        raise BufferError(f"format string {code!r} with non-native byte order")
    if code[:1] in "@<=" and len(code) > 1:
        code = code[1:]
    try:
        return typedict[code]
    except KeyError:
        raise KeyError(f"cannot map {code!r} to MPI datatype") from None


def as_datatype(given: "Datatype | str | None") -> Datatype:
    """Returns `given` itself if it is a type, or the type with this character code or type string."""
    if isinstance(given, Datatype):
        return given
    if given is None:
        raise TypeError("an MPI datatype is required")
    return lookup(given)


def _by_name(name: str) -> Datatype:
    return next((datatype for datatype in PREDEFINED.values() if datatype._name == name), DATATYPE_NULL)


def _named(name: str, dtype: object, code: str | None = None) -> Datatype:
    numpy_type = np.dtype(dtype)
    datatype = Datatype()
    datatype._set(name, numpy_type, basic(numpy_type.itemsize, numpy_type.itemsize), code, c.COMBINER_NAMED)
    if numpy_type.names:
        datatype._layout.sizes = np.array([numpy_type[i].itemsize for i in range(len(numpy_type))])
    datatype._predefined = True
    return datatype


def _pair(value: str) -> np.dtype:
    return np.dtype([("value", value), ("index", "i4")], align=True)


# The name in the module, MPI's name, the numpy type, and the code that `tocode` returns.
_TABLE: list[tuple[str, str, object, str | None]] = [
    ("PACKED", "MPI_PACKED", "u1", "B"), ("BYTE", "MPI_BYTE", "u1", "B"),
    ("AINT", "MPI_AINT", "i8", "p"), ("OFFSET", "MPI_OFFSET", "i8", "p"), ("COUNT", "MPI_COUNT", "i8", "p"),
    ("CHAR", "MPI_CHAR", "S1", "c"), ("WCHAR", "MPI_WCHAR", "U1", "U"), ("SIGNED_CHAR", "MPI_SIGNED_CHAR", "b", "b"),
    ("SHORT", "MPI_SHORT", "h", "h"), ("INT", "MPI_INT", "i", "i"), ("LONG", "MPI_LONG", "l", "l"),
    ("LONG_LONG", "MPI_LONG_LONG_INT", "q", "q"), ("UNSIGNED_CHAR", "MPI_UNSIGNED_CHAR", "B", "B"),
    ("UNSIGNED_SHORT", "MPI_UNSIGNED_SHORT", "H", "H"), ("UNSIGNED", "MPI_UNSIGNED", "I", "I"),
    ("UNSIGNED_LONG", "MPI_UNSIGNED_LONG", "L", "L"), ("UNSIGNED_LONG_LONG", "MPI_UNSIGNED_LONG_LONG", "Q", "Q"),
    ("FLOAT", "MPI_FLOAT", "f", "f"), ("DOUBLE", "MPI_DOUBLE", "d", "d"), ("LONG_DOUBLE", "MPI_LONG_DOUBLE", "g", "g"),
    ("C_BOOL", "MPI_C_BOOL", "?", "b1"), ("INT8_T", "MPI_INT8_T", "i1", "i1"), ("INT16_T", "MPI_INT16_T", "i2", "i2"),
    ("INT32_T", "MPI_INT32_T", "i4", "i4"), ("INT64_T", "MPI_INT64_T", "i8", "i8"), ("UINT8_T", "MPI_UINT8_T", "u1", "u1"),
    ("UINT16_T", "MPI_UINT16_T", "u2", "u2"), ("UINT32_T", "MPI_UINT32_T", "u4", "u4"), ("UINT64_T", "MPI_UINT64_T", "u8", "u8"),
    ("FLOAT16_T", "MPI_SHORT_FLOAT", "e", "e"), ("C_FLOAT_COMPLEX", "MPI_C_COMPLEX", "F", "F"),
    ("C_DOUBLE_COMPLEX", "MPI_C_DOUBLE_COMPLEX", "D", "D"), ("C_LONG_DOUBLE_COMPLEX", "MPI_C_LONG_DOUBLE_COMPLEX", "G", "G"),
    ("CXX_BOOL", "MPI_CXX_BOOL", "?", "?"), ("CXX_FLOAT_COMPLEX", "MPI_CXX_FLOAT_COMPLEX", "F", "F"),
    ("CXX_DOUBLE_COMPLEX", "MPI_CXX_DOUBLE_COMPLEX", "D", "D"),
    ("CXX_LONG_DOUBLE_COMPLEX", "MPI_CXX_LONG_DOUBLE_COMPLEX", "G", "G"),
    ("SHORT_INT", "MPI_SHORT_INT", _pair("h"), None), ("INT_INT", "MPI_2INT", _pair("i"), None),
    ("LONG_INT", "MPI_LONG_INT", _pair("l"), None), ("FLOAT_INT", "MPI_FLOAT_INT", _pair("f"), None),
    ("DOUBLE_INT", "MPI_DOUBLE_INT", _pair("d"), None), ("LONG_DOUBLE_INT", "MPI_LONG_DOUBLE_INT", _pair("g"), None),
    ("CHARACTER", "MPI_CHARACTER", "S1", "c"), ("LOGICAL", "MPI_LOGICAL", "i4", "i"), ("INTEGER", "MPI_INTEGER", "i4", "i"),
    ("REAL", "MPI_REAL", "f", "f"), ("DOUBLE_PRECISION", "MPI_DOUBLE_PRECISION", "d", "d"), ("COMPLEX", "MPI_COMPLEX", "F", "F"),
    ("DOUBLE_COMPLEX", "MPI_DOUBLE_COMPLEX", "D", "D"), ("LOGICAL1", "MPI_LOGICAL1", "?", "?"),
    ("LOGICAL2", "MPI_LOGICAL2", "i2", "i2"), ("LOGICAL4", "MPI_LOGICAL4", "i4", "i4"), ("LOGICAL8", "MPI_LOGICAL8", "i8", "i8"),
    ("INTEGER1", "MPI_INTEGER1", "i1", "i1"), ("INTEGER2", "MPI_INTEGER2", "i2", "i2"), ("INTEGER4", "MPI_INTEGER4", "i4", "i4"),
    ("INTEGER8", "MPI_INTEGER8", "i8", "i8"), ("REAL2", "MPI_REAL2", "e", "f2"), ("REAL4", "MPI_REAL4", "f4", "f4"),
    ("REAL8", "MPI_REAL8", "f8", "f8"), ("REAL16", "MPI_REAL16", "g", "f16"), ("COMPLEX8", "MPI_COMPLEX8", "F", "c8"),
    ("COMPLEX16", "MPI_COMPLEX16", "D", "c16"), ("COMPLEX32", "MPI_COMPLEX32", "G", "c32"),
]  # fmt: skip

PREDEFINED: dict[str, Datatype] = {"DATATYPE_NULL": Datatype()}
PREDEFINED |= {name: _named(mpi_name, dtype, code) for name, mpi_name, dtype, code in _TABLE}
# numpy has no such numbers, so these types are null, as in an MPI library that does not support them.
PREDEFINED |= {name: PREDEFINED["DATATYPE_NULL"] for name in ("BFLOAT16_T", "LOGICAL16", "INTEGER16", "COMPLEX4")}
_SAME = {
    "FLOAT32_T": "FLOAT", "FLOAT64_T": "DOUBLE", "C_COMPLEX": "C_FLOAT_COMPLEX", "TWOINT": "INT_INT", "UNSIGNED_INT": "UNSIGNED",
    "SIGNED_SHORT": "SHORT", "SIGNED_INT": "INT", "SIGNED_LONG": "LONG", "SIGNED_LONG_LONG": "LONG_LONG", "BOOL": "C_BOOL",
    "SINT8_T": "INT8_T", "SINT16_T": "INT16_T", "SINT32_T": "INT32_T", "SINT64_T": "INT64_T", "F_BOOL": "LOGICAL",
    "F_INT": "INTEGER", "F_FLOAT": "REAL", "F_DOUBLE": "DOUBLE_PRECISION", "F_COMPLEX": "COMPLEX", "F_FLOAT_COMPLEX": "COMPLEX",
    "F_DOUBLE_COMPLEX": "DOUBLE_COMPLEX",
}  # fmt: skip
PREDEFINED |= {name: PREDEFINED[same] for name, same in _SAME.items()}

DATATYPE_NULL, BYTE, AINT = PREDEFINED["DATATYPE_NULL"], PREDEFINED["BYTE"], PREDEFINED["AINT"]
INT8_T, INT16_T, INT32_T, INT64_T = (PREDEFINED[f"INT{bits}_T"] for bits in (8, 16, 32, 64))
FLOAT, DOUBLE = PREDEFINED["FLOAT"], PREDEFINED["DOUBLE"]
C_FLOAT_COMPLEX, C_DOUBLE_COMPLEX = PREDEFINED["C_FLOAT_COMPLEX"], PREDEFINED["C_DOUBLE_COMPLEX"]
FLOAT_INT, DOUBLE_INT, LONG_INT = PREDEFINED["FLOAT_INT"], PREDEFINED["DOUBLE_INT"], PREDEFINED["LONG_INT"]
INT_INT, SHORT_INT, LONG_DOUBLE_INT = PREDEFINED["INT_INT"], PREDEFINED["SHORT_INT"], PREDEFINED["LONG_DOUBLE_INT"]

# Codes of numpy, of the struct module and of the buffer protocol.
_CODES = {
    "C_BOOL": "? b1", "SIGNED_CHAR": "b", "SHORT": "h", "INT": "i", "LONG": "l n", "LONG_LONG": "q", "UNSIGNED_CHAR": "B",
    "UNSIGNED_SHORT": "H u 1u", "UNSIGNED": "I", "UNSIGNED_LONG": "L N P", "UNSIGNED_LONG_LONG": "Q", "FLOAT16_T": "e f2",
    "FLOAT": "f f4", "DOUBLE": "d f8", "LONG_DOUBLE": "g f16", "C_FLOAT_COMPLEX": "Zf F c8", "C_DOUBLE_COMPLEX": "Zd D c16",
    "C_LONG_DOUBLE_COMPLEX": "Zg G c32", "INT8_T": "i1", "INT16_T": "i2", "INT32_T": "i4", "INT64_T": "i8 M M8 m m8",
    "UINT8_T": "u1", "UINT16_T": "u2", "UINT32_T": "u4", "UINT64_T": "u8", "AINT": "p", "CHAR": "c a S S1 s 1s",
    "WCHAR": "U U1 w 1w",
}  # fmt: skip
typedict: dict[str, Datatype] = {code: PREDEFINED[name] for name, codes in _CODES.items() for code in codes.split()}
typedict_c = {
    code: typedict[code] for code in "? b h i l q B H I L Q f d g F D G b1 i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 c8 c16".split()
}
# numpy's built-in types in native byte order, by `id`. Nearly all arrays have one of these types, and a lookup by `id` is fast.
DATATYPES_BY_DTYPE_ID = {id(dtype): typedict[dtype.char] for dtype in map(np.dtype, "?bBhHiIlLqQefdgFDG")}
_FORTRAN = {
    "l": "LOGICAL", "i": "INTEGER", "r": "REAL", "s": "REAL", "d": "DOUBLE_PRECISION", "c": "COMPLEX", "z": "DOUBLE_COMPLEX",
    "l1": "LOGICAL1", "l2": "LOGICAL2", "l4": "LOGICAL4", "l8": "LOGICAL8", "i1": "INTEGER1", "i2": "INTEGER2", "i4": "INTEGER4",
    "i8": "INTEGER8", "r4": "REAL4", "r8": "REAL8", "r16": "REAL16", "c8": "COMPLEX8", "c16": "COMPLEX16", "c32": "COMPLEX32",
}  # fmt: skip
typedict_f = {code: PREDEFINED[name] for code, name in _FORTRAN.items()}

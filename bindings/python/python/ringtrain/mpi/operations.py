"""`MPI.Op`: reductions of Python objects and of the elements of buffers."""

from collections.abc import Callable
from typing import Any

import numpy as np

from . import constants as c
from .buffers import Block, buffer, parse_block
from .constant import by_name
from .datatypes import Datatype
from .errors import Exception

# The kinds of numpy types on which the operations are defined, as in the MPI standard. "V" means pairs of a value and an index.
_ARITHMETIC, _LOGICAL, _BITWISE, _LOCATION, _ANY = "iufc", "biu", "iub", "V", "biufcVSU"


class Op:
    """A reduction. A program can also call a reduction, such as `MPI.SUM`, with two objects."""

    __slots__ = ("_name", "_objects", "_arrays", "_kinds", "_native", "_user", "_commutes", "_plans")

    def __new__(cls, op: "Op | None" = None) -> "Op":
        self = super().__new__(cls)
        for slot in Op.__slots__:
            setattr(self, slot, None if op is None else getattr(op, slot))
        return self

    @classmethod
    def Create(cls, function: Callable[[Any, Any, Datatype], None], commute: bool = False) -> "Op":
        """Returns a reduction of the program. `function(inbuf, inoutbuf, datatype)` writes `inbuf op inoutbuf` to `inoutbuf`."""
        self = Op.__new__(cls)
        self._name, self._user, self._commutes, self._plans = "user", function, bool(commute), {}
        return self

    def _native_on(self, datatype: Datatype) -> str | None:
        """Returns ringtrain's name for this reduction of elements of `datatype`, or `None` if this module must compute the
        reduction. Raises `Exception` if the reduction is not defined on these elements."""
        code = datatype.dtype.char if datatype.dtype is not None else ""
        try:
            return self._plans[code]
        except (KeyError, TypeError):
            pass
        if self._plans is None:
            raise Exception(c.ERR_OP)
        if self._user is None:
            self._require_defined(datatype)
        is_number = code != "" and code in "bBhHiIlLqQefd" or code == "?" and self._native in ("land", "lor", "lxor")
        native = self._native if is_number else None
        if native is not None or self._user is None and code:
            self._plans[code] = native
        return native

    def _require_defined(self, datatype: Datatype) -> None:
        dtype = datatype.dtype
        kind = "" if dtype is None else dtype.kind
        if not kind or kind not in self._kinds or kind == "c" and self._name in ("MAX", "MIN"):
            raise Exception(c.ERR_OP, f"{self._name} is not defined on {datatype._name or 'derived datatypes'}")

    def _fold(self, left: Block, right: Block) -> None:
        """Writes `left op right` to `right`."""
        if self._user is not None:
            self._user(
                np.frombuffer(left.memory, np.uint8).view(buffer),
                np.frombuffer(right.memory, np.uint8).view(buffer),
                right.datatype,
            )
        else:
            a, b = left.array(), right.array()
            b[...] = self._arrays(a, b)

    def __call__(self, x: Any, y: Any, /) -> Any:
        if self._user is not None:
            return self._user(x, y, None) if self._objects is None else self._objects(x, y)
        if self._objects is None:
            raise Exception(c.ERR_OP)
        return self._objects(x, y)

    def __eq__(self, other: object) -> bool:
        return (self._name, self._user) == (other._name, other._user) if isinstance(other, Op) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return self._name is not None

    def __reduce__(self) -> tuple:
        if self._user is not None:
            return (Op.Create, (self._user, self._commutes))
        return by_name(self._name or "OP_NULL")

    def __repr__(self) -> str:
        return f"<ringtrain.mpi.MPI.Op {self._name or 'OP_NULL'}>"

    def Free(self) -> None:
        """Makes this the null operation."""
        if self._name is None or self._user is None:
            raise Exception(c.ERR_OP, "predefined operations cannot be freed")
        for slot in Op.__slots__:
            setattr(self, slot, None)

    def free(self) -> None:
        """Calls `Free` if the program created this operation."""
        if self._user is not None:
            self.Free()

    def Is_commutative(self) -> bool:
        """Returns whether the operation is commutative. Reductions keep the order of the ranks in any case."""
        if self._name is None:
            raise Exception(c.ERR_OP)
        return self._commutes

    is_commutative = property(Is_commutative)
    is_predefined = property(lambda self: self._user is None)

    def Reduce_local(self, inbuf: object, inoutbuf: object) -> None:
        """Writes `inbuf op inoutbuf` to `inoutbuf`. Raises `ValueError` if types or counts differ."""
        left, right = parse_block(inbuf, False), parse_block(inoutbuf, True)
        check_alike(left, right)
        if self._user is None:
            self._native_on(right.datatype)
        target = trim_memory(right)
        self._fold(trim_memory(left), target)


def trim_memory(block: Block) -> Block:
    """Returns the same block with only the memory from the first to the last element."""
    extent = block.count * block.datatype._extent
    return Block(block.memory[block.offset : block.offset + extent], 0, block.count, block.datatype)


def check_alike(sending: Block, receiving: Block) -> None:
    """Raises `ValueError` if the sent and the received elements of a reduction differ in type or number."""
    if sending.datatype is not receiving.datatype and sending.datatype != receiving.datatype:
        raise ValueError("mismatch in send and receive MPI datatypes")
    if sending.count != receiving.count:
        raise ValueError(f"mismatch in send count {sending.count} and receive count {receiving.count}")


def _choose_pair(better: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def choose(x: Any, y: Any) -> Any:
        (u, i), (v, j) = x, y
        if better(u, v):
            return u, i
        if better(v, u):
            return v, j
        return (v, j) if j < i else (u, i)

    return choose


def _choose_pairs(better: Callable[[Any, Any], Any]) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    def choose(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        value, place = a.dtype.names
        takes_a = better(a[value], b[value]) | (~better(b[value], a[value]) & (a[place] <= b[place]))
        return np.where(takes_a, a, b)

    return choose


def _predefined(name: str, objects: Callable, arrays: Callable | None, kinds: str, native: str | None = None) -> Op:
    op = Op()
    op._name, op._objects, op._arrays, op._kinds, op._native = name, objects, arrays, kinds, native
    op._commutes, op._plans = name not in ("REPLACE", "NO_OP"), {}
    return op


OP_NULL = Op()
MAX = _predefined("MAX", lambda x, y: y if y > x else x, np.maximum, _ARITHMETIC, "max")
MIN = _predefined("MIN", lambda x, y: y if y < x else x, np.minimum, _ARITHMETIC, "min")
SUM = _predefined("SUM", lambda x, y: x + y, np.add, _ARITHMETIC, "sum")
PROD = _predefined("PROD", lambda x, y: x * y, np.multiply, _ARITHMETIC, "prod")
LAND = _predefined("LAND", lambda x, y: bool(x) & bool(y), np.logical_and, _LOGICAL, "land")
LOR = _predefined("LOR", lambda x, y: bool(x) | bool(y), np.logical_or, _LOGICAL, "lor")
LXOR = _predefined("LXOR", lambda x, y: bool(x) ^ bool(y), np.logical_xor, _LOGICAL, "lxor")
BAND = _predefined("BAND", lambda x, y: x & y, np.bitwise_and, _BITWISE, "band")
BOR = _predefined("BOR", lambda x, y: x | y, np.bitwise_or, _BITWISE, "bor")
BXOR = _predefined("BXOR", lambda x, y: x ^ y, np.bitwise_xor, _BITWISE, "bxor")
MAXLOC = _predefined("MAXLOC", _choose_pair(lambda u, v: u > v), _choose_pairs(np.greater), _LOCATION)
MINLOC = _predefined("MINLOC", _choose_pair(lambda u, v: u < v), _choose_pairs(np.less), _LOCATION)
REPLACE = _predefined("REPLACE", lambda x, y: y, lambda a, b: b, _ANY)
NO_OP = _predefined("NO_OP", lambda x, y: x, lambda a, b: a, _ANY)

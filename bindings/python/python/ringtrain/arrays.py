"""Conversions of numpy arrays for the compiled module: contiguous elements of a type that it knows, or bytes."""

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._errors import InvalidArgument, Unsupported

_NAMES = {
    np.dtype(np.bool_): "bool",
    np.dtype(np.float16): "f16",
    np.dtype(np.float32): "f32",
    np.dtype(np.float64): "f64",
    np.dtype(np.int8): "i8",
    np.dtype(np.uint8): "u8",
    np.dtype(np.int16): "i16",
    np.dtype(np.uint16): "u16",
    np.dtype(np.int32): "i32",
    np.dtype(np.uint32): "u32",
    np.dtype(np.int64): "i64",
    np.dtype(np.uint64): "u64",
}


def name_of(dtype: Any) -> str:
    """The compiled module's name of a numpy type. Raises `Unsupported` for other types."""
    dtype = np.dtype(dtype)
    try:
        return _NAMES[dtype]
    except KeyError:
        raise Unsupported(f"{dtype} is not one of {', '.join(str(known) for known in _NAMES)}") from None


def contiguous(values: ArrayLike) -> NDArray:
    """The values as an aligned array that is contiguous in row-major order: the array itself, or a copy."""
    array = np.asarray(values)
    return array if array.flags.c_contiguous and array.flags.aligned else array.copy()


def place(out: NDArray | None, shape: tuple[int, ...], dtype: np.dtype) -> NDArray:
    """The array for a result: `out`, after a check, or a new one."""
    if out is None:
        try:
            return np.empty(shape, dtype)
        except ValueError as error:
            raise InvalidArgument(f"an array cannot have the shape {shape}: {error}") from None
    out = written(out)
    if out.shape != shape or out.dtype != dtype:
        raise InvalidArgument(f"out is {out.dtype} of shape {out.shape}; the result is {dtype} of shape {shape}")
    return out


def written(out: NDArray) -> NDArray:
    """`out`, after a check that it can be written without a copy."""
    if not isinstance(out, np.ndarray):
        raise InvalidArgument(f"out is a {type(out).__name__}, not a numpy array")
    if not out.flags.carray:
        raise InvalidArgument("out is not contiguous in row-major order, or is read-only or not aligned")
    return out


def moved(array: NDArray) -> NDArray:
    """The same memory, as a type that can be sent."""
    if array.dtype.kind in "mM":
        return array.view(np.int64)
    if array.dtype.hasobject:
        raise Unsupported("the elements are Python objects, which cannot be sent; use the functions for objects")
    if array.dtype.names:
        # The buffer protocol has no format for some types and names of fields.
        return array.view(f"V{array.dtype.itemsize}") if array.dtype.itemsize else array
    return array


def reduced(array: NDArray, op: str) -> NDArray:
    """The same memory, as a type that can be reduced: complex numbers are added as pairs."""
    if array.dtype.kind == "c":
        if op not in ("sum", "avg"):
            raise Unsupported(f"{op} on {array.dtype} is not defined")
        flat = array.reshape(-1)
        return flat.view(flat.real.dtype)
    if array.dtype not in _NAMES:
        raise Unsupported(f"{op} on {array.dtype} is not defined")
    return array


def finished(array: NDArray, values: ArrayLike) -> Any:
    """The result in the form of the input: a scalar for a scalar."""
    return array[()] if array.ndim == 0 and not isinstance(values, np.ndarray) else array


def rows(array: NDArray, parts: int, what: str) -> int:
    """The number of rows in each of `parts` equal parts."""
    if array.ndim == 0 or array.shape[0] % parts:
        raise InvalidArgument(f"{what} of shape {array.shape} cannot be divided into {parts} equal parts of rows; pass counts")
    return array.shape[0] // parts


def elements(counts: list[int], row: tuple[int, ...]) -> list[int]:
    """Counts of rows as counts of elements."""
    each = math.prod(row)
    return [int(count) * each for count in counts]

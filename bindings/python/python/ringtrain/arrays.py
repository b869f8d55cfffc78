"""Converts numpy arrays to what the compiled module accepts: contiguous elements of a type that the module knows, or plain
bytes."""

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


def dtype_name(dtype: Any) -> str:
    """Returns the compiled module's name for a numpy type. Raises `Unsupported` if the module has no such type."""
    dtype = np.dtype(dtype)
    try:
        return _NAMES[dtype]
    except KeyError:
        raise Unsupported(f"the type {dtype} is not supported; use one of {', '.join(str(known) for known in _NAMES)}") from None


def as_contiguous(values: ArrayLike) -> NDArray:
    """Returns the values as an aligned array that is contiguous in row-major order. Copies the values only if
    necessary."""
    array = np.asarray(values)
    return array if array.flags.c_contiguous and array.flags.aligned else array.copy()


def result_array(out: NDArray | None, shape: tuple[int, ...], dtype: np.dtype) -> NDArray:
    """Returns the array for a result: `out`, or a new array if `out` is `None`. Raises `InvalidArgument` if `out` does not have
    the shape `shape` and the type `dtype`, or cannot be written in place."""
    if out is None:
        try:
            return np.empty(shape, dtype)
        except ValueError as error:
            raise InvalidArgument(f"an array cannot have the shape {shape}: {error}") from None
    out = check_writable(out)
    if out.shape != shape or out.dtype != dtype:
        raise InvalidArgument(f"out is {out.dtype} of shape {out.shape}; the result is {dtype} of shape {shape}")
    return out


def check_writable(out: NDArray) -> NDArray:
    """Returns `out`. Raises `InvalidArgument` if `out` is not a writable, aligned array that is contiguous in row-major order."""
    if not isinstance(out, np.ndarray):
        raise InvalidArgument(f"out is a {type(out).__name__}, not a numpy array")
    if not out.flags.carray:
        raise InvalidArgument("out is not contiguous in row-major order, or is read-only or not aligned")
    return out


def as_sendable(array: NDArray) -> NDArray:
    """Returns a view of the array with a type that can be sent. Raises `Unsupported` if the elements are Python objects."""
    if array.dtype.kind in "mM":
        return array.view(np.int64)
    if array.dtype.hasobject:
        raise Unsupported("the elements are Python objects, which cannot be sent; use the functions for objects")
    if array.dtype.names:
        # The buffer protocol has no format for some field types and field names, so structured elements are sent as bytes.
        return array.view(f"V{array.dtype.itemsize}") if array.dtype.itemsize else array
    return array


def as_reducible(array: NDArray, op: str) -> NDArray:
    """Returns a view of the array with a type that `op` can reduce; complex numbers become pairs of real numbers. Raises
    `Unsupported` if `op` is not defined on the elements."""
    if array.dtype.kind == "c":
        if op not in ("sum", "avg"):
            raise Unsupported(f"{op} on {array.dtype} is not defined")
        flat = array.reshape(-1)
        return flat.view(flat.real.dtype)
    if array.dtype not in _NAMES:
        raise Unsupported(f"{op} on {array.dtype} is not defined")
    return array


def scalar_or_array(array: NDArray, values: ArrayLike) -> Any:
    """Returns the result `array` as a scalar if the input `values` was a scalar, otherwise as an array."""
    return array[()] if array.ndim == 0 and not isinstance(values, np.ndarray) else array


def rows_per_part(array: NDArray, parts: int, what: str) -> int:
    """Divides the rows of `array` into `parts` equal parts, and returns the number of rows in a part. Raises `InvalidArgument` if
    the rows cannot be divided equally. `what` is the name of the array in the error message."""
    if array.ndim == 0 or array.shape[0] % parts:
        raise InvalidArgument(f"{what} of shape {array.shape} cannot be divided into {parts} equal parts of rows; pass counts")
    return array.shape[0] // parts


def element_counts(row_counts: list[int], row_shape: tuple[int, ...]) -> list[int]:
    """Converts counts of rows to counts of elements, for rows of the shape `row_shape`."""
    per_row = math.prod(row_shape)
    return [int(count) * per_row for count in row_counts]

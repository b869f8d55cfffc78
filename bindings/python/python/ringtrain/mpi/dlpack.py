"""Reads the memory of tensors through DLPack, the protocol with which array libraries exchange tensors
(https://dmlc.github.io/dlpack).

This module keeps the capsule of a tensor alive and does not consume it. A consumer of the capsule, for example
`numpy.from_dlpack`, must call the exporter's deleter to free the memory. But some exporters of version 0 free their structures
together with the capsule."""

import ctypes
import math
from typing import Any

from .errors import unsupported

_VERSIONED, _VERSION_0 = b"dltensor_versioned", b"dltensor"
_MAJOR = 1
_READ_ONLY = 1
# CPU, and host memory pinned for CUDA and ROCm.
_HOST_DEVICES = (1, 3, 11)
_CODES = {
    **{(0, 8): "b", (0, 16): "h", (0, 32): "i", (0, 64): "l"},
    **{(1, 8): "B", (1, 16): "H", (1, 32): "I", (1, 64): "L"},
    **{(2, 16): "e", (2, 32): "f", (2, 64): "d", (2, 128): "g"},
    **{(5, 64): "F", (5, 128): "D", (6, 8): "?"},
}
"""The codes of numpy's types, by DLPack's type code and number of bits."""
_PAIRS = {32: "F", 64: "D", 128: "G"}
"""The codes of complex types, by the number of bits of one float. Some exporters present a complex number as two floats."""


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes, _is_valid.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_int
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p


def memory_of(given: Any, writable: bool) -> tuple[memoryview, str | None]:
    """Returns the bytes of a tensor in host memory, and the code of the element type, or `None` if numpy has no such type."""
    if given.__dlpack_device__()[0] not in _HOST_DEVICES:
        raise unsupported("a buffer in GPU memory", "copy it to the host")
    try:
        capsule = given.__dlpack__(max_version=(_MAJOR, 0))
    except TypeError:  # an exporter of version 0
        capsule = given.__dlpack__()
    tensor, is_read_only = _tensor(capsule)
    if writable and is_read_only:
        raise BufferError("Object is not writable.")
    shape = [tensor.shape[i] for i in range(tensor.ndim)]
    size = math.prod(shape)
    if tensor.bits % 8:
        raise unsupported(f"a tensor of elements of {tensor.bits} bits", "convert it")
    nbytes = size * (tensor.bits // 8) * tensor.lanes
    if size and tensor.strides and not _is_contiguous(shape, [tensor.strides[i] for i in range(tensor.ndim)]):
        raise BufferError("message: the tensor is not contiguous")
    if nbytes == 0:
        return memoryview(b"" if is_read_only else bytearray()), _code(tensor)
    data = (ctypes.c_ubyte * nbytes).from_address(tensor.data + tensor.byte_offset)
    data._owner = capsule
    view = memoryview(data).cast("B")
    return view.toreadonly() if is_read_only else view, _code(tensor)


def _tensor(capsule: Any) -> tuple[_Tensor, bool]:
    """Returns the tensor in a capsule, and whether the tensor is read-only."""
    if _is_valid(capsule, _VERSIONED):
        versioned = _Versioned.from_address(_pointer(capsule, _VERSIONED))
        if versioned.major != _MAJOR:
            raise BufferError(f"message: the tensor is of DLPack version {versioned.major}, and only 0 and 1 are supported")
        return versioned.tensor, bool(versioned.flags & _READ_ONLY)
    if _is_valid(capsule, _VERSION_0):
        return _Tensor.from_address(_pointer(capsule, _VERSION_0)), False
    raise BufferError("message: the tensor's __dlpack__ did not return an unused DLPack capsule")


def _code(tensor: _Tensor) -> str | None:
    if tensor.lanes == 1:
        return _CODES.get((tensor.code, tensor.bits))
    return _PAIRS.get(tensor.bits) if (tensor.code, tensor.lanes) == (2, 2) else None


def _is_contiguous(shape: list[int], strides: list[int]) -> bool:
    """Returns whether the elements are contiguous in row-major or column-major order."""

    def is_dense(axes: list[tuple[int, int]]) -> bool:
        expected = 1
        for length, stride in axes:
            if length != 1 and stride != expected:
                return False
            expected *= length
        return True

    axes = list(zip(shape, strides, strict=True))
    return is_dense(axes[::-1]) or is_dense(axes)

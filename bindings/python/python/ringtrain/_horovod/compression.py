"""The compressions of gradients, under Horovod's names: `Compression.none`, `Compression.fp16`, `Compression.int8` and others."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringtrain import _core

WIRE_TYPES = ("fp16", "bf16")
"""The compressions that need no memory between two steps."""


class Compressor:
    """Sends elements unchanged. A subclass sets `wire` to the name of a compression, such as "bf16" or "int8". The library then
    compresses float32 elements while it sends them to other hosts, and computes sums in float32."""

    wire: str | None = None


def find_compression(compression: type[Compressor] | str) -> type[Compressor]:
    """Returns the compression with a name, such as "topk:0.001". Returns a class unchanged. Raises `ringtrain.InvalidArgument` if
    there is no compression of this name, and NotImplementedError if the class is not a `Compressor`."""
    if isinstance(compression, str):
        name = _core.Compressor(compression).compression
        return type("Compressor", (Compressor,), {"wire": name, "__doc__": f'Sends float32 elements as "{name}".'})
    if not (isinstance(compression, type) and issubclass(compression, Compressor)):
        raise NotImplementedError(
            f"the compression {compression!r} is not implemented; pass an attribute of Compression, or a name like 'topk:0.001'"
        )
    return compression


def find_wire(compression: type[Compressor] | str, for_gradients: bool = True) -> str | None:
    """Returns the name of a compression for the library, or None for no compression. Raises NotImplementedError for PowerSGD,
    and `ringtrain.Unsupported` if a compression with a memory is not `for_gradients`."""
    wire = find_compression(compression).wire
    if wire is not None and wire.startswith("powersgd"):
        raise NotImplementedError("Compression.powersgd is not implemented for numpy arrays; use ringtrain.torch for PowerSGD")
    if wire is not None and wire not in WIRE_TYPES and not for_gradients:
        raise _core.Unsupported(
            f"the compression {wire} is for the gradients of a DistributedOptimizer; for a single tensor, use fp16 or bf16"
        )
    return wire


def half_type(wire: str) -> np.dtype[Any]:
    """Returns numpy's type for "fp16" or "bf16"."""
    if wire == "fp16":
        return np.dtype(np.float16)
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError("bfloat16 needs the package ml_dtypes: pip install ml_dtypes") from error
    return np.dtype(ml_dtypes.bfloat16)


class Compression:
    """The compressions that the argument `compression` accepts, with their default parameters."""

    none = Compressor
    fp16: type[Compressor]
    bf16: type[Compressor]
    fp8: type[Compressor]
    int8: type[Compressor]
    int8_stochastic: type[Compressor]
    int4: type[Compressor]
    int4_stochastic: type[Compressor]
    qsgd: type[Compressor]
    onebit: type[Compressor]
    signsgd: type[Compressor]
    topk: type[Compressor]
    randomk: type[Compressor]
    powersgd: type[Compressor]
    auto: type[Compressor]
    ef21: type[Compressor]


for _name in Compression.__annotations__:
    setattr(Compression, _name, find_compression(_name.replace("_", "-")))

"""The compressions of gradients, under Horovod's names: `Compression.none`, `Compression.fp16`, `Compression.int8` and others."""

from __future__ import annotations

from typing import Any

import torch

from ringtrain import _core

WIRE_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""The compressions that need no memory between two steps."""


class Compressor:
    """Sends elements unchanged. A program can pass this class or a subclass as the argument `compression`.

    A subclass can convert tensors in `compress` and `decompress`, or set `wire` to the name of a compression, such as "bf16" or
    "int8". If `wire` is set, the library compresses float32 elements while it sends them to other hosts, and computes sums in
    float32. If `wire` is not "fp16" or "bf16", `DistributedOptimizer` does not call `compress` and `decompress` for float32.
    """

    wire: str | None = None

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the tensor to reduce, and a context for `decompress`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Returns the reduced tensor in the type that it had before `compress`."""
        return tensor


class _HalfPrecisionCompressor(Compressor):
    """Sends elements as `dtype`: `compress` converts float64 elements, and the library converts float32 elements while it sends
    them."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if tensor.dtype is torch.float64:
            return tensor.to(cls.dtype), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        return tensor if context is None else tensor.to(context)


class FP16Compressor(_HalfPrecisionCompressor):
    """Sends float32 and float64 elements as float16."""

    wire = "fp16"
    dtype = torch.float16


class BF16Compressor(_HalfPrecisionCompressor):
    """Sends float32 and float64 elements as bfloat16."""

    wire = "bf16"
    dtype = torch.bfloat16


def find_compression(compression: type[Compressor] | str) -> type[Compressor]:
    """Returns the compression with a name, such as "topk:0.001". Returns a class unchanged. Raises `ringtrain.InvalidArgument` if
    there is no compression of this name."""
    if not isinstance(compression, str):
        return compression
    name = _core.Compressor(compression).compression
    attribute = getattr(Compression, name.replace("-", "_"), None)
    return attribute or type("Compressor", (Compressor,), {"wire": name, "__doc__": f'Sends float32 elements as "{name}".'})


class Compression:
    """The compressions that the argument `compression` accepts, with their default parameters."""

    none = Compressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
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

"""The formats in which gradients are sent: `Compression.none`, `Compression.fp16` and `Compression.bf16`."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """Sends elements unchanged. A program can pass this class or a subclass as the argument `compression`.

    A subclass can convert tensors in `compress` and `decompress`, or set `wire` to "fp16" or "bf16". If `wire` is set, the
    library converts float32 elements while it sends them. The conversion then needs no extra pass over memory, and sums are
    still computed in float32.
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


class Compression:
    """The formats that the argument `compression` accepts."""

    none = Compressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor

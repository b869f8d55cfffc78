"""The formats in which gradients are sent: `Compression.none`, `.fp16` and `.bf16`."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """A value of the argument `compression`. A subclass may convert tensors itself. Alternatively, `wire` names a conversion that
    is done while float32 is sent, which needs no extra pass over memory and keeps sums in float32."""

    wire: str | None = None

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the tensor to reduce, and a context for `decompress`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Returns the reduced tensor in the type that it had before `compress`."""
        return tensor


class _Half(Compressor):
    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if tensor.dtype is torch.float64:
            return tensor.to(cls.dtype), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        return tensor if context is None else tensor.to(context)


class FP16Compressor(_Half):
    """Sends float32 and float64 as float16."""

    wire = "fp16"
    dtype = torch.float16


class BF16Compressor(_Half):
    """Sends float32 and float64 as bfloat16."""

    wire = "bf16"
    dtype = torch.bfloat16


class Compression:
    """The available formats."""

    none = Compressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor

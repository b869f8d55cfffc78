"""How gradients look on the wire, as `Compression.none`, `.fp16` and `.bf16`."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """What `compression=` takes. A subclass may convert tensors itself; `wire` instead names a conversion that the ring does
    while it sends float32, which costs no pass over memory and keeps sums in float32."""

    wire: str | None = None

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to reduce, and what `decompress` needs to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """The reduced tensor as it was before `compress`."""
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
    """float32 and float64 travel as float16."""

    wire = "fp16"
    dtype = torch.float16


class BF16Compressor(_Half):
    """float32 and float64 travel as bfloat16."""

    wire = "bf16"
    dtype = torch.bfloat16


class Compression:
    """The choices."""

    none = Compressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor

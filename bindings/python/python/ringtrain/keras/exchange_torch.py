"""The exchange of gradients with the back end PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ringtrain.keras.exchange import GradientExchange, numpy_type


# Under `jit_compile=True`, torch.compile compiles the step before and after this function, but cannot compile the exchange.
@torch.compiler.disable
def reduce_gradients(exchange: GradientExchange, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Averages the gradients over the ranks, after the backward pass. If only some ranks have a gradient, the others contribute
    zeros."""
    types = [str(v.dtype if g is None else g.dtype).removeprefix("torch.") for g, v in zip(gradients, variables, strict=True)]
    reducer = exchange.reducer_for(variables, [numpy_type(name) for name in types])
    arrays = [_to_numpy(gradient) for gradient in gradients]
    reduced = exchange.reduce_arrays(reducer, arrays)
    devices = [variable.value.device for variable in variables]
    return [_to_torch(array, device) for array, device in zip(reduced, devices, strict=True)]


def _to_numpy(gradient: torch.Tensor | None) -> Any:
    if gradient is None:
        return None
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    host = gradient.detach().cpu().contiguous()
    # numpy has no bfloat16 of its own.
    return host.view(torch.uint16).numpy().view(numpy_type("bfloat16")) if host.dtype is torch.bfloat16 else host.numpy()


def _to_torch(array: Any, device: torch.device) -> torch.Tensor | None:
    if array is None:
        return None
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("uint16")).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)

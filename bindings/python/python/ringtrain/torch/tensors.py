"""Translates arguments of torch for the compiled module: a tensor becomes a `Memory`, and an element type or a
reduction becomes its name in that module. Copies tensors that are not contiguous or not on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed import ReduceOp

from ringtrain import _core
from ringtrain.torch import cuda

ELEMENT_TYPES: dict[torch.dtype, str] = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.uint16: "u16",
    torch.int32: "i32",
    torch.uint32: "u32",
    torch.int64: "i64",
    torch.uint64: "u64",
    torch.bool: "bool",
}

_REDUCTIONS = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "avg",
    ReduceOp.PRODUCT: "prod",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
    ReduceOp.PREMUL_SUM: "premulsum",
}

# A sum of bools is true if any of the bools is true. A product of bools is true if all of the bools are true.
_BOOL_REDUCTIONS = {"sum": "lor", "max": "lor", "bor": "lor", "prod": "land", "min": "land", "band": "land", "bxor": "lxor"}

Copy = Callable[[], None]


def reduction_name(op: ReduceOp, dtype: torch.dtype) -> str:
    """Returns the name that the compiled module has for a reduction of elements of `dtype`. Raises `ringtrain.Unsupported` if the
    module has no such reduction."""
    name = _REDUCTIONS.get(getattr(op, "op", op))
    if name is None:
        raise _core.Unsupported(f'the backend "ring" has no reduction {op}')
    if dtype is torch.bool:
        name = _BOOL_REDUCTIONS.get(name)
        if name is None:
            raise _core.Unsupported(f"{op} is not defined on torch.bool")
        return name
    if dtype.is_complex:
        if name not in ("sum", "avg", "premulsum"):
            raise _core.Unsupported(f"{op} is not defined on complex numbers")
        return name
    if dtype not in ELEMENT_TYPES:
        raise _core.Unsupported(f"{dtype} can be sent but not reduced; convert it to float16, bfloat16 or float32 first")
    return name


def premul_factor(op: ReduceOp) -> float | torch.Tensor:
    """Returns the factor in `op`, a `PREMUL_SUM`: before the sum, each rank multiplies its elements by its factor."""
    # Older versions of torch have the factor only in the pickled state of `op`.
    found = getattr(op, "factor", None)
    return op.__getstate__()[1] if found is None else found


def as_memory(tensor: torch.Tensor, writable: bool = True) -> _core.Memory:
    """Returns the memory of a contiguous tensor on the host. The memory presents a complex number as two real
    numbers, and an element of a type without reductions as bytes.
    """
    count, dtype = tensor.numel(), tensor.dtype
    name = ELEMENT_TYPES.get(dtype)
    if name is None:
        if dtype in (torch.complex64, torch.complex128):
            count, name = 2 * count, "f32" if dtype is torch.complex64 else "f64"
        else:
            count, name = count * tensor.element_size(), "u8"
    return _core.Memory(tensor, tensor.data_ptr(), count, name, writable)


def require_dense(tensor: torch.Tensor) -> None:
    """Raises `ringtrain.InvalidArgument` for a sparse or quantized tensor."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise _core.InvalidArgument(
            f'the backend "ring" sends dense tensors, not {kind} ones; call to_dense() or dequantize() first'
        )


def readable_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor on the host with the same elements: the tensor itself if possible, otherwise a copy."""
    if tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    require_dense(tensor)
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous() if plain.is_cpu else cuda.copy_to_host(plain)


def writable_on_host(tensor: torch.Tensor, keep: bool = True) -> tuple[torch.Tensor, Copy | None]:
    """Returns a contiguous tensor on the host to write to: `tensor` itself if possible, otherwise a copy. With a
    copy, also returns a function that copies the elements back to `tensor`. If `keep` is false, a copy may start with
    unspecified elements. The caller must then overwrite all elements.
    """
    host = readable_on_host(tensor) if keep or tensor.is_cpu else cuda.empty_host_tensor(tensor)
    if host is tensor:
        return tensor, None
    target = tensor.detach()
    return host, lambda: _copy_back(target, host)


def _copy_back(target: torch.Tensor, host: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(host.view(target.shape))


def concatenate_on_host(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the concatenated elements of all tensors, on the host."""
    return torch.cat([readable_on_host(tensor).detach().reshape(-1) for tensor in tensors])


def flat_output(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Copy]:
    """Returns an uninitialised tensor for the elements of all `tensors`, and a function that copies these elements to
    `tensors`."""
    for tensor in tensors:
        require_dense(tensor)
    sizes = [tensor.numel() for tensor in tensors]
    flat = torch.empty(sum(sizes), dtype=tensors[0].dtype)
    targets = [tensor.detach() for tensor in tensors]

    def unflatten() -> None:
        for target, part in zip(targets, flat.split(sizes), strict=True):
            _copy_back(target, part)

    return flat, unflatten


def uneven_element_counts(tensors: Sequence[torch.Tensor], whole: torch.Tensor) -> list[int] | None:
    """Returns how many elements of `as_memory(whole)` belong to each tensor, or `None` if this number is the same for
    all tensors. `whole` contains the elements of all `tensors`.
    """
    sizes = [tensor.numel() for tensor in tensors]
    if min(sizes) == max(sizes):
        return None
    scale = values_per_element(whole)
    return [size * scale for size in sizes]


def values_per_element(tensor: torch.Tensor) -> int:
    """Returns how many elements `as_memory(tensor)` has for each element of the tensor."""
    if tensor.dtype in ELEMENT_TYPES:
        return 1
    return 2 if tensor.dtype in (torch.complex64, torch.complex128) else tensor.element_size()

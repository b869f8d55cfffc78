"""Copies tensors on a GPU to pinned host memory, from which the library sends them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from ringtrain import _core

# The number of bytes that are copied and reduced at a time. Copying such a piece takes about as long as reducing it. With larger
# pieces the first and the last copy, which overlap with nothing, would take longer.
PIECE_BYTES = 4 << 20
# The number of host buffers: one piece is copied to the host while another is reduced and a third is copied back.
_SLOTS = 3


def require_gpu() -> None:
    """Raises `ringtrain.InvalidArgument` if CUDA is not available in this process."""
    if not torch.cuda.is_available():
        raise _core.InvalidArgument(
            'the backend "ring" got a tensor that is not in host memory, but CUDA is not available; call .cpu() on it first'
        )


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of the tensor in pinned host memory. The copy is complete on return."""
    host = empty_host_tensor(tensor)
    host.copy_(tensor)
    return host


def empty_host_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an uninitialised contiguous tensor of the same shape and type in pinned host memory."""
    if not tensor.is_cuda:
        raise _core.InvalidArgument(
            f"the ring backend sends tensors on cpu and cuda, not on {tensor.device}; call .cpu() on it first"
        )
    require_gpu()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def all_reduce_on_gpu(tensor: torch.Tensor, begin: Callable[[torch.Tensor], _core.Handle]) -> None:
    """All-reduces a contiguous tensor on a GPU piece by piece. While one piece is reduced on the host, the next piece is copied
    to the host, and the previous piece is copied back. `begin` starts the reduction of a piece, in place in host memory,
    and returns the handle of the reduction. When this function returns, the tensor contains the result."""
    require_gpu()
    flat = tensor.detach().view(-1)
    pieces = flat.split(max(1, PIECE_BYTES // flat.element_size())) if flat.numel() else ()
    current = torch.cuda.current_stream(flat.device)
    down, up = torch.cuda.Stream(flat.device), torch.cuda.Stream(flat.device)
    down.wait_stream(current)
    reducing: deque[tuple[torch.Tensor, torch.Tensor, _core.Handle]] = deque()
    free = [torch.empty_like(pieces[0], device="cpu", pin_memory=True) for _ in pieces[:_SLOTS]]
    returning: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()

    def copy_back_oldest() -> None:
        piece, host, handle = reducing.popleft()
        handle.wait()
        with torch.cuda.stream(up):
            piece.copy_(host[: piece.numel()], non_blocking=True)
            event = torch.cuda.Event()
            event.record(up)
        returning.append((event, host))

    for piece in pieces:
        if not free:
            event, host = returning.popleft()
            event.synchronize()
            free.append(host)
        host = free.pop()
        with torch.cuda.stream(down):
            host[: piece.numel()].copy_(piece, non_blocking=True)
        # The reduction of the previous piece continues during this wait.
        down.synchronize()
        reducing.append((piece, host, begin(host[: piece.numel()])))
        if len(reducing) > 1:
            copy_back_oldest()
    while reducing:
        copy_back_oldest()
    current.wait_stream(up)
    # A pinned buffer may be reused as soon as it is dropped, so the last copies must be complete.
    up.synchronize()

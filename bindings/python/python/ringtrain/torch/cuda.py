"""Tensors on a GPU. They are copied to pinned host memory, from which the library sends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from ringtrain import _core

# The copy of a piece takes about as long as its reduction. Larger pieces would make the first and last copies longer, which do
# not overlap with anything.
PIECE_BYTES = 4 << 20
# One is copied to the host, one is reduced, and one is copied back.
_SLOTS = 3


def require() -> None:
    """Raises `ringtrain.InvalidArgument` if this process has no GPU to copy from."""
    if not torch.cuda.is_available():
        raise _core.InvalidArgument(
            'the backend "ring" got a tensor that is not in host memory, but CUDA is not available; call .cpu() on it first'
        )


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned host memory, complete on return."""
    host = host_like(tensor)
    host.copy_(tensor)
    return host


def host_like(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous pinned host memory for the same number of elements."""
    if not tensor.is_cuda:
        raise _core.InvalidArgument(
            f"the ring backend moves tensors on cpu and cuda, not on {tensor.device}; call .cpu() on it first"
        )
    require()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def all_reduce(tensor: torch.Tensor, begin: Callable[[torch.Tensor], _core.Handle]) -> None:
    """All-reduces a contiguous tensor on a GPU piece by piece. While a piece is reduced on the host, the next is copied to the
    host and the one before is copied back. `begin` starts the reduction of a piece in place. Complete on return."""
    require()
    flat = tensor.detach().view(-1)
    pieces = flat.split(max(1, PIECE_BYTES // flat.element_size())) if flat.numel() else ()
    current = torch.cuda.current_stream(flat.device)
    down, up = torch.cuda.Stream(flat.device), torch.cuda.Stream(flat.device)
    down.wait_stream(current)
    reducing: deque[tuple[torch.Tensor, torch.Tensor, _core.Handle]] = deque()
    free = [torch.empty_like(pieces[0], device="cpu", pin_memory=True) for _ in pieces[:_SLOTS]]
    returning: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()

    def return_oldest() -> None:
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
            return_oldest()
    while reducing:
        return_oldest()
    current.wait_stream(up)
    # A pinned buffer may be reused as soon as it is dropped, so the last copies must be complete.
    up.synchronize()

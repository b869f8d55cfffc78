"""Tensors on a GPU. The ring moves host memory, so they pass through pinned buffers; a large all-reduce in overlapped pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from ringtrain import _core

# One piece's copy takes about as long as its reduction, and few pieces make the ends, which overlap with nothing, long.
PIECE_BYTES = 4 << 20
# One being copied down, one reduced, one copied up.
_SLOTS = 3


def require() -> None:
    """Raises `ringtrain.InvalidArgument` if this process has no GPU to copy from."""
    if not torch.cuda.is_available():
        raise _core.InvalidArgument(
            "the ring backend was given a tensor that is not in host memory, and CUDA is not there; call .cpu() on it first"
        )


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A pinned copy on the host, complete on return."""
    host = host_like(tensor)
    host.copy_(tensor)
    return host


def host_like(tensor: torch.Tensor) -> torch.Tensor:
    """Pinned memory on the host for as many elements, one after another."""
    if not tensor.is_cuda:
        raise _core.InvalidArgument(
            f"the ring backend moves tensors on cpu and cuda, not on {tensor.device}; call .cpu() on it first"
        )
    require()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def all_reduce(tensor: torch.Tensor, begin: Callable[[torch.Tensor], _core.Handle]) -> None:
    """All-reduces a contiguous tensor on a GPU, a piece at a time: while one is reduced on the host, the next comes down and the
    one before goes up. `begin` starts the reduction of a piece in place. Complete for the current stream on return."""
    require()
    flat = tensor.detach().view(-1)
    pieces = flat.split(max(1, PIECE_BYTES // flat.element_size())) if flat.numel() else ()
    current = torch.cuda.current_stream(flat.device)
    down, up = torch.cuda.Stream(flat.device), torch.cuda.Stream(flat.device)
    down.wait_stream(current)
    under_way: deque[tuple[torch.Tensor, torch.Tensor, _core.Handle]] = deque()
    free = [torch.empty_like(pieces[0], device="cpu", pin_memory=True) for _ in pieces[:_SLOTS]]
    rising: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()

    def raise_oldest() -> None:
        piece, host, handle = under_way.popleft()
        handle.wait()
        with torch.cuda.stream(up):
            piece.copy_(host[: piece.numel()], non_blocking=True)
            event = torch.cuda.Event()
            event.record(up)
        rising.append((event, host))

    for piece in pieces:
        if not free:
            event, host = rising.popleft()
            event.synchronize()
            free.append(host)
        host = free.pop()
        with torch.cuda.stream(down):
            host[: piece.numel()].copy_(piece, non_blocking=True)
        # The reduction of the piece before goes on during this wait.
        down.synchronize()
        under_way.append((piece, host, begin(host[: piece.numel()])))
        if len(under_way) > 1:
            raise_oldest()
    while under_way:
        raise_oldest()
    current.wait_stream(up)
    # Pinned buffers may be given to others as soon as they are dropped, so the last copies have to be done.
    up.synchronize()

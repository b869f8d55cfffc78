"""What needs one process only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from unittest import mock

import pytest


def test_the_package_does_not_import_torch(run_text: Callable) -> None:
    job = run_text("import sys, ringtrain; assert 'torch' not in sys.modules")
    assert job.returncode == 0, job.stderr


def test_a_missing_torch_is_named(run_text: Callable) -> None:
    job = run_text("import sys; sys.modules['torch'] = None; import ringtrain.torch")
    assert "ImportError: ringtrain.torch needs PyTorch 2.8 or later" in job.stderr, job.stderr


class Stream:
    """What `torch.cuda.Stream` and `Event` are without a GPU: everything has been done already."""

    def __init__(self, *_: object) -> None: ...

    def wait_stream(self, *_: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...


@pytest.mark.parametrize("count", [0, 1, 10, 11, 57])
def test_a_tensor_on_a_gpu_is_reduced_piece_by_piece(count: int) -> None:
    """The order of copies and reductions, on host memory: every piece comes down, is reduced once, and goes up."""
    import torch

    from ringtrain.torch import cuda

    begun: list[int] = []

    class Doubling:
        def __init__(self, host: torch.Tensor) -> None:
            begun.append(host.numel())
            self._host = host

        def wait(self) -> None:
            self._host.mul_(2)

    plain_empty_like = torch.empty_like
    with contextlib.ExitStack() as patches:
        for target, name, value in [
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "current_stream", Stream),
            (torch.cuda, "Stream", Stream),
            (torch.cuda, "Event", Stream),
            (torch.cuda, "stream", lambda _: contextlib.nullcontext()),
            (torch, "empty_like", lambda like, **_: plain_empty_like(like)),
            (cuda, "PIECE_BYTES", 40),
        ]:
            patches.enter_context(mock.patch.object(target, name, value))
        numbers = torch.arange(count, dtype=torch.float32)
        cuda.all_reduce(numbers, Doubling)
    assert torch.equal(numbers, 2 * torch.arange(count, dtype=torch.float32))
    assert sum(begun) == count and max(begun, default=0) <= 10

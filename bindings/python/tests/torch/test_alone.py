"""Tests of `ringtrain.torch` that need only one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest


def test_the_package_does_not_import_torch(run_python_text: Callable) -> None:
    job = run_python_text("import sys, ringtrain; assert 'torch' not in sys.modules")
    assert job.returncode == 0, job.stderr


def test_the_import_error_says_that_torch_is_missing(run_python_text: Callable) -> None:
    job = run_python_text("import sys; sys.modules['torch'] = None; import ringtrain.torch")
    assert "ImportError: ringtrain.torch needs PyTorch 2.8 or later" in job.stderr, job.stderr


class FakeStream:
    """Takes the place of `torch.cuda.Stream` and `torch.cuda.Event` where there is no GPU. Operations on a `FakeStream` are
    complete at once."""

    def __init__(self, *_: object) -> None: ...

    def wait_stream(self, *_: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...


@pytest.mark.parametrize("count", [0, 1, 10, 11, 57])
def test_a_tensor_on_a_gpu_is_reduced_piece_by_piece(count: int) -> None:
    """Every piece is copied to the host, reduced once and copied back. The test needs no GPU: its "GPU tensor" is in host
    memory."""
    import torch

    from ringtrain.torch import cuda

    piece_sizes: list[int] = []

    class DoublingHandle:
        def __init__(self, host: torch.Tensor) -> None:
            piece_sizes.append(host.numel())
            self._host = host

        def wait(self) -> None:
            self._host.mul_(2)

    plain_empty_like = torch.empty_like
    with contextlib.ExitStack() as patches:
        for target, name, value in [
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "current_stream", FakeStream),
            (torch.cuda, "Stream", FakeStream),
            (torch.cuda, "Event", FakeStream),
            (torch.cuda, "stream", lambda _: contextlib.nullcontext()),
            (torch, "empty_like", lambda like, **_: plain_empty_like(like)),
            (cuda, "PIECE_BYTES", 40),
        ]:
            patches.enter_context(mock.patch.object(target, name, value))
        numbers = torch.arange(count, dtype=torch.float32)
        cuda.all_reduce_on_gpu(numbers, DoublingHandle)
    assert torch.equal(numbers, 2 * torch.arange(count, dtype=torch.float32))
    assert sum(piece_sizes) == count and max(piece_sizes, default=0) <= 10


ACCELERATE = """
import torch.distributed as dist

class PartialState:
    def __init__(self, cpu=False, **kwargs):
        original_backend = kwargs.pop("backend", None)
        backend, distributed_type = self._prepare_backend(cpu, False, original_backend)
        if original_backend is not None and backend != original_backend:
            raise ValueError(f"Your assigned backend {original_backend} is not available, please use {backend}")
        self.backend = backend

    def _prepare_backend(self, cpu=False, sagemaker_dp=False, backend=None):
        if cpu:
            backend = "mpi" if backend in (None, "mpi") and dist.is_mpi_available() else "gloo"
        return backend, "MULTI_CPU"
"""


@pytest.mark.parametrize("imports", ["accelerate.state, ringtrain.torch", "ringtrain.torch, accelerate.state"])
@pytest.mark.full
def test_accelerate_accepts_the_backend_on_a_cpu(run_python_text: Callable, tmp_path: Path, imports: str) -> None:
    """Without ringtrain, accelerate 1.15 chooses "gloo" and refuses "ring". The package `accelerate` that this test writes
    chooses in the same way."""
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "__init__.py").touch()
    (tmp_path / "accelerate" / "state.py").write_text(ACCELERATE)
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import {imports}
State = accelerate.state.PartialState
print(State(cpu=True, backend="ring").backend, State(cpu=True).backend, State(backend="ring").backend)
State(cpu=True, backend="nccl")
"""
    job = run_python_text(program)
    assert job.stdout.split() == ["ring", "gloo", "ring"], job.stderr
    assert "assigned backend nccl is not available" in job.stderr, job.stderr

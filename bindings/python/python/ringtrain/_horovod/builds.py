"""Horovod's functions that say how it was built, for programs that ask. ringtrain has its own transports."""

from __future__ import annotations


def mpi_built() -> bool:
    """Returns False: ringtrain does not use MPI."""
    return False


def mpi_enabled() -> bool:
    """Returns False: ringtrain does not use MPI."""
    return False


def mpi_threads_supported() -> bool:
    """Returns False: ringtrain does not use MPI."""
    return False


def gloo_built() -> bool:
    """Returns False: ringtrain does not use Gloo."""
    return False


def gloo_enabled() -> bool:
    """Returns False: ringtrain does not use Gloo."""
    return False


def nccl_built() -> int:
    """Returns 0: ringtrain does not use NCCL."""
    return 0


def ddl_built() -> bool:
    """Returns False: ringtrain does not use DDL."""
    return False


def ccl_built() -> bool:
    """Returns False: ringtrain does not use oneCCL."""
    return False


def cuda_built() -> bool:
    """Returns False: ringtrain sends data from the memory of the host."""
    return False


def rocm_built() -> bool:
    """Returns False: ringtrain sends data from the memory of the host."""
    return False


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Raises NotImplementedError."""
    raise NotImplementedError("start_timeline is not implemented; set the environment variable RING_TIMELINE=FILE")


def stop_timeline() -> None:
    """Raises NotImplementedError."""
    raise NotImplementedError("stop_timeline is not implemented; set the environment variable RING_TIMELINE=FILE")

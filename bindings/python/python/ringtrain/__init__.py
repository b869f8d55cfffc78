"""Distributed training over plain TCP and shared memory: collectives on numpy arrays.

>>> import numpy as np
>>> import ringtrain as ring
>>> world = ring.init()  # one of N ranks under `ringrun -n N python ...`, otherwise the only rank of its job
>>> float(ring.all_reduce(np.float32(1.0))) == ring.size()
True

`ringtrain.mpi` has the interface of mpi4py. `ringtrain.torch` is a backend of torch.distributed and has the interface
of Horovod. `ringtrain.run` starts ranks from a notebook. `ringtrain.load_model` reads a model that the program
`ringtrain` has trained.
"""

from typing import Any

from . import _core, _world
from ._core import Compressor
from ._errors import (
    Aborted,
    Error,
    Forked,
    InvalidArgument,
    JobFailed,
    Misbehaved,
    Mismatch,
    ModelFileError,
    PeerLeft,
    PeerLost,
    StartError,
    StillRunning,
    Timeout,
    Truncated,
    Unsupported,
)
from .average import PeriodicAverage
from .gossip import AverageCounts, Gossip
from .group import Group, Status
from .handles import Handle, wait_all, wait_any
from .launch import RunError, run
from .model import Model, load_model
from .parameter_server import ParameterServer, PushResult, Staleness

__version__ = "0.1.0"

__all__ = [
    "Aborted",
    "AverageCounts",
    "Compressor",
    "Error",
    "Forked",
    "Gossip",
    "Group",
    "Handle",
    "InvalidArgument",
    "JobFailed",
    "Misbehaved",
    "Mismatch",
    "Model",
    "ModelFileError",
    "ParameterServer",
    "PeerLeft",
    "PeerLost",
    "PeriodicAverage",
    "PushResult",
    "RunError",
    "Staleness",
    "StartError",
    "Status",
    "StillRunning",
    "Timeout",
    "Truncated",
    "Unsupported",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "rank",
    "run",
    "shutdown",
    "size",
    "solo",
    "wait_all",
    "wait_any",
    "world",
]


def init(
    *,
    rank: int | None = None,
    peers: str | None = None,
    secret: str | None = None,
    start_timeout: float | None = None,
    timeout: float | None = None,
    algorithm: str | None = None,
    transport: str | None = None,
    congestion: str | None = None,
    streams: str | None = None,
    check_payloads: bool | None = None,
) -> Group:
    """Joins the job for which `ringrun` started this process, and returns the group of all its ranks. If `ringrun`
    did not start this process and you do not pass `peers`, the process is the only rank of its job. A second call of
    `init` without options returns the same group.

    To start the ranks without `ringrun`, pass `peers`, `rank` and `secret`. `peers` is the path of a file with one
    `host:port` for each rank. `rank` is the number of this process's line in the file `peers`, from 0. `secret` is a
    password that all ranks share; you can set the variable RING_SECRET instead.

    `start_timeout` is the time in seconds within which all ranks must join. `timeout` is the time in seconds that one
    operation may take; the default is 60, and `math.inf` means no limit.

    `algorithm`, `transport` ("auto", "tcp" or "shm") and `streams` mean the same as `--algorithm`, `--transport` and
    `--streams` of `ringbench`. If `check_payloads` is True, all links add a checksum (CRC32C) to each message. If
    `check_payloads` is False, no link adds checksums. By default, only links between hosts add checksums. The values
    that rank 0 passes for `algorithm`, `transport`, `streams` and `check_payloads` apply to all ranks. `congestion`
    means the same as `--tcp-congestion` of `ringbench` and applies to this rank only.

    Raises `StartError` if the ranks cannot connect. The error names the missing ranks, or the rank that failed and
    the reason.
    """
    options = {
        "rank": rank,
        "peers": peers,
        "secret": secret,
        "start_timeout": start_timeout,
        "timeout": timeout,
        "algorithm": algorithm,
        "transport": transport,
        "congestion": congestion,
        "streams": streams,
        "check_payloads": check_payloads,
    }
    return _world.join_world(**{name: value for name, value in options.items() if value is not None})


def shutdown() -> None:
    """Leaves the job. Does nothing if this process has not joined a job. A program that ends without a call of
    `shutdown` also leaves the job.
    """
    _world.leave_world()


def is_initialized() -> bool:
    """Returns whether this process has joined its job and has not left the job."""
    return _world.is_joined()


def world() -> Group:
    """Returns the group of all ranks of the job. Raises `Error` if this process has not joined a job."""
    return _world.current_world()


def solo() -> Group:
    """Returns a group whose only rank is this process."""
    return Group(_core.solo())


def rank() -> int:
    """Returns this process's rank in the job."""
    return _world.current_world().rank


def size() -> int:
    """Returns the number of ranks in the job."""
    return _world.current_world().size


def local_rank() -> int:
    """Returns the number of this process among the ranks of the job on this host, counted from 0."""
    return _world.current_world().local_rank


def local_size() -> int:
    """Returns the number of ranks of the job on this host."""
    return _world.current_world().local_size


_WORLD_OPERATIONS = (
    "all_gather",
    "all_gather_async",
    "all_gather_list",
    "all_gather_object",
    "all_reduce",
    "all_reduce_async",
    "all_to_all",
    "all_to_all_async",
    "all_to_all_object",
    "alloc",
    "abort",
    "barrier",
    "barrier_async",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "duplicate",
    "exscan",
    "exscan_async",
    "gather",
    "gather_async",
    "gather_object",
    "probe",
    "receive",
    "receive_async",
    "receive_object",
    "receive_object_async",
    "reduce",
    "reduce_async",
    "reduce_scatter",
    "reduce_scatter_async",
    "scan",
    "scan_async",
    "scatter",
    "scatter_async",
    "scatter_object",
    "send",
    "send_async",
    "send_object",
    "send_object_async",
    "send_receive",
    "split",
    "statistics",
    "subgroup",
)
__all__ += list(_WORLD_OPERATIONS)


def __getattr__(name: str) -> Any:
    """Makes `ringtrain.NAME(..)` call `ringtrain.world().NAME(..)` if NAME is in `_WORLD_OPERATIONS`, for example
    `all_reduce`.
    """
    if name not in _WORLD_OPERATIONS:
        raise AttributeError(f"module 'ringtrain' has no attribute {name!r}")

    def call_on_world(*args: Any, **kwargs: Any) -> Any:
        return getattr(_world.current_world(), name)(*args, **kwargs)

    call_on_world.__name__ = call_on_world.__qualname__ = name
    call_on_world.__doc__ = getattr(Group, name).__doc__
    globals()[name] = call_on_world
    return call_on_world

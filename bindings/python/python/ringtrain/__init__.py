"""Distributed training over plain TCP and shared memory: collectives on numpy arrays.

>>> import numpy as np
>>> import ringtrain as ring
>>> world = ring.init()  # one of n ranks under `ringrun -n N python ...`, else the only rank
>>> float(ring.all_reduce(np.float32(1.0))) == ring.size()
True

`ringtrain.mpi` has the interface of mpi4py. `ringtrain.torch` is a backend of torch.distributed and has the interface of Horovod.
`ringtrain.run` starts ranks from a notebook.
"""

from typing import Any

from . import _core, _world
from ._errors import (
    Aborted,
    Error,
    Forked,
    InvalidArgument,
    JobFailed,
    Misbehaved,
    Mismatch,
    PeerLeft,
    PeerLost,
    StartError,
    StillRunning,
    Timeout,
    Truncated,
    Unsupported,
)
from .group import Group, Status
from .handles import Handle, wait_all, wait_any
from .launch import RunError, run

__version__ = "0.1.0"

__all__ = [
    "Aborted",
    "Error",
    "Forked",
    "Group",
    "Handle",
    "InvalidArgument",
    "JobFailed",
    "Misbehaved",
    "Mismatch",
    "PeerLeft",
    "PeerLost",
    "RunError",
    "StartError",
    "Status",
    "StillRunning",
    "Timeout",
    "Truncated",
    "Unsupported",
    "init",
    "is_initialized",
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
    """Joins the job that `ringrun` started this process for, and returns the group of all its ranks. A process that no launcher
    started is the only rank of its job. Calling it again without options returns the same group.

    Without `ringrun`: `peers` is the path of a file with every rank's `host:port`, `rank` is this process's line in it, from 0,
    and `secret` is a password that all ranks share (or set the variable RING_SECRET).

    `start_timeout` is the time in seconds for all ranks to join, `timeout` the time for one operation (60, or `math.inf`).
    `algorithm`, `transport` ("auto", "tcp", "shm"), `congestion` and `streams` have the meaning of the flags of `ringbench`; rank
    0's values count. `check_payloads` adds a CRC32C to each message between ranks: True on all links, False on none. By default,
    links between hosts have it.

    Raises `StartError`, which names the missing ranks, or what is wrong and on which rank.
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
    return _world.join(**{name: value for name, value in options.items() if value is not None})


def shutdown() -> None:
    """Leaves the job. Does nothing if this process has not joined one. It also happens when the program ends."""
    _world.leave()


def is_initialized() -> bool:
    """Whether this process has joined its job and has not left it."""
    return _world.is_joined()


def world() -> Group:
    """The group of all ranks of the job."""
    return _world.current()


def solo() -> Group:
    """Returns a group of only this process."""
    return Group(_core.solo())


def rank() -> int:
    """This process's rank in the job."""
    return _world.current().rank


def size() -> int:
    """How many ranks the job has."""
    return _world.current().size


def local_rank() -> int:
    """The number of this process among the ranks of its host."""
    return _world.current().local_rank


def local_size() -> int:
    """How many ranks this host has."""
    return _world.current().local_size


_OF_THE_WORLD = (
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
__all__ += list(_OF_THE_WORLD)


def __getattr__(name: str) -> Any:
    """`ringtrain.all_reduce(x)` is `ringtrain.world().all_reduce(x)`; the same holds for every operation of a group."""
    if name not in _OF_THE_WORLD:
        raise AttributeError(f"module 'ringtrain' has no attribute {name!r}")

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(_world.current(), name)(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = getattr(Group, name).__doc__
    globals()[name] = call
    return call

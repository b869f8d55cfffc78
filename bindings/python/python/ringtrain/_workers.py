"""Runs ranks in processes that another engine has started, for example the workers of Ray and Dask. Rank 0 serves the
rendezvous, and every rank gets the environment variables with which `ringrun` describes a job."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from . import _core, _task, _world
from ._errors import Error, InvalidArgument

# The rendezvous server of the job whose rank 0 is this process.
_server: _core.Rendezvous | None = None


def pickle_task(func: Callable[..., Any], np: int, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bytes:
    """Returns the function and its arguments as bytes for `run_rank`. Checks the number of ranks."""
    if np < 1:
        raise InvalidArgument(f"cannot start {np} ranks; np must be at least 1")
    return cloudpickle.dumps((func, tuple(args), dict(kwargs or {})))


def serve_rendezvous(size: int, host: str, start_timeout: float) -> dict[str, str]:
    """Serves the rendezvous of a new job in this process, which will be rank 0. `host` is an IP address of this host that all
    ranks can reach. Returns the variables that are the same for all ranks."""
    global _server
    secret, job_id = secrets.token_hex(32), secrets.token_hex(16)
    _server = _core.Rendezvous(size, secret, job_id, host, start_timeout)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        torch_port = probe.getsockname()[1]
    return {
        "RING_RENDEZVOUS": _server.address,
        "RING_SECRET": secret,
        "RING_JOB_ID": job_id,
        "RING_START_TIMEOUT_MS": str(int(start_timeout * 1000)),
        "RING_WORLD_SIZE": str(size),
        "WORLD_SIZE": str(size),
        # For torch.distributed.
        "MASTER_ADDR": host,
        "MASTER_PORT": str(torch_port),
    }


def rank_variables(shared: Mapping[str, str], rank: int, hosts: Sequence[str]) -> dict[str, str]:
    """Returns all variables of a rank. `shared` is the result of `serve_rendezvous`, and `hosts` has the host of each rank."""
    ranks_of_host = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    own = {"RANK": rank, "LOCAL_RANK": ranks_of_host.index(rank), "LOCAL_WORLD_SIZE": len(ranks_of_host)}
    own |= {f"RING_{name}": value for name, value in own.items()}
    return {**shared, **{name: str(value) for name, value in own.items()}}


def run_rank(task: bytes, variables: Mapping[str, str]) -> bytes:
    """Calls the function of a task as a rank of a job. Returns the pickled `_task.Outcome`. The process may run ranks of other
    jobs later: at the end, it has left the job, and its environment is as before."""
    global _server
    if _world.is_joined() or "RING_RANK" in os.environ:
        raise Error("this process is already a rank of a job; give each rank a process of its own")
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        data, error = _task.call_task(task)
        if error is not None:
            _task.end_job_because_of(error)
        _world.leave_world()
    finally:
        _server = None
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    return data

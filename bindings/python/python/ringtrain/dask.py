"""Runs the ranks of a job on workers of Dask: `ringtrain.dask.run(client, train, 4)`."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from distributed import Client, TimeoutError, as_completed

from . import _workers
from ._task import Outcome
from .launch import RunError, raise_first_failure


def run(
    client: Client,
    func: Callable[..., Any],
    np: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    start_timeout: float = 60.0,
    timeout: float | None = None,
) -> list[Any]:
    """Calls `func(*args, **kwargs)` on `np` workers of the cluster, as the ranks of a new job. Returns the results of these calls
    in rank order. The function must call `ringtrain.init()` before it communicates.

    Each rank needs a worker process of its own: start the workers with `--nworkers`, and a `LocalCluster` with `n_workers` and
    `processes=True`. All ranks must run at the same time, so each worker needs a free thread. `start_timeout` is the limit in
    seconds for `np` workers to appear, and then again for joining the job. `timeout` is the limit for the calls.

    Raises `RunError`, which names the rank that failed first and has its traceback.
    """
    task = _workers.pickle_task(func, np, args, kwargs)
    try:
        client.wait_for_workers(np, timeout=start_timeout)
    except TimeoutError as error:
        raise RunError(f"the cluster did not have {np} workers within {start_timeout:g} s; start more, or fewer ranks") from error
    # Ranks of one host have consecutive numbers.
    workers = sorted(client.scheduler_info(n_workers=-1)["workers"], key=_host)[:np]
    hosts = [_host(worker) for worker in workers]
    shared = client.submit(
        _workers.serve_rendezvous,
        np,
        hosts[0],
        start_timeout,
        workers=workers[:1],
        allow_other_workers=False,
        pure=False,
        retries=0,
    ).result(start_timeout)
    calls = {}
    for rank, worker in enumerate(workers):
        variables = _workers.rank_variables(shared, rank, hosts)
        call = client.submit(
            _workers.run_rank, task, variables, workers=[worker], allow_other_workers=False, pure=False, retries=0, priority=1
        )
        calls[call] = rank
    outcomes: dict[int, Outcome] = {}
    try:
        for call in as_completed(calls, timeout=timeout):
            rank = calls[call]
            error = call.exception()
            if error is not None:
                raise_first_failure(outcomes)
                failed = RunError(f"the worker of rank {rank} was lost: {error}")
                failed.rank = rank
                raise failed from error
            outcomes[rank] = pickle.loads(call.result())
    except TimeoutError as error:
        raise_first_failure(outcomes)
        missing = [rank for rank in range(np) if rank not in outcomes]
        raise RunError(f"ranks {', '.join(map(str, missing))} did not end within {timeout:g} s") from error
    finally:
        client.cancel(list(calls))
    raise_first_failure(outcomes)
    return [outcomes[rank][1] for rank in range(np)]


def _host(worker: str) -> str:
    """Returns the host in a worker's address, for example `tcp://10.0.0.7:4711`."""
    return urlsplit(worker).hostname or "127.0.0.1"

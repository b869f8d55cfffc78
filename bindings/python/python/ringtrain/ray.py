"""Runs the ranks of a job as actors of Ray: `ringtrain.ray.run(train, 4)`."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from . import _workers
from ._task import Outcome
from .launch import RunError, raise_first_failure


class RankActor:
    """The process of one rank."""

    def host(self) -> str:
        return ray.util.get_node_ip_address()

    def serve_rendezvous(self, size: int, start_timeout: float) -> dict[str, str]:
        return _workers.serve_rendezvous(size, self.host(), start_timeout)

    def run(self, task: bytes, variables: dict[str, str]) -> bytes:
        return _workers.run_rank(task, variables)


def run(
    func: Callable[..., Any],
    np: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    resources: Mapping[str, float] | None = None,
    strategy: str = "PACK",
    start_timeout: float = 60.0,
    timeout: float | None = None,
) -> list[Any]:
    """Starts `np` actors in a placement group and calls `func(*args, **kwargs)` in each of them. Returns the results of these
    calls in rank order. The function must call `ringtrain.init()` before it communicates.

    `resources` are the resources of one rank, by default one CPU, and `strategy` is that of the placement group: PACK, SPREAD,
    STRICT_PACK or STRICT_SPREAD. `start_timeout` is the limit in seconds for reserving the resources, and then again for joining
    the job. `timeout` is the limit for the calls.

    Raises `RunError`, which names the rank that failed first and has its traceback. All actors have ended when the call returns.
    """
    task = _workers.pickle_task(func, np, args, kwargs)
    resources = dict(resources or {"CPU": 1})
    if not ray.is_initialized():
        ray.init()
    group = ray.util.placement_group([resources] * np, strategy=strategy)
    actors: list[Any] = []
    try:
        if not group.wait(start_timeout):
            raise RunError(
                f"Ray could not reserve {np} times {resources} within {start_timeout:g} s; ask for fewer ranks or resources"
            )
        for bundle in range(np):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            actors.append(_actor_class(resources).options(scheduling_strategy=place).remote())
        hosts = ray.get([actor.host.remote() for actor in actors], timeout=start_timeout)
        # Ranks of one host have consecutive numbers.
        order = sorted(range(np), key=lambda bundle: hosts.index(hosts[bundle]))
        actors, hosts = [actors[bundle] for bundle in order], [hosts[bundle] for bundle in order]
        shared = ray.get(actors[0].serve_rendezvous.remote(np, start_timeout), timeout=start_timeout)
        calls = [actor.run.remote(task, _workers.rank_variables(shared, rank, hosts)) for rank, actor in enumerate(actors)]
        return _wait_for_results(calls, timeout)
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.util.remove_placement_group(group)


def _actor_class(resources: Mapping[str, float]) -> Any:
    others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    return ray.remote(num_cpus=resources.get("CPU", 0), num_gpus=resources.get("GPU", 0), resources=others)(RankActor)


def _wait_for_results(calls: list[Any], timeout: float | None) -> list[Any]:
    """Returns the results of the ranks. If a rank fails, the other ranks fail soon, because its job has ended."""
    deadline = None if timeout is None else time.monotonic() + timeout
    outcomes: dict[int, Outcome] = {}
    pending = dict(zip(calls, range(len(calls)), strict=True))
    while pending:
        limit = None if deadline is None else max(0.0, deadline - time.monotonic())
        done, _ = ray.wait(list(pending), timeout=limit)
        if not done:
            raise_first_failure(outcomes)
            raise RunError(f"ranks {', '.join(map(str, pending.values()))} did not end within {timeout:g} s")
        for call in done:
            rank = pending.pop(call)
            try:
                outcomes[rank] = pickle.loads(ray.get(call))
            except ray.exceptions.RayError as error:
                raise_first_failure(outcomes)
                failed = RunError(f"the actor of rank {rank} was lost: {error}")
                failed.rank = rank
                raise failed from error
    raise_first_failure(outcomes)
    return [outcomes[rank][1] for rank in range(len(calls))]

"""Horovod's functions that start and end a job: `import ringtrain.torch as hvd` runs a Horovod script."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Sequence

import torch.distributed as dist

from ringtrain import _core, _world
from ringtrain.torch import buckets, process_sets, rendezvous
from ringtrain.torch.backend import ring_group
from ringtrain.torch.process_sets import ProcessSet, world

_TIMEOUT_SECONDS = 1800.0  # The default of torch.distributed.


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Joins the first job in this list that exists. Does nothing if this process has already joined a job.

    1. The job of torch.distributed's default group, if this group has the backend "ring".
    2. The job for which ringrun, torchrun or another launcher such as srun started this process.
    3. A new job of one rank.

    Then adds the process sets. Sets can also be added later, with and without Horovod's value "dynamic".
    """
    if comm is not None and list(comm):
        raise NotImplementedError("init(comm) is not implemented; pass process_sets, or start fewer ranks")
    if is_initialized():
        return
    _open_job(_join_job(), () if process_sets is None or process_sets == "dynamic" else process_sets)


def _join_job() -> _core.Group:
    if dist.is_initialized() and dist.get_backend() == "ring":
        return ring_group().core.duplicate()
    if _world.is_joined() or "RING_RANK" in os.environ:
        return rendezvous.join_job_of_launcher(_TIMEOUT_SECONDS)
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        store, env_rank, env_size = next(iter(dist.rendezvous("env://")))
        member = rendezvous.Membership(env_rank, env_size, _TIMEOUT_SECONDS, started_by_ringrun=False)
        return rendezvous.join_through_store(dist.PrefixStore("ringtrain.torch", store), member)
    return rendezvous.join_job_of_launcher(_TIMEOUT_SECONDS)


def _open_job(group: _core.Group, sets: Sequence[ProcessSet]) -> None:
    process_sets.open_global_set(group)
    for process_set in sets:
        process_sets.add_process_set(process_set)


def shutdown() -> None:
    """Leaves the job. Waits at most 30 seconds until the other ranks have called `shutdown` or ended, and then ends the job."""
    process_sets.close_all_sets()


def is_initialized() -> bool:
    """Returns whether this process has called `init` and has not called `shutdown` since."""
    return bool(process_sets.sets_of_this_rank())


def rank() -> int:
    """Returns this process's rank."""
    return world().rank


def size() -> int:
    """Returns the number of ranks."""
    return world().size


def local_rank() -> int:
    """Returns this process's rank among the ranks on its host."""
    return world().local_rank


def local_size() -> int:
    """Returns the number of ranks on this host."""
    return world().local_size


def join(device: int = -1) -> int:
    """Declares that this rank has no more data, and waits until all ranks have called `join`. Returns the rank that called it
    last. The argument `device` has no effect.

    Until then, this rank contributes zeros to sums and averages of the other ranks, and to the gradients of each
    `DistributedOptimizer`. An average still divides by the number of all ranks. Other operations, which need data of this
    rank, raise `ringtrain.Error` on the other ranks. After `join`, the gradients that a `DistributedOptimizer` has averaged are
    zero or None.
    """
    world()
    if buckets.open_reducers():
        # An optimizer that the program no longer uses may still exist on some ranks, and no longer on others.
        gc.collect()
    reducers = buckets.open_reducers()
    handles = [members.begin_join() for members in process_sets.sets_of_this_rank()]
    errors: list[BaseException] = []

    def contribute_zeros(reducer: buckets.GradientReducer) -> None:
        try:
            reducer.contribute_zeros()
        except Exception as error:  # raised below
            errors.append(error)

    threads = [threading.Thread(target=contribute_zeros, args=(reducer,), daemon=True) for reducer in reducers]
    for thread in threads:
        thread.start()
    last_joined = [handle.wait() for handle in handles][0]
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return last_joined

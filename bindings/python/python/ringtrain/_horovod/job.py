"""Horovod's functions that start and end a job."""

from __future__ import annotations

import gc
import struct
import threading
from collections.abc import Callable, Sequence

from ringtrain import _core, _world
from ringtrain._horovod import process_sets as sets
from ringtrain._horovod import registry
from ringtrain._horovod.process_sets import ProcessSet, world

TIMEOUT_SECONDS = 1800.0
"""The limit for one operation: the default of torch.distributed."""

# The local rank and the local size of each rank.
_places: list[tuple[int, ...]] = []


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Joins the job for which ringrun or another launcher, such as srun, started this process. Without a launcher, makes a job of
    one rank. Does nothing if this process has already joined a job.

    Then adds the process sets. Sets can also be added later, with and without Horovod's value "dynamic".
    """
    init_with(lambda: join_job_of_launcher(TIMEOUT_SECONDS), comm, process_sets)


def init_with(
    join_job: Callable[[], _core.Group], comm: Sequence[int] | None, process_sets: Sequence[ProcessSet] | str | None
) -> None:
    """Does what `init` does. `join_job` joins the job and returns a group that only this module uses."""
    # An empty list of ranks stands for all ranks. A communicator of MPI is not a list.
    if comm is not None and comm != []:
        raise NotImplementedError("init(comm) is not implemented; pass process_sets, or start fewer ranks")
    if is_initialized():
        return
    group = join_job()
    sets.open_global_set(group)
    gathered = group.all_gather_bytes(struct.pack("<II", group.local_rank, group.local_size))
    _places[:] = [struct.unpack("<II", place) for place in gathered]
    for process_set in () if process_sets is None or process_sets == "dynamic" else process_sets:
        sets.add_process_set(process_set)


def join_job_of_launcher(timeout: float) -> _core.Group:
    """Returns a new group of all ranks of the job for which ringrun or another launcher started this process. The operations of
    this group are independent of those of `ringtrain.world()`."""
    world = _world.current_world() if _world.is_joined() else _world.join_world()
    group = world.core.duplicate()
    group.timeout = timeout
    return group


def shutdown() -> None:
    """Leaves the job. Waits at most 30 seconds until the other ranks have called `shutdown` or ended, and then ends the job."""
    sets.close_all_sets()


def is_initialized() -> bool:
    """Returns whether this process has called `init` and has not called `shutdown` since."""
    return bool(sets.sets_of_this_rank())


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


def cross_rank() -> int:
    """Returns the number of this host among the hosts that have a rank with this process's `local_rank`, counted from 0. The
    hosts are in the order of these ranks."""
    group = world()
    return sum(local == group.local_rank for local, _ in _places[: group.rank])


def cross_size() -> int:
    """Returns the number of hosts that have a rank with this process's `local_rank`."""
    local_rank = world().local_rank
    return sum(local == local_rank for local, _ in _places)


def is_homogeneous() -> bool:
    """Returns whether all hosts have the same number of ranks."""
    world()
    return len({size for _, size in _places}) == 1


def join(device: int = -1) -> int:
    """Declares that this rank has no more data, and waits until all ranks have called `join`. Returns the rank that called it
    last. The argument `device` has no effect.

    Until then, this rank contributes zeros to sums and averages of the other ranks, and to the gradients of each
    `DistributedOptimizer`. An average still divides by the number of all ranks. Other operations, which need data of this
    rank, raise `ringtrain.Error` on the other ranks. After `join`, the gradients that a `DistributedOptimizer` has averaged are
    zero or None.
    """
    world()
    if registry.open_reducers():
        # An optimizer that the program no longer uses may still exist on some ranks, and no longer on others.
        gc.collect()
    reducers = registry.open_reducers()
    handles = [members.begin_join() for members in sets.sets_of_this_rank()]
    errors: list[BaseException] = []

    def contribute_zeros(reducer: registry.Reducer) -> None:
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

"""Registers the backend "ring" with `torch.distributed`, and creates its process groups."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ringtrain import _core
from ringtrain._horovod import job
from ringtrain.torch import accelerate, rendezvous
from ringtrain.torch.process_group import RingProcessGroup

NAME = "ring"


def register() -> None:
    """Registers the backend. `import ringtrain.torch` calls this function. Versions of torch that search for installed backends
    also call this function."""
    accelerate.make_accelerate_accept(NAME)
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])


def create(options: Any, _backend_options: Any = None) -> RingProcessGroup:
    """Creates a process group. `torch.distributed` calls this function on each member of the new group."""
    # torch's flight recorder cannot attach to a process group that is written in Python.
    getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set()).add(NAME)
    rank, size, timeout = options.group_rank, options.group_size, options.timeout.total_seconds()
    is_world = not options.global_ranks_in_group
    started_by_ringrun = rendezvous.is_started_by_ringrun(rank, size) if is_world else _world_is_started_by_ringrun()
    if is_world and started_by_ringrun:
        group = job.join_job_of_launcher(timeout)
    else:
        group = rendezvous.join_through_store(options.store, rendezvous.Membership(rank, size, timeout, started_by_ringrun))
    return RingProcessGroup(group, options.global_ranks_in_group, started_by_ringrun)


def ring_group(group: dist.ProcessGroup | None = None) -> RingProcessGroup:
    """Returns `group`, or the default process group if `group` is None. Raises `ringtrain.InvalidArgument` if the backend of the
    returned group is not "ring"."""
    found = group or dist.distributed_c10d._get_default_group()
    if not isinstance(found, RingProcessGroup):
        raise _core.InvalidArgument(f'this function needs a process group with the backend "ring", not "{found.name()}"')
    return found


def _world_is_started_by_ringrun() -> bool:
    """Returns whether the default process group has the backend "ring" and all members of the group were started by one
    `ringrun`."""
    if not dist.is_initialized():
        return False
    return getattr(dist.distributed_c10d._get_default_group(), "started_by_ringrun", False)

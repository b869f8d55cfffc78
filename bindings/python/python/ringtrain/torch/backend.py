"""Registers the backend "ring" with `torch.distributed`, and makes its groups."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ringtrain import _core, _shutdown
from ringtrain.torch import meeting
from ringtrain.torch.process_group import RingProcessGroup

NAME = "ring"


def register() -> None:
    """Makes "ring" known to `torch.distributed`. `import ringtrain.torch` does it; torch itself does where it looks for installed
    backends."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])


def create(options: Any, _backend_options: Any = None) -> RingProcessGroup:
    """What `torch.distributed` calls on each member of a new group."""
    rank, size, timeout = options.group_rank, options.group_size, options.timeout.total_seconds()
    is_world = not options.global_ranks_in_group
    of_launcher = meeting.launched(rank, size) if is_world else _world_is_of_launcher()
    if is_world and of_launcher:
        group = meeting.join_launched(timeout)
    else:
        group = meeting.meet(options.store, meeting.Place(rank, size, timeout, of_launcher))
    made = RingProcessGroup(group, options.global_ranks_in_group, of_launcher)
    _shutdown.register(made)
    return made


def ring_group(group: dist.ProcessGroup | None = None) -> RingProcessGroup:
    """The ring group behind a process group, torch's world by default. Raises `ringtrain.InvalidArgument` if it is of another
    backend."""
    found = group or dist.distributed_c10d._get_default_group()
    if not isinstance(found, RingProcessGroup):
        raise _core.InvalidArgument(f'this needs a process group of the backend "ring", and got one of "{found.name()}"')
    return found


def _world_is_of_launcher() -> bool:
    """Whether torch's world is a ring group whose members were all started by one ringrun."""
    if not dist.is_initialized():
        return False
    return getattr(dist.distributed_c10d._get_default_group(), "of_launcher", False)

"""Horovod's process sets: sets of ranks that run operations among themselves."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence

from ringtrain import _core, _shutdown

# A rank that ends its program, or calls `shutdown`, waits for this number of seconds for the other ranks to do the same.
_CLOSE_SECONDS = 30.0


class Members:
    """The group of a process set on a rank of the set, and the named tensors of this group."""

    def __init__(self, group: _core.Group, ranks: Sequence[int]) -> None:
        self.group = group
        self.ranks = list(ranks)
        warning, abort = (os.environ.get(f"HOROVOD_STALL_{kind}_TIME_SECONDS") for kind in ("CHECK", "SHUTDOWN"))
        # With the value 0, Horovod never ends a job because of a stall.
        self.named = _core.NamedTensors(group, float(warning or 60), float(abort or 0) or None)
        self._counts: dict[str, Iterator[int]] = {}
        self._resources = _shutdown.GroupResource(group), _NamedResource(self.named)

    def tensor_name(self, kind: str, name: str | None) -> str:
        """Returns the name of a tensor for an operation of this kind. Without a name, the tensor gets a number, as in Horovod:
        the ranks must begin their operations without names in the same order."""
        if name is not None:
            full_name = f"{kind}.{name}"
            # The library accepts names of at most 256 bytes.
            short = len(full_name.encode()) <= 256
            return full_name if short else f"{full_name[:40]}...{hashlib.sha256(full_name.encode()).hexdigest()}"
        return f"{kind}.noname.{next(self._counts.setdefault(kind, itertools.count(1)))}"

    def begin_join(self) -> _core.Handle:
        """Declares that this rank has no more data. The ranks have begun different numbers of operations without names, so the
        numbers begin again at 1 on all ranks."""
        handle = self.named.join()
        self._counts.clear()
        return handle

    def rank_in_group(self, rank: int) -> int:
        """Converts a rank of the job to the rank in this set."""
        if rank not in self.ranks:
            raise _core.InvalidArgument(f"rank {rank} is not in the process set of the ranks {self.ranks}")
        return self.ranks.index(rank)

    def close(self) -> None:
        """Closes the named tensors, and leaves the group."""
        for resource in reversed(self._resources):
            resource.shutdown()


class _NamedResource:
    """Closes the named tensors of a set when the program ends."""

    def __init__(self, named: _core.NamedTensors) -> None:
        self._named = named
        _shutdown.register_resource(self)

    def fail(self, message: str) -> None:
        with contextlib.suppress(_core.Error):  # the job has ended already
            self._named.abort(message)

    def shutdown(self) -> None:
        with contextlib.suppress(_core.Error):  # the job has failed, and its operations have already raised the error
            try:
                self._named.close(_CLOSE_SECONDS)
            except _core.StillRunning:
                # The other ranks may wait for this rank in an operation that does not use named tensors.
                self.fail(f"this rank ended, and the other ranks still ran {_CLOSE_SECONDS:g} s later")
                self._named.close()


class ProcessSet:
    """A set of ranks. Pass a `ProcessSet` to `init` or `add_process_set`, and then as the argument `process_set` to operations,
    which only the ranks of the set call."""

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        """Raises NotImplementedError for a communicator of MPI."""
        if not isinstance(ranks_or_comm, Iterable):
            raise NotImplementedError(f"ProcessSet({ranks_or_comm!r}) is not implemented; pass a list of ranks")
        self.ranks: list[int] | None = sorted(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in self.ranks):
            raise ValueError("ProcessSet needs a list of ranks")
        self.process_set_id: int | None = None
        self._members: Members | None = None

    def size(self) -> int | None:
        """Returns the number of ranks, or `None` if the set has not been added."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Returns this process's rank in the set, or `None` if the set has not been added. Raises
        `ringtrain.InvalidArgument`, which is a `ValueError`, if this process is not in the set."""
        return None if self.process_set_id is None else self.members().group.rank

    def included(self) -> bool | None:
        """Returns whether this process is in the set, or `None` if the set has not been added."""
        return None if self.process_set_id is None else self._members is not None

    def members(self) -> Members:
        """Returns the group of this set. Raises `ringtrain.InvalidArgument` if the set has not been added, or if this process
        is not in the set."""
        if self._members is not None:
            return self._members
        if self is global_process_set:
            raise _core.Error("ringtrain has not been initialised for Horovod's functions; call init() first")
        if self.process_set_id is None:
            raise _core.InvalidArgument(f"{self} has not been added; pass it to init(process_sets=[...]) or add_process_set")
        raise _core.InvalidArgument(f"rank {world().rank} is not part of {self}; only its ranks may call its operations")

    def _open(self, process_set_id: int, members: Members | None) -> None:
        self.process_set_id, self._members = process_set_id, members
        _sets[process_set_id] = self

    def _close(self) -> None:
        members, self._members = self._members, None
        _sets.pop(self.process_set_id, None)
        if self is not global_process_set:
            self.process_set_id = None
        if members is not None:
            members.close()

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
"""The set of all ranks."""
global_process_set.process_set_id = 0

# The sets that have been added, by their number. The same sets have the same numbers on all ranks.
_sets: dict[int, ProcessSet] = {}


def open_global_set(group: _core.Group) -> None:
    """Creates the set of all ranks. All ranks call this function."""
    global_process_set.ranks = list(range(group.size))
    global_process_set._open(0, Members(group, global_process_set.ranks))


def close_all_sets() -> None:
    """Closes the process sets, in the reverse order of their creation."""
    for process_set in sorted(_sets.values(), key=lambda process_set: -process_set.process_set_id):
        process_set._close()


def world() -> _core.Group:
    """Returns the group of all ranks. Raises `ringtrain.Error` if `init` has not been called."""
    return global_process_set.members().group


def sets_of_this_rank() -> list[Members]:
    """Returns the groups of all sets that this process is in. The set of all ranks is the first."""
    return [members for _, process_set in sorted(_sets.items()) if (members := process_set._members) is not None]


def find_set(process_set_id: int) -> ProcessSet:
    """Returns the set with a number. Raises `ringtrain.InvalidArgument` if there is no such set."""
    world()
    if process_set_id not in _sets:
        raise _core.InvalidArgument(f"there is no process set {process_set_id}; the sets are {sorted(_sets)}")
    return _sets[process_set_id]


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Adds a process set, given as a `ProcessSet` or a list of ranks, and returns it. All ranks must call this function with the
    same ranks, also the ranks that are not in the set. Raises ValueError if a set of the same ranks exists."""
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    group, ranks = world(), process_set.ranks
    described = [data.decode() for data in group.all_gather_bytes(repr(ranks).encode())]
    for rank, other in enumerate(described):
        if other != described[0]:
            raise _core.InvalidArgument(f"rank 0 adds a process set of the ranks {described[0]}, and rank {rank} of {other}")
    if not ranks or ranks[0] < 0 or ranks[-1] >= group.size or len(set(ranks)) < len(ranks):
        raise _core.InvalidArgument(f"a process set has different ranks from 0 to {group.size - 1}, and not {ranks}")
    if any(other.ranks == ranks for other in _sets.values()):
        raise _core.InvalidArgument(f"a process set of the ranks {ranks} exists already")
    subgroup = group.subgroup(ranks)
    process_set._open(next(_ids), None if subgroup is None else Members(subgroup, ranks))
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set, and returns whether it existed. All ranks must call this function. The set of all ranks cannot be
    removed."""
    if process_set.process_set_id is None or process_set is global_process_set:
        return False
    process_set._close()
    return True


_ids = itertools.count(1)

"""`MPI.Comm` and `MPI.Intracomm`: processes that communicate with each other."""

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .. import _core
from . import constants as c
from .attributes import Attributes
from .collectives import Collectives
from .constant import by_name
from .errors import Exception, to_mpi_exception, unsupported
from .groups import Group
from .info import ERRHANDLER_NULL, ERRORS_RETURN, INFO_NULL, Errhandler, Info
from .members import form_group
from .objects import Objects
from .point_to_point import PointToPoint
from .requests import CompletedHandle, Request
from .runtime import GROUP_BEFORE_INIT, NULL_GROUP, runtime, with_mpi_timeout

if TYPE_CHECKING:
    from .cartesian import Cartcomm

_FATAL_CODE_MAX = 255


class State:
    """The state of a communicator that ringtrain's group does not have. All objects for the same communicator share this
    state."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.attributes: dict[int, Any] = {}
        self.errhandler: Errhandler = ERRORS_RETURN
        self.info = Info.Create()
        self.topology: Any = None
        self.neighbour_group: Any = None
        """A group of the same ranks for neighbour collectives, whose messages no receive of the program may match."""


class Comm(PointToPoint, Objects, Collectives, Attributes):
    """Processes that can send messages to each other. A null or freed communicator raises `Exception` of the class `ERR_COMM`."""

    def __new__(cls, comm: "Comm | None" = None) -> "Comm":
        if comm is not None and not isinstance(comm, Comm):
            raise TypeError(f"expecting a communicator, got {type(comm).__name__}")
        self = super().__new__(cls)
        self._group: Any = NULL_GROUP if comm is None else comm._group
        self._state: State = State() if comm is None else comm._state
        return self

    @classmethod
    def _of(cls, group: "_core.Group | None", state: State | None = None) -> "Comm":
        if group is None:
            return COMM_NULL
        self = cls.__new__(cls)
        self._group, self._state = with_mpi_timeout(group), state or State()
        return self

    def _form_group(self, method: str, *arguments: Any) -> Any:
        """Forms a new group with a method of ringtrain's group. All ranks must call the method."""
        try:
            return getattr(self._group, method)(*arguments)
        except _core.Error as error:
            raise to_mpi_exception(error) from error

    def __eq__(self, other: object) -> bool:
        return self._group is other._group if isinstance(other, Comm) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return self._group is not NULL_GROUP

    def __reduce__(self) -> str | tuple:
        for name, comm in (("COMM_WORLD", COMM_WORLD), ("COMM_SELF", COMM_SELF), ("COMM_NULL", COMM_NULL)):
            if self is comm:
                return name
            if self == comm:
                return by_name(name)
        raise ValueError(f"cannot serialize '{type(self).__module__}.{type(self).__name__}' instance")

    def Get_rank(self) -> int:
        """Returns the rank of this process."""
        return self._group.rank

    def Get_size(self) -> int:
        """Returns the number of processes."""
        return self._group.size

    rank = property(Get_rank)
    size = property(Get_size)

    def Get_group(self) -> Group:
        """Returns the group of the processes."""
        members = self._members()
        return Group._of(members, members[self._group.rank])

    group = property(Get_group)

    def _members(self) -> list[int]:
        """Returns the ranks of the processes in the job. ringtrain numbers the only rank of a group of one rank 0, so this
        method then returns the rank in the world instead."""
        group = self._group
        world = COMM_WORLD._group
        if group.size == 1 and world is not GROUP_BEFORE_INIT and isinstance(world, _core.Group):
            return [world.rank]
        return self._state.__dict__.get("members") or list(group.members)

    def Compare(self, comm: "Comm") -> int:
        """Returns `IDENT`, `CONGRUENT` (same processes in the same order), `SIMILAR` (same processes in another order) or
        `UNEQUAL`."""
        if self == comm and self:
            return c.IDENT
        compared = self.group.Compare(comm.group)
        return c.CONGRUENT if compared == c.IDENT else compared

    def Dup(self, info: Info | None = None) -> "Comm":
        """Returns a communicator of the same processes. Its messages are separate from the messages of this communicator. All
        ranks must call `Dup`."""
        copy = type(self)._of(self._form_group("duplicate"), State())
        copy._inherit(self, info)
        return copy

    def _inherit(self, other: "Comm", info: Info | None) -> None:
        state = self._state
        state.errhandler, state.topology = other._state.errhandler, other._state.topology
        state.info = Info.Create(info if info else other._state.info)
        if "members" in other._state.__dict__:
            state.members = other._state.members  # type: ignore[attr-defined]
        if other._state.neighbour_group is not None:
            state.neighbour_group = with_mpi_timeout(self._form_group("duplicate"))
        self._copy_attributes(other)

    Clone = Dup

    def Dup_with_info(self, info: Info) -> "Comm":
        """Does the same as `Dup`, with other hints."""
        return self.Dup(info)

    def Idup(self, info: Info | None = None) -> tuple["Comm", Request]:
        """Does the same as `Dup`. The returned request has already ended."""
        return self.Dup(info), Request._of(CompletedHandle())

    Idup_with_info = Idup

    def Create(self, group: Group) -> "Comm":
        """Returns a communicator of the processes of `group`, or `COMM_NULL` on other processes. All ranks must call `Create`,
        and all members of `group` must pass the same group."""
        members = self.group
        places = [members._valid().index(member) if member in members._valid() else -1 for member in group._valid()]
        if -1 in places:
            raise Exception(c.ERR_GROUP, "the group has processes that the communicator does not have")
        # Ranks may pass different groups that have no process in common. The lowest rank of a group identifies the group.
        if self._group.rank in places:
            return Intracomm._of(self._form_group("split", min(places), places.index(self._group.rank)))
        return Intracomm._of(self._form_group("split", None, 0))

    def Split(self, color: int = 0, key: int = 0) -> "Comm":
        """Returns a communicator of the processes with the same colour, in the order of `key`. Returns `COMM_NULL` for the
        colour `UNDEFINED`. All ranks must call `Split`."""
        color = index(color)
        if color == c.UNDEFINED:
            return Intracomm._of(self._form_group("split", None, 0))
        if color < 0:
            raise Exception(c.ERR_ARG, f"{color} is not a colour; a colour is at least 0")
        return Intracomm._of(self._form_group("split", color, index(key)))

    def Split_type(self, split_type: int, key: int = 0, info: Info = INFO_NULL) -> "Comm":
        """Returns a communicator of the processes on the same host if `split_type` is `COMM_TYPE_SHARED`, or `COMM_NULL` if it
        is `UNDEFINED`. All ranks must call `Split_type`."""
        if split_type not in (c.COMM_TYPE_SHARED, c.UNDEFINED):
            raise unsupported("MPI.Comm.Split_type of other types than COMM_TYPE_SHARED and UNDEFINED")
        hosts = self.allgather(_host())
        return self.Split(hosts.index(hosts[self._group.rank]) if split_type == c.COMM_TYPE_SHARED else c.UNDEFINED, key)

    def Free(self) -> None:
        """Closes the communicator. This object is null afterwards."""
        if self._group is COMM_WORLD._group or self._group is COMM_SELF._group:
            raise Exception(c.ERR_COMM, "COMM_WORLD and COMM_SELF cannot be freed")
        self._group.rank  # noqa: B018  (a null communicator raises here)
        self._delete_attributes()
        for group in (self._state.neighbour_group, self._group):
            if group is not None:
                with contextlib.suppress(_core.Error):
                    group.close()
        self._group = NULL_GROUP
        self._state = State()

    Disconnect = Free

    def free(self) -> None:
        """Calls `Free` if this is neither the null communicator nor `COMM_WORLD` nor `COMM_SELF`."""
        if self and self != COMM_WORLD and self != COMM_SELF:
            self.Free()

    def Abort(self, errorcode: int = 0) -> NoReturn:
        """Ends the whole job. Ends this process with the exit code `errorcode`, or 1 if `errorcode` is not from 0 to 255."""
        group = self._group
        with contextlib.suppress(_core.Error):
            runtime.abort(f"rank {group.rank} of {self._state.name or 'a communicator'} called MPI.Comm.Abort({errorcode})")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(errorcode if 0 <= errorcode <= _FATAL_CODE_MAX else 1)

    def Get_name(self) -> str:
        """Returns the name."""
        return self._state.name if self else "MPI_COMM_NULL"

    def Set_name(self, name: str) -> None:
        """Sets the name."""
        self._group.rank  # noqa: B018
        self._state.name = name

    name = property(Get_name, Set_name)

    def Get_info(self) -> Info:
        """Returns a copy of the hints."""
        self._group.rank  # noqa: B018
        return self._state.info.Dup()

    def Set_info(self, info: Info) -> None:
        """Adds hints, which have no effect."""
        self._group.rank  # noqa: B018
        if info:
            self._state.info.update(info)

    info = property(Get_info, Set_info)

    def Get_errhandler(self) -> Errhandler:
        """Returns the error handler. Errors raise exceptions with every error handler."""
        self._group.rank  # noqa: B018
        return Errhandler(self._state.errhandler)

    def Set_errhandler(self, errhandler: Errhandler) -> None:
        """Stores an error handler for `Get_errhandler`. Errors raise exceptions with every error handler."""
        self._group.rank  # noqa: B018
        if errhandler == ERRHANDLER_NULL:
            raise Exception(c.ERR_ARG)
        self._state.errhandler = Errhandler(errhandler)

    def Call_errhandler(self, errorcode: int) -> None:
        """Does nothing if the error handler is `ERRORS_RETURN`. Otherwise ends the job."""
        self._group.rank  # noqa: B018
        if self._state.errhandler != ERRORS_RETURN:
            self.Abort(errorcode)

    def Is_inter(self) -> bool:
        """Returns False, because intercommunicators are not supported."""
        self._group.rank  # noqa: B018
        return False

    def Is_intra(self) -> bool:
        """Returns True."""
        self._group.rank  # noqa: B018
        return True

    is_inter = property(Is_inter)
    is_intra = property(Is_intra)

    def Get_topology(self) -> int:
        """Returns `CART` or `UNDEFINED`."""
        self._group.rank  # noqa: B018
        return c.UNDEFINED if self._state.topology is None else c.CART

    topology = property(Get_topology)
    is_topo = property(lambda self: self.Get_topology() != c.UNDEFINED)

    @classmethod
    def Get_parent(cls) -> "Comm":
        """Returns `INTERCOMM_NULL`, because no process can be spawned."""
        from .placeholders import INTERCOMM_NULL

        return INTERCOMM_NULL

    def Attach_buffer(self, buf: object) -> None:
        """Stores `buf` for `Detach_buffer`. Buffered sends need no buffer."""
        self._state.__dict__["buffer"] = buf

    def Detach_buffer(self) -> object:
        """Returns the attached buffer, or None."""
        return self._state.__dict__.pop("buffer", None)

    def Flush_buffer(self) -> None:
        """Does nothing."""


class Intracomm(Comm):
    """The only supported kind of communicator, with or without a topology."""

    def Create_group(self, group: Group, tag: int = 0) -> "Intracomm":
        """Returns a communicator of the processes of `group`, or `COMM_NULL` on other processes. Only the members of `group`
        must call `Create_group`."""
        members = group._valid()
        own = self.group._own
        if own not in members:
            return COMM_NULL
        if not set(members) <= set(self.group._valid()):
            raise Exception(c.ERR_GROUP, "the group has processes that the communicator does not have")
        state = State()
        state.members = list(members)  # type: ignore[attr-defined]
        return Intracomm._of(form_group(runtime.control, members, own, tag), state)

    def Create_cart(self, dims: Sequence[int], periods: Sequence[bool] | None = None, reorder: bool = False) -> "Cartcomm":
        """Returns a communicator of the processes on a grid, in row-major order, or `COMM_NULL` on processes that do not fit on
        the grid. All ranks must call `Create_cart`."""
        from .cartesian import create_cart

        return create_cart(self, dims, periods)

    def Cart_map(self, dims: Sequence[int], periods: Sequence[bool] | None = None) -> int:
        """Returns the rank that `Create_cart` would give this process."""
        from .cartesian import cart_map

        return cart_map(self, dims)


def _host() -> str:
    """Returns a text that identifies this host: its name, its boot id, and the variable RING_HOST_ID."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{os.uname().nodename} {boot.read_text().strip() if boot.exists() else ''} {os.environ.get('RING_HOST_ID', '')}"


def each_world(use: Callable[["Intracomm"], None]) -> None:
    """Calls a function with `COMM_WORLD` and with `COMM_SELF`."""
    use(COMM_WORLD)
    use(COMM_SELF)


COMM_NULL = Comm()
COMM_WORLD = Intracomm()
COMM_SELF = Intracomm()
for _comm, _name in ((COMM_WORLD, "MPI_COMM_WORLD"), (COMM_SELF, "MPI_COMM_SELF")):
    _comm._group = GROUP_BEFORE_INIT
    _comm._state.name = _name

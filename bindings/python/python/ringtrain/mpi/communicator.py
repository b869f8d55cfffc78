"""`MPI.Comm` and `MPI.Intracomm`: who belongs together, and what they can do together."""

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
from .errors import Exception, translated, unsupported
from .groups import Group
from .info import ERRHANDLER_NULL, ERRORS_RETURN, INFO_NULL, Errhandler, Info
from .members import form_group
from .objects import Objects
from .point_to_point import PointToPoint
from .requests import Done, Request
from .runtime import BEFORE, NULL, prepared, runtime

if TYPE_CHECKING:
    from .cartesian import Cartcomm

_FATAL_CODE_MAX = 255


class State:
    """What belongs to a communicator and not to ringtrain's group: shared by all objects that stand for it."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.attributes: dict[int, Any] = {}
        self.errhandler: Errhandler = ERRORS_RETURN
        self.info = Info.Create()
        self.topology: Any = None
        self.beside: Any = None
        """A group of the same ranks, for messages that no receive of the program's may get."""


class Comm(PointToPoint, Objects, Collectives, Attributes):
    """Processes that can send each other messages. A null or freed one raises `Exception` of class `ERR_COMM`."""

    def __new__(cls, comm: "Comm | None" = None) -> "Comm":
        if comm is not None and not isinstance(comm, Comm):
            raise TypeError(f"expecting a communicator, got {type(comm).__name__}")
        self = super().__new__(cls)
        self._group: Any = NULL if comm is None else comm._group
        self._state: State = State() if comm is None else comm._state
        return self

    @classmethod
    def _of(cls, group: "_core.Group | None", state: State | None = None) -> "Comm":
        if group is None:
            return COMM_NULL
        self = cls.__new__(cls)
        self._group, self._state = prepared(group), state or State()
        return self

    def _formed(self, method: str, *arguments: Any) -> Any:
        """A new group of ringtrain's; all ranks have to call it."""
        try:
            return getattr(self._group, method)(*arguments)
        except _core.Error as error:
            raise translated(error) from error

    def __eq__(self, other: object) -> bool:
        return self._group is other._group if isinstance(other, Comm) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return self._group is not NULL

    def __reduce__(self) -> str | tuple:
        for name, comm in (("COMM_WORLD", COMM_WORLD), ("COMM_SELF", COMM_SELF), ("COMM_NULL", COMM_NULL)):
            if self is comm:
                return name
            if self == comm:
                return by_name(name)
        raise ValueError(f"cannot serialize '{type(self).__module__}.{type(self).__name__}' instance")

    def Get_rank(self) -> int:
        """This process's rank."""
        return self._group.rank

    def Get_size(self) -> int:
        """How many processes there are."""
        return self._group.size

    rank = property(Get_rank)
    size = property(Get_size)

    def Get_group(self) -> Group:
        """The processes, as a group."""
        members = self._members()
        return Group._of(members, members[self._group.rank])

    group = property(Get_group)

    def _members(self) -> list[int]:
        """The ranks in the job. A group of this process alone numbers itself 0, whatever it is in the job."""
        group = self._group
        world = COMM_WORLD._group
        if group.size == 1 and world is not BEFORE and isinstance(world, _core.Group):
            return [world.rank]
        return self._state.__dict__.get("members") or list(group.members)

    def Compare(self, comm: "Comm") -> int:
        """`IDENT`, `CONGRUENT` (same processes in the same order), `SIMILAR` (in another) or `UNEQUAL`."""
        if self == comm and self:
            return c.IDENT
        compared = self.group.Compare(comm.group)
        return c.CONGRUENT if compared == c.IDENT else compared

    def Dup(self, info: Info | None = None) -> "Comm":
        """The same processes, whose messages do not meet these. All ranks call it."""
        copy = type(self)._of(self._formed("duplicate"), State())
        copy._inherit(self, info)
        return copy

    def _inherit(self, other: "Comm", info: Info | None) -> None:
        state = self._state
        state.errhandler, state.topology = other._state.errhandler, other._state.topology
        state.info = Info.Create(info if info else other._state.info)
        if "members" in other._state.__dict__:
            state.members = other._state.members  # type: ignore[attr-defined]
        if other._state.beside is not None:
            state.beside = prepared(self._formed("duplicate"))
        self._copy_attributes(other)

    Clone = Dup

    def Dup_with_info(self, info: Info) -> "Comm":
        """`Dup`, with hints."""
        return self.Dup(info)

    def Idup(self, info: Info | None = None) -> tuple["Comm", Request]:
        """`Dup`; the request has ended already."""
        return self.Dup(info), Request._of(Done())

    Idup_with_info = Idup

    def Create(self, group: Group) -> "Comm":
        """The processes of `group`, of which each rank of this communicator is told; `COMM_NULL` elsewhere. All ranks call it."""
        members = self.group
        places = [members._valid().index(member) if member in members._valid() else -1 for member in group._valid()]
        if -1 in places:
            raise Exception(c.ERR_GROUP, "the group has processes that the communicator has not")
        # Ranks may name different groups, as long as they have nobody in common: the lowest rank of each tells them apart.
        if self._group.rank in places:
            return Intracomm._of(self._formed("split", min(places), places.index(self._group.rank)))
        return Intracomm._of(self._formed("split", None, 0))

    def Split(self, color: int = 0, key: int = 0) -> "Comm":
        """The processes with the same colour, ordered by `key`; `COMM_NULL` with `UNDEFINED`. All ranks call it."""
        color = index(color)
        if color == c.UNDEFINED:
            return Intracomm._of(self._formed("split", None, 0))
        if color < 0:
            raise Exception(c.ERR_ARG, f"{color} is no colour")
        return Intracomm._of(self._formed("split", color, index(key)))

    def Split_type(self, split_type: int, key: int = 0, info: Info = INFO_NULL) -> "Comm":
        """The processes on the same host, with `COMM_TYPE_SHARED`. All ranks call it."""
        if split_type not in (c.COMM_TYPE_SHARED, c.UNDEFINED):
            raise unsupported("MPI.Comm.Split_type of other types than COMM_TYPE_SHARED and UNDEFINED")
        hosts = self.allgather(_host())
        return self.Split(hosts.index(hosts[self._group.rank]) if split_type == c.COMM_TYPE_SHARED else c.UNDEFINED, key)

    def Free(self) -> None:
        """Lets go of it; it is null from now on."""
        if self._group is COMM_WORLD._group or self._group is COMM_SELF._group:
            raise Exception(c.ERR_COMM, "COMM_WORLD and COMM_SELF cannot be freed")
        self._group.rank  # noqa: B018  (a null communicator raises here)
        self._delete_attributes()
        for group in (self._state.beside, self._group):
            if group is not None:
                with contextlib.suppress(_core.Error):
                    group.close()
        self._group = NULL
        self._state = State()

    Disconnect = Free

    def free(self) -> None:
        """`Free`, if there is something to let go of."""
        if self and self != COMM_WORLD and self != COMM_SELF:
            self.Free()

    def Abort(self, errorcode: int = 0) -> NoReturn:
        """Ends the whole job, and this process with `errorcode`."""
        group = self._group
        with contextlib.suppress(_core.Error):
            runtime.abort(f"rank {group.rank} of {self._state.name or 'a communicator'} called MPI.Comm.Abort({errorcode})")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(errorcode if 0 <= errorcode <= _FATAL_CODE_MAX else 1)

    def Get_name(self) -> str:
        """The name."""
        return self._state.name if self else "MPI_COMM_NULL"

    def Set_name(self, name: str) -> None:
        """Gives a name."""
        self._group.rank  # noqa: B018
        self._state.name = name

    name = property(Get_name, Set_name)

    def Get_info(self) -> Info:
        """A copy of the hints."""
        self._group.rank  # noqa: B018
        return self._state.info.Dup()

    def Set_info(self, info: Info) -> None:
        """Adds hints. Nothing looks at them."""
        self._group.rank  # noqa: B018
        if info:
            self._state.info.update(info)

    info = property(Get_info, Set_info)

    def Get_errhandler(self) -> Errhandler:
        """What was set; errors are exceptions all the same."""
        self._group.rank  # noqa: B018
        return Errhandler(self._state.errhandler)

    def Set_errhandler(self, errhandler: Errhandler) -> None:
        """Kept for `Get_errhandler`; errors are exceptions all the same."""
        self._group.rank  # noqa: B018
        if errhandler == ERRHANDLER_NULL:
            raise Exception(c.ERR_ARG)
        self._state.errhandler = Errhandler(errhandler)

    def Call_errhandler(self, errorcode: int) -> None:
        """Does what the handler does with an error: nothing, or ending the job."""
        self._group.rank  # noqa: B018
        if self._state.errhandler != ERRORS_RETURN:
            self.Abort(errorcode)

    def Is_inter(self) -> bool:
        """Intercommunicators are not supported: False."""
        self._group.rank  # noqa: B018
        return False

    def Is_intra(self) -> bool:
        """True."""
        self._group.rank  # noqa: B018
        return True

    is_inter = property(Is_inter)
    is_intra = property(Is_intra)

    def Get_topology(self) -> int:
        """`CART` or `UNDEFINED`."""
        self._group.rank  # noqa: B018
        return c.UNDEFINED if self._state.topology is None else c.CART

    topology = property(Get_topology)
    is_topo = property(lambda self: self.Get_topology() != c.UNDEFINED)

    @classmethod
    def Get_parent(cls) -> "Comm":
        """Nobody spawns processes: `COMM_NULL`."""
        from .placeholders import INTERCOMM_NULL

        return INTERCOMM_NULL

    def Attach_buffer(self, buf: object) -> None:
        """Accepted; buffered sends need none."""
        self._state.__dict__["buffer"] = buf

    def Detach_buffer(self) -> object:
        """What was attached."""
        return self._state.__dict__.pop("buffer", None)

    def Flush_buffer(self) -> None:
        """Nothing to do."""


class Intracomm(Comm):
    """The only kind of communicator there is, with or without a topology."""

    def Create_group(self, group: Group, tag: int = 0) -> "Intracomm":
        """The processes of `group`, who alone call it; `COMM_NULL` for others."""
        members = group._valid()
        own = self.group._own
        if own not in members:
            return COMM_NULL
        if not set(members) <= set(self.group._valid()):
            raise Exception(c.ERR_GROUP, "the group has processes that the communicator has not")
        state = State()
        state.members = list(members)  # type: ignore[attr-defined]
        return Intracomm._of(form_group(runtime.control, members, own, tag), state)

    def Create_cart(self, dims: Sequence[int], periods: Sequence[bool] | None = None, reorder: bool = False) -> "Cartcomm":
        """The processes on a grid, in row-major order; `COMM_NULL` for those beyond it. All ranks call it."""
        from .cartesian import create_cart

        return create_cart(self, dims, periods)

    def Cart_map(self, dims: Sequence[int], periods: Sequence[bool] | None = None) -> int:
        """The rank that `Create_cart` would give."""
        from .cartesian import cart_map

        return cart_map(self, dims)


def _host() -> str:
    """What tells this host from others: its name and when it was started."""
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
    _comm._group = BEFORE
    _comm._state.name = _name

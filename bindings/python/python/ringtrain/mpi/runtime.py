"""Joins and leaves the job, as MPI_Init and MPI_Finalize do. If a program does not call MPI_Finalize, `_shutdown` leaves the
job."""

import math
import os
import threading
from typing import Any, NoReturn

from .. import _core, _world
from . import constants as c
from . import rc
from .errors import Exception, to_mpi_exception


class NoGroup:
    """Takes the place of a communicator's group if there is no group. Every use raises an exception that says why."""

    def __init__(self, code: int, why: str | None = None) -> None:
        self._code = code
        self._why = why

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Exception(self._code, self._why)


NULL_GROUP = NoGroup(c.ERR_COMM)
GROUP_BEFORE_INIT = NoGroup(c.ERR_OTHER, "MPI_Init has not been called")
GROUP_AFTER_FINALIZE = NoGroup(c.ERR_OTHER, "MPI_Finalize has been called")


class Runtime:
    """The state of MPI in this process."""

    def __init__(self) -> None:
        self.is_initialized = False
        self.is_finalized = False
        self.has_joined = False
        self.control: Any = GROUP_BEFORE_INIT
        self.main_thread = threading.main_thread()
        self._own_pid = os.getpid()
        self.buffer: object = None

    def start(self) -> tuple[_core.Group, _core.Group]:
        """Joins the job. Returns the groups of `COMM_WORLD` and `COMM_SELF`."""
        if self.is_initialized:
            raise Exception(c.ERR_OTHER, "MPI_Init has been called already")
        self.has_joined = not _world.is_joined()
        try:
            # The world's group carries the messages of ringtrain's own interface and the messages of `form_group`. The messages
            # of MPI programs must be separate, so `COMM_WORLD` gets a duplicate of this group.
            self.control = _world.join_world().core
            world = self.control.duplicate()
        except _core.Error as error:
            raise to_mpi_exception(error) from error
        self.is_initialized = True
        return with_mpi_timeout(world), with_mpi_timeout(_core.solo())

    def finish(self) -> None:
        """Leaves the job."""
        if not self.is_initialized or self.is_finalized:
            raise Exception(c.ERR_OTHER, "MPI is not initialised, or finalised already")
        self.is_finalized = True
        self.control = GROUP_AFTER_FINALIZE
        if self.has_joined:
            _world.leave_world()

    def abort(self, text: str) -> None:
        """Ends the job on every rank. The errors of all ranks contain `text`."""
        if self.is_initialized and not self.is_finalized and os.getpid() == self._own_pid:
            self.control.abort(text)


def with_mpi_timeout(group: _core.Group) -> _core.Group:
    """Sets the timeout of a new group to `rc.timeout` (by default no limit, as in MPI), and returns the group."""
    group.timeout = math.inf if rc.timeout is None else rc.timeout
    return group


runtime = Runtime()

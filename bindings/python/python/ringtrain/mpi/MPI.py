"""All names of `mpi4py.MPI`. Importing this module joins the job (see `ringtrain.mpi.rc`)."""

import platform
import socket
import threading
import time
from collections.abc import Hashable
from typing import Any

from . import constants as _constants
from . import datatypes as _datatypes
from . import placeholders as _placeholders
from . import rc as _rc
from . import runtime as _runtime
from .buffers import BOTTOM, BUFFER_AUTOMATIC, IN_PLACE, BottomType, BufferAutomaticType, InPlaceType, addressof, buffer
from .cartesian import Cartcomm, Compute_dims, Topocomm
from .communicator import COMM_NULL, COMM_SELF, COMM_WORLD, Comm, Intracomm
from .datatypes import Datatype
from .errors import (
    Add_error_class,
    Add_error_code,
    Add_error_string,
    Exception,
    Get_error_class,
    Get_error_string,
    Remove_error_class,
    Remove_error_code,
    Remove_error_string,
)
from .groups import GROUP_EMPTY, GROUP_NULL, Group
from .info import (
    ERRHANDLER_NULL,
    ERRORS_ABORT,
    ERRORS_ARE_FATAL,
    ERRORS_RETURN,
    INFO_ENV,
    INFO_NULL,
    Errhandler,
    Info,
)
from .messages import MESSAGE_NO_PROC, MESSAGE_NULL, Message
from .operations import BAND, BOR, BXOR, LAND, LOR, LXOR, MAX, MAXLOC, MIN, MINLOC, NO_OP, OP_NULL, PROD, REPLACE, SUM, Op
from .pickling import Pickle, pickle
from .placeholders import FILE_NULL, SESSION_NULL, WIN_NULL, Distgraphcomm, File, Graphcomm, Intercomm, Session, Win
from .requests import REQUEST_NULL, Grequest, Prequest, Request
from .status import Status

memory = buffer

# The constants, the predefined datatypes and the unsupported functions come from lists in other modules.
globals().update({name: value for name, value in vars(_constants).items() if name.isupper()})
globals().update(_datatypes.PREDEFINED)
globals().update(_placeholders.FUNCTIONS)
_typedict, _typedict_c, _typedict_f = _datatypes.typedict, _datatypes.typedict_c, _datatypes.typedict_f

_state = _runtime.runtime


def Init() -> None:
    """Joins the job for which `ringrun` started this process. Without `ringrun`, this process is the only rank of its job."""
    COMM_WORLD._group, COMM_SELF._group = _state.start()


def Init_thread(required: int = _constants.THREAD_MULTIPLE) -> int:
    """Joins the job. Any thread may call any function."""
    Init()
    return _constants.THREAD_MULTIPLE


def Finalize() -> None:
    """Leaves the job."""
    _state.finish()
    COMM_WORLD._group = COMM_SELF._group = _runtime.GROUP_AFTER_FINALIZE


def Is_initialized() -> bool:
    """Returns whether this process has joined its job."""
    return _state.is_initialized


def Is_finalized() -> bool:
    """Returns whether this process has left its job."""
    return _state.is_finalized


def Query_thread() -> int:
    """Returns `THREAD_MULTIPLE`."""
    return _constants.THREAD_MULTIPLE


def Is_thread_main() -> bool:
    """Returns whether this thread is the main thread."""
    return threading.current_thread() is _state.main_thread


def Get_version() -> tuple[int, int]:
    """Returns the version of the MPI standard that this module follows."""
    return _constants.VERSION, _constants.SUBVERSION


def Get_library_version() -> str:
    """Returns the names and the versions of ringtrain and Python."""
    return f"ringtrain {'.'.join(map(str, get_vendor()[1]))}, Python {platform.python_version()}"


def get_vendor() -> tuple[str, tuple[int, int, int]]:
    """Returns the name and the version of ringtrain."""
    from importlib import metadata

    try:
        numbers = [int(part) for part in metadata.version("ringtrain").split(".")[:3] if part.isdigit()]
    except metadata.PackageNotFoundError:
        numbers = []
    major, minor, micro = (numbers + [0, 0, 0])[:3]
    return "ringtrain", (major, minor, micro)


def Get_processor_name() -> str:
    """Returns the name of this host."""
    return socket.gethostname()


Wtime = time.perf_counter


def Wtick() -> float:
    """Returns the resolution of `Wtime` in seconds."""
    return time.get_clock_info("perf_counter").resolution


def Pcontrol(level: int) -> None:
    """Does nothing."""


def Get_address(location: Any) -> int:
    """Returns the address of a buffer."""
    return addressof(location)


def Aint_add(base: int, disp: int) -> int:
    """Returns the sum of an address and a displacement."""
    return base + disp


def Aint_diff(addr1: int, addr2: int) -> int:
    """Returns the difference of two addresses."""
    return addr1 - addr2


def Alloc_mem(size: int, info: Info = INFO_NULL) -> buffer:
    """Returns new memory of `size` bytes. No other process can access this memory."""
    if size < 0:
        raise Exception(_constants.ERR_ARG)
    return buffer.allocate(size)


def Free_mem(mem: buffer) -> None:
    """Does nothing. Python frees the memory when no object refers to it."""


def Attach_buffer(buf: Any) -> None:
    """Stores `buf` for `Detach_buffer`. Buffered sends need no buffer."""
    _state.buffer = buf


def Detach_buffer() -> Any:
    """Returns the attached buffer."""
    attached, _state.buffer = _state.buffer, None
    return attached


def Flush_buffer() -> None:
    """Does nothing."""


def _set_abort_status(status: Any) -> None:
    """Does nothing. `mpi4py.run` calls this function after an uncaught exception, which ends the job in any case."""


_locks: dict[tuple[int, Hashable], Any] = {}


def _comm_lock(comm: Comm, key: Hashable | None = None) -> Any:
    """Returns the lock of a communicator for `key`."""
    return _locks.setdefault((id(comm._state), key), threading.Lock())


def _sizeof(arg: Any) -> int:
    """Returns 8, the size of a handle in C. This module has no such handles."""
    return 8


def _addressof(arg: Any) -> int:
    """Returns the id of the object. The id is not the address of an MPI handle."""
    return id(arg)


def _typecode(datatype: Datatype) -> str | None:
    """Returns the character code of a datatype."""
    return datatype._code


# Pickles and error messages name the classes by this module, from which programs import them.
for _name, _value in list(globals().items()):
    if isinstance(_value, type) and _value.__module__.startswith(__name__.rpartition(".")[0]):
        _value.__module__ = __name__
del _name, _value

if _rc.initialize and not _state.is_initialized:
    Init()

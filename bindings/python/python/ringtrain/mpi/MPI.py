"""All of MPI's names, as `mpi4py.MPI` has them. Importing this joins the job (see `ringtrain.mpi.rc`)."""

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

# The integers, the datatypes and what is not supported have lists of their own.
globals().update({name: value for name, value in vars(_constants).items() if name.isupper()})
globals().update(_datatypes.PREDEFINED)
globals().update(_placeholders.FUNCTIONS)
_typedict, _typedict_c, _typedict_f = _datatypes.typedict, _datatypes.typedict_c, _datatypes.typedict_f

_state = _runtime.runtime


def Init() -> None:
    """Joins the job: the one that `ringrun` has started this process for, or else a world of one."""
    COMM_WORLD._group, COMM_SELF._group = _state.start()


def Init_thread(required: int = _constants.THREAD_MULTIPLE) -> int:
    """Joins the job; any thread may call anything."""
    Init()
    return _constants.THREAD_MULTIPLE


def Finalize() -> None:
    """Leaves the job."""
    _state.finish()
    COMM_WORLD._group = COMM_SELF._group = _runtime.AFTER


def Is_initialized() -> bool:
    """Whether this process has joined its job."""
    return _state.is_initialized


def Is_finalized() -> bool:
    """Whether this process has left its job."""
    return _state.is_finalized


def Query_thread() -> int:
    """`THREAD_MULTIPLE`."""
    return _constants.THREAD_MULTIPLE


def Is_thread_main() -> bool:
    """Whether this is the main thread."""
    return threading.current_thread() is _state.main_thread


def Get_version() -> tuple[int, int]:
    """The version of the MPI standard that this follows."""
    return _constants.VERSION, _constants.SUBVERSION


def Get_library_version() -> str:
    """What this is."""
    return f"ringtrain {'.'.join(map(str, get_vendor()[1]))}, Python {platform.python_version()}"


def get_vendor() -> tuple[str, tuple[int, int, int]]:
    """What this is, and its version."""
    from importlib import metadata

    try:
        numbers = [int(part) for part in metadata.version("ringtrain").split(".")[:3] if part.isdigit()]
    except metadata.PackageNotFoundError:
        numbers = []
    major, minor, micro = (numbers + [0, 0, 0])[:3]
    return "ringtrain", (major, minor, micro)


def Get_processor_name() -> str:
    """The host's name."""
    return socket.gethostname()


Wtime = time.perf_counter


def Wtick() -> float:
    """The resolution of `Wtime`, in seconds."""
    return time.get_clock_info("perf_counter").resolution


def Pcontrol(level: int) -> None:
    """Nothing to do."""


def Get_address(location: Any) -> int:
    """The address of a buffer."""
    return addressof(location)


def Aint_add(base: int, disp: int) -> int:
    """The sum of an address and a displacement."""
    return base + disp


def Aint_diff(addr1: int, addr2: int) -> int:
    """The difference of two addresses."""
    return addr1 - addr2


def Alloc_mem(size: int, info: Info = INFO_NULL) -> buffer:
    """Memory. It is the process's own like any other."""
    if size < 0:
        raise Exception(_constants.ERR_ARG)
    return buffer.allocate(size)


def Free_mem(mem: buffer) -> None:
    """Nothing to do: memory is kept for as long as it is referred to."""


def Attach_buffer(buf: Any) -> None:
    """Accepted; buffered sends need none."""
    _state.buffer = buf


def Detach_buffer() -> Any:
    """What was attached."""
    attached, _state.buffer = _state.buffer, None
    return attached


def Flush_buffer() -> None:
    """Nothing to do."""


def _set_abort_status(status: Any) -> None:
    """What `mpi4py.run` calls: an uncaught exception ends the job here in any case."""


_locks: dict[tuple[int, Hashable], Any] = {}


def _comm_lock(comm: Comm, key: Hashable | None = None) -> Any:
    """A lock of a communicator's own."""
    return _locks.setdefault((id(comm._state), key), threading.Lock())


def _sizeof(arg: Any) -> int:
    """The size of a handle; there are none."""
    return 8


def _addressof(arg: Any) -> int:
    """An address that nothing is to be done with."""
    return id(arg)


def _typecode(datatype: Datatype) -> str | None:
    """The character code of a datatype."""
    return datatype._code


# Pickles and messages name these by the module that programs import them from.
for _name, _value in list(globals().items()):
    if isinstance(_value, type) and _value.__module__.startswith(__name__.rpartition(".")[0]):
        _value.__module__ = __name__
del _name, _value

if _rc.initialize and not _state.is_initialized:
    Init()

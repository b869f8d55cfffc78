"""`MPI.Exception`: errors with MPI's error classes. The message contains ringtrain's message, which names the rank at fault."""

import builtins

from .. import _core
from . import constants as c

_STRINGS = {
    c.SUCCESS: "MPI_SUCCESS: no errors",
    c.ERR_BUFFER: "MPI_ERR_BUFFER: invalid buffer pointer",
    c.ERR_COUNT: "MPI_ERR_COUNT: invalid count argument",
    c.ERR_TYPE: "MPI_ERR_TYPE: invalid datatype",
    c.ERR_TAG: "MPI_ERR_TAG: invalid tag",
    c.ERR_COMM: "MPI_ERR_COMM: invalid communicator",
    c.ERR_RANK: "MPI_ERR_RANK: invalid rank",
    c.ERR_REQUEST: "MPI_ERR_REQUEST: invalid request",
    c.ERR_ROOT: "MPI_ERR_ROOT: invalid root",
    c.ERR_GROUP: "MPI_ERR_GROUP: invalid group",
    c.ERR_OP: "MPI_ERR_OP: invalid reduce operation",
    c.ERR_TOPOLOGY: "MPI_ERR_TOPOLOGY: invalid communicator topology",
    c.ERR_DIMS: "MPI_ERR_DIMS: invalid topology dimension",
    c.ERR_ARG: "MPI_ERR_ARG: invalid argument of some other kind",
    c.ERR_UNKNOWN: "MPI_ERR_UNKNOWN: unknown error",
    c.ERR_TRUNCATE: "MPI_ERR_TRUNCATE: message truncated",
    c.ERR_OTHER: "MPI_ERR_OTHER: known error not in list",
    c.ERR_INTERN: "MPI_ERR_INTERN: internal error",
    c.ERR_IN_STATUS: "MPI_ERR_IN_STATUS: error code in status",
    c.ERR_PENDING: "MPI_ERR_PENDING: pending request",
    c.ERR_PROC_ABORTED: "MPI_ERR_PROC_ABORTED: operation failed because a remote peer has aborted",
    c.ERR_PROC_FAILED: "MPI_ERR_PROC_FAILED: process failure",
}
_NAMES = {value: name for name, value in vars(c).items() if name.startswith("ERR_")}

# The error codes that the program has added: the class of each code, and the text of each code.
_added_classes: dict[int, int] = {}
_added_strings: dict[int, str] = {}


class Exception(RuntimeError):  # noqa: A001  (MPI's name)
    """An error with an MPI error code. Comparisons compare the code. `__cause__` is ringtrain's error, if there is one."""

    def __init__(self, ierr: int = c.SUCCESS, detail: str | None = None, /) -> None:
        super().__init__(ierr)
        self.ob_mpi = int(ierr)
        self.detail = detail

    def __int__(self) -> int:
        return self.ob_mpi

    def __bool__(self) -> bool:
        return self.ob_mpi != c.SUCCESS

    def __hash__(self) -> int:
        return hash(self.ob_mpi)

    def __eq__(self, other: object) -> bool:
        return int(other) == self.ob_mpi if isinstance(other, int | Exception) else NotImplemented

    def __lt__(self, other: int) -> bool:
        return self.ob_mpi < int(other)

    def __le__(self, other: int) -> bool:
        return self.ob_mpi <= int(other)

    def __gt__(self, other: int) -> bool:
        return self.ob_mpi > int(other)

    def __ge__(self, other: int) -> bool:
        return self.ob_mpi >= int(other)

    def __repr__(self) -> str:
        return f"MPI.Exception({self.ob_mpi})"

    def __str__(self) -> str:
        text = Get_error_string(self.ob_mpi)
        return f"{text}: {self.detail}" if self.detail else text

    def __reduce__(self) -> tuple:
        return (Exception, (self.ob_mpi, self.detail))

    def Get_error_code(self) -> int:
        """Returns the error code."""
        return self.ob_mpi

    def Get_error_class(self) -> int:
        """Returns the error class of the code."""
        return Get_error_class(self.ob_mpi)

    def Get_error_string(self) -> str:
        """Returns the text of the error."""
        return str(self)

    error_code = property(Get_error_code)
    error_class = property(Get_error_class)
    error_string = property(Get_error_string)


def to_mpi_exception(error: _core.Error, given: int | None = None) -> Exception:
    """Converts an error of ringtrain to an MPI exception with the error class `given`, or with the class that fits the error
    best."""
    wrapped = Exception(_class_of(error) if given is None else given, _message_of(error))
    wrapped.__cause__ = error
    return wrapped


def unsupported(name: str, instead: str = "") -> NotImplementedError:
    """Returns the error for a part of MPI that this module does not support. `name` is the name in MPI, such as
    `MPI.Win.Allocate`. `instead` says what to do instead."""
    return NotImplementedError(f"{name} is not supported by ringtrain.mpi" + (f"; {instead}" if instead else ""))


def Get_error_class(errorcode: int) -> int:
    """Returns the error class of a code. Each code of MPI is its own class."""
    return _added_classes.get(errorcode, errorcode)


def Get_error_string(errorcode: int) -> str:
    """Returns the text of an error code."""
    known = _added_strings.get(errorcode) or _STRINGS.get(errorcode)
    if known is not None:
        return known
    name = _NAMES.get(errorcode)
    return f"MPI_{name}" if name else _STRINGS[c.ERR_UNKNOWN]


def Add_error_class() -> int:
    """Adds an error class for the program, and returns this class."""
    code = max(_added_classes, default=c.ERR_LASTCODE) + 1
    _added_classes[code] = code
    return code


def Add_error_code(errorclass: int) -> int:
    """Adds an error code for the program to the class `errorclass`, and returns this code."""
    code = Add_error_class()
    _added_classes[code] = errorclass
    return code


def Add_error_string(errorcode: int, string: str) -> None:
    """Sets the text of a code that the program has added."""
    _require_added(errorcode)
    _added_strings[errorcode] = string


def Remove_error_class(errorclass: int) -> None:
    """Removes an error class that the program has added."""
    _require_added(errorclass)
    del _added_classes[errorclass]


Remove_error_code = Remove_error_class


def Remove_error_string(errorcode: int) -> None:
    """Removes the text of a code that the program has added."""
    _require_added(errorcode)
    _added_strings.pop(errorcode, None)


def _require_added(code: int) -> None:
    if code not in _added_classes:
        raise Exception(c.ERR_ARG, f"{code} is not a code that this program has added")


def _class_of(error: builtins.Exception) -> int:
    for kind, code in (
        (_core.PeerLost, c.ERR_PROC_FAILED),
        (_core.PeerLeft, c.ERR_PROC_FAILED),
        (_core.Aborted, c.ERR_PROC_ABORTED),
        (_core.Misbehaved, c.ERR_INTERN),
        (_core.Unsupported, c.ERR_OP),
        (_core.InvalidArgument, c.ERR_ARG),
    ):
        if isinstance(error, kind):
            return code
    return c.ERR_OTHER


def _message_of(error: _core.Error) -> str:
    # The message of ringtrain's error already names the rank and the host.
    return str(error)

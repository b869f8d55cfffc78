"""`MPI.Status`: the source, the tag and the length of a message."""

from . import constants as c
from .datatypes import BYTE, Datatype


class Status:
    """The source, the tag and the length of a message. `count` is in bytes."""

    __slots__ = ("source", "tag", "error", "count", "cancelled", "__weakref__")

    def __init__(self, status: "Status | None" = None) -> None:
        if status is None:
            self._empty()
        else:
            if not isinstance(status, Status):
                raise TypeError(f"expecting a status, got {type(status).__name__}")
            self.__setstate__(status.__getstate__())

    def _fill(self, source: int, tag: int, count: int, cancelled: bool = False) -> None:
        self.source = source
        self.tag = tag
        self.count = count
        self.cancelled = cancelled
        self.error = c.SUCCESS

    def _empty(self) -> None:
        self._fill(c.ANY_SOURCE, c.ANY_TAG, 0)

    def __eq__(self, other: object) -> bool:
        return self.__getstate__() == other.__getstate__() if isinstance(other, Status) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in Status.__slots__[:-1]}

    def __setstate__(self, state: dict[str, int]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple:
        return (type(self), (), self.__getstate__())

    def Get_source(self) -> int:
        """Returns the rank of the sender."""
        return self.source

    def Set_source(self, source: int) -> None:
        """Sets the rank of the sender."""
        self.source = source

    def Get_tag(self) -> int:
        """Returns the tag."""
        return self.tag

    def Set_tag(self, tag: int) -> None:
        """Sets the tag."""
        self.tag = tag

    def Get_error(self) -> int:
        """Returns the error class."""
        return self.error

    def Set_error(self, error: int) -> None:
        """Sets the error class."""
        self.error = error

    def Get_count(self, datatype: Datatype = BYTE) -> int:
        """Returns the number of received elements of `datatype`, or `UNDEFINED` if the message ends within an element."""
        datatype._valid()
        size = datatype._wire
        if size == 0:
            return 0 if self.count == 0 else c.UNDEFINED
        return self.count // size if self.count % size == 0 else c.UNDEFINED

    def Get_elements(self, datatype: Datatype) -> int:
        """Returns the number of received basic elements of `datatype`, or `UNDEFINED` if the message ends within a basic
        element."""
        return datatype._basic_elements(self.count)

    def Set_elements(self, datatype: Datatype, count: int) -> None:
        """Sets the number of received elements of `datatype`."""
        datatype._valid()
        self.count = count * datatype._wire

    def Is_cancelled(self) -> bool:
        """Returns whether the operation was cancelled."""
        return self.cancelled

    def Set_cancelled(self, flag: bool) -> None:
        """Sets whether the operation was cancelled."""
        self.cancelled = bool(flag)

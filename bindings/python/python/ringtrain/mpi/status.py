"""`MPI.Status`: from whom a message came, its tag and its length."""

from . import constants as c
from .datatypes import BYTE, Datatype


class Status:
    """What is known of a message. `count` is in bytes."""

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
        """The sender's rank."""
        return self.source

    def Set_source(self, source: int) -> None:
        """Says that `source` was the sender."""
        self.source = source

    def Get_tag(self) -> int:
        """The tag."""
        return self.tag

    def Set_tag(self, tag: int) -> None:
        """Says that `tag` was the tag."""
        self.tag = tag

    def Get_error(self) -> int:
        """The error's class."""
        return self.error

    def Set_error(self, error: int) -> None:
        """Says that `error` happened."""
        self.error = error

    def Get_count(self, datatype: Datatype = BYTE) -> int:
        """How many elements of `datatype` came; `UNDEFINED` if they do not come out even."""
        datatype._valid()
        size = datatype._wire
        if size == 0:
            return 0 if self.count == 0 else c.UNDEFINED
        return self.count // size if self.count % size == 0 else c.UNDEFINED

    def Get_elements(self, datatype: Datatype) -> int:
        """How many basic elements of `datatype` came; `UNDEFINED` if they do not come out even."""
        return datatype._basic_elements(self.count)

    def Set_elements(self, datatype: Datatype, count: int) -> None:
        """Says that `count` elements of `datatype` came."""
        datatype._valid()
        self.count = count * datatype._wire

    def Is_cancelled(self) -> bool:
        """Whether the operation was withdrawn."""
        return self.cancelled

    def Set_cancelled(self, flag: bool) -> None:
        """Says whether the operation was withdrawn."""
        self.cancelled = bool(flag)

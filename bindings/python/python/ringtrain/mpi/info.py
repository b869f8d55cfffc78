"""`MPI.Info`: hints, kept and given back; and `MPI.Errhandler`, of which only the names matter."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from . import constants as c
from .constant import by_name
from .errors import Exception


class Info:
    """A dictionary of strings. Nothing in ringtrain looks at it."""

    def __new__(cls, info: "Info | None" = None) -> "Info":
        self = super().__new__(cls)
        self._items: dict[str, str] | None = None if info is None else info._items
        return self

    @classmethod
    def Create(cls, items: "Info | Mapping[str, str] | Iterable[tuple[str, str]] | None" = None) -> "Info":
        """A new one."""
        self = cls.__new__(cls)
        self._items = {}
        if items is not None:
            self.update(items)
        return self

    @classmethod
    def Create_env(cls, args: Any = None) -> "Info":
        """An empty one."""
        return cls.Create()

    def _valid(self) -> dict[str, str]:
        if self._items is None:
            raise Exception(c.ERR_INFO)
        return self._items

    def __eq__(self, other: object) -> bool:
        return self._items is other._items if isinstance(other, Info) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return self._items is not None

    def __len__(self) -> int:
        return len(self._items or ())

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, key: str) -> bool:
        return key in (self._items or ())

    def __getitem__(self, key: str) -> str:
        return self._valid()[key]

    def __setitem__(self, key: str, value: str) -> None:
        self.Set(key, value)

    def __delitem__(self, key: str) -> None:
        del self._valid()[key]

    def __reduce__(self) -> tuple:
        for name, known in (("INFO_NULL", INFO_NULL), ("INFO_ENV", INFO_ENV)):
            if self == known:
                return by_name(name)
        return (type(self).Create, (dict(self._valid()),))

    def Free(self) -> None:
        """Becomes null."""
        self._valid()
        self._items = None

    def free(self) -> None:
        """`Free`, if there is something to let go of."""
        if self and self is not INFO_ENV:
            self.Free()

    def Dup(self) -> "Info":
        """A copy."""
        return type(self).Create(dict(self._valid()))

    copy = Dup

    def Get(self, key: str) -> str | None:
        """The value of a key, or None."""
        return self._valid().get(key)

    def Set(self, key: str, value: str) -> None:
        """Sets a value."""
        self._valid()[str(key)] = str(value)

    def Delete(self, key: str) -> None:
        """Deletes a key. `Exception` if there is none."""
        if self._valid().pop(key, None) is None:
            raise Exception(c.ERR_INFO_NOKEY)

    def Get_nkeys(self) -> int:
        """How many keys there are."""
        return len(self._valid())

    def Get_nthkey(self, n: int) -> str:
        """The n-th key."""
        keys = list(self._valid())
        if not 0 <= n < len(keys):
            raise Exception(c.ERR_ARG, f"{n} is no place among {len(keys)} keys")
        return keys[n]

    def get(self, key: str, default: str | None = None) -> str | None:
        """As of a dictionary."""
        return (self._items or {}).get(key, default)

    def keys(self) -> list[str]:
        """As of a dictionary."""
        return list(self._items or ())

    def values(self) -> list[str]:
        """As of a dictionary."""
        return list((self._items or {}).values())

    def items(self) -> list[tuple[str, str]]:
        """As of a dictionary."""
        return list((self._items or {}).items())

    def update(self, items: Any = (), **more: str) -> None:
        """As of a dictionary."""
        pairs = items.items() if isinstance(items, Info | Mapping) else items
        for key, value in [*pairs, *more.items()]:
            self.Set(key, value)

    def pop(self, key: str, *default: str) -> str:
        """As of a dictionary."""
        return self._valid().pop(key, *default)

    def popitem(self) -> tuple[str, str]:
        """As of a dictionary."""
        return self._valid().popitem()

    def clear(self) -> None:
        """As of a dictionary."""
        self._valid().clear()


class Errhandler:
    """Errors are exceptions, whatever is set."""

    def __new__(cls, errhandler: "Errhandler | None" = None) -> "Errhandler":
        self = super().__new__(cls)
        self._name: str | None = None if errhandler is None else errhandler._name
        return self

    def __eq__(self, other: object) -> bool:
        return self._name == other._name if isinstance(other, Errhandler) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return self._name is not None

    def __reduce__(self) -> tuple:
        return by_name(self._name or "ERRHANDLER_NULL")

    def Free(self) -> None:
        """Becomes null."""
        if self._name is None:
            raise Exception(c.ERR_ARG)
        self._name = None

    def free(self) -> None:
        """Becomes null, unless it is one of MPI's."""
        if self._name is not None and all(self is not known for known in (ERRORS_RETURN, ERRORS_ABORT, ERRORS_ARE_FATAL)):
            self.Free()


def _handler(name: str) -> Errhandler:
    handler = Errhandler()
    handler._name = name
    return handler


INFO_NULL = Info()
INFO_ENV = Info.Create()
ERRHANDLER_NULL = Errhandler()
ERRORS_RETURN, ERRORS_ABORT, ERRORS_ARE_FATAL = map(_handler, ("ERRORS_RETURN", "ERRORS_ABORT", "ERRORS_ARE_FATAL"))

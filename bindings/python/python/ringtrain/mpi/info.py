"""`MPI.Info`: hints, which have no effect. `MPI.Errhandler`: error handlers, which have no effect on exceptions."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from . import constants as c
from .constant import by_name
from .errors import Exception


class Info:
    """A dictionary of strings, which has no effect in ringtrain."""

    def __new__(cls, info: "Info | None" = None) -> "Info":
        self = super().__new__(cls)
        self._items: dict[str, str] | None = None if info is None else info._items
        return self

    @classmethod
    def Create(cls, items: "Info | Mapping[str, str] | Iterable[tuple[str, str]] | None" = None) -> "Info":
        """Returns a new dictionary with these items."""
        self = cls.__new__(cls)
        self._items = {}
        if items is not None:
            self.update(items)
        return self

    @classmethod
    def Create_env(cls, args: Any = None) -> "Info":
        """Returns a new empty dictionary."""
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
        """Makes this the null object."""
        self._valid()
        self._items = None

    def free(self) -> None:
        """Calls `Free` if this is neither the null object nor `INFO_ENV`."""
        if self and self is not INFO_ENV:
            self.Free()

    def Dup(self) -> "Info":
        """Returns a copy."""
        return type(self).Create(dict(self._valid()))

    copy = Dup

    def Get(self, key: str) -> str | None:
        """Returns the value of a key, or None."""
        return self._valid().get(key)

    def Set(self, key: str, value: str) -> None:
        """Sets a value."""
        self._valid()[str(key)] = str(value)

    def Delete(self, key: str) -> None:
        """Deletes a key. Raises `Exception` if there is no such key."""
        if self._valid().pop(key, None) is None:
            raise Exception(c.ERR_INFO_NOKEY)

    def Get_nkeys(self) -> int:
        """Returns the number of keys."""
        return len(self._valid())

    def Get_nthkey(self, n: int) -> str:
        """Returns key number `n`, counted from 0."""
        keys = list(self._valid())
        if not 0 <= n < len(keys):
            raise Exception(c.ERR_ARG, f"there is no key number {n} among {len(keys)} keys")
        return keys[n]

    def get(self, key: str, default: str | None = None) -> str | None:
        """Does the same as `dict.get`."""
        return (self._items or {}).get(key, default)

    def keys(self) -> list[str]:
        """Returns the keys as a list."""
        return list(self._items or ())

    def values(self) -> list[str]:
        """Returns the values as a list."""
        return list((self._items or {}).values())

    def items(self) -> list[tuple[str, str]]:
        """Returns the pairs of keys and values as a list."""
        return list((self._items or {}).items())

    def update(self, items: Any = (), **more: str) -> None:
        """Does the same as `dict.update`."""
        pairs = items.items() if isinstance(items, Info | Mapping) else items
        for key, value in [*pairs, *more.items()]:
            self.Set(key, value)

    def pop(self, key: str, *default: str) -> str:
        """Does the same as `dict.pop`."""
        return self._valid().pop(key, *default)

    def popitem(self) -> tuple[str, str]:
        """Does the same as `dict.popitem`."""
        return self._valid().popitem()

    def clear(self) -> None:
        """Does the same as `dict.clear`."""
        self._valid().clear()


class Errhandler:
    """An error handler. Errors raise exceptions with every error handler."""

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
        """Makes this the null error handler."""
        if self._name is None:
            raise Exception(c.ERR_ARG)
        self._name = None

    def free(self) -> None:
        """Calls `Free` if this error handler is neither null nor predefined."""
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

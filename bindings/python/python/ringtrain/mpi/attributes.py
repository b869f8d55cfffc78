"""Attributes of communicators: the attributes that MPI defines, and attributes with keys that a program creates."""

from collections.abc import Callable
from typing import Any

from . import constants as c
from .errors import Exception
from .point_to_point import TAG_MAX

_KEYVAL_FIRST = 1000

# For each key that the program has created: the copy function, the delete function, and `nopython`.
_keyvals: dict[int, tuple[Any, Any, bool]] = {}


class Attributes:
    """The methods of communicators for attributes."""

    _group: Any
    _state: Any

    def Get_attr(self, keyval: int) -> Any:
        """Returns the value of an attribute, or None if the attribute has no value."""
        self._group.rank  # noqa: B018
        if keyval in (c.TAG_UB, c.WTIME_IS_GLOBAL, c.IO, c.LASTUSEDCODE):
            return {c.TAG_UB: TAG_MAX, c.WTIME_IS_GLOBAL: 0, c.IO: c.ANY_SOURCE, c.LASTUSEDCODE: c.ERR_LASTCODE}[keyval]
        if keyval in (c.UNIVERSE_SIZE, c.APPNUM):
            from .communicator import COMM_WORLD

            return COMM_WORLD.size if keyval == c.UNIVERSE_SIZE else 0
        _known(keyval)
        return self._state.attributes.get(keyval)

    def Set_attr(self, keyval: int, attrval: Any) -> None:
        """Sets the value of an attribute."""
        self._group.rank  # noqa: B018
        self._delete_attribute(keyval)
        self._state.attributes[keyval] = attrval

    def Delete_attr(self, keyval: int) -> None:
        """Deletes the value of an attribute."""
        self._group.rank  # noqa: B018
        self._delete_attribute(keyval)

    @classmethod
    def Create_keyval(
        cls,
        copy_fn: Callable[..., Any] | None = None,
        delete_fn: Callable[..., None] | None = None,
        nopython: bool = False,
    ) -> int:
        """Creates a key. When a communicator is duplicated, `copy_fn(comm, key, value)` returns the value for the duplicate, or
        `NotImplemented` for no value. If `copy_fn` is True, the duplicate gets the same value."""
        key = max(_keyvals, default=_KEYVAL_FIRST) + 1
        _keyvals[key] = (copy_fn, delete_fn, nopython)
        return key

    @classmethod
    def Free_keyval(cls, keyval: int) -> int:
        """Deletes a key."""
        _known(keyval)
        del _keyvals[keyval]
        return c.KEYVAL_INVALID

    def _delete_attribute(self, keyval: int) -> None:
        _, delete_fn, _ = _known(keyval)
        values = self._state.attributes
        if keyval in values:
            value = values.pop(keyval)
            if delete_fn is not None:
                delete_fn(self, keyval, value)

    def _delete_attributes(self) -> None:
        for keyval in list(self._state.attributes):
            if keyval in _keyvals:
                self._delete_attribute(keyval)

    def _copy_attributes(self, other: "Attributes") -> None:
        for keyval, value in other._state.attributes.items():
            copy_fn = _keyvals[keyval][0] if keyval in _keyvals else None
            if copy_fn is True:
                self._state.attributes[keyval] = value
            elif callable(copy_fn):
                copied = copy_fn(other, keyval, value)
                if copied is not NotImplemented:
                    self._state.attributes[keyval] = copied


def _known(keyval: int) -> tuple[Any, Any, bool]:
    try:
        return _keyvals[keyval]
    except KeyError:
        raise Exception(c.ERR_KEYVAL, f"{keyval} is not a key that the program has created") from None

"""The reducers of gradients in this process, to which `join` contributes zeros."""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol


class Reducer(Protocol):
    """Reduces the gradients of an optimizer."""

    def is_closed(self) -> bool:
        """Returns whether the group of this reducer has been closed, for example because the job has ended."""

    def contribute_zeros(self) -> None:
        """Takes part in the reductions of the other ranks with zeros, until all ranks do so."""


# A weak set would not keep the order of the reducers.
_reducers: weakref.WeakValueDictionary[int, Reducer] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register_reducer(reducer: Reducer) -> None:
    """Makes `join` contribute zeros to the reducer while it exists. All ranks create their reducers in the same order."""
    _reducers[next(_numbers)] = reducer


def open_reducers() -> list[Reducer]:
    """Returns the reducers of this process whose groups are open, in the order of their creation."""
    return [reducer for _, reducer in sorted(_reducers.items()) if not reducer.is_closed()]

"""Pickles objects that have a name in `MPI`, such as `MPI.SUM`, as this name."""

from typing import Any


def constant(name: str) -> Any:
    """Returns the object with this name in `MPI`."""
    from . import MPI

    return getattr(MPI, name)


def by_name(name: str) -> tuple:
    """Returns the result of `__reduce__` for an object that has this name in `MPI`."""
    return (constant, (name,))

"""Pickles of what `MPI` has a name for: the name, whichever object stands for it."""

from typing import Any


def constant(name: str) -> Any:
    """The object of this name in `MPI`."""
    from . import MPI

    return getattr(MPI, name)


def by_name(name: str) -> tuple:
    """What `__reduce__` gives of an object that `MPI` has under this name."""
    return (constant, (name,))

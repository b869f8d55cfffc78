"""Objects of Python's, by pickle.

Unpickling runs what the sender says: objects come only from ranks of the same job, which have proved that they know its secret.
"""

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .handles import Handle

if TYPE_CHECKING:
    from . import _core


def _dumps(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


class Objects:
    """A group's operations on objects."""

    core: "_core.Group"
    rank: int

    def broadcast_object(self, value: Any = None, root: int = 0) -> Any:
        """The root's object, on every rank; the others' is not looked at."""
        data = self.core.broadcast_bytes(_dumps(value) if self.rank == root else None, root)
        return value if self.rank == root else pickle.loads(data)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's object, in rank order."""
        return [pickle.loads(data) for data in self.core.all_gather_bytes(_dumps(value))]

    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        """Every rank's object, in rank order, on the root; `None` on the others."""
        gathered = self.core.gather_bytes(_dumps(value), root)
        return None if gathered is None else [pickle.loads(data) for data in gathered]

    def scatter_object(self, values: Sequence[Any] | None = None, root: int = 0) -> Any:
        """The r-th of the root's objects, of which there is one for each rank."""
        encoded = [_dumps(value) for value in (() if values is None else values)] if self.rank == root else None
        return pickle.loads(self.core.scatter_bytes(encoded, root))

    def all_to_all_object(self, values: Sequence[Any]) -> list[Any]:
        """What each rank has for this one; the r-th of `values` goes to rank r."""
        return [pickle.loads(data) for data in self.core.all_to_all_bytes([_dumps(value) for value in values])]

    def send_object(self, value: Any, to: int, tag: int = 0, *, synchronous: bool = False) -> None:
        """Sends an object, which `receive_object` receives. `synchronous` is as in `send`."""
        self.core.send_bytes(_dumps(value), to, tag, synchronous)

    def send_object_async(self, value: Any, to: int, tag: int = 0, *, synchronous: bool = False) -> Handle:
        """Begins a `send_object` and returns its handle. You may change the object at once."""
        return Handle(self.core.send_bytes_async(_dumps(value), to, tag, synchronous), lambda _: None)

    def receive_object(self, source: int | None = None, tag: int | None = None) -> tuple[Any, int, int]:
        """An object, with the rank that sent it and its tag."""
        data, sender, its_tag = self.core.receive_bytes(source, tag)
        return pickle.loads(data), sender, its_tag

    def receive_object_async(self, source: int | None = None, tag: int | None = None) -> Handle:
        """`receive_object`, going on by itself."""
        received = self.core.receive_bytes_async(source, tag)
        return Handle(received, lambda result: (pickle.loads(result[0]), result[1], result[2]))

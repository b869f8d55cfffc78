"""Collectives and messages of Python objects, which are sent as pickles.

Unpickling can run any code that the sender chooses. Objects come only from ranks of the same job. When a
rank joins a job, it proves that it knows the job's secret.
"""

import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from . import _core
from .handles import Handle


def _pickle_object(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def call_with_encoded(operation: Callable[..., Any], encode: Callable[[], Any], *arguments: Any) -> Any:
    """Calls the collective `operation` with the bytes that `encode` returns, and with `arguments`.

    If `encode` raises an exception, this rank raises it too, and all other ranks raise an `Error` that names this rank and the
    reason.
    """
    try:
        data = encode()
    except Exception as error:
        with suppress(_core.Error):
            operation(None, *arguments, refusal=f"{type(error).__name__}: {error}")
        raise
    return operation(data, *arguments)


class ObjectCollectives:
    """A group's operations on Python objects.

    If a rank cannot pickle its objects, or passes a wrong number of objects, then all ranks of the collective raise an
    exception that names the reason. After this exception, the ranks can still use the group.
    """

    core: "_core.Group"
    rank: int

    def broadcast_object(self, value: Any = None, root: int = 0) -> Any:
        """Returns the root's object on every rank. Other ranks need not pass an object."""
        return self._broadcast_from_root(lambda: value, root)

    def _broadcast_from_root(self, make: Callable[[], Any], root: int) -> Any:
        """Calls `make` on the root, and returns the result on every rank. If `make` raises an exception, all ranks raise an
        exception."""
        value = None

        def encode() -> bytes:
            nonlocal value
            value = make()
            return _pickle_object(value)

        is_root = self.rank == root
        data = call_with_encoded(self.core.broadcast_bytes, encode if is_root else lambda: None, root)
        return value if is_root else pickle.loads(data)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns every rank's object, in rank order."""
        return [pickle.loads(data) for data in call_with_encoded(self.core.all_gather_bytes, lambda: _pickle_object(value))]

    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        """Returns every rank's object, in rank order, on the root, and `None` on the other ranks."""
        gathered = call_with_encoded(self.core.gather_bytes, lambda: _pickle_object(value), root)
        return None if gathered is None else [pickle.loads(data) for data in gathered]

    def scatter_object(self, values: Sequence[Any] | None = None, root: int = 0) -> Any:
        """The root passes one object for each rank, and rank r gets `values[r]`."""
        is_root = self.rank == root
        encode = (lambda: [_pickle_object(value) for value in (() if values is None else values)]) if is_root else (lambda: None)
        return pickle.loads(call_with_encoded(self.core.scatter_bytes, encode, root))

    def all_to_all_object(self, values: Sequence[Any]) -> list[Any]:
        """Sends `values[r]` to rank r. Returns the objects that this rank received, in the rank order of their
        senders."""
        received = call_with_encoded(self.core.all_to_all_bytes, lambda: [_pickle_object(value) for value in values])
        return [pickle.loads(data) for data in received]

    def send_object(self, value: Any, to: int, tag: int = 0, *, synchronous: bool = False) -> None:
        """Sends an object to rank `to`. That rank must receive the object with `receive_object`. `synchronous` has
        the same meaning as in `send`."""
        self.core.send_bytes(_pickle_object(value), to, tag, synchronous)

    def send_object_async(self, value: Any, to: int, tag: int = 0, *, synchronous: bool = False) -> Handle:
        """Begins a `send_object` and returns its handle. You may change the object as soon as the call has returned."""
        return Handle(self.core.send_bytes(_pickle_object(value), to, tag, synchronous, async_op=True), lambda _: None)

    def receive_object(self, source: int | None = None, tag: int | None = None) -> tuple[Any, int, int]:
        """Receives an object. Returns the object, the rank that sent it, and the tag. If `source` is `None`, the message may
        come from any rank. If `tag` is `None`, the message may have any tag."""
        data, sender, its_tag = self.core.receive_bytes(source, tag)
        return pickle.loads(data), sender, its_tag

    def receive_object_async(self, source: int | None = None, tag: int | None = None) -> Handle:
        """Begins a `receive_object` and returns its handle. `Handle.wait` returns the object, its source and its tag."""
        received = self.core.receive_bytes(source, tag, async_op=True)
        return Handle(received, lambda result: (pickle.loads(result[0]), result[1], result[2]))

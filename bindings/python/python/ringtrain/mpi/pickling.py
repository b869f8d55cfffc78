"""Converts objects to bytes and back: `MPI.pickle`, whose functions a program may replace."""

import pickle as _pickle
from collections.abc import Callable, Iterable
from typing import Any


class Pickle:
    """A pair of functions that convert objects to bytes and back. `PROTOCOL` is the version of the pickle protocol. `THRESHOLD`
    is the minimum size in bytes of the buffers that `dumps_oob` returns separately."""

    def __init__(
        self,
        dumps: Callable[..., bytes] | None = None,
        loads: Callable[[Any], Any] | None = None,
        protocol: int | None = None,
        threshold: int | None = None,
    ) -> None:
        self._given = dumps
        self.PROTOCOL = _pickle.HIGHEST_PROTOCOL if protocol is None and dumps is None else protocol
        self.THRESHOLD = 1024**2 // 4 if threshold is None else threshold
        self.loads = _pickle.loads if loads is None else loads

    def dumps(self, obj: Any) -> bytes:
        """Returns the bytes of an object."""
        given = self._given
        if given is None:
            return _pickle.dumps(obj, self.PROTOCOL)
        data = given(obj) if self.PROTOCOL is None else given(obj, self.PROTOCOL)
        return data if isinstance(data, bytes) else bytes(data)

    def dumps_oob(self, obj: Any) -> tuple[bytes, list[memoryview]]:
        """Returns the bytes of an object, and separately its large buffers."""
        buffers: list[memoryview] = []

        def keep(buffer: _pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < self.THRESHOLD:
                return True
            buffers.append(raw)
            return False

        given = self._given or _pickle.dumps
        return given(obj, max(self.PROTOCOL or 5, 5), buffer_callback=keep), buffers

    def loads_oob(self, data: bytes, buffers: Iterable[Any]) -> Any:
        """Returns the object for the two results of `dumps_oob`."""
        return self.loads(data, buffers=buffers)  # type: ignore[call-arg]


pickle = Pickle()

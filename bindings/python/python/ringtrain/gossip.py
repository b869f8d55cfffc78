"""Gossip averaging: each rank takes its training steps alone, and averages its parameters with random ranks."""

import operator
import threading
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from . import _core, _shutdown, _world
from ._errors import InvalidArgument
from ._parameters import Parameters
from .group import Group


class AverageCounts(NamedTuple):
    """How many averages a rank has done and skipped. One average is due after every `every` of its steps."""

    done: int
    """The number of averages whose results this rank has applied."""
    skipped: int
    """The number of due averages that had no effect. Either this rank did not start the average, because its previous average
    was still in progress or all other ranks had ended; or the other rank refused or did not answer."""


class Gossip:
    """Averages the parameters of pairs of ranks while the ranks train. No rank waits for another rank before the end of the
    training, and the loss of a rank does not affect the other ranks.

    The ranks start from the parameters of the group's rank 0. Each rank then takes steps with an optimizer of its own, and
    calls `step` after each of its steps. After every `every` of its steps, a rank sends its parameters to a random rank.
    A thread of that rank averages the parameters and replies, even while that rank computes. The rank that sent the
    parameters does not wait: a later `step` applies the result. At the end, `finish` averages the parameters of all ranks.
    This method is gossip averaging, or AD-PSGD (Lian et al., "Asynchronous decentralized parallel stochastic gradient
    descent", 2018).

    `parameters` is a float32 array, a sequence or mapping of arrays, a tensor, a sequence or mapping of tensors, or a
    module of torch. The arrays must be contiguous, and the tensors must be on the CPU. If you pass a module, only its
    parameters that require gradients are averaged. `every` may differ between ranks.

    The object is a context manager. A `with` block that ends normally calls `finish`. If the block raises an exception,
    the other ranks count this rank as lost, and continue.

    All ranks of `group` (by default the world) must create the object at the same time. Raises `InvalidArgument` if an
    argument is wrong, and `Mismatch` if the ranks pass different numbers of parameters. Any thread may call any method;
    the calls run one after another.
    """

    def __init__(self, parameters: Any, *, every: int = 1, group: Group | None = None) -> None:
        if not 1 <= operator.index(every) < 2**32:
            raise InvalidArgument(f"every is {every}; it must be at least 1 and below 2^32")
        group = _world.current_world() if group is None else group
        self._parameters = Parameters(parameters)
        self._every = operator.index(every)
        # A thread must hold this lock while it uses `_values` or the methods of `_core`.
        self._lock = threading.RLock()
        self._values = self._parameters.copy_to_vector(np.empty(self._parameters.element_count, np.float32))
        self._core = _core.Gossip(group.core, self._values, self._values.size, self._every)
        self._resource = _shutdown.GroupResource(self._core)
        self._parameters.copy_from_vector(self._values)

    def __repr__(self) -> str:
        return f"<ringtrain.Gossip: {self._parameters.element_count} parameters, every {self._every} steps>"

    def step(self) -> bool:
        """Call this method after each step of this rank's optimizer. Writes the results of averages that have arrived to the
        program's arrays or tensors. After every `every` calls, starts an average with a random rank. Does not wait for
        other ranks. Returns whether averages have changed the parameters."""
        with self._lock:
            self._parameters.copy_to_vector(self._values)
            is_changed = self._core.step(self._values)
            if is_changed:
                self._parameters.copy_from_vector(self._values)
            return is_changed

    def finish(self, timeout: float | None = None) -> None:
        """Ends the gossip: writes the average of the parameters of all ranks to the program's arrays or tensors. All ranks
        then have the same parameters, bit for bit. Each rank calls `finish` after its last step. Lost ranks are left out
        of the average. At the end, the call closes the object, also after an error.

        `timeout` is the time in seconds that a rank waits for slower ranks. The default is the time that one operation of
        the group may take. A rank that calls `finish` after this time is left out of the average, and its own call raises
        `JobFailed`. Ctrl-C interrupts the wait.

        Raises `JobFailed` if fewer than half of the group's ranks can finish together, or exactly half of them without
        rank 0. The text says why the other ranks are missing. Raises `PeerLost` if the rank that computes the average is lost
        during the call. The exception's `rank` is this lost rank. After an error, the program's arrays or tensors are
        unchanged."""
        with self._lock:
            self._parameters.copy_to_vector(self._values)
            self._core.finish(self._values, timeout)
            self._parameters.copy_from_vector(self._values)

    @property
    def averages(self) -> AverageCounts:
        """How many averages this rank has done and skipped. Does not count the averages that other ranks started."""
        with self._lock:
            return AverageCounts(*self._core.averages)

    @property
    def lost_ranks(self) -> list[tuple[int, str]]:
        """A pair for each lost rank: its rank in the job, and the reason, which names its host. During the training, the list has
        the lost ranks that this rank knows. After `finish`, the list has the ranks that are left out of the average, and is
        the same on all ranks."""
        with self._lock:
            return self._core.lost_ranks

    @property
    def is_closed(self) -> bool:
        """Whether this object has been closed."""
        return self._core.is_closed

    def close(self) -> None:
        """Closes the connections of this rank without the final average. The other ranks count this rank as lost, unless
        this rank has called `finish`. The end of the program also closes the connections. A second call of `close` does
        nothing."""
        with self._lock:
            self._core.close()

    def __enter__(self) -> "Gossip":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.is_closed:
            return
        if error is None:
            self.finish()
        else:
            # The other ranks count this rank as lost, with this reason.
            self._core.abort(f"its program raised {type(error).__name__}: {error}")
            self.close()

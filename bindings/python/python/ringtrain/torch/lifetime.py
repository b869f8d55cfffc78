"""The end of a process: peers are told of uncaught exceptions, and groups are let go of while the interpreter still runs."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from types import TracebackType
from typing import Protocol

from ringtrain import _core, _world


class Mortal(Protocol):
    """What has to be let go of."""

    def fail(self, message: str) -> None:
        """Tells the other ranks that this one gives up, and why."""

    def shutdown(self) -> None:
        """Lets go. May be called again."""


# In the order in which they were made; a dictionary of weak references, because sets have no order.
_living: weakref.WeakValueDictionary[int, Mortal] = weakref.WeakValueDictionary()
_count = 0
_process = 0


def watch(mortal: Mortal) -> None:
    """Lets go of it when the process ends, the youngest first, and has it tell its peers of an uncaught exception."""
    global _count, _process
    if not _count:
        _process = os.getpid()
        # Groups that meet through torch's store have no world of ours, and data loaders fork all the same.
        _world._prepare_for_the_end()
        _tell_peers_of_uncaught_exceptions()
        atexit.register(_end)
    _count += 1
    _living[_count] = mortal


def _tell_peers_of_uncaught_exceptions() -> None:
    before = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        # Who ends because the job has failed has nothing to add.
        if os.getpid() == _process and not isinstance(error, _core.JobFailed):
            for mortal in _youngest_first():
                mortal.fail(f"its program ended with {kind.__name__}: {error}; look at that rank's own output for where")
        before(kind, error, traceback)

    sys.excepthook = tell


def _end() -> None:
    if os.getpid() == _process:
        for mortal in _youngest_first():
            mortal.shutdown()


def _youngest_first() -> list[Mortal]:
    return [mortal for _, mortal in sorted(_living.items(), reverse=True)]

"""The program that each rank of `ringtrain.run` executes. The program calls the function that was passed to `run`, and writes
the result to a file. The process that called `run` reads this file."""

import fcntl
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import cloudpickle

from . import _core, _world

Outcome = tuple[bool, Any, str, float]
"""Whether the function of a rank has returned, its result or exception, the traceback, and the time in seconds since 1970."""


def main() -> int:
    directory = Path(sys.argv[1])
    rank = int(os.environ["RING_RANK"])
    threading.Thread(target=_end_with_caller, args=(directory,), daemon=True).start()
    data, error = call_task((directory / "task").read_bytes())
    _write_result(directory, rank, data)
    if error is not None:
        end_job_because_of(error)
    return 0 if error is None else 1


def call_task(task: bytes) -> tuple[bytes, BaseException | None]:
    """Calls the function of a pickled task: a function, its arguments and its keyword arguments. Returns the pickled `Outcome`,
    and the exception that the function has raised."""
    try:
        func, args, kwargs = pickle.loads(task)
        return cloudpickle.dumps((True, func(*args, **kwargs), "", time.time())), None
    except BaseException as error:  # noqa: BLE001  (the caller must learn of every exception)
        trace = traceback.format_exc()
        failure = (False, error, trace, time.time())
        try:
            data = cloudpickle.dumps(failure)
            pickle.loads(data)
        except Exception:  # noqa: BLE001  (the caller gets the text of an exception that cannot be pickled)
            data = pickle.dumps((False, None, trace, failure[3]))
        return data, error


def end_job_because_of(error: BaseException) -> None:
    """Ends the job because the function of this rank raised an exception. The caller prints its traceback, but other ranks may be
    waiting for this rank."""
    if not isinstance(error, _core.JobFailed):
        _world.abort_world(f"its function raised {type(error).__name__}: {error}")


def _end_with_caller(directory: Path) -> None:
    """Ends this rank as soon as the caller, the process that called `run`, has ended. The caller holds a lock on the
    file `caller` in `directory`. The kernel releases the lock when the caller ends."""
    try:
        with open(directory / "caller", "r+") as caller:
            fcntl.lockf(caller, fcntl.LOCK_EX)
    except OSError:
        # This file system does not support locks.
        return
    os.kill(os.getpid(), signal.SIGKILL)


def _write_result(directory: Path, rank: int, data: bytes) -> None:
    """Writes the result file in one step: a reader finds either no file or a complete file."""
    draft = directory / f"draft-{rank}"
    draft.write_bytes(data)
    draft.rename(directory / f"result-{rank}")


if __name__ == "__main__":
    sys.exit(main())

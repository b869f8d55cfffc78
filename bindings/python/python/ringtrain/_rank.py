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

import cloudpickle

from . import _core, _world


def main() -> int:
    directory = Path(sys.argv[1])
    rank = int(os.environ["RING_RANK"])
    threading.Thread(target=_end_with_caller, args=(directory,), daemon=True).start()
    try:
        func, args, kwargs = pickle.loads((directory / "task").read_bytes())
        outcome = (True, func(*args, **kwargs), "", time.time())
        data = cloudpickle.dumps(outcome)
    except BaseException as error:  # noqa: BLE001  (the caller must learn of every exception)
        trace = traceback.format_exc()
        failure = (False, error, trace, time.time())
        try:
            data = cloudpickle.dumps(failure)
            pickle.loads(data)
        except Exception:  # noqa: BLE001  (the caller gets the text of an exception that cannot be pickled)
            data = pickle.dumps((False, None, trace, failure[3]))
        _write_result(directory, rank, data)
        # The caller prints the traceback. Other ranks may be waiting for this rank, so this rank ends the job.
        if not isinstance(error, _core.JobFailed):
            _world.abort_world(f"its function raised {type(error).__name__}: {error}")
        return 1
    _write_result(directory, rank, data)
    return 0


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

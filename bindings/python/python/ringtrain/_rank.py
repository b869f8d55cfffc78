"""The program of a rank that `ringtrain.run` starts: it calls the function and writes the result to a file for the caller."""

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
    except BaseException as error:  # noqa: BLE001  (the caller has to know of every exception)
        trace = traceback.format_exc()
        failure = (False, error, trace, time.time())
        try:
            data = cloudpickle.dumps(failure)
            pickle.loads(data)
        except Exception:  # noqa: BLE001  (the caller gets the text of an exception that cannot be pickled)
            data = pickle.dumps((False, None, trace, failure[3]))
        _leave(directory, rank, data)
        # The caller shows the traceback; the other ranks may wait for this one.
        if not isinstance(error, _core.JobFailed):
            _world.give_up(f"its function raised {type(error).__name__}: {error}")
        return 1
    _leave(directory, rank, data)
    return 0


def _end_with_caller(directory: Path) -> None:
    """Ends this process when the caller dies: the caller holds a lock as long as it lives."""
    try:
        with open(directory / "caller", "r+") as caller:
            fcntl.lockf(caller, fcntl.LOCK_EX)
    except OSError:
        # Some file systems have no locks.
        return
    os.kill(os.getpid(), signal.SIGKILL)


def _leave(directory: Path, rank: int, data: bytes) -> None:
    """Writes the result, whole or not at all."""
    draft = directory / f"draft-{rank}"
    draft.write_bytes(data)
    draft.rename(directory / f"result-{rank}")


if __name__ == "__main__":
    sys.exit(main())

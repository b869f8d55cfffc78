"""The program that each rank of `ringtrain.run` executes. The program calls the function that was passed to `run`, and writes
the result to a file. The process that called `run` reads this file."""

import fcntl
import os
import signal
import sys
import threading
from pathlib import Path

from ._task import call_task, end_job_because_of


def main() -> int:
    directory = Path(sys.argv[1])
    rank = int(os.environ["RING_RANK"])
    threading.Thread(target=_end_with_caller, args=(directory,), daemon=True).start()
    data, error = call_task((directory / "task").read_bytes())
    _write_result(directory, rank, data)
    if error is not None:
        end_job_because_of(error)
    return 0 if error is None else 1


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

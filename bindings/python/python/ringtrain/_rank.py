"""A rank that `ringtrain.run` has started: calls the function, and leaves what it returned where the caller looks."""

import os
import pickle
import sys
import time
import traceback
from pathlib import Path

import cloudpickle

from . import _core, _world


def main() -> int:
    directory = Path(sys.argv[1])
    rank = int(os.environ["RING_RANK"])
    try:
        func, args, kwargs = pickle.loads((directory / "task").read_bytes())
        outcome = (True, func(*args, **kwargs), "", time.time())
        data = cloudpickle.dumps(outcome)
    except BaseException as error:  # noqa: BLE001  (whatever it was, the caller has to know)
        trace = traceback.format_exc()
        failure = (False, error, trace, time.time())
        try:
            data = cloudpickle.dumps(failure)
            pickle.loads(data)
        except Exception:  # noqa: BLE001  (an exception that cannot be pickled is told by its text)
            data = pickle.dumps((False, None, trace, failure[3]))
        _leave(directory, rank, data)
        # The caller shows the traceback; the other ranks may wait for this one.
        if not isinstance(error, _core.JobFailed):
            _world.give_up(f"its function raised {type(error).__name__}: {error}")
        return 1
    _leave(directory, rank, data)
    return 0


def _leave(directory: Path, rank: int, data: bytes) -> None:
    """Whole or not at all."""
    draft = directory / f"draft-{rank}"
    draft.write_bytes(data)
    draft.rename(directory / f"result-{rank}")


if __name__ == "__main__":
    sys.exit(main())

"""The function that the ranks of `ringtrain.run`, `ringtrain.ray.run` and `ringtrain.dask.run` call, and its result."""

import pickle
import time
import traceback
from typing import Any

from . import _core, _world

Outcome = tuple[bool, Any, str, float]
"""Whether the function of a rank has returned, its result or exception, the traceback, and the time in seconds since 1970."""


def call_task(task: bytes) -> tuple[bytes, BaseException | None]:
    """Calls the function of a pickled task: a function, its arguments and its keyword arguments. Returns the pickled `Outcome`,
    and the exception that the function has raised."""
    # Importing cloudpickle takes time, and most processes that import the package call no task.
    import cloudpickle

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

"""Starts the ranks of a job from a notebook, or from another Python program that is not itself a rank.

The functions import some modules only when they are called, because each rank imports this package and most ranks never call
them."""

import fcntl
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ._errors import Error, InvalidArgument
from ._task import Outcome

_RANK_MODULE = "ringtrain._rank"


class RunError(Error):
    """A rank that `run` started has failed. `rank` is the rank whose function was the first to raise an exception.
    `__cause__` is this exception if it can be pickled. `rank` is `None` if no function raised an exception, for example because a
    process was killed.
    """


def ringrun() -> str:
    """Returns the path of the launcher `ringrun`. Searches the directory of this Python interpreter first, then the
    directories in PATH.
    """
    import shutil

    beside = Path(sys.executable).parent / "ringrun"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("ringrun")
    if found is None:
        raise Error(
            "ringrun is neither in this Python's directory nor on PATH; install the package again, which contains ringrun"
        )
    return found


def run(
    func: Callable[..., Any],
    np: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Starts a new job of `np` processes on this machine and calls `func(*args, **kwargs)` in each process. Returns
    the results of these calls in rank order.

    The function may be defined in a notebook. The function must call `ringtrain.init()` before it communicates. The calling
    process prints the output of the ranks and puts the rank in front of each line. `timeout` is the limit for the whole job in
    seconds. `env` has additional environment variables for the ranks.

    Raises `RunError`, which names the rank that failed first and has the traceback of that rank. The processes of all ranks have
    ended when the call returns. If you interrupt the call, or if the calling process is killed, the processes of the
    ranks end too.
    """
    if np < 1:
        raise InvalidArgument(f"cannot start {np} processes; np must be at least 1")
    import tempfile

    import cloudpickle

    launcher = ringrun()
    with tempfile.TemporaryDirectory(prefix="ringtrain-") as directory:
        task = Path(directory) / "task"
        task.write_bytes(cloudpickle.dumps((func, tuple(args), dict(kwargs or {}))))
        command = [launcher, "-n", str(np)]
        if timeout is not None:
            command += ["--job-timeout", str(timeout)]
        command += [sys.executable, "-m", _RANK_MODULE, directory]
        with open(Path(directory) / "caller", "w") as caller:
            # When this process ends for any reason, the operating system releases the lock, and then the ranks end.
            fcntl.lockf(caller, fcntl.LOCK_EX)
            variables = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": _python_path(), **(env or {})}
            code, tail = _run_launcher(command, variables)
        return _read_results(Path(directory), np, code, tail)


def _python_path() -> str:
    """Returns this process's `sys.path` as the value of PYTHONPATH for the ranks. The returned value has the working
    directory in place of the empty entry that `sys.path` has in a notebook.
    """
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)


def _run_launcher(command: list[str], env: Mapping[str, str]) -> tuple[int, list[str]]:
    """Runs the launcher and prints the launcher's output. Returns the exit code of the launcher and the last lines of the
    output."""
    import subprocess

    process = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    tail: list[str] = []
    reader = threading.Thread(target=_print_lines, args=(process.stdout, tail), daemon=True)
    reader.start()
    try:
        code = process.wait()
    except BaseException:
        # A terminal sends Ctrl-C to the launcher too, but a notebook does not.
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    finally:
        reader.join(5)
    return code, tail


def _print_lines(lines: IO[str] | None, tail: list[str]) -> None:
    for line in lines or ():
        print(line, end="")
        tail.append(line)
        del tail[:-20]


def _read_results(directory: Path, np: int, code: int, tail: list[str]) -> list[Any]:
    """Returns the results that the ranks have written to files in `directory`. Raises `RunError` for the rank that failed
    first. `code` is the exit code of the launcher, and `tail` has the last lines of its output."""
    paths = {rank: directory / f"result-{rank}" for rank in range(np)}
    outcomes = {rank: pickle.loads(path.read_bytes()) for rank, path in paths.items() if path.exists()}
    raise_first_failure(outcomes)
    missing = [rank for rank in range(np) if rank not in outcomes]
    if code or missing:
        who = f"; no result from rank {', '.join(map(str, missing))}" if missing else ""
        raise RunError(f"ringrun ended with exit code {code}{who}:\n{''.join(tail)}")
    return [outcomes[rank][1] for rank in range(np)]


def raise_first_failure(outcomes: Mapping[int, Outcome]) -> None:
    """Raises `RunError` for the rank whose function was the first to raise an exception. Does nothing if no function did."""
    failures = [(when, rank, value, trace) for rank, (is_well, value, trace, when) in outcomes.items() if not is_well]
    if failures:
        _, rank, value, trace = min(failures, key=lambda failure: failure[0])
        error = RunError(f"rank {rank} raised an exception:\n{trace}")
        error.rank = rank
        raise error from (value if isinstance(value, BaseException) else None)

"""Runs ranks for tests, in three ways: as a program under ringrun, as a file of checks that all run in one launch,
and as threads of this process.

Both pytest and the ranks import this module. This module imports pytest only inside functions that pytest calls, because
the ranks do not need pytest.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WAIT_LIMIT_S = 60.0
"""The default limit in seconds for every wait of a test. The limit is long because the machine may be busy."""

_MARK = "RINGTRAIN_TESTS"
"""The environment variable that marks the processes of a test run. The value of the variable identifies the run."""
_OWN_MARK = f"{os.getpid()}-{uuid.uuid4().hex}"


def own_mark() -> dict[str, str]:
    """Returns the variable with which `kill_leftover_processes` finds the processes of this test run."""
    return {_MARK: _OWN_MARK}


# Waiting


def wait_until(what: str, condition: Callable[[], Any], patience: float = WAIT_LIMIT_S) -> Any:
    """Waits until `condition` returns a true value, and returns that value. `what` describes the condition in the error."""
    until = time.monotonic() + patience
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < until, f"this did not happen within {patience:g} s: {what}"
        time.sleep(0.002)


def wait_and_read(path: str | Path) -> str:
    """Waits until another process has written the file with `write_atomically`, and returns its text."""
    path = Path(path)
    wait_until(f"{path} appears", path.exists)
    return path.read_text()


def write_atomically(path: str | Path, text: object) -> None:
    """Writes a file in one step, so that no other process reads an incomplete file."""
    draft = Path(f"{path}.draft-{os.getpid()}")
    draft.write_text(str(text))
    draft.rename(path)


def is_alive(pid: int) -> bool:
    """Returns whether the process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return not stat.rpartition(")")[2].startswith(" Z")


def is_asleep(thread: int, pid: int | None = None) -> bool:
    """Returns whether a thread of a process sleeps in the kernel."""
    try:
        stat = Path(f"/proc/{pid or os.getpid()}/task/{thread}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].startswith(" S")


def wait_until_asleep(thread: int, pid: int | None = None) -> None:
    """Waits until a thread is asleep in 25 consecutive checks. A thread that waits only shortly for a lock wakes
    before the 25th check."""
    consecutive = 0

    def is_blocked() -> bool:
        nonlocal consecutive
        consecutive = consecutive + 1 if is_asleep(thread, pid) else 0
        return consecutive >= 25

    wait_until(f"thread {thread} blocks", is_blocked)


# Programs under ringrun


@dataclass
class FinishedProgram:
    """The exit code and the output of a program that has run under ringrun and has ended."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    command: list[str] = field(repr=False)

    def lines(self, rank: int) -> list[str]:
        """Returns the lines that a rank wrote to its standard output."""
        return _tagged(self.stdout, f"[{rank}]<stdout>:")

    def errors(self, rank: int) -> list[str]:
        """Returns the lines that a rank wrote to its standard error."""
        return _tagged(self.stderr, f"[{rank}]<stderr>:")

    def __str__(self) -> str:
        return (
            f"{' '.join(self.command)}\nended with exit code {self.code} after {self.seconds:.1f} s\n{self.stdout}\n{self.stderr}"
        )


def _tagged(text: str, tag: str) -> list[str]:
    """Returns the lines of `text` that begin with `tag`, without the tag."""
    return [line.removeprefix(tag) for line in text.splitlines() if line.startswith(tag)]


class RunningProgram:
    """A program that runs under ringrun."""

    def __init__(self, command: list[str], env: Mapping[str, str], timeout: float) -> None:
        self.command = command
        self.timeout = timeout
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def signal(self, number: int) -> None:
        """Sends ringrun a signal."""
        self.process.send_signal(number)

    def finish(self) -> FinishedProgram:
        """Waits until the program has ended. If the program has not ended within its timeout, kills the program with all its
        ranks and raises AssertionError."""
        try:
            out, err = self.process.communicate(timeout=max(0.1, self.timeout - (time.monotonic() - self.started)))
        except BaseException as late:
            self.process.kill()
            out, err = self.process.communicate()
            if not isinstance(late, subprocess.TimeoutExpired):
                raise
            text = f"{out.decode(errors='replace')}\n{err.decode(errors='replace')}"
            raise AssertionError(f"{' '.join(self.command)}\ndid not end within {self.timeout} s:\n{text}") from None
        seconds = time.monotonic() - self.started
        return FinishedProgram(
            self.process.returncode, out.decode(errors="replace"), err.decode(errors="replace"), seconds, self.command
        )


class Launcher:
    """Runs `ringrun -n N python SCRIPT ARGUMENTS`. The ranks import modules from the same directories as this process."""

    def __init__(self, program: str) -> None:
        self.program = program

    def start(
        self,
        n: int,
        *arguments: object,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        timeout: float = WAIT_LIMIT_S,
        command: Sequence[str] = (sys.executable,),
    ) -> RunningProgram:
        """Starts `ringrun FLAGS COMMAND ARGUMENTS` with `n` ranks, and returns the running program. By default,
        `command` is this Python interpreter."""
        line = [self.program, "-n", str(n), *flags, *command, *map(str, arguments)]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        return RunningProgram(
            line, {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **own_mark(), **(env or {})}, timeout
        )

    def __call__(self, n: int, *arguments: object, code: int | None = 0, **options: Any) -> FinishedProgram:
        """Runs a program until it ends. Raises AssertionError if the program's exit code is not `code`. If `code` is
        `None`, every exit code is accepted."""
        done = self.start(n, *arguments, **options).finish()
        assert code is None or done.code == code, f"the exit code is not {code}\n{done}"
        return done


def kill_leftover_processes() -> list[str]:
    """Kills those processes of this test run that have not ended. Returns the ids and commands of the killed
    processes."""

    def living_processes() -> dict[int, str]:
        entry = f"{_MARK}={_OWN_MARK}".encode()
        found = {}
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                if entry not in (directory / "environ").read_bytes().split(b"\0"):
                    continue
                command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if is_alive(int(directory.name)):
                found[int(directory.name)] = command
        return found

    # A process that has just been killed may still exist for a moment.
    until = time.monotonic() + 5
    while (left := living_processes()) and time.monotonic() < until:
        time.sleep(0.02)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    return [f"{pid} {command}" for pid, command in left.items()]


# Running many checks in one launch


class Cases:
    """The checks of a file. Each check is a function that all ranks call at the same time, with the group of all
    ranks. For each number of ranks, the file is launched once and runs all checks. Pytest reports each check as a
    separate test.

        cases = Cases(__file__, sizes=(1, 2, 4))

        @cases
        def a_sum_of_ones_is_the_size(world): ...

        test = cases.tests()

        if __name__ == "__main__":
            cases.main()
    """

    def __init__(self, file: str, sizes: Sequence[int] = (1, 2, 3, 4), timeout: float = 20.0, **options: Any) -> None:
        self.file = file
        self.sizes = sizes
        self.timeout = timeout
        self.options = options
        """The options that the ranks pass to `ringtrain.init`."""
        self.functions: dict[str, tuple[Callable[[Any], None], Sequence[int]]] = {}

    def __call__(self, function: Callable[[Any], None] | None = None, *, sizes: Sequence[int] | None = None) -> Any:
        """Adds a check. The check runs once for each number of ranks in `sizes`."""
        if function is None:
            return lambda function: self(function, sizes=sizes)
        self.functions[function.__name__] = (function, sizes or self.sizes)
        return function

    def for_each(
        self, values: Iterable[Any], sizes: Sequence[int] | None = None
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Returns a decorator that adds a check for each value. The decorated function gets the group and the value."""

        def add(function: Callable[..., None]) -> Callable[..., None]:
            for value in values:
                name = f"{function.__name__}[{getattr(value, '__name__', value)}]"
                self.functions[name] = (lambda world, value=value: function(world, value), sizes or self.sizes)
            return function

        return add

    def tests(self) -> Callable[..., None]:
        """Returns the test function that pytest collects, with one parameter set for each pair of a check and a number of
        ranks."""
        import pytest

        def is_only_in_full_runs(n: int, sizes: Sequence[int]) -> bool:
            return n == 4 or (n == 2 and 3 in sizes)

        pairs = [
            pytest.param(name, n, id=f"{name}-n{n}", marks=[pytest.mark.full] if is_only_in_full_runs(n, sizes) else [])
            for name, (_, sizes) in self.functions.items()
            for n in sizes
        ]

        @pytest.mark.parametrize(("name", "n"), pairs)
        def test(ringrun: Launcher, reports: dict, name: str, n: int) -> None:
            if (self.file, n) not in reports:
                reports[self.file, n] = self._launch(ringrun, n)
            done, outcomes = reports[self.file, n]
            failures = []
            for rank, of_rank in enumerate(outcomes):
                if name not in of_rank:
                    failures.append(f"rank {rank} did not run this check:\n{done}")
                elif of_rank[name]:
                    failures.append(f"rank {rank}:\n{of_rank[name]}")
            assert not failures, "\n".join(failures)

        return test

    def _launch(self, ringrun: Launcher, n: int) -> tuple[Any, list[dict[str, str]]]:
        """Runs all checks on `n` ranks. Returns two values: the finished program or the error of the launch, and for
        each rank the error texts of its checks, by the name of the check. The text of a check without an error is
        empty."""
        with tempfile.TemporaryDirectory(prefix="ringtrain-tests-") as directory:
            try:
                done: Any = ringrun(n, self.file, code=None, env={"RINGTRAIN_REPORT": directory})
            except AssertionError as failure:
                done = failure
            outcomes = []
            for rank in range(n):
                path = Path(directory) / f"rank-{rank}"
                lines = path.read_text().splitlines() if path.exists() else []
                outcomes.append(dict(json.loads(line) for line in lines))
            return done, outcomes

    def main(self) -> None:
        """Runs all checks on this rank, one after another. The variable TEST_TRANSPORT selects the transport, for example "tcp".
        The variable RINGTRAIN_ONLY selects the checks whose names contain its value."""
        import ringtrain as ring

        world = ring.init(timeout=self.timeout, transport=os.environ.get("TEST_TRANSPORT"), **self.options)
        only = os.environ.get("RINGTRAIN_ONLY")
        failures = 0
        ended = ""
        path = Path(os.environ.get("RINGTRAIN_REPORT", tempfile.gettempdir())) / f"rank-{world.rank}"
        with open(path, "w") as report:
            for name, (function, sizes) in self.functions.items():
                if world.size not in sizes or (only and only not in name):
                    continue
                if ended:
                    print(json.dumps([name, f"the job ended earlier, in {ended}"]), file=report, flush=True)
                    continue
                trace = ""
                started = time.monotonic()
                try:
                    function(world)
                    world.barrier()
                except BaseException as error:  # noqa: BLE001  (it is reported)
                    trace = traceback.format_exc()
                    failures += 1
                    ended = name if isinstance(error, ring.JobFailed) or world.size > 1 else ""
                    if world.size > 1:
                        # The other ranks may be in another operation, so no further check can run in this job.
                        world.core.abort(f"{name} failed: {type(error).__name__}: {error}")
                if only:
                    print(f"{name}: {time.monotonic() - started:.2f} s {trace}", file=sys.stderr)
                print(json.dumps([name, trace]), file=report, flush=True)
        sys.exit(failures > 0)


# Jobs whose ranks are threads of this process


def run_in_threads(n: int, work: Callable[[Any], Any], **options: Any) -> list[Any]:
    """Runs a job whose `n` ranks are threads of this process. Each thread calls `work(group)`. Returns, in rank order,
    the value that each call returned or the exception that the call raised. A function among `options` gets the rank."""
    import ringtrain as ring
    from ringtrain import _core

    secret, job = secrets.token_hex(16), secrets.token_hex(16)
    server = _core.Rendezvous(n, secret, job)
    results: list[Any] = [None] * n

    def run_rank(rank: int) -> None:
        values = {name: option(rank) if callable(option) else option for name, option in options.items()}
        try:
            joined = _core.join(
                rank=rank, size=n, rendezvous=server.address, job_id=job, secret=secret, **{"timeout": 20.0, **values}
            )
            with ring.Group(joined) as group:
                results[rank] = work(group)
        except BaseException as error:  # noqa: BLE001  (the caller checks it)
            results[rank] = error

    threads = [threading.Thread(target=run_rank, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_LIMIT_S)
        assert not thread.is_alive(), f"{thread.name} does not end"
    return results


def raised(
    kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Calls `call`, which must raise an exception of the class `kind`, and returns this exception. Raises AssertionError if
    the call raises nothing."""
    try:
        result = call(*args, **kwargs)
    except kind as error:
        return error
    raise AssertionError(f"the call raised no exception; it returned {result!r}")


# The resources of this process


def resident_bytes() -> int:
    """Returns the size of this process's resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def file_descriptors() -> int:
    """Returns the number of files that this process has open."""
    return len(os.listdir("/proc/self/fd"))


def threads_of_process() -> int:
    """Returns the number of threads of this process, including those that Python does not know."""
    return len(os.listdir("/proc/self/task"))

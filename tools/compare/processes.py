"""Starts programs, waits for them, and ends them and all processes that they have started."""

import ctypes
import dataclasses
import os
import pathlib
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time

PR_SET_CHILD_SUBREAPER = 36
# The interval of the checks for new output, long enough not to disturb the ranks.
CHECK_INTERVAL_S = 0.25
KILL_TIMEOUT_S = 5


@dataclasses.dataclass
class RunResult:
    output: str
    errors: str
    # The exit code: 0 if all commands ended with 0, otherwise the code of the first command that failed. None if the commands
    # were killed because the first one stopped printing.
    code: int | None
    # The processor time of all commands and of the processes that they have started.
    cpu_s: float


def adopt_orphans():
    """Makes this process the parent of orphaned descendants, so that it can find and end them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def interrupt_on_signals():
    """Turns SIGTERM and SIGHUP into exceptions, so that every `finally` runs."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))


def run_commands(commands, stall_s, scratch, variables=({},), ending_s=0):
    """Runs the commands together until all have ended, one has failed, or the first command has printed nothing for `stall_s`
    seconds.

    The result contains the output of the first command only. `variables` contains environment variables: one
    dictionary for all commands, or one for each command. At the end, the function kills the processes that still run.
    If `ending_s` is not 0, it first sends them SIGTERM and waits for up to `ending_s` seconds.
    """
    outputs = [tempfile.NamedTemporaryFile(dir=scratch, delete=False) for _ in range(2 * len(commands))]
    before = _children_cpu_s()
    pids, started = {}, []
    try:
        for index, command in enumerate(commands):
            own = {key: str(value) for key, value in variables[index % len(variables)].items()}
            process = subprocess.Popen(
                [str(word) for word in command],
                env={**os.environ, **own},
                stdin=subprocess.DEVNULL,
                stdout=outputs[2 * index],
                stderr=outputs[2 * index + 1],
                # Ctrl-C sends no signal to a command in a separate session. This process gets the signal and ends the command.
                start_new_session=True,
            )
            started.append(process)
            pids[process.pid] = index
        code, failed = _wait(pids, outputs[0].name, stall_s)
    finally:
        try:
            if ending_s:
                _terminate([process.pid for process in started], ending_s)
        finally:
            end_descendants()
        for process in started:
            # `_wait` or `end_descendants` has already reaped the process, so `Popen` must not wait for it.
            process.returncode = 0
        for output in outputs:
            output.close()
    texts = [pathlib.Path(output.name).read_text(errors="replace") for output in outputs]
    for output in outputs:
        os.unlink(output.name)
    return RunResult(texts[0], texts[2 * failed + 1], code, _children_cpu_s() - before)


def _wait(pids, output_path, stall_s):
    """Waits for the commands. Returns two values: the `code` of the `RunResult`, and the index of the command that failed. If no
    command failed, the index is 0."""
    poll = select.poll()
    descriptors = {}
    try:
        for pid, index in pids.items():
            descriptor = os.pidfd_open(pid)
            descriptors[descriptor] = (pid, index)
            poll.register(descriptor, select.POLLIN)
        seen, since = 0, time.monotonic()
        while descriptors:
            for descriptor, _ in poll.poll(CHECK_INTERVAL_S * 1000):
                pid, index = descriptors.pop(descriptor)
                poll.unregister(descriptor)
                os.close(descriptor)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                if code != 0:
                    return code, index
            written = os.stat(output_path).st_size
            if written > seen:
                seen, since = written, time.monotonic()
            elif time.monotonic() - since > stall_s:
                return None, 0
        return 0, 0
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _terminate(pids, within_s):
    """Sends SIGTERM to the running processes, and waits until they have ended or `within_s` seconds have passed."""
    deadline = time.monotonic() + within_s
    for pid in filter(_is_running, pids):
        os.kill(pid, signal.SIGTERM)
    while any(map(_is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)


def _is_running(pid):
    """Returns whether the child process `pid` still runs. Returns False also if this program has already waited for
    the child."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def find_descendants(parents, root):
    """Returns all descendants of `root`. `parents` maps each process to its parent."""
    found = []
    generation = [root]
    while generation:
        generation = [pid for pid, parent in parents.items() if parent in generation and pid not in found]
        found += generation
    return found


def end_descendants():
    """Kills and reaps all descendants of this process."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while time.monotonic() < deadline:
        for pid in find_descendants(_read_parents(), os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def _read_parents():
    parents = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name of the process is in parentheses, and may itself contain parentheses.
            parents[int(stat.parent.name)] = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
    return parents


def _children_cpu_s():
    use = resource.getrusage(resource.RUSAGE_CHILDREN)
    return use.ru_utime + use.ru_stime

"""Starts programs, waits for them, and ends them together with all processes that they have started."""

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
# How often to check for a new row; rarely enough not to disturb the ranks.
LOOK_EVERY_S = 0.25
KILL_WITHIN_S = 5


@dataclasses.dataclass
class Ended:
    output: str
    errors: str
    # 0 if all processes ended with 0, otherwise the first other code; None if they were killed because they stopped printing.
    code: int | None
    # The processors' time of all processes, including those that they have started.
    cpu_s: float


def adopt_orphans():
    """Makes processes that our programs leave behind children of this one, so that it can find and end them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def interrupt_on_signals():
    """Turns SIGTERM into an exception, so that every `finally` runs."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))


def run(commands, stall_s, scratch, variables=({},), ending_s=0):
    """Runs the commands at once until all have ended, one has failed, or none has written anything for `stall_s`.

    The output is that of the first. `variables` are one dictionary for all, or one for each. What has to be ended is killed;
    with `ending_s` it is asked first, and has so long to take down what is more than processes.
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
                # Ctrl-C goes to this process, which ends them.
                start_new_session=True,
            )
            started.append(process)
            pids[process.pid] = index
        code, failed = _wait(pids, outputs[0].name, stall_s)
    finally:
        try:
            if ending_s:
                _ask_to_end([process.pid for process in started], ending_s)
        finally:
            end_descendants()
        for process in started:
            # We have reaped it ourselves.
            process.returncode = 0
        for output in outputs:
            output.close()
    texts = [pathlib.Path(output.name).read_text(errors="replace") for output in outputs]
    for output in outputs:
        os.unlink(output.name)
    return Ended(texts[0], texts[2 * failed + 1], code, _children_cpu_s() - before)


def _wait(pids, output_path, stall_s):
    """The code as in `Ended`, and the index of the command that failed, or 0."""
    poll = select.poll()
    descriptors = {}
    try:
        for pid, index in pids.items():
            descriptor = os.pidfd_open(pid)
            descriptors[descriptor] = (pid, index)
            poll.register(descriptor, select.POLLIN)
        seen, since = 0, time.monotonic()
        while descriptors:
            for descriptor, _ in poll.poll(LOOK_EVERY_S * 1000):
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


def _ask_to_end(pids, within_s):
    """Asks the running ones to end, and waits until they have or the time has passed."""
    deadline = time.monotonic() + within_s
    for pid in filter(_runs, pids):
        os.kill(pid, signal.SIGTERM)
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)


def _runs(pid):
    """Whether our child still runs. A reaped child does not."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def descendants(parents, root):
    """All that `root` has started, directly or not, from a table of parents by process."""
    found = []
    wave = [root]
    while wave:
        wave = [pid for pid, parent in parents.items() if parent in wave and pid not in found]
        found += wave
    return found


def end_descendants():
    """Kills and reaps everything that we have started."""
    deadline = time.monotonic() + KILL_WITHIN_S
    while time.monotonic() < deadline:
        for pid in descendants(_parents(), os.getpid()):
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


def _parents():
    parents = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name stands in brackets and may contain anything, brackets too.
            parents[int(stat.parent.name)] = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
    return parents


def _children_cpu_s():
    use = resource.getrusage(resource.RUSAGE_CHILDREN)
    return use.ru_utime + use.ru_stime

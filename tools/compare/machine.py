"""The machine: its properties, whether others use it, and its congestion control."""

import os
import pathlib
import platform
import time

CONGESTION = pathlib.Path("/proc/sys/net/ipv4/tcp_congestion_control")
# The part of the processors' time that others may use while we measure.
BUSY_MAX = 0.1


def description():
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = "unknown processor"
    return {
        "cpu": model,
        "processors": processors(),
        "kernel": f"{platform.system()} {platform.release()}",
        "congestion_control_default": CONGESTION.read_text().strip(),
    }


def processors():
    """How many processors we may use."""
    return len(os.sched_getaffinity(0))


def cores():
    """How many cores those processors are: fewer, if two of them are threads of one."""
    found = set()
    for processor in os.sched_getaffinity(0):
        topology = pathlib.Path(f"/sys/devices/system/cpu/cpu{processor}/topology")
        try:
            found.add((topology / "physical_package_id").read_text() + (topology / "core_id").read_text())
        except OSError:
            found.add(processor)
    return len(found)


def busy():
    """The part of all processors' time that others used during a quarter of a second."""

    def ticks():
        values = [int(word) for word in pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(values), values[3] + values[4]

    total, idle = ticks()
    time.sleep(0.25)
    total_after, idle_after = ticks()
    return 1 - (idle_after - idle) / max(1, total_after - total)


def wait_until_idle(limit_s, say):
    """Waits until the machine is idle, and prints a message if it does not become idle."""
    deadline = time.monotonic() + limit_s
    while limit_s > 0 and (used := busy()) > BUSY_MAX:
        if time.monotonic() > deadline:
            say(f"DISTURBED: others use {used:.0%} of the processors; measured all the same")
            return
        time.sleep(1)


class Congestion:
    """Sets the host's default congestion control for a run, and always restores it."""

    def __init__(self, say):
        self.say = say

    def __enter__(self):
        self.original = CONGESTION.read_text().strip()
        return self

    def names(self, wanted):
        """The congestion controls to measure under. Prints a message for each that cannot be set."""
        able = []
        for name in dict.fromkeys(self.original if name == "host" else name for name in wanted):
            try:
                self.set(name)
            except OSError as error:
                self.say(f"NOT MEASURED under {name}: {CONGESTION} cannot be set: {error}")
            else:
                able.append(name)
        self.set(self.original)
        return able

    def set(self, name):
        if CONGESTION.read_text().strip() != name:
            CONGESTION.write_text(name)

    def __exit__(self, *_):
        self.set(self.original)

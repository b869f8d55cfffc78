"""The machine: its properties, whether other programs use it, and its congestion control."""

import os
import pathlib
import platform
import time

CONGESTION = pathlib.Path("/proc/sys/net/ipv4/tcp_congestion_control")
# The fraction of the processor time that other programs may use during a measurement.
BUSY_MAX = 0.1


def describe_machine():
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = "unknown processor"
    return {
        "cpu": model,
        "processors": processor_count(),
        "kernel": f"{platform.system()} {platform.release()}",
        "congestion_control_default": CONGESTION.read_text().strip(),
    }


def processor_count():
    """Returns the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def core_count():
    """Returns the number of cores that this process may use. A core with two hardware threads has two processors."""
    found = set()
    for processor in os.sched_getaffinity(0):
        topology = pathlib.Path(f"/sys/devices/system/cpu/cpu{processor}/topology")
        try:
            found.add((topology / "physical_package_id").read_text() + (topology / "core_id").read_text())
        except OSError:
            found.add(processor)
    return len(found)


def busy_fraction():
    """Returns the fraction of the time of all processors that is in use, measured for a quarter of a second."""

    def read_processor_ticks():
        """Returns the total time of all processors since the machine started, and the idle part of this time."""
        values = [int(word) for word in pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(values), values[3] + values[4]

    total, idle = read_processor_ticks()
    time.sleep(0.25)
    total_after, idle_after = read_processor_ticks()
    return 1 - (idle_after - idle) / max(1, total_after - total)


def wait_until_idle(limit_s, say):
    """Waits until the machine is idle. Prints a message if the machine is still busy after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while limit_s > 0 and (used := busy_fraction()) > BUSY_MAX:
        if time.monotonic() > deadline:
            say(f"DISTURBED: other programs use {used:.0%} of the processors; the measurement runs nevertheless")
            return
        time.sleep(1)


class CongestionControl:
    """Changes the host's default congestion control for a run. Always restores the original setting at the end."""

    def __init__(self, say):
        self.say = say

    def __enter__(self):
        self.original = CONGESTION.read_text().strip()
        return self

    def find_settable(self, wanted):
        """Returns the congestion controls in `wanted` that this machine allows the script to set. Prints a message
        for each other congestion control in `wanted`."""
        found = []
        for name in dict.fromkeys(self.original if name == "host" else name for name in wanted):
            try:
                self.set(name)
            except OSError as error:
                self.say(f"NOT MEASURED under {name}: {CONGESTION} cannot be set: {error}")
            else:
                found.append(name)
        self.set(self.original)
        return found

    def set(self, name):
        if CONGESTION.read_text().strip() != name:
            CONGESTION.write_text(name)

    def __exit__(self, *_):
        self.set(self.original)

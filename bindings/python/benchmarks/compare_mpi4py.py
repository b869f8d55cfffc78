#!/usr/bin/env python3
"""Compares the times of calls from Python: of ringtrain's groups, of its mpi4py interface, and of mpi4py.

    compare_mpi4py.py --ours VENV/bin/python --theirs OTHER/bin/python --rounds 7

Every round runs `call_times.py` with each implementation, so that a change in the machine's speed affects all of them. The
tables show the medians of the rounds. A ratio is the geometric mean of ringtrain's time divided by mpi4py's time in the same
rounds, with its 95% interval. Below 1, ringtrain is faster. A message says which implementation is missing.
"""

import argparse
import math
import os
import shlex
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

PROGRAM = Path(__file__).resolve().with_name("call_times.py")
OPERATIONS = ("ping_pong", "all_reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "scatter", "all_to_all")
SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
# The 97.5% quantiles of Student's t distribution with 1, 2, ... degrees of freedom.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
THEIRS = "mpi4py"
# Without these variables, Open MPI refuses to run as root, as in a container.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


class Implementation:
    """A command that runs `call_times.py` on all ranks."""

    def __init__(self, name, interface, command):
        self.name, self.command = name, [*command, str(PROGRAM), "--interface", interface]

    def run(self, operations, sizes, seconds):
        """Returns the times in microseconds by operation and size."""
        cases = [("--operation", name) for name in operations] + [("--size", str(size)) for size in sizes]
        command = [*self.command, "--seconds", str(seconds), *(word for case in cases for word in case)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ, **AS_ROOT})
        if done.returncode:
            raise SystemExit(f"compare_mpi4py: {self.name} failed: {shlex.join(command)}\n{done.stdout}{done.stderr}")
        lines = [text.split() for text in done.stdout.splitlines()]
        return {(operation, int(size)): float(us) for operation, size, us in lines}


def has_module(python, name):
    return subprocess.run([python, "-c", f"import {name}"], capture_output=True).returncode == 0


def find_implementations(arguments):
    """Returns the implementations that can run. Prints which others are missing, and why."""
    n, found = str(arguments.n), []
    ours, theirs = str(arguments.ours), str(arguments.theirs or sys.executable)
    ringrun = [str(arguments.ringrun or Path(ours).parent / "ringrun"), "--no-tag-output", "-n", n]
    mpirun = [str(arguments.mpirun or Path(theirs).parent / "mpirun")]
    # With this option, Open MPI's ranks yield their processors while they wait, which takes time.
    mpirun += ["--oversubscribe"] if arguments.n > (os.cpu_count() or 1) else []
    if not has_module(ours, "ringtrain"):
        print(f"compare_mpi4py: SKIPPED: ringtrain: {ours} cannot import it", flush=True)
    else:
        found.append(Implementation("ringtrain", "ringtrain", [*ringrun, ours]))
        if arguments.with_interface:
            found.append(Implementation("ringtrain.mpi", "mpi4py", [*ringrun, "--mpi4py", ours]))
    if not has_module(theirs, "mpi4py"):
        print(f"compare_mpi4py: SKIPPED: {THEIRS}: {theirs} cannot import it", flush=True)
    else:
        found.append(Implementation(THEIRS, "mpi4py", [*mpirun, "-n", n, theirs]))
    return found


def geometric_mean_and_interval(ratios):
    """Returns the geometric mean of the ratios and its 95% interval. With a single ratio, the interval is `None`."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return math.exp(mean), None
    quantile = T_QUANTILES[min(len(logs) - 1, len(T_QUANTILES)) - 1]
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), (math.exp(mean - half), math.exp(mean + half))


def print_table(times, names):
    """Prints the times of the implementations `names`, and their ratios to those of mpi4py."""
    ours = [name for name in names if name != THEIRS]
    heads = [*(f"{name}, us" for name in names), *(f"{name} / {THEIRS} (95% interval)" for name in ours if THEIRS in names)]
    print(f"| operation | bytes | {' | '.join(heads)} |\n{'|---' * (2 + len(heads))}|")
    for operation, size in times[names[0]]:
        measured = {name: times[name][operation, size] for name in names}
        cells = [f"{statistics.median(values):.2f}" for values in measured.values()]
        for name in ours if THEIRS in names else ():
            ratios = [own / other for own, other in zip(measured[name], measured[THEIRS], strict=True)]
            mean, interval = geometric_mean_and_interval(ratios)
            cells.append(f"{mean:.2f}" + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""))
        print(f"| {operation} | {size} | {' | '.join(cells)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=2, help="number of ranks [%(default)s]")
    parser.add_argument("--rounds", type=int, default=7, help="runs with each implementation [%(default)s]")
    parser.add_argument("--seconds", type=float, default=0.3, help="how long to repeat the calls of a case [%(default)s]")
    parser.add_argument("--operation", action="append", help=f"may be repeated [{', '.join(OPERATIONS)}]")
    parser.add_argument("--size", action="append", type=int, help=f"in bytes; may be repeated [{', '.join(map(str, SIZES))}]")
    parser.add_argument("--ours", type=Path, default=sys.executable, help="a Python that can import ringtrain [this one]")
    parser.add_argument("--theirs", type=Path, help="a Python that can import mpi4py [this one]")
    parser.add_argument("--ringrun", type=Path, help="ringrun [the one beside --ours]")
    parser.add_argument("--mpirun", type=Path, help="mpirun [the one beside --theirs]")
    parser.add_argument("--with-interface", action="store_true", help="also measure ringtrain's mpi4py interface")
    arguments = parser.parse_args()
    found = find_implementations(arguments)
    if not found:
        return 1
    times = {one.name: defaultdict(list) for one in found}
    for _ in range(arguments.rounds):
        for one in found:
            measured = one.run(arguments.operation or OPERATIONS, arguments.size or SIZES, arguments.seconds)
            for case, us in measured.items():
                times[one.name][case].append(us)
    print(f"{arguments.n} ranks, medians of {arguments.rounds} interleaved rounds\n")
    print_table(times, [one.name for one in found])
    return 0


if __name__ == "__main__":
    sys.exit(main())

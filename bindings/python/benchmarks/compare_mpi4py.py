"""Runs `mpi4py_latency.py` with ringtrain and with mpi4py alternately, and prints medians, ranges and ratios.

compare_mpi4py.py -n 2 --rounds 5 --ours "ringrun --no-tag-output -n {n} --mpi4py python" --theirs "mpirun -n {n} python"
"""

import argparse
import shlex
import statistics
import subprocess
from collections import defaultdict
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent / "mpi4py_latency.py"
Key = tuple[str, int]


def measure(command: str, size: int, budget: int) -> dict[Key, float]:
    """The time in microseconds of every measurement in one run."""
    line = [*shlex.split(command.format(n=size)), str(SCRIPT), "--budget", str(budget)]
    out = subprocess.run(line, check=True, capture_output=True, text=True, timeout=600).stdout
    return {(name, int(nbytes)): float(us) for name, nbytes, us in (text.split() for text in out.splitlines())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=2, help="number of ranks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=int, default=2000, help="number of repetitions of short calls in a run")
    parser.add_argument("--ours", default="ringrun --no-tag-output -n {n} --mpi4py python")
    parser.add_argument("--theirs", default="mpirun -n {n} python")
    arguments = parser.parse_args()
    seen: dict[str, dict[Key, list[float]]] = {"ours": defaultdict(list), "theirs": defaultdict(list)}
    for _ in range(arguments.rounds):
        for who, command in (("ours", arguments.ours), ("theirs", arguments.theirs)):
            for key, us in measure(command, arguments.n, arguments.budget).items():
                seen[who][key].append(us)
    print(f"{arguments.n} ranks, medians of {arguments.rounds} alternating rounds (minimum to maximum), µs")
    print("| call | bytes | ringtrain | mpi4py | mpi4py / ringtrain |\n|---|---|---|---|---|")
    for key, ours in seen["ours"].items():
        theirs = seen["theirs"][key]
        ratio = statistics.median(theirs) / statistics.median(ours)
        print(f"| {key[0]} | {key[1]} | {shown(ours)} | {shown(theirs)} | {ratio:.2f} |")


def shown(values: list[float]) -> str:
    """The median, the minimum and the maximum."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


main()

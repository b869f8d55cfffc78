"""Runs `mpi4py_latency.py` alternately with ringtrain and with mpi4py, and prints medians, ranges and ratios.

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


def measure_latencies(command: str, n: int, budget: int) -> dict[Key, float]:
    """Runs the benchmark once on `n` ranks, with `budget` repetitions of a short call.

    Returns the times of the calls in microseconds, by the name of the call and the number of bytes.
    """
    words = [*shlex.split(command.format(n=n)), str(SCRIPT), "--budget", str(budget)]
    out = subprocess.run(words, check=True, capture_output=True, text=True, timeout=600).stdout
    return {(name, int(nbytes)): float(us) for name, nbytes, us in (text.split() for text in out.splitlines())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="number of runs with each implementation (default: %(default)s)")
    parser.add_argument("--budget", type=int, default=2000, help="repetitions of a short call in a run (default: %(default)s)")
    parser.add_argument(
        "--ours", default="ringrun --no-tag-output -n {n} --mpi4py python", help="command for ringtrain (default: %(default)s)"
    )
    parser.add_argument("--theirs", default="mpirun -n {n} python", help="command for mpi4py (default: %(default)s)")
    arguments = parser.parse_args()
    times: dict[str, dict[Key, list[float]]] = {"ours": defaultdict(list), "theirs": defaultdict(list)}
    for _ in range(arguments.rounds):
        for who, command in (("ours", arguments.ours), ("theirs", arguments.theirs)):
            for key, us in measure_latencies(command, arguments.n, arguments.budget).items():
                times[who][key].append(us)
    print(f"{arguments.n} ranks, medians of {arguments.rounds} alternating rounds (minimum to maximum), µs")
    print("| call | bytes | ringtrain | mpi4py | mpi4py / ringtrain |\n|---|---|---|---|---|")
    for key, ours in times["ours"].items():
        theirs = times["theirs"][key]
        ratio = statistics.median(theirs) / statistics.median(ours)
        print(f"| {key[0]} | {key[1]} | {format_range(ours)} | {format_range(theirs)} | {ratio:.2f} |")


def format_range(values: list[float]) -> str:
    """Formats the median of `values`, followed by their minimum and maximum."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


main()

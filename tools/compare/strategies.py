#!/usr/bin/env python3
"""Trains a model with each strategy, and prints a Markdown table with accuracy, loss, time and traffic.

The first row is a single process. The figures come from the file that `ringtrain --report` writes. `seconds` is the time of
the steps, without loading the data and without tests of the model.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

STRATEGIES = [
    "allreduce",
    "local-sgd:8",
    "diloco:50",
    "model-average:1",
    "model-average",
    "ps-sync",
    "ps-async",
    "gossip",
    "gossip:8",
    "tensor",
    "hybrid:2x2",
]


def run(options: argparse.Namespace, ranks: int, arguments: list[str], before: tuple[str, ...] = ()) -> dict | str:
    """Returns the report of a run, or the first line of the error if the run fails. `before` is a command that starts the
    command of a rank."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.json")
        command = [str(options.programs / "ringrun"), "-n", str(ranks), *before, str(options.programs / "ringtrain")]
        command += [*options.arguments, *arguments, "--quiet", "--report", str(report)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout, check=False)
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            return lines[0] if lines else f"exit code {done.returncode}"
        return json.loads(report.read_text())


def describe_number(value: float) -> str:
    """Returns the number with two or three digits."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def row(name: str, reports: list[dict]) -> str:
    """Returns a row of the table. A cell has the median of the runs and, if there are several runs, the range."""

    def cell(key: str, describe: Callable[[float], str]) -> str:
        values = [report[key] for report in reports if report[key] is not None]
        if not values:
            return "not measured"
        low, middle, high = (describe(value) for value in (min(values), statistics.median(values), max(values)))
        return middle if low == high else f"{middle} ({low} to {high})"

    cells = [
        cell("test_accuracy", "{:.4f}".format),
        cell("train_loss", "{:.4f}".format),
        cell("seconds", describe_number),
        cell("bytes_sent", lambda count: describe_number(count / 1e6)),
    ]
    return f"| {name} | " + " | ".join(cells) + " |"


def main() -> int:
    """Runs all strategies. Returns 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=Path, default=Path("target/release"), help="directory of ringrun and ringtrain")
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks")
    parser.add_argument("--seeds", type=int, default=1, help="number of runs of each strategy, with the seeds 0, 1 and so on")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="strategies, separated by commas")
    parser.add_argument("--timeout", type=float, default=1800, help="limit for one run in seconds")
    parser.add_argument("arguments", nargs="*", help="arguments of ringtrain, after --")
    options = parser.parse_args()
    runs = [("a single process", 1, [])]
    runs += [(f"`{name}`", options.ranks, ["--transport", "tcp", "--strategy", name]) for name in options.strategies.split(",")]
    print("| strategy | test accuracy | training loss | seconds | MB that rank 0 sent |")
    print("|---|---|---|---|---|", flush=True)
    failures = []
    for name, ranks, arguments in runs:
        reports = [run(options, ranks, [*arguments, "--seed", str(seed)]) for seed in range(options.seeds)]
        failed = [report for report in reports if isinstance(report, str)]
        if failed:
            failures.append(f"{name}: {failed[0]}")
        else:
            print(row(name, reports), flush=True)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

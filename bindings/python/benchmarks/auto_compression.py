"""Compares an all-reduce with the compression "auto" with one of exact elements, where the network is faster than most codecs.

    ringrun -n 4 python auto_compression.py [--transport tcp]

Both calls reduce the same elements, with a barrier before each call. Each round measures both. The time of a round is the mean of
the fastest 80% of its calls, on the slowest rank. The ratio is the geometric mean over the rounds of the time with "auto" divided
by the time without, with its 95% interval (Student's t of the logarithms).
"""

import argparse
import statistics
import time

import numpy as np

import ringtrain

SIZES = (1 << 16, 1 << 18, 1 << 21, 1 << 24)
ROUNDS = 30
# The most calls of a round, and the most bytes of a round.
CALLS_MAX = 200
ROUND_BYTES_MAX = 40_000_000
# Student's t for 29 degrees of freedom, two-sided 95%.
T_95 = 2.045


def time_round(group: ringtrain.Group, source: np.ndarray, compression: ringtrain.Compressor | None) -> float:
    """Returns the time of a call in seconds."""
    target = source.copy()
    calls = max(5, min(CALLS_MAX, ROUND_BYTES_MAX // source.nbytes))
    times = np.zeros(calls)
    for call in range(calls):
        target[:] = source
        group.barrier()
        start = time.perf_counter()
        group.all_reduce(target, out=target, compression=compression)
        times[call] = time.perf_counter() - start
    slowest = group.all_reduce(times, op="max")
    return float(np.sort(slowest)[: calls * 4 // 5].mean())


def compare(group: ringtrain.Group, size: int) -> None:
    """Measures arrays of `size` bytes. Rank 0 prints a row of the table."""
    source = np.random.default_rng(group.rank).standard_normal(size // 4).astype(np.float32)
    auto = ringtrain.Compressor("auto")
    report = auto.report()
    while report["is_trial"]:
        time_round(group, source, auto)
        report = auto.report()
    times: dict[str, list[float]] = {"none": [], "auto": []}
    for round_ in range(ROUNDS):
        for name in ("none", "auto") if round_ % 2 else ("auto", "none"):
            times[name].append(time_round(group, source, auto if name == "auto" else None))
    logarithms = np.log(np.divide(times["auto"], times["none"]))
    mean, error = logarithms.mean(), T_95 * logarithms.std(ddof=1) / ROUNDS**0.5
    low, ratio, high = np.exp([mean - error, mean, mean + error])
    none, with_auto = (statistics.median(times[name]) * 1e6 for name in ("none", "auto"))
    if group.rank == 0:
        choice = auto.report()["compression"]
        print(f"{size} | {none:.0f} us | {with_auto:.0f} us | {ratio:.3f} ({low:.3f} to {high:.3f}) | {choice}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--transport", default="auto", choices=["auto", "tcp", "shm"], help="the transport between ranks of a host"
    )
    group = ringtrain.init(transport=parser.parse_args().transport)
    if group.rank == 0:
        print("bytes | none | auto | ratio | choice", flush=True)
    for size in SIZES:
        compare(group, size)


if __name__ == "__main__":
    main()

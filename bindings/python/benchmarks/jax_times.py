"""Measures what `ringtrain.jax` costs: the time of an all-reduce inside a jitted function, outside jitted functions, and of numpy
arrays without JAX.

    ringrun -n 2 python jax_times.py

The ways alternate in the same processes. The program prints the median of the rounds, and in brackets the quartiles.
"""

import argparse
import time
from collections.abc import Callable

import jax
import numpy as np

import ringtrain as ring
import ringtrain.jax as rj


def measure(calls: dict[str, Callable[[], object]], rounds: int, repeats: int) -> dict[str, np.ndarray]:
    """Returns the time of a call in microseconds in each round: the mean of `repeats` calls, on the slowest rank."""
    world = ring.world()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds + 1):
        for name, call in calls.items():
            world.barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            seconds = (time.perf_counter() - start) / repeats
            if index:  # the first round compiles
                times[name].append(1e6 * float(world.all_reduce(seconds, "max")))
    return {name: np.array(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="number of rounds (default: %(default)s)")
    options = parser.parse_args()
    world = rj.init()
    in_jit = jax.jit(lambda x: rj.all_reduce(x, "avg"))
    for count, repeats in [(2, 50), (6_553_600, 2)]:
        values = np.ones(count, np.float32)
        array, result = jax.device_put(values), np.empty_like(values)
        shared = world.alloc(count)
        calls = {
            "numpy": lambda result=result, values=values: world.all_reduce(values, "avg", out=result),
            "numpy, in place in shared memory": lambda shared=shared: world.all_reduce(shared, "avg", out=shared),
            "ringtrain.jax": lambda array=array: rj.all_reduce(array, "avg").block_until_ready(),
            "ringtrain.jax in jit": lambda array=array: in_jit(array).block_until_ready(),
        }
        for name, times in measure(calls, options.rounds, repeats).items():
            low, median, high = np.percentile(times, [25, 50, 75])
            if world.rank == 0:
                print(f"{values.nbytes} bytes, {name}: {median:.1f} us ({low:.1f} to {high:.1f})", flush=True)


if __name__ == "__main__":
    main()

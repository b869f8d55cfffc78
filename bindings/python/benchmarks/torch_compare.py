#!/usr/bin/env python3
"""Compares the backend "ring" with Gloo: the time of an all_reduce, and of an epoch of DistributedDataParallel. Both backends run
alternately in the same processes.

    ringrun -n 4 python benchmarks/torch_compare.py [--rounds 7] [--smoke]

The time of a round is the time of its slowest rank. Prints the median and the range of the times of each backend, and
the median of "ring" divided by the median of Gloo. Checks every result.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringtrain.torch  # noqa: F401  (registers the backend)

# The number of calls in a sample, by the number of bytes. With so many calls, the barrier and the clock add little to the time.
SIZES = {64: 50, 64 << 10: 30, 4 << 20: 6, 64 << 20: 2}
EPOCH_STEPS = 8


def time_on_slowest_rank(call: Callable[[], None], group: Any) -> float:
    """Runs `call` on all ranks after a barrier, and returns the seconds that it takes on the slowest rank."""
    dist.barrier(group)
    start = time.perf_counter()
    call()
    spent = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return spent.item()


def measure_all_reduce(group: Any, buffer: torch.Tensor, calls: int) -> float:
    """Returns the seconds per all_reduce of `buffer`."""
    n = dist.get_world_size()
    buffer.fill_(1.0)
    dist.all_reduce(buffer, group=group)
    assert torch.all(buffer == n), "the sum is wrong"
    buffer.zero_()

    def call_repeatedly() -> None:
        for _ in range(calls):
            dist.all_reduce(buffer, group=group)

    return time_on_slowest_rank(call_repeatedly, group) / calls


class Training:
    """A model of 6.5 million parameters (25 MiB) with its optimizer, on one backend."""

    def __init__(self, group: Any, batch: int) -> None:
        torch.manual_seed(1)
        layers = [
            nn.Linear(512, 1400),
            nn.ReLU(),
            nn.Linear(1400, 2400),
            nn.ReLU(),
            nn.Linear(2400, 1000),
            nn.ReLU(),
            nn.Linear(1000, 10),
        ]
        model = nn.Sequential(*layers)
        self.model = model if group is None else DistributedDataParallel(model, process_group=group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.generator = torch.Generator().manual_seed(dist.get_rank())
        self.losses: list[float] = []
        self.batch = batch

    def train_epoch(self) -> None:
        for _ in range(EPOCH_STEPS):
            self.optimizer.zero_grad()
            batch = torch.randn(self.batch, 512, generator=self.generator)
            loss = (self.model(batch).mean(1) - batch.mean(1)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())


def print_comparison(what: str, times: dict[str, list[float]]) -> None:
    if dist.get_rank():
        return
    ring, gloo = statistics.median(times["ring"]), statistics.median(times["gloo"])
    shown = ", ".join(
        f"{name} {1e3 * statistics.median(values):.3f} ms ({1e3 * min(values):.3f} to {1e3 * max(values):.3f})"
        for name, values in times.items()
    )
    print(f"n={dist.get_world_size()} {what}: {shown}, ratio {ring / gloo:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds that are measured (default: %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="run one round, as the tests do")
    parser.add_argument("--batch", type=int, default=32, help="samples per step on each rank (default: %(default)s)")
    parser.add_argument("--only-epochs", action="store_true", help="measure only the epochs")
    arguments = parser.parse_args()
    rounds = 1 if arguments.smoke else arguments.rounds
    dist.init_process_group("ring")
    groups = {"ring": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    for size, calls in () if arguments.only_epochs else SIZES.items():
        buffer = torch.empty(size // 4)
        times: dict[str, list[float]] = {name: [] for name in groups}
        for index in range(rounds + 1):
            for name, group in groups.items():
                spent = measure_all_reduce(group, buffer, 1 if arguments.smoke else calls)
                # The first round is a warm-up: it allocates memory and opens connections.
                if index or arguments.smoke:
                    times[name].append(spent)
        print_comparison(f"all_reduce of {size} bytes", times)
    trainings = {name: Training(group, arguments.batch) for name, group in groups.items()}
    # Measure the same training without communication. The time of this training is a lower bound.
    baseline = Training(None, arguments.batch)
    times = {name: [] for name in (*groups, "no communication")}
    for index in range(rounds + 1):
        for name, training in trainings.items():
            spent = time_on_slowest_rank(training.train_epoch, groups[name])
            if index or arguments.smoke:
                times[name].append(spent)
        baseline_seconds = time_on_slowest_rank(baseline.train_epoch, groups["ring"])
        if index or arguments.smoke:
            times["no communication"].append(baseline_seconds)
    print_comparison(f"epoch of {EPOCH_STEPS} steps of {arguments.batch}", times)
    torch.testing.assert_close(trainings["ring"].losses, trainings["gloo"].losses, rtol=1e-3, atol=1e-3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

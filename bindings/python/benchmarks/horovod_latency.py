"""Measures blocking all-reduces and steps of `DistributedOptimizer`.

    ringrun -n 2 python benchmarks/horovod_latency.py

For each of the rounds, the program measures every case once. Rank 0 prints the median over all calls of the median round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import ringtrain.torch as hvd


def measure(call: Callable[[], object], count: int) -> float:
    """Returns the median time of `count` calls in microseconds."""
    for _ in range(count // 10 + 1):
        call()
    hvd.barrier()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def make_step() -> Callable[[], object]:
    """Returns a training step of a model with 1.6 million parameters, whose gradients are reduced in two buckets."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    batch = torch.randn(8, 512)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--smoke", action="store_true", help="make only a few calls")
    arguments = parser.parse_args()
    hvd.init()
    number, tensor = torch.ones(1), torch.ones(1 << 20)
    cases: dict[str, tuple[Callable[[], object], int]] = {
        "allreduce of 4 B": (lambda: hvd.allreduce_(number, op=hvd.Max), 1000),
        "allreduce of 4 B with a name": (lambda: hvd.allreduce_(number, op=hvd.Max, name="number"), 1000),
        "allreduce of 4 MiB": (lambda: hvd.allreduce_(tensor, op=hvd.Max), 100),
        "allreduce of 4 MiB with a name": (lambda: hvd.allreduce_(tensor, op=hvd.Max, name="tensor"), 100),
        "step of DistributedOptimizer": (make_step(), 100),
    }
    rounds = [
        {name: measure(call, 5 if arguments.smoke else count) for name, (call, count) in cases.items()}
        for _ in range(1 if arguments.smoke else arguments.rounds)
    ]
    for name in cases if hvd.rank() == 0 else ():
        print(f"{name:32} {statistics.median(round[name] for round in rounds):9.1f} us")
    hvd.shutdown()


if __name__ == "__main__":
    main()

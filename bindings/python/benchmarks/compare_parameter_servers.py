#!/usr/bin/env python3
"""Compares an asynchronous parameter server of ringtrain with the same program on mpi4py and on torch RPC, over TCP.

    python benchmarks/compare_parameter_servers.py [--rounds 7] [--smoke]

Rank 0 is the server, and three ranks are workers. In each step, a worker waits (in place of the computation of a gradient), sends
its gradient, and receives the new parameters. The third worker waits ten times as long as the first two. For each number of
parameters, the program prints the median and the range of the updates per second of the first two workers together, and of the
ratios of the rounds. The program also prints this median divided by the median of two workers that only wait. The systems run
alternately, so that other programs disturb all of them.

The program needs Open MPI and mpi4py for the comparison with MPI, and torch for torch RPC. The program prints which systems it
skips.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

WORKERS = 3
RATE = 0.001
# In each step, the last worker waits this many times as long as the other workers.
SLOWDOWN = 10


def run_worker(worker: int, step_seconds: float, seconds: float, exchange: Callable[[], None]) -> dict[str, float]:
    """Takes steps for some seconds, and returns the number of steps and the duration."""
    pause = step_seconds * (SLOWDOWN if worker == WORKERS - 1 else 1)
    exchange()
    start = time.perf_counter()
    steps = 0
    while time.perf_counter() < start + seconds:
        time.sleep(pause)
        exchange()
        steps += 1
    return {"worker": worker, "steps": steps, "seconds": time.perf_counter() - start}


def print_result(result: dict[str, float]) -> None:
    # One call of write, because several processes share the output.
    sys.stdout.write("RESULT " + json.dumps(result) + "\n")
    sys.stdout.flush()


def run_ringtrain(count: int, step_seconds: float, seconds: float) -> None:
    import ringtrain as ring

    world = ring.init(transport="tcp")
    parameters = np.zeros(count, np.float32)
    gradient = np.ones(count, np.float32)
    with ring.ParameterServer(parameters, lr=RATE) as server:
        if server.is_server:
            server.wait_for_workers()
        else:
            print_result(run_worker(world.rank - 1, step_seconds, seconds, lambda: server.push_pull(gradient)))


def run_mpi4py(count: int, step_seconds: float, seconds: float) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    parameters = np.zeros(count, np.float32)
    gradient = np.ones(count, np.float32)
    if world.rank > 0:

        def exchange() -> None:
            world.Send(gradient, 0, 1)
            world.Recv(parameters, 0, 1)

        print_result(run_worker(world.rank - 1, step_seconds, seconds, exchange))
        world.Send(gradient, 0, 2)
        return
    status, left = MPI.Status(), WORKERS
    while left > 0:
        world.Recv(gradient, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        if status.tag == 2:
            left -= 1
            continue
        gradient *= RATE
        np.subtract(parameters, gradient, out=parameters)
        world.Send(parameters, status.source, 1)


class TorchServer:
    """The parameters on the server of torch RPC."""

    parameters = None
    lock = threading.Lock()

    @staticmethod
    def push_pull(gradient):
        if TorchServer.parameters is None:
            TorchServer.parameters = gradient.new_zeros(gradient.shape)
        with TorchServer.lock:
            return TorchServer.parameters.sub_(gradient, alpha=RATE).clone()


def run_torch(count: int, step_seconds: float, seconds: float) -> None:
    import torch
    import torch.distributed.rpc as rpc

    rank = int(os.environ["RANK"])
    # These options select TCP: `uv` is the transport over sockets.
    options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"])
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=WORKERS + 1, rpc_backend_options=options)
    if rank > 0:
        gradient = torch.ones(count)
        call = lambda: rpc.rpc_sync("rank0", TorchServer.push_pull, (gradient,))  # noqa: E731
        print_result(run_worker(rank - 1, step_seconds, seconds, call))
    rpc.shutdown()


def run_without_exchange(_count: int, step_seconds: float, seconds: float) -> None:
    """A worker that only waits, and exchanges nothing."""
    print_result(run_worker(int(os.environ["RANK"]) - 1, step_seconds, seconds, lambda: None))


PROGRAMS = {"ringtrain": run_ringtrain, "mpi4py": run_mpi4py, "torch": run_torch, "alone": run_without_exchange}


def available_systems() -> list[str]:
    """Returns the systems that are installed. Prints which systems are skipped."""
    systems = ["ringtrain", "alone"]
    if importlib.util.find_spec("mpi4py") and shutil.which("mpiexec"):
        systems.append("mpi4py")
    else:
        print("SKIPPED: mpi4py, because mpi4py or mpiexec is not installed")
    if importlib.util.find_spec("torch"):
        systems.append("torch")
    else:
        print("SKIPPED: torch RPC, because torch is not installed")
    return systems


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def run_job(system: str, arguments: list[str]) -> list[dict[str, float]]:
    """Runs a job of one server and three workers, and returns the results of the workers."""
    command = [sys.executable, __file__, "--system", system, *arguments]
    ranks = str(WORKERS + 1)
    if system == "ringtrain":
        output = run_and_read_output(["ringrun", "-n", ranks, "--bind-to", "none", "--no-tag-output", *command])
    elif system == "mpi4py":
        tcp = ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--bind-to", "none"]
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        output = run_and_read_output(["mpiexec", *as_root, "--oversubscribe", *tcp, "-n", ranks, *command])
    else:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        first = 0 if system == "torch" else 1
        processes = [
            subprocess.Popen(command, env={**os.environ, **address, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
            for rank in range(first, WORKERS + 1)
        ]
        output = "".join(process.communicate(timeout=120)[0] for process in processes)
    results = [json.loads(line.split("RESULT ", 1)[1]) for line in output.splitlines() if "RESULT " in line]
    if len(results) != WORKERS:
        raise SystemExit(f"{system}: {len(results)} of {WORKERS} workers printed a result:\n{output}")
    return results


def run_and_read_output(command: list[str]) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120).stdout


def update_rate_of_fast_workers(results: list[dict[str, float]]) -> float:
    """Returns the updates per second of all workers except the slow worker."""
    return sum(result["steps"] / result["seconds"] for result in results if result["worker"] < WORKERS - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="how often each system runs")
    parser.add_argument("--smoke", action="store_true", help="take one short round, to check that the program works")
    parser.add_argument("--seconds", type=float, default=2.0, help="the duration of a job")
    parser.add_argument("--counts", default="1000,100000", help="the numbers of parameters, separated by commas")
    parser.add_argument("--steps", default="0,0.005", help="the waits of a fast worker in each step, in s, separated by commas")
    parser.add_argument("--system", choices=PROGRAMS, help="run one rank of a job (used by this program itself)")
    parser.add_argument("--job", nargs=3, type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.system:
        count, step_seconds, seconds = arguments.job
        PROGRAMS[arguments.system](int(count), step_seconds, seconds)
        return
    rounds, seconds = (1, 0.2) if arguments.smoke else (arguments.rounds, arguments.seconds)
    systems = available_systems()
    for count in arguments.counts.split(","):
        for step in arguments.steps.split(","):
            rates: dict[str, list[float]] = {system: [] for system in systems}
            for number in range(rounds):
                # Another system begins each round, because the end of a job may still disturb the next job.
                first = number % len(systems)
                for system in systems[first:] + systems[:first]:
                    rates[system].append(update_rate_of_fast_workers(run_job(system, ["--job", count, step, str(seconds)])))
            print(f"{count} parameters, {float(step) * 1000:g} ms per step:")
            alone = statistics.median(rates["alone"])
            for system in systems:
                if system == "alone" and float(step) == 0:
                    continue
                values = rates[system]
                median = statistics.median(values)
                line = f"  {system:10} {median:9.0f} updates/s ({min(values):.0f} to {max(values):.0f})"
                if system in ("mpi4py", "torch"):
                    ratios = sorted(ours / value for ours, value in zip(rates["ringtrain"], values, strict=True))
                    line += f", ringtrain is {statistics.median(ratios):.2f} times as fast ({ratios[0]:.2f} to {ratios[-1]:.2f})"
                if system != "alone" and float(step) > 0:
                    line += f", {median / alone:.3f} of workers that only wait"
                print(line)


if __name__ == "__main__":
    main()

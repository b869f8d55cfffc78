#!/usr/bin/env python3
"""Compares an asynchronous parameter server of ringtrain with the same program on mpi4py and on torch RPC, over TCP.

    python benchmarks/compare_parameter_servers.py [--rounds 7] [--smoke]

Rank 0 is the server, and three ranks are workers. In each step, a worker draws a random batch from its part of the data, computes
the gradient of a neural network with numpy, sends the gradient, and receives the new parameters. With `--pauses`, a worker waits
instead of computing a gradient. After each step, the third worker waits nine times as long as its step took, so it is ten times
slower than the first two. For each case, the program prints the median and the range of the updates per second of the first two
workers together, and of the ratios of the rounds. The program also prints this median divided by the median of the same workers
if they exchange nothing. The systems run alternately, so that other programs disturb all of them.

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
# A step of the last worker takes this many times as long as a step of the other workers.
SLOWDOWN = 10
FEATURES, CLASSES, SAMPLES = 64, 10, 8192


class Network:
    """A network with one hidden layer, and one worker's part of the data. The data are random, with a fixed seed."""

    def __init__(self, parameter_count: int, worker: int) -> None:
        # The number of hidden units that gives about `parameter_count` parameters.
        self.hidden = max(1, round((parameter_count - CLASSES) / (FEATURES + 1 + CLASSES)))
        self.count = self.hidden * (FEATURES + 1 + CLASSES) + CLASSES
        self.gradient = np.zeros(self.count, np.float32)
        self.random = np.random.default_rng(worker)
        self.inputs = self.random.standard_normal((SAMPLES, FEATURES), np.float32)
        self.labels = (self.inputs @ np.random.default_rng(99).standard_normal((FEATURES, CLASSES))).argmax(1)

    def initial_parameters(self) -> np.ndarray:
        return np.random.default_rng(7).standard_normal(self.count, np.float32) * np.float32(0.1)

    def layers(self, vector: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Returns the weights and biases of both layers as views of a vector."""
        ends = np.cumsum([FEATURES * self.hidden, self.hidden, self.hidden * CLASSES])
        first, first_bias, second, second_bias = np.split(vector, ends)
        return first.reshape(FEATURES, self.hidden), first_bias, second.reshape(self.hidden, CLASSES), second_bias

    def compute_gradient(self, parameters: np.ndarray, batch: int) -> None:
        """Writes the gradient of the mean cross-entropy of a random batch to `self.gradient`."""
        rows = self.random.integers(SAMPLES, size=batch)
        inputs, labels = self.inputs[rows], self.labels[rows]
        first, first_bias, second, second_bias = self.layers(parameters)
        hidden = np.maximum(inputs @ first + first_bias, 0)
        scores = hidden @ second + second_bias
        error = np.exp(scores - scores.max(1, keepdims=True))
        error /= error.sum(1, keepdims=True)
        error[np.arange(batch), labels] -= 1
        error /= batch
        hidden_error = (error @ second.T) * (hidden > 0)
        first, first_bias, second, second_bias = self.layers(self.gradient)
        np.matmul(inputs.T, hidden_error, out=first)
        hidden_error.sum(0, out=first_bias)
        np.matmul(hidden.T, error, out=second)
        error.sum(0, out=second_bias)


class Job:
    """What each step of a job does: it computes the gradient of `batch` samples, or waits if `batch` is 0."""

    def __init__(self, parameter_count: float, batch: float, pause: float, seconds: float) -> None:
        self.parameter_count, self.batch = int(parameter_count), int(batch)
        self.pause, self.seconds = pause, seconds

    def run_worker(self, worker: int, network: Network, exchange: Callable[[], np.ndarray]) -> None:
        """Takes steps, and prints their number and their duration. `exchange` sends the gradient of the network, and returns
        the new parameters."""
        parameters = exchange()
        steps, start = 0, time.perf_counter()
        now = start
        while now < start + self.seconds:
            if self.batch > 0:
                network.compute_gradient(parameters, self.batch)
            else:
                time.sleep(self.pause)
            parameters = exchange()
            steps += 1
            end = time.perf_counter()
            if worker == WORKERS - 1:
                time.sleep((SLOWDOWN - 1) * (end - now))
                end = time.perf_counter()
            now = end
        print_result({"worker": worker, "steps": steps, "seconds": now - start})


def print_result(result: dict[str, float]) -> None:
    # One call of write, because several processes share the output.
    sys.stdout.write("RESULT " + json.dumps(result) + "\n")
    sys.stdout.flush()


def run_ringtrain(job: Job) -> None:
    import ringtrain as ring

    world = ring.init(transport="tcp")
    network = Network(job.parameter_count, world.rank - 1 if world.rank > 0 else 0)
    parameters = network.initial_parameters()
    with ring.ParameterServer(parameters, lr=RATE) as server:
        if server.is_server:
            server.wait_for_workers()
            return

        def exchange() -> np.ndarray:
            server.push_pull(network.gradient)
            return parameters

        job.run_worker(server.worker_index, network, exchange)


def run_mpi4py(job: Job) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    network = Network(job.parameter_count, world.rank - 1 if world.rank > 0 else 0)
    parameters, gradient = network.initial_parameters(), network.gradient
    if world.rank > 0:

        def exchange() -> np.ndarray:
            world.Send(gradient, 0, 1)
            world.Recv(parameters, 0, 1)
            return parameters

        job.run_worker(world.rank - 1, network, exchange)
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
        with TorchServer.lock:
            return TorchServer.parameters.sub_(gradient, alpha=RATE).clone()


def run_torch(job: Job) -> None:
    import torch
    import torch.distributed.rpc as rpc

    rank = int(os.environ["RANK"])
    network = Network(job.parameter_count, rank - 1 if rank > 0 else 0)
    TorchServer.parameters = torch.from_numpy(network.initial_parameters())
    # These options select TCP: `uv` is the transport over sockets.
    options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"])
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=WORKERS + 1, rpc_backend_options=options)
    if rank > 0:
        gradient = torch.from_numpy(network.gradient)
        job.run_worker(rank - 1, network, lambda: rpc.rpc_sync("rank0", TorchServer.push_pull, (gradient,)).numpy())
    rpc.shutdown()


def run_without_exchange(job: Job) -> None:
    """A worker that exchanges nothing."""
    worker = int(os.environ["RANK"]) - 1
    network = Network(job.parameter_count, worker)
    parameters = network.initial_parameters()
    job.run_worker(worker, network, lambda: parameters)


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


def run_job(system: str, numbers: list[float]) -> list[dict[str, float]]:
    """Runs a job of one server and three workers, and returns the results of the workers. `numbers` are the arguments of
    `Job`."""
    command = [sys.executable, __file__, "--system", system, "--job", *map(str, numbers)]
    ranks = str(WORKERS + 1)
    if system == "ringtrain":
        output = run_and_read_output(["ringrun", "-n", ranks, "--bind-to", "none", "--no-tag-output", *command])
    elif system == "mpi4py":
        tcp = ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--bind-to", "none"]
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        output = run_and_read_output(["mpiexec", *as_root, "--oversubscribe", *tcp, "-n", ranks, *command])
    else:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
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
    parser.add_argument("--batches", default="32,512", help="the numbers of samples in a batch, separated by commas")
    parser.add_argument("--pauses", default="", help="the pauses in s in jobs that compute no gradient, separated by commas")
    parser.add_argument("--system", choices=PROGRAMS, help="run one rank of a job (used by this program itself)")
    parser.add_argument("--job", nargs=4, type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.system:
        PROGRAMS[arguments.system](Job(*arguments.job))
        return
    # Each rank computes with one thread. numpy and torch read these variables.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    rounds, seconds = (1, 0.2) if arguments.smoke else (arguments.rounds, arguments.seconds)
    systems = available_systems()
    cases = [(int(batch), 0.0) for batch in arguments.batches.split(",") if batch]
    cases += [(0, float(pause)) for pause in arguments.pauses.split(",") if pause]
    for count in map(int, arguments.counts.split(",")):
        for batch, pause in cases:
            rates: dict[str, list[float]] = {system: [] for system in systems}
            for number in range(rounds):
                # Another system begins each round, because the end of a job may still disturb the next job.
                first = number % len(systems)
                for system in systems[first:] + systems[:first]:
                    rates[system].append(update_rate_of_fast_workers(run_job(system, [count, batch, pause, seconds])))
            work = f"batches of {batch} samples" if batch > 0 else f"a pause of {pause * 1000:g} ms in each step"
            print(f"{count} parameters, {work}:", flush=True)
            alone = statistics.median(rates["alone"])
            for system in systems:
                values = rates[system]
                median = statistics.median(values)
                line = f"  {system:10} {median:9.0f} updates/s ({min(values):.0f} to {max(values):.0f})"
                if system in ("mpi4py", "torch"):
                    ratios = sorted(ours / value for ours, value in zip(rates["ringtrain"], values, strict=True))
                    line += f", ringtrain is {statistics.median(ratios):.2f} times as fast ({ratios[0]:.2f} to {ratios[-1]:.2f})"
                if system != "alone":
                    line += f", {median / alone:.3f} of workers that exchange nothing"
                print(line, flush=True)


if __name__ == "__main__":
    main()

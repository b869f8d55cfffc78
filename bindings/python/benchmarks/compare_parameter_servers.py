#!/usr/bin/env python3
"""Compares an asynchronous parameter server of ringtrain with the same program on mpi4py and on torch RPC, on one host.

    python benchmarks/compare_parameter_servers.py [--workers 2,3] [--batches 0,32] [--rounds 7] [--smoke]

Rank 0 is the server, and the other ranks are workers. In each step, a worker draws a random batch from its part of the data,
computes the gradient of a neural network with numpy, sends the gradient, and receives the new parameters. With a batch of 0
samples, a worker computes nothing. With `--pauses`, a worker waits instead of computing. With `--slow-worker`, the last worker
waits after each step nine times as long as its step took, so it is ten times slower than the others.

For each case, the program prints the median and the range of the updates per second of all workers together, without a slow
worker. It also prints the median divided by that of each other system, with the 95% interval of this ratio from 10,000 bootstrap
samples of the rounds, and divided by that of workers that exchange nothing. The systems run alternately, so that other programs
disturb all of them.

`program` is `ringtrain --strategy ps-async`, which trains the same network on the data of the first worker. It hands out each
sample once per epoch, and computes the training loss at the end.

The program needs Open MPI and mpi4py for the comparison with MPI, and torch for torch RPC. The program prints which systems it
skips. Without `--tcp`, each system chooses how to send, which is shared memory for ringtrain and for Open MPI.
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
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

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


@dataclass
class Job:
    """The ranks of a job, and what each step does: it computes the gradient of `batch` samples, or nothing, or waits."""

    workers: int
    parameter_count: int
    batch: int
    pause: float
    seconds: float
    has_slow_worker: bool
    uses_tcp: bool

    def is_slow(self, worker: int) -> bool:
        return self.has_slow_worker and worker == self.workers - 1

    def run_worker(self, worker: int, network: Network, exchange: Callable[[], np.ndarray]) -> None:
        """Takes steps, and prints their number and their duration. `exchange` sends the gradient of the network, and returns
        the new parameters."""
        parameters = exchange()
        steps, start = 0, time.perf_counter()
        now = start
        while now < start + self.seconds:
            if self.batch > 0:
                network.compute_gradient(parameters, self.batch)
            elif self.pause > 0:
                time.sleep(self.pause)
            parameters = exchange()
            steps += 1
            end = time.perf_counter()
            if self.is_slow(worker):
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

    world = ring.init(transport="tcp" if job.uses_tcp else None)
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
    status, left = MPI.Status(), job.workers
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
    # `uv` is the transport over sockets.
    tcp = {"_transports": ["uv"], "_channels": ["basic"]} if job.uses_tcp else {}
    options = rpc.TensorPipeRpcBackendOptions(**tcp)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=job.workers + 1, rpc_backend_options=options)
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
    systems = ["ringtrain", "program", "alone"]
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


def run_program(job: Job) -> float:
    """Trains with `ringtrain --strategy ps-async` for about as long as the other systems, and returns its updates per second."""
    network = Network(job.parameter_count, 0)
    updates = job.seconds * min(20_000, 4e8 / network.count)
    epochs = max(1, round(updates * job.batch / SAMPLES))
    with tempfile.TemporaryDirectory() as folder:
        inputs, labels, report = (os.path.join(folder, name) for name in ("inputs.npy", "labels.npy", "report.json"))
        np.save(inputs, network.inputs)
        np.save(labels, network.labels)
        launch = ["ringrun", "-n", str(job.workers + 1), "--bind-to", "none", "ringtrain", "--quiet", "--strategy", "ps-async"]
        data = ["--data", f"{inputs},{labels}", "--task", "classification", "--test-fraction", "0", "--report", report]
        model = ["--model", f"mlp:{network.hidden}", "--optimizer", "sgd", "--lr", str(RATE)]
        transport = ["--transport", "tcp"] if job.uses_tcp else []
        run_and_read_output([*launch, *data, *model, *transport, "--batch-size", str(job.batch), "--epochs", str(epochs)])
        with open(report) as file:
            return json.load(file)["samples_per_second"] / job.batch


def run_job(system: str, job: Job) -> float:
    """Runs a job, and returns the updates per second of its workers together, without a slow worker."""
    if system == "program":
        return run_program(job)
    command = [sys.executable, __file__, "--system", system, "--job", json.dumps(asdict(job))]
    ranks = str(job.workers + 1)
    if system == "ringtrain":
        output = run_and_read_output(["ringrun", "-n", ranks, "--bind-to", "none", "--no-tag-output", *command])
    elif system == "mpi4py":
        tcp = ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"] if job.uses_tcp else []
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        output = run_and_read_output(["mpiexec", *as_root, "--oversubscribe", "--bind-to", "none", *tcp, "-n", ranks, *command])
    else:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        first = 0 if system == "torch" else 1
        processes = [
            subprocess.Popen(command, env={**os.environ, **address, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
            for rank in range(first, job.workers + 1)
        ]
        output = "".join(process.communicate(timeout=120)[0] for process in processes)
    results = [json.loads(line.split("RESULT ", 1)[1]) for line in output.splitlines() if "RESULT " in line]
    if len(results) != job.workers:
        raise SystemExit(f"{system}: {len(results)} of {job.workers} workers printed a result:\n{output}")
    return sum(result["steps"] / result["seconds"] for result in results if not job.is_slow(result["worker"]))


def run_and_read_output(command: list[str]) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120).stdout


def ratio_with_interval(ours: list[float], theirs: list[float]) -> str:
    """Returns the ratio of the medians, and its 95% interval from bootstrap samples of the rounds."""
    rounds = np.array([ours, theirs])
    samples = np.random.default_rng(0).integers(len(ours), size=(10_000, len(ours)))
    medians = np.median(rounds[:, samples], axis=2)
    low, high = np.quantile(medians[0] / medians[1], [0.025, 0.975])
    return f"{statistics.median(ours) / statistics.median(theirs):.2f} ({low:.2f} to {high:.2f})"


def compare(job: Job, systems: list[str], rounds: int) -> None:
    """Runs the job with each system in each round, and prints the results."""
    computes_or_waits = job.batch + job.pause > 0
    if not computes_or_waits:
        systems = [system for system in systems if system != "alone"]
    if job.batch == 0 or job.has_slow_worker:
        systems = [system for system in systems if system != "program"]
    rates: dict[str, list[float]] = {system: [] for system in systems}
    for number in range(rounds):
        # Another system begins each round, because the end of a job may still disturb the next job.
        first = number % len(systems)
        for system in systems[first:] + systems[:first]:
            rates[system].append(run_job(system, job))
    work = f"batches of {job.batch} samples" if job.batch > 0 else "no computation"
    if job.pause > 0:
        work = f"a pause of {job.pause * 1000:g} ms in each step"
    slow = ", one of them slow" if job.has_slow_worker else ""
    print(f"{job.workers} workers{slow}, {job.parameter_count} parameters, {work}:", flush=True)
    for system, values in rates.items():
        line = f"  {system:10} {statistics.median(values):9.0f} updates/s ({min(values):.0f} to {max(values):.0f})"
        if system in ("mpi4py", "torch"):
            for name in ("ringtrain", "program"):
                if name in rates:
                    line += f", {name} is {ratio_with_interval(rates[name], values)} times as fast"
        if system != "alone" and computes_or_waits:
            line += f", {statistics.median(values) / statistics.median(rates['alone']):.3f} of workers that exchange nothing"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="how often each system runs")
    parser.add_argument("--smoke", action="store_true", help="take one short round, to check that the program works")
    parser.add_argument("--seconds", type=float, default=2.0, help="the duration of a job")
    parser.add_argument("--workers", default="3", help="the numbers of workers, separated by commas")
    parser.add_argument("--slow-worker", action="store_true", help="make the last worker ten times slower")
    parser.add_argument("--tcp", action="store_true", help="send over TCP")
    parser.add_argument("--counts", default="1000,100000", help="the numbers of parameters, separated by commas")
    parser.add_argument("--batches", default="32,512", help="the numbers of samples in a batch, separated by commas; 0: none")
    parser.add_argument("--pauses", default="", help="the pauses in s in jobs that compute no gradient, separated by commas")
    parser.add_argument("--system", choices=PROGRAMS, help="run one rank of a job (used by this program itself)")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.system:
        PROGRAMS[arguments.system](Job(**arguments.job))
        return
    # Each rank computes with one thread. numpy and torch read these variables.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    rounds, seconds = (1, 0.2) if arguments.smoke else (arguments.rounds, arguments.seconds)
    systems = available_systems()
    cases = [(int(batch), 0.0) for batch in arguments.batches.split(",") if batch]
    cases += [(0, float(pause)) for pause in arguments.pauses.split(",") if pause]
    for workers in map(int, arguments.workers.split(",")):
        for count in map(int, arguments.counts.split(",")):
            for batch, pause in cases:
                compare(Job(workers, count, batch, pause, seconds, arguments.slow_worker, arguments.tcp), systems, rounds)


if __name__ == "__main__":
    main()

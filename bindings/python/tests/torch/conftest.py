"""Fixtures that start jobs for the tests of `ringtrain.torch`. A job runs many checks, because importing torch takes seconds."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# A job is killed after this number of seconds. A job needs less time even on two busy cores.
TIMEOUT_SECONDS = 180


def _is_installed(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    # This directory is also named `torch`. Python finds it as a namespace package, which has no origin.
    return spec is not None and spec.origin is not None


missing = [name for name in ("torch", "numpy") if not _is_installed(name)]
ringrun = os.environ.get("RINGRUN") or shutil.which("ringrun")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None
    if missing:
        reason = f"NOT TESTED: ringtrain.torch, because {' and '.join(missing)} cannot be imported"
    elif ringrun is None:
        reason = "NOT TESTED: ringtrain.torch, because there is no ringrun in PATH, and RINGRUN is not set"
    if reason is not None:
        for item in items:
            if Path(__file__).parent in Path(item.path).parents:
                item.add_marker(pytest.mark.skip(reason=reason))


Job = subprocess.CompletedProcess[str]


def job_environment() -> dict[str, str]:
    """Returns the environment for processes that the tests start: the environment of this process, with the package on
    the import path."""
    import ringtrain

    package = Path(next(iter(ringtrain.__path__))).parent
    found = {name: value for name, value in os.environ.items() if not name.startswith(("RING_", "MASTER_"))}
    return found | {"PYTHONPATH": f"{package}:{PROGRAMS}", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def run_command(command: list[str], environment: dict[str, str] | None = None) -> Job:
    """Runs a command and waits until it ends."""
    return subprocess.run(command, env=environment or job_environment(), capture_output=True, text=True, timeout=TIMEOUT_SECONDS)


@pytest.fixture
def run_python_text() -> Callable[[str], Job]:
    """Runs a program in a new process. The program is given as text."""
    return lambda program: run_command([sys.executable, "-c", program])


@pytest.fixture
def run_benchmark() -> Callable[..., Job]:
    """Runs a program of `benchmarks/`, which starts its jobs itself. The program finds `ringrun` and `ringtrain` in PATH."""

    def run_program(program: str, *arguments: str) -> Job:
        path = f"{Path(str(ringrun)).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        environment = job_environment() | {"PATH": path}
        return run_command([sys.executable, str(BENCHMARKS / program), *arguments], environment)

    return run_program


@pytest.fixture
def launch() -> Callable[..., Job]:
    """Runs a program on n ranks under ringrun."""

    def run_job(n: int, program: str, *arguments: str, options: Sequence[str] = ()) -> Job:
        return run_command([str(ringrun), *options, "-n", str(n), sys.executable, str(PROGRAMS / program), *arguments])

    return run_job


@pytest.fixture
def run_and_interrupt() -> Callable[..., tuple[Job, float]]:
    """Runs a program and sends it SIGINT, as Ctrl-C does, when every rank has printed "ready". Returns the job and the seconds
    from the signal to the end of the job."""

    def run_job(n: int, program: str, *arguments: str) -> tuple[Job, float]:
        command = [str(ringrun), "-n", str(n), sys.executable, str(PROGRAMS / program), *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=job_environment(), **pipes) as process:
            watchdog = threading.Timer(TIMEOUT_SECONDS, process.kill)
            watchdog.start()
            lines = []
            while sum("ready" in line for line in lines) < n and (line := process.stdout.readline()):
                lines.append(line)
            start = time.monotonic()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate()
            watchdog.cancel()
        return subprocess.CompletedProcess(command, process.returncode, "".join(lines) + out, err), time.monotonic() - start

    return run_job


@pytest.fixture
def torchrun() -> Callable[..., Job]:
    """Runs a program on n ranks under torchrun."""

    def run_job(n: int, program: str, *arguments: str) -> Job:
        options = ["--nnodes=1", f"--nproc-per-node={n}", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        return run_command([sys.executable, "-m", "torch.distributed.run", *options, str(PROGRAMS / program), *arguments])

    return run_job


@pytest.fixture
def run_by_address() -> Callable[..., list[Job]]:
    """Runs a program in n processes without a launcher. Each process gets the address of a store, its rank and the
    number of ranks."""

    def run_job(n: int, program: str, *arguments: str) -> list[Job]:
        # After this block the port is free, and the kernel does not assign it again before the processes have started.
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", 0))
            method = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        command = [sys.executable, str(PROGRAMS / program), *arguments]
        started = [
            subprocess.Popen(
                [*command, "--init-method", method, "--rank", str(rank), "--world-size", str(n)],
                env=job_environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(n)
        ]
        jobs = []
        for process in started:
            out, err = process.communicate(timeout=TIMEOUT_SECONDS)
            jobs.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
        return jobs

    return run_job

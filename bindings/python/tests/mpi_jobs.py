"""Launches jobs for the tests of `ringtrain.mpi`: real processes, under the real `ringrun`."""

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent / "mpi"
JOB_TIMEOUT_S = 120


def ringrun() -> str:
    """The launcher: `RINGRUN`, or the one on PATH. Without it nothing here can be tested, which is a failure."""
    found = os.environ.get("RINGRUN") or shutil.which("ringrun")
    if not found:
        pytest.fail("ringrun is not on PATH; build it (cargo build --release) and set RINGRUN to it")
    return found


def launch(
    size: int, *command: str, options: tuple[str, ...] = (), environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    """Runs a job of `size` ranks of this Python, and gives what they printed."""
    package = str(Path(__import__("ringtrain").__path__[0]).parent)
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    everything = {**os.environ, "PYTHONPATH": path, **(environment or {})}
    line = [
        ringrun(),
        "-n",
        str(size),
        "--no-tag-output",
        "--job-timeout",
        str(JOB_TIMEOUT_S),
        *options,
        sys.executable,
        *command,
    ]
    return subprocess.run(line, env=everything, capture_output=True, text=True, timeout=JOB_TIMEOUT_S + 30, check=False)


@functools.cache
def checked(module: str, size: int) -> dict[str, str]:
    """Runs all checks of a module in one job: what each came to, `passed` or what went wrong."""
    done = launch(size, str(HERE / "run_checks.py"), module)
    results = dict(re.findall(r"^CHECK (\w+) (passed)$", done.stdout, re.MULTILINE))
    failed = re.findall(r"^CHECK (\w+) failed\n(.*?)^END$", done.stdout, re.MULTILINE | re.DOTALL)
    for name, why in failed:
        results[name] = why
    if done.returncode != 0 and not failed:
        results[""] = f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return results


def checks_of(module: str) -> list[str]:
    """The names of a module's checks. It is not imported: that would join a job."""
    return re.findall(r"^def (check_\w+)\(", (HERE / f"{module}.py").read_text(), re.MULTILINE)

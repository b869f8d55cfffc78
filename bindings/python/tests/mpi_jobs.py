"""Launches jobs for the tests of `ringtrain.mpi`. The ranks are processes under `ringrun`."""

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
    """Returns the path of the program ringrun: the value of the variable `RINGRUN` if it is set, otherwise the
    `ringrun` on PATH. If there is neither, the test fails.
    """
    found = os.environ.get("RINGRUN") or shutil.which("ringrun")
    if not found:
        pytest.fail("ringrun is not on PATH; build it (cargo build --release) and set RINGRUN to it")
    return found


def launch(
    size: int, *command: str, options: tuple[str, ...] = (), environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    """Runs a job in which `size` ranks execute this Python interpreter with the arguments `command`. Returns the exit
    code and the output."""
    package = str(Path(__import__("ringtrain").__path__[0]).parent)
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": path, **(environment or {})}
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
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=JOB_TIMEOUT_S + 30, check=False)


@functools.cache
def results_of_checks(modules: tuple[str, ...], size: int) -> dict[str, str]:
    """Runs all checks of the modules in one job. Returns a dictionary with an entry for each check. The key is
    "MODULE.CHECK". The value is "passed", or the traceback of the check's failure.
    """
    done = launch(size, str(HERE / "run_checks.py"), *modules)
    results = dict(re.findall(r"^CHECK ([\w.]+) (passed)$", done.stdout, re.MULTILINE))
    failed = re.findall(r"^CHECK ([\w.]+) failed\n(.*?)^END$", done.stdout, re.MULTILINE | re.DOTALL)
    for name, why in failed:
        results[name] = why
    if done.returncode != 0 and not failed:
        results[""] = f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return results


def names_of_checks(module: str) -> list[str]:
    """Returns the names of a module's checks. Finds the names in the source file, because importing the module would
    join a job.
    """
    return re.findall(r"^def (check_\w+)\(", (HERE / f"{module}.py").read_text(), re.MULTILINE)

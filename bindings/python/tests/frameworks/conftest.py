"""Fixtures that start the programs of the folder `programs`. A job runs many checks, because importing a framework takes
seconds."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import pytest

from ranks import FinishedProgram, Launcher, RunningProgram

PROGRAMS = Path(__file__).parent / "programs"
# A job needs less time even on two busy cores. `keras_compiled.py` with PyTorch took 220 seconds while a compiler ran.
TIMEOUT_SECONDS = 400.0


def is_installed(*names: str) -> bool:
    """Returns whether all these packages are installed. Does not import them."""
    for name in names:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return False
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("needs")
        missing = [name for name in marker.args if not is_installed(name)] if marker else []
        if "tensorflow" in missing and is_installed("tensorflow-cpu"):
            missing.remove("tensorflow")
        if missing:
            reason = f"NOT TESTED: {item.name}, because {' and '.join(missing)} cannot be imported"
            item.add_marker(pytest.mark.skip(reason=reason))


def job_environment(backend: str) -> dict[str, str]:
    return {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}


@pytest.fixture
def start(ringrun: Launcher) -> Callable[..., RunningProgram]:
    """Starts a program of the folder `programs` on n ranks, with a back end of Keras."""

    def start_job(n: int, program: str, *arguments: str, backend: str) -> RunningProgram:
        return ringrun.start(n, PROGRAMS / program, *arguments, env=job_environment(backend), timeout=TIMEOUT_SECONDS)

    return start_job


@pytest.fixture
def launch(ringrun: Launcher) -> Callable[..., FinishedProgram]:
    """Runs a program of the folder `programs` on n ranks, with a back end of Keras, until it ends."""

    def run_job(n: int, program: str, *arguments: str, backend: str = "jax", **options: object) -> FinishedProgram:
        return ringrun(n, PROGRAMS / program, *arguments, env=job_environment(backend), timeout=TIMEOUT_SECONDS, **options)

    return run_job

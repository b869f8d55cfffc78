"""Fixtures of all tests: the launcher `ringrun`, and a check that no process outlives its test."""

import os
import shutil
import signal

import pytest

from ranks import Launcher, kill_leftover_processes

# A shell that runs the tests in the background makes them ignore SIGINT. Programs that the tests start would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the tests marked `full`, which are long variants of shorter tests, unless `tools/test --full` runs the tests."""
    if os.environ.get("TEST_FULL"):
        return
    long = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in long]


@pytest.fixture(scope="session")
def ringrun() -> Launcher:
    """Runs programs under ringrun: `done = ringrun(4, "script.py", "argument")`. See `ranks.Launcher`."""
    program = os.environ.get("RINGRUN") or shutil.which("ringrun")
    if program is None:
        pytest.fail("ringrun is not on PATH and the variable RINGRUN is not set: run cargo build --release --bins", pytrace=False)
    return Launcher(program)


@pytest.fixture(scope="session")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Holds the results of the test functions that `ranks.Cases` has run, by file and number of ranks.

    All functions of a file run in one launch of ringrun.
    """
    return {}


@pytest.fixture(autouse=True)
def _no_process_is_left():
    """Checks at the end of each test that all processes which the test started through the module `ranks` have ended."""
    yield
    left = kill_leftover_processes()
    assert not left, f"processes were left behind: {left}"

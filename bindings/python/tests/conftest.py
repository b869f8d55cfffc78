"""What all tests share: `ringrun`, with deadlines and without orphans."""

import os
import shutil
import signal

import pytest

from ranks import Launcher, left_behind

# Who runs the tests in a shell's background ignores Ctrl-C, and so would all programs that they start, which are sent it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the tests marked `full`, which cost seconds and vary a shorter test; `tools/test --full` runs them."""
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
        pytest.fail(
            "ringrun is not on the path, and RINGRUN does not say where it is: cargo build --release --bins", pytrace=False
        )
    return Launcher(program)


@pytest.fixture(scope="session")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What the launches of `ranks.Cases` have reported so far: one launch serves all the cases of a file and world size."""
    return {}


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """Every process that a test has started through `ranks` ends with it."""
    yield
    left = left_behind()
    assert not left, f"processes were left behind: {left}"

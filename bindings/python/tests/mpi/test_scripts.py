"""Checks that unchanged scripts for mpi4py print the same text with ringtrain as with mpi4py.

The files in `scripts/expected` have the output of the scripts with mpi4py 4.1.2 and Open MPI 5.0.11. If the variable
`MPI4PY_REFERENCE` is set to a command, such as `mpirun --oversubscribe -n {n} python`, the tests also run the scripts
with this command and compare the output.
"""

import os
import re
import shlex
import subprocess
from functools import cache

import pytest

from mpi_jobs import HERE, launch, ringrun
from ringtrain.mpi.path import directory

SCRIPTS = sorted(path.stem for path in (HERE / "scripts").glob("*.py"))
SIZES = (1, 2, 3, 4)
# The scripts that run without `--full`. These scripts use objects, arrays, and messages from any source.
QUICK = ("collective_arrays", "collective_objects", "master_worker")


@cache
def ringrun_has_option_mpi4py() -> bool:
    """Returns whether this `ringrun` has the option `--mpi4py`."""
    return "--mpi4py" in subprocess.run([ringrun(), "--help"], capture_output=True, text=True, check=True).stdout


def sorted_lines(text: str) -> list[str]:
    return sorted(text.splitlines())


def expected_lines(script: str, size: int) -> list[str]:
    text = (HERE / "scripts" / "expected" / f"{script}.txt").read_text()
    sections = re.split(r"^== (\d+) ranks\n", text, flags=re.MULTILINE)[1:]
    return sorted_lines(dict(zip(sections[::2], sections[1::2], strict=True))[str(size)])


def check_output(script: str, size: int, **launch_options) -> None:
    done = launch(size, str(HERE / "scripts" / f"{script}.py"), **launch_options)
    assert done.returncode == 0, done.stderr
    assert sorted_lines(done.stdout) == expected_lines(script, size)


@pytest.mark.full
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_script_with_the_mpi4py_alias_on_pythonpath(script: str, size: int) -> None:
    path = os.pathsep.join([directory(), package_directory(), os.environ.get("PYTHONPATH", "")])
    check_output(script, size, environment={"PYTHONPATH": path}, options=("--mpi4py=installed",))


def test_one_script_with_the_mpi4py_alias_on_pythonpath() -> None:
    test_script_with_the_mpi4py_alias_on_pythonpath("collective_arrays", 3)


@pytest.mark.parametrize(
    "script", [script if script in QUICK else pytest.param(script, marks=pytest.mark.full) for script in SCRIPTS]
)
def test_script_with_the_option_mpi4py(script: str) -> None:
    if not ringrun_has_option_mpi4py():
        pytest.skip("this ringrun has no --mpi4py")
    check_output(script, 3, options=("--mpi4py",))


@pytest.mark.skipif(
    "MPI4PY_REFERENCE" not in os.environ, reason="MPI4PY_REFERENCE is not set, so only the recorded output is checked"
)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_expected_output_is_that_of_the_reference(script: str, size: int) -> None:
    command = shlex.split(os.environ["MPI4PY_REFERENCE"].format(n=size))
    done = subprocess.run(
        [*command, str(HERE / "scripts" / f"{script}.py")], capture_output=True, text=True, check=True, timeout=120
    )
    assert sorted_lines(done.stdout) == expected_lines(script, size)


def package_directory() -> str:
    """Returns the directory that contains the package `ringtrain` under test."""
    return os.path.dirname(__import__("ringtrain").__path__[0])

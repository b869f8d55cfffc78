"""Every check of every `checks_*.py`, with 1 to 4 ranks; a module's checks share one job for each number of ranks."""

import pytest

from mpi_jobs import HERE, checked, checks_of

MODULES = sorted(path.stem for path in HERE.glob("checks_*.py"))
SIZES = (1, 2, 3, pytest.param(4, marks=pytest.mark.full))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("module", "check"), [(module, check) for module in MODULES for check in checks_of(module)])
def test(module: str, size: int, check: str) -> None:
    results = checked(module, size)
    said = results.get(check, "was not reached: " + results.get("", "an earlier check ended the job"))
    assert said == "passed", said

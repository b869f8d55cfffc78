"""Every check of every `checks_*.py`, with 1 to 4 ranks; a module's checks share one job for each number of ranks."""

import pytest

from mpi_jobs import HERE, checked, checks_of

MODULES = sorted(path.stem for path in HERE.glob("checks_*.py"))
CASES = [(module, size, check) for module in MODULES for size in (1, 2, 3, 4) for check in checks_of(module)]


@pytest.mark.parametrize(("module", "size", "check"), CASES, ids=lambda value: str(value))
def test(module: str, size: int, check: str) -> None:
    results = checked(module, size)
    said = results.get(check, "was not reached: " + results.get("", "an earlier check ended the job"))
    assert said == "passed", said

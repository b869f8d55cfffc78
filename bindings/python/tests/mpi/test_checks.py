"""Runs every check of every `checks_*.py` with 1 to 4 ranks. For each number of ranks, one job runs all checks, because each
rank needs a third of a second to start.
"""

import pytest

from mpi_jobs import HERE, names_of_checks, results_of_checks

MODULES = tuple(sorted(path.stem for path in HERE.glob("checks_*.py")))
SIZES = (*(pytest.param(n, marks=pytest.mark.full) for n in (1, 2)), 3, pytest.param(4, marks=pytest.mark.full))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("module", "check"), [(module, check) for module in MODULES for check in names_of_checks(module)])
def test(module: str, size: int, check: str) -> None:
    results = results_of_checks(MODULES, size)
    result = results.get(f"{module}.{check}", "the check did not run: " + results.get("", "an earlier check ended the job"))
    assert result == "passed", result

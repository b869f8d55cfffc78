"""Tests of `ringtrain.jax`. All checks with the same number of ranks run in one job, because importing JAX takes seconds."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ranks import Launcher

PROGRAMS = Path(__file__).parent / "programs"
# Importing and compiling takes long on busy cores.
PATIENCE_S = 120.0
pytestmark = pytest.mark.timeout(PATIENCE_S + 20)
ENVIRONMENT = {"JAX_PLATFORMS": "cpu"}


def is_installed(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    # Python finds the folder tests/jax as a namespace package, which has no origin.
    return spec is not None and spec.origin is not None


with_jax = pytest.mark.skipif(not is_installed("jax"), reason="NOT TESTED: ringtrain.jax, because JAX cannot be imported")
with_optax = pytest.mark.skipif(
    not (is_installed("jax") and is_installed("optax")),
    reason="NOT TESTED: ringtrain.jax.distribute, because JAX or optax cannot be imported",
)


@with_jax
@pytest.mark.parametrize("n", [pytest.param(n, marks=[] if n == 2 else pytest.mark.full) for n in (1, 2, 3, 4)])
def test_operations(ringrun: Launcher, n: int) -> None:
    arguments = [] if os.environ.get("TEST_FULL") else ["short"]
    done = ringrun(n, PROGRAMS / "operations.py", *arguments, env=ENVIRONMENT, timeout=PATIENCE_S)
    assert all(done.lines(rank) == ["all checks passed"] for rank in range(n)), done


@with_optax
@pytest.mark.full
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("compression", ["none", "int8"])
def test_the_losses_are_those_of_one_process(ringrun: Launcher, n: int, compression: str) -> None:
    done = ringrun(n, PROGRAMS / "training.py", compression, env=ENVIRONMENT, timeout=PATIENCE_S)
    assert done.lines(0)[-1].startswith("the same losses"), done


@with_jax
@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ("kill", "PeerLost", "connection to rank 1"),
        ("raise", "Aborted", "ValueError: bad data"),
        ("mismatch", "Mismatch", "rank 1 called all_gather"),
        ("unused result", "PeerLost", "connection to rank 1"),
    ],
)
def test_a_failure_in_a_jitted_function_is_readable(ringrun: Launcher, fault: str, kind: str, text: str) -> None:
    done = ringrun(2, PROGRAMS / "failures.py", fault, code=None, env=ENVIRONMENT, timeout=PATIENCE_S)
    errors = done.errors(0)
    assert done.code != 0 and any(text in line for line in errors), done
    assert not any("JaxRuntimeError" in line for line in errors), done
    if fault != "unused result":
        assert done.lines(0)[-1] == f"caught {kind} of rank {None if fault == 'mismatch' else 1}", done


@with_jax
@pytest.mark.full
@pytest.mark.parametrize("rows", [2, 1500])
def test_control_c_interrupts_an_operation_in_a_jitted_function(ringrun: Launcher, rows: int) -> None:
    done = ringrun(2, PROGRAMS / "failures.py", f"interrupt {rows}", code=None, env=ENVIRONMENT, timeout=PATIENCE_S)
    assert any(line.startswith("KeyboardInterrupt") for line in done.errors(0)), done
    assert any("Aborted" in line and "rank 0" in line for line in done.errors(1)), done


@with_jax
@pytest.mark.full
def test_processes_that_are_no_ranks(ringrun: Launcher) -> None:
    done = ringrun(2, PROGRAMS / "failures.py", "fork", env=ENVIRONMENT, timeout=PATIENCE_S)
    closed = "this process is not in a job; call ringtrain.jax.init() first"
    for rank in range(2):
        assert done.lines(rank) == ["child: Forked, Forked", "parent: 1.0", f"closed: {closed}, {closed}"], done


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        ("raise ImportError", "is not installed here"),
        ("__version__ = '0.7.1'", "and not 0.7.1"),
    ],
    ids=["missing", "old"],
)
def test_missing_and_old_jax(tmp_path: Path, fake: str, reason: str) -> None:
    (tmp_path / "jax.py").write_text(fake)
    program = (
        f"import sys\nsys.path[:] = {[str(tmp_path), *sys.path]!r}\ntry: import ringtrain.jax\nexcept ImportError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert "ringtrain.jax needs JAX 0.7.2 or later" in done.stdout and reason in done.stdout, done

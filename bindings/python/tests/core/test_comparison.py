"""Runs the comparison with mpi4py with tiny sizes, on a machine without mpi4py."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ranks import WAIT_LIMIT_S

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "compare_mpi4py.py"


@pytest.mark.full
def test_every_operation_is_measured_and_checked_without_mpi4py() -> None:
    ringrun = os.environ.get("RINGRUN") or shutil.which("ringrun")
    operations = ["--operation", "broadcast_object", "--operation", "barrier"]
    for name in "ping_pong all_reduce broadcast all_gather reduce_scatter gather scatter all_to_all".split():
        operations += ["--operation", name]
    command = [sys.executable, PROGRAM, "--ours", sys.executable, "--ringrun", str(ringrun), "--theirs", "false", *operations]
    command += ["--with-interface", "--rounds", "1", "--seconds", "0.001", "--size", "8", "--size", "8192"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_LIMIT_S)
    assert done.returncode == 0, done
    assert "SKIPPED: mpi4py: false cannot import it" in done.stdout, done
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert rows[0] == "| operation | bytes | ringtrain, us | ringtrain.mpi, us |", done
    assert len(rows) == 1 + 2 + 8 * 2 and all(row.count("|") == 5 for row in rows), done


def test_a_run_without_any_implementation_fails() -> None:
    command = [sys.executable, PROGRAM, "--ours", "false", "--theirs", "false"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_LIMIT_S)
    assert done.returncode == 1 and done.stdout.count("SKIPPED") == 2, done

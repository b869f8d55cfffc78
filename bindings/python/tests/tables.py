"""Writes tables and runs the program `ringtrain` on them."""

import csv
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest


def ringtrain(*arguments: object, timeout: float = 60) -> str:
    """Runs the program `ringtrain`, which is installed beside `ringrun`, and returns its standard output."""
    ringrun = Path(os.environ.get("RINGRUN") or shutil.which("ringrun") or pytest.fail("ringrun is not on PATH"))
    command = [ringrun.with_name("ringtrain"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


def save(path: Path, columns: Mapping[str, Sequence]) -> Path:
    """Writes a table with these columns, and returns its path."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path

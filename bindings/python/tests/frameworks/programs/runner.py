"""Runs the checks of a program on this rank, and has the data that they train on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np


def run(namespace: dict[str, Any]) -> None:
    """Calls the functions of `namespace` whose names begin with "check_" and, if the program has an argument, contain one of its
    words."""
    words = sys.argv[1].split(",") if len(sys.argv) > 1 else [""]
    named: dict[str, Callable[[], None]] = {
        name: value for name, value in namespace.items() if name.startswith("check_") and any(word in name for word in words)
    }
    assert named, words
    for name, check in named.items():
        start = time.perf_counter()
        try:
            check()
        except BaseException as error:
            error.add_note(f"in {name}")
            raise
        if os.environ.get("RING_RANK", "0") == "0":
            print(f"passed {name} in {time.perf_counter() - start:.2f} s", flush=True)
    print(f"{len(named)} checks passed", flush=True)


def classes(rows: int, features: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Returns points of three classes, the same on all ranks."""
    random = np.random.default_rng(3)
    points = random.normal(size=(rows, features)).astype(np.float32)
    return points, (points @ random.normal(size=(features, 3))).argmax(1)


def raised(kind: type[BaseException], call: Callable[[], Any]) -> str:
    """Calls a function that must raise an exception of this class, and returns the text of the exception."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("no exception was raised")

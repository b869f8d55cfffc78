"""Runs the checks of a program: the functions whose names begin with "check_", in the order in which the program
defines them."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import torch

import ringtrain.torch  # noqa: F401  (registers the backend)


def parse_arguments() -> argparse.Namespace:
    """Parses the arguments that the tests pass to a program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--init-method")
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--world-size", type=int, default=-1)
    parser.add_argument("--only", default="")
    return parser.parse_args()


def run(namespace: dict[str, Any], *arguments: Any, only: str = "") -> None:
    """Calls the functions of `namespace` whose names begin with "check_" and contain `only`. Each function is called with
    `arguments`. Rank 0 prints the name and the time of each check."""
    named: dict[str, Callable[..., None]] = {
        name: value for name, value in namespace.items() if name.startswith("check_") and only in name
    }
    for name, check in named.items():
        start = time.perf_counter()
        torch.manual_seed(7)
        try:
            check(*arguments)
        except BaseException as error:
            error.add_note(f"in {name}")
            raise
        if os.environ.get("RANK", "0") == "0":
            print(f"passed {name} in {time.perf_counter() - start:.2f} s", flush=True)
    print(f"{len(named)} checks passed", flush=True)


def raised(kind: type[BaseException], call: Callable[[], Any]) -> BaseException:
    """Calls `call`, which must raise an exception of the class `kind`, and returns this exception."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")

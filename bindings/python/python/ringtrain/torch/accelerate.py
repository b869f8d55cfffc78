"""Lets Hugging Face accelerate use the backend "ring" on CPUs: `InitProcessGroupKwargs(backend="ring")` with
`Accelerator(cpu=True)`.

For processes without a GPU, accelerate itself chooses "mpi" or "gloo" and refuses all other backends, even registered
ones. As soon as accelerate is imported, this module wraps the function with which accelerate chooses the backend.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULE = "accelerate.state"


def make_accelerate_accept(backend: str) -> None:
    """Makes accelerate use `backend` if a program requests this backend."""
    module = sys.modules.get(_MODULE)
    if module is not None:
        _make_accelerate_accept(module, backend)
    elif not any(isinstance(finder, _ImportFinderOfAccelerate) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ImportFinderOfAccelerate(backend))


class _ImportFinderOfAccelerate:
    """An import finder that calls `_make_accelerate_accept` as soon as the module `accelerate.state` has been imported."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            _make_accelerate_accept(module, self._backend)

        spec.loader.exec_module = execute_and_wrap
        return spec


def _make_accelerate_accept(module: ModuleType, backend: str) -> None:
    """Wraps accelerate's function for choosing a backend: if the program requests `backend`, the function now returns
    `backend`.
    """
    state = getattr(module, "PartialState", None)
    choose = getattr(state, "_prepare_backend", None)
    # In a version of accelerate without this function, change nothing. Do not wrap the function twice.
    if choose is None or hasattr(choose, "__wrapped__"):
        return

    @functools.wraps(choose)
    def choose_or_accept(self: Any, cpu: bool = False, sagemaker_dp: bool = False, wanted: str | None = None) -> Any:
        chosen, kind = choose(self, cpu, sagemaker_dp, wanted)
        return (backend if wanted == backend else chosen), kind

    state._prepare_backend = choose_or_accept

"""Hugging Face accelerate: `InitProcessGroupKwargs(backend="ring")` works with `Accelerator(cpu=True)` too.

accelerate chooses the backend of processes without a GPU itself ("mpi" or "gloo") and refuses every other one, although torch has
registered it. This wraps that choice, when accelerate is imported.
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


def accept(backend: str) -> None:
    """Makes accelerate accept the backend if a program asks for it."""
    module = sys.modules.get(_MODULE)
    if module is not None:
        _wrap(module, backend)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(backend))


class _Finder:
    """Wraps the choice of backends as soon as the module has been imported."""

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
            _wrap(module, self._backend)

        spec.loader.exec_module = execute_and_wrap
        return spec


def _wrap(module: ModuleType, backend: str) -> None:
    state = getattr(module, "PartialState", None)
    choose = getattr(state, "_prepare_backend", None)
    # A version of accelerate that is built otherwise stays as it is.
    if choose is None or hasattr(choose, "__wrapped__"):
        return

    @functools.wraps(choose)
    def choose_or_accept(self: Any, cpu: bool = False, sagemaker_dp: bool = False, wanted: str | None = None) -> Any:
        chosen, kind = choose(self, cpu, sagemaker_dp, wanted)
        return (backend if wanted == backend else chosen), kind

    state._prepare_backend = choose_or_accept

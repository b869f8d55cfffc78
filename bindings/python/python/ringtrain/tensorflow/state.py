"""Horovod's functions that send variables and objects from one rank to all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ringtrain._horovod import objects
from ringtrain._horovod.process_sets import ProcessSet, global_process_set
from ringtrain._horovod.variables import broadcast_arrays


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> None:
    """Copies the root's values of variables of TensorFlow or Keras to all ranks. Raises `ringtrain.InvalidArgument` on all ranks
    if the ranks have different variables; the error names the variable. `inplace` has no effect."""
    found = list(variables)
    arrays = [(getattr(variable, "path", variable.name), np.asarray(variable.numpy())) for variable in found]
    for variable, value in zip(found, broadcast_arrays(process_set.members(), arrays, root_rank), strict=True):
        variable.assign(value)


def broadcast_global_variables(root_rank: int) -> None:
    """Raises NotImplementedError: TensorFlow 2 has no list of all variables."""
    raise NotImplementedError(
        "broadcast_global_variables is not implemented, because TensorFlow 2 has no list of all variables; use "
        "broadcast_variables"
    )


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the root's object on every rank."""
    if session is not None:
        raise NotImplementedError("broadcast_object(session) is not implemented: sessions belong to TensorFlow 1")
    return objects.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any, session: None = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns every rank's object, in rank order."""
    if session is not None:
        raise NotImplementedError("allgather_object(session) is not implemented: sessions belong to TensorFlow 1")
    return objects.allgather_object(obj, name, process_set)

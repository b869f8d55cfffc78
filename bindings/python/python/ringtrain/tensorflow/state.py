"""Horovod's functions that send variables and objects from one rank to all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from ringtrain._horovod import objects
from ringtrain._horovod.process_sets import ProcessSet, global_process_set
from ringtrain._horovod.variables import broadcast_arrays
from ringtrain.tensorflow.host import call_on_host


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> None:
    """Copies the root's values of variables of TensorFlow or Keras to all ranks. Raises `ringtrain.InvalidArgument` on all ranks
    if the ranks have different variables; the error names the variable. `inplace` has no effect."""
    broadcast_(variables, root_rank, process_set=process_set)


def broadcast_(
    variables: Iterable[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Does what `broadcast_variables` does, and returns the values. `name` has no effect."""
    found = list(variables)
    names = [getattr(variable, "path", variable.name) for variable in found]
    tensors = [tf.convert_to_tensor(variable) for variable in found]

    def on_host(*arrays: Any) -> list[Any]:
        return broadcast_arrays(process_set.members(), list(zip(names, arrays, strict=True)), root_rank)

    values = call_on_host(on_host, tensors, [tensor.dtype for tensor in tensors], [tensor.shape for tensor in tensors])
    for variable, value in zip(found, values, strict=True):
        variable.assign(value)
    return values


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

"""Horovod's operations on single values, and broadcasts of variables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from ringtrain._horovod import operations
from ringtrain._horovod.compression import Compression
from ringtrain._horovod.operations import Average, Reduction, reduction_name
from ringtrain._horovod.process_sets import ProcessSet, global_process_set
from ringtrain._horovod.variables import broadcast_arrays


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: str | None = None,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the reduction of a number, an array or a tensor over all ranks as a numpy array. The default is the average."""
    reduction = Reduction(reduction_name(average, op), prescale_factor, postscale_factor, compression)
    return operations.begin_all_reduce(_as_numpy(value), reduction, name, process_set).wait()


def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Returns the ranks' arrays, concatenated along the first dimension, as a numpy array."""
    return operations.begin_all_gather(_as_numpy(value), name, process_set).wait()[0]


def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Returns the root's array as a numpy array."""
    return operations.begin_broadcast(_as_numpy(value), root_rank, name, process_set).wait()


def reducescatter(value: Any, name: str | None = None, op: str = Average, process_set: ProcessSet = global_process_set) -> Any:
    """Reduces the arrays of all ranks, and returns this rank's part of the rows as a numpy array."""
    reduction = Reduction(reduction_name(None, op))
    return operations.begin_reduce_scatter(_as_numpy(value), reduction, name, process_set).wait()


def broadcast_global_variables(root_rank: int) -> None:
    """Raises NotImplementedError: Keras 3 has no list of all variables."""
    raise NotImplementedError(
        "broadcast_global_variables is not implemented, because Keras 3 has no list of all variables; use "
        "broadcast_variables(model.variables, root_rank) or callbacks.BroadcastGlobalVariablesCallback(root_rank)"
    )


def broadcast_variables(variables: Iterable[Any], root_rank: int = 0, process_set: ProcessSet = global_process_set) -> None:
    """Copies the root's values of variables of Keras to all ranks. Raises `ringtrain.InvalidArgument` on all ranks if the ranks
    have different variables."""
    found = list(variables)
    arrays = [(variable.path, _as_numpy(variable)) for variable in found]
    for variable, value in zip(found, broadcast_arrays(process_set.members(), arrays, root_rank), strict=True):
        variable.assign(value)


def _as_numpy(value: Any) -> Any:
    return keras.ops.convert_to_numpy(value) if keras.ops.is_tensor(value) or hasattr(value, "numpy") else np.asarray(value)

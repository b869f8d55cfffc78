"""Averages lists of gradients of TensorFlow over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringtrain._horovod.operations import Average, Reduction, Sum
from ringtrain._horovod.process_sets import ProcessSet
from ringtrain._horovod.reducer import ArrayReducer, ReducerSettings
from ringtrain.tensorflow import operations
from ringtrain.tensorflow.host import call_on_host

FindReducer = Callable[[Sequence[Any], Sequence[Any]], ArrayReducer]
"""Returns the reducer for gradients of these variables, with these types."""


def reduce_gradients(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    find_reducer: FindReducer,
    settings: ReducerSettings,
    process_set: ProcessSet,
    sparse_as_dense: bool,
) -> list[Any]:
    """Returns the reduced gradients. Sparse gradients are gathered. In eager mode, a gradient that only other ranks have counts
    as zero on this rank. In a graph, a gradient that is None is None on all ranks, because they run the same function."""
    gradients = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) and sparse_as_dense else g for g in gradients]
    results = list(gradients)
    sparse = [index for index, gradient in enumerate(gradients) if isinstance(gradient, tf.IndexedSlices)]
    for index in sparse:
        results[index] = operations._allreduce_slices(gradients[index], Reduction(settings.op), None, process_set)
    dense = [index for index in range(len(gradients)) if index not in sparse]
    if not tf.executing_eagerly():
        dense = [index for index in dense if gradients[index] is not None]
    if dense:
        reducer = find_reducer(
            [variables[index] for index in dense],
            [tf.as_dtype(variables[index].dtype if gradients[index] is None else gradients[index].dtype) for index in dense],
        )
        reduced = _reduce_dense(reducer, [gradients[index] for index in dense])
        for index, gradient in zip(dense, reduced, strict=True):
            results[index] = gradient
    return results


def _reduce_dense(reducer: ArrayReducer, gradients: Sequence[Any]) -> list[Any]:
    if tf.executing_eagerly():
        arrays = reducer.reduce([None if gradient is None else np.asarray(gradient) for gradient in gradients])
        return [None if array is None else tf.convert_to_tensor(array) for array in arrays]
    # One call for each bucket begins its reduction while TensorFlow computes the other gradients. Only the last call waits.
    begun = [_begin_bucket(reducer, positions, gradients) for positions in reducer.bucket_positions]

    def finish(*_: Any) -> list[Any]:
        return reducer.finish()

    return call_on_host(finish, begun, [g.dtype for g in gradients], [g.shape for g in gradients])


def _begin_bucket(reducer: ArrayReducer, positions: Sequence[int], gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    def begin(*arrays: Any) -> list[Any]:
        for position, array in zip(positions, arrays, strict=True):
            reducer.take(position, array)
        return [np.int32(0)]

    return call_on_host(begin, [gradients[position] for position in positions], [tf.int32], [[]])[0]


def check_op(op: str, predivide: float) -> None:
    """Raises NotImplementedError or ValueError for reductions that gradients do not have."""
    if op not in (Average, Sum):
        raise NotImplementedError(f"gradients can be reduced with Average and Sum, not {op!r}")
    if predivide != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")

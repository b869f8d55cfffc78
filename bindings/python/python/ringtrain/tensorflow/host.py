"""Runs functions of numpy arrays on tensors, in eager mode and inside `tf.function`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


def call_on_host(
    function: Callable[..., Sequence[Any]], tensors: Sequence[tf.Tensor], types: Sequence[tf.DType], shapes: Sequence[Any]
) -> list[tf.Tensor]:
    """Calls a function with numpy arrays, and returns its results as tensors of these types and shapes. In eager mode, the
    function runs at once. In a graph, `tf.numpy_function` calls the function when the graph runs; the calls in one graph run in
    the order of the program. TensorFlow passes tensors on the CPU without a copy. An exception of the function becomes
    `tf.errors.UnknownError` or a similar error of TensorFlow in a graph, with the same text."""
    if tf.executing_eagerly():
        results = function(*(np.asarray(tensor) for tensor in tensors))
        return [tf.convert_to_tensor(result, dtype) for result, dtype in zip(results, types, strict=True)]
    results = tf.numpy_function(lambda *arrays: tuple(function(*arrays)), list(tensors), list(types))
    # With one result, `numpy_function` may return a tensor instead of a list.
    results = list(results) if isinstance(results, (list, tuple)) else [results]
    for tensor, shape in zip(results, shapes, strict=True):
        tensor.set_shape(shape)
    return results

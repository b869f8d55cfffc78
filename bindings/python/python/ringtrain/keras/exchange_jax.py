"""The exchange of gradients with the back end JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from ringtrain.keras.exchange import GradientExchange


def reduce_gradients(exchange: GradientExchange, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Averages the gradients over the ranks. In a function that JAX compiles, a callback to the host does this when all gradients
    are known. The trainer calls JAX's functional gradient, which has no gradients that are None."""
    present = [index for index, gradient in enumerate(gradients) if gradient is not None]
    used = [gradients[index] for index in present]
    reducer = exchange.reducer_for([variables[index] for index in present], [gradient.dtype for gradient in used])

    def on_host(*arrays: Any) -> tuple[Any, ...]:
        return tuple(exchange.reduce_arrays(reducer, arrays))

    if any(isinstance(gradient, jax.core.Tracer) for gradient in used):
        shapes = tuple(jax.ShapeDtypeStruct(gradient.shape, gradient.dtype) for gradient in used)
        reduced = io_callback(on_host, shapes, *used)
    else:
        reduced = [jax.numpy.asarray(array) for array in on_host(*(np.asarray(gradient) for gradient in used))]
    results = list(gradients)
    for index, gradient in zip(present, reduced, strict=True):
        results[index] = gradient
    return results

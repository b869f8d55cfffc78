"""The exchange of gradients with the back end TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringtrain.keras.exchange import GradientExchange
from ringtrain.tensorflow import gradients as tensorflow_gradients


def reduce_gradients(exchange: GradientExchange, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Averages the gradients over the ranks. In a graph, this overlaps with the backward pass."""
    settings = exchange.settings

    def find_reducer(some: Sequence[Any], types: Sequence[Any]) -> Any:
        return exchange.reducer_for(some, [dtype.as_numpy_dtype for dtype in types])

    return tensorflow_gradients.reduce_gradients(
        gradients, variables, find_reducer, settings.reducer, settings.process_set, settings.sparse_as_dense
    )
